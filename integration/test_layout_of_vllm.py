"""Does ``engine.layout`` read vLLM's cache structures right?

1. What the connector reads of vLLM exists, by the lists in the docstrings; an upgrade that moves one fails here first.
2. vLLM places, allocates and views the caches of a family; bytes written through its views lie where the layout says.
3. The manifest of a small model is the recorded one; ``python test_layout_of_vllm.py DIRECTORY`` records it.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hybrid_connector.core.blocks import Layer, RankLayout
from hybrid_connector.core.errors import UnsupportedError
from hybrid_connector.core.geometry import Interval, Shard
from hybrid_connector.tools import nursery
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's dependencies think of each other
    nursery.import_vllm()
    import vllm
    from vllm import envs
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm.model_executor.layers.mamba import mamba_utils
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1 import kv_cache_interface as specs
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.worker.utils import allocate_kv_cache

    from hybrid_connector.connector import HybridNixlConnector
    from hybrid_connector.engine import layout as layout_module
    from hybrid_connector.engine import scheduler as scheduler_module
    from hybrid_connector.engine.layout import Place, read_caches

MANIFESTS = Path(__file__).parent.parent / "tests" / "golden" / "manifests"
CALCULATOR = mamba_utils.MambaStateShapeCalculator


# What the connector reads of vLLM.


def listed_in_layout() -> Iterator[tuple[str, str]]:
    """Class and attribute, from lists like ``A``, ``B``: x, y; in the docstring of ``engine.layout``."""
    text = " ".join((layout_module.__doc__ or "").split())
    for entry in text.split("one of:")[1].split(";"):
        found = re.fullmatch(r"\s*((?:``\w+``(?:, )?)+): ([\w, ]+)", entry)
        if found:
            yield from itertools.product(re.findall(r"``(\w+)``", found[1]), found[2].split(", "))


def listed_in_scheduler() -> list[str]:
    text = " ".join((scheduler_module.__doc__ or "").split())
    found = re.search(r"``Request``: ([\w, ]+)\.", text)
    assert found is not None
    return found[1].split(", ")


def has_attribute(owner: type, name: str) -> bool:
    """A field, a property or method, or set when an instance is made."""
    if hasattr(owner, name):
        return True
    if dataclasses.is_dataclass(owner):
        return name in {field.name for field in dataclasses.fields(owner)}
    return re.search(rf"\bself\.{name}\b\s*(?::[^=]+)?=[^=]", inspect.getsource(owner.__init__)) is not None


@pytest.mark.parametrize(("owner", "name"), sorted(set(listed_in_layout())))
def test_what_the_layout_reads_is_there(owner: str, name: str) -> None:
    assert has_attribute(getattr(specs, owner), name), f"vLLM {vllm.__version__} moved {owner}.{name}"


@pytest.mark.parametrize("name", listed_in_scheduler())
def test_what_the_scheduler_reads_of_a_request_is_there(name: str) -> None:
    assert has_attribute(Request, name), f"vLLM {vllm.__version__} moved Request.{name}"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (KVConnectorOutput, "finished_recving"),
        (KVConnectorOutput, "failed_recving"),
        (KVConnectorOutput, "kv_connector_worker_meta"),
        (KVCacheBlocks, "get_block_ids"),
        (RequestStatus, "FINISHED_LENGTH_CAPPED"),
        (RequestStatus, "FINISHED_STOPPED"),
        (ParallelConfig, "tensor_parallel_size"),
        (ParallelConfig, "pipeline_parallel_size"),
        (ParallelConfig, "decode_context_parallel_size"),
        (ParallelConfig, "prefill_context_parallel_size"),
        (ParallelConfig, "data_parallel_index"),
        (ModelConfig, "get_total_num_kv_heads"),
        (ModelConfig, "hf_text_config"),
        (mamba_utils, "is_conv_state_dim_first"),
    ],
)
def test_what_else_is_read_is_there(owner: Any, name: str) -> None:
    found = hasattr(owner, name) if isinstance(owner, ModuleType) else has_attribute(owner, name)
    assert found, f"vLLM {vllm.__version__} moved {owner.__name__}.{name}"


def test_environment_variables_are_known() -> None:
    for name in ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_SSM_CONV_STATE_LAYOUT"):
        assert name in envs.environment_variables


def test_both_lists_are_complete() -> None:
    """Attributes of what vLLM hands over that the modules read, against what their docstrings say."""
    listed = {name for _, name in listed_in_layout()} | {"dtypes"}
    assert attributes_read(layout_module, ("spec", "kv_cache_config", "group")) <= listed
    assert attributes_read(scheduler_module, ("request",)) == set(listed_in_scheduler())


def attributes_read(module: ModuleType, names: tuple[str, ...]) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }


NEW_IN_0_33 = {"supports_sleep_mode"}


def test_every_hook_is_one_of_vllms() -> None:
    """And takes what vLLM hands it, under the same names."""
    overridden = {
        name
        for name, value in vars(HybridNixlConnector).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property | classmethod))
    }
    assert len(overridden) > 15
    for name in sorted(overridden - NEW_IN_0_33):
        base = next((b for b in (KVConnectorBase_V1, SupportsHMA) if hasattr(b, name)), None)
        assert base is not None, f"vLLM {vllm.__version__} has no hook {name} any more"
        theirs, ours = getattr(base, name), getattr(HybridNixlConnector, name)
        assert isinstance(theirs, property) == isinstance(ours, property), name
        if not isinstance(ours, property):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
    assert HybridNixlConnector.__abstractmethods__ == frozenset()
    assert hasattr(KVConnectorBase_V1, "_cache_hit_source")


# Where the bytes lie.

KV_HEADS, HEAD_SIZE, LATENT = 2, 8, 24
HEADS, HEAD_DIM, STATE, TAPS = 4, 8, 4, 3


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A family: vLLM's shapes by TP size, its name for the type, and what the axes are made of.

    ``sections``: of the conv state, as (name, units, channels of a unit). ``units``: of the temporal state's first
    axis, none where there is no such state.
    """

    mamba_type: str
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    sections: tuple[tuple[str, int, int], ...]
    units: int
    config: Mapping[str, int] = field(default_factory=dict)


def mamba2(groups: int) -> Recurrent:
    return Recurrent(
        "MAMBA2",
        lambda tp: CALCULATOR.mamba2_state_shape(tp, HEADS * HEAD_DIM, groups, HEADS, HEAD_DIM, STATE, TAPS + 1),
        (("x", HEADS, HEAD_DIM), ("B", groups, STATE), ("C", groups, STATE)),
        HEADS,
        {"mamba_n_groups": groups},
    )


RECURRENT = {
    "gated delta net": Recurrent(
        "GDN_ATTN",
        lambda tp: CALCULATOR.gated_delta_net_state_shape(tp, 2, HEADS, HEAD_DIM, STATE, TAPS + 1),
        (("q", 2, HEAD_DIM), ("k", 2, HEAD_DIM), ("v", HEADS, STATE)),
        HEADS,
    ),
    "KDA": Recurrent(
        "GDN_ATTN",
        lambda tp: CALCULATOR.kda_state_shape(tp, HEADS, HEAD_DIM, conv_kernel_size=TAPS + 1),
        (("q", HEADS, HEAD_DIM), ("k", HEADS, HEAD_DIM), ("v", HEADS, HEAD_DIM)),
        HEADS,
    ),
    "Mamba2, one group": mamba2(1),
    "Mamba2, two groups": mamba2(2),
    "Mamba1": Recurrent(
        "MAMBA1",
        lambda tp: CALCULATOR.mamba1_state_shape(tp, HEADS * HEAD_DIM, STATE, TAPS + 1),
        (("x", HEADS * HEAD_DIM, 1),),
        HEADS * HEAD_DIM,
    ),
    "short convolution": Recurrent(
        "SHORT_CONV",
        lambda tp: CALCULATOR.short_conv_state_shape(tp, HEADS * HEAD_DIM, TAPS + 1),
        (("x", HEADS * HEAD_DIM, 1),),
        0,
    ),
    "linear attention": Recurrent(
        "LINEAR", lambda tp: CALCULATOR.linear_attention_state_shape(HEADS, tp, HEAD_DIM), (), HEADS
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """An engine: ``attention`` names what its paged layers are, ``family`` its recurrent ones; either may be missing.

    ``block_size`` tokens a logical block, ``kernel_tokens`` a page. ``spare_bytes`` pad what a page needs at least.
    """

    layout: str
    tp: int
    attention: str | None = "full"
    family: str | None = None
    kv_heads: int = KV_HEADS
    block_size: int = 32
    kernel_tokens: int = 32
    spare_bytes: int = 0
    channel_first: bool = False

    def __str__(self) -> str:
        parts = [self.layout, f"TP{self.tp}", self.attention, self.family, f"{self.kv_heads} KV heads"]
        parts += [f"{self.block_size} tokens in pages of {self.kernel_tokens}", f"{self.spare_bytes} spare"]
        return ", ".join(filter(None, parts)) + (", DS" if self.channel_first else "")


@dataclass(frozen=True, slots=True)
class RankOfVllm:
    """What vLLM makes of one rank."""

    config: KVCacheConfig
    specs: dict[str, KVCacheSpec]
    caches: dict[str, torch.Tensor]
    layout: RankLayout


@contextmanager
def conv_layout(channel_first: bool) -> Iterator[None]:
    """vLLM's conv states as (channels, taps), or the other way round."""
    before = os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT")
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS" if channel_first else "SD"
    mamba_utils.get_conv_state_layout.cache_clear()
    try:
        yield
    finally:
        del os.environ["VLLM_SSM_CONV_STATE_LAYOUT"]
        if before is not None:
            os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = before
        mamba_utils.get_conv_state_layout.cache_clear()


def attention_spec(case: Case, kind: str, **changes: Any) -> KVCacheSpec:
    shared = {"block_size": case.block_size, "dtype": torch.bfloat16, **changes}
    heads = max(1, case.kv_heads // case.tp)
    match kind:
        case "MLA":
            return specs.MLAAttentionSpec(num_kv_heads=1, head_size=LATENT, **shared)
        case "sliding":
            return specs.SlidingWindowSpec(num_kv_heads=heads, head_size=HEAD_SIZE, sliding_window=24, **shared)
        case _:
            return specs.FullAttentionSpec(num_kv_heads=heads, **{"head_size": HEAD_SIZE, **shared})


def groups_of(case: Case) -> list[KVCacheGroupSpec]:
    """Two layers a group, one group per kind; pages of one size, as vLLM makes them."""
    kinds = case.attention.split(" and ") if case.attention else []
    if kinds == ["mixed"]:  # head sizes that differ within a group
        sizes = {"layers.0.attn": HEAD_SIZE, "layers.1.attn": 2 * HEAD_SIZE}
        mixed = {name: attention_spec(case, "full", head_size=size) for name, size in sizes.items()}
        return [KVCacheGroupSpec(list(mixed), specs.UniformTypeKVCacheSpecs(case.block_size, kv_cache_specs=mixed))]
    wanted = {kind: attention_spec(case, kind) for kind in kinds}
    if case.family is not None:
        family = RECURRENT[case.family]
        shapes = tuple(map(tuple, family.shapes(case.tp)))
        dtypes = (torch.bfloat16, torch.float32)[: len(shapes)] if family.sections else (torch.float32,)
        wanted[case.family] = specs.MambaSpec(
            block_size=4096, shapes=shapes, dtypes=dtypes, mamba_type=MambaAttentionBackendEnum[family.mamba_type]
        )
    page = max(spec.page_size_bytes for spec in wanted.values()) + case.spare_bytes
    padded = {
        kind: spec if spec.page_size_bytes == page else dataclasses.replace(spec, page_size_padded=page)
        for kind, spec in wanted.items()
    }
    names = {
        kind: [f"layers.{2 * number + i}.{'mixer' if kind == case.family else 'attn'}" for i in range(2)]
        for number, kind in enumerate(padded)
    }
    return [KVCacheGroupSpec(names[kind], spec) for kind, spec in padded.items()]


def place_caches(groups: list[KVCacheGroupSpec], layout: KVCacheLayout, available_bytes: int) -> KVCacheConfig:
    """By vLLM's own planning, whose module 0.33 renamed."""
    for module in ("kv_cache_utils", "kv_cache_planning"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plan = importlib.import_module(f"vllm.v1.core.{module}").get_kv_cache_config_from_groups
            except (ImportError, AttributeError):
                continue
        cache = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        )
        config = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None), cache_config=cache)
        placed: KVCacheConfig = plan(config, groups, available_bytes)
        return placed
    raise AssertionError(f"vLLM {vllm.__version__} moved get_kv_cache_config_from_groups")


def build(case: Case, rank: int, num_blocks: int = 7) -> RankOfVllm:
    """Placed, allocated and viewed by vLLM, read by the connector."""
    layout = KVCacheLayout[case.layout]
    groups = groups_of(case)
    by_layer = {
        name: group.kv_cache_spec.kv_cache_specs[name]
        if isinstance(group.kv_cache_spec, specs.UniformTypeKVCacheSpecs)
        else group.kv_cache_spec
        for group in groups
        for name in group.layer_names
    }
    block_bytes = max(sum(by_layer[name].page_size_bytes for name in group.layer_names) for group in groups)
    config = place_caches(groups, layout, block_bytes * num_blocks)
    kernel = [
        spec.block_size if isinstance(spec := group.kv_cache_spec, specs.MambaSpec) else case.kernel_tokens
        for group in groups
    ]
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, kernel)
    family = RECURRENT.get(case.family or "")
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: case.kv_heads,
            hf_text_config=SimpleNamespace(**(family.config if family else {})),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=case.tp),
    )
    read = read_caches(vllm_config, config, caches, Place(0, 1, rank, case.tp))
    return RankOfVllm(config, by_layer, caches, read.layout)


def state_views(spec: KVCacheSpec, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A recurrent layer's states as vLLM's own layers view them."""
    layer = SimpleNamespace(get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes)
    MambaBase.bind_kv_cache(layer, cache)
    return tuple(layer.kv_cache)


def held(units: int, rank: int, tp: int) -> Interval:
    """A rank's share of units, said once more without the package."""
    if units >= tp:
        return Interval(rank * units // tp, (rank + 1) * units // tp)
    return Interval(rank * units // tp, rank * units // tp + 1)


def fill(view: torch.Tensor, rng: np.random.Generator) -> np.ndarray:
    """Write through the view what no other place holds; the bytes of each element, element axes first."""
    raw = torch.from_numpy(rng.integers(0, 256, (*view.shape, view.element_size()), dtype=np.uint8))
    view.copy_(raw.view(view.dtype).squeeze(-1))
    return raw.numpy()


def addresses(layer: Layer, shard: Shard, page: int) -> np.ndarray:
    """Where the layout says that the first byte of each of the shard's elements lies."""
    at = np.full(shard.box.shape, layer.offset + page * layer.page_stride + shard.offset)
    for axis, (extent, stride) in enumerate(zip(shard.box.shape, shard.strides, strict=True)):
        at += (np.arange(extent) * stride).reshape([-1 if i == axis else 1 for i in range(at.ndim)])
    return at


def elements_of_vllm(
    case: Case, rank: int, layer: Layer, spec: KVCacheSpec, cache: torch.Tensor, page: int, rng: np.random.Generator
) -> Iterator[tuple[str, tuple[Interval, ...], np.ndarray]]:
    """Tensor, box and bytes of each element of one page, written through vLLM's views just now."""
    if not isinstance(spec, specs.MambaSpec):
        units = 1 if isinstance(spec, specs.MLAAttentionSpec) else case.kv_heads
        written = fill(cache[page], rng)
        box = (held(units, rank, case.tp), Interval(0, cache.shape[2]), Interval(0, cache.shape[3]))
        yield f"{layer.name}.kv", box, written
        return
    family = RECURRENT[case.family or ""]
    views = [fill(view[page], rng) for view in state_views(spec, cache)]
    if family.sections:
        conv = views.pop(0)
        conv = conv if case.channel_first else conv.swapaxes(0, 1)
        first = 0
        for name, units, width in family.sections:
            share = held(units, rank, case.tp)
            channels = Interval(share.start * width, share.stop * width)
            yield f"{layer.name}.conv.{name}", (channels, Interval(0, TAPS)), conv[first : first + len(channels)]
            first += len(channels)
        assert first == conv.shape[0]
    for temporal in views:
        rest = tuple(Interval(0, extent) for extent in temporal.shape[1:-1])
        yield f"{layer.name}.temporal", (held(family.units, rank, case.tp), *rest), temporal


def check(case: Case) -> None:
    for rank in range(case.tp):
        built = build(case, rank)
        rng = np.random.default_rng(rank)
        storage = next(iter(built.caches.values())).untyped_storage()
        region = np.frombuffer(torch.tensor([], dtype=torch.uint8).set_(storage).numpy(), dtype=np.uint8)
        assert region.size == built.layout.region_bytes
        wanted: list[tuple[Layer, Shard, int, np.ndarray]] = []
        num_groups = len(built.layout.groups)
        for layer in built.layout.layers:
            group = built.layout.groups[layer.group]
            ratio = group.pages_per_block
            # Groups share memory: a block is one group's at a time.
            blocks = range(layer.group, group.num_blocks, num_groups)
            for page in (block * ratio + i for block in blocks for i in range(ratio)):
                found = elements_of_vllm(
                    case, rank, layer, built.specs[layer.name], built.caches[layer.name], page, rng
                )
                for shard, (name, box, raw) in zip(layer.shards, found, strict=True):
                    assert (shard.tensor.name, shard.box.intervals) == (name, box)
                    wanted.append((layer, shard, page, raw))
        seen = np.zeros(region.size, dtype=np.uint8)
        for layer, shard, page, raw in wanted:
            at = addresses(layer, shard, page)[..., None] + np.arange(shard.tensor.item_bytes)
            assert np.array_equal(region[at], raw), f"{case}, rank {rank}: {shard.tensor.name}, page {page}"
            np.add.at(seen, at.ravel(), 1)
        assert seen.max() == 1, "two elements share a byte"


HYBRIDS = [
    Case(layout, tp, "full", family, channel_first=channel_first)
    for layout, tp, family, channel_first in itertools.product(
        ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BHLNC", "BLNHC"), (1, 2), RECURRENT, (False, True)
    )
    # Heads outside blocks, two of them on a rank, and a group without heads: vLLM lets blocks of different numbers
    # overlap, whether or not there is a connector.
    if (layout, tp) != ("LHBNC", 1)
]
OTHERS = [
    Case(layout, tp, attention, kv_heads=kv_heads)
    for layout, tp, attention, kv_heads in itertools.product(
        ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BHLNC", "BLNHC"),
        (1, 2, 4),
        ("full", "MLA", "sliding", "full and sliding"),
        (1, 2, 4),
    )
]
SPLIT = [
    # vLLM splits blocks only where a block is one dense page.
    *(
        Case("LBNHC", tp, attention, kv_heads=4, block_size=64, kernel_tokens=tokens)
        for tp, attention, tokens in itertools.product((1, 2), ("full", "MLA", "sliding"), (16, 32))
    ),
    *(
        Case("LBHNC", tp, attention, kv_heads=2, block_size=64, kernel_tokens=tokens)
        for tp, attention, tokens in itertools.product((1, 2), ("full", "MLA"), (16, 32))
    ),
    *(
        Case(layout, 2, "full", family, block_size=96, kernel_tokens=16, channel_first=True)
        for layout, family in itertools.product(("LBNHC", "LBHNC"), RECURRENT)
    ),
]
PADDED = [
    Case(layout, tp, attention, family, spare_bytes=spare, channel_first=tp == 2)
    for layout, tp, attention, family, spare in itertools.product(
        ("LBHNC", "LBNHC", "BLHNC", "BLNHC"),
        (1, 2),
        ("full", "MLA", None),
        ("gated delta net", "Mamba2, one group", "short convolution"),
        (64,),
    )
]
MIXED = [Case(layout, tp, "mixed") for layout, tp in itertools.product(("LBHNC", "LBNHC", "BLHNC", "BLNHC"), (1, 2))]


def check_all(cases: list[Case]) -> list[Case]:
    """Check each case that vLLM itself can store; returns those."""
    checked = []
    for case in cases:
        with conv_layout(case.channel_first):
            try:
                build(case, 0)
            except UnsupportedError:
                raise  # what vLLM can store, the layout must be able to describe
            except (ValueError, AssertionError):
                continue  # this layout cannot hold these pages, vLLM says
            check(case)
            checked.append(case)
    return checked


def test_hybrids() -> None:
    checked = check_all(HYBRIDS)
    assert {(case.layout, case.tp, case.family, case.channel_first) for case in checked} >= set(
        itertools.product(("LBHNC", "LBNHC", "BLHNC", "BLNHC"), (1, 2), RECURRENT, (False, True))
    )
    assert {case.layout for case in checked} == set(KVCacheLayout.__members__)


def test_attention_only() -> None:
    assert len(check_all(OTHERS)) == len(OTHERS)


def test_blocks_that_kernels_split() -> None:
    checked = check_all(SPLIT)
    assert {case.kernel_tokens for case in checked} == {16, 32}
    assert {case.attention for case in checked} == {"full", "MLA", "sliding"}
    assert {case.family for case in checked if case.family} == set(RECURRENT)
    assert {case.layout for case in checked} == {"LBNHC", "LBHNC"}


def test_pages_with_spare_bytes() -> None:
    checked = check_all(PADDED)
    assert {(case.layout, case.attention, case.family) for case in checked} >= set(
        itertools.product(
            ("LBNHC", "BLHNC", "BLNHC"),
            ("full", "MLA", None),
            ("gated delta net", "Mamba2, one group", "short convolution"),
        )
    )


def test_head_sizes_that_differ_within_a_group() -> None:
    assert len(check_all(MIXED)) >= 6


# What is refused at start.

SUPPORT = Path(__file__).parent.parent / "docs" / "support.md"


def refused_at_start() -> list[tuple[str, str]]:
    table = SUPPORT.read_text().split("\n## Refused at start")[1]
    return re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", table, re.MULTILINE)


def refused_engine(feature: str) -> tuple[SimpleNamespace, KVCacheConfig]:
    """An engine that uses the feature: what is read of its config, and its caches."""
    paged = {"block_size": 32, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    spec: KVCacheSpec = specs.FullAttentionSpec(num_kv_heads=2, **paged)
    match feature:
        case "decode context parallelism" | "prefill context parallelism":
            parallel[feature.replace(" parallelism", "_parallel_size").replace(" ", "_")] = 2
        case "chunked attention":
            spec = specs.ChunkedLocalAttentionSpec(num_kv_heads=2, attention_chunk_size=64, **paged)
        case "attention with sinks in the cache":
            spec = specs.SinkFullAttentionSpec(num_kv_heads=2, **paged)
        case "compressed sliding windows":
            spec = specs.SlidingWindowMLASpec(num_kv_heads=1, sliding_window=64, **paged)
        case "several tokens per entry":
            spec = specs.MLAAttentionSpec(num_kv_heads=1, tokens_per_state=4, **paged)
        case "packed heads":
            spec = dataclasses.replace(spec, num_head_slots=1)
        case "recurrent states whole on every rank":
            spec = specs.MambaSpec(
                block_size=32,
                shapes=((3, 8),),
                dtypes=(torch.bfloat16,),
                mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
                tp_replicated=True,
            )
        case "caches in host memory":
            pass
        case _:
            raise AssertionError(f"docs/support.md: {feature} has no check")
    group = KVCacheGroupSpec(["layers.0"], spec, host_resident=feature == "caches in host memory")
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel)), KVCacheConfig(2, [], [group])


@pytest.mark.parametrize(("feature", "text"), refused_at_start())
def test_what_cannot_be_moved_is_refused_at_start(feature: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"\A{re.escape(text)}\Z"):
        layout_module.refuse_unsupported(*refused_engine(feature))


def test_every_refusal_at_start_is_in_the_table() -> None:
    assert len(refused_at_start()) == 9


# The manifest of one model, by the vLLM that is installed.

RECORDED = (1, 2)


def recorded_manifest(tp: int) -> EngineManifest:
    """What an engine with full attention and gated delta nets publishes; its first rank's region lies at 1 MiB."""
    with conv_layout(channel_first=False):
        case = Case("LBHNC", tp, "full", "gated delta net", block_size=32, kernel_tokens=32)
        layouts = [build(case, rank).layout for rank in range(tp)]
    return EngineManifest(
        protocol_version=1,
        engine_id=f"vllm-{vllm.__version__}-tp{tp}",
        incarnation="recorded",
        tp_size=tp,
        factors=Factors.of({"architecture": "Qwen3_5ForCausalLM", "computation dtype": "bfloat16"}),
        vllm_version=vllm.__version__,
        connector_version="0",
        lease_s=30.0,
        ranks=tuple(
            RankManifest(layout.rank, layout, 2**20, "DRAM", 0, "nixl", b"rank %d" % layout.rank) for layout in layouts
        ),
    )


def recording(tp: int) -> Path:
    release = ".".join(map(str, vllm.__version_tuple__[:3]))
    return MANIFESTS / f"vllm-{release}-tp{tp}.json"


@pytest.mark.parametrize("tp", RECORDED)
def test_the_recorded_manifest_is_what_this_vllm_gives(tp: int) -> None:
    if not recording(tp).exists():
        pytest.skip(f"nothing is recorded of vLLM {vllm.__version__}")
    recorded = msgspec.json.decode(recording(tp).read_bytes(), type=EngineManifest)
    assert recorded.ranks == recorded_manifest(tp).ranks


if __name__ == "__main__":
    for tp in RECORDED:
        Path(sys.argv[1], recording(tp).name).write_bytes(
            msgspec.json.format(msgspec.json.encode(recorded_manifest(tp)), indent=1) + b"\n"
        )
