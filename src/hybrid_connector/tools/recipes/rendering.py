"""What does an operator run? The commands, and for some launchers the files, of a recipe.

1. ``vllm-router``: a ``vllm serve`` per process and the router in front.
2. ``dynamo``: a ``python3 -m dynamo.vllm`` per process, which takes the same options, and Dynamo's frontend.
3. ``llm-d``: a Kustomize overlay on llm-d's guide for prefill-decode disaggregation.
4. ``srt-slurm``: its recipe file, and the same deployment by hand as for ``vllm-router``.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybrid_connector.tools.recipes.placing import ROLES, ROUTER_PORT, RPC_PORT, Process, place
from hybrid_connector.tools.recipes.reading import Recipe, Role, Settings

Yaml: TypeAlias = Mapping[str, Any] | list[Any] | str | int | float | bool | None

_POD_PORTS = {"prefill": 8000, "decode": 8200}
"""Where llm-d expects the model server: behind its sidecar on decode."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command on one host."""

    host: str
    name: str
    environment: Mapping[str, str]
    argv: tuple[str, ...]

    def shell(self) -> str:
        """As a shell takes it: a variable, or an option with its values, per line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = ""
        for word in self.argv:
            if word.startswith("--"):
                lines.append(line)
                line = f"  {word}"
            else:
                line = f"{line} {shlex.quote(word)}" if line else word
        return " \\\n".join([*lines, line])


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything to run, in order, and the files to write, by name."""

    commands: tuple[Command, ...]
    files: Mapping[str, str]


def render(recipe: Recipe) -> Deployment:
    """What to run for ``recipe``. Raises ``ConfigError`` where its engines do not fit its hosts."""
    match recipe.launcher:
        case "vllm-router":
            return Deployment(_serve_commands(recipe, recipe.launcher_settings), {})
        case "dynamo":
            return Deployment(_dynamo_commands(recipe), {})
        case "llm-d":
            return Deployment((), _llm_d_files(recipe))
        case "srt-slurm":
            return Deployment(_serve_commands(recipe, {}), _srt_slurm_files(recipe))


def engine_arguments(recipe: Recipe, role: Role) -> tuple[str, ...]:
    """The options that every process of a role has, in the order of the file; the connector's last."""
    side = recipe.side(role)
    arguments = ["--tensor-parallel-size", str(side.tensor_parallel)]
    if side.data_parallel > 1:
        arguments += ["--data-parallel-size", str(side.data_parallel)]
    arguments += _words(recipe.options(role))
    return (*arguments, "--kv-transfer-config", _json(recipe.transfer_config(role)))


def _serve_commands(recipe: Recipe, router_options: Settings) -> tuple[Command, ...]:
    processes = place(recipe)
    engines = [
        Command(
            process.host,
            process.name,
            _environment(recipe, process),
            ("vllm", "serve", str(recipe.model.value), *_serve_arguments(recipe, process)),
        )
        for process in processes
    ]
    router = ["vllm-router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    for process in processes:
        if process.part == 0:
            router += [f"--{process.role}", f"http://{process.host}:{process.http_port}"]
    router += [*_words(router_options), "--host", "0.0.0.0", "--port", str(ROUTER_PORT)]
    return (*engines, Command(processes[0].host, "router", {}, tuple(router)))


def _serve_arguments(recipe: Recipe, process: Process) -> list[str]:
    """One process of an engine: the first has the API server, the others only ranks."""
    arguments = list(engine_arguments(recipe, process.role))
    side = recipe.side(process.role)
    if process.part == 0:
        arguments = ["--port", str(process.http_port), *arguments]
    else:
        arguments = ["--headless", *_without_api_servers(arguments)]
    if process.num_parts == 1:
        return arguments
    if side.tensor_parallel > recipe.gpus_per_host:
        place_in_engine = {"nnodes": process.num_parts, "node-rank": process.part, "master-addr": process.head}
    else:
        num_local = side.data_parallel // process.num_parts
        place_in_engine = {"data-parallel-size-local": num_local}
        if process.part:
            place_in_engine["data-parallel-start-rank"] = process.part * num_local
        place_in_engine |= {"data-parallel-address": process.head, "data-parallel-rpc-port": RPC_PORT}
    return [*arguments, *(word for name, value in place_in_engine.items() for word in (f"--{name}", str(value)))]


def _without_api_servers(arguments: list[str]) -> list[str]:
    """vLLM refuses ``--api-server-count`` where there is no API server."""
    if "--api-server-count" not in arguments:
        return arguments
    start = arguments.index("--api-server-count")
    return arguments[:start] + arguments[start + 2 :]


def _environment(recipe: Recipe, process: Process) -> dict[str, str]:
    environment = {name: _text(setting.value) for name, setting in recipe.environment(process.role).items()}
    if process.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, process.gpus))
    if process.role == "prefill":
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = process.host
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(process.side_port)
    return environment


def _dynamo_commands(recipe: Recipe) -> tuple[Command, ...]:
    processes = place(recipe)
    frontend = ("python3", "-m", "dynamo.frontend", *_words(recipe.launcher_settings), "--http-port", str(ROUTER_PORT))
    workers = [
        Command(
            process.host,
            process.name,
            _environment(recipe, process) | {"DYN_SYSTEM_PORT": str(8081 + index)},
            (
                *("python3", "-m", "dynamo.vllm", "--model", str(recipe.model.value)),
                *("--disaggregation-mode", process.role),
                *engine_arguments(recipe, process.role),
            ),
        )
        for index, process in enumerate(processes)
    ]
    return (Command(processes[0].host, "frontend", {}, frontend), *workers)


def _llm_d_files(recipe: Recipe) -> dict[str, str]:
    patches = [{"path": f"patch-{role}.yaml", "target": {"kind": "Deployment", "name": f".*{role}"}} for role in ROLES]
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [recipe.launcher_settings["resources"].value],
        "images": [{"name": "docker.io/vllm/vllm-openai", "newName": "hybrid-connector", "newTag": "latest"}],
        "patches": patches,
    }
    return {
        "kustomization.yaml": to_yaml(overlay),
        **{f"patch-{role}.yaml": to_yaml(_pod_patch(recipe, role)) for role in ROLES},
    }


def _pod_patch(recipe: Recipe, role: Role) -> dict[str, Any]:
    environment: list[dict[str, Any]] = [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": "HYBRID_CONNECTOR_SECRET",
            "valueFrom": {"secretKeyRef": {"name": "hybrid-connector", "key": "secret"}},
        },
        *({"name": name, "value": _text(setting.value)} for name, setting in recipe.environment(role).items()),
    ]
    side = recipe.side(role)
    gpus = {"nvidia.com/gpu": str(side.num_gpus)}
    container = {
        "name": "modelserver",
        "command": ["vllm", "serve"],
        "args": [str(recipe.model.value), "--port", str(_POD_PORTS[role]), *engine_arguments(recipe, role)],
        "env": environment,
        "resources": {"limits": gpus, "requests": gpus},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": role},
        "spec": {"replicas": side.engines, "template": {"spec": {"containers": [container]}}},
    }


def _srt_slurm_files(recipe: Recipe) -> dict[str, str]:
    """Its schema numbers GPUs and nodes per role; ranks, addresses and ports it adds itself."""
    hosts = {role: len({process.host for process in place(recipe) if process.role == role}) for role in ROLES}
    settings = recipe.launcher_settings
    document: dict[str, Any] = {
        "name": recipe.name,
        "model": {
            "path": f"hf:{recipe.model.value}",
            "container": settings["container"].value,
            "precision": settings["precision"].value,
        },
        "dynamo": {"version": settings["dynamo"].value, "install": True},
        "setup_script": "hybrid-connector.sh",
        "resources": {
            "gpu_type": settings["gpu_type"].value,
            "gpus_per_node": recipe.gpus_per_host,
            **{f"{role}_nodes": hosts[role] for role in ROLES},
            **{f"{role}_workers": recipe.side(role).engines for role in ROLES},
            **{f"gpus_per_{role}": recipe.side(role).num_gpus for role in ROLES},
        },
        "frontend": {"type": "dynamo", "enable_multiple_frontends": False},
        "backend": {
            "type": "vllm",
            "connector": None,
            **{
                f"{role}_environment": {n: _text(s.value) for n, s in recipe.environment(role).items()}
                for role in ROLES
            },
            "vllm_config": {role: _srt_slurm_options(recipe, role) for role in ROLES},
        },
    }
    if recipe.workload is not None:
        document["benchmark"] = recipe.workload.benchmark
    script = "#!/usr/bin/env bash\nset -euo pipefail\npip install --quiet hybrid-connector\n"
    return {f"{recipe.name}.yaml": to_yaml(document), "configs/hybrid-connector.sh": script}


def _srt_slurm_options(recipe: Recipe, role: Role) -> dict[str, Any]:
    side = recipe.side(role)
    # Dynamo is the API server there and knows no --api-server-count.
    options = {
        name: _text(setting.value) if isinstance(setting.value, dict) else setting.value
        for name, setting in recipe.options(role).items()
        if name != "api-server-count"
    }
    return {
        "tensor-parallel-size": side.tensor_parallel,
        "data-parallel-size": side.data_parallel,
        **options,
        "kv-transfer-config": _json(recipe.transfer_config(role)),
    }


def _words(settings: Settings) -> list[str]:
    words = []
    for name, setting in settings.items():
        words += [f"--{name}"] if setting.value is True else [f"--{name}", _text(setting.value)]
    return words


def _text(value: object) -> str:
    return _json(value) if isinstance(value, dict) else str(value)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def to_yaml(value: Yaml, indent: str = "") -> str:
    """``value`` in YAML's block style; texts are quoted as in JSON, which YAML reads up to U+FFFF."""
    if isinstance(value, Mapping) and value:
        return "".join(f"{indent}{key}:{_below(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{indent}-{_item(item, indent)}" for item in value)
    return f"{indent}{json.dumps(value)}\n"


def _below(value: Yaml, indent: str) -> str:
    if isinstance(value, (Mapping, list)) and value:
        return f"\n{to_yaml(value, indent + '  ')}"
    return f" {to_yaml(value)}"


def _item(value: Yaml, indent: str) -> str:
    """A list's item stands beside its dash, the rest of a mapping below its first key."""
    if isinstance(value, (Mapping, list)) and value:
        return f" {to_yaml(value, indent + '  ').removeprefix(indent + '  ')}"
    return f" {to_yaml(value)}"
