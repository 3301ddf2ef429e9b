"""What do people compare deployments by, and how is it shown: table, CSV, picture, page?

* total tokens/s per GPU: tokens of prompts and answers, by the time of the run and the deployment's GPUs.
* generated tokens/s per user: one by the median time per output token.
* a configuration's Pareto curve: its points that none of its own beats on both; the combined frontier: that none beats.
"""

import base64
import csv
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.tools.sweeping.cells import Cell, Parameters, Record
from hybrid_connector.tools.sweeping.clients import label
from hybrid_connector.tools.sweeping.frontier import frontier

_METRICS = ("ttft", "tpot")
_NUM_COLOURS = 10
_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Row:
    """A measured cell. ``on_own``, ``on_combined``: it is on its deployment's Pareto curve, on the one of all."""

    name: str
    gpus: int
    record: Record
    on_own: bool = False
    on_combined: bool = False

    @property
    def concurrency(self) -> int:
        return self.record.parameters.concurrency

    @property
    def total_per_gpu(self) -> float:
        """Tokens of prompts and answers, per second and GPU."""
        measured = self.record.measurement
        return (measured.input_tokens + measured.output_tokens) / measured.duration_s / self.gpus

    @property
    def output_per_gpu(self) -> float:
        """Tokens of answers, per second and GPU."""
        measured = self.record.measurement
        return measured.output_tokens / measured.duration_s / self.gpus

    @property
    def per_user(self) -> float:
        """Tokens that a user sees per second."""
        return 1000 / self.record.measurement.tpot_ms["p50"]

    @property
    def place(self) -> tuple[float, float]:
        """Where the point lies: per user, per GPU."""
        return self.per_user, self.total_per_gpu

    def as_document(self) -> dict[str, Any]:
        """Everything about it, flat, by the names of the CSV's columns."""
        asked, measured = self.record.parameters, self.record.measurement
        document: dict[str, Any] = {
            "deployment": self.name,
            "gpus": self.gpus,
            "concurrency": asked.concurrency,
            "total_tokens_per_s_per_gpu": self.total_per_gpu,
            "output_tokens_per_s_per_gpu": self.output_per_gpu,
            "output_tokens_per_s_per_user": self.per_user,
            "on_own_frontier": self.on_own,
            "on_combined_frontier": self.on_combined,
            "requests": measured.completed,
            "duration_s": measured.duration_s,
            "input_tokens": measured.input_tokens,
            "output_tokens": measured.output_tokens,
        }
        for metric, times in zip(_METRICS, (measured.ttft_ms, measured.tpot_ms), strict=True):
            document |= {f"{metric}_{name}_ms": value for name, value in times.items()}
        return document


def make_rows(cells: Mapping[Cell, Record]) -> list[Row]:
    """The measured cells with their places on the frontiers, in the order of the cells."""
    rows = [Row(cell.endpoint.name, cell.endpoint.gpus, record) for cell, record in cells.items()]
    combined = {id(row) for row in frontier(rows, lambda row: row.place)}
    own: set[int] = set()
    for name in {row.name for row in rows}:
        own |= {id(row) for row in frontier([row for row in rows if row.name == name], lambda row: row.place)}
    return [Row(row.name, row.gpus, row.record, id(row) in own, id(row) in combined) for row in rows]


def make_table(rows: Sequence[Row]) -> Table:
    """For people: a line per cell."""
    percentiles = rows[0].record.parameters.percentiles
    table = Table(title=describe(rows[0].record.parameters))
    table.add_column("deployment", overflow="fold")
    for heading in ("GPUs", "concur-\nrency", "total tok/s\nper GPU", "generated tok/s\nper user"):
        table.add_column(heading, justify="right")
    table.add_column("Pareto")
    for metric in _METRICS:
        for percentile in percentiles:
            table.add_column(f"{metric.upper()}\n{label(percentile)} ms", justify="right")
    for row in rows:
        measured = row.record.measurement
        times = (times[label(p)] for times in (measured.ttft_ms, measured.tpot_ms) for p in percentiles)
        table.add_row(
            row.name,
            str(row.gpus),
            str(row.concurrency),
            f"{row.total_per_gpu:,.1f}",
            f"{row.per_user:,.1f}",
            say_frontier(row),
            *(f"{time:,.1f}" for time in times),
        )
    return table


def describe(parameters: Parameters) -> str:
    """What was sent, in a line."""
    asked = parameters
    rounds = asked.num_prompts // asked.concurrency
    return (
        f"{asked.model}: prompts of {asked.input_len:,} random tokens, answers of {asked.output_len:,}; "
        f"{rounds} per user; {asked.client}"
    )


def say_frontier(row: Row) -> str:
    """Which curves a row is on."""
    if row.on_combined:
        return "combined"
    return "own" if row.on_own else ""


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """For programs: a line per cell, with headings."""
    documents = [row.as_document() for row in rows]
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, documents[0].keys())
        writer.writeheader()
        writer.writerows(documents)


def draw(rows: Sequence[Row]) -> bytes:
    """A PNG: throughput per GPU against speed per user, and the percentiles of both times by concurrency.

    Raises ``ConfigError`` without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"the picture needs matplotlib: pip install 'hybrid-connector[plot]' ({error})") from error

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1))
    colours = {name: f"C{number % _NUM_COLOURS}" for number, name in enumerate(dict.fromkeys(row.name for row in rows))}
    _draw_frontiers(figure.add_subplot(grid[:, 0]), rows, colours)
    percentiles = rows[0].record.parameters.percentiles
    for place, metric in enumerate(_METRICS):
        axes = figure.add_subplot(grid[place, 1])
        _draw_times(axes, rows, colours, metric, percentiles)
    figure.suptitle(describe(rows[0].record.parameters))
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _draw_frontiers(axes: Any, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    best = sorted(row.place for row in rows if row.on_combined)
    axes.plot(*zip(*best, strict=True), color="0.75", linewidth=7, solid_capstyle="round", label="combined frontier")
    for name, colour in colours.items():
        own = [row for row in rows if row.name == name]
        curve = sorted(row.place for row in own if row.on_own)
        axes.plot(*zip(*curve, strict=True), "o-", color=colour, label=f"{name}, GPUs: {own[0].gpus}")
        beaten = [row.place for row in own if not row.on_own]
        if beaten:
            axes.plot(*zip(*beaten, strict=True), "o", color=colour, fillstyle="none")
        for row in own:
            axes.annotate(str(row.concurrency), row.place, xytext=(6, 5), textcoords="offset points", color=colour)
    axes.set_xlabel("generated tokens/s per user (1 / median time per output token)")
    axes.set_ylabel("total tokens/s per GPU (prompts and answers)")
    axes.set_title("Pareto curves; numbers: concurrency, hollow: beaten by its own curve", fontsize="medium")
    axes.set_xlim(0, 1.1 * max(row.per_user for row in rows))
    axes.set_ylim(0, 1.1 * max(row.total_per_gpu for row in rows))
    axes.grid(visible=True, alpha=0.25)
    axes.legend()


def _draw_times(
    axes: Any, rows: Sequence[Row], colours: Mapping[str, str], metric: str, percentiles: Sequence[float]
) -> None:
    highest = 0.0
    for name, colour in colours.items():
        own = sorted((row for row in rows if row.name == name), key=lambda row: row.concurrency)
        for number, percentile in enumerate(percentiles):
            column = f"{metric}_{label(percentile)}_ms"
            times = [row.as_document()[column] for row in own]
            line = _LINES[number % len(_LINES)]
            users = [row.concurrency for row in own]
            axes.plot(users, times, f".{line}", color=colour)
            highest = max(highest, *times)
    users = sorted({row.concurrency for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(number) for number in users])
    axes.minorticks_off()
    axes.set_ylim(0, 1.3 * highest)
    axes.set_xlabel("concurrency")
    axes.set_ylabel(f"{metric.upper()}, ms")
    axes.grid(visible=True, alpha=0.25)
    for number, percentile in enumerate(percentiles):
        axes.plot([], [], _LINES[number % len(_LINES)], color="0.3", label=label(percentile))
    axes.legend(loc="upper left", fontsize="small", ncols=len(percentiles), handlelength=3)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222; }
img { width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
tr.combined { font-weight: bold; }
div { overflow-x: auto; }
"""


def make_page(rows: Sequence[Row], picture: bytes) -> str:
    """One HTML page that loads nothing: the picture, every figure, and how it was measured."""
    percentiles = rows[0].record.parameters.percentiles
    headings = ["deployment", "GPUs", "concurrency", "total tokens/s per GPU", "generated tokens/s per user", "Pareto"]
    headings += [f"{metric.upper()} {label(p)}, ms" for metric in _METRICS for p in percentiles]
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
    lines = "\n".join(_page_line(row) for row in rows)
    title = html.escape(describe(rows[0].record.parameters))
    runs = "\n".join(
        f"<li>{html.escape(row.name)}, concurrency {row.concurrency}: {row.record.measurement.completed} requests in "
        f"{row.record.measurement.duration_s:.1f} s, {row.record.measurement.input_tokens:,} + "
        f"{row.record.measurement.output_tokens:,} tokens</li>"
        for row in rows
    )
    data = base64.b64encode(picture).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Throughput and latency</h1>
<img alt="{title}: Pareto curves, times to first token and per output token" src="data:image/png;base64,{data}">
<div>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{lines}
</tbody>
</table>
</div>
<p>Total: tokens of prompts and answers, by the run's time and the deployment's GPUs. Per user: one by the median time
per output token (TPOT). Pareto: no other point of the same deployment (own), or of any (combined, bold), is as good on
both and better on one.</p>
<ul>
{runs}
</ul>
</body>
</html>
"""


def _page_line(row: Row) -> str:
    measured, percentiles = row.record.measurement, row.record.parameters.percentiles
    times = (f"{times[label(p)]:,.1f}" for times in (measured.ttft_ms, measured.tpot_ms) for p in percentiles)
    figures = (f"{row.total_per_gpu:,.1f}", f"{row.per_user:,.1f}", say_frontier(row) or "-")
    words = (row.name, str(row.gpus), str(row.concurrency), *figures, *times)
    kind = ' class="combined"' if row.on_combined else ""
    return f"<tr{kind}>" + "".join(f"<td>{html.escape(word)}</td>" for word in words) + "</tr>"
