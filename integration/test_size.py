"""Are block, page, groups and requests of ``hybrid-connector size`` those that vLLM itself arrives at?

vLLM reads the config of the preset's model, chooses the block, groups the layers, cuts a given memory into blocks and
says how many requests fit. No engine starts.
"""

import itertools
import json
import warnings
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_connector.core.families import ElementType
from hybrid_connector.tools import nursery
from hybrid_connector.tools.sizing import models
from hybrid_connector.tools.sizing.capacity import Memory, Serving, Topology, Weights, fit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's dependencies think of each other
    nursery.import_vllm()
    import torch
    from vllm.config import CacheConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
    from vllm.platforms.interface import Platform
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, get_kv_quant_mode

PRESET = "qwen3.8-2.4t"
NUM_TOKENS = 9216
CACHE_BYTES = 80 * models.GIB


class Kernels16(AttentionBackend):
    """Takes blocks as FlashAttention, FlashInfer and Triton do on GPUs."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The preset's config, with what vLLM asks for besides."""
    directory = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "vocab_size": 320,
        "max_position_embeddings": 2**20,
        **models.preset_values(PRESET)["config"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def vllm_config_for(model_dir, serving: Serving, tp: int) -> VllmConfig:
    config = EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        max_model_len=NUM_TOKENS,
        enable_prefix_caching=serving.prefix_caching,
        mamba_ssm_cache_dtype=serving.temporal_element.name if serving.temporal_element else "auto",
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = tp
    config.cache_config.block_size = serving.block_size or CacheConfig.DEFAULT_BLOCK_SIZE
    config.cache_config.cache_dtype = serving.kv_element.name if serving.kv_element else "auto"
    if serving.spec_tokens:
        config.speculative_config = SimpleNamespace(
            method="mtp",
            num_speculative_tokens=serving.spec_tokens,
            use_eagle=lambda: True,
            use_eagle_block_drop=lambda: True,
        )
    Platform._align_hybrid_block_size(config, Kernels16)
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def specs_for(config: VllmConfig, num_attention_layers: int, num_recurrent_layers: int) -> dict[str, KVCacheSpec]:
    """What vLLM's layers declare (``Attention`` and ``MambaBase.get_kv_cache_spec``)."""
    cache, model = config.cache_config, config.model_config
    dtype = model.dtype if cache.cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
    attention = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=dtype,
        kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
    )
    recurrent = MambaSpec(
        shapes=Qwen3_5ForCausalLM.get_mamba_state_shape_from_config(config),
        dtypes=Qwen3_5ForCausalLM.get_mamba_state_dtype_from_config(config),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
    )
    return {f"attention.{i}": attention for i in range(num_attention_layers)} | {
        f"recurrent.{i}": recurrent for i in range(num_recurrent_layers)
    }


def cases() -> list[tuple[int, Serving]]:
    served = [
        (tp, Serving(spec_tokens=spec, prefix_caching=caching))
        for tp, spec, caching in itertools.product((1, 2, 4, 8, 16), (0, 2, 3), (True, False))
    ]
    more = [
        Serving(temporal_element=ElementType("bfloat16", 2)),
        Serving(kv_element=ElementType("fp8", 1)),
        Serving(block_size=64),
        Serving(block_size=4096, spec_tokens=1),
    ]
    return served + [(tp, serving) for tp in (1, 8) for serving in more]


def say(value: Any) -> str:
    """A case in few words."""
    if isinstance(value, int):
        return f"TP{value}"
    changed = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
    return " ".join(f"{name}={getattr(to, 'name', to)}" for name, to in changed.items()) or "defaults"


@pytest.mark.parametrize(("tp", "serving"), cases(), ids=say)
def test_vllm_arrives_at_the_same(model_dir, tp: int, serving: Serving) -> None:
    model = models.read_preset(PRESET).model
    config = vllm_config_for(model_dir, serving, tp)
    num_attention = model.num_attention_layers + (model.num_draft_layers if serving.spec_tokens else 0)
    specs = specs_for(config, num_attention, model.num_recurrent_layers)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    cut = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, CACHE_BYTES)

    ours = fit(model, Weights(0), Topology(tp), serving, Memory(CACHE_BYTES, 0, {}))
    pool = ours.pool
    assert pool.block_tokens == config.cache_config.block_size
    assert {pool.page_bytes} == {group.kv_cache_spec.page_size_bytes for group in groups}
    assert pool.state_bytes == specs["recurrent.0"].real_page_size_bytes
    assert pool.num_attention_groups == count(groups, FullAttentionSpec)
    assert pool.num_recurrent_groups == count(groups, MambaSpec)
    assert ours.num_blocks == cut.num_blocks
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cut)
    assert cut.num_blocks / pool.request_blocks(NUM_TOKENS) == pytest.approx(concurrency, rel=1e-12)


def count(groups: list[Any], kind: type) -> int:
    return sum(isinstance(group.kv_cache_spec, kind) for group in groups)


@pytest.mark.parametrize("num_attention", range(1, 14))
@pytest.mark.parametrize("num_recurrent", [1, 3, 8, 13])
def test_groups_of_any_mix(model_dir, num_attention: int, num_recurrent: int) -> None:
    serving = Serving()
    model = replace(
        models.read_preset(PRESET).model, num_attention_layers=num_attention, num_recurrent_layers=num_recurrent
    )
    config = vllm_config_for(model_dir, serving, 1)
    groups = kv_cache_utils.get_kv_cache_groups(config, specs_for(config, num_attention, num_recurrent))
    cut: KVCacheConfig = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, CACHE_BYTES)
    ours = fit(model, Weights(0), Topology(1), serving, Memory(CACHE_BYTES, 0, {}))
    assert ours.pool.num_attention_groups == count(groups, FullAttentionSpec)
    assert ours.pool.num_recurrent_groups == count(groups, MambaSpec)
    assert ours.num_blocks == cut.num_blocks


def test_the_model_is_what_the_issue_says(model_dir) -> None:
    """vLLM, on the preset's config with two speculative tokens: 2,112 tokens, 4.125 MiB, 4 MiB + 120 KiB."""
    config = vllm_config_for(model_dir, Serving(spec_tokens=2), 1)
    spec = specs_for(config, 1, 1)["recurrent.0"]
    assert config.cache_config.block_size == 2112
    assert spec.page_size_bytes == 4.125 * 2**20
    conv, temporal = (torch.empty(shape, dtype=dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    assert (conv.nbytes, temporal.nbytes) == (120 * 2**10, 4 * 2**20)
