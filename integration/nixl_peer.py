"""A rank with a NIXL agent of its own, in a process of its own."""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from hybrid_connector.core.errors import HybridConnectorError
from hybrid_connector.transport.base import Region

from transport_suite import REGION_BYTES, Bytes, LocalRank, Outcome, Read

CALL_LIMIT_S = 120.0


def _pause() -> None:
    time.sleep(0.0005)


def serve(connection: Connection) -> None:
    """Carry out calls to a ``LocalRank`` until the other side says ``close`` or is gone."""
    from hybrid_connector.transport.nixl import NixlTransport

    rank = LocalRank(NixlTransport(settle_s=0.2), REGION_BYTES, _pause)
    connection.send(None)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(rank, method)(*arguments)
        except (HybridConnectorError, TimeoutError) as error:
            answer = error
        connection.send(answer)
        if method == "close":
            return


class NixlRank:
    """A ``Rank`` in another process. Calls raise what they raise there."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_started(self) -> None:
        self._receive("start")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def describe(self) -> tuple[bytes, Region]:
        answer: tuple[bytes, Region] = self._call("describe")
        return answer

    def fill(self, data: Bytes) -> None:
        self._call("fill", data)

    def contents(self) -> Bytes:
        answer: Bytes = self._call("contents")
        return answer

    def add_peer(self, identity: bytes) -> str:
        answer: str = self._call("add_peer", identity)
        return answer

    def remove_peer(self, peer: str) -> None:
        self._call("remove_peer", peer)

    def read(self, reads: Sequence[Read]) -> Outcome:
        answer: Outcome = self._call("read", reads)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def close(self) -> None:
        self._call("close")

    def wait_until_ended(self) -> int | None:
        """The process's exit code; ``None`` if it does not end."""
        self._process.join(CALL_LIMIT_S)
        self._connection.close()
        return self._process.exitcode

    def _call(self, method: str, *arguments: object) -> Any:
        self._connection.send((method, arguments))
        return self._receive(method)

    def _receive(self, method: str) -> Any:
        if not self._connection.poll(CALL_LIMIT_S):
            raise TimeoutError(f"{method}: no answer after {CALL_LIMIT_S} s")
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer
