"""Does anything wear out? Thousands of requests through router, P and D, aborts, a restart of P (``make soak``).

1. The aggregated engine answers every prompt once: the references.
2. After a warm-up, memory, threads and open files of every process of P and D are noted, pools empty.
3. Requests of mixed lengths, several at a time; some clients hang up; half way P is killed and comes back. Every answer
   must equal its reference but for near ties; a request may fail only while P is away.
4. With the pools empty again, what was noted must be as it was; the new P is compared with itself after a warm-up.
"""

import argparse
import contextlib
import random
import string
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from hybrid_connector.core.errors import PeerError
from hybrid_connector.tools.completions import MAX_TIE_NATS, Answer, agree, complete
from hybrid_connector.tools.servers import free_ports

from engines import MODEL_NAME, Engine, Fleet

LENGTHS = (1, 2, 31, 32, 33, 100, 383, 384, 385, 500, 769, 1281, 2000)
NUM_PROMPTS = 52
MAX_TOKENS = 12
AT_A_TIME = 8
ABORTED = 0.05
"""Of all requests: the client hangs up."""

LEASE_S = 30.0
MAX_GROWTH = 0.10
"""Of an engine's memory: what allocators keep. One prompt's state left behind per request would be a multiple."""

ENGINE_ENV = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}
"""oneDNN keeps code for each batch size it met: an engine without connector grew by 440 MiB in 1,800 requests."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one engine holds, summed over its processes."""

    memory_bytes: int
    num_threads: int
    num_files: int
    num_processes: int

    @classmethod
    def of(cls, fleet: Fleet, engine: Engine) -> "Usage":
        processes = [psutil.Process(pid) for pid in fleet.pids(engine)]
        memory = [process.memory_full_info().uss for process in processes]
        threads = [process.num_threads() for process in processes]
        files = [process.num_fds() for process in processes]
        return cls(sum(memory), sum(threads), sum(files), len(processes))

    def grew_to(self, later: "Usage") -> list[str]:
        """What is more than it was."""
        grown = []
        if later.memory_bytes > self.memory_bytes * (1 + MAX_GROWTH):
            grown.append(f"memory from {self.memory_bytes >> 20} to {later.memory_bytes >> 20} MiB")
        # Connections of the router and of clients come and go.
        for name, slack in (("num_threads", 0), ("num_files", AT_A_TIME), ("num_processes", 0)):
            if getattr(later, name) > getattr(self, name) + slack:
                grown.append(f"{name.removeprefix('num_')} from {getattr(self, name)} to {getattr(later, name)}")
        return grown


class Soak:
    """The fleet, the prompts with their references, and what became of the requests."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.random = random.Random(seed)
        self.p_is_away = threading.Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        letters = string.ascii_lowercase + " "
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(NUM_PROMPTS)]
        self.prompts = ["".join(self.random.choices(letters, k=length)) for length in lengths]
        aggregated = fleet.engine("aggregated", model="hybrid")
        self.references = {prompt: aggregated.answer(prompt, max_tokens=MAX_TOKENS) for prompt in self.prompts}
        fleet.stop(aggregated)
        common = {"config": {"capture_dir": None, "lease_s": LEASE_S}, "env": ENGINE_ENV}
        self.p_options = {"role": "kv_producer", "ports": free_ports(2), **common}
        engines = fleet.engines(P=self.p_options, D={"role": "kv_consumer", **common})
        self.p, self.d = engines.values()
        self.url = fleet.router(self.p, self.d)

    def send(self, num_requests: int, *, p_is_killed: bool = False) -> None:
        """That many requests, ``AT_A_TIME``; half way P is killed and comes back."""
        chosen = [(self.random.choice(self.prompts), self.random.random()) for _ in range(num_requests)]
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            jobs = [pool.submit(self._one, prompt, chance) for prompt, chance in chosen]
            if p_is_killed:
                while sum(job.done() for job in jobs) < num_requests // 2:
                    time.sleep(0.1)
                self.p_is_away.set()
                self.fleet.kill(self.p)
                self.p = self.fleet.engine("P", **self.p_options)
                self._until_routed()
                self.p_is_away.clear()
            for job in jobs:
                job.result()

    def settle(self) -> dict[str, Usage]:
        """Wait until nothing is in use but for what stays, and look."""
        for engine in (self.p, self.d):
            engine.wait_idle(2 * LEASE_S)
        time.sleep(2)  # sockets of clients that hung up
        return {engine.name: Usage.of(self.fleet, engine) for engine in (self.p, self.d)}

    def _one(self, prompt: str, chance: float) -> None:
        if chance < ABORTED:
            self._hang_up(prompt, after_s=0.01 + chance / ABORTED * 0.2)
            return
        was_away = self.p_is_away.is_set()
        try:
            answer = complete(self.fleet.client, self.url, prompt, max_tokens=MAX_TOKENS, extra={"model": MODEL_NAME})
        except (PeerError, httpx.HTTPError) as error:
            excused = was_away or self.p_is_away.is_set()
            self.counts["failed while P was away" if excused else "failed"] += 1
            if not excused:
                self.wrong.append(f"{len(prompt)} tokens: {error}")
            else:
                time.sleep(0.5)
            return
        self._judge(prompt, answer)

    def _judge(self, prompt: str, answer: Answer) -> None:
        agreement = agree(answer, self.references[prompt])
        right = agreement.within(MAX_TIE_NATS)
        self.counts["right" if right else "wrong"] += 1
        if not right:
            self.wrong.append(f"{len(prompt)} tokens: {agreement}")

    def _hang_up(self, prompt: str, after_s: float) -> None:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 200}
        timeout = httpx.Timeout(10, read=after_s)
        with httpx.Client(trust_env=False, timeout=timeout) as client, contextlib.suppress(httpx.HTTPError):
            client.post(f"{self.url}/v1/completions", json=body)
        self.counts["hung up"] += 1

    def _until_routed(self) -> None:
        """The router looks after its engines now and then; until it has, requests may still fail."""
        deadline = time.monotonic() + 120
        in_a_row = 0
        while in_a_row < 5:
            body = {"model": MODEL_NAME, "prompt": "are you back", "max_tokens": 1}
            with contextlib.suppress(httpx.HTTPError):
                response = self.fleet.client.post(f"{self.url}/v1/completions", json=body)
                in_a_row = in_a_row + 1 if response.status_code == httpx.codes.OK else 0
            if time.monotonic() > deadline:
                raise TimeoutError("the router does not find the restarted P")
            time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, help="keep logs here")
    args = parser.parse_args()
    console = Console(width=120)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = args.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        directory.mkdir(parents=True, exist_ok=True)
        soak = Soak(stack.enter_context(Fleet(directory)), args.seed)
        soak.send(args.warm_up)
        before = soak.settle()
        soak.send(args.requests // 2, p_is_killed=True)
        soak.send(args.warm_up)
        before["P"] = soak.settle()["P"]
        soak.send(args.requests - args.requests // 2)
        after = soak.settle()
    table = Table("engine", "memory MiB", "threads", "open files", "processes", title="after warm-up, at the end")
    grown = []
    for name, usage in before.items():
        pairs = [(getattr(usage, field), getattr(after[name], field)) for field in Usage.__slots__]
        table.add_row(name, *(f"{a >> 20}, {b >> 20}" if a > 1 << 20 else f"{a}, {b}" for a, b in pairs))
        grown += [f"{name}: {what}" for what in usage.grew_to(after[name])]
    console.print(table)
    console.print(f"{dict(soak.counts)} in {time.monotonic() - began:.0f} s; pools empty at the end", highlight=False)
    for line in [*soak.wrong[:10], *grown]:
        console.print(line, highlight=False)
    return 1 if soak.wrong or grown else 0


if __name__ == "__main__":
    sys.exit(main())
