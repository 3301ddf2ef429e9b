"""What does the connector do in the scheduler's process?

P: stop a prompt before the token that D computes, lease a finished request's blocks, seal leases as steps complete,
give blocks back when leases end.
D: acquire a lease when a request arrives, order its load once blocks are allocated, and believe in the end of a load
only if the grant was valid until then and, where the request is verified, P's digests agree.

Attributes read of vLLM's ``Request``: request_id, kv_transfer_params, prompt_token_ids, prompt_embeds,
num_prompt_tokens, num_computed_tokens, num_in_flight_tokens, max_tokens, status, _all_token_ids,
get_skip_reading_prefix_cache.
"""

import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from hybrid_connector import __version__
from hybrid_connector.core.blocks import BlockIds
from hybrid_connector.core.errors import ConfigError, HybridConnectorError
from hybrid_connector.engine.config import ConnectorConfig
from hybrid_connector.engine.consumer import Address, Consumer, Held, Lost, Pending, RemoteRequest, Status
from hybrid_connector.engine.exchange import CaptureOrder, LoadOrder, LoadRecord, ReadDigest, StepOrders, StepReport
from hybrid_connector.engine.layout import overwrites_state, state_block_ids
from hybrid_connector.engine.metrics import MAX_PEERS, HybridConnectorStats
from hybrid_connector.engine.model_identity import model_factors
from hybrid_connector.engine.producer import Producer
from hybrid_connector.engine.published import METRICS, Failure
from hybrid_connector.engine.verification import Reference, Verifications
from hybrid_connector.wire.manifest import EngineManifest, Factors, RankManifest
from hybrid_connector.wire.messages import PROTOCOL_VERSION
from hybrid_connector.wire.side_channel import Security, SideChannelClient, SideChannelServer, load_secret

logger = logging.getLogger(__name__)

PUBLISHED = frozenset(metric.stat for metric in METRICS)
"""What this process counts and publishes."""

_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"

SWITCH_INTERVAL_S = 5e-5
"""For how long the engine's thread may keep Python's interpreter from those that ask and answer peers.

A thread that waits for the interpreter gets it when its holder keeps it for that long. With Python's own 5 ms a loop
that lets go of it more often, if only for a moment, as engines do, was seen to hold up an answer for more than a
second; ``integration/benchmarks/answers.py`` measures it.
"""

GIVE_WAY_S = 1e-4
"""How long a step that meets a pending grant gives way to the threads that bring it, once."""

GRANT_WAIT_S = 1e-3
"""How long a step waits for the grants of requests that came with it and have their blocks: in the next step, tens of
milliseconds later where others decode, they are late."""

IDLE_GRANT_WAIT_S = 5e-3
"""The same where the step before computed nothing, so that nobody decodes."""

IDLE_VERDICT_WAIT_S = 1e-3
"""How long such a step waits for P's digests. A loop that only looks again keeps the interpreter lock from the thread
that brings them: half a second was seen."""

SAMPLE_ONE_IN = 16
"""Of how many requests one is verified with ``verify: sample``."""


@dataclass(slots=True)
class _Fetch:
    """A D request's state that comes from a peer.

    ``reason``: why it must fail, where that is decided. ``ordered``: it has blocks; the end is the workers' to report.
    ``verify``: P must confirm the ``digests`` of what the ranks have read.
    """

    num_tokens: int
    remote: RemoteRequest | None = None
    reason: str | None = None
    failure: Failure = Failure.TRANSFER
    loaded: list[LoadRecord] = field(default_factory=list)
    ordered: bool = False
    verify: bool = False
    digests: list[ReadDigest] = field(default_factory=list)


class Scheduler:
    """The connector's half in the scheduler's process."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._engine_id = transfer.engine_id
        self._is_producer = transfer.is_kv_producer
        self._is_consumer = transfer.is_kv_consumer
        self._overwrites = overwrites_state(kv_cache_config)
        self._incarnation = secrets.token_hex(8)
        self._host = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        self._port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index

        self._producer = Producer(config.lease_s, self._incarnation)
        self._security = _security()
        self._server: SideChannelServer | None = None
        self._client = SideChannelClient(security=self._security) if self._is_consumer else None
        self._consumer = Consumer(self._client, config) if self._client is not None else None

        self._verifications = (
            Verifications(self._client, config.handshake_timeout_s) if self._client is not None else None
        )

        self._step = -1
        self._waited_step = -2
        self._was_idle = True
        self._cut: set[str] = set()
        self._fetches: dict[str, _Fetch] = {}
        self._allocated: dict[str, tuple[BlockIds, int]] = {}
        self._overdue: set[str] = set()
        self._loads: list[LoadOrder] = []
        self._failures: dict[str, str] = {}
        self._passed: list[str] = []
        self._refuted: dict[str, str] = {}
        self._captures: list[CaptureOrder] = []
        self._peers: dict[Address, tuple[str, str]] = {}
        self._new_manifests: list[EngineManifest] = []
        self._gone: list[tuple[str, str]] = []
        self._stats = HybridConnectorStats()
        self._counted: Counter[str] = Counter()
        self._num_leases = 0
        self._labels: dict[Address, str] = {}

    def publish(self, ranks: Mapping[tuple[int, int], RankManifest]) -> None:
        """All workers have registered their caches, by (pipeline, tensor) rank: start to serve and to ask."""
        manifest = EngineManifest(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            tp_size=self._vllm_config.parallel_config.tensor_parallel_size,
            factors=Factors.of(model_factors(self._vllm_config, self._kv_cache_config, self._config.model_id)),
            vllm_version=str(vllm.__version__),
            connector_version=__version__,
            lease_s=self._config.lease_s,
            ranks=tuple(ranks[key] for key in sorted(ranks)),
        )
        self._producer.publish(manifest)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        if self._server is None and (self._is_producer or _PORT_VARIABLE in os.environ):
            self._serve()
        if self._consumer is not None:
            self._consumer.publish(manifest)
            self._consumer.start()

    def _serve(self) -> None:
        """P answers D here; a D that was given a port tells who asks what it is, as far as it can."""
        server = SideChannelServer(
            self._host,
            self._port,
            self._producer.answer,
            incarnation=self._incarnation,
            security=self._security,
            allow_insecure=self._config.allow_insecure_side_channel,
        )
        try:
            server.start()
        except ConfigError as error:
            if self._is_producer:
                raise
            logger.info("engine %s does not serve its manifest: %s", self._engine_id, error)
            return
        self._server = server
        whom = "decode engines" if self._is_producer else "who asks for its manifest"
        logger.info("engine %s answers %s on %s:%d", self._engine_id, whom, self._host, self._port)

    def on_new_request(self, request: Request) -> None:
        """A request arrived: P cuts its prompt, D begins to acquire."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode") and self._is_producer:
            self._stop_before_last_token(request)
        if params.get("do_remote_prefill"):
            self._begin_fetch(request, params)

    def _stop_before_last_token(self, request: Request) -> None:
        """D computes the last prompt token itself, from the state before it: where that is overwritten, stop there.

        Not for a single token, which leaves nothing to send, nor where D will not load (prompt log-probabilities).
        """
        if not self._overwrites or request.num_prompt_tokens <= 1 or request.get_skip_reading_prefix_cache():
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-1:]
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        else:
            return
        del request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        self._cut.add(request.request_id)

    def _begin_fetch(self, request: Request, params: Mapping[str, Any]) -> None:
        num_tokens = request.num_prompt_tokens - 1 if self._overwrites else request.num_prompt_tokens
        fetch = _Fetch(num_tokens)
        self._fetches[request.request_id] = fetch
        if self._consumer is None:
            fetch.failure = Failure.BAD_REFERENCE
            fetch.reason = "this engine has kv_role kv_producer and cannot load; start decode engines as kv_consumer"
            return
        try:
            remote = RemoteRequest.from_params(params)
        except HybridConnectorError as error:
            fetch.reason, fetch.failure = str(error), Failure.BAD_REFERENCE
            return
        fetch.remote = remote
        self._consumer.acquire(request.request_id, remote)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local ones a load will bring; ``None`` while the grant is on its way."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.ordered:
            return 0, False
        num_missing = fetch.num_tokens - num_computed_tokens
        if num_missing <= 0:
            return 0, False
        if fetch.reason is None and self._consumer is not None:
            status = self._consumer.status(request.request_id)
            if isinstance(status, Pending) and self._consumer.is_prompt(request.request_id):
                return num_missing, True  # blocks can be allocated meanwhile
            if isinstance(status, Pending):
                self._give_way_once_a_step()
                return None, False
        # A request that must fail takes the same way as one that loads, so that vLLM's failure policy decides.
        return num_missing, True

    def _give_way_once_a_step(self) -> None:
        """Let the threads that bring grants run, for a moment that no step can feel."""
        if self._consumer is not None and self._waited_step != self._step:
            self._waited_step = self._step
            self._consumer.wait_answer(GIVE_WAY_S)

    def after_allocation(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are allocated: order the load, or the failure, once the grant is there."""
        request_id = request.request_id
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.ordered:
            return
        if num_external_tokens == 0:
            self._forget(request_id)
            return
        fetch.ordered = True
        block_ids = state_block_ids(self._kv_cache_config, blocks.get_block_ids(), fetch.num_tokens)
        self._allocated[request_id] = block_ids, fetch.num_tokens - num_external_tokens

    def _order_loads(self) -> None:
        """Order the loads of requests that have blocks, as far as P has answered for them."""
        if not self._allocated:
            return
        if self._consumer is not None:
            at_most_s = IDLE_GRANT_WAIT_S if self._was_idle else GRANT_WAIT_S
            self._consumer.wait_grants(self._allocated.keys() - self._overdue, at_most_s)
        for request_id, (block_ids, first_tokens) in list(self._allocated.items()):
            fetch = self._fetches[request_id]
            status = self._consumer.status(request_id) if self._consumer is not None else Lost("")
            if fetch.reason is not None or not isinstance(status, Pending):
                del self._allocated[request_id]
                self._order(request_id, fetch, status, block_ids, first_tokens)
        self._overdue = set(self._allocated)

    def _order(self, request_id: str, fetch: _Fetch, status: Status, block_ids: BlockIds, first_tokens: int) -> None:
        if fetch.reason is None and isinstance(status, Lost):
            fetch.reason, fetch.failure = status.reason, status.kind
        elif fetch.reason is None and isinstance(status, Held) and status.num_tokens != fetch.num_tokens:
            fetch.failure = Failure.BAD_REFERENCE
            fetch.reason = (
                f"P holds the state after {status.num_tokens} tokens, this prompt needs it after {fetch.num_tokens}"
            )
        if fetch.reason is not None or not isinstance(status, Held):
            self._fail(request_id, fetch.reason or "the grant was withdrawn before the load began")
            return
        assert fetch.remote is not None
        fetch.verify = self._is_verified()
        self._loads.append(
            LoadOrder(
                request_id,
                fetch.remote.request_id,
                self._introduce(fetch.remote.address, status.manifest),
                status.block_ids,
                block_ids,
                fetch.num_tokens,
                first_tokens,
                fetch.verify,
            )
        )

    def _is_verified(self) -> bool:
        """Whether the next request is verified."""
        if self._config.verify == "sample":
            return secrets.randbelow(SAMPLE_ONE_IN) == 0
        return self._config.verify == "all"

    def _introduce(self, address: Address, manifest: EngineManifest) -> tuple[str, str]:
        """Let the workers know the engine at ``address``, once; what was there before is gone."""
        peer = (manifest.engine_id, manifest.incarnation)
        known = self._peers.get(address)
        if known != peer:
            self._peers[address] = peer
            self._new_manifests.append(manifest)
            if known is not None and known not in self._peers.values():
                self._gone.append(known)
        return peer

    def build_orders(self, *, is_idle: bool) -> StepOrders:
        """What the workers do in the next step; ``is_idle``: it computes nothing."""
        self._step += 1
        self._order_loads()
        self._decide_verified()
        self._was_idle = is_idle
        orders = StepOrders(
            self._step,
            tuple(self._new_manifests),
            tuple(self._loads),
            self._failures,
            tuple(self._producer.take_ended()),
            tuple(self._captures),
            tuple(self._gone),
            is_idle,
            tuple(self._passed),
            self._refuted,
            self._producer.take_digest_orders(),
        )
        self._passed, self._refuted = [], {}
        self._new_manifests, self._loads, self._failures, self._captures, self._gone = [], [], {}, [], []
        return orders

    def _decide_verified(self) -> None:
        """Let the workers report the requests whose bytes P has confirmed, or could not."""
        if self._was_idle and self._verifications is not None:
            self._verifications.wait_answer(IDLE_VERDICT_WAIT_S)
        for verdict in self._verifications.poll() if self._verifications is not None else ():
            if verdict.reason is None:
                self._passed.append(verdict.request_id)
            else:
                self._refuted[verdict.request_id] = verdict.reason
                if fetch := self._fetches.get(verdict.request_id):
                    fetch.failure = Failure.VERIFICATION

    def take_reports(self, output: KVConnectorOutput) -> None:
        """The workers' reports of a step. Removes from ``output`` the loads that ended but must not count (I2)."""
        report = output.kv_connector_worker_meta
        reported = report.report if report is not None else None
        if isinstance(reported, StepReport):
            self._producer.seal(reported.completed_step)
            self._producer.note_digests(reported.digests)
            for record in reported.loads:
                self._note(record)
                if record.error is not None:
                    logger.warning("request %s, rank %d: load failed: %s", record.request_id, record.rank, record.error)
                elif record.request_id in self._fetches:
                    self._fetches[record.request_id].digests.extend(record.digests)
        for request_id in list(output.finished_recving or ()):
            fetch = self._fetches.get(request_id)
            if fetch is None:
                continue
            if request_id not in output.failed_recving and self._consumer is not None:
                status = self._consumer.status(request_id)
                if isinstance(status, Lost):
                    # vLLM would promote the request now; let the workers report it as failed with the next step.
                    assert output.finished_recving is not None
                    output.finished_recving.discard(request_id)
                    fetch.failure = status.kind
                    self._fail(request_id, status.reason)
                    continue
                if fetch.verify and isinstance(status, Held):
                    assert output.finished_recving is not None
                    output.finished_recving.discard(request_id)
                    self._verify(request_id, fetch, status.manifest.incarnation)
                    continue
            if request_id not in output.failed_recving:
                self._count_loads(request_id, fetch)
            self._forget(request_id)

    def _note(self, record: LoadRecord) -> None:
        """Count what a rank reports, under the peer it came from; a load that ended well once nothing can undo it."""
        fetch = self._fetches.get(record.request_id)
        if fetch is not None and record.error is None and record.verified is None:
            fetch.loaded.append(record)
            return
        self._stats.record(record, "", fetch.failure if fetch is not None else Failure.TRANSFER)

    def _count_loads(self, request_id: str, fetch: _Fetch) -> None:
        """The request is loaded, on all ranks and for good."""
        assert fetch.remote is not None
        peer = self._peer_label(fetch.remote.address)
        if self._consumer is not None and (margin_s := self._consumer.margin_s(request_id)) is not None:
            self._stats.observe("lease_margin_s", [margin_s])
        for record in fetch.loaded:
            self._stats.record(record, peer)
            logger.debug(
                "request %s, rank %d: loaded %d bytes from %s in %d descriptors, post %.3f ms, transfer %.3f ms",
                record.request_id,
                record.rank,
                record.num_bytes,
                peer,
                record.num_descriptors,
                record.post_s * 1e3,
                record.transfer_s * 1e3,
            )

    def _peer_label(self, address: Address) -> str:
        if address not in self._labels and len(self._labels) >= MAX_PEERS:
            return "other"
        return self._labels.setdefault(address, f"{address[0]}:{address[1]}".replace("|", "_"))

    def take_stats(self) -> HybridConnectorStats:
        """What happened since the last call, here and on all ranks."""
        stats, self._stats = self._stats, HybridConnectorStats()
        counts = Counter({_producer_key(name): count for name, count in self._producer.counts.items()})
        if self._consumer is not None:
            counts.update({name: count for name, count in self._consumer.counts.items() if name in PUBLISHED})
            for stat, seconds in self._consumer.take_times():
                stats.observe(stat, [seconds])
        for key, more in (counts - self._counted).items():
            stats.count(key, more)
        self._counted = counts
        num_leases = self._producer.num_leases
        if num_leases != self._num_leases:
            self._num_leases = num_leases
            stats.set("leases", num_leases)
        return stats

    def _verify(self, request_id: str, fetch: _Fetch, incarnation: str) -> None:
        """Ask P whether it holds what was read; the workers report the request again once that is decided."""
        assert self._verifications is not None
        assert self._consumer is not None
        assert fetch.remote is not None
        fetch.verify = False
        reference = Reference(fetch.remote, self._consumer.holder(request_id), incarnation)
        self._verifications.start(request_id, reference, fetch.digests)

    def finish(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: D gives up what it no longer needs, P leases what D will read.

        Returns whether the blocks stay, and the parameters that lead D to them.
        """
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and not fetch.ordered:
            self._forget(request.request_id)
        elif self._allocated.pop(request.request_id, None) is not None:
            # Its blocks wait for the workers' report, as those of a load do.
            self._fail(request.request_id, "the request ended before P granted it")
        was_cut = request.request_id in self._cut
        self._cut.discard(request.request_id)
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return False, None
        if not self._is_producer:
            logger.warning(
                "request %s asks for do_remote_decode, but kv_role is kv_consumer: nothing is kept for it",
                request.request_id,
            )
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return False, None
        return self._open_lease(request, block_ids, was_cut)

    def _open_lease(
        self, request: Request, block_ids: tuple[list[int], ...], was_cut: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        nothing = {"do_remote_prefill": False, "do_remote_decode": False, "remote_engine_id": self._engine_id}
        num_tokens = request.num_prompt_tokens
        if self._overwrites and (not was_cut or request.num_computed_tokens != num_tokens):
            # A single-token prompt, or prompt log-probabilities: D computes the prompt itself.
            return False, nothing
        if request.num_computed_tokens < num_tokens:
            return False, nothing
        ids = state_block_ids(self._kv_cache_config, block_ids, num_tokens)
        token = secrets.token_hex(16)
        seal_step = self._seal_step(request)
        if self._config.capture_dir is not None:
            self._captures.append(CaptureOrder(request.request_id, ids, num_tokens))
            seal_step = self._step + 1
        self._producer.open(request.request_id, token, ids, num_tokens, seal_step)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._host,
            "remote_port": self._port,
            "remote_lease_token": token,
            "remote_num_tokens": num_tokens,
            "tp_size": self._vllm_config.parallel_config.tensor_parallel_size,
        }

    def _seal_step(self, request: Request) -> int:
        """The step that must have completed before nothing queued can still write the request's state; -1 for none.

        A request finishes when the token of its last step has been read back, which the device computed after every
        write of that step to the state, on every rank that took part. Steps scheduled since do not write it unless
        they contain the request. A drafter writes after the token, so with one every step in flight is waited for.
        """
        if request.num_in_flight_tokens or self._vllm_config.speculative_config is not None:
            return self._step
        return -1

    def reset_cache(self) -> None:
        """The engine's cache is reset, perhaps for other weights: what it computed before is granted to nobody now.

        Blocks that nobody holds go back with the next step, the others when their holder lets go of them; until then
        vLLM finds blocks in use, and its own reset has to be repeated.
        """
        self._producer.withdraw_all()

    def close(self) -> None:
        """Stop serving and asking; leases end with the engine."""
        if self._server is not None:
            self._server.close()
        self._producer.expire_all()
        if self._consumer is not None:
            self._consumer.close()
        if self._client is not None:
            self._client.close()

    def _fail(self, request_id: str, reason: str) -> None:
        self._failures[request_id] = reason

    def _forget(self, request_id: str) -> None:
        self._fetches.pop(request_id, None)
        if self._consumer is not None:
            self._consumer.release(request_id)


def _producer_key(count: str) -> str:
    """Where a count of P belongs among the published ones: its reason is a label there."""
    return count.replace("refused_", "refused|", 1).replace("leases_", "leases_ended|", 1)


def _security() -> Security | None:
    secret = load_secret(os.environ)
    return None if secret is None else Security.from_secret(secret)
