"""What the front before vLLM may be told, beside what it has in common with our own server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, make_ordering
from chunkweave.planning.calibration import Quality
from chunkweave.planning.method import METHODS
from chunkweave.planning.method_choice import checked_method, checked_ratio
from chunkweave.scheduling.routing import ROUTING, USUAL_IMBALANCE, USUAL_ROUTING, make_routing
from chunkweave.server.settings import CorpusSettings, LimitSettings, ListenSettings, WatchSettings, setting

_ALONE = frozenset({"method", "recompute_ratio"})
"""Keys of the connector that have a setting of their own."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Which vLLM servers there are, and who gets what."""

    replicas: int = setting(1, "vLLM servers to start, one process each, all alike.")
    upstream: tuple[str, ...] = setting(
        (), "URL of a vLLM server that runs already, with the connector; repeatable, in the place of `replicas`."
    )
    report_socket: Path | None = setting(
        None, "With upstream, where servers on this machine send reports (their CHUNKWEAVE_REPORT_SOCKET)."
    )
    connector: tuple[str, ...] = setting(
        (), "KEY=VALUE of the connector's extra config, such as host_budget=16GiB; repeatable."
    )
    replica_env: tuple[str, ...] = setting(
        (), "NUMBER:NAME=VALUE, a variable of one replica's environment (0:CUDA_VISIBLE_DEVICES=0,1); repeatable."
    )
    routing: str = setting(USUAL_ROUTING, f"Who gets a request: {', '.join(ROUTING)}.")
    imbalance: float = setting(
        USUAL_IMBALANCE, "With affinity, most outstanding tokens of a replica, over the mean of all."
    )
    replica_requests: int = setting(32, "Requests with documents that one replica is given at once; others wait here.")
    window: int = setting(32, "How often a waiting request may be passed over by ones of which more is cached.")
    max_waiting: int = setting(256, "Requests that may wait; further ones get 503.")
    deadline_s: float | None = setting(600.0, "Seconds that a request with documents may take.")
    mirror_tokens: int = setting(
        2_000_000, "Tokens that a replica's segment store is believed to hold, for routing and order."
    )
    speculate: bool = setting(True, "Prefill for what a search of a corpus has found so far, while nothing else waits.")
    start_timeout_s: float = setting(1800.0, "Seconds that a vLLM server may take to start.")

    def __post_init__(self) -> None:
        make_routing(self.routing, self.imbalance)
        for name in ("replicas", "replica_requests", "max_waiting", "mirror_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.window < 0:
            raise UsageError(f"window must not be negative, not {self.window}")
        for name in ("deadline_s", "start_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be positive, not {value}")
        if wrong := [url for url in self.upstream if not url.startswith(("http://", "https://"))]:
            raise UsageError(f"upstream must be a URL such as http://host:8000, not {wrong[0]!r}")
        self.connector_config()
        self.environments()

    def connector_config(self) -> dict[str, Any]:
        """`connector` as the object that vLLM hands to it; values are read as JSON where they are any."""
        config: dict[str, Any] = {}
        for entry in self.connector:
            key, found, value = entry.partition("=")
            if not found or not key.isidentifier():
                raise UsageError(f"connector must be KEY=VALUE, not {entry!r}")
            if key in _ALONE:
                raise UsageError(f"give --{key.replace('_', '-')}, not --connector {entry}")
            config[key] = _json_or_text(value)
        return config

    def environments(self) -> Mapping[int, dict[str, str]]:
        """`replica_env` by the number of the replica."""
        found: dict[int, dict[str, str]] = {}
        for entry in self.replica_env:
            number, colon, variable = entry.partition(":")
            name, equals, value = variable.partition("=")
            if not (colon and equals and name and number.isdecimal() and int(number) < self.replicas):
                raise UsageError(
                    f"replica_env must be NUMBER:NAME=VALUE with a number below {self.replicas}, not {entry!r}"
                )
            found.setdefault(int(number), {})[name] = value
        return found


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """What a request with documents gets that does not say."""

    method: str | None = setting(None, f"Reuse method of requests that name none: {', '.join(METHODS)}.")
    quality: str | None = setting(None, "exact, balanced or fast, for requests that name neither this nor a method.")
    recompute_ratio: float | None = setting(None, "Share of reused tokens that a method computes again.")
    order: str = setting("free", "free or fixed: whether documents may be put in another order.")
    ordering: str = setting("frequency", "How they are: original, frequency or tree-greedy.")

    def __post_init__(self) -> None:
        ChunkOrder.parse(self.order)
        make_ordering(self.ordering)
        if self.method is not None:
            checked_method(self.method, METHODS)
        if self.quality is not None:
            Quality.parse(self.quality)
        if self.recompute_ratio is not None:
            checked_ratio(self.recompute_ratio)

    def ordering_config(self) -> OrderingConfig:
        """As an arranger takes it. What is kept is for the connector to say: nothing is promoted."""
        return OrderingConfig(self.ordering, promotion_threshold=None, continuation_threshold=None)


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """All settings of the front, in groups; a name occurs in one group only."""

    fleet: FleetSettings = field(default_factory=FleetSettings)
    reuse: ReuseSettings = field(default_factory=ReuseSettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    corpora: CorpusSettings = field(default_factory=CorpusSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)


def _json_or_text(value: str) -> Any:
    try:
        return loads(value)
    except JSONDecodeError:
        return value
