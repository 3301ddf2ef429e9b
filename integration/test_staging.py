"""Real engines that stage every page they can: the same bytes, and counters that say how they came."""

import re

import pytest

from engines import Engine, prompt_of

LENGTHS = (2, 385, 2000)


def bytes_read(engine: Engine) -> dict[str, float]:
    """What the engine has read, by way."""
    text = engine.client.get(f"{engine.url}/metrics").text
    lines = re.findall(r'^vllm:hybrid_connector_read_bytes_total\{[^}]*way="(\w+)"[^}]*\} (\S+)$', text, re.MULTILINE)
    return {way: float(value) for way, value in lines}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("staging_bytes", [None, 1 << 16], ids=["whole", "in-chunks"])
def test_staged_bytes_arrive_and_are_counted(fleet, prefill_tp, decode_tp, staging_bytes):
    config = {"staging": "always", "verify": "all"}
    if staging_bytes is not None:
        config["staging_bytes"] = staging_bytes
    prefill, decode = fleet.engines(
        **{
            f"prefill-tp{prefill_tp}": {"role": "kv_producer", "tp": prefill_tp},
            f"decode-tp{decode_tp}-{staging_bytes}": {"role": "kv_consumer", "tp": decode_tp, "config": config},
        }
    ).values()
    read = {"direct": 0, "staged": 0}
    for length in LENGTHS:
        prompt = prompt_of(length, salt=100 * prefill_tp + decode_tp)
        params = prefill.prefill(prompt)
        decode.answer(prompt, params)
        assert not fleet.compare(params, decode.model).differing
        for capture in fleet.captured(params).loaded:
            moved = capture.meta["moved"]
            # One K/V head of two, or half of a state: nothing is the same page on both sides. A chunk that waits long
            # for room, as on a busy machine, is read directly.
            if staging_bytes is None:
                assert moved["staged_bytes"] >= sum(moved["kind_bytes"].values())
                assert moved["direct_bytes"] == 0
            assert moved["staged_bytes"] > 0
            read["direct"] += moved["direct_bytes"]
            read["staged"] += moved["staged_bytes"]
    decode.wait_idle()
    assert bytes_read(decode) == read
    assert decode.metric("vllm:hybrid_connector_verified_loads_total") == len(LENGTHS) * decode_tp
    prefill.wait_idle()
    fleet.stop(decode)
