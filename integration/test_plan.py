"""Does `hybrid-connector plan` say beforehand what vLLM lays out and what a real transfer moves?

1. Layouts: every family of tiny models, against the caches that vLLM itself groups, places and views.
2. Counters: bytes by kind and descriptors of real transfers, against what plan prints for the same arguments. For the
   descriptors plan is given the blocks that the engines chose: how these follow each other decides what can be joined.
3. Manifests: what a running engine tells its peers is what plan laid out.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_connector.tools.manifests import fetch_manifest, read_manifest
from hybrid_connector.tools.models.check import compare_with_vllm
from hybrid_connector.tools.models.config import load_config
from hybrid_connector.tools.models.engine import describe_engine, parse_serve
from hybrid_connector.tools.servers import CPU_ARGS
from hybrid_connector.tools.tiny_model import TinyModel

from engines import prompt_of

COMMAND = Path(sys.executable).parent / "hybrid-connector"
LENGTHS = (33, 400, 1000)

SPECULATION = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'"""
LINES = (
    "",
    "--tensor-parallel-size 2",
    "VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve tiny -tp 2 --block-size 64",
    "--pipeline-parallel-size 2",
    "--kv-cache-dtype fp8",
    "--dtype float16 --no-enable-prefix-caching",
    SPECULATION,
)
WITHOUT_STAGES = ("recurrent",)
WITHOUT_FLOAT16 = ("sliding",)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    "kind",
    [
        "hybrid",
        "qwen3_next",
        "granite_h",
        "nemotron_h",
        "falcon_h1",
        "jamba",
        "lfm2",
        "recurrent",
        "mamba1",
        "attention",
        "sliding",
        "mla",
    ],
)
def test_layouts_are_vllms_own(fleet, kind, line):
    if (kind in WITHOUT_STAGES and "pipeline" in line) or (kind in WITHOUT_FLOAT16 and "float16" in line):
        pytest.skip("vLLM does not run this model so")
    model = str(fleet.model(TinyModel(kind=kind, num_layers=8)))
    engine = describe_engine(load_config(model), parse_serve(line, "cpu"))
    assert compare_with_vllm(engine, model, line) == []


def plan(model, prefill, decode, *args):
    """What the installed command prints as JSON."""
    command = [COMMAND, "plan", model, "--device", "cpu", "--json", "--prefill", prefill, "--decode", decode, *args]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("kind", "prefill_tp", "decode_tp"), [("hybrid", 2, 1), ("recurrent", 1, 1)], ids=["delta-net-TP2-to-TP1", "Mamba2"]
)
def test_counters_of_a_real_transfer_are_what_plan_prints(fleet, kind, prefill_tp, decode_tp):
    prefill, decode = fleet.engines(
        **{
            f"P-plan-{kind}": {"model": kind, "role": "kv_producer", "tp": prefill_tp},
            # Descriptors are those of direct reads.
            f"D-plan-{kind}": {
                "model": kind,
                "role": "kv_consumer",
                "tp": decode_tp,
                "config": {"staging": "never"},
            },
        }
    ).values()
    lines = [shlex.join([*CPU_ARGS, "--tensor-parallel-size", str(tp)]) for tp in (prefill_tp, decode_tp)]
    for length in LENGTHS:
        prompt = prompt_of(length, salt=length)
        params = prefill.prefill(prompt)
        decode.answer(prompt, params)
        moved = [capture.meta["moved"] for capture in fleet.captured(params).loaded]

        (row,) = plan(prefill.model, *lines, "--tokens", str(length))["requests"]
        assert [rank["kind_bytes"] for rank in row["ranks"]] == [rank["kind_bytes"] for rank in moved]
        # Head slices of one page never touch the next page's, and a state is one block: any blocks give the same count.
        assert row["num_descriptors"] == row["num_descriptors_scattered"]
        assert [rank["num_descriptors"] for rank in row["ranks"]] == [rank["num_descriptors"] for rank in moved]

        (like,) = fleet.captures.glob(f"loaded.{params['remote_request_id']}.rank0.npz")
        (row,) = plan(prefill.model, *lines, "--like", str(like))["requests"]
        assert row["prompt_tokens"] == length
        assert [rank["kind_bytes"] for rank in row["ranks"]] == [rank["kind_bytes"] for rank in moved]
        assert [rank["num_descriptors"] for rank in row["ranks"]] == [rank["num_descriptors"] for rank in moved]

        manifest = fetch_manifest(f"{params['remote_host']}:{params['remote_port']}", 30.0)
        planned = describe_engine(load_config(str(prefill.model)), parse_serve(lines[0], "cpu"))
        num_blocks = planned.settings.num_blocks
        assert num_blocks is not None
        assert [rank.layout for rank in manifest.ranks] == list(planned.layouts(num_blocks))
    explained = subprocess.run(
        [COMMAND, "explain", f"{params['remote_host']}:{params['remote_port']}", "--save", fleet.directory / "p.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (explained.returncode, explained.stderr) == (0, "")
    assert read_manifest(fleet.directory / "p.json") == manifest
    explained = subprocess.run(
        [COMMAND, "explain", fleet.directory / "p.json", f"127.0.0.1:{decode.side_port}", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (explained.returncode, explained.stderr) == (0, "")
    assert len(json.loads(explained.stdout)["ranks"]) == decode_tp
    fleet.stop(prefill, decode)


def test_the_command_checks_itself(fleet):
    model = str(fleet.model("hybrid"))
    done = subprocess.run(
        [COMMAND, "plan", model, "--device", "cpu", "--prefill", "-tp 2", "--decode", "--block-size 64", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # blocks of 384 and 320 tokens: CPU pages of different length
    assert "P: vLLM lays out the same caches" in done.stdout
    assert "D: vLLM lays out the same caches" in done.stdout
    assert "bfloat16 in CPU pages of 384 tokens on P, bfloat16 in CPU pages of 320 tokens on D" in done.stdout
