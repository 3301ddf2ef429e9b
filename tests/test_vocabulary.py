"""Is there no ratio, no rank offset and no model's name outside of where families are described? (DESIGN.md, Boxes)"""

import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "hybrid_connector"

EXEMPT = {
    "core/families.py": "says what each family holds",
    "tools/compare.py": "reads model configs, apart from the code it checks",
    "tools/cpu_kernels.py": "computes demo models where there is no GPU",
    "tools/in_tree_model.py": "quotes another connector",
    "tools/models/architectures.py": "says where each model class's config keeps its numbers",
    "tools/nursery.py": "imports the demo model's vLLM module",
    "tools/tiny_model.py": "makes demo models",
    "tools/tiny_models": "makes demo models",
}

WORDS = re.compile(
    r"tp_ratio|rank_offset|qwen|granite|falcon|nemotron|jamba|kimi|bamba|lfm\d?|deepseek|minimax|zamba", re.IGNORECASE
)

MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def found(path: str) -> list[str]:
    lines = (SOURCE / path).read_text(encoding="utf-8").splitlines()
    return [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if WORDS.search(line)]


def is_exempt(path: str) -> bool:
    return any(path == exempt or path.startswith(f"{exempt}/") for exempt in EXEMPT)


@pytest.mark.parametrize("path", [path for path in MODULES if not is_exempt(path)])
def test_no_module_knows_models_or_ratios(path: str) -> None:
    assert found(path) == []


def test_every_exemption_is_needed_to_stay_short() -> None:
    assert not any(path.startswith(("engine/", "transport/", "wire/")) for path in EXEMPT)
    assert all((SOURCE / path).exists() for path in EXEMPT)
    assert found("tools/in_tree_model.py") != []
