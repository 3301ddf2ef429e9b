"""With asynchronous scheduling a request finishes on P, and is loaded on D, while the next step is in flight."""

from concurrent.futures import ThreadPoolExecutor

from hybrid_connector.tools.completions import MAX_TIE_NATS, agree

from engines import Fleet, prompt_of

NUM_REQUESTS, AT_A_TIME = 200, 16
LENGTHS = (2, 33, 129, 384, 385, 640)


def answers(fleet: Fleet, scheduling: str, prompts: list[str]) -> list:
    """Through a P and a D of their own, ``AT_A_TIME``; fails if a byte of state differs."""
    options = {"args": (scheduling, "--num-gpu-blocks-override", "256")}
    p, d = fleet.engines(
        **{
            f"P{scheduling}": {"role": "kv_producer", **options},
            f"D{scheduling}": {"role": "kv_consumer", **options},
        }
    ).values()
    for engine in (p, d):
        assert f"'async_scheduling': {scheduling == '--async-scheduling'}" in engine.log.read_text()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = list(pool.map(lambda prompt: fleet.transfer(p, d, prompt), prompts))
    d.wait_idle()
    p.wait_idle()
    fleet.stop(p, d)
    return found


def test_bytes_and_answers_are_those_of_synchronous_scheduling(fleet):
    prompts = [prompt_of(LENGTHS[salt % len(LENGTHS)], salt=salt) for salt in range(NUM_REQUESTS)]
    synchronous = answers(fleet, "--no-async-scheduling", prompts)
    asynchronous = answers(fleet, "--async-scheduling", prompts)
    agreements = [agree(one, other) for one, other in zip(asynchronous, synchronous, strict=True)]
    assert [agreement for agreement in agreements if not agreement.within(MAX_TIE_NATS)] == []
    # Batches differ from run to run, and with them rounding: that turns a tie now and then, and nothing more.
    assert sum(agreement.parted_at is not None for agreement in agreements) <= NUM_REQUESTS // 10
