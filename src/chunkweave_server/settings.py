"""All settings of the server, for both backends, and where their values come from.

What an engine takes is declared where the engine declares it; here is what only servers have.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any, get_args, get_type_hints

from chunkweave.config import (
    Backend,
    CaptureConfig,
    ComputeConfig,
    ContextSource,
    ConversationConfig,
    ModelConfig,
    PluginConfig,
    RequestDefaults,
    ReuseConfig,
    StoreConfig,
    WeaveConfig,
)
from chunkweave.errors import UsageError, unknown_names
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig
from chunkweave.planning.calibration import Quality
from chunkweave.planning.cost import given_cost_model
from chunkweave.planning.method_choice import EXACT_METHOD, checked_method
from chunkweave.retrieval.faiss_indexes import available, check_available
from chunkweave.retrieval.indexes import IndexConfig, IndexKind
from chunkweave.scheduling.budget import BatchingConfig
from chunkweave.scheduling.queue import TenantWeights
from chunkweave.scheduling.routing import ROUTING, USUAL_IMBALANCE, USUAL_ROUTING, make_routing
from chunkweave.scheduling.shadow import ShadowConfig
from chunkweave.settings import (
    SERVERS,
    Place,
    Setting,
    by_name,
    configuration,
    refuse_unknown,
    setting,
    settings_at,
    settings_of,
)
from chunkweave.store.eviction import make_policy
from chunkweave.tiers.blobs import without_secrets

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANY_HOST = "*"
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
PREFIX = "CHUNKWEAVE_"
KEYS_VARIABLE = "CHUNKWEAVE_API_KEYS"
FILE_VARIABLE = "CHUNKWEAVE_CONFIG"
_OTHER_VARIABLES = (KEYS_VARIABLE, FILE_VARIABLE, "CHUNKWEAVE_REPORT_SOCKET")
_MIB = 1 << 20
_VLLM = frozenset({Place.VLLM})
_OF_METHODS = ("method", *settings_at(ReuseConfig, Place.VLLM))
"""What each request is sent with, as the server's own settings say it."""


class LogForm(StrEnum):
    """How log lines look."""

    JSON = "json"
    PLAIN = "plain"


@configuration(SERVERS)
@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where the server listens, to whom, and how it stops."""

    host: str = setting("127.0.0.1", "Address to listen on. Any but loopback needs keys, or allow_anonymous.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", least=0, most=65535)
    keys_file: Path | None = setting(None, "File of API keys, as `chunkweave keys new` writes them.")
    allow_anonymous: bool = setting(False, "Answer everybody who can reach the address, without keys.")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Host that requests without keys may name, and whose web pages may send them, beside loopback and `host`: a "
        "name, *.NAME for all below it, an address, or * for any; repeatable. If given, it holds with keys too.",
    )
    graceful_s: float = setting(30.0, "How long running answers get to end when the server stops.", above=0)
    stalled_s: float = setting(
        60.0,
        "How long a client may keep the server waiting for the rest of its request, or stop reading its answer.",
        above=0,
    )

    def __post_init__(self) -> None:
        if wrong := [one for one in self.allowed_hosts if _HOST.fullmatch(one) is None]:
            raise UsageError(
                f"allowed_hosts takes names and addresses without scheme and port, such as rag.example or *, "
                f"not {wrong[0]!r}"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK


@configuration(SERVERS)
@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What one request and one tenant may take."""

    max_body_bytes: int = setting(4 * _MIB, "Largest body of a request, but for documents that are ingested.")
    max_upload_bytes: int = setting(64 * _MIB, "Largest body of a request that ingests documents.")
    max_documents: int = setting(
        64, "Documents of one request; documents of one call that warms, pins or clears.", least=1
    )
    max_answer_tokens: int = setting(1024, "Tokens of an answer that a request may ask for.", least=1)
    default_answer_tokens: int = setting(256, "Tokens of an answer where a request does not say.", least=1)
    max_concurrent: int = setting(64, "Requests of one tenant at once; further ones get 429.", least=1)
    requests_per_minute: float | None = setting(
        None, "Requests of one tenant, on average; further ones get 429; none: no limit.", above=0
    )
    burst: int = setting(20, "Requests that a tenant may make at once before requests_per_minute counts.", least=1)
    max_corpora: int = setting(32, "Corpora that one tenant may create.", least=1)
    max_corpus_chunks: int = setting(200_000, "Chunks of one corpus that was created over HTTP.", least=1)
    max_corpus_bytes: int = setting(
        2 << 30, "Texts, metadata and vectors of one corpus that was created over HTTP; they are in memory.", least=1
    )
    pin_budget_bytes: int = setting(256 * _MIB, "Segments that one tenant may pin.")


class CorpusIndex(StrEnum):
    """How large corpora are searched that are created over HTTP."""

    AUTO = "auto"
    FLAT = "flat"
    IVF = "ivf"
    HNSW = "hnsw"


@configuration(SERVERS)
@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """Which corpora there are."""

    corpus: tuple[str, ...] = setting((), "Corpus for all tenants to read: its folder, or NAME=FOLDER; repeatable.")
    data_dir: Path | None = setting(None, "Folder for corpora that are created over HTTP; in memory if left out.")
    corpus_index: CorpusIndex = setting(
        CorpusIndex.AUTO,
        "Index of corpora that are created over HTTP, above corpus_flat_chunks: flat, ivf, hnsw, or auto: ivf if faiss "
        "is installed, else flat. A corpus keeps the index that it was created with.",
    )
    corpus_flat_chunks: int = setting(
        100_000, "Most chunks of a corpus created over HTTP that are all compared with a question (flat).", least=1
    )

    def index(self, kind: IndexKind | None = None) -> IndexConfig:
        """The index of a new corpus: of a `kind`, or the usual one.

        Raises:
            UsageError: it needs an extra that is not installed.
        """
        if kind is None:
            usual = IndexKind.IVF if available(IndexKind.IVF) else IndexKind.FLAT
            kind = usual if self.corpus_index is CorpusIndex.AUTO else IndexKind(self.corpus_index)
        check_available(kind)
        return IndexConfig(kind, flat_up_to=self.corpus_flat_chunks)


@configuration(SERVERS)
@dataclass(frozen=True, slots=True)
class ImprovingSettings:
    """What a server computes while it is idle."""

    improve_share: float = setting(
        0.0,
        "Part of idle time, 0 to 1, that is spent on computing chunks anew behind others of their cache salt: those "
        "that came with requests, and those whose nearest chunks have changed; 0: none.",
        least=0,
        most=1,
    )


@configuration(SERVERS)
@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Logs, traces and metrics of the server."""

    log_form: LogForm = setting(LogForm.PLAIN, "How log lines look: plain or json.")
    log_level: str = setting("INFO", "Least level that is logged: DEBUG, INFO, WARNING or ERROR.")
    otlp_endpoint: str | None = setting(
        None, "Where traces are sent, by OTLP over HTTP; nowhere if left out.", secret=True
    )
    tenant_metrics: bool = setting(False, "Have metrics name tenants.")

    def __post_init__(self) -> None:
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise UsageError(f"log_level must be DEBUG, INFO, WARNING or ERROR, not {self.log_level!r}")


@configuration(_VLLM)
@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Which vLLM servers there are, and who gets what."""

    replicas: int = setting(1, "vLLM servers to start, one process each, all alike.", least=1)
    upstream: tuple[str, ...] = setting(
        (), "URL of a vLLM server that runs already, with the connector; repeatable, in the place of `replicas`."
    )
    report_socket: Path | None = setting(
        None, "With upstream, where servers on this machine send reports (their CHUNKWEAVE_REPORT_SOCKET)."
    )
    connector: tuple[str, ...] = setting(
        (), "KEY=VALUE of the connector's extra config, for keys that have no setting here; repeatable."
    )
    replica_env: tuple[str, ...] = setting(
        (), "NUMBER:NAME=VALUE, a variable of one replica's environment (0:CUDA_VISIBLE_DEVICES=0,1); repeatable."
    )
    routing: str = setting(USUAL_ROUTING, f"Which replica gets a request: {', '.join(ROUTING)}.")
    imbalance: float = setting(
        USUAL_IMBALANCE, "With affinity, most outstanding tokens of a replica, over the mean of all."
    )
    replica_requests: int = setting(
        32, "Requests with documents that one replica is given at once; others wait here.", least=1
    )
    mirror_tokens: int = setting(
        2_000_000,
        "Most tokens that a replica's segment store is assumed to hold, for routing and order; fewer once it reports "
        "that it has room for fewer.",
        least=1,
    )
    speculate: bool = setting(
        True, "Prefill for what a search of a corpus has found so far, while nothing else waits.", places=SERVERS
    )
    first_token_timeout_s: float | None = setting(
        None,
        "Longest time for a vLLM server to begin an answer; a request is then sent once more, to another one if there "
        "is one; none: any.",
        above=0,
    )
    max_prefill_batch: int | None = setting(
        None,
        "Requests that wait for, or are in, prefill below which a search may have one begun ahead (RAGCache's "
        "max_prefill_bs); none: 1 for each engine or replica, since one prefill fills a processor.",
        places=SERVERS,
        least=1,
    )
    start_timeout_s: float = setting(1800.0, "How long a vLLM server may take to start.", above=0)

    def __post_init__(self) -> None:
        make_routing(self.routing, self.imbalance)
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
            if key in _OF_METHODS:
                raise UsageError(f"give --{key.replace('_', '-')}, not --connector {entry}")
            if key == "query":
                raise UsageError(f"give --method query:SETTINGS, such as query:whole:late, not --connector {entry}")
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
class Settings:
    """All settings, in groups; a name occurs in one group only. `resolve` makes them, also of nothing.

    `shadow` is None where no answers are checked. `vllm_flags` are settings that vLLM has under the same name and that
    were given for its backend: they go to vLLM as they are.
    """

    model: ModelConfig
    plugins: PluginConfig
    requests: RequestDefaults
    reuse: ReuseConfig
    capture: CaptureConfig
    compute: ComputeConfig
    store: StoreConfig
    ordering: OrderingConfig
    conversations: ConversationConfig
    batching: BatchingConfig
    shadow: ShadowConfig | None
    weave: WeaveConfig
    fleet: FleetSettings
    listen: ListenSettings
    limits: LimitSettings
    corpora: CorpusSettings
    improving: ImprovingSettings
    watch: WatchSettings
    vllm_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        make_policy(self.store.policy)
        given_cost_model(self.store.cost_model, None)
        ChunkOrder.parse(self.requests.order or "")
        TenantWeights.parse(self.batching.tenant_weight)
        checked_method(self.requests.method or EXACT_METHOD)
        if self.requests.quality is not None:
            Quality.parse(self.requests.quality)
        if self.improving.improve_share and self.capture.contexts is ContextSource.BUNDLED:
            raise UsageError("improve_share computes chunks behind others: it needs contexts corpus, not bundled")
        if self.model.adapter is not None and self.fleet.upstream:
            raise UsageError("adapter is for vLLM servers that are started here: give those of upstream --lora-modules")

    def connector_config(self) -> dict[str, Any]:
        """The connector's extra config: what is not as it is there by default. Secrets are in its environment."""
        config = {}
        for group in (self.plugins, self.requests, self.reuse, self.capture, self.store, self.weave):
            for one in settings_of(type(group)).values():
                value = getattr(group, one.attribute)
                told = {Place.VLLM, Place.CONNECTOR} <= one.places and not one.secret
                if told and value != one.default_at(Place.CONNECTOR):
                    config[one.name] = plain(one, value)
        more = self.fleet.connector_config()
        if twice := sorted(config.keys() & more.keys()):
            raise UsageError(f"{twice[0]} is given twice: leave out --connector {twice[0]}=...")
        return config | more

    def connector_environment(self) -> dict[str, str]:
        """Variables that a vLLM server gets beside its own: secrets of the connector, which stand in no log there."""
        url = self.store.remote_url
        return {} if url is None else {f"{PREFIX}REMOTE_URL": url}


GROUPS: Mapping[str, Any] = {
    name: next(kind for kind in (hint, *get_args(hint)) if is_dataclass(kind))  # one may be None instead
    for name, hint in get_type_hints(Settings).items()
    if name != "vllm_flags"
}
"""The class of each group of `Settings`, by its field."""
_VLLM_FLAGS = ("dtype", "served_model_name", "max_num_seqs", "max_num_batched_tokens", "block_size")
"""Settings of our engine that vLLM has under the same name."""
_IN_VLLM = {
    "step_time": "vLLM has no limit in seconds: lower --max-num-batched-tokens, and for weaves weave_step_tokens",
}
"""What to do over vLLM in the place of a setting that only our engine has."""


def server_settings(backend: Backend | None = None) -> dict[str, Setting]:
    """Every setting of the server, or of the server with one backend, by name and group by group."""
    found = {name: one for kind in GROUPS.values() for name, one in settings_of(kind).items() if one.places & SERVERS}
    return {name: one for name, one in found.items() if backend is None or backend.place in one.places}


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and for each by name where its value came from: `default`, the file, a variable or a flag."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """One row a setting: `name`, `value` (secrets masked), `origin`, `meaning`."""
        rows = []
        for group, kind in GROUPS.items():
            for name, one in settings_of(kind).items():
                if name in self.origins:
                    held = getattr(self.settings, group)
                    value = None if held is None else shown(one, getattr(held, one.attribute))
                    rows.append({"name": name, "value": value, "origin": self.origins[name], "meaning": one.meaning})
        return rows


def shown(one: Setting, value: Any) -> Any:
    """A value as it may be printed: of a secret URL only what names no user, password or option."""
    if value is None:
        return None
    return without_secrets(value) if one.secret else plain(one, value)


def plain(one: Setting, value: Any) -> Any:
    """A value as JSON has it, sizes and durations as text."""
    if one.unit is not None and value is not None:
        return one.unit.shown(value)
    if isinstance(value, Path | StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
    *,
    backend: Backend | None = None,
) -> Resolved:
    """The server's settings from all sources: flags before environment before file before defaults.

    Args:
        flags: values by name, of those that are given; None is the value of one that is none.
        environment: `CHUNKWEAVE_<NAME>` for each setting.
        file: TOML, or YAML if it is called so; None = what `CHUNKWEAVE_CONFIG` names, if it is set.
        backend: where it is known already; None = what the sources say.

    Raises:
        UsageError: a file that cannot be read, a setting that does not exist or is of the other backend, or a value
            that is none; the message says which and where.
    """
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    known = server_settings()
    written = {} if file is None else by_name(read_settings_file(file), known)
    refuse_unknown(written, known, f"{file}: ")
    given = {name: (known[name].check(value, str(file)), str(file)) for name, value in written.items()}
    for name, text in by_name(_variables(environment), known).items():
        if name in known:
            variable = PREFIX + name.upper()
            given[name] = (known[name].parse(text, variable), variable)
    for name, value in by_name(flags, known).items():
        given[name] = (known[name].check(value, known[name].flag), known[name].flag)
    chosen = backend or given.get("backend", (Backend.ENGINE, ""))[0]
    return _resolved(given | {"backend": (chosen, given.get("backend", (None, "default"))[1])}, chosen)


def _resolved(given: Mapping[str, tuple[Any, str]], backend: Backend) -> Resolved:
    known, here = server_settings(), server_settings(backend)
    vllm_flags: list[str] = []
    for name, (value, origin) in given.items():
        if name in here or origin.startswith(PREFIX):
            continue
        if name not in _VLLM_FLAGS:
            instead = _IN_VLLM.get(name) if backend is Backend.VLLM else None
            hint = "" if instead is None else f"; {instead}"
            raise UsageError(f"{origin}: {name} is a setting of the other backend, this one is {backend}{hint}")
        vllm_flags += [known[name].flag, known[name].text(value)]
    values = {name: given[name][0] if name in given else one.default_at(backend.place) for name, one in here.items()}
    groups: dict[str, Any] = {}
    for group, kind in GROUPS.items():
        own = {one.attribute: values[name] for name, one in settings_of(kind).items() if name in here}
        groups[group] = None if kind is ShadowConfig and own["every"] is None else kind(**own)
    origins = {name: given[name][1] if name in given else "default" for name in here}
    return Resolved(Settings(**groups, vllm_flags=tuple(vllm_flags)), origins)


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment's values by the name of a setting; an empty one is as good as none."""
    own = {name: text for name, text in environment.items() if name.startswith(PREFIX) and text}
    return {name.removeprefix(PREFIX).lower(): text for name, text in own.items() if name not in _OTHER_VARIABLES}


def unused_variables(environment: Mapping[str, str], backend: Backend | None = None) -> list[str]:
    """Variables that look like settings and are none of this backend, each with the setting that it is close to."""
    settings = server_settings(backend)
    known = [name.upper() for name in settings]
    names = sorted(name.upper() for name in by_name(_variables(environment), settings))
    return [unknown_names([name], known, PREFIX + "{}") for name in names if name not in known]


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


def _json_or_text(value: str) -> Any:
    try:
        return loads(value)
    except JSONDecodeError:
        return value
