"""How many requests fit? Compares topologies by the blocks that vLLM's cache has and a request needs.

Nothing runs: the answer follows from the model's layers, its weights, a GPU's memory and vLLM's own rules. docs/size.md
has the formulas and what they leave out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from hybrid_connector.tools.models.blocks import BACKENDS
from hybrid_connector.tools.sizing import models, report
from hybrid_connector.tools.sizing.capacity import (
    Memory,
    ModelShape,
    Serving,
    Topology,
    Weights,
)
from hybrid_connector.tools.sizing.comparison import Setup, compare, switches, usual_topologies
from hybrid_connector.tools.sizing.models import GIB, Preset

DEFAULT_PRESET = models.preset_names()[0]
DEFAULT_GPUS = 8
GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default: 8 % stay free."""

ASSUMED_ACTIVATION_GIB = 2.24
"""The largest peak published for the preset; taken for every topology without a peak of its own."""

ATTENTION_BACKENDS = tuple(b.name for b in BACKENDS.values() if b.device == "cuda" and not b.is_latent)

EXAMPLES = """examples:
  hybrid-connector size
  hybrid-connector size --topology TP8 --topology TP4DP4 --isl 32768 --osl 2048 --plot concurrency.png
  hybrid-connector size --config MODEL_DIR --gpu h200 --gpus 8 --spec-tokens 0 --json
"""


def add_parser(subcommands: Any) -> None:
    """Add ``size`` to the command line."""
    parser = subcommands.add_parser(
        "size",
        help="how many requests fit, by topology, from a config and hardware numbers",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model").add_mutually_exclusive_group()
    model.add_argument(
        "--preset", choices=models.preset_names(), help=f"a model known here (default: {DEFAULT_PRESET})"
    )
    model.add_argument("--config", type=Path, metavar="PATH", help="a config.json or its directory")
    weights = parser.add_argument_group("weights", "default: the preset's, or the *.safetensors beside the config")
    weights.add_argument("--weights-gib", type=_size, metavar="GIB", help="outside the experts")
    weights.add_argument("--expert-gib", type=_size, metavar="GIB", help="of all experts")

    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--gpu", choices=models.gpu_names(), help="default: the preset's")
    hardware.add_argument(
        "--gpus", type=_positive, metavar="N", help="number of GPUs, in all (default: the preset's, 8)"
    )
    hardware.add_argument(
        "--gpu-memory-utilization",
        type=_share,
        default=GPU_MEMORY_UTILIZATION,
        metavar="SHARE",
        help=f"as vllm serve has it ({GPU_MEMORY_UTILIZATION})",
    )
    hardware.add_argument("--memory-gib", type=_size, metavar="GIB", help="usable per GPU, instead of the two above")
    hardware.add_argument(
        "--activation-gib",
        type=_activation,
        action="append",
        default=[],
        metavar="[TOPOLOGY=]GIB",
        help=f"peak of activations per GPU (default: the preset's, else {ASSUMED_ACTIVATION_GIB}); may be repeated",
    )
    hardware.add_argument(
        "--topology",
        type=_topology,
        action="append",
        metavar="TPxDPy",
        help="TP8, TP4DP4, ...; may be repeated (default: TP times DP over all GPUs)",
    )

    request = parser.add_argument_group("requests and vLLM's options")
    request.add_argument("--isl", type=_positive, default=8192, metavar="N", help="tokens of a prompt (8192)")
    request.add_argument("--osl", type=_positive, default=1024, metavar="N", help="tokens of an answer (1024)")
    request.add_argument("--mamba-ssm-cache-dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    request.add_argument(
        "--kv-cache-dtype", choices=("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"), default="auto"
    )
    request.add_argument("--block-size", type=_positive, metavar="N", help="tokens asked for (the backend's 16)")
    request.add_argument(
        "--attention-backend", choices=ATTENTION_BACKENDS, default="FLASH_ATTN", help="decides the lengths of blocks"
    )
    request.add_argument(
        "--spec-tokens", type=_natural, metavar="N", help="tokens speculated per step, as with MTP (the preset's, or 0)"
    )
    request.add_argument(
        "--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="on, as vLLM has it for hybrids"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything as JSON, in bytes and tokens")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw requests against context length")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text}")
    return int(text)


def _size(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a size in GiB, got {text}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number, got {text}") from error


def _topology(text: str) -> Topology:
    try:
        return Topology.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _activation(text: str) -> tuple[Topology | None, float]:
    topology, _, size = text.rpartition("=")
    return (_topology(topology) if topology else None), _size(size)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; returns the exit status."""
    setup = read_setup(args)
    rows, changed = compare(setup), switches(setup)
    if args.plot is not None:
        report.draw(setup, rows, args.plot)
    if args.json:
        print(json.dumps(report.as_json(setup, rows, changed), indent=2))
        return 0
    console = Console()
    # What the user sees must not depend on the terminal being as wide as ours.
    if not console.is_terminal:
        console = Console(width=140)
    for line in report.describe(setup):
        console.print(line, highlight=False)
    console.print(report.topology_table(setup, rows))
    if any(row.fit.topology not in setup.memory.measured for row in rows):
        console.print("~ assumed, not measured: see --activation-gib", highlight=False)
    console.print(report.switch_table(setup, rows, changed))
    if args.plot is not None:
        console.print(f"Plot: {args.plot}", soft_wrap=True, highlight=False)
    return 0


def read_setup(args: argparse.Namespace) -> Setup:
    """What the options ask for. Raises ``ValueError`` where they say too little or what is wrong."""
    preset = models.read_preset(args.preset or DEFAULT_PRESET) if args.config is None else None
    model = models.read_config_file(args.config) if preset is None else preset.model
    serving = _read_serving(args, preset)
    measured = dict(preset.activations) if preset is not None else {}
    assumed = max(measured.values(), default=int(ASSUMED_ACTIVATION_GIB * GIB))
    for topology, gib in args.activation_gib:
        if topology is None:
            assumed, measured = int(gib * GIB), {}
    measured |= {topology: int(gib * GIB) for topology, gib in args.activation_gib if topology is not None}
    num_gpus, topologies = _read_topologies(args, preset, model, serving, tuple(measured))
    return Setup(
        model=model,
        weights=_read_weights(args, preset),
        memory=Memory(_usable_bytes(args, preset), assumed, measured),
        serving=serving,
        topologies=topologies,
        num_gpus=num_gpus,
        isl=args.isl,
        osl=args.osl,
    )


def _read_serving(args: argparse.Namespace, preset: Preset | None) -> Serving:
    spec_tokens = args.spec_tokens
    if spec_tokens is None:
        spec_tokens = 0 if preset is None else preset.spec_tokens
    temporal, kv = args.mamba_ssm_cache_dtype, args.kv_cache_dtype
    return Serving(
        block_size=args.block_size,
        backend=BACKENDS[args.attention_backend],
        spec_tokens=spec_tokens,
        prefix_caching=args.prefix_caching,
        temporal_element=None if temporal == "auto" else models.element_type(temporal),
        kv_element=None if kv == "auto" else models.element_type(kv),
    )


def _read_weights(args: argparse.Namespace, preset: Preset | None) -> Weights:
    known = preset.weights if preset is not None else None
    if args.weights_gib is not None:
        experts = 0.0 if args.expert_gib is None else args.expert_gib
        return Weights(int(args.weights_gib * GIB), int(experts * GIB))
    if known is None:
        directory = args.config if args.config.is_dir() else args.config.parent
        known = models.read_weights(directory)
    if known is None:
        raise ValueError(
            f"{args.config}: no *.safetensors beside it: expected --weights-gib, and --expert-gib if it has any"
        )
    if args.expert_gib is not None:
        return Weights(known.dense_bytes, int(args.expert_gib * GIB))
    return known


def _usable_bytes(args: argparse.Namespace, preset: Preset | None) -> int:
    if args.memory_gib is not None:
        return int(args.memory_gib * GIB)
    gpu = args.gpu or (preset.gpu if preset is not None else None)
    if gpu is None:
        raise ValueError(f"--config: expected --gpu ({', '.join(models.gpu_names())}) or --memory-gib")
    return int(models.gpu_bytes(gpu) * args.gpu_memory_utilization)


def _read_topologies(
    args: argparse.Namespace, preset: Preset | None, model: ModelShape, serving: Serving, measured: tuple[Topology, ...]
) -> tuple[int, tuple[Topology, ...]]:
    """Number of GPUs, and the topologies to compare on them."""
    asked: tuple[Topology, ...] = tuple(dict.fromkeys(args.topology or ()))
    num_gpus: int = args.gpus or max(
        DEFAULT_GPUS if preset is None else preset.num_gpus, *(topology.num_gpus for topology in asked), 0
    )
    topologies = asked or usual_topologies(model, serving, num_gpus, measured)
    if not topologies:
        raise ValueError(f"{model.name}: cannot be shared out over {num_gpus} GPUs; expected --topology")
    return num_gpus, topologies
