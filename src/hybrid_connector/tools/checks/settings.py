"""Would an engine with these settings serve here, and whom? Its ``--kv-transfer-config`` and its environment."""

import errno
import ipaddress
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.engine.config import ConnectorConfig, decode_config
from hybrid_connector.tools.checks.finding import Finding, ok, problem, warning
from hybrid_connector.tools.checks.software import CONNECTOR
from hybrid_connector.tools.models.engine import LAYOUT_ALIASES, LAYOUTS
from hybrid_connector.wire.security import SECRET_FILE_VARIABLE, SECRET_VARIABLE, Security, load_secret
from hybrid_connector.wire.sockets import Address, resolve

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
DEFAULT_HOST, DEFAULT_PORT = "localhost", 5600
CACHE_LAYOUT_VARIABLE = "VLLM_KV_CACHE_LAYOUT"
CONV_LAYOUT_VARIABLE = "VLLM_SSM_CONV_STATE_LAYOUT"

ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("fail", "recompute")
_CONV_LAYOUTS = ("SD", "DS")
_MESSAGE_TRANSPORTS = ("all", "tcp", "ib", "rc", "dc", "ud", "srd")
"""Beginnings of the names of UCX transports that carry messages between any two processes."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """What ``--kv-transfer-config`` says, as far as this connector reads it."""

    role: str
    policy: str
    config: ConnectorConfig

    @property
    def serves(self) -> bool:
        """Whether the engine has a side channel that decode engines reach."""
        return self.role != "kv_consumer"


def read_transfer_config(text: str) -> TransferConfig:
    """Raises ``ConfigError`` naming the first key that vLLM or this connector would not take."""
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"expected JSON: {error}") from error
    transfer = _find_connector(whole)
    role, policy = transfer.get("kv_role"), transfer.get("kv_load_failure_policy", POLICIES[0])
    for key, value, known in (("kv_role", role, ROLES), ("kv_load_failure_policy", policy, POLICIES)):
        if value not in known:
            raise ConfigError(f"{key}: expected one of {', '.join(known)}, got {value!r:.80}")
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigError(f"kv_connector_extra_config: expected an object, got {extra!r:.80}")
    return TransferConfig(str(role), str(policy), decode_config(extra))


def _find_connector(whole: Any) -> Mapping[str, Any]:
    """The object that names this connector: the whole, or one of a ``MultiConnector``'s."""
    if not isinstance(whole, dict):
        raise ConfigError(f"expected a JSON object, got {whole!r:.80}")
    name = whole.get("kv_connector")
    if name == CONNECTOR:
        return whole
    if name == "MultiConnector":
        extra = whole.get("kv_connector_extra_config")
        children = extra.get("connectors") if isinstance(extra, dict) else None
        for child in children if isinstance(children, list) else ():
            if isinstance(child, dict) and child.get("kv_connector") == CONNECTOR:
                return {"kv_role": whole.get("kv_role"), **child}
        raise ConfigError(f"kv_connector_extra_config.connectors: expected {CONNECTOR} among MultiConnector's")
    raise ConfigError(f"kv_connector: expected {CONNECTOR} or MultiConnector, got {name!r:.80}")


def check_transfer_config(text: str | None) -> tuple[list[Finding], TransferConfig | None]:
    """What is wrong with the operator's text, or what it means; no finding where there is none."""
    if text is None:
        return [], None
    check = "--kv-transfer-config"
    try:
        transfer = read_transfer_config(text)
    except ConfigError as error:
        return [problem(check, str(error), "mend it; docs/configuration.md lists the keys and their values")], None
    return [ok(check, f"{transfer.role}; a load that fails: {transfer.policy}")], transfer


def check_environment(environ: Mapping[str, str], transfer: TransferConfig | None) -> list[Finding]:
    """The variables that vLLM, this connector and UCX read."""
    return [
        check_cache_layout(environ.get(CACHE_LAYOUT_VARIABLE), transfer),
        check_conv_layout(environ.get(CONV_LAYOUT_VARIABLE)),
        check_ucx_transports(environ.get("UCX_TLS")),
        check_secret(environ),
        *check_side_channel(environ, transfer),
    ]


def check_cache_layout(value: str | None, transfer: TransferConfig | None) -> Finding:
    """vLLM's variable wins over the connector's option."""
    check = CACHE_LAYOUT_VARIABLE
    asked = "auto" if transfer is None else transfer.config.kv_cache_layout
    wanted = LAYOUT_ALIASES.get(asked, asked)
    if value is None:
        return ok(check, f"unset: the connector asks for {wanted}")
    known = (*LAYOUTS, "HND", "NHD")
    if value not in known:
        return problem(check, f"{value}", f"use one of {', '.join(known)}, or unset it")
    if asked != "auto" and LAYOUT_ALIASES.get(value, value) != wanted:
        return warning(
            check, f"{value} wins over kv_cache_layout {asked}", "unset the variable, or make both say the same"
        )
    return ok(check, value)


def check_conv_layout(value: str | None) -> Finding:
    check = CONV_LAYOUT_VARIABLE
    if value is not None and value not in _CONV_LAYOUTS:
        return problem(check, value, f"use one of {', '.join(_CONV_LAYOUTS)}, or unset it")
    return ok(check, value or "unset: SD; P and D may differ")


def check_ucx_transports(value: str | None) -> Finding:
    """A list without a transport for messages was seen to fail with "no active-message transport"."""
    check = "UCX_TLS"
    names = (value or "all").split(",")
    if names[0].startswith("^") or any(name.startswith(_MESSAGE_TRANSPORTS) for name in names):
        return ok(check, value or "unset: UCX chooses")
    return warning(check, f"{value} names no transport that carries messages between hosts", "add tcp, or unset it")


def check_secret(environ: Mapping[str, str]) -> Finding:
    """Whether there is one that works; its text is never shown."""
    check = "secret"
    try:
        secret = load_secret(environ)
        if secret is None:
            return warning(
                check,
                "none: the side channel is neither encrypted nor authenticated",
                f"set {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} to the same on all engines (openssl rand -hex 32)",
            )
        Security.from_secret(secret)
    except ConfigError as error:
        return problem(check, str(error), "give all engines one secret of at least 16 bytes (openssl rand -hex 32)")
    path = environ.get(SECRET_FILE_VARIABLE)
    if path is not None and (mode := Path(path).stat().st_mode) & 0o077:
        return warning(
            check,
            f"{path} may be read by others (mode {mode & 0o777:o})",
            f"chmod 600 {path}, in Kubernetes defaultMode: 0400",
        )
    return ok(check, f"{len(secret)} bytes from {SECRET_VARIABLE if path is None else path}")


def check_side_channel(environ: Mapping[str, str], transfer: TransferConfig | None) -> list[Finding]:
    """Where a prefill engine would serve, and whether it may; a decode engine of role kv_consumer serves nowhere."""
    check = "side channel"
    if transfer is not None and not transfer.serves:
        return [ok(check, f"a {transfer.role} needs none")]
    host, text = environ.get(HOST_VARIABLE, DEFAULT_HOST), environ.get(PORT_VARIABLE, str(DEFAULT_PORT))
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**16):
        return [problem(check, f"{PORT_VARIABLE}={text}", "expected a port from 1 to 65535")]
    address = Address(host, int(text))
    try:
        hosts = ["0.0.0.0"] if host == "*" else resolve(host)
    except OSError as error:
        return [problem(check, f"{HOST_VARIABLE}={host}: {error}", "set it to the address that decode engines reach")]
    findings = [_check_exposure(address, hosts, environ, transfer), _check_bindable(address, hosts[0])]
    if hosts[0] in ("0.0.0.0", "::"):
        findings.append(
            problem(
                "side channel address",
                f"{address}: D is told this very address, and it names no host",
                f"set {HOST_VARIABLE} to the address that decode engines reach",
            )
        )
    return findings


def _check_exposure(
    address: Address, hosts: list[str], environ: Mapping[str, str], transfer: TransferConfig | None
) -> Finding:
    check = "side channel"
    if all(ipaddress.ip_address(host).is_loopback for host in hosts):
        return ok(check, f"{address}: decode engines of this host only; {HOST_VARIABLE} opens it to others")
    if SECRET_VARIABLE in environ or SECRET_FILE_VARIABLE in environ:
        return ok(check, f"{address}, with a secret")
    if transfer is not None and transfer.config.allow_insecure_side_channel:
        return warning(check, f"{address} without a secret: whoever reaches it is answered", f"set {SECRET_VARIABLE}")
    return problem(
        check, f"{address} is open to other hosts and there is no secret: P does not start", f"set {SECRET_VARIABLE}"
    )


def _check_bindable(address: Address, host: str) -> Finding:
    check = "side channel port"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, address.port))
            server.listen()
        except OSError as error:
            what = f"{address}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                return warning(check, what, f"unless it is your own engine that runs already, change {PORT_VARIABLE}")
            return problem(
                check, what, f"set {HOST_VARIABLE} to an address of this host, {PORT_VARIABLE} to a port >= 1024"
            )
    return ok(check, f"{address} is free; data-parallel rank N takes port {address.port} + N")
