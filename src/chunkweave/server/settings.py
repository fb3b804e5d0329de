"""What a server may be told: every setting once, with its default and what it means."""

from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from chunkweave.config import AttentionKernel, ComputeConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.scheduling.shadow import ShadowConfig
from chunkweave.server.logs import LogForm
from chunkweave.units import parse_bytes

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
