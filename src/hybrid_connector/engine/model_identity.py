"""Do two engines serve the same model? The facts that P and D must agree on besides the geometry of their tensors.

Weights are told apart by samples of their files, since neither a path nor a config does: during a rolling update two
revisions of a model have the same geometry, and state of one continued by the other gives an answer of neither.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict, try_get_local_file
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from hybrid_connector.engine.layout import element_type, group_spec

_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def model_factors(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, model_id: str) -> dict[str, str]:
    """Named facts, as they stand in a refusal. ``model_id`` replaces the fingerprint of the weight files."""
    model = vllm_config.model_config
    return {
        "architecture": ",".join(model.architectures or ()),
        "model config": _config_digest(model),
        "weights": model_id or _weights_digest(model),
        "computation dtype": element_type(model.dtype).name,
        # Kernels of different devices need not agree on the order within a page.
        "device": str(vllm_config.device_config.device_type),
        "K/V quantisation": ",".join(sorted(_quantisations(kv_cache_config))),
        "speculative decoding": _speculation(vllm_config),
    }


def _config_digest(model: Any) -> str:
    """Of ``config.json`` as published: vLLM edits its own copy, by tensor-parallel size among others."""
    config = get_hf_file_to_dict("config.json", model.model, model.revision) or model.hf_config.to_dict()
    # Where the files lie and which library wrote them says nothing about the model.
    known = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _weights_digest(model: Any) -> str:
    """Of sizes and samples of the weight files; says so where there are none (dummy weights, streamed weights)."""
    config = try_get_local_file(model=model.model, file_name="config.json", revision=model.revision)
    files: set[Path] = set()
    if isinstance(config, Path):
        files = {path for pattern in _WEIGHT_FILES for path in config.parent.glob(pattern)}
    if not files:
        return "no weight files here; set model_id on both sides"
    digest = hashlib.sha256()
    for path in sorted(files):
        _add_samples(digest, path)
    return digest.hexdigest()[:16]


def _add_samples(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size} ".encode())
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def _quantisations(kv_cache_config: KVCacheConfig) -> set[str]:
    specs = map(group_spec, kv_cache_config.transfer_groups)
    return {spec.kv_quant_mode.name for spec in specs if not isinstance(spec, MambaSpec)}


def _speculation(vllm_config: VllmConfig) -> str:
    config = vllm_config.speculative_config
    return "off" if config is None else f"{config.method}, {config.num_speculative_tokens} tokens"
