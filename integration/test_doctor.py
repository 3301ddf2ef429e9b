"""The doctor, through the installed command, with real NIXL and on a real pair of engines that share a secret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_connector.tools.servers import free_ports

from engines import Engine, Fleet

COMMAND = Path(sys.executable).with_name("hybrid-connector")
SECRET = {"HYBRID_CONNECTOR_SECRET": "the secret of these tests"}


def doctor(*arguments, env=None):
    """Exit status and findings by (where, check)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRID_CONNECTOR")}
    done = subprocess.run(
        [COMMAND, "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        env=environment | (SECRET if env is None else env),
        timeout=250,
    )
    assert "Traceback" not in done.stderr, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {(finding["where"], finding["check"]): finding for finding in findings}


def side_channel(engine: Engine) -> str:
    return f"127.0.0.1:{engine.side_port}"


@pytest.fixture(scope="module")
def pair(fleet: Fleet):
    engines = fleet.engines(
        **{
            "prefill-doctor": {"role": "kv_producer", "env": SECRET},
            "decode-doctor": {"role": "kv_consumer", "env": SECRET},
            "attention-doctor": {"role": "kv_producer", "env": SECRET, "model": "attention"},
        }
    )
    yield tuple(engines.values())
    fleet.stop(*engines.values())


def test_a_machine_that_works():
    status, findings = doctor()
    here = {check: finding for (_, check), finding in findings.items()}
    assert status == 0, [finding for finding in here.values() if finding["status"] == "problem"]
    assert "UCX" in here["NIXL"]["what"]
    assert "tcp/" in here["UCX transports"]["what"]
    assert here["registration of DRAM"]["status"] == "ok"
    loopback = here["loopback through DRAM"]
    assert loopback["status"] == "ok"
    assert "on both sides" in loopback["what"]
    assert "UCX: rma" in loopback["what"]


def test_transports_without_one_for_messages():
    """UCX has no way to connect two processes then: what NIXL says, and no traceback."""
    status, findings = doctor(env={**SECRET, "UCX_TLS": "cma"})
    assert status == 1
    assert findings["this machine", "UCX_TLS"]["status"] == "warning"
    problems = {check for (_, check), finding in findings.items() if finding["status"] == "problem"}
    assert problems & {"NIXL", "loopback through DRAM"}, findings


def test_a_healthy_pair(pair, fleet):
    prefill, decode, _ = pair
    where = side_channel(prefill)
    status, findings = doctor("--peers-only", "--prefill", where, "--openai", prefill.url, decode.url)
    assert status == 0, findings
    assert {finding["status"] for finding in findings.values()} == {"ok"}
    assert {check for at, check in findings if at == where} == {
        "reachability",
        "security",
        "handshake",
        "versions",
        "lease round trip",
        "data plane",
    }
    assert "the same secret" in findings[where, "security"]["what"]
    assert "from 1 rank over NIXL" in findings[where, "data plane"]["what"]
    # 786,432 bytes of temporal and 18,432 of conv state, 393,216 of an attention block, as in README.md.
    assert "1 load(s) of 1,198,080 bytes" in findings[decode.url, "request from P to D"]["what"]
    prefill.wait_idle()
    decode.wait_idle()


def test_secrets_that_do_not_fit_and_addresses_that_lead_elsewhere(pair):
    prefill, _, _ = pair
    where = side_channel(prefill)
    (dead,) = free_ports(1)
    api = prefill.url.removeprefix("http://")
    status, findings = doctor(
        "--peers-only", "--timeout", "2", "--prefill", where, f"127.0.0.1:{dead}", api,
        env={"HYBRID_CONNECTOR_SECRET": "another secret than theirs"},
    )  # fmt: skip
    assert status == 1
    assert "not with this secret" in findings[where, "security"]["what"]
    assert "Connection refused" in findings[f"127.0.0.1:{dead}", "reachability"]["what"]
    assert "is an HTTP server" in findings[api, "reachability"]["what"]
    assert "not the API's" in findings[api, "reachability"]["todo"]
    status, findings = doctor("--peers-only", "--prefill", where, env={})
    assert status == 1
    assert findings[where, "security"]["status"] == "problem"
    assert "HYBRID_CONNECTOR_SECRET" in findings[where, "security"]["todo"]


def test_a_peer_of_another_model(pair):
    prefill, _, other = pair
    first, second = side_channel(prefill), side_channel(other)
    status, findings = doctor("--peers-only", "--prefill", first, second)
    assert status == 1
    finding = findings[second, f"handshake of {first}"]
    assert finding["status"] == "problem"
    assert "architecture: Qwen3ForCausalLM on P" in finding["what"]
    assert findings[second, "handshake"]["status"] == "ok"


def test_a_planned_decode_engine(pair, tmp_path):
    prefill, _, _ = pair
    where = side_channel(prefill)
    plan = [COMMAND, "plan", str(prefill.model), "--device", "cpu", "--save", str(tmp_path)]
    subprocess.run([*plan, "--decode", "--tensor-parallel-size 2"], check=True, capture_output=True)
    manifest = str(tmp_path / "d.json")
    status, findings = doctor("--peers-only", "--prefill", where, "--decode-manifest", manifest)
    assert status == 0, findings
    said = findings[where, f"handshake of {manifest}"]["what"]
    assert said.startswith("TP 1, PP 1 to TP 2, PP 1: state can be exchanged; not compared, because")
    assert "weights" in said
    subprocess.run([*plan, "--decode", "--mamba-ssm-cache-dtype bfloat16"], capture_output=True)
    status, findings = doctor("--peers-only", "--prefill", where, "--decode-manifest", manifest)
    assert status == 1
    assert "element type is float32 on P, bfloat16 on D" in findings[where, f"handshake of {manifest}"]["what"]


def test_servers_in_the_wrong_order(pair):
    prefill, decode, _ = pair
    status, findings = doctor("--peers-only", "--openai", decode.url, prefill.url)
    assert status == 1
    assert "give P's address before D's" in findings[decode.url, "request from P to D"]["todo"]
