"""What becomes of requests when something fails? Real engines, real NIXL, one row per fault (``make faults``).

1. Each row starts P and D with ``faulty_connector``, injects its fault, and sorts every answer: right, failed clearly
   (an error, in time), or wrong. Right means: the aggregated engine's answer, but for near ties.
2. Then both engines must be alive, and their pools empty.
3. ``--without-guards`` repeats each row with one guard taken out of the connector; the row must not pass.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import signal
import string
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from hybrid_connector.core.errors import PeerError
from hybrid_connector.tools.completions import MAX_TIE_NATS, Answer, agree
from hybrid_connector.tools.servers import ServerDiedError, free_ports

from engines import MODEL_NAME, Engine, Fleet
from read_faults import WALL_CLOCK, WITHOUT_VARIABLE, ReadFault

LEASE_S = 6.0
"""Of the rows that wait for its end; rows that do not have ``PATIENT_LEASE_S``, which a stalled machine outlives."""

PATIENT_LEASE_S = 30.0
NUM_BLOCKS = 25
"""Of either pool, one of them vLLM's null block: few, so that a block given back too early is soon another's."""

LENGTH = 500
"""Tokens of most prompts: two blocks of 384, three of recurrent state."""

MAX_TOKENS = 12
CLEARLY_S = 60.0
"""Within this time a request that cannot be answered must have ended with an error."""

SHORT: Mapping[str, Any] = {"lease_s": LEASE_S}
HASTY: Mapping[str, Any] = {"acquire_timeout_s": 5, "handshake_timeout_s": 1}


@dataclass(slots=True)
class Pair:
    """P and D of one row, and what became of its requests."""

    fleet: Fleet
    reference: Engine
    options: dict[str, dict[str, Any]]
    faults: Path
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    salts: Any = field(default_factory=lambda: iter(range(1, 10**6)))
    engines: dict[str, Engine] = field(default_factory=dict)

    @property
    def p(self) -> Engine:
        return self.engines["P"]

    @property
    def d(self) -> Engine:
        return self.engines["D"]

    def start(self, *names: str) -> None:
        self.engines |= self.fleet.engines(**{name: self.options[name] for name in names})

    def restart(self, name: str, **changes: Any) -> None:
        """An engine that was killed comes back where it was."""
        self.options[name] = {**self.options[name], **changes}
        self.start(name)

    def kill(self, name: str) -> None:
        self.fleet.kill(self.engines.pop(name))

    @contextlib.contextmanager
    def stopped(self, name: str):
        """A partition in time: all processes of an engine stand still."""
        self.fleet.signal(self.engines[name], signal.SIGSTOP)
        try:
            yield
        finally:
            self.fleet.signal(self.engines[name], signal.SIGCONT)

    def prompt(self, length: int = LENGTH) -> str:
        """Letters that no other prompt has: where texts share their end, so nearly do their states."""
        return "".join(random.Random(next(self.salts)).choices(string.ascii_lowercase + " ", k=length))

    def prompts(self, number: int, length: int = LENGTH) -> list[str]:
        return [self.prompt(length) for _ in range(number)]

    def inject(self, *faults: ReadFault) -> None:
        for fault in faults:
            fault.order(self.faults)

    def overwrite_p(self) -> None:
        """Let other requests take every free block of P."""
        for _ in range(NUM_BLOCKS // 5 + 2):
            self.p.post({"prompt": self.prompt(), "max_tokens": 1})

    def ask(self, prompt: str, params: Mapping[str, Any] | None, max_tokens: int = MAX_TOKENS) -> None:
        """Send a request to D and sort what comes back."""
        self.counts[self._sort(prompt, params, max_tokens)] += 1

    def ask_all(self, asked: Iterable[tuple[str, Mapping[str, Any] | None]], max_tokens: int = MAX_TOKENS) -> None:
        asked = list(asked)
        with ThreadPoolExecutor(len(asked)) as pool:
            self.counts += Counter(pool.map(lambda one: self._sort(*one, max_tokens), asked))

    @contextlib.contextmanager
    def asking(
        self,
        asked: Iterable[tuple[str, Mapping[str, Any] | None]],
        after_s: float = 1.0,
        max_tokens: int = MAX_TOKENS,
    ) -> Iterator["Future[None]"]:
        """Around what is done while requests are on their way, ``after_s`` after they were sent; yields their end."""
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(self.ask_all, asked, max_tokens)
            time.sleep(after_s)
            yield answers
            answers.result()

    def serve(self, number: int = 2) -> None:
        """Proper transfers, which must be answered right whatever went wrong before."""
        for prompt in self.prompts(number):
            self.ask(prompt, self.p.prefill(prompt))

    def _sort(self, prompt: str, params: Mapping[str, Any] | None, max_tokens: int) -> str:
        began = time.monotonic()
        try:
            answer = self.d.answer(prompt, params, max_tokens)
        except PeerError as error:
            self.failures.append(str(error))
            return "failed" if time.monotonic() - began < CLEARLY_S else "failed late"
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return "no answer"
        return "right" if is_right(answer, self.reference.answer(prompt, max_tokens=max_tokens)) else "wrong"


def is_right(answer: Answer, reference: Answer) -> bool:
    return agree(answer, reference).within(MAX_TIE_NATS)


@dataclass(frozen=True, slots=True)
class Fault:
    """One row.

    ``run``: injects ``times`` faults; of the requests it sends, ``failed`` must fail and ``right`` be answered right.
    ``guard``: what protects, by its name in ``faulty_connector``. ``p``, ``d``: how the engines are started.
    """

    name: str
    run: Callable[[Pair], None]
    times: int
    right: int
    failed: int
    guard: str
    p: Mapping[str, Any] = field(default_factory=dict)
    d: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row showed.

    ``leaked``: blocks of P and of D that stayed taken, -1 for an engine that is gone. ``other``: requests that failed
    late, or whose connection broke. ``reasons``: the most frequent ones for failed requests, in logs and answers.
    """

    name: str
    times: int
    right: int
    failed: int
    wrong: int
    other: int
    leaked_p: int
    leaked_d: int
    alive: bool
    seconds: float
    passed: bool
    reasons: list[str]


def bad_descriptors(pair: Pair) -> None:
    for prompt in pair.prompts(5):
        params = pair.p.prefill(prompt)
        pair.inject(ReadFault(bad_descriptor=True))
        pair.ask(prompt, params)
    pair.serve()


def one_of_two_reads_fails(pair: Pair) -> None:
    """While the other read is late, requests that D computes itself take every free block."""
    for prompt in pair.prompts(3):
        params = pair.p.prefill(prompt)
        pair.inject(ReadFault(src_rank=0, error=True), ReadFault(src_rank=1, delay_s=3))
        with pair.asking([(prompt, params)]):
            pair.ask_all([(other, None) for other in pair.prompts(6)], max_tokens=40)
    pair.serve()


def slow_reads(pair: Pair) -> None:
    prompts = pair.prompts(3)
    asked = [(prompt, pair.p.prefill(prompt)) for prompt in prompts]
    pair.inject(*[ReadFault(delay_s=2.5 * LEASE_S)] * len(prompts))
    pair.ask_all(asked)


def grant_lost_during_the_read(pair: Pair) -> None:
    """P stands still for longer than it promised; what it held is another's when the bytes are read."""
    prompt = pair.prompt()
    params = pair.p.prefill(prompt)
    pair.inject(ReadFault(delay_s=2.5 * LEASE_S))
    with pair.asking([(prompt, params)]):
        with pair.stopped("P"):
            time.sleep(1.3 * LEASE_S)
        pair.overwrite_p()
    pair.serve()


def d_stands_still_during_the_read(pair: Pair) -> None:
    prompt = pair.prompt()
    params = pair.p.prefill(prompt)
    pair.inject(ReadFault(delay_s=1))
    with pair.asking([(prompt, params)], after_s=0.5), pair.stopped("D"):
        time.sleep(1.5 * LEASE_S)
        pair.overwrite_p()
    pair.serve()


def expired_in_the_router(pair: Pair) -> None:
    asked = [(prompt, pair.p.prefill(prompt)) for prompt in pair.prompts(3)]
    time.sleep(1.3 * LEASE_S)
    pair.overwrite_p()
    for prompt, params in asked:
        pair.ask(prompt, params)
    pair.serve()


def used_twice(pair: Pair) -> None:
    asked = [(prompt, pair.p.prefill(prompt)) for prompt in pair.prompts(3)]
    pair.ask_all(asked)
    pair.d.wait_idle()
    pair.p.wait_idle()
    pair.overwrite_p()
    reset_prefix_cache(pair.d)
    for prompt, params in asked:
        pair.ask(prompt, params)
    pair.serve()


def forged_references(pair: Pair) -> None:
    for _ in range(3):
        mine, theirs = pair.prompts(2)
        params, victim = pair.p.prefill(mine), pair.p.prefill(theirs)
        pair.ask(mine, {**params, "remote_request_id": victim["remote_request_id"]})  # another's lease
        pair.ask(mine, {**params, "remote_block_ids": [[10**6]] * 4, "remote_num_tokens": 10**6})  # is not believed
        pair.ask(theirs, victim)


def p_killed_before_the_read(pair: Pair) -> None:
    pair.serve()
    asked = [(prompt, pair.p.prefill(prompt)) for prompt in pair.prompts(3)]
    pair.kill("P")
    pair.ask_all(asked)
    pair.restart("P")
    pair.serve()


def p_killed_during_the_read(pair: Pair) -> None:
    pair.serve()
    asked = [(prompt, pair.p.prefill(prompt)) for prompt in pair.prompts(3)]
    pair.inject(*[ReadFault(delay_s=2)] * 3)
    with pair.asking(asked):
        pair.kill("P")
    pair.restart("P")
    pair.serve()


def p_killed_after_the_read(pair: Pair) -> None:
    """D generates on from what it has; its release reaches nobody."""
    pair.serve(1)
    prompt = pair.prompt()
    params = pair.p.prefill(prompt)
    before = pair.d.metric("vllm:hybrid_connector_loads_total")
    pair.inject(ReadFault(delay_s=1))
    with pair.asking([(prompt, params)], after_s=0.5, max_tokens=200) as answer:
        pair.fleet.signal(pair.p, signal.SIGSTOP)  # its memory can still be read, its side channel is silent
        while pair.d.metric("vllm:hybrid_connector_loads_total") <= before and not answer.done():
            time.sleep(0.02)
        pair.kill("P")
    pair.ask(pair.prompt(), None)
    pair.restart("P")
    pair.serve()


def p_restarted(pair: Pair) -> None:
    pair.serve(1)
    for _ in range(3):
        prompt = pair.prompt()
        params = pair.p.prefill(prompt)
        pair.kill("P")
        pair.restart("P")
        pair.ask(prompt, params)
        pair.serve(2)


def d_killed_during_the_read(pair: Pair) -> None:
    prompt = pair.prompt()
    params = pair.p.prefill(prompt)
    pair.inject(ReadFault(delay_s=60))
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(pair._sort, prompt, params, MAX_TOKENS)
        time.sleep(1)
        pair.kill("D")
        assert lost.result() == "no answer"  # its client sees the connection end
    pair.restart("D")
    pair.serve()


def p_pauses(pair: Pair) -> None:
    """For less than its lease, before it was asked and while it reads."""
    for _ in range(2):
        prompt = pair.prompt()
        params = pair.p.prefill(prompt)
        with ThreadPoolExecutor(1) as pool:
            with pair.stopped("P"):
                answer = pool.submit(pair.ask, prompt, params)
                time.sleep(2.5)
            answer.result()
        time.sleep(0.5)


def abort_storm(pair: Pair) -> None:
    """Clients hang up while their request is queued, waits for its state, is read and generates."""
    random_s = random.Random(7)

    def give_up(engine: Engine, prompt: str, params: Mapping[str, Any], after_s: float) -> None:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 200, "kv_transfer_params": params}
        timeout = httpx.Timeout(10, read=after_s)
        with httpx.Client(trust_env=False, timeout=timeout) as client, contextlib.suppress(httpx.ReadTimeout):
            client.post(f"{engine.url}/v1/completions", json=body)

    for _ in range(4):
        asked = [(prompt, pair.p.prefill(prompt)) for prompt in pair.prompts(4)]
        pair.inject(*[ReadFault(delay_s=0.4)] * 3)
        with ThreadPoolExecutor(8) as pool:
            for prompt, params in asked:
                pool.submit(give_up, pair.d, prompt, params, random_s.uniform(0.01, 0.6))
                pool.submit(give_up, pair.p, pair.prompt(), {"do_remote_decode": True}, random_s.uniform(0.001, 0.2))
        for left in pair.faults.glob("*.json"):
            left.unlink(missing_ok=True)
    pair.serve()


def clock_jumps(pair: Pair) -> None:
    partial = pair.faults / f"{WALL_CLOCK}.partial"
    for jump_s in (86400, -86400, 3600, 0):
        asked = [(prompt, pair.p.prefill(prompt)) for prompt in pair.prompts(2)]
        pair.inject(ReadFault(delay_s=1.5))
        with pair.asking(asked, after_s=0.7):
            partial.write_text(str(jump_s))
            partial.rename(pair.faults / WALL_CLOCK)


def flipped_bytes(pair: Pair) -> None:
    for prompt in pair.prompts(5):
        params = pair.p.prefill(prompt)
        pair.inject(ReadFault(flip=True))
        pair.ask(prompt, params)
    pair.serve()


def many_wait(pair: Pair) -> None:
    """128 requests hold their leases of 2 s in D's queue, which takes four at a time."""
    prefills = threading.Semaphore(2)  # so that no lease runs out before D has even heard of it
    max_tokens = 24 if pair.fleet.device == "cpu" else 120  # whichever keeps D busy for long enough

    def through_both(prompt: str) -> str:
        with prefills:
            params = pair.p.prefill(prompt)
        return pair._sort(prompt, params, max_tokens)

    began = time.monotonic()
    with ThreadPoolExecutor(128) as pool:
        pair.counts += Counter(pool.map(through_both, pair.prompts(128, 40)))
    pair.counts["D was not busy for three times the lease"] += time.monotonic() - began < 6


def cache_reset_and_pause(pair: Pair) -> None:
    """P's operator resets caches, and pauses the engine, while a lease is out.

    Resetting the prefix cache costs no lease; a reset that includes the connector (new weights) withdraws it; a pause
    waits for it.
    """
    for external in (False, False, True):
        prompt = pair.prompt()
        params = pair.p.prefill(prompt)
        reset_prefix_cache(pair.p, external)
        pair.overwrite_p()
        pair.ask(prompt, params)
    for mode in ("wait", "keep", "abort"):
        prompt = pair.prompt()
        params = pair.p.prefill(prompt)
        with ThreadPoolExecutor(1) as pool:
            paused = pool.submit(pair.p.client.post, f"{pair.p.url}/pause", params={"mode": mode})
            time.sleep(0.5)
            pair.ask(prompt, params)
            paused.result().raise_for_status()
        pair.p.client.post(f"{pair.p.url}/resume").raise_for_status()
    pair.serve()


def reset_prefix_cache(engine: Engine, external: bool = False) -> None:
    engine.client.post(f"{engine.url}/reset_prefix_cache", params={"reset_external": external}).raise_for_status()


SAME_ID = {"engine_id": "the-same-id"}
FAULTS = (
    Fault("descriptor error, policy fail", bad_descriptors, 5, 2, 5, "failed reads fail the load"),
    Fault(
        "descriptor error, policy recompute",
        bad_descriptors,
        5,
        7,
        0,
        "failed reads fail the load",
        d={"policy": "recompute"},
    ),
    Fault(
        "one of two reads fails, the other lands 3 s later",
        one_of_two_reads_fails,
        3,
        20,
        3,
        "a load ends with its last read",
        p={"tp": 2},
        d={"config": {"staging": "never"}},  # what lands late in a staging area does no harm
    ),
    Fault("read slower than the grant", slow_reads, 3, 3, 0, "grants are renewed", p={"config": SHORT}),
    Fault(
        "grant lost during the read: P stands still",
        grant_lost_during_the_read,
        1,
        2,
        1,
        "a lost grant fails the load",
        p={"config": SHORT},
    ),
    Fault(
        "grant lost during the read: D stands still",
        d_stands_still_during_the_read,
        1,
        2,
        1,
        "a lost grant fails the load",
        p={"config": SHORT},
    ),
    Fault(
        "lease expired while queued in a router",
        expired_in_the_router,
        3,
        2,
        3,
        "ended leases are not granted",
        p={"config": SHORT},
    ),
    Fault("reference used twice", used_twice, 3, 5, 3, "ended leases are not granted"),
    Fault("forged block ids and tokens", forged_references, 6, 6, 3, "tokens are compared"),
    Fault("P killed before the read", p_killed_before_the_read, 3, 4, 3, "grants have a deadline", d={"config": HASTY}),
    Fault("P killed during the read", p_killed_during_the_read, 3, 4, 3, "failed reads fail the load"),
    Fault("P killed after the read", p_killed_after_the_read, 1, 5, 0, "nobody waits for a release"),
    Fault(
        "P restarted on its port, new engine id",
        p_restarted,
        3,
        7,
        3,
        "a restart is noticed",
    ),
    Fault(
        "P restarted on its port, same engine id",
        p_restarted,
        3,
        7,
        3,
        "a restart is noticed",
        p={"transfer": SAME_ID},
    ),
    Fault("D killed during a read", d_killed_during_the_read, 1, 2, 0, "leases expire", p={"config": SHORT}),
    Fault(
        "P stands still for 2.5 s, then goes on",
        p_pauses,
        2,
        2,
        0,
        "what was not answered is asked again",
        d={"config": {"handshake_timeout_s": 1}},
    ),
    Fault("abort storm", abort_storm, 32, 2, 0, "ends of aborted loads are reported", p={"config": SHORT}),
    Fault("clock jumps", clock_jumps, 4, 8, 0, "promises run on a monotonic clock"),
    Fault(
        "128 requests wait, lease 2 s",
        many_wait,
        128,
        128,
        0,
        "grants are renewed",
        p={"config": {"lease_s": 2}, "args": ("--num-gpu-blocks-override", "700")},
        d={"args": ("--max-num-seqs", "4")},
    ),
    Fault(
        "a byte flipped in flight, verify all",
        flipped_bytes,
        5,
        2,
        5,
        "digests are compared",
        d={"config": {"verify": "all"}},
    ),
    Fault("caches reset, engine paused", cache_reset_and_pause, 6, 7, 1, "blocks stay while leased"),
)


def run(fault: Fault, fleet: Fleet, reference: Engine, *, without: bool) -> Outcome:
    """One row, on engines of its own."""
    faults = Path(tempfile.mkdtemp(dir=fleet.directory))
    env = {
        WITHOUT_VARIABLE: fault.guard if without else "",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache and /pause
    }
    options = {}
    for name, role in (("P", "kv_producer"), ("D", "kv_consumer")):
        wanted = dict(fault.p if name == "P" else fault.d)
        options[name] = {
            "role": role,
            "env": env,
            "ports": free_ports(2),
            **wanted,
            "config": {"capture_dir": None, "lease_s": PATIENT_LEASE_S, **wanted.get("config", {})},
            "faults": faults,
            "args": ("--num-gpu-blocks-override", str(NUM_BLOCKS), *wanted.get("args", ())),
        }
    pair = Pair(fleet, reference, options, faults)
    began = time.monotonic()
    try:
        pair.start("P", "D")
        try:
            fault.run(pair)
        except ServerDiedError as error:
            pair.failures.append(str(error))
        alive = all(fleet.is_alive(engine) for engine in pair.engines.values()) and len(pair.engines) == 2
        lease_s = options["P"]["config"]["lease_s"]
        leaked = [leaked_blocks(pair.engines.get(name), lease_s) for name in ("P", "D")]
        logged = [
            found for engine in pair.engines.values() for found in re.findall("load failed: .*", engine.log.read_text())
        ]
    finally:
        fleet.stop(*pair.engines.values())
    counts = pair.counts
    sorted_ = counts["right"], counts["failed"], counts["wrong"], counts.total()
    expected = fault.right, fault.failed, 0, fault.right + fault.failed
    return Outcome(
        name=fault.name,
        times=fault.times,
        right=counts["right"],
        failed=counts["failed"],
        wrong=counts["wrong"],
        other=counts.total() - sum(sorted_[:3]),
        leaked_p=leaked[0],
        leaked_d=leaked[1],
        alive=alive,
        seconds=time.monotonic() - began,
        passed=sorted_ == expected and not any(leaked) and alive,
        reasons=[f"{number} x {reason}" for reason, number in Counter(logged + pair.failures).most_common(10)],
    )


def leaked_blocks(engine: Engine | None, lease_s: float) -> int:
    """Blocks that are still taken once every lease must have ended."""
    if engine is None:
        return -1
    try:
        engine.wait_idle(lease_s + 10)
    except AssertionError:
        (total,) = re.findall(r'num_gpu_blocks="(\d+)"', engine.client.get(f"{engine.url}/metrics").text)
        return round(engine.metric("vllm:kv_cache_usage_perc") * (int(total) - 1)) or -1
    except httpx.HTTPError:
        return -1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose name contains one of these texts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: rows of TP 1 only")
    parser.add_argument("--engine-args", default="", help="further options of vllm serve, in quotes")
    parser.add_argument("--without-guards", action="store_true", help="take each row's guard out; no row may pass")
    parser.add_argument("--json", type=Path, help="write one line per row here")
    parser.add_argument("--work-dir", type=Path, help="keep logs here")
    args = parser.parse_args()
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]  # where engines find faulty_connector
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    rows = [fault for fault in FAULTS if any(text in fault.name for text in args.only)]
    if args.device == "cuda":
        rows = [fault for fault in rows if not any("tp" in side for side in (fault.p, fault.d))]
    if not rows:
        parser.error(f"--only: no row's name contains any of {args.only}")
    console = Console(width=150)
    table = Table("fault", "times", "right", "failed", "WRONG", "other", "leaked P", "leaked D", "alive", "s", "")
    outcomes = []
    with contextlib.ExitStack() as stack:
        directory = args.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        directory.mkdir(parents=True, exist_ok=True)
        fleet = stack.enter_context(Fleet(directory, args.device, shlex.split(args.engine_args)))
        fleet.client.timeout = httpx.Timeout(CLEARLY_S)
        reference = fleet.engine("aggregated", model="hybrid")
        for fault in rows:
            outcome = run(fault, fleet, reference, without=args.without_guards)
            outcomes.append(outcome)
            expected = outcome.passed != args.without_guards
            shown = (outcome.times, outcome.right, outcome.failed, outcome.wrong, outcome.other)
            shown += (outcome.leaked_p, outcome.leaked_d, outcome.alive, round(outcome.seconds))
            words = f"without: {fault.guard}" if args.without_guards else ""
            table.add_row(fault.name, *map(str, shown), words + ("" if expected else " UNEXPECTED"))
            console.print(f"{'as it must be' if expected else 'NOT AS IT MUST BE'}: {fault.name}", highlight=False)
            if not expected:
                console.print("\n".join(outcome.reasons), highlight=False)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps({f: getattr(outcome, f) for f in outcome.__slots__}) + "\n")
    console.print(table)
    missed = [outcome.name for outcome in outcomes if outcome.passed == args.without_guards]
    if missed:
        console.print(f"{len(missed)} of {len(outcomes)} rows are not as they must be: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
