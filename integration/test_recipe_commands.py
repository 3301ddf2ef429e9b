"""Do vLLM's and the router's own argument parsers take every command of every recipe, page and compose file?"""

import re
import shlex
import warnings
from pathlib import Path

import pytest
import yaml
from vllm_router.launch_router import parse_router_args

from hybrid_connector.engine.config import decode_config
from hybrid_connector.tools import nursery
from hybrid_connector.tools.recipes.placing import ROLES
from hybrid_connector.tools.recipes.reading import recipes
from hybrid_connector.tools.recipes.rendering import render

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's dependencies think of each other
    nursery.import_vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

ROOT = Path(__file__).parent.parent
RECIPES = recipes()


@pytest.fixture(scope="module")
def serve_parser():
    """vLLM's own, of ``vllm serve``."""
    return make_arg_parser(FlexibleArgumentParser())


def engine_command_lines(recipe):
    """The options of every engine process, as ``vllm serve`` takes them: commands, and pods of Kubernetes."""
    deployment = render(recipe)
    for command in deployment.commands:
        if command.argv[:2] == ("vllm", "serve"):
            yield command.argv[2:]
        elif command.argv[:3] == ("python3", "-m", "dynamo.vllm"):
            # Dynamo hands on what it does not know itself; --model is an option of vLLM's too.
            (mode,) = [index for index, word in enumerate(command.argv) if word == "--disaggregation-mode"]
            yield command.argv[3:mode] + command.argv[mode + 2 :]
    for name, text in deployment.files.items():
        if name.startswith("patch-"):
            for container in yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]:
                yield tuple(container["args"])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_vllm_parses_every_engine(recipe, serve_parser):
    lines = list(engine_command_lines(recipe))
    assert len(lines) >= len(ROLES)
    for line in lines:
        args = serve_parser.parse_args(list(line))
        validate_parsed_serve_args(args)
        # What `vllm serve` itself checks before it starts anything.
        assert not (args.headless and args.api_server_count)
        assert recipe.model.value in (args.model, args.model_tag)
        transfer = AsyncEngineArgs.from_cli_args(args).kv_transfer_config
        assert transfer.kv_connector == "HybridNixlConnector"
        assert transfer.kv_role in ("kv_producer", "kv_consumer")
        decode_config(transfer.kv_connector_extra_config)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_the_router_parses_its_command(recipe):
    for command in render(recipe).commands:
        if command.argv[0] != "vllm-router":
            continue
        args = parse_router_args(list(command.argv[1:]))
        assert args.vllm_pd_disaggregation
        assert len(args.prefill_urls) == recipe.prefill.engines
        assert len(args.decode_urls) == recipe.decode.engines


def test_the_parser_refuses_a_misspelt_option(serve_parser, capsys):
    """Else the tests above could not fail."""
    (line, *_) = engine_command_lines(RECIPES["single-host-1p1d"])
    with pytest.raises(SystemExit):
        serve_parser.parse_args([*line, "--stream-intervall", "3"])
    assert "--stream-intervall" in capsys.readouterr().err


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_vllm_parses_every_command_of_the_documentation(page, serve_parser):
    lines = page.read_text().replace("\\\n", " ").splitlines()
    for line in lines:
        if re.match(r"\s*(?:\w+=\S+\s+)*vllm serve ", line):
            words = shlex.split(line)
            args = serve_parser.parse_args(words[words.index("serve") + 1 :])
            assert args.kv_transfer_config.kv_connector == "HybridNixlConnector", line


def test_the_documentation_has_commands():
    assert all("vllm serve " in (ROOT / name).read_text() for name in ("README.md", "docs/index.md"))


def test_the_compose_file_s_commands_parse(serve_parser):
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for role in ROLES:
        args = serve_parser.parse_args(services[role]["command"])
        decode_config(args.kv_transfer_config.kv_connector_extra_config)
    router = parse_router_args(services["router"]["command"])
    assert (len(router.prefill_urls), len(router.decode_urls)) == (1, 1)
