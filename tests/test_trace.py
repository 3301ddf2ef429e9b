"""Does what the planner says about origins add up to the plan that it makes?"""

from collections import Counter

import pytest

from hybrid_connector.core.geometry import Box, subtract
from hybrid_connector.core.lowering import Run, expand, merge
from hybrid_connector.core.planning import plan_transfer, trace_transfer
from hybrid_connector.tools.models.config import read_config
from hybrid_connector.tools.models.engine import describe_engine, parse_serve

from layouts import Model, Storage, build_engine

PAIRS = [(src, dst) for src in (1, 2, 4) for dst in (1, 2, 4)]
MAMBA2 = {"family": "mamba2", "num_heads": 4, "num_groups": 1, "head_dim": 2, "state_dim": 3}
MODEL = Model(num_attention=2, num_kv_heads=2, num_recurrent=2, **MAMBA2)


def engine(num_ranks, **storage):
    return build_engine(MODEL, Storage(num_ranks=num_ranks, **storage))


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_origins_give_the_runs_of_the_plan(src, dst):
    srcs = engine(src)
    for rank in engine(dst):
        by_source: dict[tuple[str, int], list[Run]] = {}
        for origin in trace_transfer(rank, srcs):
            runs = by_source.setdefault((origin.layer, origin.src_rank), [])
            runs.extend(expand(origin.copy, origin.src_page, origin.dst_page))
        traced = Counter((source[1], merge(runs)) for source, runs in by_source.items())
        planned = Counter()
        for copies in plan_transfer(rank, srcs).copies:
            planned[copies.src_rank, copies.runs] += len(copies.layers)
        assert traced == planned


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_origins_tile_every_tensor_of_a_rank(src, dst):
    srcs = engine(src)
    for rank in engine(dst):
        origins = trace_transfer(rank, srcs)
        for layer in rank.layers:
            for shard in layer.shards:
                missing: tuple[Box, ...] = (shard.box,)
                held = [origin for origin in origins if origin.tensor == shard.tensor.name and origin.dst_page == 0]
                assert all(origin.src_rank in origin.replicas for origin in held)
                for origin in held:
                    missing = tuple(rest for box in missing for rest in subtract(box, origin.box))
                assert missing == ()
                assert sum(origin.num_bytes for origin in held) == shard.num_bytes


def test_replicas_are_named():
    config = read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "config.json",
    )
    src, dst = (describe_engine(config, parse_serve(f"-tp {tp}", "cuda")).layouts(4) for tp in (4, 2))
    (origin,) = trace_transfer(dst[1], src)
    assert origin.replicas == (2, 3)
    assert origin.box == Box.of((1, 2), (0, 16), (0, 32))
