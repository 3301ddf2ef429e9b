"""How does an engine with these arguments lay a model's caches out?

1. ``Settings``: what matters of an engine's arguments and environment; ``parse_serve`` reads a line of ``vllm serve``.
2. ``describe_engine``: element types, block and page lengths, groups of layers with one block table, padding.
3. ``Engine.layouts``: the ``RankLayout`` of every rank, as ``engine.layout`` would read it off the running engine.

The rules are vLLM 0.32's and 0.33's: groups and placement from v1/core/kv_cache_utils.py, strides from
v1/kv_cache_interface.py (``compute_layout_strides``), stages from distributed/utils.py (``get_pp_indices``).
"""

import argparse
import json
import math
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from hybrid_connector.core.blocks import BlockIds, Group, Layer, RankLayout
from hybrid_connector.core.errors import ConfigError, UnsupportedError
from hybrid_connector.core.families import Attention, ElementType, Recurrent, StatePage, TokenPage, split
from hybrid_connector.core.geometry import Shard
from hybrid_connector.tools.models.architectures import Elements, Model, ModelLayer, find_architecture, read_model
from hybrid_connector.tools.models.blocks import BACKENDS, Backend, choose_block, choose_page
from hybrid_connector.tools.models.config import Config
from hybrid_connector.wire.manifest import Factors

Device = Literal["cpu", "cuda"]

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYOUT_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC", "auto": "LBHNC"}
_DEFAULT_BACKENDS: Mapping[tuple[str, bool], str] = {
    ("cuda", False): "FLASH_ATTN",
    ("cuda", True): "FLASH_ATTN_MLA",
    ("cpu", False): "CPU_ATTN",
    ("cpu", True): "CPU_MLA",
}
"""By device, and whether attention is MLA: what vLLM takes on Hopper GPUs, and on CPUs without AMX."""

_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHORT_FLOATS = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine was told, as vLLM spells it; "auto" and ``None`` where it was not.

    ``layout``: order of layers, blocks, heads, tokens. ``channel_first``: conv states as DS. ``speculative``: method
    and tokens. ``ignored``: arguments that say nothing about caches, or nothing known here.
    """

    device: Device = "cuda"
    tp: int = 1
    pp: int = 1
    block_size: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    conv_dtype: str = "auto"
    temporal_dtype: str = "auto"
    layout: str = "LBHNC"
    channel_first: bool = False
    backend: str | None = None
    speculative: tuple[str, int] | None = None
    num_blocks: int | None = None
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("tensor-parallel size", self.tp), ("pipeline-parallel size", self.pp)):
            if value < 1:
                raise ConfigError(f"{what}: expected at least 1, got {value}")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(f"block size: expected at least 1, got {self.block_size}")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"cache layout: expected one of {', '.join(LAYOUTS)}, got {self.layout}")
        if self.backend is not None and self.backend not in BACKENDS:
            raise ConfigError(f"attention backend: expected one of {', '.join(BACKENDS)}, got {self.backend}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_serve(line: str, device: Device) -> Settings:
    """A line like ``VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve MODEL --tensor-parallel-size 2``, or parts of it.

    Raises ``ConfigError`` for a known argument with an impossible value. Unknown ones are kept in ``ignored``.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{line!r}: expected the arguments of vllm serve: {error}") from error
    environment: dict[str, str] = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[:1] == ["vllm"]:
        words.pop(0)
    if words[:1] == ["serve"]:
        words = words[1:] if len(words) < 2 or words[1].startswith("-") else words[2:]
    known, rest = _serve_parser().parse_known_args([_dashed(word) for word in words])
    for size, feature in (
        (known.decode_context_parallel_size, "decode context parallelism"),
        (known.prefill_context_parallel_size, "prefill context parallelism"),
    ):
        if size > 1:
            raise UnsupportedError(f"{feature} of size {size} is not supported yet: use size 1")
    if "VLLM_PP_LAYER_PARTITION" in environment:
        raise UnsupportedError("VLLM_PP_LAYER_PARTITION: stages of chosen sizes cannot be planned without vLLM yet")
    layout = environment.get("VLLM_KV_CACHE_LAYOUT") or _layout_option(known.kv_transfer_config)
    conv_layout = environment.get("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    if conv_layout not in ("SD", "DS"):
        raise ConfigError(f"VLLM_SSM_CONV_STATE_LAYOUT: expected SD or DS, got {conv_layout}")
    return Settings(
        device=device,
        tp=known.tensor_parallel_size,
        pp=known.pipeline_parallel_size,
        block_size=known.block_size,
        dtype=known.dtype,
        kv_cache_dtype=known.kv_cache_dtype,
        conv_dtype=known.mamba_cache_dtype,
        temporal_dtype=known.mamba_ssm_cache_dtype,
        layout=LAYOUT_ALIASES.get(layout, layout),
        channel_first=conv_layout == "DS",
        backend=known.attention_backend,
        speculative=_speculation(known.speculative_config),
        num_blocks=known.num_gpu_blocks_override,
        ignored=tuple(rest),
    )


def _serve_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--decode-context-parallel-size", "-dcp", type=int, default=1)
    parser.add_argument("--prefill-context-parallel-size", "-pcp", type=int, default=1)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--mamba-cache-dtype", default="auto")
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto")
    parser.add_argument("--attention-backend")
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--speculative-config", type=_json)
    parser.add_argument("--kv-transfer-config", type=_json)
    return parser


def _dashed(word: str) -> str:
    """vLLM takes ``--block_size`` too."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _json(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value


def _layout_option(transfer: Mapping[str, Any] | None) -> str:
    extra = (transfer or {}).get("kv_connector_extra_config") or {}
    return str(extra.get("kv_cache_layout", "auto"))


def _speculation(config: Mapping[str, Any] | None) -> tuple[str, int] | None:
    if config is None:
        return None
    tokens = config.get("num_speculative_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"--speculative-config: num_speculative_tokens: expected at least 1, got {tokens!r}")
    return str(config.get("method", "draft_model")), tokens


def _say_speculation(speculative: tuple[str, int] | None) -> str:
    """As manifests do."""
    return "off" if speculative is None else f"{speculative[0]}, {speculative[1]} tokens"


# What the engine makes of it.


@dataclass(frozen=True, slots=True)
class _Spec:
    """What vLLM compares to put layers into groups: the extents of a page on a rank, in bytes along C.

    ``tokens``: of a block; 1 for a recurrent state. ``page_bytes``: padding included.
    """

    kind: str
    heads: int
    tokens: int
    content_bytes: int
    page_bytes: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine without memory: everything but the number of its blocks."""

    settings: Settings
    model: Model
    elements: Elements
    backend: Backend | None
    block_tokens: int | None
    page_tokens: int | None
    groups: tuple[tuple[str, ...], ...]
    factors: Factors
    _specs: Mapping[str, _Spec] = field(repr=False)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def num_request_blocks(self, num_tokens: int) -> int:
        """Blocks that a request has in all groups together, those outside of windows included."""
        return sum(
            1 if self._is_recurrent(group) else -(-num_tokens // self._block(group)) for group in range(self.num_groups)
        )

    def windows(self) -> tuple[int | None, ...]:
        """Per group, the tokens of its sliding window."""
        return tuple(self._specs[names[0]].window for names in self.groups)

    def block_ids(self, num_tokens: int, choose: "Blocks") -> BlockIds:
        """Made-up blocks of a request; a sliding window has none for what lies before it."""
        ids: list[tuple[int | None, ...]] = []
        for group, window in enumerate(self.windows()):
            if self._is_recurrent(group):
                ids.append(choose.take(1))
                continue
            block = self._block(group)
            skipped = 0 if window is None else max(0, num_tokens - window + 1) // block
            held = choose.take(-(-num_tokens // block) - skipped)
            ids.append((None,) * skipped + held)
        return tuple(ids)

    def layouts(self, num_blocks: int) -> tuple[RankLayout, ...]:
        """What every rank holds, stages one after the other, with ``num_blocks`` blocks."""
        return tuple(
            self._layout(stage, tp_rank, num_blocks)
            for stage in range(self.settings.pp)
            for tp_rank in range(self.settings.tp)
        )

    def _is_recurrent(self, group: int) -> bool:
        return self._specs[self.groups[group][0]].kind == "recurrent"

    def _block(self, group: int) -> int:
        return self._specs[self.groups[group][0]].tokens

    def _layout(self, stage: int, tp_rank: int, num_blocks: int) -> RankLayout:
        order = self.settings.layout
        first, stop = stage_layers(self.model.num_layers, self.settings.pp)[stage]
        here = {layer.name: layer for layer in self.model.layers if first <= layer.index < stop}
        names = [tuple(name for name in group if name in here) for group in self.groups]
        block_bytes = max(sum(self._specs[name].page_bytes for name in group) for group in names)
        groups, layers = [], []
        for index, group in enumerate(names):
            spec = self._specs[self.groups[index][0]]
            page = spec.tokens
            if spec.kind != "recurrent" and group and not order.startswith("B"):
                assert self.page_tokens is not None
                page = self.page_tokens
            num_pages = spec.tokens // page
            groups.append(Group(num_blocks, num_pages, None if spec.kind == "recurrent" else page))
            for number, name in enumerate(group):
                strides = _strides(
                    order, spec, len(group), num_blocks, num_pages, block_bytes if order.startswith("B") else None
                )
                shards = _shards(here[name], (page, strides["H"], strides["N"]), self.settings, tp_rank)
                layers.append(Layer(name, index, number * strides["L"], strides["B"], shards))
        return RankLayout(stage * self.settings.tp + tp_rank, block_bytes * num_blocks, tuple(groups), tuple(layers))


def _shards(layer: ModelLayer, page: tuple[int, int, int], settings: Settings, rank: int) -> tuple[Shard, ...]:
    """``page``: tokens, and bytes from head to head and token to token."""
    ranks = {"rank": rank, "num_ranks": settings.tp}
    try:
        if isinstance(layer.state, Recurrent):
            return layer.state.shards(layer.name, StatePage(settings.channel_first), **ranks)
        tokens, head_stride, token_stride = page
        strides = head_stride, token_stride, layer.state.element.num_bytes
        return layer.state.shards(layer.name, TokenPage(tokens, strides), **ranks)
    except ValueError as error:
        raise UnsupportedError(f"{layer.name}: {error}") from error


def _strides(
    order: str, spec: _Spec, num_layers: int, num_blocks: int, num_pages: int, block_stride: int | None
) -> dict[str, int]:
    """Bytes from layer to layer (L), page to page (B), head to head (H), token to token (N), and within a token (C).

    Inside out in ``order``; the innermost of layers and blocks is as far apart as a page with its padding;
    ``block_stride`` where layers share a block. A block is ``num_pages`` pages, which vLLM does without padding only.
    """
    if num_pages > 1 and spec.page_bytes != spec.heads * spec.tokens * spec.content_bytes:
        raise UnsupportedError(f"blocks of {spec.tokens} tokens with padding cannot be split into {num_pages} pages")
    extents = {"L": num_layers, "B": num_blocks * num_pages, "H": spec.heads}
    extents |= {"N": spec.tokens // num_pages, "C": spec.content_bytes}
    inner_grid = max(order.index("L"), order.index("B"))
    strides: dict[str, int] = {}
    reach = 1
    for position in range(len(order) - 1, -1, -1):
        axis = order[position]
        if position == inner_grid:
            reach = max(reach, spec.page_bytes // num_pages)
        strides[axis] = block_stride if axis == "B" and block_stride is not None else reach
        reach = strides[axis] * extents[axis]
    return strides


def describe_engine(config: Config, settings: Settings) -> Engine:
    """What an engine with these settings makes of the model.

    Raises ``UnsupportedError`` where vLLM would not start, or the connector, or these rules do not reach.
    """
    architecture = find_architecture(config)
    elements = choose_elements(config, settings)
    model = read_model(config, elements)
    if settings.pp > model.num_layers:
        raise ConfigError(f"{settings.pp} pipeline stages: the model has {model.num_layers} layers")
    backend = _backend(settings, architecture.is_latent, model)
    token_bytes, state_bytes = _largest(model, settings.tp)
    block = page = None
    if backend is not None:
        block = choose_block(backend, settings.block_size, token_bytes=token_bytes, state_bytes=state_bytes)
        page = choose_page(backend, block)
        if settings.layout.startswith("B"):
            page = block
        if settings.device == "cpu":
            # CPU kernels order a page in their own way, so pages move whole (engine.layout says the same).
            name = f"{elements.attention.name} in CPU pages of {page} tokens"
            elements = replace(elements, attention=ElementType(name, elements.attention.num_bytes))
            model = read_model(config, elements)
    specs = _specs(model, settings.tp, block)
    factors = Factors.of(
        {
            "architecture": config.architecture,
            "computation dtype": _computation_dtype(config, settings.dtype),
            "device": settings.device,
            "K/V quantisation": "" if backend is None else _quantisation(settings.kv_cache_dtype),
            "speculative decoding": _say_speculation(settings.speculative),
        }
    )
    return Engine(settings, model, elements, backend, block, page, _groups(specs), factors, specs)


def _backend(settings: Settings, is_latent: bool, model: Model) -> Backend | None:
    """The attention backend; ``None`` for a model without attention."""
    if not any(isinstance(layer.state, Attention) for layer in model.layers):
        return None
    backend = BACKENDS[settings.backend or _DEFAULT_BACKENDS[settings.device, is_latent]]
    if backend.is_latent != is_latent or backend.device != settings.device:
        raise ConfigError(
            f"attention backend {backend.name}: expected one for {'MLA' if is_latent else 'plain attention'} on "
            f"{settings.device}"
        )
    return backend


def _rank_share(layer: ModelLayer, tp: int) -> tuple[int, int]:
    """Heads of a layer on a rank, and bytes of one token of a head; or 1 and the bytes of the whole state."""
    state = layer.state
    try:
        if isinstance(state, Recurrent):
            return 1, sum(shard.num_bytes for shard in state.shards("", StatePage(False), rank=0, num_ranks=tp))
        return len(split(state.num_kv_heads, 0, tp, "KV heads")), state.content * state.element.num_bytes
    except ValueError as error:
        raise UnsupportedError(f"{layer.name}: {error}") from error


def _largest(model: Model, tp: int) -> tuple[int, int]:
    """Bytes of a token in an attention layer of a rank, and of a recurrent layer's state; 0 where there is none."""
    token_bytes = state_bytes = 0
    for layer in model.layers:
        heads, content_bytes = _rank_share(layer, tp)
        if isinstance(layer.state, Recurrent):
            state_bytes = max(state_bytes, content_bytes)
        else:
            token_bytes = max(token_bytes, heads * content_bytes)
    return token_bytes, state_bytes


def _specs(model: Model, tp: int, block: int | None) -> dict[str, _Spec]:
    """Every layer's page on a rank; where attention and recurrent layers share a pool, all pages are of one size."""
    specs = {}
    for layer in model.layers:
        heads, content_bytes = _rank_share(layer, tp)
        if isinstance(layer.state, Recurrent):
            specs[layer.name] = _Spec("recurrent", heads, 1, content_bytes, content_bytes)
        else:
            assert block is not None
            kind = "latent" if layer.is_latent else "attention"
            specs[layer.name] = _Spec(kind, heads, block, content_bytes, heads * block * content_bytes, layer.window)
    page_bytes = max(spec.page_bytes for spec in specs.values())
    for name, spec in specs.items():
        if spec.page_bytes != page_bytes:
            if spec.kind != "recurrent":
                raise UnsupportedError(
                    f"{name}: attention pages of {spec.page_bytes} bytes beside pages of {page_bytes} "
                    "cannot be planned without vLLM yet"
                )
            specs[name] = replace(spec, page_bytes=page_bytes)
    return specs


def _groups(specs: Mapping[str, _Spec]) -> tuple[tuple[str, ...], ...]:
    """Layers by block table: alike ones, in as many groups as there are times the fewest layers of a kind.

    Every so many layers go to the same group, so that each pipeline stage has a part of every group. Where one kind
    has less than half as many layers again as another, one group per kind.
    """
    alike: dict[_Spec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        alike[spec].append(name)
    fewest, most = min(map(len, alike.values())), max(map(len, alike.values()))
    size = most if most < 1.5 * fewest else fewest
    groups = []
    for names in alike.values():
        number = math.ceil(len(names) / size)
        groups += [tuple(names[i::number]) for i in range(number)]
    return tuple(groups)


def stage_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """First layer and the one after the last, per pipeline stage: what is left over goes to those before the last."""
    sizes = [num_layers // num_stages] * num_stages
    for i in range(num_layers % num_stages):
        sizes[-2 - i] += 1
    starts = [sum(sizes[:i]) for i in range(num_stages)]
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


# Element types.


def choose_elements(config: Config, settings: Settings) -> Elements:
    """Element types of the caches, by the engine's options, the model's config and vLLM's defaults."""
    computed = _computation_dtype(config, settings.dtype)
    conv = computed if settings.conv_dtype == "auto" else settings.conv_dtype
    key, default = find_architecture(config).temporal
    temporal = settings.temporal_dtype
    if temporal == "auto":
        temporal = (config.get(key) if key else None) or default or conv
        if settings.device == "cpu":
            # On CPUs with AVX512-BF16, vLLM keeps states in float32 unless told otherwise.
            temporal = "float32"
    cached = settings.kv_cache_dtype
    attention = ElementType("uint8", 1) if cached in _FP8 else _float(computed if cached == "auto" else cached)
    num_speculative = 0 if settings.speculative is None else settings.speculative[1]
    return Elements(attention, _float(conv), _float(str(temporal)), num_speculative)


def _computation_dtype(config: Config, dtype: str) -> str:
    if dtype == "auto":
        dtype = str(config.get("dtype", "torch_dtype") or "float32").removeprefix("torch.")
        if dtype == "float32":
            return "bfloat16"
    return _float(dtype).name


def _float(name: str) -> ElementType:
    name = _SHORT_FLOATS.get(name, name)
    if name not in _FLOATS:
        raise UnsupportedError(f"element type {name}: expected one of {', '.join((*_FLOATS, *_FP8))}")
    return ElementType(name, _FLOATS[name])


def _quantisation(kv_cache_dtype: str) -> str:
    return "FP8_PER_TENSOR" if kv_cache_dtype in _FP8 else "NONE"


# Block ids.


class Blocks:
    """Hands out made-up block ids, as an engine's pool does: never 0, which is vLLM's null block.

    ``fragmented`` per cent of a request's blocks do not follow the one before; those of different groups never do.
    """

    def __init__(self, fragmented: int = 0) -> None:
        if not 0 <= fragmented <= 100:
            raise ConfigError(f"--fragmented: expected a percentage from 0 to 100, got {fragmented}")
        self._fragmented = fragmented
        self._next = 1
        self._debt = 0

    def take(self, number: int) -> tuple[int, ...]:
        """The ids of ``number`` blocks of one group."""
        ids = []
        for i in range(number):
            if i:
                self._debt += self._fragmented
                if self._debt >= 100:
                    self._debt -= 100
                    self._next += 1
            ids.append(self._next)
            self._next += 1
        self._next += 1
        return tuple(ids)
