"""Which topology serves most requests, and what would another option of ``vllm serve`` change?

1. ``Setup`` is the question: a model, GPUs, options, and a request's length.
2. ``compare`` answers it for each topology, best first.
3. ``switches`` are the same setup with one option changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybrid_connector.core.families import ElementType, Temporal
from hybrid_connector.tools.sizing.capacity import Fit, Memory, ModelShape, Serving, Topology, Weights, fit, shape_pool

LARGE_BLOCK_TOKENS = 4096
"""A ``--block-size`` above what the models here need."""

USUAL_SPEC_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Setup:
    """``num_gpus`` take as many engines of a topology as fit. A request is ``isl`` tokens in and ``osl`` out."""

    model: ModelShape
    weights: Weights
    memory: Memory
    serving: Serving
    topologies: tuple[Topology, ...]
    num_gpus: int
    isl: int
    osl: int

    def __post_init__(self) -> None:
        if self.isl < 1 or self.osl < 0:
            raise ValueError(f"request: expected at least one token in and none out, got {self.isl} and {self.osl}")
        for topology in self.topologies:
            if topology.num_gpus > self.num_gpus:
                raise ValueError(f"{topology} needs {topology.num_gpus} GPUs, there are {self.num_gpus}")

    @property
    def num_tokens(self) -> int:
        """Tokens of a request when it ends."""
        return self.isl + self.osl


@dataclass(frozen=True, slots=True)
class Row:
    """A topology on all GPUs of a setup."""

    fit: Fit
    num_engines: int

    def requests(self, num_tokens: int) -> int:
        """Requests that fit side by side into all engines."""
        return self.num_engines * self.fit.requests(num_tokens)


def compare(setup: Setup) -> tuple[Row, ...]:
    """Each topology, the one with most requests first. Raises ``ValueError`` where one cannot share out the model."""
    rows = [
        Row(
            fit(setup.model, setup.weights, topology, setup.serving, setup.memory),
            setup.num_gpus // topology.num_gpus,
        )
        for topology in setup.topologies
    ]
    return tuple(sorted(rows, key=lambda row: row.requests(setup.num_tokens), reverse=True))


def usual_topologies(
    model: ModelShape, serving: Serving, num_gpus: int, measured: Sequence[Topology]
) -> tuple[Topology, ...]:
    """TP times DP over all GPUs, TP a power of two, and those measured; where the ranks can share out the model."""
    powers = [2**i for i in range(num_gpus.bit_length())]
    found = {Topology(tp, num_gpus // tp) for tp in powers if num_gpus % tp == 0}
    found |= {topology for topology in measured if topology.num_gpus <= num_gpus}
    return tuple(topology for topology in sorted(found) if _can_share_out(model, serving, topology))


def _can_share_out(model: ModelShape, serving: Serving, topology: Topology) -> bool:
    try:
        shape_pool(model, serving, topology.tp)
    except ValueError:
        return False
    return True


def switches(setup: Setup) -> Mapping[str, Setup]:
    """The setup with one option changed, by the option."""
    serving = setup.serving
    changed: dict[str, Serving] = {}
    if setup.model.recurrent is not None:
        if _temporal_name(setup) != "bfloat16":
            to = replace(serving, temporal_element=ElementType("bfloat16", 2))
            changed["--mamba-ssm-cache-dtype bfloat16"] = to
        else:
            to = replace(serving, temporal_element=ElementType("float32", 4))
            changed["--mamba-ssm-cache-dtype float32"] = to
    if setup.model.attention is not None:
        if (serving.kv_element or setup.model.attention.element).num_bytes > 1:
            changed["--kv-cache-dtype fp8"] = replace(serving, kv_element=ElementType("fp8", 1))
        if serving.block_size != LARGE_BLOCK_TOKENS and serving.backend.can_split(LARGE_BLOCK_TOKENS):
            changed[f"--block-size {LARGE_BLOCK_TOKENS}"] = replace(serving, block_size=LARGE_BLOCK_TOKENS)
    if serving.spec_tokens:
        changed["--spec-tokens 0"] = replace(serving, spec_tokens=0)
    else:
        changed[f"--spec-tokens {USUAL_SPEC_TOKENS}"] = replace(serving, spec_tokens=USUAL_SPEC_TOKENS)
    other = "--no-prefix-caching" if serving.prefix_caching else "--prefix-caching"
    changed[other] = replace(serving, prefix_caching=not serving.prefix_caching)
    return {option: replace(setup, serving=to) for option, to in changed.items()}


def _temporal_name(setup: Setup) -> str | None:
    if setup.serving.temporal_element is not None:
        return setup.serving.temporal_element.name
    parts = setup.model.recurrent.parts if setup.model.recurrent is not None else ()
    return next((part.element.name for part in parts if isinstance(part, Temporal)), None)
