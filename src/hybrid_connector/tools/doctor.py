"""Will P and D work with this connector here? Checks this machine and, given peers, the deployment.

This machine: versions, plugin, limits, settings, NIXL and UCX, registration of memory, and one block that is read from
one process into another and verified. Peers: who listens, with whose secret, the handshake, a lease's round trip, a few
bytes over NIXL, whether P and D would exchange state, and one request through both API servers.
Secret and settings come from the environment, as the engines read them. Nothing is changed anywhere.

examples:
  hybrid-connector doctor --kv-transfer-config '{"kv_connector":"HybridNixlConnector","kv_role":"kv_producer"}'
  hybrid-connector doctor --prefill p:5600 --decode-manifest d.json --openai http://p:8100 http://d:8200

Exit status: 0 no problem (warnings allowed), 1 a problem, 2 wrong usage.
"""

import argparse
import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.tools.checks.data_plane import check_nixl, check_reach, has_nixl
from hybrid_connector.tools.checks.deployment import check_pairs, meet
from hybrid_connector.tools.checks.endpoints import check_endpoints
from hybrid_connector.tools.checks.finding import Finding, Status
from hybrid_connector.tools.checks.host import check_host, check_net_devices
from hybrid_connector.tools.checks.settings import check_environment, check_secret, check_transfer_config
from hybrid_connector.tools.checks.software import check_software
from hybrid_connector.tools.manifests import read_manifest
from hybrid_connector.wire.manifest import EngineManifest
from hybrid_connector.wire.security import Security, load_secret
from hybrid_connector.wire.sockets import Address

WIDTH = 120
REQUEST_TIMEOUT_S = 120.0
"""For one answer of an API server: the first request of an engine may compile."""
_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "red", Status.SKIPPED: "dim"}
_INDENT = 2 + max(map(len, Status)) + 2


def add_parser(subcommands: Any) -> None:
    """Add ``doctor`` to the command line."""
    parser = subcommands.add_parser(
        "doctor",
        help="what is wrong with this machine or this deployment, and what to do",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kv-transfer-config", metavar="JSON", help="what an engine here is started with: it is checked, and respected"
    )
    parser.add_argument(
        "--prefill",
        type=_address,
        nargs="+",
        action="extend",
        default=[],
        metavar="HOST:PORT",
        help="side channels of prefill engines",
    )
    parser.add_argument(
        "--decode-manifest",
        type=_manifest,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="decode engines as plan --save or explain --save wrote them: a handshake with each P is tried",
    )
    parser.add_argument(
        "--openai", type=_url, nargs=2, metavar=("P", "D"), help="two API servers: sends one request through both"
    )
    parser.add_argument("--peers-only", action="store_true", help="leave this machine out")
    parser.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="S", help="seconds to wait for a peer's answer (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=lambda args: run(args, parser))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Check, print; returns the exit status."""
    if args.peers_only and not (args.prefill or args.openai):
        parser.error("--peers-only needs --prefill or --openai")
    if args.decode_manifest and not args.prefill:
        parser.error("--decode-manifest needs --prefill")
    findings = [] if args.peers_only else _check_machine(args, os.environ)
    findings += _check_deployment(args, os.environ)
    if args.json:
        print(json.dumps(as_json(findings), indent=1))
    else:
        show(findings)
    return exit_status(findings)


def _check_machine(args: argparse.Namespace, environ: Mapping[str, str]) -> list[Finding]:
    findings, transfer = check_transfer_config(args.kv_transfer_config)
    findings += check_software(environ)
    findings += check_host()
    findings += check_environment(environ, transfer)
    findings.append(check_net_devices(environ.get("UCX_NET_DEVICES")))
    return findings + check_nixl(has_nixl())


def _check_deployment(args: argparse.Namespace, environ: Mapping[str, str]) -> list[Finding]:
    findings: list[Finding] = []
    if args.prefill:
        secret = check_secret(environ)
        if args.peers_only:
            findings.append(secret)
        if secret.status is Status.PROBLEM:
            return findings
        text = load_secret(environ)
        security = None if text is None else Security.from_secret(text)
        peers = [meet(address, security, args.timeout) for address in args.prefill]
        pairs = check_pairs(args.decode_manifest, peers)
        for peer in peers:
            findings += peer.findings
            findings += [pair for pair in pairs if pair.where == peer.where]
            if peer.manifest is not None:
                findings += check_reach(peer.manifest, peer.where, has_nixl())
    if args.openai:
        key = environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False, headers=headers) as client:
            findings.append(check_endpoints(client, *args.openai))
    return findings


def exit_status(findings: Iterable[Finding]) -> int:
    return int(any(finding.status is Status.PROBLEM for finding in findings))


# What is printed.


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """``counts`` of each status, and the findings in order."""
    counts = Counter(finding.status for finding in findings)
    return {
        "counts": {status.value: counts[status] for status in Status},
        "findings": [asdict(finding) for finding in findings],
    }


def show(findings: list[Finding]) -> None:
    """One finding a line, what to do below it."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    for where, some in groupby(findings, key=lambda finding: finding.where):
        console.print(f"[bold]{escape(where)}[/bold]")
        for finding in some:
            style = _STYLES[finding.status]
            label = f"{finding.status:<{_INDENT - 2}}"
            first, *more = _wrap(f"{finding.check}: {finding.what}", console.width)
            console.print(f"  [{style}]{label}[/{style}]{escape(first)}")
            for line in (*more, *(_wrap(f"-> {finding.todo}", console.width) if finding.todo else ())):
                console.print(" " * _INDENT + escape(line))
    counts = as_json(findings)["counts"]
    console.print(", ".join(f"{number} {status}" for status, number in counts.items()))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(40, width - _INDENT), break_long_words=False, break_on_hyphens=False)


# What the command line takes.


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT of a side channel, got {text!r}")
    return Address(host, int(port))


def _manifest(text: str) -> tuple[str, EngineManifest]:
    try:
        return text, read_manifest(Path(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got {text!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 600:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, at most 600, got {text!r}")
    return seconds
