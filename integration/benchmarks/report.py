"""What do the lines of JSON of ``transfer.py``, ``bind.py``, ``gpu/compare.py`` say? Tables in Markdown, and pictures.

    python integration/benchmarks/report.py transfer.jsonl bind.jsonl engines.jsonl --pictures build/report

Tables go to stdout. Of transfers: medians in milliseconds, and of ours how many times as fast as in-tree style; a
picture per model. Of binding: milliseconds per request by tokens; one picture. Of engines: medians over all rounds of a
cell, ours beside the in-tree connector's; one picture.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WAYS = {"in_tree": "in-tree style", "direct": "direct", "staged": "staged", "auto": "auto", "plain": "plain copy"}
COLOURS = ("#9a9a9a", "#3b6ea8", "#d08a2e", "#4a8f5a", "#d8d8d8")
STEPS = {"bind_ms": "bind", "choose_ms": "choose", "cut_ms": "cut into chunks", "rows_ms": "rows of the scatter"}

Lines = Sequence[dict[str, Any]]


def transfer_table(lines: Lines) -> str:
    ways = [way for way in WAYS if way in lines[0]["ways"]]
    head = ["model", "TP", "tokens", "fragmented", "MB", *(WAYS[way] for way in ways)]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        base = line["ways"]["in_tree"]["s"]
        cells = []
        for way in ways:
            seconds = line["ways"][way]["s"]
            ratio = f" (x{base / seconds:.2f})" if way != "in_tree" else ""
            cells.append(f"{seconds * 1e3:.2f}{ratio}")
        where = [line["model"], line["tp"], f"{line['tokens']:,}", f"{line['fragmented']} %"]
        rows.append([*where, f"{line['bytes'] / 1e6:.1f}", *cells])
    return _table(rows)


def bind_table(lines: Lines) -> str:
    head = ["TP", "layers", "tokens", "fragmented", "runs", *(f"{name}, ms" for name in STEPS.values()), "staged parts"]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        where = [line["tp"], str(line["layers"]), f"{line['tokens']:,}", f"{line['fragmented']} %", f"{line['runs']:,}"]
        rows.append([*where, *(f"{line[step]:.2f}" for step in STEPS), f"{line['picks_staged']} of {line['parts']}"])
    return _table(rows)


def handshake_table(lines: Lines) -> str:
    names = [name for name in lines[0] if name != "kind"]
    rows = [[name.replace("_", " ") for name in names], ["---"] * len(names)]
    return _table(rows + [[f"{line[name]:,}" for name in names] for line in lines])


TIMES = {"transfer": "transfer", "ttft": "first token", "decode_first": "of it on D"}
ENGINES = ("in-tree", "ours", "ours+verify")


def pooled(lines: Lines) -> list[dict[str, Any]]:
    """A line per connector, layout and cell: medians in ms of all rounds' requests."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        key = line["prompt"], line["concurrency"], line["layout"], ENGINES.index(line["name"])
        cells.setdefault(key, []).append(line)
    found = []
    for _, some in sorted(cells.items()):
        line = {key: some[0][key] for key in ("prompt", "concurrency", "layout", "name")}
        for time in TIMES:
            line[time] = statistics.median(second for each in some for second in each[f"all_{time}_s"]) * 1e3
        for key in ("descriptors", "bytes", "requests_per_s"):
            line[key] = statistics.median(each[key] for each in some)
        line["requests"] = sum(each["num_requests"] for each in some)
        found.append(line)
    return found


def beside_in_tree(lines: Lines) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each pooled line and the in-tree connector's of the same cell, in the layout where that moved it faster."""
    lines = pooled(lines)
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        cell = line["prompt"], line["concurrency"]
        if line["name"] == "in-tree" and (cell not in best or line["transfer"] < best[cell]["transfer"]):
            best[cell] = line
    return [(line, best.get((line["prompt"], line["concurrency"]))) for line in lines]


def engine_table(lines: Lines) -> str:
    head = ["prompt", "at a time", "connector", "layout", "requests", "MB", "descriptors"]
    head += [*(f"{name}, ms" for name in TIMES.values()), "requests/s"]
    rows = [head, ["---"] * len(head)]
    for line, other in beside_in_tree(lines):
        times = []
        for time in TIMES:
            ratio = f" (x{other[time] / line[time]:.2f})" if other is not None and line["name"] != "in-tree" else ""
            times.append(f"{line[time]:.2f}{ratio}")
        where = [f"{line['prompt']:,}", str(line["concurrency"]), line["name"], line["layout"], str(line["requests"])]
        what = [f"{line['bytes'] / 1e6:.1f}", f"{line['descriptors']:g}"]
        rows.append([*where, *what, *times, f"{line['requests_per_s']:.1f}"])
    return _table(rows)


def start_table(lines: Lines) -> str:
    """What D does once: at its own start, and for the first handshake."""
    rows = [["connector", "layout", "blocks", "prepare, ms", "handshake, ms"], ["---"] * 5]
    for line in lines:
        times = [f"{line[key] * 1e3:.1f}" for key in ("prepare_s", "handshake_s")]
        rows.append([line["name"], line["layout"], f"{line['producer']['about']['num_blocks']:,}", *times])
    return _table(rows)


def draw_engines(lines: Lines, path: Path) -> None:
    """Transfer and first token of each cell, ours as a share of the in-tree connector's time."""
    shown = [(line, other) for line, other in beside_in_tree(lines) if other is not None and line["name"] == "ours"]
    figure = Figure(figsize=(1.2 + 0.9 * len(shown), 3.4), layout="constrained")
    panel = figure.subplots()
    for i, (time, name) in enumerate(TIMES.items()):
        height = [100 * line[time] / other[time] for line, other in shown]
        panel.bar([case + (i - 1) * 0.26 for case in range(len(shown))], height, 0.25, color=COLOURS[1 + i], label=name)
    panel.axhline(100, color="black", linewidth=0.8)
    labels = [f"{line['prompt']:,}\nx {line['concurrency']}\n{line['layout']}" for line, _ in shown]
    panel.set_xticks(range(len(shown)), labels, fontsize=7)
    panel.set_ylabel("% of the in-tree connector's time", fontsize=8)
    panel.tick_params(axis="y", labelsize=7)
    panel.grid(axis="y", linewidth=0.4, alpha=0.6)
    panel.set_axisbelow(True)
    handles, names = panel.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(TIMES), fontsize=8, frameon=False)
    figure.suptitle("Whole engines: prompt tokens x requests at a time", fontsize=10)
    FigureCanvasAgg(figure).print_png(str(path))


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw_transfers(model: str, lines: Lines, path: Path) -> None:
    """A panel per pair of TP sizes: bars for each way, by tokens and fragmentation."""
    pairs = list(dict.fromkeys(line["tp"] for line in lines))
    figure = Figure(figsize=(4.2 * min(2, len(pairs)), 3.2 * -(-len(pairs) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(pairs) // 2), min(2, len(pairs)), squeeze=False).ravel()
    for panel, tp in zip(panels, pairs, strict=False):
        cases = [line for line in lines if line["tp"] == tp]
        for i, (way, name) in enumerate(WAYS.items()):
            at = [case + (i - 2) * 0.17 for case in range(len(cases))]
            height = [case["ways"][way]["s"] * 1e3 for case in cases]
            panel.bar(at, height, 0.16, color=COLOURS[i], label=name)
        labels = [f"{case['tokens'] // 1024}k\n{case['fragmented']} %" for case in cases]
        panel.set_xticks(range(len(cases)), labels, fontsize=7)
        panel.set_title(f"P TP {tp.partition('-')[0]} to D TP {tp.partition('-')[2]}", fontsize=9)
        panel.set_ylabel("ms", fontsize=8)
        panel.tick_params(axis="y", labelsize=7)
        panel.grid(axis="y", linewidth=0.4, alpha=0.6)
        panel.set_axisbelow(True)
    for panel in panels[len(pairs) :]:
        panel.set_visible(False)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(WAYS), fontsize=8, frameon=False)
    figure.suptitle(f"{model}: one D rank's part of a request (tokens, fragmented blocks)", fontsize=10)
    FigureCanvasAgg(figure).print_png(str(path))


def draw_binding(lines: Lines, path: Path) -> None:
    """Milliseconds by tokens, all layers, a line per pair of TP sizes; with chunks where parts are staged."""
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    panel = figure.subplots()
    most = max(line["layers"] for line in lines)
    for i, tp in enumerate(dict.fromkeys(line["tp"] for line in lines)):
        for fragmented, style in ((0, "-"), (100, "--")):
            mine = [x for x in lines if (x["tp"], x["layers"], x["fragmented"]) == (tp, most, fragmented)]
            total = [x["bind_ms"] + x["choose_ms"] + (x["cut_ms"] if x["picks_staged"] else 0) for x in mine]
            label = f"TP {tp}" if fragmented == 0 else None
            panel.plot([x["tokens"] for x in mine], total, style, marker=".", color=COLOURS[1 + i % 3], label=label)
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    ticks = sorted({line["tokens"] for line in lines})
    panel.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    panel.set_xlabel("tokens")
    panel.set_ylabel("ms per request")
    panel.grid(linewidth=0.4, alpha=0.6)
    panel.legend(frameon=False)
    panel.set_title(f"Saying what is to be read, {most} layers (dashed: no block follows another)", fontsize=10)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="lines of JSON")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="write PNG files there")
    args = parser.parse_args()
    lines = [json.loads(line) for path in args.files for line in path.read_text().splitlines()]
    transfers = [line for line in lines if "ways" in line]
    binds, handshakes = ([line for line in lines if line.get("kind") == kind] for kind in ("bind", "handshake"))
    cells, starts = ([line for line in lines if line.get("kind") == kind] for kind in ("cell", "start"))
    for found, table in (
        (transfers, transfer_table),
        (binds, bind_table),
        (handshakes, handshake_table),
        (cells, engine_table),
        (starts, start_table),
    ):
        if found:
            print(table(found), end="\n\n")
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
        for model in dict.fromkeys(line["model"] for line in transfers):
            mine = [line for line in transfers if line["model"] == model]
            draw_transfers(model, mine, args.pictures / f"transfer-{model}.png")
        if binds:
            draw_binding(binds, args.pictures / "bind.png")
        if cells:
            draw_engines(cells, args.pictures / "engines.png")


if __name__ == "__main__":
    main()
