"""What is to happen to a read of another process? The bench writes it into a folder, ``faulty_connector`` takes it."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

DIR_VARIABLE, WITHOUT_VARIABLE = "FAULT_DIR", "FAULT_WITHOUT"
WALL_CLOCK = "wall_clock"


@dataclass(frozen=True, slots=True)
class ReadFault:
    """What happens to one read.

    ``src_rank``: of which P rank, ``None`` for any. ``bad_descriptor``: NIXL is given an address P never registered.
    ``error``: it fails before a byte has moved. ``delay_s``: its bytes move only after that time. ``flip``: one byte
    arrives changed.
    """

    src_rank: int | None = None
    bad_descriptor: bool = False
    error: bool = False
    delay_s: float = 0.0
    flip: bool = False

    def order(self, directory: Path) -> None:
        """Let it happen to the next read that fits."""
        number = len(list(directory.iterdir()))
        partial = directory / f"{number}.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(directory / f"{number}-{time.monotonic_ns()}.json")

    @staticmethod
    def take(directory: Path, src_rank: int) -> "ReadFault":
        for path in sorted(directory.glob("*.json")):
            fault = ReadFault(**json.loads(path.read_text()))
            if fault.src_rank in (None, src_rank):
                path.unlink()
                return fault
        return ReadFault()
