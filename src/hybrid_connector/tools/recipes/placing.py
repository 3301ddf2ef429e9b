"""Which process runs where? The engines of a recipe on named hosts, with their GPUs and ports.

1. Engines take GPUs in order; one that fits into a host is not split, one that does not takes whole hosts.
2. A host of an engine runs one process: ``vllm serve`` starts the ranks there. The first has the API server.
3. Ports count up from fixed numbers per host. A data-parallel rank adds itself to its engine's side channel port.
"""

from dataclasses import dataclass

from hybrid_connector.core.errors import ConfigError
from hybrid_connector.tools.recipes.reading import Recipe, Role

HTTP_PORTS = {"prefill": 8100, "decode": 8200}
SIDE_PORT = 5600
RPC_PORT = 13345
ROUTER_PORT = 8000
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of an engine. ``part`` counts its hosts; ``head`` is the first of them.

    ``gpus`` is empty where the process has its host for itself.
    """

    role: Role
    engine: int
    part: int
    num_parts: int
    host: str
    head: str
    gpus: tuple[int, ...]
    http_port: int
    side_port: int

    @property
    def name(self) -> str:
        """What the process is called: ``prefill-0``, ``decode-0.1``."""
        return f"{self.role}-{self.engine}" + (f".{self.part}" if self.num_parts > 1 else "")


class _Hosts:
    """Hosts that are filled one after the other."""

    def __init__(self, prefix: str, gpus_per_host: int, is_single: bool) -> None:
        self._prefix = prefix
        self._gpus_per_host = gpus_per_host
        self._is_single = is_single
        self._num_hosts = 0
        self._used = gpus_per_host

    def take(self, num_gpus: int) -> tuple[list[str], tuple[int, ...]]:
        """Host names for an engine of ``num_gpus``, and which GPUs of a shared host it gets."""
        if num_gpus <= self._gpus_per_host:
            if self._used + num_gpus > self._gpus_per_host:
                self._used = 0
                self._num_hosts += 1
            first, self._used = self._used, self._used + num_gpus
            gpus = tuple(range(first, self._used)) if num_gpus < self._gpus_per_host else ()
            return [self._name(self._num_hosts - 1)], gpus
        if num_gpus % self._gpus_per_host:
            raise ConfigError(f"an engine of {num_gpus} GPUs does not fill hosts of {self._gpus_per_host}")
        start, self._used = self._num_hosts, self._gpus_per_host
        self._num_hosts += num_gpus // self._gpus_per_host
        return [self._name(index) for index in range(start, self._num_hosts)], ()

    def _name(self, index: int) -> str:
        if not self._is_single:
            return f"{self._prefix}{index}"
        if index:
            raise ConfigError(f"the engines do not fit into one host of {self._gpus_per_host} GPUs")
        return "localhost"


def place(recipe: Recipe) -> tuple[Process, ...]:
    """Every process of ``recipe``, prefill first. Raises ``ConfigError`` where engines and hosts do not fit."""
    shared = _Hosts("localhost", recipe.gpus_per_host, is_single=True) if recipe.one_host else None
    processes: list[Process] = []
    for role in ROLES:
        hosts = shared or _Hosts(role[0], recipe.gpus_per_host, is_single=False)
        processes += _place_side(role, recipe, hosts)
    return tuple(processes)


def _place_side(role: Role, recipe: Recipe, hosts: _Hosts) -> list[Process]:
    side = recipe.side(role)
    processes: list[Process] = []
    num_engines: dict[str, int] = {}
    for engine in range(side.engines):
        names, gpus = hosts.take(side.num_gpus)
        if side.tensor_parallel > recipe.gpus_per_host and side.data_parallel > 1:
            raise ConfigError(f"{role}: ranks of {side.tensor_parallel} GPUs span hosts; expected one rank per engine")
        if len(names) > 1 and recipe.gpus_per_host % min(side.tensor_parallel, recipe.gpus_per_host):
            raise ConfigError(f"{role}: ranks of {side.tensor_parallel} GPUs do not fill {recipe.gpus_per_host}")
        for part, host in enumerate(names):
            before = num_engines.get(host, 0)
            num_engines[host] = before + 1
            processes.append(
                Process(
                    role,
                    engine,
                    part,
                    len(names),
                    host,
                    names[0],
                    gpus,
                    HTTP_PORTS[role] + before,
                    SIDE_PORT + before * side.data_parallel,
                )
            )
    return processes
