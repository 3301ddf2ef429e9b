"""Does vLLM itself lay an engine's caches out as ``tools.models.engine`` says?

1. Make the engine's config with vLLM's own parser, and the model without memory (torch's meta device), once per stage.
2. Let vLLM group and place the caches, with few blocks, and allocate and view them.
3. Read the layout as the connector does in a running engine, and compare.

A rank is a made-up one: the groups of ranks have one member, which is told that there are more.
"""

import importlib
import os
import shlex
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.errors import UnsupportedError
from hybrid_connector.tools.models.engine import Engine

NUM_BLOCKS = 4
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
}


def compare_with_vllm(engine: Engine, model: str, line: str) -> list[str]:
    """Every difference to vLLM's own layout, one line each.

    Raises ``UnsupportedError`` where vLLM is not installed, or would not start such an engine here.
    """
    ours = engine.layouts(NUM_BLOCKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM's dependencies think of each other
        try:
            theirs = layouts_of_vllm(engine, model, line)
        except UnsupportedError:
            raise
        except Exception as error:  # vLLM has no base of its own for what it refuses
            reason = " ".join(str(error).split())
            raise UnsupportedError(f"--check: vLLM does not make such an engine here: {reason:.300}") from error
    return [difference for a, b in zip(ours, theirs, strict=True) for difference in _differences(a, b)]


def _differences(ours: RankLayout, theirs: RankLayout) -> Iterator[str]:
    where = f"rank {ours.rank}"
    if ours.region_bytes != theirs.region_bytes:
        yield f"{where}: {NUM_BLOCKS} blocks have {ours.region_bytes} bytes, vLLM says {theirs.region_bytes}"
    if ours.groups != theirs.groups:
        yield f"{where}: groups are {ours.groups}, vLLM says {theirs.groups}"
    our_layers, their_layers = ({layer.name: layer for layer in rank.layers} for rank in (ours, theirs))
    for name in sorted(our_layers.keys() | their_layers.keys()):
        if name not in their_layers or name not in our_layers:
            yield f"{where}: {name} is {'not ' if name not in their_layers else 'only '}in vLLM"
        elif our_layers[name] != their_layers[name]:
            yield f"{where}: {name}: {our_layers[name]}, vLLM says {their_layers[name]}"


def layouts_of_vllm(engine: Engine, model: str, line: str) -> tuple[RankLayout, ...]:
    """What the connector would read off each rank of an engine with these arguments and ``NUM_BLOCKS`` blocks."""
    words = shlex.split(line)
    environment = dict(_ENVIRONMENT) | (_CPU_ENVIRONMENT if engine.settings.device == "cpu" else {})
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    environment["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS" if engine.settings.channel_first else "SD"
    with _environment(environment):
        _import_vllm(engine.settings.device)
        _forget_conv_layout()
        try:
            return tuple(_read_layouts(engine, _engine_config(engine, model, words)))
        finally:
            _forget_conv_layout()


def _import_vllm(device: str) -> None:
    try:
        if device == "cpu":
            importlib.import_module("hybrid_connector.tools.nursery").import_vllm()
        importlib.import_module("vllm")
    except ImportError as error:
        raise UnsupportedError(f"--check needs vLLM, which is not installed here: {error}") from error
    platform = importlib.import_module("vllm.platforms").current_platform
    if platform.device_type != device:
        raise UnsupportedError(
            f"--check with --device {device}: the vLLM that is installed here is for {platform.device_type}"
        )


def _engine_config(engine: Engine, model: str, words: list[str]) -> Any:
    """vLLM's config of the engine, its block size settled as when it starts."""
    arguments = importlib.import_module("vllm.engine.arg_utils")
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    words = _without_model(words)
    parser = arguments.EngineArgs.add_cli_args(parsing.FlexibleArgumentParser())
    known, _ = parser.parse_known_args(["--model", model, "--load-format", "dummy", "--skip-tokenizer-init", *words])
    known.kv_transfer_config = None  # nothing is transferred, and the layout is set below
    if known.max_model_len is None:
        known.max_model_len = 4096
    config = arguments.EngineArgs.from_cli_args(known).create_engine_config()
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    config.cache_config.kv_cache_layout = engine.settings.layout
    return config


def _without_model(words: list[str]) -> list[str]:
    """The arguments alone, without ``vllm serve MODEL`` before them."""
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return words[first:]


def _read_layouts(engine: Engine, config: Any) -> Iterator[RankLayout]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

    from hybrid_connector.engine.layout import Place, read_caches, refuse_unsupported

    planning = _planning()
    settings = engine.settings
    layout = config.cache_config.get_resolved_kv_cache_layout()
    with set_current_vllm_config(config):
        stages = [_layers_of_stage(config, stage) for stage in range(settings.pp)]
        specs = [{name: spec for name, (_, spec) in layers.items()} for layers in stages]
        groups = planning.get_kv_cache_groups(config, {name: spec for stage in specs for name, spec in stage.items()})
        for stage, layers in enumerate(stages):
            projected = planning._project_kv_cache_groups_to_worker(groups, specs[stage])
            block_bytes = planning._pool_bytes_per_block(config, projected)
            placed = planning.get_kv_cache_config_from_groups(config, projected, NUM_BLOCKS * block_bytes)
            refuse_unsupported(config, placed)
            attention = [
                [
                    SimpleNamespace(backend=layers[name][0].get_attn_backend(), kv_cache_spec=group.kv_cache_spec)
                    for name in group.layer_names
                ]
                for group in placed.kv_cache_groups
            ]
            kernel_tokens = prepare_kernel_block_sizes(placed, attention)
            caches = allocate_kv_cache(placed, torch.device(settings.device), layout, kernel_tokens)
            for tp_rank in range(settings.tp):
                yield read_caches(config, placed, caches, Place(stage, settings.pp, tp_rank, settings.tp)).layout


def _planning() -> Any:
    """vLLM's module that groups and places caches, which 0.33 renamed."""
    for name in ("kv_cache_utils", "kv_cache_planning"):
        try:
            module = importlib.import_module(f"vllm.v1.core.{name}")
        except ImportError:
            continue
        if hasattr(module, "get_kv_cache_config_from_groups"):
            return module
    raise UnsupportedError("--check: this vLLM plans its caches elsewhere than 0.32 and 0.33 do")


def _layers_of_stage(config: Any, stage: int) -> Mapping[str, tuple[Any, Any]]:
    """The layers with a cache of one pipeline stage, by name, of a model without memory, each with its cache's spec."""
    import torch
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    context = config.compilation_config.static_forward_context
    context.clear()
    with _made_up_rank(config.parallel_config, stage):
        with torch.device("meta"):
            initialize_model(config)
        if stage == 0:
            current_platform.update_block_size_for_backend(config)
        layers = {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}
        return {name: (layer, layer.get_kv_cache_spec(config)) for name, layer in layers.items()}


@contextmanager
def _made_up_rank(parallel: Any, stage: int) -> Iterator[None]:
    """This process as the first rank of a pipeline stage, as far as a model asks that computes nothing."""
    import torch
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        meeting = tempfile.mkdtemp(prefix="hybrid-connector-check.")
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}/meeting", 0, backend="gloo")
    parallel_state.initialize_model_parallel(1, 1)
    groups = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    shares = (parallel.tensor_parallel_size, 0), (parallel.pipeline_parallel_size, stage)
    try:
        for group, (size, rank) in zip(groups, shares, strict=True):
            group.world_size, group.rank_in_group, group.ranks = size, rank, list(range(size))
        yield
    finally:
        for group in groups:
            group.world_size, group.rank_in_group, group.ranks = 1, 0, [0]
        parallel_state.destroy_model_parallel()


def _forget_conv_layout() -> None:
    importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils").get_conv_state_layout.cache_clear()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
