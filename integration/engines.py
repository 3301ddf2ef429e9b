"""Engines by role, and what a router does with them, for tests."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hybrid_connector.core.errors import PeerError
from hybrid_connector.tools.compare import Captured, Comparison, Shapes, compare, read_captures
from hybrid_connector.tools.completions import Answer, complete
from hybrid_connector.tools.servers import Device, ServerDiedError, Servers, ServerSpec, count_gpus, free_ports
from hybrid_connector.tools.tiny_model import Kind, TinyModel, make_tiny_model

from read_faults import DIR_VARIABLE

MODEL_NAME = "tiny"
TEXT = "State is what a model remembers: keys and values, a window of inputs, a matrix that decays and is written to. "


def prompt_of(num_tokens: int, salt: int = 0) -> str:
    """One token per character. Different lengths and salts differ from the start, so no prefix cache serves both."""
    return (f"{salt}.{num_tokens}. " + TEXT * (num_tokens // len(TEXT) + 1))[:num_tokens]


def is_warning(line: str) -> bool:
    """Whether a line of an engine's log is a warning or an error."""
    return re.search(r"\b(WARNING|ERROR)\b", line) is not None


@dataclass(frozen=True, slots=True)
class Engine:
    """A running API server."""

    name: str
    url: str
    log: Path
    model: Path
    client: httpx.Client = field(repr=False)
    side_port: int = 0

    def post(self, body: Mapping[str, Any]) -> httpx.Response:
        """A completion request, whatever comes of it."""
        return self.client.post(f"{self.url}/v1/completions", json={"model": MODEL_NAME, "temperature": 0, **body})

    def prefill(self, prompt: str) -> dict[str, Any]:
        """What a router asks of P; returns the transfer parameters for D."""
        response = self.post(
            {
                "prompt": prompt,
                "max_tokens": 1,
                "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
            }
        )
        response.raise_for_status()
        params: dict[str, Any] = response.json()["kv_transfer_params"]
        return params

    def answer(self, prompt: str, params: Mapping[str, Any] | None = None, max_tokens: int = 12) -> Answer:
        """A greedy answer, with transfer parameters for a decode engine."""
        extra = {"model": MODEL_NAME, **({} if params is None else {"kv_transfer_params": params})}
        try:
            return complete(self.client, self.url, prompt, max_tokens=max_tokens, extra=extra)
        except PeerError as error:
            # To the client an engine says no more than "internal server error"; why is in its log.
            error.add_note(f"{self.name}'s log has:\n" + "\n".join(self.troubles()))
            raise

    def warnings(self) -> list[str]:
        """What the engine's log says in warnings and errors."""
        return [line for line in self.log.read_text().splitlines() if is_warning(line)]

    def troubles(self, max_lines: int = 80) -> list[str]:
        """The end of what the log says in warnings and errors, or says without a process's name, as crashes do.

        The API server's own are left out where there are others: it reports at length what another process died of.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        told = [line for line in lines if is_warning(line) or not line.startswith("(")]
        others = [line for line in told if not line.startswith("(APIServer")]
        return (others or told)[-max_lines:]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.client.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"{name} is not among the metrics of {self.name}"
        return sum(map(float, values))

    def wait_idle(self, timeout_s: float = 100.0) -> None:
        """Wait until no request is known and no block of the pool is used; fails with what is left after that time."""
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        deadline = time.monotonic() + timeout_s
        while any(left := {name: self.metric(name) for name in names}.values()):
            assert time.monotonic() < deadline, f"{self.name} still uses {left}"
            time.sleep(0.05)


START_TIMEOUT_S: Mapping[Device, float] = {"cpu": 300.0, "cuda": 500.0}


class Fleet:
    """Starts engines on demand and stops them all at the end.

    On ``cuda`` decode engines take the second GPU where there is one, all others the first. ``engine_args``: for every
    ``vllm serve``.
    """

    def __init__(self, directory: Path, device: Device = "cpu", engine_args: Sequence[str] = ()) -> None:
        self.directory = directory
        self.captures = directory / "captures"
        self.client = httpx.Client(timeout=200, trust_env=False, limits=httpx.Limits(max_connections=200))
        self.device: Device = device
        self._engine_args = engine_args
        self._decode_gpu = min(1, count_gpus() - 1) if device == "cuda" else None
        self._servers = Servers(directory / "logs", device=device)
        self._engines: dict[str, Engine] = {}

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.stop()
        self.client.close()

    def model(self, model: Kind | TinyModel) -> Path:
        """The directory of a tiny model, made when first asked for."""
        recipe = model if isinstance(model, TinyModel) else TinyModel(kind=model)
        return make_tiny_model(self.directory / f"model-{recipe.kind}-{recipe.num_layers}-{recipe.seed}", model=recipe)

    def spec(
        self,
        name: str,
        *,
        model: Kind | TinyModel = "hybrid",
        role: str | None = None,
        tp: int = 1,
        policy: str = "fail",
        config: Mapping[str, Any] | None = None,
        as_child: bool = False,
        args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        transfer: Mapping[str, Any] | None = None,
        ports: tuple[int, int] | None = None,
        faults: Path | None = None,
    ) -> ServerSpec:
        """How an engine is started; every engine with a role captures what it transfers.

        ``config``: of the connector; ``transfer``: other keys of ``kv_transfer_config``; ``ports``: of the API and of
        the side channel; ``faults``: a folder in which ``faulty_connector`` looks for what is to go wrong.
        """
        port, side_port = ports or free_ports(2)
        arguments = ["--model", str(self.model(model)), "--served-model-name", MODEL_NAME, "--max-model-len", "4096"]
        arguments += ["--tensor-parallel-size", str(tp), *self._engine_args, *args]
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), **(env or {})}
        if self.device == "cuda":
            # Of a share of the memory each measures what is free, which changes while others on the GPU come and go.
            arguments += ["--kv-cache-memory-bytes", str(1 << 30)]
            environment["CUDA_VISIBLE_DEVICES"] = str(self._decode_gpu if role == "kv_consumer" else 0)
        if role is not None:
            # Longer than a small machine was seen to stand still (51 s); tests of what ends by time say less.
            extra = {"capture_dir": str(self.captures), "lease_s": 180, "acquire_timeout_s": 120}
            extra |= config or {}
            whole: dict[str, Any] = {
                "kv_connector": "HybridNixlConnector",
                "kv_role": role,
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": extra,
                **(transfer or {}),
            }
            if faults is not None:
                whole |= {"kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"}
                environment[DIR_VARIABLE] = str(faults)
            if as_child:
                whole = {
                    "kv_connector": "MultiConnector",
                    "kv_role": role,
                    "kv_connector_extra_config": {"connectors": [whole]},
                }
            arguments += ["--kv-transfer-config", json.dumps(whole)]
        return ServerSpec(name, port, tuple(arguments), environment)

    def engine(self, name: str, **kwargs: Any) -> Engine:
        """The engine of that name, started now if it does not run yet."""
        return self.engines(**{name: kwargs})[name]

    def engines(self, **wanted: Mapping[str, Any]) -> dict[str, Engine]:
        """Several engines by name, started at the same time."""
        for name, kwargs in wanted.items():
            if name not in self._engines:
                spec = self.spec(name, **kwargs)
                self._servers.add(spec)
                model = self.model(kwargs.get("model", "hybrid"))
                side_port = int(spec.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
                self._engines[name] = Engine(name, spec.url, self._servers.log(name), model, self.client, side_port)
        self._servers.wait_ready(START_TIMEOUT_S[self.device])
        return {name: self._engines[name] for name in wanted}

    def kill(self, engine: Engine) -> None:
        """Take an engine away without any chance to clean up, as a lost host would."""
        del self._engines[engine.name]
        self._servers.kill(engine.name)

    def pids(self, engine: Engine) -> tuple[int, ...]:
        """All processes of an engine."""
        return self._servers.pids(engine.name)

    def signal(self, engine: Engine, number: int) -> None:
        """Send a signal to all processes of an engine."""
        for pid in self.pids(engine):
            os.kill(pid, number)

    def is_alive(self, engine: Engine) -> bool:
        """Whether the engine still answers its health check."""
        try:
            return self.client.get(f"{engine.url}/health", timeout=10).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def stop(self, *engines: Engine) -> None:
        """Stop engines that no later test needs."""
        for engine in engines:
            del self._engines[engine.name]
            self._servers.stop(engine.name)

    def start_to_fail(self, name: str, **kwargs: Any) -> str:
        """Start an engine that must refuse to start; returns its log."""
        self._servers.add(self.spec(name, **kwargs))
        log = self._servers.log(name)
        try:
            self._servers.wait_ready(60)
        except ServerDiedError:
            return log.read_text()
        finally:
            self._servers.stop(name)
        raise AssertionError(f"{name} started, expected it to refuse")

    def router(self, prefill: Engine, decode: Engine) -> str:
        (port,) = free_ports(1)
        url = self._servers.start_router(prefill.url, decode.url, port, f"router-{prefill.name}-{decode.name}")
        self._servers.wait_ready()
        return url

    def captured(self, params: Mapping[str, Any]) -> Captured:
        """What both sides captured of one transfer."""
        found = read_captures(self.captures, params["remote_request_id"])
        assert found, f"{params['remote_request_id']} was not captured on both sides"
        return found[0]

    def transfer(self, prefill: Engine, decode: Engine, prompt: str) -> Answer:
        """Through both engines as a router would; fails if a byte of state differs. Returns D's answer."""
        params = prefill.prefill(prompt)
        answer = decode.answer(prompt, params)
        compared = self.compare(params, decode.model)
        assert not compared.differing, f"{prefill.name} to {decode.name}, {len(prompt)} tokens: {compared.differing}"
        moved = [capture.meta["moved"] for capture in self.captured(params).loaded]
        assert {rank["transport"] for rank in moved} == {"nixl"}
        return answer

    def compare(self, params: Mapping[str, Any], model: Path) -> Comparison:
        """Every byte of one transfer, P against D."""
        return compare(self.captured(params), Shapes.from_model(model))
