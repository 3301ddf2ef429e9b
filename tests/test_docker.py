"""Do the images and the compose file fit this repository, and each other? No container engine is needed."""

import fnmatch
import json
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from hybrid_connector.engine.config import decode_config
from hybrid_connector.tools.recipes.placing import HTTP_PORTS, ROLES, ROUTER_PORT, SIDE_PORT
from hybrid_connector.wire.security import SECRET_FILE_VARIABLE

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile*") if path.suffix != ".dockerignore")
every_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path):
    """``(instruction, words)`` of a Dockerfile, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        yield instruction, rest.split()


def copied(path):
    for instruction, words in instructions(path):
        if instruction == "COPY":
            yield from [word for word in words if not word.startswith("--")][:-1]


def sends(ignore_file, source):
    """Whether a build gets ``source``: the last pattern that matches it, or a folder above it, decides."""
    sent = True
    for pattern in ignore_file.read_text().split():
        target = pattern.removeprefix("!")
        if fnmatch.fnmatch(source, target) or source.startswith(f"{target}/"):
            sent = pattern.startswith("!")
    return sent


@every_dockerfile
def test_what_is_copied_exists_and_is_sent(path):
    ignore_file = path.with_name(f"{path.name}.dockerignore")
    for source in copied(path):
        assert (ROOT / source).exists(), source
        assert sends(ignore_file, source), f"{ignore_file.name} leaves out {source}"
    kept = {pattern.removeprefix("!") for pattern in ignore_file.read_text().split() if pattern.startswith("!")}
    assert kept == set(copied(path)), "what is sent and what is copied differ"


def test_the_package_is_copied_whole():
    """What setuptools reads while it builds the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "src", project["readme"], *project["license-files"]}
    for name in ("Dockerfile", "Dockerfile.cpu"):
        assert needed <= set(copied(DOCKER / name)), name


def test_the_router_is_the_one_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (tested,) = [line for line in project["optional-dependencies"]["cpu"] if line.startswith("vllm-router")]
    arguments = dict(words[0].split("=") for name, words in instructions(DOCKER / "Dockerfile.router") if name == "ARG")
    assert tested == f"vllm-router=={arguments['VLLM_ROUTER_VERSION']}"


COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def arguments(service):
    """The options of a service's command, by name; a repeated one keeps its last value."""
    words = iter(SERVICES[service]["command"])
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name] = value if equals else next(words, "")
    return found


def test_every_build_and_every_mount_exists():
    for name, service in SERVICES.items():
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).exists(), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).exists(), f"{name}: {source}"


def test_engines_are_a_pair():
    for role in ROLES:
        transfer = json.loads(arguments(role)["--kv-transfer-config"])
        assert transfer["kv_connector"] == "HybridNixlConnector"
        assert transfer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        decode_config(transfer.get("kv_connector_extra_config", {}))
        assert SERVICES[role]["environment"][SECRET_FILE_VARIABLE] == f"/run/secrets/{SERVICES[role]['secrets'][0]}"
        assert SERVICES[role]["secrets"][0] in COMPOSE["secrets"]
    gpus = [SERVICES[role]["environment"]["CUDA_VISIBLE_DEVICES"] for role in ROLES]
    assert len(set(gpus)) == 2
    environment = SERVICES["prefill"]["environment"]
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "prefill"
    assert int(environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == SIDE_PORT


def test_ports_are_the_same_everywhere():
    command = SERVICES["router"]["command"]
    scraped = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    }
    exposed = {int(port) for name, words in instructions(DOCKER / "Dockerfile") if name == "EXPOSE" for port in words}
    for role in ROLES:
        port = int(arguments(role)["--port"])
        assert port == HTTP_PORTS[role]
        assert command[command.index(f"--{role}") + 1] == f"http://{role}:{port}"
        assert f"http://localhost:{port}/health" in SERVICES[role]["healthcheck"]["test"][-1]
        assert scraped[role] == [f"{role}:{port}"]
        assert port in exposed
    assert SIDE_PORT in exposed
    assert int(arguments("router")["--port"]) == ROUTER_PORT
    assert scraped["router"] == [f"router:{arguments('router')['--prometheus-port']}"]
    assert SERVICES["router"]["ports"] == [f"127.0.0.1:{ROUTER_PORT}:{ROUTER_PORT}"]


def test_nothing_is_published_beyond_loopback():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_images_are_pinned():
    for service in SERVICES.values():
        if "build" not in service:
            _, _, tag = service["image"].rpartition(":")
            assert tag not in ("", "latest")


def test_grafana_finds_prometheus_and_the_dashboard():
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "hybrid-connector.json").read_text())
    (variable,) = [item for item in dashboard["templating"]["list"] if item["type"] == "datasource"]
    assert (variable["query"], variable["current"]["value"]) == (source["type"], source["uid"])
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "hybrid-connector.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]


def test_the_reader_of_dockerfiles_reads():
    """Else the tests above could pass on nothing."""
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cpu", "Dockerfile.router"]
    assert {"src", "pyproject.toml"} <= set(copied(DOCKER / "Dockerfile"))
    assert shlex.split(" ".join(next(words for name, words in instructions(DOCKERFILES[0]) if name == "FROM")))
    assert not sends(DOCKER / "Dockerfile.dockerignore", "docs")
