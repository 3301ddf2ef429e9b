"""What does an engine tell its peers about itself?

1. ``RankManifest``: where a rank's region lies, how it is laid out, and what the transport needs to reach it.
2. ``Factors``: named facts that two engines must agree on, with a fingerprint; geometry is not among them, the
   planner compares that tensor by tensor.
3. ``EngineManifest``: all ranks of one start of one engine. ``refuse_incompatible`` compares two: the handshake.

Schema rules: a new field has a default; no field is renamed, reordered or retyped; unknown fields are ignored.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, msgpack

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.errors import IncompatibleError
from hybrid_connector.core.planning import plan_engine

MAX_RANKS = 4096

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Address = Annotated[int, Meta(gt=0)]
Factor = tuple[Annotated[str, Meta(min_length=1, max_length=128)], Annotated[str, Meta(max_length=1024)]]


class RankManifest(Struct, frozen=True):
    """One rank: ``pp_rank * tp_size + tp_rank`` is its position in the engine.

    Byte ``x`` of ``layout``'s region lies at ``region_address + x`` in ``memory`` of ``device``. ``identity`` is what
    the transport named ``transport`` needs to add this rank as a peer.
    """

    rank: Count
    layout: RankLayout
    region_address: Address
    memory: Literal["DRAM", "VRAM"]
    device: Count
    transport: Name
    identity: Annotated[bytes, Meta(min_length=1, max_length=2**20)]

    def __post_init__(self) -> None:
        if self.layout.rank != self.rank:
            raise ValueError(f"rank {self.rank}: its layout says rank {self.layout.rank}")
        end = self.region_address + self.layout.region_bytes
        if self.layout.region_bytes <= 0 or end > 2**63:
            raise ValueError(
                f"rank {self.rank}: expected a region of at least one byte below 2**63, "
                f"got {self.layout.region_bytes} bytes at {self.region_address:#x}"
            )


class Factors(Struct, frozen=True):
    """Named facts that two engines must agree on, sorted by name: model, revision, cache dtypes, speculative decoding.

    Names are for people, as they appear in the refusal. The vLLM version is not one of them.
    """

    items: Annotated[tuple[Factor, ...], Meta(max_length=256)]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.items]
        if names != sorted(set(names)):
            raise ValueError(f"expected factors sorted by name, each once, got {names}")
        for name, value in self.items:
            if not (name.isprintable() and value.isprintable()):
                raise ValueError(f"expected printable factors, got {name!r}: {value!r}")

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> "Factors":
        """``Factors.of({"layers": 48, "dtype of temporal state": "float32"})``; values are compared as text."""
        return cls(tuple(sorted((name, str(value)) for name, value in facts.items())))

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over the MessagePack encoding of ``items``: equal exactly where the factors are."""
        return hashlib.sha256(msgpack.encode(self.items)).hexdigest()


def refuse_difference(ours: Factors, theirs: Factors) -> None:
    """Raise ``IncompatibleError`` naming every factor that differs, where ``ours`` is D's and ``theirs`` is P's."""
    on_d, on_p = dict(ours.items), dict(theirs.items)
    differences = [
        f"{name}: {on_p.get(name, 'not stated')} on P, {on_d.get(name, 'not stated')} on D"
        for name in sorted(on_d.keys() | on_p.keys())
        if on_d.get(name) != on_p.get(name)
    ]
    if differences:
        raise IncompatibleError("; ".join(differences))


class EngineManifest(Struct, frozen=True):
    """One start of one engine.

    ``incarnation`` is random per start, so a restarted engine is told from its former self even where ``engine_id``
    and address stay the same. ``vllm_version`` and ``connector_version`` are for people; nothing compares them.
    ``lease_s``: for how long a finished request's blocks are kept unless the lease is renewed.
    """

    protocol_version: Annotated[int, Meta(ge=1, lt=2**31)]
    engine_id: Name
    incarnation: Name
    tp_size: Annotated[int, Meta(ge=1, lt=2**31)]
    factors: Factors
    vllm_version: Annotated[str, Meta(max_length=512)]
    connector_version: Annotated[str, Meta(max_length=512)]
    lease_s: Annotated[float, Meta(gt=0, le=1e9)]
    ranks: Annotated[tuple[RankManifest, ...], Meta(min_length=1, max_length=MAX_RANKS)]

    def __post_init__(self) -> None:
        if not self.ranks or [rank.rank for rank in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(
                f"{self.engine_id}: expected ranks 0, 1, ... in order, got {[rank.rank for rank in self.ranks]}"
            )
        if self.tp_size < 1 or len(self.ranks) % self.tp_size:
            raise ValueError(
                f"{self.engine_id}: expected whole pipeline stages, got {len(self.ranks)} ranks, tp_size {self.tp_size}"
            )
        if not (math.isfinite(self.lease_s) and self.lease_s > 0):
            raise ValueError(f"{self.engine_id}: expected lease_s > 0, got {self.lease_s}")
        num_groups = [len(rank.layout.groups) for rank in self.ranks]
        if len(set(num_groups)) > 1:
            raise ValueError(
                f"{self.engine_id}: a grant has block ids per cache group, the ranks have {num_groups} groups"
            )

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return len(self.ranks) // self.tp_size


def refuse_incompatible(ours: EngineManifest, theirs: EngineManifest) -> None:
    """Raise ``IncompatibleError``, naming why, where ``ours``, of D, cannot load what ``theirs``, of P, holds."""
    refuse_difference(ours.factors, theirs.factors)
    for rank in theirs.ranks:
        if rank.transport != ours.ranks[0].transport:
            raise IncompatibleError(f"transport: {rank.transport} on P, {ours.ranks[0].transport} on D")
    plan_engine([rank.layout for rank in ours.ranks], [rank.layout for rank in theirs.ranks])
