"""How long does P's side channel take to answer while its engine keeps Python's interpreter busy?

P answers from a thread beside the engine's loop. A process whose main thread computes in Python, as vLLM does while it
schedules, or calls torch for ever stands for the engine; a client asks it, pausing in between. For each switch interval
of the interpreter: milliseconds per answer, and how much the main thread gets done.

    python integration/benchmarks/answers.py
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Literal

from hybrid_connector.wire.messages import Release, Released, Reply, Request
from hybrid_connector.wire.side_channel import SideChannelClient, SideChannelServer

Load = Literal["python", "torch"]
WARM_UP_S = 1.0
TIMEOUT_S = 5.0


def serve(connection: Connection, interval_s: float, load: Load) -> None:
    """P: be busy until told to stop, then say how many rounds of work per second that were."""
    import torch

    sys.setswitchinterval(interval_s)
    torch.set_num_threads(1)
    tensor = torch.ones(64)

    def answer(request: Request) -> Reply:
        assert isinstance(request, Release)
        return Released(request.request_id, incarnation="P")

    server = SideChannelServer("127.0.0.1", 0, answer, incarnation="P", security=None)
    server.start()
    connection.send(server.port)
    began, rounds = time.perf_counter(), 0
    while not connection.poll():
        for _ in range(200):
            if load == "torch":
                tensor.add_(1.0)
            else:
                sum(range(100))
        rounds += 1
    connection.send(rounds / (time.perf_counter() - began))
    server.close()


def measure(interval_s: float, load: Load, seconds: float, pause_s: float) -> tuple[list[float], float]:
    """Seconds of each answer, and rounds of work per second."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, interval_s, load), daemon=True)
    process.start()
    theirs.close()
    address = "127.0.0.1", ours.recv()
    times: list[float] = []
    with SideChannelClient(security=None) as client:
        began = time.monotonic()
        while (now := time.monotonic()) < began + WARM_UP_S + seconds:
            asked = time.perf_counter()
            client.call(address, Release(str(len(times)), "", ""), TIMEOUT_S).result()
            if now >= began + WARM_UP_S:
                times.append(time.perf_counter() - asked)
            time.sleep(pause_s)
    ours.send("stop")
    work = ours.recv()
    process.join(TIMEOUT_S)
    return times, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--intervals-ms", type=float, nargs="+", default=[5, 1, 0.2, 0.05], help="5 is Python's own")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--pause-s", type=float, default=0.02)
    args = parser.parse_args()
    print("load    interval ms  median ms  p90 ms  work (1: at the first interval)")
    loads: tuple[Load, ...] = ("python", "torch")
    for load in loads:
        first = None
        for interval_ms in args.intervals_ms:
            times, work = measure(interval_ms / 1e3, load, args.seconds, args.pause_s)
            first = first or work
            tenths = statistics.quantiles(times, n=10)
            median = statistics.median(times)
            print(
                f"{load:7} {interval_ms:11g} {median * 1e3:10.2f} {tenths[-1] * 1e3:7.2f}  {work / first:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
