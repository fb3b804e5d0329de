"""Every setting of the server, once: its default, what it means, and where its value comes from."""

import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from enum import StrEnum
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from chunkweave.config import AttentionKernel, ComputeConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, make_ordering
from chunkweave.planning.calibration import Quality
from chunkweave.planning.method import METHODS
from chunkweave.planning.method_choice import checked_method, checked_ratio
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.scheduling.routing import ROUTING, USUAL_IMBALANCE, USUAL_ROUTING, make_routing
from chunkweave.scheduling.shadow import ShadowConfig
from chunkweave.settings import parse_bytes
from chunkweave.tiers.blobs import without_secrets

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def setting(default: Any, meaning: str, *, secret: bool = False) -> Any:
    """A field of a settings class. `meaning` is its help; a `secret` is not shown."""
    return field(default=default, metadata={"meaning": meaning, "secret": secret})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model answers, and how where a request does not say."""

    model: str | None = setting(None, "Checkpoint folder in Hugging Face format, or `reader`, the bundled model.")
    shape: str | None = setting(None, "Random-weight model of a known geometry, for timing: its text means nothing.")
    device: str = setting("auto", "auto, cpu or cuda.")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16.")
    attention: str = setting("auto", "What computes attention: auto, triton or sdpa.")
    decode_graphs: bool = setting(False, "On CUDA, decode by recorded graphs.")
    method: str | None = setting(None, "Reuse method of requests that name none; `prefix` is exact.")
    quality: str | None = setting(None, "exact, balanced or fast, for requests that name neither this nor a method.")
    order: str = setting(
        "free", "free or fixed: whether documents may be put in another order, if a request says nothing."
    )
    served_name: str | None = setting(None, "What /v1/models calls the model; its folder's name if left out.")

    def __post_init__(self) -> None:
        ChunkOrder.parse(self.order)
        AttentionKernel.parse(self.attention)
        if self.model is not None and self.shape is not None:
            raise UsageError("give either model or shape, not both")

    def compute(self) -> ComputeConfig:
        """As an engine takes it."""
        return ComputeConfig(AttentionKernel.parse(self.attention), self.decode_graphs)

    @property
    def name(self) -> str:
        """What clients call the model; never a path."""
        return self.served_name or self.shape or Path(self.model or "").resolve().name


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where segments are kept."""

    store_budget: str = setting("4GiB", "Most memory for stored segments.")
    cache_dir: Path | None = setting(None, "Folder that keeps segments on disk, for later runs too.")
    disk_budget: str = setting("64GiB", "Most disk space for stored segments, with cache_dir.")
    remote_url: str | None = setting(None, "Another machine that keeps segments: redis://..., s3://...", secret=True)
    codec: str = setting("raw", "How segments are encoded on disk and remote: raw, int8 or fp8.")
    ttl: str | None = setting(None, "Drop segments older than that: 30s, 90m, 12h or 7d.")

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> StoreConfig:
        """As the engine takes it."""
        return StoreConfig.parse(**asdict(self))


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """How much is worked on at once."""

    max_running: int = setting(8, "Requests worked on at once.")
    step_tokens: int = setting(512, "Tokens of one step of the engine.")
    kv_tokens: int = setting(32768, "Tokens that the KV memory of all running requests holds.")
    max_prompt_tokens: int | None = setting(
        None, "Tokens that a prompt may have; as many as the model's context and kv_tokens allow, if left out."
    )
    max_waiting: int = setting(256, "Requests that may wait; further ones get 503.")
    deadline_s: float | None = setting(600.0, "Seconds that a request may take.")
    queue_timeout_s: float | None = setting(None, "Seconds that a request may wait before it is begun.")

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> BatchingConfig:
        """As the engine takes it."""
        return BatchingConfig(
            max_running=self.max_running,
            step_tokens=self.step_tokens,
            kv_tokens=self.kv_tokens,
            max_waiting=self.max_waiting,
            deadline_s=self.deadline_s,
            queue_timeout_s=self.queue_timeout_s,
            max_prompt_tokens=self.max_prompt_tokens,
        )


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where the server listens, to whom, and how it stops."""

    host: str = setting("127.0.0.1", "Address to listen on. Any but loopback needs keys, or allow_anonymous.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.")
    keys_file: Path | None = setting(None, "File of API keys, as `chunkweave keys new` writes them.")
    allow_anonymous: bool = setting(False, "Answer everybody who can reach the address, without keys.")
    graceful_s: float = setting(30.0, "Seconds that running answers get to end when the server stops.")
    stalled_s: float = setting(60.0, "Seconds that a client may stop reading before its stream is ended.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must be between 0 and 65535, not {self.port}")
        for name in ("graceful_s", "stalled_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What one request and one tenant may take."""

    max_body: str = setting("4MiB", "Largest body of a request, but for documents that are ingested.")
    max_upload: str = setting("64MiB", "Largest body of a request that ingests documents.")
    max_documents: int = setting(64, "Documents of one request; documents of one call that warms, pins or clears.")
    max_answer_tokens: int = setting(1024, "Tokens of an answer that a request may ask for.")
    default_answer_tokens: int = setting(256, "Tokens of an answer where a request does not say.")
    max_concurrent: int = setting(64, "Requests of one tenant at once; further ones get 429.")
    requests_per_minute: float | None = setting(None, "Requests of one tenant, on average; further ones get 429.")
    burst: int = setting(20, "Requests that a tenant may make at once before requests_per_minute counts.")
    max_corpora: int = setting(32, "Corpora that one tenant may create.")
    max_corpus_chunks: int = setting(200_000, "Chunks of one corpus that was created over HTTP.")
    pin_budget: str = setting("256MiB", "Segments that one tenant may pin.")

    def __post_init__(self) -> None:
        counts = ("max_documents", "max_answer_tokens", "default_answer_tokens", "max_concurrent", "burst")
        for name in (*counts, "max_corpora", "max_corpus_chunks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.requests_per_minute is not None and not self.requests_per_minute > 0:
            raise UsageError(f"requests_per_minute must be positive, not {self.requests_per_minute}")
        for size in (self.max_body, self.max_upload, self.pin_budget):
            parse_bytes(size)


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """Which corpora there are."""

    corpus: tuple[str, ...] = setting((), "Corpus for all tenants to read: its folder, or NAME=FOLDER; repeatable.")
    data_dir: Path | None = setting(None, "Folder for corpora that are created over HTTP; in memory if left out.")


class LogForm(StrEnum):
    """How log lines look."""

    JSON = "json"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """What is told of the server's work, and how woven answers are held against full prefill."""

    log_form: str = setting("plain", "How log lines look: plain or json.")
    log_level: str = setting("INFO", "Least level that is logged: DEBUG, INFO, WARNING or ERROR.")
    otlp_endpoint: str | None = setting(
        None, "Where traces are sent, by OTLP over HTTP; nowhere if left out.", secret=True
    )
    tenant_metrics: bool = setting(False, "Have metrics name tenants.")
    shadow_every: int | None = setting(None, "Check one in so many woven answers against full prefill, when idle.")
    shadow_window: int = setting(20, "Checks that are looked at together.")
    shadow_max_divergence: float | None = setting(None, "Switch weaving off above this mean divergence, in nats.")
    shadow_min_agreement: float | None = setting(None, "Switch weaving off where first tokens agree less often.")

    def __post_init__(self) -> None:
        if self.log_form not in tuple(LogForm):
            raise UsageError(f"log_form must be plain or json, not {self.log_form!r}")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise UsageError(f"log_level must be DEBUG, INFO, WARNING or ERROR, not {self.log_level!r}")
        self.shadow()

    def shadow(self) -> ShadowConfig | None:
        """As the engine takes it."""
        if self.shadow_every is None:
            return None
        return ShadowConfig(
            self.shadow_every, self.shadow_window, self.shadow_max_divergence, self.shadow_min_agreement
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, in groups; a name occurs in one group only."""

    model: ModelSettings = field(default_factory=ModelSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    corpora: CorpusSettings = field(default_factory=CorpusSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, slots=True)
class SettingField:
    """One setting: its group in `Settings`, its name, type, default, and what it means."""

    group: str
    name: str
    kind: Any
    default: Any
    meaning: str
    secret: bool


def groups_of(whole: type[Any]) -> dict[str, type[Any]]:
    """The groups of a settings class, `Settings` or another made like it, by name."""
    return get_type_hints(whole)


def setting_fields(whole: type[Any] = Settings) -> Iterator[SettingField]:
    """Every setting of a settings class, in the order in which they are written there."""
    for group, kind in groups_of(whole).items():
        hints = get_type_hints(kind)
        one: Field[Any]
        for one in fields(kind):
            yield SettingField(
                group, one.name, hints[one.name], one.default, one.metadata["meaning"], one.metadata["secret"]
            )


PREFIX = "CHUNKWEAVE_"
KEYS_VARIABLE = "CHUNKWEAVE_API_KEYS"
FILE_VARIABLE = "CHUNKWEAVE_CONFIG"
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, slots=True)
class Resolved(Generic[SettingsT]):
    """Settings, and for each by name where its value came from: `default`, the file, a variable or a flag."""

    settings: SettingsT
    origins: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """One row a setting: `name`, `value` (secrets masked), `origin`, `meaning`."""
        rows = []
        for one in setting_fields(type(self.settings)):
            value = getattr(getattr(self.settings, one.group), one.name)
            rows.append(
                {
                    "name": one.name,
                    "value": shown(one, value),
                    "origin": self.origins[one.name],
                    "meaning": one.meaning,
                }
            )
        return rows


def shown(one: SettingField, value: Any) -> Any:
    """A value as it may be printed: of a secret URL only what names no user, password or option."""
    if one.secret and value is not None:
        return without_secrets(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> Resolved[Settings]:
    """The server's settings from all sources; see `resolve_as`."""
    return resolve_as(Settings, flags, environment, file)


def resolve_as(
    whole: type[SettingsT], flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Resolved[SettingsT]:
    """Settings of a class made like `Settings` from all sources.

    Args:
        whole: the class; its groups can be made without arguments.
        flags: values by name; None means not given.
        environment: `CHUNKWEAVE_<NAME>` for each setting.
        file: TOML, or YAML if it is called so; None = what `CHUNKWEAVE_CONFIG` names, if it is set.

    Raises:
        UsageError: a file that cannot be read, a setting that does not exist, or a value that is none; the message
            says which and where.
    """
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    written = {} if file is None else read_settings_file(file)
    known = {one.name: one for one in setting_fields(whole)}
    if unknown := sorted(set(written) - set(known)):
        raise UsageError(f"{file}: no such settings: {', '.join(unknown)}; there are {', '.join(known)}")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, one in known.items():
        variable = PREFIX + name.upper()
        value, origin = one.default, "default"
        if name in written:
            value, origin = _checked(one, written[name], str(file)), str(file)
        if environment.get(variable):
            value, origin = _parsed(one, environment[variable], variable), variable
        if flags.get(name) is not None:
            flag = f"--{name.replace('_', '-')}"
            value, origin = _checked(one, flags[name], flag), flag
        values[name], origins[name] = value, origin
    groups = {
        group: kind(**{one.name: values[one.name] for one in known.values() if one.group == group})
        for group, kind in groups_of(whole).items()
    }
    return Resolved(whole(**groups), origins)


def unused_variables(environment: Mapping[str, str], whole: type[Any] = Settings) -> list[str]:
    """Variables that look like settings of that class and are none: probably misspelt."""
    known = {PREFIX + one.name.upper() for one in setting_fields(whole)} | {KEYS_VARIABLE, FILE_VARIABLE}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def read_settings_file(path: Path) -> dict[str, Any]:
    """The table that a TOML or YAML file holds.

    Raises:
        UsageError: it cannot be read, or is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration file {path} cannot be read: {error}") from error
    try:
        data = _yaml(text) if path.suffix.lower() in (".yaml", ".yml") else tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not {'YAML' if path.suffix.lower() != '.toml' else 'TOML'}: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no table of settings")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _plain_kind(kind: Any) -> tuple[Any, bool]:
    """A type without its None, and whether it had one."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [one for one in get_args(kind) if one is not type(None)]
        return rest[0], True
    return (tuple, False) if get_origin(kind) is tuple else (kind, False)


def _parsed(one: SettingField, text: str, origin: str) -> Any:
    """A value written as text."""
    kind, _ = _plain_kind(one.kind)
    try:
        if kind is bool:
            return _WORDS[text.strip().lower()]
        if kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return kind(text)
    except (ValueError, KeyError) as error:
        raise UsageError(f"{origin}: {text!r} is no value of {one.name}: {one.meaning}") from error


def _checked(one: SettingField, value: Any, origin: str) -> Any:
    """A value that has a type already."""
    kind, optional = _plain_kind(one.kind)
    if value is None and optional:
        return None
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is tuple and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{origin}: {value!r} is no value of {one.name}: {one.meaning}")
    return value


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
