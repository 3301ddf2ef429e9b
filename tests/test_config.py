"""What may an operator write into ``kv_connector_extra_config``, and what is said about the rest?"""

import math

import pytest

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.engine.config import ConnectorConfig, decode_config
from hybrid_connector.transport.cost import DEFAULTS, Cost

from refusals import refused

KNOWN = ", ".join(ConnectorConfig.__struct_fields__)


def test_defaults() -> None:
    config = decode_config({})
    assert config == ConnectorConfig()
    assert (config.lease_s, config.handshake_timeout_s, config.acquire_timeout_s) == (30.0, 5.0, 20.0)
    assert (config.allow_insecure_side_channel, config.model_id, config.capture_dir) == (False, "", None)
    assert config.verify == "off"
    assert (config.staging, config.staging_bytes, config.start_cost) == ("auto", None, None)


def test_every_option_can_be_set() -> None:
    extra = {
        "lease_s": 2,
        "handshake_timeout_s": 0.5,
        "acquire_timeout_s": 86400,
        "allow_insecure_side_channel": True,
        "model_id": "revision 7",
        "verify": "sample",
        "staging": "always",
        "staging_bytes": 1 << 20,
        "cost": "rdma",
        "capture_dir": "somewhere",
    }
    config = decode_config(extra)
    assert {name: getattr(config, name) for name in extra} == extra


def test_every_option_is_explained() -> None:
    assert ConnectorConfig.__doc__ is not None
    for name in ConnectorConfig.__struct_fields__:
        assert f"    {name}: " in ConnectorConfig.__doc__


@pytest.mark.parametrize(
    ("extra", "keys"),
    [
        ({"lease_sec": 5}, "'lease_sec'"),
        ({"LEASE_S": 5, "lease_s": 5, "backends": ["UCX"]}, "'LEASE_S', 'backends'"),
        ({"": None}, "''"),
    ],
)
def test_an_unknown_key_lists_the_known_ones(extra: dict[str, object], keys: str) -> None:
    with refused(f"kv_connector_extra_config: unknown key {keys}; known keys are {KNOWN}", ConfigError):
        decode_config(extra)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("lease_s", 0, "Expected `float` > 0.0"),
        ("lease_s", -1.5, "Expected `float` > 0.0"),
        ("lease_s", 86400.5, "Expected `float` <= 86400.0"),
        ("lease_s", math.inf, "Expected `float` <= 86400.0"),
        ("lease_s", math.nan, "Expected `float` > 0.0"),
        ("lease_s", "30", "Expected `float`, got `str`"),
        ("lease_s", True, "Expected `float`, got `bool`"),
        ("handshake_timeout_s", None, "Expected `float`, got `null`"),
        ("acquire_timeout_s", [20], "Expected `float`, got `array`"),
        ("allow_insecure_side_channel", 1, "Expected `bool`, got `int`"),
        ("allow_insecure_side_channel", "true", "Expected `bool`, got `str`"),
        ("model_id", 7, "Expected `str`, got `int`"),
        ("verify", "some", "Invalid enum value 'some'"),
        ("staging", "yes", "Invalid enum value 'yes'"),
        ("staging_bytes", 4095, "Expected `int` >= 4096"),
        ("staging_bytes", 0, "Expected `int` >= 4096"),
        ("verify", True, "Expected `str`, got `bool`"),
        ("capture_dir", 7, "Expected `str | null`, got `int`"),
    ],
)
def test_a_bad_value_says_what_was_expected(key: str, value: object, problem: str) -> None:
    with refused(f"kv_connector_extra_config: {problem} - at `$.{key}`", ConfigError):
        decode_config({key: value})


def test_a_cost_is_a_transport_or_figures() -> None:
    assert decode_config({"cost": "tcp"}).start_cost == DEFAULTS["tcp"]
    assert decode_config({"cost": "30, 0.5, 45"}).start_cost == Cost.parse("30,0.5,45")
    problem = (
        "kv_connector_extra_config: cost: expected one of cuda_ipc, rdma, shared_memory, tcp, or: "
        "expected three numbers, microseconds, microseconds per descriptor and GB/s, as in 20,3.2,240; got 'fast'"
    )
    with refused(problem, ConfigError):
        decode_config({"cost": "fast"})
