"""Does `hybrid-connector plan` say what the connector would do? Through the installed command, and its parts alone.

Figures are worked out by hand here; integration/test_plan.py holds the rules against vLLM itself.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hybrid_connector.core.errors import ConfigError, UnsupportedError
from hybrid_connector.tools.cli import main
from hybrid_connector.tools.models.architectures import ARCHITECTURES
from hybrid_connector.tools.models.config import load_config, read_config
from hybrid_connector.tools.models.engine import Blocks, Settings, describe_engine, parse_serve, stage_layers

COMMAND = Path(sys.executable).parent / "hybrid-connector"
KIB, MIB = 2**10, 2**20

ATTENTION = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
DELTA_NET = {
    **ATTENTION,
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
MAMBA2_NUMBERS = {
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 4,
}
CONFIGS = {
    "delta net": DELTA_NET,
    "delta net in a vision model": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**DELTA_NET, "mamba_ssm_dtype": "float32"},
    },
    "delta net, text": {**DELTA_NET, "architectures": ["Qwen3_5ForCausalLM"]},
    "Mamba2 by list": {
        **ATTENTION,
        **MAMBA2_NUMBERS,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba"] * 7 + ["attention"],
    },
    "Mamba2 by index": {
        **ATTENTION,
        **MAMBA2_NUMBERS,
        "architectures": ["BambaForCausalLM"],
        "num_hidden_layers": 8,
        "attn_layer_indices": [3, 7],
    },
    "Mamba2 in every layer": {
        **ATTENTION,
        **MAMBA2_NUMBERS,
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 8,
    },
    "Mamba2 by pattern": {
        **ATTENTION,
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-M*-ME*",
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    "Mamba1 by period": {
        **ATTENTION,
        "architectures": ["JambaForCausalLM"],
        "num_hidden_layers": 8,
        "intermediate_size": 5632,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "short convolution": {
        **ATTENTION,
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
    },
    "Mamba2 alone": {
        "architectures": ["Mamba2ForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_heads": 64,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "conv_kernel": 4,
    },
    "Mamba1 alone": {
        "architectures": ["MambaForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 768,
        "state_size": 16,
        "conv_kernel": 4,
    },
    "KDA and MLA": {
        "architectures": ["KimiLinearForCausalLM"],
        "hidden_size": 2304,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    "attention": {**ATTENTION, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 8},
    "sliding windows": {
        **ATTENTION,
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 12,
        "sliding_window": 512,
    },
    "MLA": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 8,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
}


def engine(name="delta net", line="", device="cuda", **changes):
    return describe_engine(read_config({**CONFIGS[name], **changes}, "config.json"), parse_serve(line, device))


def command(*args, **env):
    return subprocess.run(
        [COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **env},
    )


@pytest.fixture
def model(tmp_path):
    def write(name="delta net"):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        return tmp_path

    return write


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys):
    """The command in this process, which is quicker."""

    def run(*args):
        returncode = main([*map(str, args)])
        return Done(returncode, *capsys.readouterr())

    return run


@pytest.fixture
def plan(run):
    def plan(directory, *args):
        done = run("plan", directory, "--json", *args)
        assert done.stderr == ""
        return json.loads(done.stdout)

    return plan


# The command.


def test_bytes_descriptors_and_times(model, plan):
    found = plan(model(), "--tokens", 1024, 8192)
    assert found["refusal"] is None
    assert found["p"]["block_tokens"] == 544  # 1 MiB + 48 KiB of state a layer, 2 KiB a token, in steps of 16
    short, long = found["requests"]
    # 6 delta nets: 8,192 channels of 3 taps, and 32 heads of 128 by 128; the first length fills two blocks.
    state = {"conv": 6 * 8192 * 3 * 2, "temporal": 6 * 32 * 128 * 128 * 2}
    assert short["kind_bytes"] == {"attention": 2 * 2 * 544 * 2 * KIB, **state}
    assert long["kind_bytes"] == {"attention": 2 * 16 * 544 * 2 * KIB, **state}
    assert long["moved_tokens"] == 8191
    # Six states; the blocks of two attention layers, joined where they follow each other.
    assert (short["num_descriptors"], short["num_descriptors_scattered"]) == (6 + 2, 6 + 4)
    assert (long["num_descriptors"], long["num_descriptors_scattered"]) == (6 + 2, 6 + 2 * 16)
    total = sum(long["kind_bytes"].values())
    assert long["direct_s"]["cuda_ipc"] == pytest.approx(100e-6 + 8 * 3.2e-6 + total / 240e9)
    assert set(long["direct_s"]) == {"cuda_ipc", "rdma", "tcp"}


def test_a_table_for_people(model):
    done = command("plan", model(), "--prefill", "-tp 2", "--decode", "vllm serve x -tp 1 --seed 3", "--tokens", 8192)
    assert (done.returncode, done.stderr) == (0, "")
    assert "P and D can exchange state" in done.stdout
    assert "35,651,584" in done.stdout  # attention bytes, as above
    assert "says nothing about caches, or is not known here: --seed 3" in done.stdout
    assert "attention backend FLASH_ATTN assumed" in done.stdout


def test_ranks_share_the_bytes(model, plan):
    (whole,) = plan(model(), "--tokens", 4096)["requests"]
    (split,) = plan(model(), "--tokens", 4096, "--decode", "-tp 2")["requests"]
    assert split["kind_bytes"] == whole["kind_bytes"]
    assert len(split["ranks"]) == 2
    assert split["ranks"][0]["kind_bytes"] == {kind: size // 2 for kind, size in whole["kind_bytes"].items()}
    assert split["num_descriptors"] > whole["num_descriptors"]


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (
            "",
            "--mamba-ssm-cache-dtype float32",
            "model.layers.0.linear_attn.temporal: element type is bfloat16 on P, float32 on D",
        ),
        ("--kv-cache-dtype fp8", "", "K/V quantisation: FP8_PER_TENSOR on P, NONE on D"),
        ("--dtype float16", "", "computation dtype: float16 on P, bfloat16 on D"),
        (
            """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'""",
            "",
            "speculative decoding: mtp, 2 tokens on P, off on D",
        ),
    ],
)
def test_what_the_handshake_would_refuse(model, run, prefill, decode, reason):
    done = run("plan", model(), "--prefill", prefill, "--decode", decode)
    assert done.returncode == 1
    assert f"P and D refuse each other: {reason}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            ["--prefill", "-tp 3"],
            "P: model.layers.0.linear_attn: 16 units of conv section q cannot be split over 3 ranks",
        ),
        (["--decode", "-dcp 2"], "D: decode context parallelism of size 2 is not supported yet: use size 1"),
        (["--prefill", "--block-size many"], "P: argument --block-size: invalid int value: 'many'"),
        (
            ["--prefill", "--attention-backend FLASHMLA"],
            "P: attention backend FLASHMLA: expected one for plain attention",
        ),
        (["--prefill", "--attention-backend X"], "P: attention backend: expected one of"),
        (["--prefill", "-tp 0"], "P: tensor-parallel size: expected at least 1, got 0"),
        (["--prefill", "-pp 9"], "P: 9 pipeline stages: the model has 8 layers"),
        (["--prefill", "VLLM_KV_CACHE_LAYOUT=XY vllm serve"], "P: cache layout: expected one of LBHNC"),
        (["--prefill", "VLLM_PP_LAYER_PARTITION=3,5 vllm serve"], "P: VLLM_PP_LAYER_PARTITION: stages of chosen sizes"),
        (["--prefill", "--kv-cache-dtype int9"], "P: element type int9: expected one of bfloat16"),
        (["--prefill", "'"], 'P: "\'": expected the arguments of vllm serve: No closing quotation'),
        (["--tokens", "1"], "--tokens: expected at least 2, got 1"),
        (["--fragmented", "101"], "--fragmented: expected a percentage from 0 to 100, got 101"),
        (["--cost", "rdma=fast"], "expected three numbers"),
        (["--like", "missing.npz"], "--like missing.npz: expected what D captured of a load"),
    ],
)
def test_what_cannot_be_planned_is_one_line_on_stderr(model, run, args, reason):
    done = run("plan", model(), *args)
    assert done.returncode == 1
    assert done.stderr.startswith(f"hybrid-connector: {reason}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_model_that_is_not_there(run):
    done = run("plan", "nowhere")
    assert done.stderr == (
        "hybrid-connector: nowhere: expected a directory with a config.json, such a file, or OWNER/NAME on the Hub\n"
    )


def test_a_name_on_the_hub_that_is_not_cached(tmp_path):
    done = command("plan", "someone/something", HF_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("hybrid-connector: someone/something: no such directory")
    assert "Traceback" not in done.stderr


def test_a_name_on_the_hub_is_found_in_its_cache(tmp_path):
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "hub" / "models--someone--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(DELTA_NET))
    done = command("plan", "someone/something", HF_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "someone/something: Qwen3NextForCausalLM, 2 attention and 6 recurrent caches in 8 layers" in done.stdout


def test_it_needs_neither_torch_nor_vllm_nor_nixl(model):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'vllm', 'nixl', 'transformers'))); "
        "from hybrid_connector.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    args = [sys.executable, "-c", code, "plan", str(model()), "--tokens", "100"]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "P and D can exchange state" in done.stdout


def test_help_has_an_example():
    assert "hybrid-connector plan MODEL --prefill" in command("plan", "--help").stdout


def test_costs_of_ones_own(model, plan):
    args = ("--tokens", 8192, "--transport", "rdma", "--cost", "rdma=1000,0,1e9")
    (row,) = plan(model(), *args)["requests"]
    assert row["direct_s"] == {"rdma": pytest.approx(1e-3, rel=1e-3)}


def test_blocks_of_a_real_request(model, plan, tmp_path):
    """One state per recurrent group, two attention blocks that do not follow each other on P."""
    moved = {"src_block_ids": [[5], [6], [7], [9, 11]], "dst_block_ids": [[3], [4], [8], [1, 2]]}
    meta = np.frombuffer(json.dumps({"num_tokens": 600, "moved": moved}).encode(), dtype=np.uint8)
    np.savez(tmp_path / "loaded.npz", meta=meta)
    (row,) = plan(model(), "--like", tmp_path / "loaded.npz")["requests"]
    assert (row["prompt_tokens"], row["moved_tokens"]) == (601, 600)
    assert (row["num_descriptors"], row["num_descriptors_scattered"]) == (6 + 4, None)


def test_fragmentation_lies_between_both_ends(model, plan):
    directory = model("attention")
    counts = [
        plan(directory, "--tokens", 1600, "--fragmented", percent)["requests"][0]["num_descriptors"]
        for percent in (0, 25, 50, 100)
    ]
    assert counts == [8, 8 * 25, 8 * 50, 8 * 100]  # 100 blocks, so 99 steps from one to the next


# Its parts.


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("line", ["", "-tp 2", "-pp 2", "VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve m -tp 4"])
def test_every_family_is_laid_out(name, line):
    """``RankLayout`` itself refuses pages that overlap or leave the region."""
    found = engine(name, line)
    layouts = found.layouts(8)
    assert [layout.rank for layout in layouts] == list(range(found.settings.tp * found.settings.pp))
    names = {layer.name for layout in layouts for layer in layout.layers}
    assert names == {layer.name for layer in found.model.layers}
    assert {name for group in found.groups for name in group} == names


def test_every_class_in_the_table_is_planned_or_shares_its_line():
    planned = {id(ARCHITECTURES[config["architectures"][0]]) for config in CONFIGS.values()}
    left = {name for name, architecture in ARCHITECTURES.items() if id(architecture) not in planned}
    assert left == {"FalconMambaForCausalLM", "Lfm2MoeForCausalLM"}


@pytest.mark.parametrize(
    ("name", "attention", "recurrent", "groups"),
    [
        ("delta net", 2, 6, [2, 2, 2, 2]),
        ("delta net in a vision model", 2, 6, [2, 2, 2, 2]),
        ("Mamba2 by list", 1, 7, [1] * 8),
        ("Mamba2 by index", 2, 6, [2, 2, 2, 2]),
        ("Mamba2 in every layer", 8, 8, [8, 8]),
        ("Mamba2 by pattern", 2, 3, [2, 1, 2]),
        ("Mamba1 by period", 1, 7, [1] * 8),
        ("short convolution", 1, 3, [1] * 4),
        ("Mamba2 alone", 0, 8, [8]),
        ("KDA and MLA", 2, 6, [2, 2, 2, 2]),
        ("attention", 8, 0, [8]),
        ("sliding windows", 12, 0, [2] * 6),
        ("MLA", 8, 0, [8]),
    ],
)
def test_layers_and_groups(name, attention, recurrent, groups):
    found = engine(name)
    kinds = [shard.tensor.kind for layer in found.layouts(4)[0].layers for shard in layer.shards[:1]]
    assert (kinds.count("attention"), len(kinds) - kinds.count("attention")) == (attention, recurrent)
    assert [len(group) for group in found.groups] == groups


@pytest.mark.parametrize(
    ("name", "line", "temporal"),
    [
        ("delta net", "", "bfloat16"),
        ("delta net in a vision model", "", "float32"),  # as its config says
        ("Mamba2 by pattern", "", "float32"),  # as this family's default is
        ("KDA and MLA", "", "float32"),
        ("delta net", "--mamba-ssm-cache-dtype float32", "float32"),
        ("delta net", "--mamba-cache-dtype float32", "float32"),
        ("delta net in a vision model", "--mamba-ssm-cache-dtype bfloat16", "bfloat16"),
    ],
)
def test_element_types_of_states(name, line, temporal):
    assert engine(name, line).elements.temporal.name == temporal


def test_speculation_lengthens_conv_states():
    line = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'"""
    wanted = {"delta net": 6, "Mamba2 by index": 6, "short convolution": 5, "KDA and MLA": 6, "Mamba1 by period": 3}
    for name, taps in wanted.items():
        shards = [shard for layer in engine(name, line).layouts(4)[0].layers for shard in layer.shards]
        assert {shard.tensor.shape[1] for shard in shards if shard.tensor.kind == "conv"} == {taps}


def test_a_line_of_vllm_serve():
    extra = {"kv_role": "kv_producer", "kv_connector_extra_config": {"kv_cache_layout": "BLHNC"}}
    line = (
        "VLLM_SSM_CONV_STATE_LAYOUT=DS VLLM_LOGGING_LEVEL=ERROR vllm serve some/model --tensor_parallel_size=4 -pp 2 "
        "--block-size 64 --dtype half --kv-cache-dtype fp8 --port 8100 "
        f"--kv-transfer-config {shlex.quote(json.dumps(extra))}"
    )
    assert parse_serve(line, "cuda") == Settings(
        tp=4,
        pp=2,
        block_size=64,
        dtype="half",
        kv_cache_dtype="fp8",
        layout="BLHNC",
        channel_first=True,
        ignored=("--port", "8100"),
    )


def test_the_connectors_default_layout_is_named():
    assert parse_serve("", "cuda").layout == "LBHNC"
    assert parse_serve("VLLM_KV_CACHE_LAYOUT=NHD vllm serve m", "cuda").layout == "LBNHC"


@pytest.mark.parametrize(
    ("num_layers", "stages"),
    [
        (8, ((0, 4), (4, 8))),
        (7, ((0, 4), (4, 7))),
        (10, ((0, 2), (2, 5), (5, 8), (8, 10))),
        (11, ((0, 3), (3, 6), (6, 9), (9, 11))),
        (5, ((0, 5),)),
    ],
)
def test_stages_share_out_layers(num_layers, stages):
    assert stage_layers(num_layers, len(stages)) == stages


def test_windows_need_no_blocks_before_them():
    found = engine("sliding windows")
    ids = found.block_ids(1024, Blocks())
    assert [sum(block is None for block in group) for group in ids] == [32] * 5 + [0]  # 1024 - 512 + 1 tokens, by 16
    assert all(len(group) == 64 for group in ids)


def test_made_up_blocks_are_never_the_null_block_and_never_twice():
    blocks = Blocks(30)
    taken = [block for number in (1, 5, 20) for block in blocks.take(number)]
    assert len(set(taken)) == len(taken) == 26
    assert min(taken) == 1


def test_block_outermost_layouts_keep_a_block_together():
    (layout,) = engine("delta net", "VLLM_KV_CACHE_LAYOUT=BLHNC vllm serve m").layouts(4)
    strides = {layer.page_stride for layer in layout.layers}
    assert strides == {layout.region_bytes // 4}
    assert max(layer.offset for layer in layout.layers) < layout.region_bytes // 4


def test_cpu_pages_are_told_apart_by_their_length():
    found = engine("delta net", "", "cpu")
    assert found.elements.attention.name == f"bfloat16 in CPU pages of {found.page_tokens} tokens"
    assert found.elements.temporal.name == "float32"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "c: architectures: expected a list with the model's class, got None"),
        ({"architectures": ["X"]}, "c: X is not among the classes that can be planned without vLLM: BambaForCausalLM,"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "c: num_hidden_layers: expected a whole number, got None"),
        (
            {**CONFIGS["delta net"], "linear_num_key_heads": "many"},
            "c: linear_num_key_heads: expected a whole number, got 'many'",
        ),
        ({**CONFIGS["short convolution"], "layer_types": ["conv", "ring"]}, "c: layers of type ring are not known"),
        (
            {**CONFIGS["short convolution"], "layer_types": "conv"},
            "c: layer_types or layers_block_type: expected a list",
        ),
        ({**CONFIGS["KDA and MLA"], "linear_attn_config": 3}, "c: linear_attn_config: expected an object, got 3"),
        ({**CONFIGS["attention"], "num_hidden_layers": 0}, "c: none of its 0 layers keeps any state"),
    ],
)
def test_configs_that_cannot_be_read(config, reason):
    with pytest.raises((ConfigError, UnsupportedError)) as caught:
        describe_engine(read_config(config, "c"), Settings())
    assert str(caught.value).startswith(reason)


def test_a_config_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: expected a JSON file"):
        load_config(str(tmp_path))
