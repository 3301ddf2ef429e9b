"""Does `hybrid-connector explain` say where every part comes from, by files alone or from an engine that listens?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.cli import main
from hybrid_connector.tools.manifests import fetch_manifest, read_manifest
from hybrid_connector.wire.manifest import Factors
from hybrid_connector.wire.messages import RefusalReason, Refused, Welcome
from hybrid_connector.wire.security import Security
from hybrid_connector.wire.side_channel import SideChannelServer

COMMAND = Path(sys.executable).parent / "hybrid-connector"
GOLDEN = Path(__file__).parent / "golden" / "manifests"
TP1, TP2 = GOLDEN / "vllm-0.32.0-tp1.json", GOLDEN / "vllm-0.33.0-tp2.json"
SECRET = "sixteen bytes or more"


@pytest.fixture
def explain(capsys):
    def explain(*args):
        status = main(["explain", *map(str, args)])
        out, err = capsys.readouterr()
        return status, out, err

    return explain


@pytest.fixture
def engine():
    """Serves a manifest on a port of its own."""
    servers = []

    def serve(security=None, answer=None):
        manifest = read_manifest(TP2)
        answer = answer or (lambda request: Welcome(manifest, incarnation=manifest.incarnation))
        server = SideChannelServer("127.0.0.1", 0, answer, incarnation=manifest.incarnation, security=security)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{server.port}"

    yield serve
    for server in servers:
        server.close()


def test_every_part_and_its_rank(explain):
    status, out, err = explain(TP2, TP1)
    assert (status, err) == (0, "")
    assert "P: vllm-0.33.0-tp2 (vLLM 0.33.0): TP 2, PP 1; DRAM, nixl; blocks of 32 tokens, recurrent" in out
    for line in (
        "layers.0.attn to layers.1.attn, 2 layers alike",
        "kv: H [0, 1) N [0, 32) C [0, 16) from P rank 0, 1 run of 1,024 bytes",
        "kv: H [1, 2) N [0, 32) C [0, 16) from P rank 1, 1 run of 1,024 bytes",
        "conv.k: channel [8, 16) tap [0, 3) from P rank 1, 3 runs of 16 bytes",
        "temporal: head [2, 4) value [0, 4) key [0, 8) from P rank 1, 1 run of 256 bytes",
    ):
        assert f"    {line}\n" in out.replace("  layers", "    layers")


def test_replicas_are_named(explain, tmp_path):
    """One KV head on two ranks; either will do."""
    recorded = json.loads(TP2.read_text())
    for rank in recorded["ranks"]:
        for layer in rank["layout"]["layers"][:2]:
            tensor, box = layer["shards"][0]["tensor"], layer["shards"][0]["box"]
            tensor["shape"][0] = 1
            box["intervals"][0] = {"start": 0, "stop": 1}
    (tmp_path / "p.json").write_text(json.dumps(recorded))
    status, out, _ = explain(tmp_path / "p.json", tmp_path / "p.json")
    assert status == 0
    assert "kv: H [0, 1) N [0, 32) C [0, 16) from P rank 0 (as well on 1)" in out


def test_direct_or_staged_and_why(explain):
    _, out, _ = explain(TP2, TP1, "--tokens", 128, "--cost", "shared_memory=0,0.1,1")
    # 4 pages of 1,024 bytes of two layers: 8 runs of 8,192 bytes at 0.1 us a run and 1 GB/s, against two pieces.
    assert "P rank 0, group 0 to group 0: direct, 8 runs, 8,192 bytes, 0.00899 ms; staged in 2 pieces" in out
    _, out, _ = explain(TP2, TP1, "--tokens", 128, "--cost", "shared_memory=0,10,1")
    assert "P rank 0, group 0 to group 0: staged is cheaper, whole pages in 2 pieces, 8,192 bytes" in out
    _, out, _ = explain(TP1, TP1, "--tokens", 128)
    assert "direct, 2 runs, 16,384 bytes" in out
    assert "whole pages would be no fewer" in out


def test_numbers_for_programs(explain):
    status, out, _ = explain(TP1, TP2, "--json", "--tokens", 64)
    found = json.loads(out)
    assert status == 0
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    first, second = (rank["layers"][0]["parts"] for rank in found["ranks"])
    assert [part["box"]["H"] for part in (*first, *second)] == [[0, 1], [1, 2]]
    assert {part["src_rank"] for part in (*first, *second)} == {0}
    for rank in found["ranks"]:
        assert rank["num_descriptors"] == sum(read["direct"]["descriptors"] for read in rank["reads"])
        assert sum(rank["kind_bytes"].values()) == sum(read["direct"]["bytes"] for read in rank["reads"])


def changed(path, **changes):
    """A manifest of another start, written beside the test."""
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(read_manifest(TP1), **changes)))
    return path


def test_factors_that_differ_are_named_and_geometry_is_explained_all_the_same(explain, tmp_path):
    other = changed(tmp_path / "d.json", factors=Factors.of({"weights": "another"}))
    status, out, _ = explain(TP2, other)
    assert status == 1
    assert "P and D refuse each other: architecture: Qwen3_5ForCausalLM on P, not stated on D; " in out
    assert "weights: not stated on P, another on D" in out
    assert "D rank 0" in out


def test_geometry_that_does_not_fit_is_refused(explain, tmp_path):
    recorded = json.loads(TP1.read_text())
    for layer in recorded["ranks"][0]["layout"]["layers"][2:]:
        layer["shards"][-1]["tensor"]["dtype"] = "float16"
    (tmp_path / "d.json").write_text(json.dumps(recorded))
    status, out, _ = explain(TP2, tmp_path / "d.json")
    assert status == 1
    assert "P and D refuse each other: layers.2.mixer.temporal: element type is float32 on P, float16 on D" in out
    assert "D rank" not in out


def test_an_engine_that_listens(explain, engine, tmp_path):
    address = engine()
    status, out, _ = explain(address, TP1)
    assert (status, out) == (0, explain(TP2, TP1)[1])
    status, out, _ = explain(address, "--save", tmp_path / "p.json")
    assert (status, out) == (0, "")
    assert read_manifest(tmp_path / "p.json") == read_manifest(TP2)


def test_an_engine_with_a_secret(explain, engine, monkeypatch):
    address = engine(Security.from_secret(SECRET))
    monkeypatch.setenv("HYBRID_CONNECTOR_SECRET", SECRET)
    assert explain(address, TP1)[0] == 0
    monkeypatch.setenv("HYBRID_CONNECTOR_SECRET", "not that secret at all")
    status, _, err = explain(address, TP1, "--timeout", "0.3")
    assert status == 1
    assert "no answer from 127.0.0.1" in err
    assert "or the secret is not the engine's" in err
    monkeypatch.delenv("HYBRID_CONNECTOR_SECRET")
    assert "or it wants a secret (HYBRID_CONNECTOR_SECRET)" in explain(address, TP1, "--timeout", "0.3")[2]


def test_an_engine_that_refuses(engine):
    address = engine(answer=lambda request: Refused("", RefusalReason.OVERLOADED, "try later", incarnation="recorded"))
    with pytest.raises(PeerError, match=r"127\.0\.0\.1:\d+: overloaded: try later"):
        fetch_manifest(address, 5.0)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["missing.json", str(TP1)], "missing.json: expected a manifest's file, or HOST:PORT of a side channel"),
        (["host:", str(TP1)], "host:: expected a manifest's file, or HOST:PORT of a side channel"),
        ([str(TP1)], "expected two manifests to explain, or one and --save FILE"),
        ([str(TP1), str(TP1), "--tokens", "100000"], "--tokens 100000: D group 0: expected block ids in [0, 7)"),
        (["127.0.0.1:1", str(TP1), "--timeout", "0.2"], "no answer from 127.0.0.1:1 within 0.2 s"),
    ],
)
def test_what_cannot_be_explained_is_one_line_on_stderr(explain, args, reason):
    status, out, err = explain(*args)
    assert (status, out) == (1, "")
    assert err.startswith(f"hybrid-connector: {reason}")
    assert err.count("\n") == 1


def test_a_file_that_is_no_manifest(tmp_path):
    for content in (b"{", b"{}", b"[]"):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.json: expected an engine's manifest: "):
            read_manifest(tmp_path / "x.json")


def test_what_plan_saves_can_be_explained(tmp_path, explain, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--prefill", "-tp 2", "--save", str(tmp_path / "saved")]) == 0
    capsys.readouterr()
    status, out, _ = explain(tmp_path / "saved" / "p.json", tmp_path / "saved" / "d.json")
    assert status == 0
    assert "kv: H [2, 4) N [0, 16) C [0, 32) from P rank 1" in out


def test_through_the_installed_command():
    done = subprocess.run([COMMAND, "explain", TP2, TP1], capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "from P rank 1" in done.stdout
    shown = subprocess.run([COMMAND, "explain", "--help"], capture_output=True, text=True, check=False)
    assert "hybrid-connector explain p.json d.json" in shown.stdout
