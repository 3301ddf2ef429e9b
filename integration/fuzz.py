"""Does a side channel server survive whatever is sent to it, and serve honest engines meanwhile?

1. Servers in processes of their own, with a manifest and leases as an engine has them.
2. Attackers send frames through real sockets, random, mutated, truncated, oversized and replayed: to an open server, to
   a protected one as who has the secret and as who has not, and more valid ones than a server takes.
3. Meanwhile honest clients, a new one each time, shake hands. The slowest counts.
4. Every server's memory is read after a tenth of its frames, one message that does not end among them, and at the end.

`python integration/fuzz.py` prints a row and exits 1 if anything of that went wrong.
"""

import argparse
import json
import logging
import os
import random
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from hybrid_connector.core.blocks import Group, Layer, RankLayout
from hybrid_connector.core.errors import PeerError
from hybrid_connector.core.families import Attention, ElementType, TokenPage
from hybrid_connector.core.pace import Rate
from hybrid_connector.engine.producer import Producer
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest
from hybrid_connector.wire.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Acquire,
    Hello,
    Release,
    Renew,
    Welcome,
    encode,
)
from hybrid_connector.wire.side_channel import Address, Limits, Security, SideChannelClient, SideChannelServer

SECRET, OTHER_SECRET = "the secret of both engines", "the secret of somebody else"
MAX_HANDSHAKE_S = 1.0
MAX_GROWTH_MIB = 32.0
PATIENCE_S = 30.0
LAST = b"the-last"
"""The call id of the message that an attacker waits for."""

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + b"%s" + bytes(32)
SHARES = {"open": 0.5, "member": 0.15, "stranger": 0.05, "flood": 0.3}
"""Which attacker sends how much of it."""

Message = list[bytes]


@dataclass(slots=True)
class Report:
    """What was sent and what came of it. A frame is a message of one or more frames, or a burst of raw bytes.

    ``rss_before_mib``, ``rss_after_mib``: by attacker. ``stranger_bytes``: what strangers got beyond the greeting.
    """

    num_frames: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)
    rss_before_mib: dict[str, float] = field(default_factory=dict)
    rss_after_mib: dict[str, float] = field(default_factory=dict)
    handshakes_s: list[float] = field(default_factory=list)
    stranger_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def growth_mib(self) -> float:
        """Of the server whose memory grew most."""
        growths = (self.rss_after_mib[name] - self.rss_before_mib[name] for name in self.rss_after_mib)
        return max(growths, default=float("nan"))

    def row(self) -> str:
        times_ms = sorted(1e3 * seconds for seconds in self.handshakes_s) or [float("nan")]
        return (
            f"{self.num_frames} frames ({', '.join(f'{n} {kind}' for kind, n in sorted(self.kinds.items()))}) in "
            f"{self.seconds:.0f} s | memory {self.growth_mib:+.1f} MiB | {len(self.handshakes_s)} handshakes, median "
            f"{statistics.median(times_ms):.0f} ms, slowest {times_ms[-1]:.0f} ms | strangers got "
            f"{self.stranger_bytes} bytes | {', '.join(f'{name} {n}' for name, n in self.stats.items() if n)} | "
            f"{'; '.join(self.problems) or 'all well'}"
        )


def run(num_frames: int = 100_000, seed: int = 1) -> Report:
    """Send at least ``num_frames`` from all attackers, one after the other; never raises for what a server did."""
    report = Report()
    began = time.monotonic()
    for name, share in SHARES.items():
        try:
            _attack(name, max(100, round(num_frames * share)), random.Random(f"{seed} {name}"), report)
        except (OSError, zmq.ZMQError, PeerError, ValueError) as error:
            report.problems.append(f"{name}: {type(error).__name__}: {error}")
    report.seconds = time.monotonic() - began
    _judge(report)
    return report


def _judge(report: Report) -> None:
    def expect(right: bool, problem: str) -> None:
        if not right:
            report.problems.append(problem)

    expect(bool(report.handshakes_s), "no handshake was served")
    slowest_s = max(report.handshakes_s, default=0.0)
    expect(slowest_s <= MAX_HANDSHAKE_S, f"a handshake took {slowest_s:.2f} s, expected at most {MAX_HANDSHAKE_S:g} s")
    for name in report.rss_after_mib:
        growth = report.rss_after_mib[name] - report.rss_before_mib[name]
        expect(
            growth <= MAX_GROWTH_MIB, f"{name}: memory grew by {growth:.0f} MiB, expected {MAX_GROWTH_MIB:g} at most"
        )
    expect(report.stranger_bytes == 0, f"strangers got {report.stranger_bytes} bytes")
    for fault in ("faults", "answer_failed"):
        expect(report.stats[fault] == 0, f"{report.stats[fault]} {fault}")


def _attack(name: str, num_frames: int, dice: random.Random, report: Report) -> None:
    is_protected = name != "open"
    with _server(is_protected, has_limits=name == "flood") as server, _honest_clients(server, report) as check:
        attacker = {"open": _as_peer, "member": _as_peer, "stranger": _as_stranger, "flood": _as_flood}[name]
        for is_warm_up, share in ((True, num_frames // 10), (False, num_frames - num_frames // 10)):
            if is_warm_up and attacker is _as_peer:
                _send_endless(server)
            attacker(server, share, dice, report)
            check()
            facts = server.ask()
            (report.rss_before_mib if is_warm_up else report.rss_after_mib)[name] = facts["rss_mib"]
            report.num_frames += share
        report.stats.update(facts["stats"])


# The attackers.


def _as_peer(server: "_Server", num_frames: int, dice: random.Random, report: Report) -> None:
    """Someone who may talk to the server: its frames reach the decoder."""
    with _dealer(server, Security.from_secret(SECRET) if server.is_protected else None) as dealer:
        sent: list[Message] = []
        for _ in range(num_frames):
            kind = dice.choices(("random", "mutated", "truncated", "oversized", "replayed"), (20, 40, 20, 2, 18))[0]
            report.kinds[kind] += 1
            if kind == "oversized" and dice.random() < 0.5:
                if dice.random() < 0.99:
                    _send_too_large(server, dice)
                else:
                    _send_endless(server)
                continue
            message = _MAKERS[kind](dice, sent)
            if len(sent) < 1000:
                sent.append(message)
            dealer.send_multipart(message)
            _drain(dealer)
        _wait_until_served(dealer)


def _as_flood(server: "_Server", num_frames: int, dice: random.Random, report: Report) -> None:
    """Someone with the secret who asks, from another address, for more than a server takes, and reads no answer."""

    def num_seen() -> int:
        stats = server.ask()["stats"]
        return stats["requests"] + stats["overloaded"] + stats["flood_dropped"]

    seen_before = num_seen()
    with _dealer(server, Security.from_secret(SECRET), source="127.0.0.2") as dealer:
        for _ in range(num_frames):
            report.kinds["flood"] += 1
            dealer.send_multipart([b"call-id.", dice.choice(_VALID)])
        deadline = time.monotonic() + PATIENCE_S
        while num_seen() < seen_before + num_frames:
            if time.monotonic() > deadline:
                raise PeerError(f"the server did not get through a flood of {num_frames} frames in {PATIENCE_S:g} s")
            time.sleep(0.05)


def _as_stranger(server: "_Server", num_frames: int, dice: random.Random, report: Report) -> None:
    """Plain ZeroMQ, another secret, the words of the protocol without keys, and rubbish."""
    curve, null = GREETING % b"CURVE".ljust(20, b"\0"), GREETING % b"NULL".ljust(20, b"\0")
    hello = b"\x04\xc8\x05HELLO\1\0" + bytes(72)
    for i in range(num_frames):
        report.kinds["stranger"] += 1
        if i % 50 == 0:
            with _dealer(server, Security.from_secret(OTHER_SECRET) if i % 100 else None) as dealer:
                dealer.send_multipart([b"call-id.", encode(Hello(PROTOCOL_VERSION))])
                dealer.setsockopt(zmq.RCVTIMEO, 50)
                with suppress(zmq.Again):
                    report.stranger_bytes += sum(map(len, dealer.recv_multipart()))
            continue
        said = dice.choice(
            (
                dice.randbytes(dice.randrange(300)),
                curve + hello + dice.randbytes(120),
                curve + b"\x04\x28\x08INITIATE" + dice.randbytes(31),
                null + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\6DEALER",
                curve[: dice.randrange(64)],
                _mutate(dice, curve + hello),
            )
        )
        report.stranger_bytes += _say(server.address, said, expected=curve)


def _say(address: Address, said: bytes, expected: bytes) -> int:
    """How many bytes came back that are not the greeting ``expected``, or the part of it that came."""
    heard = b""
    with socket.create_connection(address, timeout=PATIENCE_S) as raw, suppress(OSError):
        raw.sendall(said)
        raw.shutdown(socket.SHUT_WR)
        while data := raw.recv(4096):
            heard += data
    return 0 if expected.startswith(heard) else len(heard)


def _send_too_large(server: "_Server", dice: random.Random) -> None:
    """A frame beyond the limit. A protected server ends the connection earlier, for the missing keys."""
    num_bytes = dice.choice((MAX_REQUEST_BYTES + 1, 2**20, 2**31, 2**63))
    with _raw_peer(server) as raw:
        raw.sendall(b"\2" + struct.pack(">Q", num_bytes) + bytes(min(num_bytes, 2**17)))
        while raw.recv(4096):
            pass


def _send_endless(server: "_Server") -> None:
    """Frames within the limit, of a message that does not end."""
    frame = b"\3" + struct.pack(">Q", MAX_REQUEST_BYTES) + bytes(MAX_REQUEST_BYTES)
    with _raw_peer(server) as raw:
        for _ in range(1000):
            raw.sendall(frame)
        while raw.recv(4096):
            pass


@contextmanager
def _raw_peer(server: "_Server") -> Iterator[socket.socket]:
    """The connection of a DEALER without security; that the server ends it is no error."""
    ready, heard = b"\5READY\x0bSocket-Type\0\0\0\6DEALER", b""
    with socket.create_connection(server.address, timeout=1.0) as raw:
        with suppress(OSError):
            raw.sendall(GREETING % b"NULL".ljust(20, b"\0") + b"\4" + bytes([len(ready)]) + ready)
            while b"ROUTER" not in heard and (data := raw.recv(4096)):  # what is sent sooner ends the connection
                heard += data
        with suppress(OSError):
            yield raw


# Messages.

_VALID = [
    encode(message)
    for message in (
        Hello(PROTOCOL_VERSION),
        Hello(7),
        Acquire("cmpl-1", "token", "decode-0"),
        Acquire("cmpl-2", "forged", "decode-0"),
        Renew("cmpl-1", "token", "decode-0"),
        Release("cmpl-9", "token", "decode-0"),
        Acquire("x" * 512, "t" * 128, "h"),
    )
]

_LARGE_BYTES = MAX_REQUEST_BYTES - 64
"""What encryption adds counts as well."""

_MONSTERS = (
    bytes(_LARGE_BYTES),
    b"\xdd\xff\xff\xff\xff",  # an array of 4 billion items
    b"\xdf\xff\xff\xff\xff" + b"\xa1a" * 1000,
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * _LARGE_BYTES,  # arrays within arrays
    b"\x81\xa4type" * 10_000,
    b"\x82\xa4type\xa5hello\xb0protocol_version\xcf" + b"\xff" * 8,
)


def _random(dice: random.Random, _: list[Message]) -> Message:
    return [dice.randbytes(dice.choice((0, 1, 7, 8, 9, dice.randrange(2000)))) for _ in range(dice.randrange(1, 5))]


def _mutated(dice: random.Random, _: list[Message]) -> Message:
    message = [dice.randbytes(8), dice.choice(_VALID)]
    for _ in range(dice.randrange(1, 5)):
        i = dice.randrange(len(message)) if dice.random() < 0.1 else 1
        message[i] = _mutate(dice, message[i])
    return message


def _mutate(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    match dice.randrange(3):
        case 0:
            return data[:at] + dice.randbytes(1) + data[at + 1 :]
        case 1:
            return data[:at] + dice.randbytes(dice.randrange(9)) + data[at:]
        case _:
            return data[:at] + data[at + dice.randrange(9) :]


def _truncated(dice: random.Random, _: list[Message]) -> Message:
    message = [dice.randbytes(8), dice.choice(_VALID)]
    if dice.random() < 0.1:
        return message[:1]
    i = int(dice.random() < 0.9)
    message[i] = message[i][: dice.randrange(len(message[i]))]
    return message


def _oversized(dice: random.Random, _: list[Message]) -> Message:
    """As large as the limit allows, or claiming to be larger."""
    monster = dice.choice(_MONSTERS)
    return [dice.randbytes(8), *[monster] * dice.choice((1, 1, 1, 3, 20))]


def _replayed(dice: random.Random, sent: list[Message]) -> Message:
    return dice.choice(sent) if sent and dice.random() < 0.5 else [b"call-id.", dice.choice(_VALID)]


_MAKERS: dict[str, Callable[[random.Random, list[Message]], Message]] = {
    "random": _random,
    "mutated": _mutated,
    "truncated": _truncated,
    "oversized": _oversized,
    "replayed": _replayed,
}


@contextmanager
def _dealer(server: "_Server", security: Security | None, source: str = "127.0.0.1") -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        for name in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            dealer.setsockopt(name, int(PATIENCE_S * 1000))
        if security is not None:
            security.protect_client(dealer)
        dealer.connect(f"tcp://{source}:0;{server.address}")
        yield dealer
    finally:
        context.destroy(linger=0)


def _wait_until_served(dealer: "zmq.Socket[bytes]") -> None:
    """Until the server has got to what was sent last; what a broken connection lost is sent again."""
    deadline = time.monotonic() + PATIENCE_S
    dealer.setsockopt(zmq.RCVTIMEO, 1000)
    while time.monotonic() < deadline:
        dealer.send_multipart([LAST, encode(Hello(PROTOCOL_VERSION))])
        with suppress(zmq.Again):
            while dealer.recv_multipart()[0] != LAST:
                pass
            return
    raise PeerError(f"an attacker's last question was not answered within {PATIENCE_S:g} s")


def _drain(dealer: "zmq.Socket[bytes]") -> None:
    with suppress(zmq.Again):
        while True:
            dealer.recv_multipart(zmq.NOBLOCK)


# Honest clients.


@contextmanager
def _honest_clients(server: "_Server", report: Report) -> Iterator[Callable[[], None]]:
    """One after the other shakes hands, all the time; gives a function that does it once more and at once."""
    security = Security.from_secret(SECRET) if server.is_protected else None
    is_over = threading.Event()

    def shake_hands() -> None:
        began = time.perf_counter()
        with SideChannelClient(security=security) as client:
            reply = client.call(server.address, Hello(PROTOCOL_VERSION), PATIENCE_S).result(PATIENCE_S)
        if not isinstance(reply, Welcome):
            raise PeerError(f"an honest handshake was answered with {reply}")
        report.handshakes_s.append(time.perf_counter() - began)

    def shake_hands_on() -> None:
        while not is_over.wait(0.05):
            try:
                shake_hands()
            except Exception as error:
                report.problems.append(str(error))

    thread = threading.Thread(target=shake_hands_on)
    thread.start()
    try:
        yield shake_hands
    finally:
        is_over.set()
        thread.join()


# The server's process.


@dataclass(slots=True)
class _Server:
    process: "subprocess.Popen[str]"
    address: Address
    is_protected: bool

    def ask(self) -> dict[str, dict[str, int]]:
        """Its memory and its counts; raises ``ValueError`` where it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def _server(is_protected: bool, has_limits: bool) -> Iterator[_Server]:
    options = [*(["--protected"] if is_protected else []), *(["--limits"] if has_limits else [])]
    source = Path(__file__).resolve().parents[2] / "src"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--serve", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        server = _Server(process, Address("127.0.0.1", 0), is_protected)
        server.address = Address("127.0.0.1", server.ask()["port"])
        try:
            yield server
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


def _serve(is_protected: bool, has_limits: bool) -> None:
    """Answer peers; and for each line on standard input say on standard output how it goes."""
    logging.disable(logging.WARNING)  # what a server says once about rubbish; faults are counted
    producer = Producer(30.0, "first")
    producer.publish(_manifest())
    for i in range(10):
        producer.open(f"cmpl-{i}", "token", ((1, 2),), 17, -1)
    lifted = Rate(1e9, 1e9)
    server = SideChannelServer(
        "127.0.0.1",
        0,
        producer.answer,
        incarnation="first",
        security=Security.from_secret(SECRET) if is_protected else None,
        limits=Limits() if has_limits else Limits(client=lifted, address=lifted),
    )
    with server:
        for _ in sys.stdin:
            print(json.dumps({"port": server.port, "rss_mib": _rss_mib(), "stats": server.stats}), flush=True)


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _manifest() -> EngineManifest:
    element = ElementType("bfloat16", 2)
    page = TokenPage(16, (16 * 64 * 2, 64 * 2, 2))
    layers = tuple(
        Layer(f"layers.{i}", 0, i * 4 * 2048, 2048, Attention(1, 64, element).shards(f"{i}", page, rank=0, num_ranks=1))
        for i in range(48)
    )
    layout = RankLayout(0, 48 * 4 * 2048, (Group(4, 1, 16),), layers)
    rank = RankManifest(0, layout, 4096, "DRAM", 0, "memory", b"rank 0")
    return EngineManifest(
        PROTOCOL_VERSION, "prefill-0", "first", 1, Factors.of({"model": "m"}), "0", "0", 30.0, (rank,)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--frames", type=int, default=100_000, help="how many to send at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--protected", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limits", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.protected, options.limits)
        return 0
    report = run(options.frames, options.seed)
    print(report.row())
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
