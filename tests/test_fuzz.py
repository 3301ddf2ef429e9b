"""Does a server in its own process survive rubbish? The short form of `integration/fuzz.py`."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parent.parent / "integration" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", FUZZ)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sends from several loopback addresses")
def test_three_thousand_frames_of_every_kind(fuzz: ModuleType) -> None:
    report = fuzz.run(3_000)
    assert report.problems == []
    assert report.num_frames >= 3_000
    assert set(report.kinds) == {"random", "mutated", "truncated", "oversized", "replayed", "stranger", "flood"}
    for name in ("requests", "malformed", "ignored", "strangers", "connections_cut"):
        assert report.stats[name] > 0, name
    assert len(report.handshakes_s) >= 8  # one after each part of each attack at least
    assert report.stranger_bytes == 0
    assert report.row().endswith("| all well")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"handshakes_s": []}, "no handshake was served"),
        ({"handshakes_s": [0.1, 1.5]}, "a handshake took 1.50 s, expected at most 1 s"),
        ({"rss_after_mib": {"open": 80.0}}, "open: memory grew by 60 MiB, expected 32 at most"),
        ({"stranger_bytes": 3}, "strangers got 3 bytes"),
        ({"stats": Counter(faults=2)}, "2 faults"),
    ],
)
def test_what_goes_wrong_is_reported(fuzz: ModuleType, change: dict[str, object], problem: str) -> None:
    well = {"handshakes_s": [0.1], "rss_before_mib": {"open": 20.0}, "rss_after_mib": {"open": 21.0}}
    report = fuzz.Report(**(well | change))
    fuzz._judge(report)
    assert report.problems == [problem]
    assert report.row().endswith(f"| {problem}")
