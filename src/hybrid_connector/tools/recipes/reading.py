"""What does a recipe say? One TOML file per family, read into frozen structs.

1. A file holds a deployment: what prefill, decode and both are given, and why each setting is there.
2. Its axes list alternatives ("four prefill engines or five"); each choice overrides parts of the file.
3. Every combination of choices is a recipe, named ``family-choice-choice``.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from hybrid_connector.core.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
Reason = Annotated[str, Meta(min_length=10)]
Launcher = Literal["vllm-router", "llm-d", "dynamo", "srt-slurm"]
Role = Literal["prefill", "decode"]
Value: TypeAlias = bool | int | float | str | dict[str, str | int | float | bool]


class Setting(Struct, frozen=True, forbid_unknown_fields=True):
    """A value and why it is there. An option without a value has ``True``."""

    why: Reason
    value: Value = True


Settings: TypeAlias = dict[str, Setting]


class Shared(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What engines are given.

    options: of ``vllm serve``, without the dashes.
    environment: variables.
    transfer: fields of ``--kv-transfer-config`` beside the connector's name and role.
    connector: ``kv_connector_extra_config``.
    """

    options: Settings = {}
    environment: Settings = {}
    transfer: Settings = {}
    connector: Settings = {}


class Side(Shared, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engines of one role: how many, and how each is split over GPUs."""

    engines: Positive
    tensor_parallel: Positive = 1
    data_parallel: Positive = 1
    why: Reason

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.data_parallel


class Workload(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the deployment is meant for; ``benchmark`` is what the launcher's own benchmark runner is told."""

    text: Reason
    benchmark: dict[str, str | int | float] = {}


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One deployment. ``one_host``: prefill and decode share the first host."""

    name: str
    title: str
    summary: Reason
    launcher: Launcher
    model: Setting
    gpus_per_host: Positive
    one_host: bool = False
    both: Shared = Shared()
    prefill: Side
    decode: Side
    workload: Workload | None = None
    launcher_settings: Settings = {}
    tested_on: tuple[Reason, ...] = ()
    not_tested_on: Annotated[tuple[Reason, ...], Meta(min_length=1)]
    sources: tuple[Reason, ...] = ()

    def side(self, role: Role) -> Side:
        return self.prefill if role == "prefill" else self.decode

    def options(self, role: Role) -> Settings:
        return {**self.both.options, **self.side(role).options}

    def environment(self, role: Role) -> Settings:
        return {**self.both.environment, **self.side(role).environment}

    def transfer_config(self, role: Role) -> dict[str, Any]:
        """The value of ``--kv-transfer-config``."""
        side = self.side(role)
        config: dict[str, Any] = {
            "kv_connector": "HybridNixlConnector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        }
        config |= _values({**self.both.transfer, **side.transfer})
        extra = _values({**self.both.connector, **side.connector})
        return config | ({"kv_connector_extra_config": extra} if extra else {})


class Axis(Struct, frozen=True, forbid_unknown_fields=True):
    """Alternatives; a choice holds what it overrides, laid out like the file."""

    name: str
    why: Reason
    choices: dict[str, dict[str, Any]]


class Family(Struct, frozen=True):
    """The recipes of one file, the first one being what the file says with every axis' first choice."""

    name: str
    axes: tuple[Axis, ...]
    recipes: tuple[Recipe, ...]


@cache
def families() -> tuple[Family, ...]:
    """Every family that comes with this package, by name. Raises ``ConfigError`` naming the file and the field."""
    paths = sorted(files(__package__).joinpath("data").iterdir(), key=lambda path: path.name)
    return tuple(
        read_family(path.name.removesuffix(".toml"), path.read_text("utf-8"))
        for path in paths
        if path.name.endswith(".toml")
    )


def recipes() -> dict[str, Recipe]:
    """Every recipe, by name."""
    return {recipe.name: recipe for family in families() for recipe in family.recipes}


def read_family(name: str, text: str) -> Family:
    """The recipes in a file's ``text``. Raises ``ConfigError`` naming the recipe and the field."""
    try:
        document = tomllib.loads(text)
        axes = msgspec.convert(document.pop("axes", []), tuple[Axis, ...])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{name}: {error}") from error
    return Family(name, axes, tuple(_expand(name, document, axes)))


def _expand(family: str, document: Mapping[str, Any], axes: tuple[Axis, ...]) -> Iterator[Recipe]:
    for chosen in itertools.product(*(axis.choices.items() for axis in axes)):
        merged = dict(document)
        for _, override in chosen:
            merged = _merge(merged, override)
        name = "-".join([family, *(choice for choice, _ in chosen)])
        try:
            yield msgspec.convert({"name": name, **merged}, Recipe)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}: {error}") from error


def _merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``override`` on top: tables are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _values(settings: Settings) -> dict[str, Any]:
    return {name: setting.value for name, setting in settings.items()}
