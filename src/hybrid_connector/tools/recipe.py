"""``hybrid-connector recipe``: the commands of a deployment, and why each setting is there."""

import argparse
import difflib
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.tools.recipes.placing import ROLES
from hybrid_connector.tools.recipes.reading import Recipe, Settings, families, recipes
from hybrid_connector.tools.recipes.rendering import Deployment, render

_EPILOG = """examples:
  hybrid-connector recipe                        every recipe's name and title
  hybrid-connector recipe single-host-1p1d       what to run
  hybrid-connector recipe --why llm-d            why each setting is there, and what it was not tested on
  hybrid-connector recipe --json dynamo          the same for a program
"""


def add_parser(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the ``recipe`` subcommand."""
    parser = subcommands.add_parser(
        "recipe",
        help="print the commands of a deployment, and why each setting is there",
        description="Prints what to run for a deployment; host names are placeholders.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="a recipe; without it, all are listed")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--why", action="store_true", help="the settings and their reasons instead of the commands")
    form.add_argument("--json", action="store_true", help="everything, as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it; raises ``ConfigError`` for a name that is no recipe's."""
    if args.name is None:
        _print_names(args.json)
        return 0
    known = recipes()
    if args.name not in known:
        near = ", ".join(difflib.get_close_matches(args.name, known)) or "`hybrid-connector recipe` lists them"
        raise ConfigError(f"recipe: expected a recipe's name ({near}), got {args.name!r}")
    recipe = known[args.name]
    if args.json:
        print(json.dumps(as_document(recipe, render(recipe)), indent=2))
    elif args.why:
        _print_reasons(recipe)
    else:
        print(as_script(recipe, render(recipe)), end="")
    return 0


def reasons(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Every setting: where it belongs, what it is, why."""
    rows = [("model", str(recipe.model.value), recipe.model.why)]
    for role in ROLES:
        side = recipe.side(role)
        size = f"{side.engines} x (tensor parallel {side.tensor_parallel}, data parallel {side.data_parallel})"
        rows.append((role, size, side.why))
    for place, shared in (("both", recipe.both), ("prefill", recipe.prefill), ("decode", recipe.decode)):
        rows += _rows(place, "--", " ", shared.options)
        rows += _rows(place, "", "=", shared.environment)
        rows += _rows(place, "", ": ", shared.transfer)
        rows += _rows(place, "", ": ", shared.connector)
    return rows + _rows(recipe.launcher, "", " ", recipe.launcher_settings)


def as_script(recipe: Recipe, deployment: Deployment) -> str:
    """Commands as a shell takes them, each below a comment that says where; then files."""
    parts = [f"# {recipe.name}: {recipe.title}\n"]
    parts += [f"\n# {command.name} on {command.host}\n{command.shell()}\n" for command in deployment.commands]
    parts += [f"\n# file {name}\n{text}" for name, text in deployment.files.items()]
    parts += [f"\n# not tested on: {text}" for text in recipe.not_tested_on]
    return "".join(parts) + "\n"


def as_document(recipe: Recipe, deployment: Deployment) -> dict[str, Any]:
    """The recipe for a program: commands, files, settings with reasons."""
    return {
        "name": recipe.name,
        "title": recipe.title,
        "launcher": recipe.launcher,
        "commands": [
            {
                "host": command.host,
                "name": command.name,
                "environment": dict(command.environment),
                "argv": list(command.argv),
            }
            for command in deployment.commands
        ],
        "files": dict(deployment.files),
        "settings": [{"of": place, "setting": text, "why": why} for place, text, why in reasons(recipe)],
        "tested_on": list(recipe.tested_on),
        "not_tested_on": list(recipe.not_tested_on),
        "sources": list(recipe.sources),
    }


def _rows(place: str, before: str, between: str, settings: Settings) -> list[tuple[str, str, str]]:
    rows = []
    for name, setting in settings.items():
        value = json.dumps(setting.value) if isinstance(setting.value, dict) else setting.value
        rows.append((place, f"{before}{name}" + ("" if value is True else f"{between}{value}"), setting.why))
    return rows


def _print_names(as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: recipe.title for name, recipe in recipes().items()}, indent=2))
        return
    for family in families():
        print(family.recipes[0].title)
        for recipe in family.recipes:
            print(f"  {recipe.name}")


def _print_reasons(recipe: Recipe) -> None:
    console = Console()
    console.print(recipe.title, " ".join(recipe.summary.split()), sep="\n", highlight=False)
    table = Table("of")
    for heading in ("setting", "why"):
        table.add_column(heading, overflow="fold")
    for row in reasons(recipe):
        table.add_row(*row)
    console.print(table)
    for heading, texts in (("Tested on", recipe.tested_on), ("Not tested on", recipe.not_tested_on)):
        for text in texts:
            console.print(f"{heading}: {text}", highlight=False)
