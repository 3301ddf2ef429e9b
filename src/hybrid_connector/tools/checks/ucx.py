"""Which transports does the UCX have that NIXL loaded, and which of them did a connection take?

NIXL says neither, and its wheel brings no ``ucx_info``. So UCX is asked by its C interface, in a process that has NIXL
loaded, and what it took is read from its log at level ``info``.
"""

import ctypes
import re
from pathlib import Path

_FEATURES_FIELD, _FEATURE_RMA = 1, 2  # UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_RMA
_PARAMS_WORDS = 256
"""More than ``ucp_params_t`` has; UCX reads the fields only that the first word names."""


def loaded_library() -> Path | None:
    """The libucp of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libucp"):
            return path
    return None


def list_transports(library: Path, report: Path) -> tuple[str, ...]:
    """Transports with their devices, ``tcp/eth0``, that UCX would consider; ``report`` is a file to write to.

    Raises ``OSError`` where UCX does not start.
    """
    ucp, libc = ctypes.CDLL(str(library)), ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    params = (ctypes.c_uint64 * _PARAMS_WORDS)(_FEATURES_FIELD, _FEATURE_RMA)
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if status := ucp.ucp_config_read(None, None, ctypes.byref(config)):
        raise OSError(f"ucp_config_read: status {status}")
    if status := ucp.ucp_init_version(major, minor, params, config, ctypes.byref(context)):
        raise OSError(f"ucp_init: status {status}")
    try:
        stream = ctypes.c_void_p(libc.fopen(str(report).encode(), b"w"))
        if not stream:
            raise OSError(f"{report}: cannot be written")
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
    finally:
        ucp.ucp_cleanup(context)
        ucp.ucp_config_release(config)
    return parse_transports(report.read_text())


def parse_transports(text: str) -> tuple[str, ...]:
    """From ``#  resource 1 : md 1 dev 1 flags -- tcp/eth0``."""
    return tuple(re.findall(r"^#\s+resource \d+\s*:.* (\S+/\S+)\s*$", text, re.MULTILINE))


def parse_lanes(log: str) -> str:
    """What the last connection to another process uses, as UCX says it: ``rma_bw(cma/memory) am(tcp/lo)``."""
    lanes = re.findall(r"UCX\s+INFO\s.* (?:intra|inter)-node cfg#\d+ (.+)$", log, re.MULTILINE)
    return " ".join(lanes[-1].split()) if lanes else ""
