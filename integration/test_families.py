"""Every family that vLLM's CPU build can run, both ways between tensor-parallel sizes, and the layouts in between."""

import pytest

from hybrid_connector.core.errors import PeerError
from hybrid_connector.tools.completions import agree
from hybrid_connector.tools.tiny_model import TinyModel

from engines import Fleet, prompt_of

LENGTHS = (2, 33, 129, 400, 1000)
MAX_TIE_NATS = 0.25
"""Wider than the demo's: here D's own answer sums over another number of ranks than P's state did, in bfloat16, and
ten families round differently. That the state itself is right to the byte is checked apart from it."""

MANY_BLOCKS = ("--num-gpu-blocks-override", "512")  # what 4,096 tokens need where blocks are short
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
SPECULATING = {"model": "attention", "args": ("--speculative-config", SPECULATION)}
OWN_STAGES = {"model": TinyModel(kind="hybrid", num_layers=8), "args": ("--pipeline-parallel-size", "2")}


def check(fleet: Fleet, name: str, prefill: dict, decode: dict):
    """Every byte of every length arrives, and D answers as it does when it computes the prompt itself."""
    wanted = {"P": {"role": "kv_producer", **prefill}, "D": {"role": "kv_consumer", **decode}}
    engines = fleet.engines(**{f"{side}-{name}": kwargs for side, kwargs in wanted.items()})
    p, d = engines.values()
    try:
        for length in LENGTHS:
            prompt = prompt_of(length, salt=length)
            agreement = agree(fleet.transfer(p, d, prompt), d.answer(prompt))
            assert agreement.within(MAX_TIE_NATS), f"{length} tokens: {agreement}"
        d.wait_idle()
        p.wait_idle()
    finally:
        fleet.stop(p, d)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_next",  # gated delta net, mixture of experts
        "granite_h",  # Mamba2, one group: B and C whole on every rank
        "nemotron_h",  # Mamba2, eight groups
        "falcon_h1",  # attention and Mamba2 in every layer
        "jamba",  # Mamba1
        "lfm2",  # short convolution alone
        "recurrent",  # Mamba2 and nothing else
        "mamba1",  # Mamba1 and nothing else
        "sliding",  # three windows, then full attention
        "mla",  # one latent vector per token, whole on every rank
    ],
)
def test_family(fleet, kind, prefill_tp, decode_tp):
    args = MANY_BLOCKS if kind in ("sliding", "mla") else ()
    check(
        fleet,
        f"{kind}-TP{prefill_tp}-to-TP{decode_tp}",
        {"model": kind, "tp": prefill_tp, "args": args},
        {"model": kind, "tp": decode_tp, "args": args},
    )


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}}, {}, id="conv-DS-to-SD"),
        pytest.param({}, {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}, "tp": 2}, id="conv-SD-to-DS-at-TP2"),
        pytest.param({"args": ("--no-enable-prefix-caching",)}, {}, id="prefix-caching-on-D-only"),
        pytest.param({}, {"args": ("--no-enable-prefix-caching",)}, id="prefix-caching-on-P-only"),
        pytest.param(SPECULATING, SPECULATING, id="speculating-on-both"),
        pytest.param(
            {"model": "attention", "args": ("--data-parallel-size", "2")}, {"model": "attention"}, id="DP2-to-1"
        ),
        pytest.param(OWN_STAGES, {"model": OWN_STAGES["model"]}, id="PP2-to-PP1"),
        pytest.param({"model": OWN_STAGES["model"]}, OWN_STAGES, id="PP1-to-PP2"),
        pytest.param(OWN_STAGES, OWN_STAGES, id="PP2-to-PP2"),
    ],
)
def test_different_layouts_and_placements(fleet, request, prefill, decode):
    check(fleet, request.node.callspec.id, prefill, decode)


def test_pages_of_different_length_are_refused_where_their_order_is_the_kernels_own(fleet):
    """vLLM's CPU kernels do not keep tokens one after the other, so a part of a page means nothing elsewhere."""
    p, d = fleet.engines(
        P288={"role": "kv_producer", "args": ("--block-size", "32")}, D384={"role": "kv_consumer"}
    ).values()
    prompt = prompt_of(50, salt=30000)
    with pytest.raises(PeerError):
        d.answer(prompt, p.prefill(prompt))
    reason = "element type is bfloat16 in CPU pages of 288 tokens on P, bfloat16 in CPU pages of 384 tokens on D"
    assert reason in d.log.read_text()
    fleet.stop(p, d)
