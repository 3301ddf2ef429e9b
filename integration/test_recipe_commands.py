"""Do vLLM's and the router's own argument parsers take every command of every recipe?"""

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

README = Path(__file__).parent.parent / "README.md"
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


def test_the_readme_s_commands_parse(serve_parser):
    """The lines under "Use it in a vLLM image" parse too."""
    lines = [shlex.split(line) for line in README.read_text().splitlines() if line.startswith("vllm serve ")]
    assert lines
    for line in lines:
        args = serve_parser.parse_args(line[2:])
        assert args.kv_transfer_config.kv_connector == "HybridNixlConnector"
