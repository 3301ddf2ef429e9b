"""How does vLLM's benchmark client run where the ``vllm`` command does not?

vLLM's CPU wheel has another distribution name, and its ``vllm`` command ends because it finds no version under its own.
``python -m hybrid_connector.tools.vllm_bench OPTIONS`` is ``vllm bench serve OPTIONS`` without looking for one.
Run as a program by ``tools.sweeping.clients``; nothing imports it.
"""

import importlib
import os
import sys
import traceback

from hybrid_connector.tools.unfit_packages import hide_unfit_packages


def main() -> None:
    """Parse the command line as ``vllm bench serve`` does, and run it."""
    hide_unfit_packages()
    client = importlib.import_module("vllm.benchmarks.serve")
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm bench serve")
    client.add_cli_args(parser)
    client.main(parser.parse_args())


if __name__ == "__main__":
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except Exception:
        traceback.print_exc()
        code = 1
    # At an ordinary end Triton's bindings list what they leak, and the log would no longer end with the reason.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
