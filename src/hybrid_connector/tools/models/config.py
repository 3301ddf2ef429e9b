"""Where is a model's config.json, and what does it say?

1. ``load_config``: a directory, a file, or a name on the Hugging Face Hub (its cache first).
2. ``Config``: lookups that name the key and the file when something is missing or of the wrong kind.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_connector.core.errors import ConfigError

_LANGUAGE_PART = ("text_config", "llm_config", "language_config")
"""Where the configs of models that also see or hear keep the language model's."""


@dataclass(frozen=True, slots=True)
class Config:
    """The language model's part of a ``config.json``. ``where``: for messages. ``architecture``: of the whole model."""

    where: str
    architecture: str
    values: Mapping[str, Any]

    def get(self, *keys: str) -> Any:
        """The first of ``keys`` that has a value, ``None`` where none has."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def number(self, *keys: str, default: int | None = None) -> int:
        """A whole number; ``keys`` are names for the same thing."""
        value = self.get(*keys)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or value != int(value) or value < 0:
            raise ConfigError(f"{self.where}: {' or '.join(keys)}: expected a whole number, got {value!r}")
        return int(value)

    def names(self, *keys: str) -> tuple[str, ...] | None:
        """A list of names, ``None`` where there is none."""
        value = self.get(*keys)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{self.where}: {' or '.join(keys)}: expected a list of names, got {value!r:.80}")
        return tuple(value)

    def part(self, key: str) -> "Config":
        """An object within; its numbers are looked up the same way."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key}: expected an object, got {value!r:.80}")
        return Config(f"{self.where}: {key}", self.architecture, value)


def load_config(model: str) -> Config:
    """The config of ``model``. Raises ``ConfigError`` where there is none, or it names no architecture."""
    path = _find(model)
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a JSON file: {error}") from error
    return read_config(whole, str(path))


def read_config(whole: Any, where: str) -> Config:
    """A parsed ``config.json``."""
    architectures = whole.get("architectures") if isinstance(whole, dict) else None
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ConfigError(f"{where}: architectures: expected a list with the model's class, got {architectures!r:.80}")
    language: dict[str, Any] = next((whole[key] for key in _LANGUAGE_PART if isinstance(whole.get(key), dict)), {})
    return Config(where, architectures[0], {**whole, **language})


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    if path.is_absolute() or path.exists() or path.parent.name == "" or model.count("/") != 1:
        raise ConfigError(f"{model}: expected a directory with a config.json, such a file, or OWNER/NAME on the Hub")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{model}: no such directory; to look on the Hub, install huggingface_hub, or download its config.json"
        ) from error
    with suppress(LocalEntryNotFoundError, HFValidationError):
        return Path(hf_hub_download(model, "config.json", local_files_only=True))
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{model}: no such directory, and no config.json from the Hub or its cache: {reason}"
        ) from error
