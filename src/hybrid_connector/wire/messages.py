"""What do the schedulers of two engines say to each other?

1. D asks: ``Hello`` (who are you), ``Acquire``, ``Renew``, ``Verify``, ``Release`` (a lease).
2. P answers with the reply named like the request, or with ``Refused`` and a reason.
3. ``encode`` and the two ``decode`` functions are the only way in and out; bad bytes raise ``WireError``.

A message is one MessagePack map whose ``type`` names it. Schema rules: a new field has a default; no field is
renamed, reordered or retyped; unknown fields are ignored; anything else needs a new ``PROTOCOL_VERSION``.
"""

from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from hybrid_connector.core.digests import RunList
from hybrid_connector.core.errors import WireError
from hybrid_connector.wire.manifest import Count, EngineManifest, Name

PROTOCOL_VERSION = 1
MAX_REQUEST_BYTES = 64 * 1024
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_DETAIL_CHARS = 2048

RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
Token = Annotated[str, Meta(min_length=1, max_length=128)]
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
BlockIds = Annotated[tuple[BlockId | None, ...], Meta(max_length=2**22)]
Digest = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # NaN fails ge, infinity fails le


class RefusalReason(StrEnum):
    """Why P did not do what it was asked."""

    UNKNOWN = "unknown"  # no such lease, and none that this engine remembers
    EXPIRED = "expired"  # its reader did not renew in time; the blocks were given back
    CONSUMED = "consumed"  # it was read, or given up, before
    HELD = "held"  # by another holder
    NOT_SEALED = "not_sealed"  # a step that may still write the blocks is in flight; retry
    NOT_READY = "not_ready"  # the digest is being computed; retry
    WRONG_TOKEN = "wrong_token"  # not the token that was given out with the answer
    WITHDRAWN = "withdrawn"  # P's cache was reset
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"  # P and D speak different versions
    MALFORMED = "malformed"  # what came is no message of this protocol
    OVERLOADED = "overloaded"  # P cannot answer now: it starts, or was asked too often; retry
    OTHER = "other"  # P failed to answer, or gave a reason newer than this version; the detail says which

    @classmethod
    def _missing_(cls, value: object) -> "RefusalReason":
        return cls.OTHER


class Hello(Struct, frozen=True, tag="hello"):
    """Asks for the manifest."""

    protocol_version: Count


class Acquire(Struct, frozen=True, tag="acquire"):
    """Asks for the lease of a finished request; ``holder`` names the asking engine and its start."""

    request_id: RequestId
    token: Token
    holder: Name


class Renew(Struct, frozen=True, tag="renew"):
    """Asks to keep a granted lease for another term."""

    request_id: RequestId
    token: Token
    holder: Name


class Release(Struct, frozen=True, tag="release"):
    """Gives a lease back: its blocks were read, or are not wanted any more."""

    request_id: RequestId
    token: Token
    holder: Name


class Verify(Struct, frozen=True, tag="verify"):
    """Asks for the digest of bytes of a held lease: ``runs`` of rank ``rank``.

    ``number`` tells the run lists of a lease apart; asking again with the same number is asking for the same list.
    """

    request_id: RequestId
    token: Token
    holder: Name
    number: Count
    rank: Count
    runs: RunList


class _Reply(Struct, frozen=True, kw_only=True):
    """``incarnation``: the start of P that answers, so D notices a restart with any reply."""

    incarnation: Name


class Welcome(_Reply, frozen=True, tag="welcome"):
    """The answer to ``Hello``."""

    manifest: EngineManifest

    def __post_init__(self) -> None:
        if self.manifest.incarnation != self.incarnation:
            raise ValueError(f"incarnation {self.incarnation!r} sends the manifest of {self.manifest.incarnation!r}")


class Granted(_Reply, frozen=True, tag="granted"):
    """The answer to ``Acquire``: the block ids per cache group, kept for ``promise_s`` from when D asked."""

    request_id: RequestId
    block_ids: Annotated[tuple[BlockIds, ...], Meta(max_length=256)]
    num_tokens: Count
    promise_s: Seconds


class Renewed(_Reply, frozen=True, tag="renewed"):
    """The answer to ``Renew``: kept for ``promise_s`` from when D asked."""

    request_id: RequestId
    promise_s: Seconds


class Released(_Reply, frozen=True, tag="released"):
    """The answer to ``Release``."""

    request_id: RequestId


class Verified(_Reply, frozen=True, tag="verified"):
    """The answer to ``Verify``: what P has there."""

    request_id: RequestId
    number: Count
    digest: Digest


class Refused(_Reply, frozen=True, tag="refused"):
    """The answer to any request; ``request_id`` is empty where the request had none or could not be read.

    ``retry_after_s``: ask again after this time; ``None`` where asking again does not help.
    """

    request_id: Annotated[str, Meta(max_length=512)]
    reason: RefusalReason
    detail: Annotated[str, Meta(max_length=MAX_DETAIL_CHARS)]
    retry_after_s: Seconds | None = None


Request = Hello | Acquire | Renew | Verify | Release
Reply = Welcome | Granted | Renewed | Verified | Released | Refused

_Message = TypeVar("_Message")

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The bytes of ``message``; raises ``WireError`` where they exceed the limit or a text is not Unicode."""
    limit, kind = (MAX_REQUEST_BYTES, "request") if isinstance(message, Request) else (MAX_REPLY_BYTES, "reply")
    try:
        payload = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be encoded: {_shorten(str(error))}") from error
    if len(payload) > limit:
        raise WireError(f"expected a {kind} of at most {limit} bytes, {type(message).__name__} has {len(payload)}")
    return payload


def decode_request(payload: bytes) -> Request:
    """The request in ``payload``; raises ``WireError``."""
    return _decode(_requests, payload, MAX_REQUEST_BYTES, "a request (hello, acquire, renew, verify, release)")


def decode_reply(payload: bytes) -> Reply:
    """The reply in ``payload``; raises ``WireError``."""
    return _decode(
        _replies, payload, MAX_REPLY_BYTES, "a reply (welcome, granted, renewed, verified, released, refused)"
    )


def _decode(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes, limit: int, expected: str) -> _Message:
    if len(payload) > limit:
        raise WireError(f"expected {expected} of at most {limit} bytes, got {len(payload)}")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"expected {expected}, got {len(payload)} bytes: {_shorten(str(error))}") from error


def _shorten(text: str) -> str:
    """Printable, and at most 200 characters: an error must not echo what a peer sent in full."""
    text = ascii(text)[1:-1]
    return text if len(text) <= 200 else f"{text[:197]}..."
