"""P and D as a router drives them: every byte of state arrives, answers agree, and pools end where they began."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hybrid_connector.tools.completions import MAX_TIE_NATS, agree

from engines import MODEL_NAME, Engine, Fleet, prompt_of

LENGTHS = (2, 5, 31, 32, 33, 383, 384, 385, 639, 640, 641, 769, 1281, 2000)
"""Around 32 tokens, around 1 to 5 blocks of 384 (the block vLLM chooses here), around 640, and long."""


def producer(fleet: Fleet, tp: int) -> Engine:
    return fleet.engine(f"prefill-tp{tp}", role="kv_producer", tp=tp)


def consumer(fleet: Fleet, tp: int) -> Engine:
    # One of each failure policy, so that the tests of refusals meet both.
    return fleet.engine(f"decode-tp{tp}", role="kv_consumer", tp=tp, policy="fail" if tp == 1 else "recompute")


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_every_byte_arrives_and_answers_agree(fleet, aggregated, prefill_tp, decode_tp):
    prefill, decode = producer(fleet, prefill_tp), consumer(fleet, decode_tp)
    prompts = [prompt_of(length, salt=10 * prefill_tp + decode_tp) for length in LENGTHS]

    def transfer(prompt):
        params = prefill.prefill(prompt)
        return params, decode.answer(prompt, params)

    with ThreadPoolExecutor(len(prompts)) as pool:  # all at once
        transferred = list(pool.map(transfer, prompts))

    ties = 0
    for prompt, (params, answer) in zip(prompts, transferred, strict=True):
        assert params["remote_num_tokens"] == len(prompt) - 1
        compared = fleet.compare(params, decode.model)
        assert not compared.differing
        # One K/V, three conv sections and one temporal state per recurrent layer: 1 + 3 * 4 tensors.
        assert compared.num_tensors == 13
        moved = [capture.meta["moved"] for capture in fleet.captured(params).loaded]
        assert {rank["transport"] for rank in moved} == {"nixl"}
        assert sum(sum(rank["kind_bytes"].values()) for rank in moved) == compared.num_bytes

        # Tokens agree but for rounding: P and D compute the last prompt token as a step of its own, the aggregated
        # engine together with the rest. That may turn a tie of its two best tokens, and nothing more.
        agreement = agree(answer, aggregated.answer(prompt))
        assert agreement.within(MAX_TIE_NATS), f"{len(prompt)} tokens: {agreement}"
        ties += agreement.parted_at is not None
    assert ties <= len(prompts) // 3

    decode.wait_idle()
    prefill.wait_idle()


def test_a_single_token_prompt_is_computed_on_d(fleet, aggregated):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    params = prefill.prefill("S")
    assert params["do_remote_prefill"] is False  # the state before the only token is no state
    assert agree(decode.answer("S", params), aggregated.answer("S")).within(MAX_TIE_NATS)
    prefill.wait_idle()


def test_identical_tensor_parallel_size_moves_whole_pages(fleet):
    """Same geometry: one descriptor per page at most, however many sections a page has."""
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    prompt = prompt_of(2000, salt=99)
    params = prefill.prefill(prompt)
    decode.answer(prompt, params)
    (capture,) = fleet.captured(params).loaded
    num_blocks, num_recurrent_layers = -(-2000 // 384), 3
    moved = capture.meta["moved"]
    assert moved["num_descriptors"] <= num_blocks + num_recurrent_layers

    # D's metrics count the same: the difference that another request of this length makes.
    before = {name: decode.metric(f"vllm:hybrid_connector_{name}_total") for name in ("loads", "bytes", "descriptors")}
    other = prompt_of(2000, salt=98)
    decode.answer(other, prefill.prefill(other))
    decode.wait_idle()
    after = {name: decode.metric(f"vllm:hybrid_connector_{name}_total") for name in before}
    assert after["loads"] == before["loads"] + 1
    assert after["bytes"] == before["bytes"] + sum(moved["kind_bytes"].values())
    assert after["descriptors"] > before["descriptors"]


def test_what_d_holds_in_its_prefix_cache_does_not_move(fleet, aggregated):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    prompt = prompt_of(1000, salt=42)
    first, second = prefill.prefill(prompt), prefill.prefill(prompt)
    answers = [decode.answer(prompt, params) for params in (first, second)]
    moved = [fleet.captured(params).loaded[0].meta["moved"]["kind_bytes"] for params in (first, second)]
    blocks = [moved["attention"] / moved["temporal"] for moved in moved]
    # 999 tokens take 3 blocks of 384; D keeps the two full ones. The recurrent state moves whole, once, each time.
    assert blocks[1] == blocks[0] / 3
    assert moved[0]["conv"] == moved[1]["conv"]
    for params, answer in zip((first, second), answers, strict=True):
        assert not fleet.compare(params, decode.model).differing
        assert agree(answer, aggregated.answer(prompt)).within(MAX_TIE_NATS)


def test_a_request_that_is_given_up_before_its_grant_gives_its_blocks_back(fleet, aggregated):
    """A peer that answered at once so far is counted on: blocks are allocated while it is asked."""
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)

    def give_up(salt):
        """Whether blocks were allocated for a request whose client hung up while P stood still."""
        for length in (3, 4, 5):  # so that P's last answers, not those of a busier time, say how quick it is
            prompt = prompt_of(length, salt=salt)
            decode.answer(prompt, prefill.prefill(prompt))
        decode.wait_idle()
        given_up, kept = ((p, prefill.prefill(p)) for p in (prompt_of(800, salt=salt), prompt_of(700, salt=salt)))
        with ThreadPoolExecutor(2) as pool:
            fleet.signal(prefill, signal.SIGSTOP)
            try:
                body = {"model": MODEL_NAME, "prompt": given_up[0], "max_tokens": 4, "kv_transfer_params": given_up[1]}
                first = pool.submit(httpx.post, f"{decode.url}/v1/completions", json=body, timeout=5, trust_env=False)
                was_allocated = False
                while not first.done():
                    was_allocated = was_allocated or decode.metric("vllm:kv_cache_usage_perc") > 0
                    time.sleep(0.05)
                with pytest.raises(httpx.ReadTimeout):
                    first.result()
                decode.wait_idle(20)  # though P still stands, and may do so for two minutes
                second = pool.submit(decode.answer, *kept)
                time.sleep(0.5)
            finally:
                fleet.signal(prefill, signal.SIGCONT)
            answer = second.result()
        assert agree(answer, aggregated.answer(kept[0])).within(MAX_TIE_NATS)
        assert not fleet.compare(kept[1], decode.model).differing
        prefill.wait_idle()
        return was_allocated

    # On a machine that stands still in between, P is not quick every time.
    assert any(give_up(salt) for salt in (71, 72, 73))


def test_through_the_router(fleet, aggregated):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    url = fleet.router(prefill, decode)
    routed = Engine("router", url, prefill.log, prefill.model, fleet.client)
    before = len(list(fleet.captures.glob("loaded.*")))
    for length in (1, 40, 700):
        prompt = prompt_of(length, salt=5)
        assert agree(routed.answer(prompt), aggregated.answer(prompt)).within(MAX_TIE_NATS)
    assert len(list(fleet.captures.glob("loaded.*"))) == before + 2  # all but the single token moved
    decode.wait_idle()
    prefill.wait_idle()


def test_aborted_requests_give_everything_back(fleet):
    """Aborts on P while it computes, on D before, during and after the load: no block stays, and both still serve."""
    decode = consumer(fleet, 1)
    prefill = fleet.engine("prefill-impatient", role="kv_producer", config={"lease_s": 5})
    timeouts_s = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1)

    def give_up(engine, prompt, params, timeout_s):
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 64, "kv_transfer_params": params}
        with httpx.Client(trust_env=False, timeout=httpx.Timeout(10, read=timeout_s)) as client:
            try:
                client.post(f"{engine.url}/v1/completions", json=body)
            except httpx.ReadTimeout:
                return True
        return False

    gave_up = 0
    with ThreadPoolExecutor(8) as pool:
        jobs = []
        for salt, timeout_s in enumerate(timeouts_s * 3):
            prompt = prompt_of(1500, salt=salt)
            jobs.append(pool.submit(give_up, prefill, prompt, {"do_remote_decode": True}, timeout_s))
            jobs.append(pool.submit(give_up, decode, prompt, prefill.prefill(prompt), timeout_s))
        gave_up = sum(job.result() for job in jobs)
    assert gave_up >= len(timeouts_s)
    decode.wait_idle()
    prefill.wait_idle()  # leases that nobody asked for end with their time

    prompt = prompt_of(500, salt=77)
    assert prefill.prefill(prompt)["do_remote_prefill"]
    fleet.stop(prefill)
    params = producer(fleet, 1).prefill(prompt)
    decode.answer(prompt, params)
    assert not fleet.compare(params, decode.model).differing


def test_as_a_child_of_multi_connector(fleet, aggregated):
    """vLLM's MultiConnector carries our orders and reports; its offloading siblings need a GPU."""
    engines = fleet.engines(
        prefill_child={"role": "kv_producer", "as_child": True}, decode_child={"role": "kv_consumer", "as_child": True}
    )
    prefill, decode = engines.values()
    for length in (5, 700):
        prompt = prompt_of(length, salt=6)
        assert agree(fleet.transfer(prefill, decode, prompt), aggregated.answer(prompt)).within(MAX_TIE_NATS)
    decode.wait_idle()
    prefill.wait_idle()
    fleet.stop(prefill, decode)


def test_a_model_with_attention_only(fleet):
    prefill = fleet.engine("prefill-attention", model="attention", role="kv_producer")
    decode = fleet.engine("decode-attention", model="attention", role="kv_consumer")
    for length in (1, 5, 127, 128, 129, 1000):
        prompt = prompt_of(length, salt=3)
        params = prefill.prefill(prompt)
        assert params["remote_num_tokens"] == length  # K/V of all tokens; D recomputes the last one itself
        answer = decode.answer(prompt, params)
        compared = fleet.compare(params, decode.model)
        assert not compared.differing
        assert compared.num_tensors == 4
        # D itself, asked directly, is the aggregated engine here.
        assert agree(answer, decode.answer(prompt)).within(MAX_TIE_NATS)
    decode.wait_idle()
    prefill.wait_idle()
