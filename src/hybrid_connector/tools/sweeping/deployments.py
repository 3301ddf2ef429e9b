"""Which endpoints are measured, and what do they serve?"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import msgspec

from hybrid_connector.core.errors import ConfigError, PeerError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""A deployment's name is also a directory's."""


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An OpenAI completions endpoint: a router before prefill and decode engines, or an engine.

    gpus: what throughput is divided by, those of prefill and decode together.
    model: the name it serves; asked for where ``None``.
    tokenizer: a directory or a name that the client can load; the model's where ``None``.
    """

    url: str
    gpus: Annotated[int, msgspec.Meta(ge=1)] = 1
    model: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s,]+(/\S*)?", self.url):
            raise ValueError(f"expected a URL as http://HOST:PORT, got {self.url!r}")

    @property
    def base(self) -> str:
        """The URL in front of ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


class Endpoint(msgspec.Struct, frozen=True):
    """A deployment that answered: the model it serves, and the tokenizer that counts its tokens."""

    name: str
    url: str
    gpus: int
    model: str
    tokenizer: str


def parse_deployment(text: str) -> tuple[str, Deployment]:
    """``NAME=URL[,gpus=N][,model=NAME][,tokenizer=NAME]``. Raises ``ConfigError``."""
    name, sign, rest = text.partition("=")
    url, *settings = rest.split(",")
    if not sign or not url:
        raise ConfigError(f"expected NAME=URL[,gpus=N], got {text!r}")
    fields: dict[str, str] = {"url": url}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or key in fields:
            raise ConfigError(f"{name}: expected each setting once, as KEY=VALUE, got {setting!r}")
        fields[key] = value
    return _check_name(name), _convert(fields, name)


def read_deployments(file: Path) -> dict[str, Deployment]:
    """A TOML file with a table per deployment. Raises ``ConfigError``."""
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    return {_check_name(name): _convert(table, f"{file}: {name}") for name, table in document.items()}


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ConfigError(f"expected a deployment's name of letters, digits, '.', '_' and '-', got {name!r}")
    return name


def _convert(fields: object, where: str) -> Deployment:
    try:
        return msgspec.convert(fields, Deployment, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(Deployment.__struct_fields__)
        raise ConfigError(f"{where}: {error}; known settings: {known}") from error


def ask_endpoint(http: httpx.Client, name: str, deployment: Deployment) -> Endpoint:
    """What the deployment serves. Raises ``PeerError`` where it does not say, ``ConfigError`` where one must choose."""
    url = f"{deployment.base}/v1/models"
    try:
        answer = http.get(url, timeout=10)
        answer.raise_for_status()
        served = _read_models(answer.json())
    except (httpx.HTTPError, ValueError) as error:
        raise PeerError(f"{name}: {url}: expected a list of models, got {error or type(error).__name__}") from error
    model = deployment.model
    if model is None:
        if len(served) != 1:
            raise ConfigError(f"{name}: {url} lists {len(served)} models: expected model=, one of {', '.join(served)}")
        (model,) = served
    root = served.get(model)
    tokenizer = deployment.tokenizer or (root if root is not None and Path(root).is_dir() else model)
    return Endpoint(name, deployment.base, deployment.gpus, model, tokenizer)


def _read_models(document: object) -> dict[str, str | None]:
    """Every model's name, and where the server has it from."""

    class Model(msgspec.Struct):
        id: str
        root: str | None = None

    class Models(msgspec.Struct):
        data: Sequence[Model]

    return {model.id: model.root for model in msgspec.convert(document, Models).data}
