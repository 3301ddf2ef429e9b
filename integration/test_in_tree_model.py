"""Does ``in_tree_model`` copy what vLLM's own connector copies? Its real worker code runs here, without a network.

A worker is made without its constructor, which wants GPUs and process groups; everything from the handshake on is real:
``add_remote_agent`` with all its checks, ``_read_blocks_for_req``, and what happens after arrival. Only NIXL itself is
replaced, by one that writes down what it is asked to read.
"""

import itertools
import warnings
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybrid_connector.core.families import Attention, Recurrent
from hybrid_connector.tools import nursery
from hybrid_connector.tools import sweep_geometry as sweep
from hybrid_connector.tools.byte_oracle import Ranges, follow
from hybrid_connector.tools.in_tree_model import NotModelledError, RefusedError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's dependencies think of each other
    nursery.import_vllm()
    from vllm.distributed.kv_transfer.kv_connector import utils as connector_utils
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import derive_mamba_conv_split
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

MAMBA_TYPES = {
    "mamba1": MambaAttentionBackendEnum.MAMBA1,
    "mamba2": MambaAttentionBackendEnum.MAMBA2,
    "gdn": MambaAttentionBackendEnum.GDN_ATTN,
    "short_conv": MambaAttentionBackendEnum.SHORT_CONV,
    "linear": MambaAttentionBackendEnum.LINEAR,
}
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


class WritesDown:
    """A NIXL agent that remembers its reads."""

    def __init__(self) -> None:
        self.lists: list[np.ndarray] = []
        self.reads: list[tuple[np.ndarray, np.ndarray]] = []

    def get_xfer_descs(self, descs, memory_type):
        return np.asarray(descs, dtype=np.int64)

    def prep_xfer_dlist(self, agent, descs):
        self.lists.append(descs)
        return len(self.lists) - 1

    def add_remote_agent(self, metadata):
        return "P"

    def make_prepped_xfer(self, operation, local, local_ids, remote, remote_ids, notif_msg):
        self.reads.append((self.lists[local][np.asarray(local_ids)], self.lists[remote][np.asarray(remote_ids)]))
        if (self.reads[-1][0][:, 1] != self.reads[-1][1][:, 1]).any():
            raise AssertionError("NIXL refuses descriptors of different lengths")
        return len(self.reads)

    def transfer(self, handle):
        pass

    def send_notif(self, agent, notif_msg):
        """Sent alone where there is nothing to read from a rank."""
        nothing = np.zeros((0, 3), dtype=np.int64)
        self.reads.append((nothing, nothing))


def geometry(engine: sweep.Engine, rank: int) -> dict:
    """What a worker of the engine registers: bases, page bytes and strides of its regions, blocks, sizes."""
    if isinstance(engine.model.family, Attention):
        side = sweep._attention_side(engine)
        ratio, page_tokens = side.pages_per_block, side.page_tokens
        bases, page, stride, order = list(side.bases), side.page_bytes, side.page_stride, side.order
    else:
        side = sweep._state_side(engine)
        ratio, page_tokens, order = 1, 16, "LBHNC"
        bases, page, stride = [side.base], side.page_stride, side.page_stride
    return {
        "bases": bases,
        "block_lens": [page] * len(bases),
        "block_strides": [stride] * len(bases),
        "num_blocks": engine.ranks[rank].groups[0].num_blocks * ratio,
        "ratio": ratio,
        "page_tokens": page_tokens,
        "order": order,
    }


def decomposition(engine: sweep.Engine):
    """The worker's view of the recurrent layer; any hybrid's where the model at hand is attention."""
    if isinstance(engine.model.family, Recurrent):
        side = sweep._state_side(engine)
        kind, shapes = MAMBA_TYPES[engine.model.state_type], (side.conv_shape, side.temporal_shape)
        dtypes = DTYPES[side.conv_item], DTYPES[side.temporal_item]
    else:
        kind, shapes, dtypes = MAMBA_TYPES["mamba1"], ((1, 1), (1, 1)), (torch.bfloat16, torch.bfloat16)
    spec = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes, mamba_type=kind)
    return derive_mamba_conv_split(spec, engine.num_ranks)


def worker_of(engine: sweep.Engine, rank: int) -> NixlPullConnectorWorker:
    """D's worker as it is after ``register_kv_caches``."""
    model, own = engine.model, geometry(engine, rank)
    attention_spec = MLAAttentionSpec if model.latent else FullAttentionSpec
    worker = object.__new__(NixlPullConnectorWorker)
    heads = model.family.num_kv_heads if isinstance(model.family, Attention) else engine.num_ranks
    split = decomposition(engine)
    vars(worker).update(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
        kv_transfer_config=SimpleNamespace(enable_permute_local_kv=False),
        engine_id="D",
        tp_rank=rank,
        world_size=engine.num_ranks,
        pp_size=1,
        dcp_size=1,
        dcp_rank=0,
        pcp_size=1,
        use_mla=model.latent,
        use_host_buffer=False,
        _has_mamba=True,
        _is_hma_required=True,
        _is_csa_linear=False,
        _ple_region_index=None,
        _ple_group_index=None,
        _conv_decomp=split,
        _mamba_ssm_size=split.ssm_sizes,
        _group_spec_types=(attention_spec, MambaSpec),
        _region_is_mla=[model.latent] * len(own["bases"]),
        _ssm_region_indices=list(range(len(own["bases"]))),
        _scratch_region_indices=[],
        _transfer_layer_region_indices=(),
        _transfer_layer_group_ids=(),
        _transfer_layer_names=(),
        _mixed_mem_types=False,
        _skip_dram_xfer=False,
        _bidirectional_kv_xfer_enabled=False,
        _failed_remote_engines=set(),
        _invalid_remote_engines=set(),
        _engine_last_active={},
        _recving_transfers=defaultdict(list),
        _physical_blocks_per_logical_kv_block=own["ratio"],
        _logical_num_blocks=own["num_blocks"] // own["ratio"],
        nixl_wrapper=WritesDown(),
        nixl_memory_type="DRAM",
        device_id=0,
        region_mem_types=["DRAM"] * len(own["bases"]),
        region_names=["layer"] * len(own["bases"]),
        region_group_ids=[0] * len(own["bases"]),
        region_num_blocks=[own["num_blocks"]] * len(own["bases"]),
        _uses_region_group_mapping=False,
        num_regions=len(own["bases"]),
        num_descs=own["num_blocks"] * len(own["bases"]),
        num_blocks=own["num_blocks"],
        block_size=own["page_tokens"],
        block_len_per_layer=own["block_lens"],
        block_stride_per_layer=own["block_strides"],
        kv_cache_layout=own["order"],
        backend_name="FLASH_ATTN",
        enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False,
        kv_cache_config=SimpleNamespace(
            transfer_groups=[
                SimpleNamespace(kv_cache_spec=object.__new__(kind)) for kind in (attention_spec, MambaSpec)
            ]
        ),
        kv_caches_base_addr=defaultdict(dict, {"D": {rank: own["bases"]}}),
        dst_num_blocks={"D": own["num_blocks"]},
        dst_region_num_blocks={"D": [own["num_blocks"]] * len(own["bases"])},
        dst_region_group_ids={"D": [0] * len(own["bases"])},
        dst_uses_region_group_mapping={"D": False},
        dst_region_mem_types={"D": ["DRAM"] * len(own["bases"])},
        dst_xfer_side_handles=defaultdict(dict),
        src_xfer_handles_by_block_size={},
        src_blocks_data_by_block_size={},
        src_xfer_handles_by_tp_ratio={},
        tp_mappings={},
        _remote_agents=defaultdict(dict),
        transfer_topo=connector_utils.TransferTopology(
            tp_rank=rank,
            tp_size=engine.num_ranks,
            block_size=own["page_tokens"],
            engine_id="D",
            is_mla=model.latent,
            is_mamba=True,
            total_num_kv_heads=1 if model.latent else heads,
            attn_backends=[],
        ),
    )
    worker.src_xfer_handles_by_block_size[worker.block_size], worker.src_blocks_data = (
        worker.register_local_xfer_handler(worker.block_size)
    )
    return worker


def read_really(src: sweep.Engine, dst: sweep.Engine, rank: int) -> list[Ranges]:
    """What the real worker reads: handshake with the P ranks it wants, then one request."""
    worker, model = worker_of(dst, rank), dst.model
    there = geometry(src, 0)
    wanted = worker.transfer_topo.handshake_target_ranks(src.num_ranks)
    for src_rank in wanted:
        there = geometry(src, src_rank)
        meta = NixlAgentMetadata(
            engine_id="P",
            agent_metadata=b"",
            kv_caches_base_addr=there["bases"],
            device_id=0,
            num_blocks=there["num_blocks"],
            block_lens=there["block_lens"],
            block_strides=there["block_strides"],
            kv_cache_layout=there["order"],
            block_size=there["page_tokens"],
            ssm_sizes=decomposition(src).ssm_sizes,
            attn_backend_name="FLASH_ATTN",
            physical_blocks_per_logical_kv_block=there["ratio"],
            region_group_ids=[0] * len(there["bases"]),
        )
        worker._remote_agents["P"][0, src_rank] = worker.add_remote_agent(meta, src_rank, src.num_ranks)
    attention = isinstance(model.family, Attention)
    dst_ids = [list(dst.blocks), []] if attention else [[], list(dst.blocks)]
    src_ids = [list(src.blocks), []] if attention else [[], list(src.blocks)]
    request = SimpleNamespace(
        remote=SimpleNamespace(engine_id="P", block_ids=src_ids, request_id="r", num_tokens=model.num_tokens),
        local_block_ids=dst_ids,
        local_physical_block_ids=worker._logical_to_kernel_block_ids(
            dst_ids, worker._physical_blocks_per_logical_kv_block
        ),
        local_num_computed_blocks=[0, 0],
        awaiting_kvs=True,
    )

    def fail(**kwargs):
        raise kwargs["error"] or AssertionError(kwargs)

    worker._log_failure = fail
    worker._read_blocks_for_req("r", request)
    ranks = worker.tp_mappings["P"].all_source_ranks
    return [
        Ranges(src_rank, remote[:, 0], local[:, 0], local[:, 1])
        for src_rank, (local, remote) in zip(ranks, worker.nixl_wrapper.reads[: len(ranks)], strict=True)
    ]


def rearrange(arrived: np.ndarray, src: sweep.Engine, dst: sweep.Engine, rank: int) -> None:
    """The real worker's rearrangement of pages that were filled by shorter ones."""
    ratio = dst.storage.page_tokens // src.storage.page_tokens
    if isinstance(dst.model.family, Recurrent) or dst.model.latent or ratio == 1:
        return
    if dst.storage.order not in ("LBHNC", "BLHNC"):
        return
    layer, group = dst.ranks[rank].layers[0], dst.ranks[rank].groups[0]
    heads, tokens, _ = layer.shards[0].box.shape
    row = layer.shards[0].strides[1]
    shape = (group.num_blocks * group.pages_per_block, heads, tokens, row)
    strides = (layer.page_stride, tokens * row, row, 1)
    pages = torch.as_strided(torch.from_numpy(arrived), shape, strides, layer.offset)
    indices = [block * group.pages_per_block + i for block in dst.blocks for i in range(group.pages_per_block)]
    connector_utils.kv_postprocess_blksize_on_receive(pages, torch.tensor(indices), ratio)


@pytest.fixture(autouse=True)
def _channel_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector asserts this before anything that is modelled here."""
    path = "vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils.is_conv_state_dim_first"
    monkeypatch.setattr(path, lambda: True)


SMALL = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_the_model_copies_what_the_connector_copies(family: str) -> None:
    tried: dict[str, int] = defaultdict(int)
    for model, pairs in sweep.FAMILIES[family]:
        if isinstance(model.family, Recurrent) and model.state_type is None:
            continue
        for (src_storage, dst_storage), (src_tp, dst_tp) in itertools.product(pairs, itertools.product(SMALL, SMALL)):
            if isinstance(model.family, Recurrent) and not (src_storage.channel_first and dst_storage.channel_first):
                continue
            try:
                src, dst = sweep.build(model, src_storage, src_tp, 0), sweep.build(model, dst_storage, dst_tp, 1)
            except ValueError:
                continue
            for rank in range(dst_tp):
                try:
                    modelled = sweep.read_in_tree(src, dst, rank)
                except NotModelledError:
                    continue
                except RefusedError:
                    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
                        read_really(src, dst, rank)
                    tried["refused"] += 1
                    continue
                there, size = sweep.source(src, all_slots=True), dst.ranks[rank].region_bytes
                really = follow(read_really(src, dst, rank), there, size).identities
                rearrange(really, src, dst, rank)
                assert (really == follow(modelled, there, size).identities).all(), (src.storage, dst.storage, rank)
                tried["accepted"] += 1
        for remembered in (sweep.numbers, sweep.source, sweep._attention_side, sweep._state_side):
            remembered.cache_clear()
    assert tried or all(model.state_type is None for model, _ in sweep.FAMILIES[family])
