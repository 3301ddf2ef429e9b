"""The command line: ``hybrid-connector SUBCOMMAND``."""

import argparse
import signal
import sys
from collections.abc import Sequence

from hybrid_connector import __version__
from hybrid_connector.core.errors import HybridConnectorError
from hybrid_connector.tools import demo, doctor, explain, plan, recipe, size, sweep
from hybrid_connector.tools.servers import ServerError


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and their options."""
    parser = argparse.ArgumentParser(
        prog="hybrid-connector",
        description="Moves the cache state of hybrid models between vLLM prefill and decode engines over NIXL.",
        epilog="The connector itself is an option of vllm serve; the README has the lines.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(title="subcommands", required=True, metavar="SUBCOMMAND")
    demo.add_parser(subcommands)
    plan.add_parser(subcommands)
    explain.add_parser(subcommands)
    size.add_parser(subcommands)
    recipe.add_parser(subcommands)
    doctor.add_parser(subcommands)
    sweep.add_parser(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit status. What the user can mend is one line on stderr, not a traceback."""
    args = build_parser().parse_args(argv)
    # So that SIGTERM stops the processes that a subcommand started too, as Ctrl-C does.
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return int(args.run(args))
    except (HybridConnectorError, ServerError, OSError, ValueError) as error:
        print(f"hybrid-connector: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, former)


if __name__ == "__main__":
    sys.exit(main())
