"""`hybrid-connector sweep` with vLLM's own benchmark client, on a prefill engine, a decode engine and a router."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).parent / "hybrid-connector"


@pytest.fixture(scope="module")
def router(fleet):
    prefill = {"role": "kv_producer", "config": {"lease_s": 30}}
    engines = fleet.engines(sweep_prefill=prefill, sweep_decode={"role": "kv_consumer"})
    return fleet.router(engines["sweep_prefill"], engines["sweep_decode"])


def words(router, output):
    words = [SCRIPT, "sweep", "--deployment", f"pd={router},gpus=2", "--concurrency", "1", "2", "--input-len", "48"]
    return [*words, "--output-len", "6", "--rounds", "2", "--output", output]


def attempts(output):
    """How often the client was started for each concurrency."""
    cells = (output / "pd" / f"concurrency-{concurrency}" for concurrency in (1, 2))
    return [len(list(cell.glob("attempt-*"))) for cell in cells]


def test_an_interrupted_sweep_goes_on_where_it_was(router, fleet, tmp_path):
    output = tmp_path / "out"
    # A shell may have started us with SIGINT ignored, which a child inherits.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    sweep = subprocess.Popen(words(router, output), stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    log = output / "pd" / "concurrency-2" / "attempt-1" / "client.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size):
        assert sweep.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    said, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 130
    assert "1 of 2 runs have finished" in said
    assert attempts(output) == [1, 1]
    assert not (output / "sweep.csv").exists()

    decode = fleet.engine("sweep_decode")
    loads = decode.metric("vllm:hybrid_connector_loads_total")
    done = subprocess.run([*words(router, output), "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert attempts(output) == [1, 2]
    # Two users, a warm-up each, then two rounds: all of them moved from P to D.
    assert decode.metric("vllm:hybrid_connector_loads_total") - loads == 2 + 2 * 2

    cells = json.loads(done.stdout)["cells"]
    assert [(cell["concurrency"], cell["requests"]) for cell in cells] == [(1, 2), (2, 4)]
    assert [cell["output_tokens"] for cell in cells] == [12, 24]
    assert all(cell["ttft_p50_ms"] > 0 and cell["output_tokens_per_s_per_user"] > 0 for cell in cells)
    with (output / "sweep.csv").open(newline="") as lines:
        assert [line["deployment"] for line in csv.DictReader(lines)] == ["pd", "pd"]
    assert (output / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "data:image/png;base64," in (output / "sweep.html").read_text()


def test_answers_through_the_router_agree_with_an_aggregated_engine(router, aggregated):
    deployments = ["--deployment", f"pd={router}", "--deployment", f"aggregated={aggregated.url}"]
    options = ["--parity", "aggregated", "--input-len", "700", "--output-len", "8", "--json"]
    done = subprocess.run([SCRIPT, "sweep", *deployments, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    prompts = json.loads(done.stdout)["prompts"]
    assert max(prompt["prompt_tokens"] for prompt in prompts) == 700
    compared = [prompt["max_logprob_difference_nats"] for prompt in prompts if prompt["shared_tokens"]]
    assert 0 < max(compared) < 0.5
