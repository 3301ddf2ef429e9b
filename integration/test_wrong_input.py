"""What a client, an operator or a peer gets wrong: the exact outcome, and an engine that goes on serving."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_connector.core.errors import PeerError
from hybrid_connector.tools.completions import MAX_TIE_NATS, agree
from hybrid_connector.tools.servers import free_ports
from hybrid_connector.tools.tiny_model import TinyModel

from engines import Engine, Fleet, prompt_of
from test_transfer import consumer, producer


def assert_serves(fleet: Fleet, prefill: Engine, decode: Engine, salt: int):
    """A proper transfer right after whatever went wrong."""
    prompt = prompt_of(100, salt=salt)
    params = prefill.prefill(prompt)
    decode.answer(prompt, params)
    assert not fleet.compare(params, decode.model).differing


def assert_fails(decode: Engine, prompt, params, reason: str):
    """With policy ``fail`` the request ends with an error, and D's log says why."""
    with pytest.raises(PeerError):
        decode.answer(prompt, params)
    assert reason in decode.log.read_text()


def test_an_empty_prompt_is_refused_by_both(fleet):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    for engine in (prefill, decode):
        response = engine.post({"prompt": "", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
        assert response.status_code == 400, response.text
    assert_serves(fleet, prefill, decode, salt=1)


def test_a_prompt_longer_than_the_model_is_refused(fleet):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    response = prefill.post(
        {"prompt": prompt_of(5000), "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    )
    assert response.status_code == 400
    assert "4096" in response.text
    assert_serves(fleet, prefill, decode, salt=2)


def test_a_peer_that_is_not_there(fleet, aggregated):
    """Policy ``fail``: an error that names the address. Policy ``recompute``: the right answer, computed locally."""
    hasty = {"role": "kv_consumer", "config": {"acquire_timeout_s": 5, "handshake_timeout_s": 1}}
    policies = {f"decode-hasty-{policy}": {**hasty, "policy": policy} for policy in ("fail", "recompute")}
    failing, recomputing = fleet.engines(**policies).values()
    prefill = producer(fleet, 1)
    (dead_port,) = free_ports(1)
    prompt = prompt_of(50, salt=4)
    params = prefill.prefill(prompt)
    elsewhere = {**params, "remote_port": dead_port}
    with ThreadPoolExecutor(1) as pool:  # both wait until their deadline
        recomputed = pool.submit(recomputing.answer, prompt, elsewhere)
        assert_fails(failing, prompt, elsewhere, f"127.0.0.1:{dead_port}")
    assert agree(recomputed.result(), aggregated.answer(prompt)).within(MAX_TIE_NATS)
    failing.answer(prompt, params)  # the lease is still there for who asks P itself
    prefill.wait_idle()
    assert_serves(fleet, prefill, failing, salt=3)
    assert_serves(fleet, prefill, recomputing, salt=4)
    fleet.stop(failing, recomputing)


def test_a_peer_with_another_model(fleet):
    decode = consumer(fleet, 1)
    other = fleet.engine("prefill-attention", model="attention", role="kv_producer")
    prompt = prompt_of(50, salt=6)
    assert_fails(decode, prompt, other.prefill(prompt), "architecture: Qwen3ForCausalLM on P")
    assert_serves(fleet, producer(fleet, 1), decode, salt=5)


def test_a_reference_used_twice(fleet):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    prompt = prompt_of(60, salt=7)
    params = prefill.prefill(prompt)
    decode.answer(prompt, params)
    prefill.wait_idle()
    assert_fails(decode, prompt, params, "consumed: it was read, or given up, before")
    assert_serves(fleet, prefill, decode, salt=6)


def test_a_forged_token(fleet):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    prompt = prompt_of(60, salt=8)
    params = {**prefill.prefill(prompt), "remote_lease_token": "0" * 32}
    assert_fails(decode, prompt, params, "wrong_token: the token is not the one that was given out with the answer")
    assert_serves(fleet, prefill, decode, salt=7)


def test_parameters_of_a_wrong_type(fleet):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    prompt = prompt_of(60, salt=9)
    params = {**prefill.prefill(prompt), "remote_port": "5600"}
    assert_fails(decode, prompt, params, "kv_transfer_params.remote_port: expected int, got '5600'")
    assert_serves(fleet, prefill, decode, salt=8)


def test_parameters_of_another_prompt(fleet):
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    params = prefill.prefill(prompt_of(60, salt=10))
    assert_fails(
        decode, prompt_of(61, salt=10), params, "P holds the state after 59 tokens, this prompt needs it after 60"
    )
    assert_serves(fleet, prefill, decode, salt=9)


def test_a_request_for_the_other_role(fleet):
    """A producer asked to load fails the request and says so; a consumer asked to keep state keeps none."""
    prefill, decode = producer(fleet, 1), consumer(fleet, 1)
    prompt = prompt_of(60, salt=11)
    assert_fails(prefill, prompt, prefill.prefill(prompt), "this engine has kv_role kv_producer and cannot load")
    response = decode.post({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    assert response.status_code == 200
    assert response.json()["kv_transfer_params"] is None
    assert "kv_role is kv_consumer: nothing is kept for it" in decode.log.read_text()
    decode.wait_idle()
    assert_serves(fleet, prefill, decode, salt=10)


def test_an_unknown_key_in_the_config_stops_the_engine_and_lists_the_known_ones(fleet):
    log = fleet.start_to_fail("unknown-key", role="kv_producer", config={"lease_sec": 5})
    assert "kv_connector_extra_config: unknown key 'lease_sec'; known keys are lease_s, handshake_timeout_s" in log


def test_a_value_out_of_range_stops_the_engine(fleet):
    log = fleet.start_to_fail("bad-value", role="kv_producer", config={"lease_s": -1})
    assert "kv_connector_extra_config: Expected `float` > 0.0 - at `$.lease_s`" in log


def test_an_unknown_role_stops_the_engine(fleet):
    log = fleet.start_to_fail("bad-role", role="kv_prefiller")
    assert "kv_prefiller" in log
    assert "kv_producer" in log


def test_context_parallelism_stops_the_engine(fleet):
    args = ("--decode-context-parallel-size", "2", "--num-gpu-blocks-override", "512")
    log = fleet.start_to_fail("context-parallel", model="mla", tp=2, role="kv_producer", args=args)
    assert "decode context parallelism of size 2 is not supported yet: use size 1" in log


def test_two_revisions_of_a_model(fleet):
    """The same geometry, other weights: during a rolling update neither may continue the other's state."""
    decode = consumer(fleet, 1)
    other = fleet.engine("prefill-revised", model=TinyModel(kind="hybrid", seed=1), role="kv_producer")
    prompt = prompt_of(50, salt=12)
    assert_fails(decode, prompt, other.prefill(prompt), "cannot exchange state with this one: weights: ")
    assert_serves(fleet, producer(fleet, 1), decode, salt=11)


def test_speculative_decoding_on_one_side(fleet):
    speculation = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
    args = ("--speculative-config", speculation)
    p = fleet.engine("prefill-ngram", model="attention", role="kv_producer", args=args)
    d = fleet.engine("decode-attention", model="attention", role="kv_consumer")
    prompt = prompt_of(50, salt=13)
    assert_fails(d, prompt, p.prefill(prompt), "speculative decoding: ngram, 2 tokens on P, off on D")
    assert_serves(fleet, fleet.engine("prefill-attention", model="attention", role="kv_producer"), d, salt=12)
