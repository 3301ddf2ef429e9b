"""A connector on whose D the first byte of the first verified load changes after it has arrived (for tests)."""

import ctypes

from hybrid_connector.connector import HybridNixlConnector
from hybrid_connector.core.digests import RunList
from hybrid_connector.transport.digest import DigestJob, HostDigester


class FlippingDigester:
    """Spoils the memory once, then digests it as it is."""

    def __init__(self, digester: HostDigester, region_address: int) -> None:
        self._digester = digester
        self._region_address = region_address
        self._is_spoilt = False

    def begin(self, runs: RunList) -> DigestJob:
        if not self._is_spoilt:
            first = int.from_bytes(runs.offsets[:8], "little")
            ctypes.c_uint8.from_address(self._region_address + first).value ^= 0x10
            self._is_spoilt = True
        return self._digester.begin(runs)


class FlippingConnector(HybridNixlConnector):
    """The product, but for what its loads digest with."""

    def register_kv_caches(self, kv_caches) -> None:
        super().register_kv_caches(kv_caches)
        loads = self._in_worker._loads
        loads._digester = FlippingDigester(loads._digester, loads._region.address)
