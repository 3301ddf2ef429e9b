"""The messages of the side channel: golden bytes, limits, and what is refused."""

import random
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from hybrid_connector.core.digests import MAX_RUNS, RunList
from hybrid_connector.core.errors import WireError
from hybrid_connector.wire.manifest import EngineManifest
from hybrid_connector.wire.messages import (
    MAX_REQUEST_BYTES,
    Acquire,
    Granted,
    Hello,
    RefusalReason,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Verified,
    Verify,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)

GOLDEN = Path(__file__).parent / "golden" / "v1"


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


RUNS = RunList(
    2, bytes.fromhex("0010000000000000 0000010000000000"), bytes.fromhex("4000000000000000 0200000000000000")
)
MANIFEST = msgspec.msgpack.decode(golden("manifest"), type=EngineManifest)
REQUESTS: dict[str, Request] = {
    "hello": Hello(1),
    "acquire": Acquire("cmpl-1", "token", "decode-0/5eed"),
    "renew": Renew("cmpl-1", "token", "decode-0/5eed"),
    "verify": Verify("cmpl-1", "token", "decode-0/5eed", 2, 1, RUNS),
    "release": Release("cmpl-1", "token", "decode-0/5eed"),
}
REPLIES: dict[str, Reply] = {
    "welcome": Welcome(MANIFEST, incarnation="c0ffee"),
    "granted": Granted("cmpl-1", ((3, 4, 70000), (), (7,)), 40, 29.5, incarnation="c0ffee"),
    "renewed": Renewed("cmpl-1", 30.0, incarnation="c0ffee"),
    "verified": Verified("cmpl-1", 2, 2**64 - 59, incarnation="c0ffee"),
    "released": Released("cmpl-1", incarnation="c0ffee"),
    "refused": Refused("cmpl-1", RefusalReason.NOT_SEALED, "a step is in flight", 0.02, incarnation="c0ffee"),
    "refused_for_good": Refused("", RefusalReason.MALFORMED, "no request", incarnation="c0ffee"),
}


def tree(message: Request | Reply) -> dict[str, object]:
    return msgspec.msgpack.decode(encode(message), type=dict[str, object])


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize("name", REQUESTS)
def test_golden_requests_both_ways(name: str) -> None:
    assert encode(REQUESTS[name]) == golden(name)
    assert decode_request(golden(name)) == REQUESTS[name]


@pytest.mark.parametrize("name", REPLIES)
def test_golden_replies_both_ways(name: str) -> None:
    assert encode(REPLIES[name]) == golden(name)
    assert decode_reply(golden(name)) == REPLIES[name]


def test_every_golden_file_is_tested() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {"manifest", *REQUESTS, *REPLIES}


def test_unknown_fields_are_ignored_and_defaults_filled_in() -> None:
    assert decode_request(pack(tree(REQUESTS["acquire"]) | {"priority": [1, 2]})) == REQUESTS["acquire"]
    without = tree(REPLIES["refused_for_good"])
    del without["retry_after_s"]
    assert decode_reply(pack(without | {"new": None})) == REPLIES["refused_for_good"]


def test_a_reason_of_a_newer_peer_is_still_a_refusal() -> None:
    reply = decode_reply(pack(tree(REPLIES["refused"]) | {"reason": "a reason of tomorrow"}))
    assert isinstance(reply, Refused)
    assert reply.reason is RefusalReason.OTHER


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("hello", {"protocol_version": -1}, ">= 0"),
        ("hello", {"protocol_version": "1"}, "Expected `int`, got `str`"),
        ("hello", {"type": "goodbye"}, "goodbye"),
        ("hello", {"type": "x" * 5000}, "xxx\\.\\.\\."),
        ("acquire", {"request_id": ""}, "length >= 1"),
        ("acquire", {"request_id": "x" * 513}, "length <= 512"),
        ("acquire", {"token": "x" * 129}, "length <= 128"),
        ("acquire", {"token": None}, "Expected `str`, got"),
        ("acquire", {"holder": b"x"}, "Expected `str`, got `bytes`"),
        ("verify", {"rank": -1}, ">= 0"),
        ("verify", {"runs": None}, r"at `\$.runs`"),
        ("verify", {"runs": {"word_bytes": 8, "offsets": bytes(8), "num_bytes": bytes(8)}}, "words of 1, 2 or 4 bytes"),
        ("verify", {"runs": {"word_bytes": 4, "offsets": bytes(9), "num_bytes": bytes(9)}}, "offsets of 8 bytes"),
        ("verify", {"runs": {"word_bytes": 4, "offsets": bytes(8), "num_bytes": b""}}, "1 lengths of 8 bytes"),
        ("renew", {"pad": "x" * MAX_REQUEST_BYTES}, f"at most {MAX_REQUEST_BYTES} bytes"),
    ],
)
def test_bad_requests(name: str, change: dict[str, object], expected: str) -> None:
    with pytest.raises(WireError, match=expected) as caught:
        decode_request(pack(tree(REQUESTS[name]) | change))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("granted", {"block_ids": [[-1]]}, ">= 0"),
        ("granted", {"block_ids": [[2**31]]}, "<= 2147483647"),
        ("granted", {"block_ids": [[1.5]]}, r"Expected `int \| null`"),
        ("granted", {"block_ids": [[]] * 257}, "length <= 256"),
        ("granted", {"num_tokens": 2**31}, "<= 2147483647"),
        ("granted", {"promise_s": -1.0}, ">= 0"),
        ("granted", {"promise_s": float("nan")}, ">= 0"),
        ("granted", {"promise_s": float("inf")}, "<= 1000000000"),
        ("renewed", {"incarnation": ""}, "length >= 1"),
        ("verified", {"digest": -1}, ">= 0"),
        ("verified", {"digest": 1.5}, "Expected `int`"),
        ("refused", {"detail": "x" * 2049}, "length <= 2048"),
        ("refused", {"retry_after_s": -0.1}, ">= 0"),
        ("welcome", {"incarnation": "another"}, "sends the manifest of"),
    ],
)
def test_bad_replies(name: str, change: dict[str, object], expected: str) -> None:
    with pytest.raises(WireError, match=expected):
        decode_reply(pack(tree(REPLIES[name]) | change))


def test_a_bad_core_value_inside_a_reply_is_a_wire_error() -> None:
    welcome = msgspec.msgpack.decode(golden("welcome"))
    welcome["manifest"]["ranks"][0]["layout"]["layers"][0]["page_stride"] = 0
    with pytest.raises(WireError, match="page_stride > 0"):
        decode_reply(pack(welcome))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xff" * 100,
        pack(None),
        pack([1, 2]),
        pack({}),
        golden("hello")[:-1],
        golden("hello") + b"\x00",
        golden("granted"),  # a reply is no request
        b"\x82\xa1z\xdd\xff\xff\xff\xff",  # claims 2**32 elements
        b"\x82\xa1z" + b"\x91" * 60_000,  # nested 60,000 deep
        golden("acquire").replace(b"token", b"tok\xff\xff", 1),
        golden("acquire").replace(b"\xa5token\xa5token", b"\xa5token\xa5t\xffken"),
    ],
    ids=lambda payload: f"{len(payload)} bytes",
)
def test_rubbish_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError, match="expected a request"):
        decode_request(payload)


def test_mutated_messages_decode_or_raise_wire_errors() -> None:
    dice = random.Random(7)
    for _ in range(3000):
        name = dice.choice([*REQUESTS, *REPLIES])
        payload = bytearray(golden(name))
        for _ in range(dice.randint(1, 4)):
            payload[dice.randrange(len(payload))] = dice.randrange(256)
        for decode in (decode_request, decode_reply):
            with suppress(WireError):  # anything else fails the test
                decode(bytes(payload))


def test_the_longest_run_list_fits_into_a_request() -> None:
    runs = RunList(4, b"\xff" * 8 * MAX_RUNS, b"\xff" * 8 * MAX_RUNS)
    verify = Verify("\U0001f642" * 512, "\U0001f642" * 128, "\U0001f642" * 512, 2**31 - 1, 2**31 - 1, runs)
    assert decode_request(encode(verify)) == verify


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(WireError, match="Acquire cannot be encoded"):
        encode(Acquire("\ud800", "t", "h"))
    with pytest.raises(WireError, match=f"at most {MAX_REQUEST_BYTES} bytes, Acquire has"):
        encode(Acquire("x" * MAX_REQUEST_BYTES, "t", "h"))
    with pytest.raises(WireError, match="Granted cannot be encoded"):
        encode(Granted("r", ((2**64,),), 1, 1.0, incarnation="i"))
