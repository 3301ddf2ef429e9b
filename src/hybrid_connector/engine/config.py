"""What can an operator set, and where? One frozen struct from ``kv_connector_extra_config``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.transport.cost import DEFAULTS, Cost, Staging
from hybrid_connector.transport.staging import MIN_STAGING_BYTES

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
StagingBytes = Annotated[int, msgspec.Meta(ge=MIN_STAGING_BYTES, le=2**40)]


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the connector, with their defaults.

    lease_s: seconds P keeps a finished request's blocks for its reader; renewed while the reader waits.
    handshake_timeout_s: seconds D waits for a peer's answer before it asks again.
    acquire_timeout_s: seconds from a request's arrival on D until its grant must have come; D asks again until then.
    allow_insecure_side_channel: serve beyond loopback without a shared secret.
    model_id: a name for the weights that P and D must agree on, instead of a fingerprint of the weight files.
    kv_cache_layout: the order of layers, blocks, heads, tokens in memory; "auto" is head before token, layers apart.
    verify: compare P's and D's digests of the bytes of no request, of one in 16, or of all before it counts as loaded.
    staging: read whole pages into a buffer and copy what is wanted from there: where that is cheaper, never, or
        wherever pages differ.
    staging_bytes: size of that buffer on each rank of D, taken when a P engine with other pages is met; none is 256 MiB
        on a GPU, 64 MiB on a CPU.
    cost: what reads cost before any was seen: cuda_ipc, rdma, shared_memory, tcp, or figures as "30,0.5,45"
        (microseconds, microseconds a descriptor, GB/s); "" is the memory's own transport.
    capture_dir: write the transferred state of every request here, on P and on D (debugging; slow).
    """

    lease_s: Seconds = 30.0
    handshake_timeout_s: Seconds = 5.0
    acquire_timeout_s: Seconds = 20.0
    allow_insecure_side_channel: bool = False
    model_id: str = ""
    kv_cache_layout: Literal["auto", "LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"] = "auto"
    verify: Literal["off", "sample", "all"] = "off"
    staging: Staging = "auto"
    staging_bytes: StagingBytes | None = None
    cost: str = ""
    capture_dir: str | None = None

    @property
    def start_cost(self) -> Cost | None:
        """``cost`` as figures; ``None`` for auto. Raises ``ConfigError``."""
        if not self.cost:
            return None
        return DEFAULTS[self.cost] if self.cost in DEFAULTS else Cost.parse(self.cost)


def decode_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """``kv_connector_extra_config`` as a struct.

    Raises ``ConfigError`` for an unknown key (lists the known ones) and for a value of the wrong type or range.
    """
    known = ConnectorConfig.__struct_fields__
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: unknown key {', '.join(map(repr, unknown))}; known keys are {', '.join(known)}"
        )
    try:
        config = msgspec.convert(dict(extra), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
    try:
        _ = config.start_cost
    except ConfigError as error:
        names = ", ".join(sorted(DEFAULTS))
        raise ConfigError(f"kv_connector_extra_config: cost: expected one of {names}, or: {error}") from error
    return config
