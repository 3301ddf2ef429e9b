"""Which engines refuse each other, and what do they say? Each pair over the real side channel, on loopback.

P is the real producer behind a real server, D the real consumer and client. After each refusal the same D gets a grant
from a healthy peer, and the refused P gives one to a D of its own kind: one bad pair costs nobody else anything.
"""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybrid_connector.core.blocks import RankLayout
from hybrid_connector.core.families import ElementType, TokenPage, latent_attention
from hybrid_connector.core.planning import plan_engine
from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.consumer import Consumer, Held, Lost, Pending, RemoteRequest, Status
from hybrid_connector.engine.producer import Producer
from hybrid_connector.wire.manifest import EngineManifest
from hybrid_connector.wire.messages import Hello, Reply, Request, encode
from hybrid_connector.wire.side_channel import SideChannelClient, SideChannelServer

from fakes import engine_manifest
from layouts import Model, Storage, build_engine, edited, place
from oracle import differences, execute, expected, prefilled

PATIENCE_S = 20.0  # never waited in full
BLOCKS = ((3, 4), (7,))
NUM_TOKENS = 8

MODEL = Model(2, num_kv_heads=2, content=4, num_recurrent=1, family="mamba2", num_heads=4, num_groups=2)
KV, TEMPORAL = "layers.0.attn.kv", "layers.0.mamba2.temporal"
PLAIN = build_engine(MODEL, Storage())
TP2 = build_engine(MODEL, Storage(num_ranks=2))

FACTS = {
    "architecture": "HybridForCausalLM",
    "model config": "5eed",
    "weights": "c0ffee",
    "computation dtype": "bfloat16",
    "device": "cuda",
    "K/V quantisation": "NONE",
    "speculative decoding": "off",
}

Layouts = tuple[RankLayout, ...]


class Forged(msgspec.Struct):
    """A manifest that nothing has checked: ``EngineManifest``'s fields, whatever stands in them."""

    protocol_version: Any
    engine_id: Any
    incarnation: Any
    tp_size: Any
    factors: Any
    vllm_version: Any
    connector_version: Any
    lease_s: Any
    ranks: Any


@dataclass(frozen=True, slots=True)
class Pair:
    """``p`` and ``d`` publish these; ``reason`` follows what the consumer says of where it happened.

    ``names``: the engine that the request names. ``speaks``: the protocol version that D says. ``has_kind``: whether
    any D at all could read from this P.
    """

    name: str
    p: EngineManifest | Forged
    d: EngineManifest
    reason: str
    where: str = "engine at {at} cannot exchange state with this one: "
    names: str = "prefill-0"
    speaks: int | None = None
    has_kind: bool = True


def published(layouts: Layouts, engine_id: str, **changes: str | None) -> EngineManifest:
    """A manifest whose facts are the usual ones, with ``changes``; ``None`` leaves a fact out."""
    facts = {name: value for name, value in (FACTS | changes).items() if value is not None}
    return engine_manifest(layouts, engine_id, "first", **facts)


def geometry(name: str, p: Layouts, d: Layouts, reason: str) -> Pair:
    return Pair(name, published(p, "prefill-0"), published(d, "decode-0"), reason)


def models(name: str, reason: str, p: dict[str, Any] | None = None, **d: Any) -> Pair:
    """Two models that differ from ``MODEL`` as said."""
    p_model, d_model = dataclasses.replace(MODEL, **(p or {})), dataclasses.replace(MODEL, **d)
    return geometry(name, build_engine(p_model, Storage()), build_engine(d_model, Storage()), reason)


def with_element(layouts: Layouts, tensor: str, element: ElementType) -> Layouts:
    return tuple(edited(layout, tensor, dtype=element.name, item_bytes=element.num_bytes) for layout in layouts)


def element(name: str, tensor: str, p: ElementType, d: ElementType) -> Pair:
    return geometry(
        name,
        with_element(PLAIN, tensor, p),
        with_element(PLAIN, tensor, d),
        f"{tensor}: element type is {p.name} on P, {d.name} on D",
    )


def fact(name: str, p: str | None, d: str | None) -> Pair:
    said = f"{name}: {p or 'not stated'} on P, {d or 'not stated'} on D"
    return Pair(
        f"{name}, {p} to {d}",
        published(PLAIN, "prefill-0", **{name: p}),
        published(PLAIN, "decode-0", **{name: d}),
        said,
    )


def as_sent(value: Any) -> Any:
    """Dicts and lists, as a message has them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def forged(name: str, problem: str, **changes: Any) -> Pair:
    """P's answer does not decode; ``changes`` to its manifest as it is sent."""
    tree = as_sent(published(PLAIN, "prefill-0")) | changes
    reason = (
        "expected a reply (welcome, granted, renewed, verified, released, refused), got {num_bytes} bytes: " + problem
    )
    return Pair(name, Forged(**tree), published(PLAIN, "decode-0"), reason, where="handshake with {at} failed: {at}: ")


def mla(latent: int, name: str = "layers.0.attn") -> Layouts:
    """``PLAIN`` with MLA in its first attention layer."""
    (rank,) = PLAIN
    page = TokenPage(16, (16 * 2 * latent, 2 * latent, 2))
    shards = latent_attention(latent=latent, element=ElementType("bfloat16", 2)).shards(name, page, rank=0, num_ranks=1)
    return (
        dataclasses.replace(
            rank,
            layers=tuple(
                dataclasses.replace(layer, shards=shards) if layer.name == name else layer for layer in rank.layers
            ),
        ),
    )


def renamed(layouts: Layouts, tensor: str, name: str) -> Layouts:
    return tuple(edited(layout, tensor, name=name) for layout in layouts)


def unsplittable() -> Layouts:
    """Six heads on four ranks that hold one each, as an engine might that forgot the other two."""
    four = build_engine(dataclasses.replace(MODEL, num_kv_heads=4), Storage(num_ranks=4))
    layouts = four
    for layer in range(MODEL.num_attention):
        layouts = tuple(edited(layout, f"layers.{layer}.attn.kv", shape=(6, None, 4)) for layout in layouts)
    return layouts


def other_transport() -> EngineManifest:
    manifest = published(PLAIN, "prefill-0")
    ranks = tuple(msgspec.structs.replace(rank, transport="nixl") for rank in manifest.ranks)
    return msgspec.structs.replace(manifest, ranks=ranks)


def rank_with(**layout: Any) -> list[Any]:
    """``PLAIN``'s rank as it is sent, with changes to its layout."""
    (rank,) = as_sent(published(PLAIN, "prefill-0").ranks)
    return [rank | {"layout": rank["layout"] | layout}]


BF16, FP16, FP32 = ElementType("bfloat16", 2), ElementType("float16", 2), ElementType("float32", 4)
FP8, FP8_E5M2 = ElementType("float8_e4m3fn", 1), ElementType("float8_e5m2", 1)
MIXED_PAGES = (TP2[0], build_engine(MODEL, Storage(num_ranks=2, page_tokens=32))[1])
WRONG_CONV = "layers.0.mamba2.conv."

PAIRS = [
    # The same layers, another shape.
    models("KV heads", f"{KV}: shape is (4, None, 4) on P, (2, None, 4) on D", {"num_kv_heads": 4}),
    models("KV heads, fewer on P", f"{KV}: shape is (1, None, 4) on P, (2, None, 4) on D", {"num_kv_heads": 1}),
    models("head size", f"{KV}: shape is (2, None, 8) on P, (2, None, 4) on D", {"content": 8}),
    models("B and C groups", f"{WRONG_CONV}B: shape is (3, 3) on P, (6, 3) on D", {"num_groups": 1}),
    models("state dimension", f"{WRONG_CONV}B: shape is (8, 3) on P, (6, 3) on D", {"state_dim": 4}),
    models("recurrent heads", f"{WRONG_CONV}x: shape is (16, 3) on P, (8, 3) on D", {"num_heads": 8}),
    models("head dimension", f"{WRONG_CONV}x: shape is (16, 3) on P, (8, 3) on D", {"head_dim": 4}),
    models("speculative taps on P", f"{WRONG_CONV}x: shape is (8, 5) on P, (8, 3) on D", {"num_taps": 5}),
    models("speculative taps on D", f"{WRONG_CONV}x: shape is (8, 3) on P, (8, 5) on D", num_taps=5),
    models(
        "key heads",
        "layers.0.gdn.conv.q: shape is (3, 3) on P, (6, 3) on D",
        {"family": "gdn", "num_groups": 1},
        family="gdn",
    ),
    models(
        "channels of Mamba1",
        "layers.0.mamba1.conv.x: shape is (16, 3) on P, (8, 3) on D",
        {"family": "mamba1", "num_heads": 8},
        family="mamba1",
    ),
    models(
        "width of a short convolution",
        "layers.0.short_conv.conv.x: shape is (16, 3) on P, (8, 3) on D",
        {"family": "short_conv", "num_heads": 8},
        family="short_conv",
    ),
    geometry("MLA to attention", mla(6), PLAIN, f"{KV}: shape is (1, None, 6) on P, (2, None, 4) on D"),
    geometry("attention to MLA", PLAIN, mla(6), f"{KV}: shape is (2, None, 4) on P, (1, None, 6) on D"),
    geometry("latent size", mla(6), mla(5), f"{KV}: shape is (1, None, 6) on P, (1, None, 5) on D"),
    # Other element types.
    element("K/V bf16 to fp16", KV, BF16, FP16),
    element("K/V fp8 to bf16", KV, FP8, BF16),
    element("K/V bf16 to fp8", KV, BF16, FP8),
    element("K/V in two kinds of fp8", KV, FP8, FP8_E5M2),
    element("temporal fp32 to bf16", TEMPORAL, FP32, BF16),
    element("temporal bf16 to fp32", TEMPORAL, BF16, FP32),
    element("conv bf16 to fp16", f"{WRONG_CONV}B", BF16, FP16),
    geometry(
        "one name, two sizes",
        with_element(PLAIN, KV, ElementType("bfloat16", 1)),
        PLAIN,
        f"{KV}: bytes per element is 1 on P, 2 on D",
    ),
    geometry(
        "one shape, other axes",
        tuple(edited(layout, TEMPORAL, axes=("dim", "head", "state")) for layout in PLAIN),
        PLAIN,
        f"{TEMPORAL}: axes is ('dim', 'head', 'state') on P, ('head', 'dim', 'state') on D",
    ),
    element(
        "pages in the kernel's own order",
        KV,
        ElementType("bfloat16 in CPU pages of 288 tokens", 2),
        ElementType("bfloat16 in CPU pages of 384 tokens", 2),
    ),
    element("a page of a CPU to one of a GPU", KV, ElementType("bfloat16 in CPU pages of 16 tokens", 2), BF16),
    # Other layers.
    models("a layer missing on P", "layers.1.attn.kv: D needs it, no rank of P holds it", {"num_attention": 1}),
    models("a layer missing on D", "layers.1.attn.kv: P rank 0 holds it, no rank of D does", num_attention=1),
    models(
        "more recurrent layers on P",
        "layers.1.mamba2.conv.x: P rank 0 holds it, no rank of D does",
        {"num_recurrent": 2},
    ),
    models("no recurrent layer on P", f"{WRONG_CONV}x: D needs it, no rank of P holds it", {"num_recurrent": 0}),
    models("no attention layer on D", f"{KV}: P rank 0 holds it, no rank of D does", num_attention=0),
    models("another family", f"{WRONG_CONV}x: D needs it, no rank of P holds it", {"family": "gdn"}),
    geometry(
        "a renamed layer",
        renamed(PLAIN, KV, "model.layers.0.attn.kv"),
        PLAIN,
        f"{KV}: D needs it, no rank of P holds it",
    ),
    geometry(
        "an MTP layer on P alone",
        renamed(build_engine(dataclasses.replace(MODEL, num_attention=3), Storage()), "layers.2.attn.kv", "mtp.0.kv"),
        PLAIN,
        "mtp.0.kv: P rank 0 holds it, no rank of D does",
    ),
    # Ranks that do not hold all of it.
    geometry(
        "half of P's ranks",
        TP2[:1],
        PLAIN,
        f"{KV} (H, N, C): P's ranks hold [0, 1) x [0, 16) x [0, 4), D needs [1, 2) x [0, 16) x [0, 4)",
    ),
    geometry(
        "heads that no rank took",
        unsplittable(),
        build_engine(dataclasses.replace(MODEL, num_kv_heads=6), Storage()),
        f"{KV} (H, N, C): P's ranks hold [0, 1) x [0, 16) x [0, 4); [1, 2) x [0, 16) x [0, 4); "
        "[2, 3) x [0, 16) x [0, 4); [3, 4) x [0, 16) x [0, 4), D needs [4, 6) x [0, 16) x [0, 4)",
    ),
    Pair(
        "page lengths that differ among P's ranks",
        published(MIXED_PAGES, "prefill-0"),
        published(PLAIN, "decode-0"),
        f"{KV}: P's ranks store pages of different lengths: 16, 32 tokens",
        has_kind=False,
    ),
    geometry(
        "page lengths that hardly ever meet",
        build_engine(MODEL, Storage(page_tokens=1025)),
        PLAIN,
        f"{KV}: pages of 1025 tokens on P, 16 on D repeat after 1025 pages, expected at most 1024",
    ),
    # Other facts.
    fact("architecture", "Qwen3NextForCausalLM", "HybridForCausalLM"),
    fact("model config", "5eed", "5eee"),
    fact("weights", "revision 1", "revision 2"),
    fact("computation dtype", "float16", "bfloat16"),
    fact("device", "cpu", "cuda"),
    fact("K/V quantisation", "FP8_PER_TENSOR", "NONE"),
    fact("speculative decoding", "off", "mtp, 1 tokens"),
    fact("speculative decoding", "mtp, 1 tokens", "off"),
    fact("weights", None, "c0ffee"),
    fact("weights", "c0ffee", None),
    Pair(
        "several facts at once",
        published(PLAIN, "prefill-0", device="cpu", weights="revision 1"),
        published(PLAIN, "decode-0"),
        "device: cpu on P, cuda on D; weights: revision 1 on P, c0ffee on D",
    ),
    # Other means.
    Pair(
        "transport",
        other_transport(),
        published(PLAIN, "decode-0"),
        "transport: nixl on P, memory on D",
    ),
    Pair(
        "protocol version",
        published(PLAIN, "prefill-0"),
        published(PLAIN, "decode-0"),
        "unsupported_protocol: P speaks version 1, D speaks 2: install the same release on both",
        where="handshake refused by {at}: ",
        speaks=2,
    ),
    Pair(
        "engine id",
        published(PLAIN, "prefill-1"),
        published(PLAIN, "decode-0"),
        "is engine prefill-1, the request names engine prefill-0",
        where="{at} ",
    ),
    # Manifests that are none.
    forged(
        "a rank missing",
        "prefill-0: expected ranks 0, 1, ... in order, got [1] - at `$.manifest`",
        ranks=as_sent(published(TP2, "prefill-0").ranks[1:]),
    ),
    forged(
        "half a pipeline stage",
        "prefill-0: expected whole pipeline stages, got 1 ranks, tp_size 2 - at `$.manifest`",
        tp_size=2,
    ),
    forged("no ranks", "Expected `array` of length >= 1 - at `$.manifest.ranks`", ranks=[]),
    forged(
        "layers that are no list",
        "Expected `array`, got `str` - at `$.manifest.ranks[0].layout.layers`",
        ranks=rank_with(layers="\xff\x00"),
    ),
    forged(
        "pages outside their region",
        f"{KV}: the last page ends at byte 1032, the region has 100 - at `$.manifest.ranks[0].layout`",
        ranks=rank_with(region_bytes=100),
    ),
    forged(
        "facts that are numbers",
        "Expected `str`, got `int` - at `$.manifest.factors.items[0][1]`",
        factors={"items": [["weights", 7]]},
    ),
    forged("facts that are a list", "Expected `object`, got `array` - at `$.manifest.factors`", factors=[]),
]


class Speaking:
    """A side channel that says hello in another version of the protocol."""

    def __init__(self, client: SideChannelClient, version: int) -> None:
        self._client, self._version = client, version

    def call(self, address: tuple[str, int], request: Request, timeout_s: float) -> "Future[Reply]":
        return self._client.call(address, Hello(self._version) if isinstance(request, Hello) else request, timeout_s)


@pytest.fixture(scope="module")
def client() -> Iterator[SideChannelClient]:
    with SideChannelClient(security=None) as running:
        yield running


def start_producer(manifest: EngineManifest | Forged) -> Producer:
    """A P engine with one finished request."""
    producer = Producer(30.0, "first")
    producer.publish(manifest)  # type: ignore[arg-type]  # forged ones too
    producer.open("cmpl-1", "token", BLOCKS, NUM_TOKENS, 0)
    producer.seal(0)
    return producer


def serve(producer: Producer) -> SideChannelServer:
    return SideChannelServer("127.0.0.1", 0, producer.answer, incarnation="first", security=None)


def start_consumer(client: SideChannelClient | Speaking, manifest: EngineManifest) -> Consumer:
    consumer = Consumer(client, ConnectorConfig())
    consumer.publish(manifest)
    return consumer


def outcome(consumer: Consumer, request_id: str, engine_id: str, server: SideChannelServer) -> Status:
    """What becomes of a request that names the lease of ``engine_id`` at ``server``."""
    consumer.acquire(request_id, RemoteRequest(engine_id, "cmpl-1", "token", ("127.0.0.1", server.port)))
    deadline = time.monotonic() + PATIENCE_S
    while isinstance(status := consumer.status(request_id), Pending) and time.monotonic() < deadline:
        consumer.wait_answer(deadline - time.monotonic())
    return status


def assert_granted(consumer: Consumer, request_id: str, manifest: EngineManifest, server: SideChannelServer) -> None:
    assert outcome(consumer, request_id, manifest.engine_id, server) == Held(manifest, BLOCKS, NUM_TOKENS)


@pytest.mark.parametrize("pair", [pytest.param(pair, id=pair.name) for pair in PAIRS])
def test_refused_with_the_reason_and_nobody_else_suffers(pair: Pair, client: SideChannelClient) -> None:
    refusing = start_producer(pair.p)
    healthy = msgspec.structs.replace(pair.d, engine_id="healthy")
    consumer = start_consumer(client, pair.d)
    with serve(refusing) as server, serve(start_producer(healthy)) as other:
        asker = consumer if pair.speaks is None else start_consumer(Speaking(client, pair.speaks), pair.d)
        reason = (pair.where + pair.reason).format(
            at=f"127.0.0.1:{server.port}", num_bytes=len(encode(refusing.answer(Hello(1))))
        )
        assert outcome(asker, "refused", pair.names, server) == Lost(reason)
        assert asker.counts["grants"] == 0
        assert_granted(consumer, "healthy", healthy, other)
        if isinstance(pair.p, EngineManifest) and pair.has_kind:
            own_kind = msgspec.structs.replace(pair.p, engine_id="decode-1")
            assert_granted(start_consumer(client, own_kind), "own", pair.p, server)
        for running in (server, other):
            wrong = ("malformed", "ignored", "answer_failed", "reply_dropped", "faults")
            assert {name: count for name, count in running.stats.items() if name in wrong and count} == {}
    assert client.stats["faults"] == 0


def test_there_are_many_pairs_and_each_is_another() -> None:
    assert len(PAIRS) >= 25
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    assert len(
        {(msgspec.msgpack.encode(pair.p), msgspec.msgpack.encode(pair.d), pair.speaks, pair.names) for pair in PAIRS}
    ) == len(PAIRS)


# Two releases of vLLM. What they publish is recorded by integration/test_layout_of_vllm.py.

MANIFESTS = Path(__file__).parent / "golden" / "manifests"
RELEASES = ("0.32.0", "0.33.0")
ENGINES = [f"vllm-{release}-tp{tp}" for release in RELEASES for tp in (1, 2)]


@cache
def recorded(name: str) -> EngineManifest:
    return msgspec.json.decode((MANIFESTS / f"{name}.json").read_bytes(), type=EngineManifest)


@pytest.mark.parametrize("d", ENGINES)
@pytest.mark.parametrize("p", ENGINES)
def test_releases_of_vllm_whose_geometry_agrees_exchange_state(p: str, d: str, client: SideChannelClient) -> None:
    prefill, decode = recorded(p), recorded(d)
    with serve(start_producer(msgspec.structs.replace(prefill, incarnation="first"))) as server:
        granted = outcome(start_consumer(client, decode), "r", prefill.engine_id, server)
        assert isinstance(granted, Held)
        assert (granted.manifest.vllm_version, granted.manifest.ranks) == (prefill.vllm_version, prefill.ranks)
    srcs, dsts = ([rank.layout for rank in manifest.ranks] for manifest in (prefill, decode))
    request = place(srcs, dsts, num_tokens=70)
    regions = [prefilled(src, request) for src in srcs]
    for plan, dst in zip(plan_engine(dsts, srcs), dsts, strict=True):
        assert differences(execute(plan, dst, srcs, request, regions), expected(dst, srcs, request)) == []


def test_the_recorded_releases_are_different_ones() -> None:
    assert [recorded(name).vllm_version.split("+")[0] for name in ENGINES] == ["0.32.0"] * 2 + ["0.33.0"] * 2
