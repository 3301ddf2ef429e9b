"""Does the connector work inside vLLM's MultiConnector, beside its OffloadingConnector (which needs a GPU)?

Two API servers, one GPU each (or one shared), a tiny hybrid model; requests as a router sends them; every byte
compared.

    PYTHONPATH=src python integration/gpu/offloading.py --work-dir build/offloading
"""

import argparse
import json
import sys
from pathlib import Path

import httpx

from hybrid_connector.tools.compare import Shapes, compare, read_captures
from hybrid_connector.tools.completions import MAX_TIE_NATS, agree, complete
from hybrid_connector.tools.servers import Servers, ServerSpec, free_ports
from hybrid_connector.tools.tiny_model import make_tiny_model

TEXT = "Two connectors share the requests of one engine, and neither may take what the other still needs. "


def spec(name: str, role: str, gpu: int, model: Path, captures: Path, engine_args: list[str]) -> ServerSpec:
    port, side_port = free_ports(2)
    own = {
        "kv_connector": "HybridNixlConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"capture_dir": str(captures)},
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 2**30},
    }
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [own, offloading]},
    }
    env = {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    args = ["--model", str(model), "--served-model-name", "tiny", "--max-model-len", "4096"]
    args += ["--gpu-memory-utilization", "0.25", "--kv-transfer-config", json.dumps(multi), *engine_args]
    return ServerSpec(name, port, tuple(args), env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=Path("build/offloading"))
    parser.add_argument("--gpus", type=int, nargs=2, default=[0, 1])
    parser.add_argument("engine_args", nargs="*", help="further options of vllm serve, after --")
    args = parser.parse_args()
    model = make_tiny_model(args.work_dir / "model")
    captures = args.work_dir / "captures"
    failures = 0
    with (
        Servers(args.work_dir / "logs", device="cuda") as servers,
        httpx.Client(timeout=120, trust_env=False) as client,
    ):
        for name, role, gpu in zip(("P", "D"), ("kv_producer", "kv_consumer"), args.gpus, strict=True):
            servers.add(spec(name, role, gpu, model, captures, args.engine_args))
        servers.wait_ready(400)
        for number, length in enumerate((5, 300, 1000, 2000) * 2):
            prompt = (f"{number}. " + TEXT * (length // len(TEXT) + 1))[:length]
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": 1,
                "kv_transfer_params": {"do_remote_decode": True},
            }
            params = client.post(f"{servers.url('P')}/v1/completions", json=body).json()["kv_transfer_params"]
            extra = {"model": "tiny", "kv_transfer_params": params}
            answer = complete(client, servers.url("D"), prompt, max_tokens=12, extra=extra)
            # D itself, asked directly, finds what it loaded and offloaded in its own caches, or computes it.
            again = complete(client, servers.url("D"), prompt, max_tokens=12, extra={"model": "tiny"})
            captured = {each.request_id: each for each in read_captures(captures)}[params["remote_request_id"]]
            differing = compare(captured, Shapes.from_model(model)).differing
            agreement = agree(answer, again)
            failures += bool(differing) + (not agreement.within(MAX_TIE_NATS))
            print(f"{length} tokens: {differing or 'all bytes equal'}; {agreement}", flush=True)
    print("offloading: ok" if not failures else f"offloading: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
