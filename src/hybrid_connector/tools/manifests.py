"""Where do manifests come from, apart from the handshake?

1. ``fetch_manifest``: from a file, or from an engine that listens.
2. ``save_manifest`` and ``read_manifest``: the file, JSON.
3. ``planned_manifest``: what an engine would say that does not run.
"""

import os
from pathlib import Path

import msgspec

from hybrid_connector import __version__
from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.models.engine import Engine
from hybrid_connector.wire.manifest import EngineManifest, RankManifest
from hybrid_connector.wire.messages import PROTOCOL_VERSION, Hello, Refused, Welcome
from hybrid_connector.wire.side_channel import Security, SideChannelClient, load_secret

PLANNED_INCARNATION = "planned"
_PLANNED_ADDRESS = 2**20


def fetch_manifest(where: str, timeout_s: float) -> EngineManifest:
    """The manifest in a file, or of an engine that listens. Raises ``ConfigError``, ``PeerError`` or ``WireError``."""
    path = Path(where)
    if path.is_file():
        return read_manifest(path)
    host, colon, port = where.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ConfigError(f"{where}: expected a manifest's file, or HOST:PORT of a side channel")
    secret = load_secret(os.environ)
    client = SideChannelClient(security=None if secret is None else Security.from_secret(secret))
    try:
        reply = client.call((host.strip("[]"), int(port)), Hello(PROTOCOL_VERSION), timeout_s).result()
    except PeerError as error:
        why = "the secret is not the engine's" if secret is not None else "it wants a secret (HYBRID_CONNECTOR_SECRET)"
        raise PeerError(
            f"{error}; either nothing listens there, or {why}, or it is a decode engine that was "
            "not given VLLM_NIXL_SIDE_CHANNEL_PORT: give its manifest as a file"
        ) from error
    finally:
        client.close()
    if isinstance(reply, Refused):
        raise PeerError(f"{where}: {reply.reason}: {reply.detail}")
    assert isinstance(reply, Welcome)
    return reply.manifest


def read_manifest(path: Path) -> EngineManifest:
    """What ``save_manifest`` wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineManifest)
    except (OSError, msgspec.DecodeError) as error:  # a value that cannot be is a ValidationError, one of these
        raise ConfigError(f"{path}: expected an engine's manifest: {error}") from error


def save_manifest(manifest: EngineManifest, path: Path) -> None:
    """As JSON, for people too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def planned_manifest(name: str, engine: Engine, num_blocks: int) -> EngineManifest:
    """What ``engine`` would tell its peers, addresses made up; what only a running engine knows is not stated."""
    return EngineManifest(
        protocol_version=PROTOCOL_VERSION,
        engine_id=name,
        incarnation=PLANNED_INCARNATION,
        tp_size=engine.settings.tp,
        factors=engine.factors,
        vllm_version="planned by the rules of 0.32",
        connector_version=__version__,
        lease_s=30.0,
        ranks=tuple(
            RankManifest(
                layout.rank,
                layout,
                _PLANNED_ADDRESS,
                "VRAM" if engine.settings.device == "cuda" else "DRAM",
                0,
                "nixl",
                b"planned",
            )
            for layout in engine.layouts(num_blocks)
        ),
    )
