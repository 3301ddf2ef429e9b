"""Does every module import only its own folder or a lower one, and only what its folder may? (DESIGN.md, Layers)"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "hybrid_connector"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE
FORBIDDEN = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

ANYTHING = None
NIXL = {"nixl", "nixl_cu12", "nixl_cu13"}
THIRD_PARTY: dict[str, set[str] | None] = {
    "core": set(),
    "wire": {"msgspec", "zmq"},
    "transport": {"numpy", "torch", "triton", *NIXL},
    "engine": {"msgspec", "zmq", "numpy", "torch", "vllm", "prometheus_client", *NIXL},
    "tools": ANYTHING,
    "connector.py": ANYTHING,
    "plugin.py": ANYTHING,
    "__init__.py": set(),  # runs before everything, also before core
}
"""What each folder, and each module beside them, may import from outside."""

LOWER = {
    "core": {"core"},
    "wire": {"core", "wire"},
    "transport": {"core", "transport"},
    "engine": {"core", "wire", "transport", "engine"},
    "tools": {"core", "wire", "transport", "engine", "tools"},
    "connector.py": {"core", "wire", "transport", "engine"},
    "plugin.py": {"core", "wire", "transport", "engine", "connector"},
    "__init__.py": set(),
}
"""What each may import from this package."""

SIBLINGS = {name.removesuffix(".py") for name in LOWER}
"""Modules right below the package; other names imported from it are its attributes."""


def imports(source: str, module: str) -> Iterator[str]:
    """Full names of all modules that ``source`` may import, wherever in it; ``module`` resolves relative ones.

    ``from a import b`` gives a and a.b, because b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(source: str, path: str) -> list[str]:
    """Imports that ``path`` (below the package) must not have."""
    place = path.split("/")[0]
    # a package's __init__ resolves "." to itself, a module to its folder: both drop one part
    module = ".".join([PACKAGE, *path.removesuffix(".py").split("/")])
    third_party, lower = THIRD_PARTY[place], LOWER[place]
    found = []
    for name in imports(source, module):
        top, *rest = name.split(".")
        if (
            f"{name}.".startswith(f"{FORBIDDEN}.")
            or (top == PACKAGE and rest and rest[0] in SIBLINGS - lower)
            or (top != PACKAGE and third_party is not ANYTHING and top not in third_party | sys.stdlib_module_names)
        ):
            found.append(name)
    return found


MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_imports_go_down(path: str) -> None:
    assert violations((SOURCE / path).read_text(encoding="utf-8"), path) == []


def test_every_folder_has_rules() -> None:
    assert {path.split("/")[0] for path in MODULES} <= set(THIRD_PARTY)
    assert set(THIRD_PARTY) == set(LOWER)
    assert sum(path.startswith("core/") for path in MODULES) >= 6


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("core/a.py", "import math, hybrid_connector.core.b", []),
        ("core/a.py", "from . import b\nfrom .b import c", []),
        ("core/a.py", "def f():\n    import numpy.linalg", ["numpy.linalg"]),
        ("core/a.py", "from ..wire import b", ["hybrid_connector.wire", "hybrid_connector.wire.b"]),
        ("core/a.py", "from hybrid_connector import wire", ["hybrid_connector.wire"]),
        ("core/__init__.py", "from .a import b", []),
        ("wire/a.py", "import zmq.asyncio, msgspec\nfrom hybrid_connector.core.a import b", []),
        ("wire/a.py", "import numpy", ["numpy"]),
        ("transport/a.py", "import torch\nfrom nixl._api import nixl_agent", []),
        ("transport/a.py", "import hybrid_connector.wire.a", ["hybrid_connector.wire.a"]),
        ("transport/a.py", "import vllm", ["vllm"]),
        ("engine/a.py", "import vllm.config\nfrom hybrid_connector.wire import a", []),
        ("engine/a.py", "import hybrid_connector.tools.a", ["hybrid_connector.tools.a"]),
        ("engine/a.py", "import hybrid_connector.connector", ["hybrid_connector.connector"]),
        ("tools/a.py", "import requests", []),
        ("tools/a.py", f"import {FORBIDDEN}.worker", [f"{FORBIDDEN}.worker"]),
        ("connector.py", f"from {FORBIDDEN[:-5]} import nixl", [FORBIDDEN]),
        ("connector.py", f"import {FORBIDDEN}_other", []),
        ("engine/a.py", "from hybrid_connector import __version__", []),
        ("plugin.py", "from hybrid_connector.connector import a", []),
        ("__init__.py", "import msgspec", ["msgspec"]),
    ],
)
def test_the_rules_detect(path: str, source: str, found: list[str]) -> None:
    assert violations(source, path) == found


def test_core_needs_nothing_installed() -> None:
    """Every core module is imported in a fresh interpreter; none of the large dependencies comes with it."""
    names = [path.removesuffix(".py").replace("/", ".") for path in MODULES if path.startswith("core/")]
    modules = ", ".join(f"{PACKAGE}.{name.removesuffix('.__init__')}" for name in names)
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import {modules}; "
        "print({'vllm', 'torch', 'nixl', 'zmq', 'msgspec', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
