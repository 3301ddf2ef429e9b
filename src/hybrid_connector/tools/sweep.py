"""What does a deployment deliver, and at which speed per user? A benchmark client over concurrencies, and its curves.

The client is vLLM's own (`vllm bench serve`) or aiperf: this command runs it once for each deployment and concurrency,
keeps every result, and draws total tokens/s per GPU against generated tokens/s per user. What has finished is not run
again: after an interruption the same command goes on. In DIR: sweep.csv, sweep.png, sweep.html, and each run's files.
"""

import argparse
import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.completions import MAX_TIE_NATS
from hybrid_connector.tools.sweeping import gsm8k, parity, report
from hybrid_connector.tools.sweeping.cells import Cell, Parameters, read_record, run_cell
from hybrid_connector.tools.sweeping.clients import CLIENTS
from hybrid_connector.tools.sweeping.deployments import (
    Deployment,
    Endpoint,
    ask_endpoint,
    parse_deployment,
    read_deployments,
)

EXAMPLES = """examples:
  hybrid-connector sweep --deployment pd=http://router:8000,gpus=16 --deployment aggregated=http://a:8100,gpus=8 \\
      --concurrency 1 4 16 64 --input-len 8192 --output-len 1024 --output night
  hybrid-connector sweep --deployments night.toml --client aiperf
  hybrid-connector sweep --deployment pd=http://router:8000 --deployment aggregated=http://a:8100 --parity aggregated
"""


def add_parser(subcommands: Any) -> None:
    """Add ``sweep`` to the command line."""
    parser = subcommands.add_parser(
        "sweep",
        help="benchmark deployments over concurrencies, draw Pareto curves; compare answers",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    deployments = parser.add_argument_group("deployments, at least one")
    deployments.add_argument(
        "--deployment",
        action="append",
        default=[],
        metavar="NAME=URL[,gpus=N]",
        help="a completions endpoint and the GPUs behind it (1); also model=NAME, tokenizer=NAME; may be repeated",
    )
    deployments.add_argument(
        "--deployments", type=Path, metavar="FILE.toml", help="a table [NAME] each, with url, gpus, model, tokenizer"
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=_positive,
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="N",
        help="users at a time (1 4 16 64)",
    )
    load.add_argument("--input-len", type=_positive, default=1024, metavar="N", help="tokens of a prompt (1024)")
    load.add_argument("--output-len", type=_at_least_two, default=128, metavar="N", help="tokens of an answer (128)")
    load.add_argument("--rounds", type=_positive, default=8, metavar="N", help="prompts per user (8)")
    load.add_argument(
        "--warmups", type=_natural, metavar="N", help="requests before each run, not measured (one per user)"
    )
    load.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the random prompts (0)")

    run_of = parser.add_argument_group("client and output")
    run_of.add_argument("--client", choices=tuple(CLIENTS), default="vllm", help="the benchmark client (vllm)")
    run_of.add_argument(
        "--client-command",
        type=shlex.split,
        default=[],
        metavar="'...'",
        help="how it is started, and options of its own in front of ours (vllm bench serve, aiperf profile)",
    )
    run_of.add_argument(
        "--percentiles", type=_percentile, nargs="+", default=[50, 90, 99], metavar="P", help="of times (50 90 99)"
    )
    run_of.add_argument("--timeout", type=_positive, default=7200, metavar="S", help="seconds for one run (7200)")
    run_of.add_argument(
        "--output", type=Path, default=Path("sweep"), metavar="DIR", help="where results are kept (sweep)"
    )
    run_of.add_argument("--fresh", action="store_true", help="run again what has finished")
    run_of.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")

    other = parser.add_argument_group("instead of a benchmark")
    other.add_argument("--parity", metavar="NAME", help="compare the others' greedy answers with this deployment's")
    other.add_argument("--prompts", type=Path, metavar="FILE", help="for --parity: a prompt a line (texts made here)")
    other.add_argument(
        "--tie-nats",
        type=float,
        default=MAX_TIE_NATS,
        metavar="X",
        help=f"for --parity: a gap up to this is a tie, which rounding may turn ({MAX_TIE_NATS})",
    )
    other.add_argument("--gsm8k", action="store_true", help="run lm-eval's task; its data set must be here already")
    other.add_argument("--limit", type=_positive, metavar="N", help="for --gsm8k: the first N questions")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least_two(text: str) -> int:
    return _at_least(2, text)  # the time per token is that of the tokens after the first


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text}")
    return int(text)


def _percentile(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"expected more than 0 and less than 100, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Measure, or compare; returns the exit status."""
    deployments = _read_deployments(args)
    if args.parity is not None and (args.parity not in deployments or len(deployments) < 2):
        names = ", ".join(deployments)
        raise ConfigError(f"--parity: expected one of at least two deployments, got {args.parity!r} of {names}")
    if args.parity is not None and args.gsm8k:
        raise ConfigError("--parity and --gsm8k: expected one of them")
    console = Console(stderr=args.json)
    # What the user sees must not depend on the terminal being as wide as ours.
    if not console.is_terminal:
        console = Console(stderr=args.json, width=140)
    if args.gsm8k:
        gsm8k.check_available()
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        endpoints = [ask_endpoint(http, name, deployment) for name, deployment in deployments.items()]
        if args.parity is not None:
            return _compare(args, http, endpoints, console)
        if args.gsm8k:
            return _solve(args, endpoints, console)
        return _measure(args, http, endpoints, console)


def _read_deployments(args: argparse.Namespace) -> Mapping[str, Deployment]:
    deployments = {} if args.deployments is None else read_deployments(args.deployments)
    for text in args.deployment:
        name, deployment = parse_deployment(text)
        if name in deployments:
            raise ConfigError(f"{name}: expected each deployment once")
        deployments[name] = deployment
    if not deployments:
        raise ConfigError("expected --deployment NAME=URL or --deployments FILE.toml")
    return deployments


# The benchmark.


def make_cells(args: argparse.Namespace, endpoints: list[Endpoint]) -> list[Cell]:
    """Every deployment at every concurrency, the smallest first."""
    cells = []
    for endpoint in endpoints:
        for concurrency in sorted(set(args.concurrency)):
            parameters = Parameters(
                client=args.client,
                client_command=tuple(args.client_command),
                url=endpoint.url,
                model=endpoint.model,
                tokenizer=endpoint.tokenizer,
                concurrency=concurrency,
                num_prompts=concurrency * args.rounds,
                warmups=concurrency if args.warmups is None else args.warmups,
                input_len=args.input_len,
                output_len=args.output_len,
                seed=args.seed,
                percentiles=tuple(sorted({50.0, *map(float, args.percentiles)})),
            )
            cells.append(Cell(endpoint, parameters, args.output / endpoint.name / f"concurrency-{concurrency}"))
    return cells


def _measure(args: argparse.Namespace, http: httpx.Client, endpoints: list[Endpoint], console: Console) -> int:
    client = CLIENTS[args.client]
    cells = make_cells(args, endpoints)
    client.check(cells[0].parameters.percentiles)
    command = args.client_command or client.find()
    if shutil.which(command[0]) is None:
        raise ConfigError(f"--client-command: expected a program, got {command[0]!r}")
    # All of them before the first run: a difference must not come up in the middle of the night.
    records = {cell: record for cell in cells if not args.fresh and (record := read_record(cell)) is not None}
    failures: list[str] = []
    for cell in cells:
        if cell in records:
            console.print(f"{cell.name}: measured before", highlight=False)
            continue
        console.print(f"{cell.name}: {cell.parameters.num_prompts} requests ...", highlight=False)
        try:
            records[cell] = run_cell(cell, client, command, args.timeout, http)
        except PeerError as error:
            failures.append(str(error))
            console.print(f"  {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            console.print(f"interrupted: {len(records)} of {len(cells)} runs have finished; the same command goes on")
            raise
    rows = report.make_rows({cell: records[cell] for cell in cells if cell in records})
    if args.json:
        print(json.dumps({"cells": [row.as_document() for row in rows], "failures": failures}, indent=2))
    if rows:
        _report(args, rows, console)
    if failures:
        console.print(f"[red]{len(failures)} of {len(cells)} runs failed[/red]; the same command tries them again")
    return int(bool(failures))


def _report(args: argparse.Namespace, rows: list[report.Row], console: Console) -> None:
    if not args.json:
        console.print(report.make_table(rows))
    report.write_csv(rows, args.output / "sweep.csv")
    picture = report.draw(rows)
    (args.output / "sweep.png").write_bytes(picture)
    (args.output / "sweep.html").write_text(report.make_page(rows, picture), "utf-8")
    files = ", ".join(str(args.output / f"sweep.{kind}") for kind in ("csv", "png", "html"))
    console.print(f"Written: {files}", soft_wrap=True, highlight=False)


# Instead of it.


def _compare(args: argparse.Namespace, http: httpx.Client, endpoints: list[Endpoint], console: Console) -> int:
    prompts = parity.make_prompts(args.input_len) if args.prompts is None else parity.read_prompts(args.prompts)
    (reference,) = (endpoint for endpoint in endpoints if endpoint.name == args.parity)
    others = [endpoint for endpoint in endpoints if endpoint.name != args.parity]
    outcomes = parity.compare_endpoints(http, others, reference, prompts, args.output_len)
    documents = [outcome.as_document(args.tie_nats) for outcome in outcomes]
    if args.json:
        print(json.dumps({"reference": reference.name, "tie_nats": args.tie_nats, "prompts": documents}, indent=2))
    else:
        console.print(parity.make_table(outcomes, reference.name, args.tie_nats))
    for outcome in outcomes:
        if outcome.error is not None:
            console.print(f"prompt {outcome.prompt}: {outcome.error}", style="red", markup=False, soft_wrap=True)
    agreeing = sum(outcome.agrees(args.tie_nats) for outcome in outcomes)
    console.print(f"{agreeing} of {len(outcomes)} answers agree with {reference.name}'s", highlight=False)
    return int(agreeing != len(outcomes))


def _solve(args: argparse.Namespace, endpoints: list[Endpoint], console: Console) -> int:
    scores = {}
    for endpoint in endpoints:
        directory = args.output / endpoint.name / "gsm8k"
        command = gsm8k.make_command(endpoint, directory, concurrency=max(args.concurrency), limit=args.limit)
        console.print(f"{endpoint.name}: {shlex.join(command)}", soft_wrap=True, highlight=False)
        scores[endpoint.name] = gsm8k.run_task(command, directory)
    if args.json:
        print(json.dumps(scores, indent=2))
        return 0
    table = Table("deployment", "score", "value", title="gsm8k")
    for name, found in scores.items():
        for score, value in found.items():
            table.add_row(name, score, f"{value:.4f}")
    console.print(table)
    return 0
