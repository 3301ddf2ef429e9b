"""Do recipes say what their names promise, agree between prefill and decode, and fit their hosts?"""

import itertools
import json
import shlex
from collections import Counter

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.engine.config import decode_config
from hybrid_connector.tools.cli import main
from hybrid_connector.tools.recipes.placing import ROLES, place
from hybrid_connector.tools.recipes.reading import families, read_family, recipes
from hybrid_connector.tools.recipes.rendering import Command, render, to_yaml

from refusals import refused

RECIPES = recipes()
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())

MUST_AGREE = {
    "kv-cache-dtype",
    "mamba-ssm-cache-dtype",
    "mamba-cache-dtype",
    "speculative-config",
    "dtype",
    "quantization",
}
"""Options that decide what the state means: engines that differ in one refuse each other (docs/support.md)."""


@every_recipe
def test_the_connector_takes_every_option(recipe):
    for role in ROLES:
        config = recipe.transfer_config(role)
        assert config["kv_connector"] == "HybridNixlConnector"
        assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        decode_config(config.get("kv_connector_extra_config", {}))


@every_recipe
def test_prefill_and_decode_agree_on_what_state_means(recipe):
    prefill, decode = (
        {name: setting.value for name, setting in recipe.options(role).items() if name in MUST_AGREE} for role in ROLES
    )
    assert prefill == decode


@every_recipe
def test_a_side_channel_that_leaves_its_host_is_protected_or_says_that_it_is_not(recipe):
    if recipe.one_host or recipe.launcher == "llm-d":
        return
    extra = recipe.transfer_config("prefill").get("kv_connector_extra_config", {})
    has_secret = {role: "HYBRID_CONNECTOR_SECRET_FILE" in recipe.environment(role) for role in ROLES}
    assert has_secret == dict.fromkeys(ROLES, not extra.get("allow_insecure_side_channel", False))


@every_recipe
def test_no_gpu_and_no_port_is_given_twice(recipe):
    gpus: Counter[tuple[str, int]] = Counter()
    ports: Counter[tuple[str, int]] = Counter()
    num_gpus: Counter[str] = Counter()
    for process in place(recipe):
        side = recipe.side(process.role)
        held = process.gpus or tuple(range(recipe.gpus_per_host))
        gpus.update((process.host, gpu) for gpu in held)
        num_gpus[process.role] += len(held)
        ports[process.host, process.http_port] += 1
        if process.role == "prefill":
            ports.update((process.host, process.side_port + rank) for rank in range(side.data_parallel))
    assert set(gpus.values()) == {1}
    assert set(ports.values()) == {1}
    for role in ROLES:
        assert num_gpus[role] == recipe.side(role).engines * recipe.side(role).num_gpus


def option(argv, name):
    """The word after ``--name``; ``None`` where it is not there."""
    return argv[argv.index(f"--{name}") + 1] if f"--{name}" in argv else None


@every_recipe
def test_every_rank_is_started_once(recipe):
    """Data-parallel ranks count on from host to host of an engine; hosts of a tensor-parallel one are numbered."""
    engines = {}
    for command in render(recipe).commands:
        if command.argv[:2] == ("vllm", "serve"):
            engines.setdefault(command.name.split(".")[0], []).append(command.argv)
    for name, parts in engines.items():
        side = recipe.side(name.split("-")[0])
        assert [part.count("--headless") for part in parts] == [0] + [1] * (len(parts) - 1)
        assert all(option(part, "api-server-count") is None for part in parts[1:])
        assert all(int(option(part, "tensor-parallel-size")) == side.tensor_parallel for part in parts)
        if option(parts[0], "nnodes") is not None:
            assert [(option(p, "nnodes"), option(p, "node-rank")) for p in parts] == [
                (str(len(parts)), str(rank)) for rank in range(len(parts))
            ]
        elif len(parts) > 1:
            sizes = [int(option(part, "data-parallel-size-local")) for part in parts]
            starts = [int(option(part, "data-parallel-start-rank") or 0) for part in parts]
            assert starts == list(itertools.accumulate(sizes, initial=0))[:-1]
            assert sum(sizes) == side.data_parallel == int(option(parts[0], "data-parallel-size"))
    if recipe.launcher != "llm-d" and recipe.launcher != "dynamo":
        assert len(engines) == recipe.prefill.engines + recipe.decode.engines


@every_recipe
def test_the_router_knows_every_engine(recipe):
    commands = render(recipe).commands
    routers = [command.argv for command in commands if command.argv[0] == "vllm-router"]
    assert len(routers) == (recipe.launcher in ("vllm-router", "srt-slurm"))
    for router in routers:
        for role in ROLES:
            urls = [word for before, word in itertools.pairwise(router) if before == f"--{role}"]
            serving = [
                f"http://{command.host}:{option(command.argv, 'port')}"
                for command in commands
                if command.name.startswith(role) and "--headless" not in command.argv
            ]
            assert urls == serving


@every_recipe
def test_a_shell_reads_the_commands_as_they_are_meant(recipe):
    for command in render(recipe).commands:
        words = shlex.split(command.shell().replace("\\\n", " "))
        assert words == [*(f"{name}={value}" for name, value in command.environment.items()), *command.argv]


def test_the_benchmark_recipes_are_complete():
    """N from 4 to 8, four variants each, with what the issue asks of them."""
    variants = {"base": None, "acc": None, "cc4096": 640, "cc5120": 768}
    for num_engines, (variant, capture) in itertools.product(range(4, 9), variants.items()):
        recipe = RECIPES[f"qwen3.5-gb200-{num_engines}xdep2-1xdep8-{variant}"]
        assert (recipe.prefill.engines, recipe.prefill.data_parallel, recipe.prefill.tensor_parallel) == (
            num_engines,
            2,
            1,
        )
        assert (recipe.decode.engines, recipe.decode.data_parallel, recipe.decode.tensor_parallel) == (1, 8, 1)
        for role in ROLES:
            options = {name: setting.value for name, setting in recipe.options(role).items()}
            assert options["mamba-ssm-cache-dtype"] == "bfloat16"
            assert (options["stream-interval"], options["api-server-count"]) == (100, 1)
            assert all(
                options[flag] is True
                for flag in (
                    "async-scheduling",
                    "language-model-only",
                    "no-enable-prefix-caching",
                    "enable-expert-parallel",
                )
            )
            assert recipe.environment(role)["VLLM_SSM_CONV_STATE_LAYOUT"].value == "DS"
            assert options.get("max-num-batched-tokens") == (16384 if role == "prefill" else None)
            assert options.get("max-cudagraph-capture-size") == (capture if role == "decode" else None)
        benchmark = recipe.workload.benchmark
        if variant == "acc":
            assert benchmark == {"type": "gsm8k", "repeat": 5}
        else:
            assert (benchmark["isl"], benchmark["osl"]) == (8192, 1024)
            assert variant == "base" or benchmark["concurrencies"] == variant.removeprefix("cc")


def test_the_large_model_has_both_ends():
    for prefill, decode in itertools.product(("tp4dp2", "tp2dp4"), ("tep8mtp", "tp4dp4")):
        recipe = RECIPES[f"qwen3.8-gb300-{prefill}-{decode}"]
        assert f"tp{recipe.prefill.tensor_parallel}dp{recipe.prefill.data_parallel}" == prefill
        assert (recipe.decode.tensor_parallel, recipe.decode.data_parallel) == (
            (8, 1) if decode == "tep8mtp" else (4, 4)
        )
        for role in ROLES:
            assert recipe.options(role)["enable-expert-parallel"].value is True
            assert ("speculative-config" in recipe.options(role)) == (decode == "tep8mtp")


def test_srt_slurm_is_told_what_the_commands_are_told():
    for recipe in RECIPES.values():
        if recipe.launcher != "srt-slurm":
            continue
        deployment = render(recipe)
        document = yaml.safe_load(deployment.files[f"{recipe.name}.yaml"])
        resources = document["resources"]
        for role in ROLES:
            assert resources[f"gpus_per_{role}"] == recipe.side(role).num_gpus
            hosts = {command.host for command in deployment.commands if command.name.startswith(role)}
            assert resources[f"{role}_nodes"] == len(hosts)
            told = document["backend"]["vllm_config"][role]
            first = next(command for command in deployment.commands if command.name.startswith(f"{role}-0"))
            for name, value in told.items():
                assert f"--{name}" in first.argv if value is True else option(first.argv, name) == str(value)
            assert json.loads(told["kv-transfer-config"]) == recipe.transfer_config(role)
        assert document["benchmark"] == recipe.workload.benchmark


def test_the_kubernetes_overlay_fits_together():
    recipe = RECIPES["llm-d"]
    documents = {name: yaml.safe_load(text) for name, text in render(recipe).files.items()}
    overlay = documents.pop("kustomization.yaml")
    assert {patch["path"] for patch in overlay["patches"]} == set(documents)
    for role in ROLES:
        (container,) = documents[f"patch-{role}.yaml"]["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["vllm", "serve"]
        assert all(isinstance(word, str) for word in container["args"])
        assert json.loads(option(container["args"], "kv-transfer-config")) == recipe.transfer_config(role)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == option(container["args"], "tensor-parallel-size")
        names = [variable["name"] for variable in container["env"]]
        assert {"VLLM_NIXL_SIDE_CHANNEL_HOST", "HYBRID_CONNECTOR_SECRET"} <= set(names)
        assert len(names) == len(set(names))


def test_a_recipe_says_what_it_was_not_tested_on():
    for recipe in RECIPES.values():
        assert recipe.not_tested_on
        assert recipe.tested_on or recipe.sources, f"{recipe.name}: neither run nor taken from anywhere"


def test_names_are_unique():
    assert len(RECIPES) == sum(len(family.recipes) for family in families())


SMALL = """
title = "small"
summary = "one engine of each"
launcher = "vllm-router"
gpus_per_host = {gpus_per_host}
one_host = {one_host}
not_tested_on = ["anything at all"]
model = {{ value = "m", why = "it is short" }}
[prefill]
engines = 1
tensor_parallel = {tp}
data_parallel = {dp}
why = "computes prompts"
[decode]
engines = 1
why = "generates text"
"""


def small(gpus_per_host=4, tp=1, dp=1, one_host="false"):
    return SMALL.format(gpus_per_host=gpus_per_host, tp=tp, dp=dp, one_host=one_host)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("title = ", "small: Invalid value (at end of document)"),
        (small() + "[both.options]\nx = {}", "small: Object missing required field `why` - at `$.both.options[...]`"),
        (small() + 'typo = "x"', "small: Object contains unknown field `typo` - at `$.decode`"),
        (small(tp=0), "small: Expected `int` >= 1 - at `$.prefill.tensor_parallel`"),
        (small() + '[[axes]]\nname = "a"', "small: Object missing required field `why` - at `$[0]`"),
    ],
)
def test_a_bad_file_is_refused_with_the_field(text, problem):
    with refused(problem, ConfigError):
        read_family("small", text)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"tp": 6}, "an engine of 6 GPUs does not fill hosts of 4"),
        ({"tp": 8, "dp": 2}, "prefill: ranks of 8 GPUs span hosts; expected one rank per engine"),
        ({"tp": 3, "dp": 4}, "prefill: ranks of 3 GPUs do not fill 4"),
        ({"tp": 4, "one_host": "true"}, "the engines do not fit into one host of 4 GPUs"),
    ],
)
def test_engines_that_do_not_fit_are_refused(shape, problem):
    (recipe,) = read_family("small", small(**shape)).recipes
    with refused(problem, ConfigError):
        place(recipe)


texts = st.text(st.characters(max_codepoint=0xD7FF), max_size=20)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            st.from_regex(r"[A-Za-z_]{2,8}", fullmatch=True).filter(lambda key: yaml.safe_load(key) == key),
            below,
            max_size=3,
        )
    ),
)


@settings(max_examples=50)
@given(documents)
def test_yaml_says_what_it_was_given(document):
    assert yaml.safe_load(to_yaml(document)) == document


@given(st.lists(texts.filter(lambda word: "\\\n" not in word), min_size=1))
def test_any_word_survives_the_shell(words):
    command = Command("h", "n", {"A": words[0]}, ("program", *words))
    assert shlex.split(command.shell().replace(" \\\n", " ")) == [f"A={words[0]}", "program", *words]


def test_the_command_line(capsys):
    assert main(["recipe"]) == 0
    assert all(f"  {name}\n" in capsys.readouterr().out for name in ["llm-d"])
    assert main(["recipe", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(RECIPES)
    assert main(["recipe", "single-host-1p1d"]) == 0
    assert "vllm serve" in capsys.readouterr().out
    assert main(["recipe", "--why", "llm-d"]) == 0
    assert "Not tested on" in capsys.readouterr().out
    assert main(["recipe", "--json", "dynamo"]) == 0
    assert [command["name"] for command in json.loads(capsys.readouterr().out)["commands"]] == [
        "frontend",
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]
    assert main(["recipe", "singl-host-1p1d"]) == 1
    assert "expected a recipe's name (single-host-1p1d" in capsys.readouterr().err
