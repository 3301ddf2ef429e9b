"""Real engines for the tests, started once per session and only when a test asks for them."""

import os
from pathlib import Path

import pytest

from engines import Engine, Fleet


def pytest_xdist_auto_num_workers():
    return 0  # one fleet of engines for all tests, and one machine


def pytest_collection_modifyitems(items):
    # Engines take seconds to start: a test that hangs must not take CI's time with it.
    for item in items:
        item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # So that engines find the connectors of the tests' own.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
            yield fleet


@pytest.fixture(scope="session")
def aggregated(fleet) -> Engine:
    """The hybrid model without any connector: what answers must agree with."""
    return fleet.engine("aggregated", model="hybrid")
