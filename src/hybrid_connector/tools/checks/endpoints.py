"""Does one request go from P to D, its state over NIXL? Through the API servers, with the keys that routers send.

1. P computes a prompt that nobody sent before, and returns its ``kv_transfer_params``.
2. D answers it with them.
3. D's counters say whether the state was loaded or computed again.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from hybrid_connector.engine.published import PREFIX
from hybrid_connector.tools.checks.finding import Finding, ok, problem

COUNTERS_LIMIT_S = 15.0
"""Until D's counters show a load that has ended: vLLM writes them down with a later step, or every 10 s."""
_PAUSE_S = 0.2
_SEE_LOG = "D's log has the reason: request ID: load failed: ..."
_TEXT = " State is what a model remembers: keys and values, a window of inputs, a matrix that decays."

Pause = Callable[[float], None]
Clock = Callable[[], float]


class EndpointError(Exception):
    """A server did not do what it was asked; says what to do about it."""

    def __init__(self, where: str, what: str, todo: str) -> None:
        super().__init__(what)
        self.where = where
        self.todo = todo


@dataclass(frozen=True, slots=True)
class Counters:
    """D's, summed over labels."""

    loads: float
    failed_loads: float
    num_bytes: float


def check_endpoints(
    client: httpx.Client,
    prefill: str,
    decode: str,
    *,
    pause: Pause = time.sleep,
    clock: Clock = time.monotonic,
) -> Finding:
    """One request of a few dozen tokens. ``client`` carries the API key, where there is one."""
    check = "request from P to D"
    try:
        model = _model(client, prefill)
        if (other := _model(client, decode)) != model:
            raise EndpointError(decode, f"serves {other}, P serves {model}", "serve one model under one name on both")
        before = read_counters(client, decode)
        prompt = f"{secrets.token_hex(8)}.{_TEXT}"
        params = _prefill(client, prefill, model, prompt)
        _decode(client, decode, model, prompt, params)
        after = _wait_counters(client, decode, before, pause, clock)
    except EndpointError as error:
        return problem(check, str(error), error.todo, error.where)
    moved = after.num_bytes - before.num_bytes
    return ok(check, f"{model}: {after.loads - before.loads:g} load(s) of {moved:,.0f} bytes, from {prefill}", decode)


def _model(client: httpx.Client, url: str) -> str:
    answer = _json(client, "GET", url, "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(url, f"/v1/models: {answer!s:.200}", "give the address of a vLLM API server") from error


def _prefill(client: httpx.Client, url: str, model: str, prompt: str) -> Mapping[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    params = _json(client, "POST", url, "/v1/completions", body).get("kv_transfer_params")
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        raise EndpointError(
            url,
            f"P returned kv_transfer_params {params!s:.200}",
            "start it with --kv-transfer-config and kv_role kv_producer, and give P's address before D's",
        )
    if "remote_lease_token" not in params:
        raise EndpointError(
            url, "P runs another connector: its kv_transfer_params name no lease", "use HybridNixlConnector on P and D"
        )
    return params


def _decode(client: httpx.Client, url: str, model: str, prompt: str, params: Mapping[str, Any]) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "kv_transfer_params": params}
    answer = _json(client, "POST", url, "/v1/completions", body)
    choices = answer.get("choices")
    reason = choices[0].get("finish_reason") if isinstance(choices, list) and choices else None
    if reason in (None, "error"):
        raise EndpointError(url, f"D's answer ended with {reason}", _SEE_LOG)


def read_counters(client: httpx.Client, url: str) -> Counters:
    """D's counters now. Raises ``EndpointError`` where it publishes none."""
    text = _get(client, "GET", url, "/metrics").text
    if PREFIX not in text:
        raise EndpointError(
            url,
            f"/metrics has no {PREFIX}*",
            "start it with --kv-transfer-config and HybridNixlConnector, without --disable-log-stats",
        )
    return Counters(*(_total(text, name) for name in ("loads_total", "failed_loads_total", "bytes_total")))


def _total(text: str, name: str) -> float:
    values = re.findall(rf"^{re.escape(PREFIX + name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def _wait_counters(client: httpx.Client, url: str, before: Counters, pause: Pause, clock: Clock) -> Counters:
    """The counters once they show a load."""
    deadline = clock() + COUNTERS_LIMIT_S
    while True:
        after = read_counters(client, url)
        if after.failed_loads > before.failed_loads:
            raise EndpointError(url, "D's load failed, and it computed the prompt itself", _SEE_LOG)
        if after.loads > before.loads:
            return after
        if clock() > deadline:
            raise EndpointError(
                url,
                f"D answered, but loaded nothing within {COUNTERS_LIMIT_S:g} s",
                "give D --kv-transfer-config with kv_role kv_consumer, and D's address after P's",
            )
        pause(_PAUSE_S)


def _json(client: httpx.Client, method: str, url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    response = _get(client, method, url, path, body)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EndpointError(
            url, f"{path}: expected JSON, got {response.text!a:.120}", "give a vLLM API server's address"
        )
    return answer


def _get(
    client: httpx.Client, method: str, url: str, path: str, body: Mapping[str, Any] | None = None
) -> httpx.Response:
    try:
        response = client.request(method, f"{url}{path}", json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EndpointError(url, f"{path}: {error}", "start the API server, and check host and port") from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise EndpointError(url, f"{path}: HTTP {response.status_code}", "set VLLM_API_KEY to the server's key")
    if response.is_error:
        raise EndpointError(
            url, f"{path}: HTTP {response.status_code}: {response.text:.300}", f"see its log; {_SEE_LOG}"
        )
    return response
