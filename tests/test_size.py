"""Does ``hybrid-connector size`` say how many requests fit, and say what is wrong where it cannot?

integration/test_size.py holds the same arithmetic against vLLM's own.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_connector.core.families import Attention, Conv, ElementType, Temporal, delta_net
from hybrid_connector.tools.cli import main
from hybrid_connector.tools.sizing import models
from hybrid_connector.tools.sizing.capacity import (
    Fit,
    Memory,
    ModelShape,
    Pool,
    Serving,
    Topology,
    Weights,
    fit,
    group_layers,
    shape_pool,
    state_bytes,
)
from hybrid_connector.tools.sizing.models import GIB, read_config, read_preset, read_weights

BF16, FP32, FP8 = ElementType("bfloat16", 2), ElementType("float32", 4), ElementType("fp8", 1)
KIB, MIB = 2**10, 2**20
PUBLISHED = read_preset("qwen3.8-2.4t")
AS_PUBLISHED = Serving(spec_tokens=2)

SCRIPT = Path(sys.executable).parent / "hybrid-connector"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed console script."""
    return subprocess.run([SCRIPT, "size", *arguments], capture_output=True, text=True, timeout=60)


# The published model.


def test_block_and_page_are_the_published_ones():
    pool = shape_pool(PUBLISHED.model, AS_PUBLISHED, tp=1)
    assert (pool.token_bytes, pool.state_bytes) == (2 * KIB, 4 * MIB + 120 * KIB)
    assert (pool.block_tokens, pool.page_bytes) == (2112, 4.125 * MIB)
    assert round(pool.state_bytes / MIB, 3) == 4.117


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_published_block_is_a_multiple_of_all_of_these(block_size):
    assert shape_pool(PUBLISHED.model, replace(AS_PUBLISHED, block_size=block_size), tp=1).block_tokens == 2112


def test_the_published_layers_form_four_groups():
    pool = shape_pool(PUBLISHED.model, Serving(), tp=1)
    assert (pool.num_attention_groups, pool.num_recurrent_groups, pool.layers_per_block) == (1, 3, 23)
    assert shape_pool(PUBLISHED.model, AS_PUBLISHED, tp=1).layers_per_block == 24  # the draft head's attention


def test_published_memory():
    memory = Memory(int(254 * GIB), 0, PUBLISHED.activations)
    tp8 = fit(PUBLISHED.model, PUBLISHED.weights, Topology(8), AS_PUBLISHED, memory)
    tp4dp4 = fit(PUBLISHED.model, PUBLISHED.weights, Topology(4, 4), AS_PUBLISHED, memory)
    assert tp8.weights_bytes == (91 + 1242) * GIB / 8
    assert tp4dp4.weights_bytes == (91 / 4 + 1242 / 16) * GIB
    assert tp8.cache_bytes == pytest.approx((254 - 1333 / 8 - 0.57) * GIB, abs=2)
    assert tp4dp4.cache_bytes == pytest.approx((254 - 22.75 - 77.625 - 2.24) * GIB, abs=2)


def test_ranking_of_topologies():
    """By the script: whole heads on as few ranks as hold them win; each replica of a K/V head costs."""
    done = run_script("--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    ranked = [row["topology"] for row in answer["topologies"]]
    assert ranked == ["TP2DP8", "TP4DP4", "TP8DP2", "TP1DP16", "TP16", "TP8"]
    requests = [row["requests"] for row in answer["topologies"]]
    assert requests == sorted(requests, reverse=True)
    (whole,) = (row for row in answer["topologies"] if row["tp"] == 1)
    assert (whole["block_tokens"], whole["page_bytes"]) == (2112, 4.125 * MIB)
    assert (whole["state_bytes_per_layer"], whole["larger_part"]) == (4_317_184, "state")
    assert set(answer["options"]) == {
        "--mamba-ssm-cache-dtype bfloat16",
        "--kv-cache-dtype fp8",
        "--block-size 4096",
        "--spec-tokens 0",
        "--no-prefix-caching",
    }


# The arithmetic.


def test_a_request_by_hand():
    """2 attention and 6 delta-net layers, TP 2: 2 heads of 8 are 64 bytes a token, a state 2,240 bytes: 48 tokens."""
    net = delta_net(
        num_key_heads=2,
        num_value_heads=4,
        key_dim=16,
        value_dim=16,
        num_taps=3,
        conv_element=BF16,
        temporal_element=FP32,
    )
    model = ModelShape("by hand", 2, Attention(4, 2 * 8, BF16), 6, net)
    memory = Memory(300_000, 1_000, {})
    found = fit(model, Weights(100_000, 80_000), Topology(2, 2), Serving(prefix_caching=False), memory)
    pool = found.pool
    assert pool == Pool(
        token_bytes=64,
        state_bytes=3 * (16 + 16 + 32) * 2 + 2 * 16 * 16 * 4,
        block_tokens=48,
        page_bytes=3072,
        layers_per_block=2,
        num_attention_groups=1,
        num_recurrent_groups=3,
        states_per_request=1,
    )
    assert found.weights_bytes == 50_000 + 20_000
    assert found.cache_bytes == 300_000 - 70_000 - 1_000
    assert found.num_blocks == 229_000 // 6144 == 37
    assert pool.request_blocks(100) == 3 + 3
    assert found.requests_per_rank(100) == 36 // 6
    assert found.requests(100) == 12
    assert pool.crossover_tokens == 3 * 48


@given(st.integers(1, 100), st.integers(1, 300))
def test_groups_hold_every_layer(num_attention, num_recurrent):
    groups, size = group_layers((num_attention, num_recurrent))
    for n, of_kind in zip((num_attention, num_recurrent), groups, strict=True):
        assert (of_kind - 1) * size < n <= of_kind * size


@given(st.integers(1, 10), st.integers(1, 10), st.integers(1, 5), st.integers(16, 5000))
def test_beyond_the_crossover_more_is_kv(attention_groups, recurrent_groups, states, tokens):
    pool = Pool(1, 1, tokens, tokens, 1, attention_groups, recurrent_groups, states)
    assert pool.kv_blocks(pool.crossover_tokens) <= pool.state_blocks < pool.kv_blocks(pool.crossover_tokens + 1)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**5))
def test_requests_fit_and_no_more_would(cache, num_tokens):
    pool = Pool(1, 16, 16, 16, 3, 1, 2, 2)
    found = Fit(Topology(1, 4), pool, 0, 0, cache)
    requests, usable = found.requests_per_rank(num_tokens), max(0, found.num_blocks - 1)  # one block is the null block
    assert requests * pool.request_blocks(num_tokens) <= usable < (requests + 1) * pool.request_blocks(num_tokens)
    assert found.requests(num_tokens) == 4 * requests


def test_what_each_option_changes():
    model = PUBLISHED.model
    plain = Serving(prefix_caching=False)
    assert state_bytes(model.recurrent, plain, 1) == 4 * MIB + 72 * KIB
    assert state_bytes(model.recurrent, replace(plain, temporal_element=BF16), 1) == 2 * MIB + 72 * KIB
    assert state_bytes(model.recurrent, replace(plain, spec_tokens=2), 1) == 4 * MIB + 120 * KIB
    assert shape_pool(model, replace(plain, kv_element=FP8), 1).token_bytes == KIB
    assert shape_pool(model, replace(plain, block_size=4096), 1).block_tokens == 4096
    for spec_tokens in range(3):
        for caching in (False, True):
            serving = Serving(spec_tokens=spec_tokens, prefix_caching=caching)
            assert shape_pool(model, serving, 1).state_blocks == 3 * (1 + spec_tokens + caching)


def test_heads_that_ranks_share_are_replicated():
    tokens = {tp: shape_pool(PUBLISHED.model, Serving(), tp).token_bytes for tp in (1, 2, 4, 8)}
    assert tokens == {1: 2 * KIB, 2: KIB, 4: KIB, 8: KIB}


@pytest.mark.parametrize("text", ["TP4DP4", "tp4dp4", "TP4DP4EP16"])
def test_topologies_are_read(text):
    assert Topology.parse(text) == Topology(4, 4)


# The model's config.

HYBRID = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
}
LAYER_TYPES = ["linear_attention", "full_attention", "linear_attention", "full_attention"]


def test_a_config_is_read():
    model = read_config({"text_config": HYBRID | {"mtp_num_hidden_layers": 0}}, "here")
    assert (model.num_attention_layers, model.num_recurrent_layers, model.num_draft_layers) == (1, 3, 0)
    assert model.attention == Attention(2, 64, BF16)
    conv, temporal = model.recurrent.parts
    assert isinstance(conv, Conv)
    assert isinstance(temporal, Temporal)
    assert (conv.num_taps, conv.element, temporal.element) == (3, BF16, FP32)
    assert temporal.extents == (4, 16, 16)


def test_layer_types_are_counted():
    model = read_config(HYBRID | {"layer_types": LAYER_TYPES}, "here")
    assert (model.num_attention_layers, model.num_recurrent_layers) == (2, 2)


def test_a_model_without_recurrent_layers():
    config = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 64, "torch_dtype": "torch.float16"}
    model = read_config(config, "here")
    assert model.attention == Attention(8, 16, ElementType("float16", 2))
    pool = shape_pool(model, Serving(), 2)
    assert (pool.block_tokens, pool.page_bytes, pool.layers_per_block) == (16, 16 * 4 * 16 * 2, 3)
    assert pool.request_blocks(100) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "here: num_hidden_layers is missing"),
        ({"num_hidden_layers": "4"}, "here: num_hidden_layers: expected a whole number, got '4'"),
        ({"linear_key_head_dim": None}, "here: linear_key_head_dim is missing"),
        ({"layer_types": "linear"}, "here: layer_types: expected a list, got 'linear'"),
        ({"layer_types": ["mamba"] * 4}, "got 4 with mamba"),
        ({"layer_types": LAYER_TYPES[:3]}, "for each of 4 layers, got 3 with those"),
        ({"kv_lora_rank": 512}, "here: kv_lora_rank: latent attention"),
        ({"dtype": "int4"}, "here: dtype: element type: expected one of float32"),
    ],
)
def test_what_a_config_lacks_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(HYBRID | change, "here")


def write_tensors(file: Path, sizes: dict[str, int]) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def test_weights_are_read_from_headers(tmp_path):
    assert read_weights(tmp_path) is None
    write_tensors(tmp_path / "a.safetensors", {"model.layers.0.mlp.experts.0.up_proj.weight": 100, "lm_head.weight": 7})
    write_tensors(tmp_path / "b.safetensors", {"model.layers.0.mlp.shared_expert.up_proj.weight": 30})
    assert read_weights(tmp_path) == Weights(dense_bytes=37, expert_bytes=100)


def test_a_damaged_file_of_weights_is_named(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"a\.safetensors: expected a header of safetensors"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", models.gpu_names())
def test_gpus_of_the_presets(name):
    """In GiB: a value in other units would be far off."""
    assert 75 * GIB < models.gpu_bytes(name) < 288 * GIB


def test_published_memory_is_what_vllm_may_use_of_the_gpu(capsys):
    """About 254 GiB: 92 % of what CUDA reports."""
    assert ask(capsys, "--gpu", "gb300")["usable_bytes_per_gpu"] == pytest.approx(254 * GIB, rel=2e-3)


# The command line.


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    write_tensors(tmp_path / "model.safetensors", {"lm_head.weight": 2 * GIB})
    return tmp_path


def test_help_has_an_example():
    done = run_script("--help")
    assert done.returncode == 0
    assert "hybrid-connector size --topology TP8 --topology TP4DP4" in done.stdout


def test_tables_by_the_script(model_dir):
    done = run_script("--config", str(model_dir), "--gpu", "h200", "--gpus", "2", "--isl", "1000", "--osl", "24")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "1,000 + 24 tokens on 2 GPUs",
        "TP2",
        "TP1DP2",
        "--mamba-ssm-cache-dtype bfloat16",
        "2.00 GiB outside",
    ):
        assert text in done.stdout


def test_wrong_input_by_the_script():
    done = run_script("--config", "nowhere", "--gpu", "h200")
    assert done.returncode == 1
    assert done.stderr == (
        "hybrid-connector: nowhere: expected a config.json or a directory with one: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "TP3"], "TP3: 2 KV heads cannot be split over 3 ranks"),
        (["--topology", "TP32", "--gpus", "16"], "TP32 needs 32 GPUs, there are 16"),
        (["--block-size", "40"], "expected a multiple of FLASH_ATTN's 16 tokens, got 40"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message, capsys):
    assert main(["size", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "8"], "topology '8': expected something like TP8, TP4DP4 or TP4DP4EP16"),
        (["--topology", "TP0"], "expected sizes of at least 1"),
        (["--topology", "TP4DP4EP8"], "vLLM spreads experts over TP x DP = 16 ranks, got EP8"),
        (["--isl", "0"], "expected a whole number of at least 1, got 0"),
        (["--osl", "many"], "expected a whole number of at least 1, got many"),
        (["--spec-tokens", "-1"], "expected a whole number of at least 0, got -1"),
        (["--activation-gib", "TP8=x"], "expected a number, got x"),
        (["--memory-gib", "nan"], "expected a size in GiB, got nan"),
        (["--gpu-memory-utilization", "92"], "expected more than 0 and at most 1, got 92"),
    ],
)
def test_options_say_what_they_expect(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["size", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_config_needs_a_gpu_and_weights(model_dir, capsys):
    assert main(["size", "--config", str(model_dir)]) == 1
    assert "expected --gpu (gb300, " in capsys.readouterr().err
    (model_dir / "model.safetensors").unlink()
    assert main(["size", "--config", str(model_dir), "--gpu", "h100"]) == 1
    assert "expected --weights-gib" in capsys.readouterr().err
    assert main(["size", "--config", str(model_dir), "--gpu", "h100", "--weights-gib", "1"]) == 0


def ask(capsys, *arguments: str) -> dict:
    assert main(["size", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_numbers_given_replace_those_of_the_preset(capsys):
    (row,) = ask(
        capsys,
        *("--topology", "TP8", "--memory-gib", "100", "--weights-gib", "80", "--expert-gib", "160"),
        *("--activation-gib", "3", "--activation-gib", "TP8=5", "--gpus", "24"),
    )["topologies"]
    assert row["weights_bytes_per_gpu"] == 30 * GIB
    assert (row["activation_bytes_per_gpu"], row["activation_measured"]) == (5 * GIB, True)
    assert row["cache_bytes_per_gpu"] == 65 * GIB
    assert row["num_engines"] == 3
    assert row["requests"] == 3 * row["requests_per_dp_rank"]


def test_activations_of_other_topologies_are_assumed(capsys):
    tp8, tp16 = sorted(ask(capsys, "--topology", "TP8", "--topology", "TP16")["topologies"], key=lambda row: row["tp"])
    assert (tp8["activation_measured"], tp16["activation_measured"]) == (True, False)
    assert tp8["activation_bytes_per_gpu"] == int(0.57 * GIB)
    assert tp16["activation_bytes_per_gpu"] == int(2.24 * GIB)


def test_weights_that_do_not_fit(capsys):
    (row,) = ask(capsys, "--topology", "TP4")["topologies"]
    assert row["cache_bytes_per_gpu"] < 0
    assert (row["num_blocks_per_rank"], row["requests"]) == (0, 0)


def test_vllm_options_change_the_answer(capsys):
    """Each option given equals the option's line in the answer without it."""
    plain = ask(capsys, "--topology", "TP4DP4")
    for option, (row,) in plain["options"].items():
        assert ask(capsys, "--topology", "TP4DP4", *option.split())["topologies"] == [row]
        assert row != plain["topologies"][0]


def test_a_plot_is_drawn(tmp_path, capsys):
    file = tmp_path / "concurrency.png"
    assert main(["size", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert file.stat().st_size > 10_000
    assert str(file) in capsys.readouterr().out
    assert main(["size", "--plot", str(tmp_path / "concurrency.nothing")]) == 1
    assert "'nothing' is not supported" in capsys.readouterr().err


def test_a_plot_without_matplotlib():
    """Nor torch, which no subcommand but the demo needs."""
    program = (
        "import sys; sys.modules |= {'matplotlib': None, 'torch': None}; "
        "from hybrid_connector.tools.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "size", "--plot", "x.png"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "--plot needs matplotlib: pip install 'hybrid-connector[plot]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_page_in_the_docs_shows_what_is_printed():
    page = (Path(__file__).parent.parent / "docs" / "size.md").read_text(encoding="utf-8")
    assert run_script().stdout.rstrip() in page
