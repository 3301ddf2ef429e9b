"""How many requests fit: blocks in a rank's cache over blocks of a request.

1. ``ModelShape`` is the model, ``Topology`` the ranks it is spread over, ``Serving`` the options it is served with.
2. ``shape_pool``: ``choose_block`` gives a block whose page of K/V holds a recurrent state, as both share one pool;
   layers form groups, a block is one page for each layer of a group, and every group of a request draws its own blocks.
3. ``fit`` divides the memory beside weights and activations by the bytes of a block, and that by a request's blocks.

The rules are vLLM 0.32's: ``_get_kv_cache_groups_uniform_page_size``, ``get_kv_cache_config_from_groups``,
``MambaSpec.max_memory_usage_bytes``. integration/test_size.py holds this module against those.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from hybrid_connector.core.families import Attention, Conv, ElementType, Recurrent, StatePage, split
from hybrid_connector.tools.models.blocks import BACKENDS, Backend, choose_block

_STATE_PAGE = StatePage(channel_first=True)  # the order of axes does not change their sizes


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below ``a / b``."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its cache: how many layers keep K/V, how many a state, and of which shapes.

    ``num_draft_layers``: attention layers of the model's own draft head (MTP), there only while speculating.
    """

    name: str
    num_attention_layers: int
    attention: Attention | None
    num_recurrent_layers: int = 0
    recurrent: Recurrent | None = None
    num_draft_layers: int = 0

    def __post_init__(self) -> None:
        for what, num_layers, layer in (
            ("attention", self.num_attention_layers, self.attention),
            ("recurrent", self.num_recurrent_layers, self.recurrent),
        ):
            if num_layers < 0 or (num_layers > 0) != (layer is not None):
                raise ValueError(f"{self.name}: expected {what} layers with a shape, got {num_layers} with {layer}")
        if not self.num_attention_layers and not self.num_recurrent_layers:
            raise ValueError(f"{self.name}: expected at least one layer")


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a model's weights: those outside the experts are shared out over TP ranks, the experts over all GPUs."""

    dense_bytes: int
    expert_bytes: int = 0

    def per_gpu(self, topology: "Topology") -> int:
        """Bytes on each GPU."""
        return ceil_div(self.dense_bytes, topology.tp) + ceil_div(self.expert_bytes, topology.num_gpus)


@dataclass(frozen=True, slots=True, order=True)
class Topology:
    """``tp`` ranks share a request, ``dp`` such groups serve requests of their own; experts lie on all of them."""

    tp: int
    dp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dp < 1:
            raise ValueError(f"topology {self}: expected sizes of at least 1")

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """``TP8``, ``TP4DP4`` or ``TP4DP4EP16``. Raises ``ValueError`` for anything else."""
        found = re.fullmatch(r"TP(\d+)(?:DP(\d+))?(?:EP(\d+))?", text.upper())
        if found is None:
            raise ValueError(f"topology {text!r}: expected something like TP8, TP4DP4 or TP4DP4EP16")
        topology = cls(int(found[1]), int(found[2] or 1))
        if found[3] is not None and int(found[3]) != topology.num_gpus:
            raise ValueError(
                f"topology {text!r}: vLLM spreads experts over TP x DP = {topology.num_gpus} ranks, got EP{found[3]}"
            )
        return topology

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"TP{self.tp}" if self.dp == 1 else f"TP{self.tp}DP{self.dp}"


@dataclass(frozen=True, slots=True)
class Serving:
    """Options of ``vllm serve`` that decide the size of a request. ``None``: the default of vLLM or of the model."""

    block_size: int | None = None
    backend: Backend = BACKENDS["FLASH_ATTN"]
    spec_tokens: int = 0
    prefix_caching: bool = True
    temporal_element: ElementType | None = None
    kv_element: ElementType | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and not self.backend.can_split(self.block_size):
            raise ValueError(
                f"block size: expected a multiple of {self.backend.name}'s {self.backend.smallest} tokens, "
                f"got {self.block_size}"
            )
        if self.spec_tokens < 0:
            raise ValueError(f"speculative tokens: expected at least 0, got {self.spec_tokens}")

    @property
    def states_per_request(self) -> int:
        """Blocks a request holds in a recurrent group: its state, a slot per speculated token, and with prefix caching
        the state at the last block boundary.
        """
        return 1 + self.spec_tokens + int(self.prefix_caching)


@dataclass(frozen=True, slots=True)
class Pool:
    """How one rank's cache is cut up. ``token_bytes``: K/V of a token in a layer; ``state_bytes``: a layer's state."""

    token_bytes: int
    state_bytes: int
    block_tokens: int
    page_bytes: int
    layers_per_block: int
    num_attention_groups: int
    num_recurrent_groups: int
    states_per_request: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: one page for each layer of the largest group."""
        return self.layers_per_block * self.page_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks of a request's states, whatever its length."""
        return self.num_recurrent_groups * self.states_per_request

    def kv_blocks(self, num_tokens: int) -> int:
        """Blocks of a request's K/V."""
        return self.num_attention_groups * ceil_div(num_tokens, self.block_tokens)

    def request_blocks(self, num_tokens: int) -> int:
        return self.state_blocks + self.kv_blocks(num_tokens)

    @property
    def crossover_tokens(self) -> int | None:
        """The longest request whose K/V takes no more blocks than its states; ``None`` without K/V."""
        if not self.num_attention_groups:
            return None
        return self.block_tokens * (self.state_blocks // self.num_attention_groups)


def group_layers(num_layers: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Number of groups for each kind of layer, and the layers of the largest group.

    Groups have as many layers as the rarest kind; as the commonest, where that has less than 1.5 times as many.
    """
    present = [n for n in num_layers if n]
    size = max(present) if max(present) < 1.5 * min(present) else min(present)
    num_groups = tuple(ceil_div(n, size) for n in num_layers)
    return num_groups, max(ceil_div(n, groups) for n, groups in zip(num_layers, num_groups, strict=True) if n)


def state_shape(recurrent: Recurrent, serving: Serving) -> Recurrent:
    """The state as served: a tap more for each speculated token, temporal states of the element type asked for."""
    return Recurrent(
        tuple(
            replace(part, num_taps=part.num_taps + serving.spec_tokens)
            if isinstance(part, Conv)
            else replace(part, element=serving.temporal_element or part.element)
            for part in recurrent.parts
        )
    )


def kv_token_bytes(attention: Attention, serving: Serving, tp: int) -> int:
    """Bytes of a token in one layer on one rank. Raises ``ValueError`` where the heads cannot be shared out."""
    num_heads = len(split(attention.num_kv_heads, 0, tp, "KV heads"))
    return num_heads * attention.content * (serving.kv_element or attention.element).num_bytes


def state_bytes(recurrent: Recurrent, serving: Serving, tp: int) -> int:
    """Bytes of one layer's state on one rank. Raises ``ValueError`` where it cannot be shared out."""
    served = state_shape(recurrent, serving)
    shapes = served.shapes(_STATE_PAGE, rank=0, num_ranks=tp)
    return sum(prod(shape) * part.element.num_bytes for part, shape in zip(served.parts, shapes, strict=True))


def shape_pool(model: ModelShape, serving: Serving, tp: int) -> Pool:
    """How each of ``tp`` ranks cuts up its cache. Raises ``ValueError`` where they cannot share out the model."""
    num_attention = model.num_attention_layers + (model.num_draft_layers if serving.spec_tokens else 0)
    token = 0 if model.attention is None else kv_token_bytes(model.attention, serving, tp)
    state = 0 if model.recurrent is None else state_bytes(model.recurrent, serving, tp)
    num_tokens = choose_block(serving.backend, serving.block_size, token_bytes=max(token, 1), state_bytes=state)
    (attention_groups, recurrent_groups), layers_per_block = group_layers((num_attention, model.num_recurrent_layers))
    return Pool(
        token_bytes=token,
        state_bytes=state,
        block_tokens=num_tokens,
        page_bytes=num_tokens * token or state,
        layers_per_block=layers_per_block,
        num_attention_groups=attention_groups,
        num_recurrent_groups=recurrent_groups,
        states_per_request=serving.states_per_request,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a GPU that the engine may use, and the peak of its activations; ``measured`` names topologies whose
    peak is known.
    """

    usable_bytes: int
    activation_bytes: int
    measured: Mapping[Topology, int]

    def activations(self, topology: Topology) -> int:
        return self.measured.get(topology, self.activation_bytes)


@dataclass(frozen=True, slots=True)
class Fit:
    """One topology: what lies on each GPU, and how its cache is cut up."""

    topology: Topology
    pool: Pool
    weights_bytes: int
    activation_bytes: int
    cache_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks of a rank. The null block is among them."""
        return max(0, self.cache_bytes) // self.pool.block_bytes

    def requests_per_rank(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` that fit side by side into the ranks of one DP rank."""
        return max(0, self.num_blocks - 1) // self.pool.request_blocks(num_tokens)

    def requests(self, num_tokens: int) -> int:
        """Requests that fit side by side into one engine."""
        return self.topology.dp * self.requests_per_rank(num_tokens)


def fit(model: ModelShape, weights: Weights, topology: Topology, serving: Serving, memory: Memory) -> Fit:
    """What fits beside weights and activations. Raises ``ValueError`` where the model cannot be shared out."""
    try:
        pool = shape_pool(model, serving, topology.tp)
    except ValueError as error:
        raise ValueError(f"{topology}: {error}") from error
    weights_bytes, activation_bytes = weights.per_gpu(topology), memory.activations(topology)
    return Fit(topology, pool, weights_bytes, activation_bytes, memory.usable_bytes - weights_bytes - activation_bytes)
