"""Which parts of these pages are generated? Everything that the code says already: run this after changing it.

1. Blocks between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->`` in pages that are otherwise written by hand.
2. A page per family of recipes, whole.

``python docs/site/generate.py`` writes them; with ``--check`` it writes nothing and fails where a page is behind.
"""

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.published import METRICS
from hybrid_connector.tools.recipe import as_script, reasons
from hybrid_connector.tools.recipes.reading import Axis, Family, families
from hybrid_connector.tools.recipes.rendering import render
from hybrid_connector.wire import messages

DOCS = Path(__file__).parent.parent


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells)


def options() -> str:
    """Every option of the connector; its meaning is what the struct's docstring says after its name."""
    paragraphs = re.findall(r"^(\w+): (.*(?:\n .*)*)", inspect.cleandoc(ConnectorConfig.__doc__ or ""), re.MULTILINE)
    meaning = {name: " ".join(text.split()) for name, text in paragraphs}
    rows = []
    for field in msgspec.structs.fields(ConnectorConfig):
        default = "none" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"
        rows.append((f"`{field.name}`", type_name(msgspec.inspect.type_info(field.type)), default, meaning[field.name]))
    return table(("key", "type", "default", "meaning"), rows)


def type_name(info: msgspec.inspect.Type) -> str:
    """A type in words, with the limits it has."""
    match info:
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(type_name(part) for part in types)
        case msgspec.inspect.LiteralType(values=values):
            return " ".join(f"`{value}`" for value in values)
        case msgspec.inspect.FloatType() | msgspec.inspect.IntType():
            limits = [(">", info.gt), (">=", info.ge), ("<", info.lt), ("<=", info.le)]
            said = ", ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
            return f"number {said}".strip()
        case msgspec.inspect.NoneType():
            return "none"
    return {"BoolType": "true or false", "StrType": "text"}.get(type(info).__name__, type(info).__name__)


def metrics() -> str:
    return table(
        ("name", "kind", "labels", "meaning"),
        [
            (f"`{metric.full_name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.text)
            for metric in METRICS
        ],
    )


def message_table(kinds: tuple[type, ...]) -> str:
    """One row per message: its tag, its fields, what it is."""
    rows = []
    for kind in kinds:
        fields = [
            f"`{field.name}`" + ("" if field.required else " (optional)") for field in msgspec.structs.fields(kind)
        ]
        text = " ".join(inspect.cleandoc(kind.__doc__ or "").split()).replace("``", "`")
        rows.append((f"`{kind.__struct_config__.tag}`", ", ".join(fields), text))
    return table(("type", "fields", "meaning"), rows)


def refusal_reasons() -> str:
    """Every reason, with the comment beside it in the code."""
    source = textwrap.dedent(inspect.getsource(messages.RefusalReason))
    (definition,) = ast.parse(source).body
    lines = source.splitlines()
    rows = []
    for node in definition.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            _, _, comment = lines[node.lineno - 1].partition("  # ")
            rows.append((f"`{node.value.value}`", comment))
    return table(("reason", "meaning"), rows)


def recipe_list() -> str:
    rows = [
        (f"[{family.recipes[0].title}]({family.name}.md)", family.recipes[0].launcher, str(len(family.recipes)))
        for family in families()
    ]
    return table(("deployment", "launcher", "recipes"), rows)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "options": options,
    "metrics": metrics,
    "requests": lambda: message_table(get_args(messages.Request)),
    "replies": lambda: message_table(get_args(messages.Reply)),
    "reasons": refusal_reasons,
    "recipes": recipe_list,
}


def recipe_page(family: Family) -> str:
    """A family's page: its first recipe in full, and what the other choices change."""
    recipe = family.recipes[0]
    parts = [
        f"# {recipe.title}\n\n",
        f"{' '.join(recipe.summary.split())}\n\n",
        f"    hybrid-connector recipe {recipe.name}\n\n",
        "prints what stands below; `--why` the reasons, `--json` both for a program. Host names are placeholders.\n\n",
    ]
    if recipe.workload is not None:
        parts.append(f"Workload: {recipe.workload.text}\n\n")
    for heading, texts in (("Tested on", recipe.tested_on), ("Not tested on", recipe.not_tested_on)):
        if texts:
            parts.append(f"## {heading}\n\n" + "".join(f"* {text}\n" for text in texts) + "\n")
    rows = [(place, f"`{setting}`", why) for place, setting, why in reasons(recipe)]
    parts.append("## Settings, and why\n\n" + table(("of", "setting", "why"), rows) + "\n")
    for axis in family.axes:
        parts.append(f"## Choice of {axis.name}\n\n{axis.why}\n\n" + choices(axis) + "\n")
    if len(family.recipes) > 1:
        names = ", ".join(f"`{other.name}`" for other in family.recipes)
        parts.append(f"The recipes: {names}.\n\n")
    language = "yaml" if recipe.launcher == "llm-d" else "bash"
    parts.append(f"## Commands\n\n```{language}\n{as_script(recipe, render(recipe))}```\n")
    if recipe.sources:
        parts.append("\n## Sources\n\n" + "".join(f"* <{source}>\n" for source in recipe.sources))
    return "".join(parts)


def choices(axis: Axis) -> str:
    rows = []
    for name, override in axis.choices.items():
        changes = list(changed(override))
        rows.append((f"`{name}`", ", ".join(f"`{where} = {value}`" for where, value, _ in changes) or "as above"))
    reasons_given = [
        f"* `{where}`: {why}\n" for override in axis.choices.values() for where, _, why in changed(override) if why
    ]
    return table(("choice", "what it sets"), rows) + ("\n" + "".join(reasons_given) if reasons_given else "")


def changed(override: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Every value in an override: where, what, and its reason where it has one."""
    for key, value in override.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict) and "why" in value:
            yield where, json.dumps(value.get("value", True)), value["why"]
        elif isinstance(value, dict) and key != "benchmark":
            yield from changed(value, where)
        elif not isinstance(value, dict):
            yield where, json.dumps(value), ""


def pages() -> dict[Path, str]:
    """Every page with generated parts, as it must be."""
    wanted = {DOCS / "recipes" / f"{family.name}.md": recipe_page(family) for family in families()}
    for path in sorted(DOCS.rglob("*.md")):
        if path not in wanted:
            text = path.read_text("utf-8")
            wanted[path] = re.sub(r"(<!-- generated: (\w+) -->\n).*?(<!-- end: \2 -->)", _fill, text, flags=re.DOTALL)
    return wanted


def _fill(block: re.Match[str]) -> str:
    return f"{block[1]}{BLOCKS[block[2]]()}{block[3]}"


def main() -> int:
    """Write what is behind, or, with ``--check``, name it and fail."""
    parser = argparse.ArgumentParser(description="Writes the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is behind")
    check = parser.parse_args().check
    behind = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in behind:
        if check:
            print(f"{path.relative_to(DOCS.parent)} is behind the code: run python docs/site/generate.py")
        else:
            path.write_text(pages()[path], "utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 1 if check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
