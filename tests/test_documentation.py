"""Are the generated parts of the documentation what the code says, and is every page reachable?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.published import METRICS
from hybrid_connector.tools.recipes.reading import families

DOCS = Path(__file__).parent.parent / "docs"
SITE = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())
PAGES = sorted(path for path in DOCS.rglob("*.md"))


def test_generated_parts_are_what_the_code_says():
    """Mend it with ``python docs/site/generate.py``."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "site" / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_option_metric_and_family_is_on_its_page():
    """Else the test above could compare nothing with nothing."""
    configuration = (DOCS / "configuration.md").read_text()
    assert all(f"| `{name}` |" in configuration for name in ConnectorConfig.__struct_fields__)
    metrics = (DOCS / "metrics.md").read_text()
    assert all(f"| `{metric.full_name}` |" in metrics for metric in METRICS)
    for family in families():
        page = (DOCS / "recipes" / f"{family.name}.md").read_text()
        assert "## Not tested on" in page
        assert all(recipe.name in page for recipe in family.recipes)


def linked(nav):
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            yield from linked(target) if isinstance(target, list) else [target]


def test_the_navigation_has_every_page_once():
    assert sorted(linked(SITE["nav"])) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_every_file_that_a_page_names_exists(page):
    """Links between pages are mkdocs' business (integration/); this is about files of the repository."""
    named = re.findall(r"`((?:docker|docs|src|tests|integration)/[\w./-]*)`", page.read_text())
    for name in named:
        assert (DOCS.parent / name).exists(), name


def test_the_site_loads_nothing_from_elsewhere():
    assert SITE["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(SITE)
    assert "mermaid" not in "".join(path.read_text() for path in PAGES)
    for path in (DOCS / "diagrams").glob("*.svg"):
        assert not re.search(r"(?:href|src)\s*=|@import|url\(http", path.read_text()), path.name
