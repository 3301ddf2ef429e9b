"""How is a sweep resumed? Each of its cells, a deployment at a concurrency, leaves a record when it has finished.

1. A cell has a directory: the client's result and log as they came, and ``cell.json``, written last and at once.
2. A cell with a record of the same parameters is not run again; one of other parameters is refused, not mixed in.
3. A cell that was interrupted has no record. It runs again with prompts of its own: those that it sent before may be in
   a prefix cache, which would answer faster than the engine computes.
"""

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.completions import complete, text_of
from hybrid_connector.tools.sessions import stop_sessions, uninterrupted
from hybrid_connector.tools.sweeping.clients import Client, Load, Measurement, read_result
from hybrid_connector.tools.sweeping.deployments import Endpoint

RECORD = "cell.json"
_STOP_GRACE_S = 3.0
_NUM_LOG_LINES = 8
_MAX_WARMUP_THREADS = 256
_SEED_STRIDE = 1_000_000
"""Between the seeds of two attempts of a cell, so that none meets another concurrency's."""


class Parameters(msgspec.Struct, frozen=True):
    """What decides a cell's outcome, beside the deployment itself. ``client_command``: empty for the one found."""

    client: str
    client_command: tuple[str, ...]
    url: str
    model: str
    tokenizer: str
    concurrency: int
    num_prompts: int
    warmups: int
    input_len: int
    output_len: int
    seed: int
    percentiles: tuple[float, ...]

    def difference(self, other: "Parameters") -> str | None:
        """The first parameter in which the other differs, and both values."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} {ours!r}, now {theirs!r}"
        return None


class Record(msgspec.Struct, frozen=True):
    """A finished cell."""

    parameters: Parameters
    attempt: int
    command: tuple[str, ...]
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Cell:
    """A deployment at a concurrency, and where its files are."""

    endpoint: Endpoint
    parameters: Parameters
    directory: Path

    @property
    def name(self) -> str:
        return f"{self.endpoint.name}, concurrency {self.parameters.concurrency}"

    def load(self, attempt: int) -> Load:
        """What a client sends: for every deployment the same, for every concurrency and attempt something else."""
        asked = self.parameters
        seed = asked.seed + asked.concurrency + attempt * _SEED_STRIDE
        return Load(
            endpoint=self.endpoint,
            concurrency=asked.concurrency,
            num_prompts=asked.num_prompts,
            input_len=asked.input_len,
            output_len=asked.output_len,
            seed=seed,
            percentiles=asked.percentiles,
        )


def read_record(cell: Cell) -> Record | None:
    """The record of a finished cell. Raises ``ConfigError`` where it was run with other parameters, or is damaged."""
    file = cell.directory / RECORD
    if not file.exists():
        return None
    try:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: expected the record of a cell: {error}; --fresh measures it again") from error
    difference = record.parameters.difference(cell.parameters)
    if difference is not None:
        raise ConfigError(f"{file} was measured with {difference}: expected the same, another --output, or --fresh")
    return record


def run_cell(cell: Cell, client: Client, command: Sequence[str], timeout_s: float, http: httpx.Client) -> Record:
    """Warm the deployment up, run the client, and leave a record.

    Raises ``PeerError`` where requests fail or the client does, saying why; then there is no record.
    """
    cell.directory.mkdir(parents=True, exist_ok=True)
    (cell.directory / RECORD).unlink(missing_ok=True)
    attempt = 1 + sum(1 for _ in cell.directory.glob("attempt-*"))
    directory = cell.directory / f"attempt-{attempt}"
    directory.mkdir()
    warm_up(http, cell.endpoint, cell.parameters)
    load = cell.load(attempt)
    words = (*command, *client.options(load, directory))
    log = directory / "client.log"
    ended = _run_client(words, log, timeout_s)
    if ended != "exit status 0":
        raise PeerError(f"{cell.name}: expected {client.name} to end with exit status 0, got {ended}\n{_tail(log)}")
    measurement = read_result(client, directory, load)
    if measurement.failed or measurement.completed != load.num_prompts:
        done = f"{measurement.completed} of {load.num_prompts} requests"
        raise PeerError(f"{cell.name}: expected every request to complete, {done} did; {log} may say why")
    if measurement.tpot_ms["p50"] <= 0:
        raise PeerError(f"{cell.name}: expected a time per token, got {measurement.tpot_ms['p50']} ms")
    record = Record(cell.parameters, attempt, words, measurement)
    _write(cell.directory / RECORD, msgspec.json.format(msgspec.json.encode(record)))
    return record


def warm_up(http: httpx.Client, endpoint: Endpoint, parameters: Parameters) -> None:
    """Send the first requests, which pay for handshakes and compilation, and must not be measured.

    Their prompts have as many characters as a measured one has tokens, thus no more tokens.
    """
    num_at_once = min(parameters.warmups, parameters.concurrency, _MAX_WARMUP_THREADS)
    if num_at_once == 0:
        return
    with ThreadPoolExecutor(num_at_once) as pool:

        def send(number: int) -> None:
            prompt = text_of(parameters.input_len, salt=number)
            model = {"model": endpoint.model}
            complete(http, endpoint.url, prompt, max_tokens=parameters.output_len, extra=model)

        try:
            list(pool.map(send, range(parameters.warmups)))
        except httpx.HTTPError as error:
            raise PeerError(f"{endpoint.name}: {endpoint.url}: {error or type(error).__name__}") from error


def _run_client(command: Sequence[str], log: Path, timeout_s: float) -> str:
    """How it ended. The client leads a session; whatever ends this program ends that too."""
    client: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as out, uninterrupted():
            out.write(f"$ {shlex.join(command)}\n".encode())
            out.flush()
            client = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        status = client.wait(timeout_s)
    except BaseException as error:
        if client is not None:
            stop_sessions([client.pid], _STOP_GRACE_S, reap=client.poll)
        if isinstance(error, subprocess.TimeoutExpired):
            return f"none within {timeout_s:g} s (--timeout)"
        raise
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([*(f"  | {line}" for line in lines[-_NUM_LOG_LINES:]), f"  all of it: {log}"])


def _write(file: Path, content: bytes) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    part = file.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, file)
