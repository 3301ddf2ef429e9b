"""Do the peers answer, do they let us in, and would P and D exchange state?

1. ``meet``: who listens at an address, whose secret it has, its manifest, and how long an answer takes.
2. ``check_leases``: asks for a lease that nobody holds; the refusal is the answer of a working path.
3. ``check_pair``: the handshake that D would make with P, made here.
"""

import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hybrid_connector import __version__
from hybrid_connector.core.errors import HybridConnectorError, IncompatibleError
from hybrid_connector.tools.checks.finding import Finding, ok, problem, skipped, warning
from hybrid_connector.tools.manifests import PLANNED_INCARNATION
from hybrid_connector.wire.manifest import EngineManifest, Factors, refuse_incompatible
from hybrid_connector.wire.messages import (
    PROTOCOL_VERSION,
    Acquire,
    Hello,
    RefusalReason,
    Refused,
    Release,
    Reply,
    Request,
    Welcome,
)
from hybrid_connector.wire.probe import Found, Listener, probe
from hybrid_connector.wire.security import SECRET_VARIABLE, Security
from hybrid_connector.wire.side_channel import SideChannelClient
from hybrid_connector.wire.sockets import Address

NUM_HELLOS = 5
SLOW_FRACTION = 0.05
"""Of a lease's time. It is renewed after a third of it, with two more tries: answers must be far quicker than that."""

_TODO = {
    Listener.NOBODY: "start P, check host and port (P's log says where it answers), and let the port through firewalls",
    Listener.NO_SIDE_CHANNEL: "give the side channel's port (VLLM_NIXL_SIDE_CHANNEL_PORT, or 5600), not the API's",
    Listener.WANTS_SECRET: f"set {SECRET_VARIABLE} to P's secret",
    Listener.HAS_NO_SECRET: f"give P the same secret, or unset {SECRET_VARIABLE} here and on D",
    Listener.OTHER_SECRET: f"set {SECRET_VARIABLE} to the same secret on P and D; mind quotes and line ends",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """An address, what was found there, and the manifest where the engine gave one."""

    address: Address
    findings: tuple[Finding, ...]
    manifest: EngineManifest | None = None

    @property
    def where(self) -> str:
        return str(self.address)


def meet(address: Address, security: Security | None, timeout_s: float) -> Peer:
    """Everything that can be checked with one prefill engine's side channel."""
    found = probe(address, security, timeout_s)
    findings = check_listener(found, str(address))
    if found.listener is not Listener.OPEN:
        return Peer(address, (*findings, skipped("handshake", "no connection", "mend that first", str(address))))
    with SideChannelClient(security=security) as client:
        finding, manifest = _greet(client, address, timeout_s)
        findings.append(finding)
        if manifest is not None:
            findings += [check_connector_version(manifest, str(address))]
            findings += check_leases(client, address, manifest, timeout_s)
    return Peer(address, tuple(findings), manifest)


def check_listener(found: Found, where: str) -> list[Finding]:
    """Reachability, and security where there is a side channel to secure."""
    if found.listener in (Listener.NOBODY, Listener.NO_SIDE_CHANNEL):
        return [problem("reachability", found.detail, _TODO[found.listener], where)]
    reached = ok("reachability", f"connected in {found.connect_s * 1e3:.1f} ms", where)
    if found.listener is not Listener.OPEN:
        return [reached, problem("security", found.detail, _TODO[found.listener], where)]
    return [reached, ok("security", found.detail, where)]


def _greet(client: SideChannelClient, address: Address, timeout_s: float) -> tuple[Finding, EngineManifest | None]:
    """Several Hellos, and what the last one brought."""
    check, where = "handshake", str(address)
    round_trips: list[float] = []
    while True:
        try:
            reply, seconds = _ask(client, address, Hello(PROTOCOL_VERSION), timeout_s)
        except HybridConnectorError as error:
            todo = (
                "another program may listen there, such as vLLM's own NixlConnector; else see P's log and whether its "
                "host is overloaded"
            )
            return problem(check, str(error), todo, where), None
        if isinstance(reply, Refused):
            return _refused_hello(reply, where), None
        assert isinstance(reply, Welcome)
        round_trips.append(seconds)
        if len(round_trips) == NUM_HELLOS:
            break
    manifest = reply.manifest
    what = f"engine {manifest.engine_id}, {_say_ranks(manifest)}; an answer takes {_say_ms(round_trips)}"
    return ok(check, what, where), manifest


def _refused_hello(reply: Refused, where: str) -> Finding:
    what = f"refused: {reply.reason}: {reply.detail}"
    if reply.reason is RefusalReason.UNSUPPORTED_PROTOCOL:
        return problem("handshake", what, "install the same release of hybrid-connector on P and D", where)
    if reply.retry_after_s is not None:
        return problem("handshake", what, "wait until P has started, and ask again", where)
    return problem("handshake", what, "see P's log", where)


def check_connector_version(manifest: EngineManifest, where: str) -> Finding:
    """For people: engines compare protocols, not versions."""
    what = f"hybrid-connector {manifest.connector_version}, vLLM {manifest.vllm_version}"
    if manifest.connector_version == __version__:
        return ok("versions", what, where)
    todo = "nothing as long as the handshake is well; use one release where you can"
    return warning("versions", f"{what}; here it is {__version__}", todo, where)


def check_leases(
    client: SideChannelClient, address: Address, manifest: EngineManifest, timeout_s: float
) -> list[Finding]:
    """Acquire and Release of a lease that does not exist must be refused as unknown, by the engine that was greeted."""
    check, where = "lease round trip", str(address)
    request_id, token, holder = (f"doctor-{secrets.token_hex(8)}" for _ in range(3))
    seconds = []
    for request in (Acquire(request_id, token, holder), Release(request_id, token, holder)):
        verb = type(request).__name__
        try:
            reply, took_s = _ask(client, address, request, timeout_s)
        except HybridConnectorError as error:
            return [problem(check, f"{verb}: {error}", "see P's log, and whether its host is overloaded", where)]
        if reply.incarnation != manifest.incarnation:
            todo = "see why P restarts, or why one address leads to several engines: each needs one of its own"
            return [problem(check, f"{verb} was answered by another start of the engine than Hello", todo, where)]
        if not isinstance(reply, Refused) or reply.reason is not RefusalReason.UNKNOWN:
            todo = "report it: expected a refusal, unknown"
            return [problem(check, f"{verb} of a lease that nobody has: {reply!a:.200}", todo, where)]
        seconds.append(took_s)
    return [check_lease_time(max(seconds), manifest.lease_s, where)]


def check_lease_time(slowest_s: float, lease_s: float, where: str) -> Finding:
    """Each side measures on its own clock from before it asked, so only the way's length counts."""
    what = f"{slowest_s * 1e3:.1f} ms; leases last {lease_s:g} s from when D asks, on D's own clock"
    if slowest_s <= lease_s * SLOW_FRACTION:
        return ok("lease round trip", what, where)
    return warning("lease round trip", what, "raise lease_s on P, or see what delays the side channel", where)


def check_pair(name: str, decode: EngineManifest, peer: Peer) -> Finding:
    """The handshake of ``decode``, called ``name``, with a peer; what a planned manifest does not state is left out."""
    check = f"handshake of {name}"
    if peer.manifest is None:
        return skipped(check, "this engine gave no manifest", "mend that first", peer.where)
    prefill, note = peer.manifest, ""
    if decode.incarnation == PLANNED_INCARNATION:
        prefill, left_out = _stated(prefill, decode.factors)
        note = f"; not compared, because {name} is planned: {', '.join(left_out)}"
    try:
        refuse_incompatible(ours=decode, theirs=prefill)
    except IncompatibleError as error:
        todo = f"make both sides agree; hybrid-connector explain {peer.where} {name} shows tensor by tensor"
        return problem(check, f"D refuses P: {error}", todo, peer.where)
    return ok(check, f"{_say_ranks(prefill)} to {_say_ranks(decode)}: state can be exchanged{note}", peer.where)


def check_pairs(decodes: Sequence[tuple[str, EngineManifest]], peers: Sequence[Peer]) -> list[Finding]:
    """Every D with every P. Without a D, one P is asked to read from each other: what reads from one reads from all."""
    if decodes:
        return [check_pair(name, decode, peer) for name, decode in decodes for peer in peers]
    met = [peer for peer in peers if peer.manifest is not None]
    if len(met) < 2 or met[0].manifest is None:
        return []
    return [check_pair(met[0].where, met[0].manifest, other) for other in met[1:]]


def _stated(manifest: EngineManifest, asked: Factors) -> tuple[EngineManifest, list[str]]:
    """``manifest`` with the factors that ``asked`` has too, and the names of the others."""
    names = {name for name, _ in asked.items}
    kept = tuple(item for item in manifest.factors.items if item[0] in names)
    left_out = [name for name, _ in manifest.factors.items if name not in names]
    return msgspec.structs.replace(manifest, factors=Factors(kept)), left_out


def _ask(client: SideChannelClient, address: Address, request: Request, timeout_s: float) -> tuple[Reply, float]:
    began = time.perf_counter()
    reply = client.call(address, request, timeout_s).result()
    return reply, time.perf_counter() - began


def _say_ranks(manifest: EngineManifest) -> str:
    return f"TP {manifest.tp_size}, PP {manifest.pp_size}"


def _say_ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms (median of {len(seconds)}, {max(seconds) * 1e3:.2f} at most)"
