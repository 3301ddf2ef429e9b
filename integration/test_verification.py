"""Verification mode: on real engines, and the same digest from numpy, torch and the GPU's kernel."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hybrid_connector.core.digests import RunList
from hybrid_connector.core.errors import PeerError
from hybrid_connector.tools.completions import MAX_TIE_NATS, agree
from hybrid_connector.transport.digest import Runs, as_words, column_weights, host_digest, torch_add_up

from engines import prompt_of
from read_faults import ReadFault
from test_transfer import producer

LENGTHS = (2, 385, 1281)
VERIFY = {"verify": "all"}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_verified_requests_are_answered_and_counted(fleet, aggregated, prefill_tp, decode_tp):
    prefill = producer(fleet, prefill_tp)
    decode = fleet.engine(f"decode-verifying-tp{decode_tp}", role="kv_consumer", tp=decode_tp, config=VERIFY)
    for length in LENGTHS:
        prompt = prompt_of(length, salt=200 + prefill_tp)
        answer = fleet.transfer(prefill, decode, prompt)
        assert agree(answer, aggregated.answer(prompt)).within(MAX_TIE_NATS)
    decode.wait_idle()
    prefill.wait_idle()
    counted = {name: decode.metric(f"vllm:hybrid_connector_{name}_total") for name in ("loads", "verified_loads")}
    assert counted == dict.fromkeys(counted, len(LENGTHS) * decode_tp)
    fleet.stop(decode)


def test_a_byte_that_changed_on_d_fails_the_request_and_nothing_else(fleet, aggregated, tmp_path):
    prefill = producer(fleet, 2)
    decode = fleet.engine("decode-flipping", role="kv_consumer", config=VERIFY, faults=tmp_path)
    prompt = prompt_of(500, salt=210)
    ReadFault(src_rank=0, flip=True).order(tmp_path)
    with pytest.raises(PeerError):
        decode.answer(prompt, prefill.prefill(prompt))
    log = decode.log.read_text()
    assert "load failed: verification failed: P rank 0, D rank 0: the digest of " in log
    assert decode.metric("vllm:hybrid_connector_failed_verifications_total") == 1
    assert agree(decode.answer(prompt, prefill.prefill(prompt)), aggregated.answer(prompt)).within(MAX_TIE_NATS)
    decode.wait_idle()
    prefill.wait_idle()
    assert decode.metric("vllm:hybrid_connector_verified_loads_total") == 1
    assert decode.metric("vllm:hybrid_connector_failed_verifications_total") == 1
    fleet.stop(decode)


def some_runs(word_bytes):
    """Long and short runs, the last one at the region's end."""
    lengths = np.array([1, 5000, 4096, 3, 12289, 7]) * word_bytes
    offsets = np.array([40, 8192, 100_000, 160_000, 200_000, 0])
    offsets[-1] = (1 << 18) - lengths[-1]
    return RunList(word_bytes, offsets.astype("<u8").tobytes(), lengths.astype("<u8").tobytes())


def digest_with(add_up, memory, runs):
    """As ``CudaDigester`` has it, on whatever device torch has."""
    words = as_words(torch.from_numpy(memory), runs.word_bytes)
    return int(add_up(words, Runs.of(runs), torch.from_numpy(column_weights()))) % 2**64


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_torch_gives_the_digest_that_numpy_gives(word_bytes):
    memory = np.random.default_rng(word_bytes).integers(0, 256, 1 << 18, dtype=np.uint8)
    runs = some_runs(word_bytes)
    assert digest_with(torch_add_up, memory, runs) == host_digest(memory, runs)


def test_the_kernel_gives_the_digest_that_numpy_gives():
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    code = """
import numpy as np
from hybrid_connector.transport.digest import host_digest
from hybrid_connector.transport.digest_kernel import add_up
from test_verification import digest_with, some_runs
for word_bytes in (1, 2, 4):
    memory = np.random.default_rng(word_bytes).integers(0, 256, 1 << 18, dtype=np.uint8)
    assert digest_with(add_up, memory, some_runs(word_bytes)) == host_digest(memory, some_runs(word_bytes))
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
