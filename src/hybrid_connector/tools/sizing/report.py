"""How does a person read the comparison, and how a script?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hybrid_connector.tools.sizing.capacity import Fit, kv_token_bytes, state_bytes
from hybrid_connector.tools.sizing.comparison import Row, Setup, compare
from hybrid_connector.tools.sizing.models import GIB

KIB, MIB = 2**10, 2**20

_TICK_TOKENS = tuple(2**i for i in range(10, 21))
_STEPS_PER_TICK = 32
_PLOT_TOKENS = tuple(round(2 ** (10 + i / _STEPS_PER_TICK)) for i in range(10 * _STEPS_PER_TICK + 1))


def describe(setup: Setup) -> list[str]:
    """The setup in lines of text: one layer on one rank, the GPU, and the options."""
    model, serving = setup.model, setup.serving
    lines = []
    if model.attention is not None:
        token = kv_token_bytes(model.attention, serving, 1)
        drafts = f" and {model.num_draft_layers} of the draft head" if serving.spec_tokens else ""
        lines.append(f"{model.num_attention_layers} attention layers{drafts}: {token / KIB:g} KiB per token and layer")
    if model.recurrent is not None:
        state = state_bytes(model.recurrent, serving, 1)
        lines.append(
            f"{model.num_recurrent_layers} recurrent layers: a state of {state:,} bytes ({state / MIB:.3f} MiB)"
        )
    weights, usable = setup.weights, setup.memory.usable_bytes / GIB
    lines.append(
        f"Weights: {weights.dense_bytes / GIB:,.2f} GiB outside the experts, {weights.expert_bytes / GIB:,.2f} GiB in "
        f"them; usable per GPU: {usable:.2f} GiB"
    )
    lines.append(
        f"Speculative tokens: {serving.spec_tokens}; prefix caching: {'on' if serving.prefix_caching else 'off'}; "
        f"block size asked for: {serving.block_size or serving.backend.default_tokens} ({serving.backend.name})"
    )
    return lines


def topology_table(setup: Setup, rows: Sequence[Row]) -> Table:
    """One line per topology."""
    table = Table(
        title=f"{setup.model.name}: requests of {setup.isl:,} + {setup.osl:,} tokens on {setup.num_gpus} GPUs"
    )
    table.add_column("topology", no_wrap=True)
    for name in (
        "weights\nGiB/GPU",
        "activa-\ntions",
        "cache\nGiB/GPU",
        "block\ntokens",
        "page\nMiB",
        "blocks\nper rank",
        "state +\nK/V blocks",
        "larger\npart",
        "beyond it\nK/V larger",
        "requests\nper rank",
        "engines",
        "requests\nin all",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        found, pool = row.fit, row.fit.pool
        assumed = "" if found.topology in setup.memory.measured else "~"
        table.add_row(
            f"{found.topology}EP{found.topology.num_gpus}",
            f"{found.weights_bytes / GIB:.1f}",
            f"{assumed}{found.activation_bytes / GIB:.2f}",
            f"{found.cache_bytes / GIB:.1f}" if found.cache_bytes > 0 else f"[red]{found.cache_bytes / GIB:.1f}[/red]",
            f"{pool.block_tokens:,}",
            f"{pool.page_bytes / MIB:.3f}",
            f"{found.num_blocks:,}",
            f"{pool.state_blocks} + {pool.kv_blocks(setup.num_tokens)}",
            larger_part(found, setup.num_tokens),
            _say_crossover(found),
            f"{found.requests_per_rank(setup.num_tokens):,}",
            str(row.num_engines),
            f"[bold]{row.requests(setup.num_tokens):,}[/bold]",
        )
    return table


def larger_part(found: Fit, num_tokens: int) -> str:
    """What of a request's blocks holds more."""
    state, kv = found.pool.state_blocks, found.pool.kv_blocks(num_tokens)
    if state == kv:
        return "even"
    return "state" if state > kv else "K/V"


def _say_crossover(found: Fit) -> str:
    crossover = found.pool.crossover_tokens
    return "never" if crossover is None else f"{crossover:,}"


def switch_table(setup: Setup, rows: Sequence[Row], changed: Mapping[str, Setup]) -> Table:
    """One line per option: what it changes for the best topology, and the requests of all."""
    best = rows[0].fit.topology
    table = Table(title=f"What one option changes: blocks with {best}, and requests in all with each topology")
    table.add_column("option", no_wrap=True)
    for name in ("block\ntokens", "state +\nK/V blocks"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_column(str(row.fit.topology), justify="right")
    for option, other in {"as above": setup, **changed}.items():
        found = {row.fit.topology: row for row in compare(other)}
        pool = found[best].fit.pool
        table.add_row(
            option,
            f"{pool.block_tokens:,}",
            f"{pool.state_blocks} + {pool.kv_blocks(setup.num_tokens)}",
            *(
                _say_change(found[row.fit.topology].requests(setup.num_tokens), row.requests(setup.num_tokens))
                for row in rows
            ),
        )
    return table


def _say_change(requests: int, before: int) -> str:
    if requests == before or not before:
        return f"{requests:,}"
    return f"{requests:,} {requests / before - 1:+.0%}"


def as_json(setup: Setup, rows: Sequence[Row], changed: Mapping[str, Setup]) -> dict[str, Any]:
    """Everything in the tables, in bytes and tokens."""
    return {
        "model": setup.model.name,
        "isl": setup.isl,
        "osl": setup.osl,
        "num_gpus": setup.num_gpus,
        "usable_bytes_per_gpu": setup.memory.usable_bytes,
        "spec_tokens": setup.serving.spec_tokens,
        "prefix_caching": setup.serving.prefix_caching,
        "topologies": [_row_json(setup, row) for row in rows],
        "options": {option: [_row_json(other, row) for row in compare(other)] for option, other in changed.items()},
    }


def _row_json(setup: Setup, row: Row) -> dict[str, Any]:
    found, pool = row.fit, row.fit.pool
    return {
        "topology": str(found.topology),
        "tp": found.topology.tp,
        "dp": found.topology.dp,
        "ep": found.topology.num_gpus,
        "num_engines": row.num_engines,
        "weights_bytes_per_gpu": found.weights_bytes,
        "activation_bytes_per_gpu": found.activation_bytes,
        "activation_measured": found.topology in setup.memory.measured,
        "cache_bytes_per_gpu": found.cache_bytes,
        "kv_bytes_per_token_and_layer": pool.token_bytes,
        "state_bytes_per_layer": pool.state_bytes,
        "block_tokens": pool.block_tokens,
        "page_bytes": pool.page_bytes,
        "block_bytes": pool.block_bytes,
        "num_blocks_per_rank": found.num_blocks,
        "state_blocks_per_request": pool.state_blocks,
        "kv_blocks_per_request": pool.kv_blocks(setup.num_tokens),
        "larger_part": larger_part(found, setup.num_tokens),
        "crossover_tokens": pool.crossover_tokens,
        "requests_per_dp_rank": found.requests_per_rank(setup.num_tokens),
        "requests": row.requests(setup.num_tokens),
    }


def draw(setup: Setup, rows: Sequence[Row], file: Path) -> None:
    """Requests against context length, a line per topology; a dot where K/V takes over from the states.

    Raises ``ValueError`` without matplotlib, or for a file type that it cannot write.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib: pip install 'hybrid-connector[plot]' ({error})") from error

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows:
        requests = [row.requests(n) for n in _PLOT_TOKENS]
        fitting = [(n, r) for n, r in zip(_PLOT_TOKENS, requests, strict=True) if r]
        if not fitting:
            continue
        (line,) = axes.plot(*zip(*fitting, strict=True), label=str(row.fit.topology))
        crossover = row.fit.pool.crossover_tokens
        if crossover is not None and row.requests(crossover):
            axes.plot(crossover, row.requests(crossover), "o", color=line.get_color())
    axes.axvline(setup.num_tokens, color="grey", linestyle=":", label=f"{setup.isl:,} + {setup.osl:,} tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(_TICK_TOKENS, [f"{n // KIB}k" if n < MIB else f"{n // MIB}M" for n in _TICK_TOKENS])
    axes.set_xlabel("tokens of a request, prompt and answer")
    axes.set_ylabel(f"requests at a time on {setup.num_gpus} GPUs")
    axes.set_title(f"{setup.model.name} (dot: beyond it K/V takes more than the states)")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(file, dpi=150)
