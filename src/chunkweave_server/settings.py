"""All settings of the server, for both backends, and the sources of their values.

Settings of the engine are declared with the engine; settings that only servers have are declared here.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

from chunkweave.config import (
    Backend,
    CaptureConfig,
    ComputeConfig,
    ContextSource,
    FindConfig,
    ModelConfig,
    PluginConfig,
    RequestDefaults,
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
from chunkweave.scheduling.routing import ROUTING, USUAL_ROUTING, Router
from chunkweave.settings import (
    SERVERS,
    Place,
    Setting,
    SettingsGroup,
    from_mapping,
    refuse_unknown,
    setting,
    settings_of,
)
from chunkweave.store.eviction import make_policy
from chunkweave.tiers.blobs import without_secrets

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANY_HOST = "*"
_ORIGIN = re.compile(r"https?://[a-z0-9._\[\]:-]+")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
PREFIX = "CHUNKWEAVE_"
KEYS_VARIABLE = "CHUNKWEAVE_API_KEYS"
FILE_VARIABLE = "CHUNKWEAVE_CONFIG"
COMMAND_LINE = "command line"
_OTHER_VARIABLES = (KEYS_VARIABLE, FILE_VARIABLE, "CHUNKWEAVE_REPORT_SOCKET")
_MIB = 1 << 20
_VLLM = frozenset({Place.VLLM})


class LogForm(StrEnum):
    """Format of log lines."""

    JSON = "json"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class ListenSettings(SettingsGroup, places=SERVERS):
    """Address, access and shutdown of the server."""

    host: str = setting("127.0.0.1", "Address to listen on; other than loopback needs keys or allow_anonymous.")
    port: int = setting(8000, "Port; 0: a free one.", most=65535)
    keys_file: Path | None = setting(None, "API keys, as `chunkweave keys new` writes them.")
    allow_anonymous: bool = setting(False, "Accept requests without keys on any address.")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Accepted Host and Origin, besides loopback and `host`: a name, *.NAME (names below it), an address, or "
        "* (any); repeatable. With keys, checked only if given.",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origin whose pages may use the server from browsers (CORS), such as https://ui.example, or, with keys, * "
        "(any); repeatable.",
    )
    graceful_s: float = setting(30.0, "Time for running answers to finish at shutdown.", positive=True)
    stalled_s: float = 60.0
    """Close a connection after this long without the rest of a request, or without reading the answer."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        if wrong := [host for host in self.allowed_hosts if _HOST.fullmatch(host) is None]:
            raise UsageError(
                f"allowed_hosts takes names and addresses without scheme and port, such as rag.example or *, "
                f"not {wrong[0]!r}"
            )
        if wrong := [
            origin for origin in self.cors_origins if origin != ANY_HOST and _ORIGIN.fullmatch(origin) is None
        ]:
            raise UsageError(f"cors_origins takes origins such as https://ui.example:3000 or *, not {wrong[0]!r}")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK


@dataclass(frozen=True, slots=True)
class LimitSettings(SettingsGroup, places=SERVERS):
    """Limits of one request and one tenant."""

    max_body_bytes: int = setting(4 * _MIB, "Most bytes of a request body, except uploads.")
    max_upload_bytes: int = setting(64 * _MIB, "Most bytes of a request that ingests documents.")
    max_documents: int = setting(64, "Most documents of a request, also to warm or clear.", positive=True)
    max_answer_tokens: int = setting(
        1024, "Most tokens of an answer; a request for more gets this many.", positive=True
    )
    default_answer_tokens: int = 256
    """Tokens of an answer if the request sets no limit."""
    max_concurrent: int = setting(64, "Most concurrent requests of a tenant; more get 429.", positive=True)
    requests_per_minute: float | None = setting(
        None, "Mean request rate of a tenant; more get 429; none: no limit.", positive=True
    )
    burst: int = 20
    """Requests that a tenant may send at once under requests_per_minute."""
    max_corpora: int = 32
    """Most corpora that a tenant creates."""
    max_corpus_chunks: int = 200_000
    """Most chunks of a corpus created over HTTP."""
    max_corpus_bytes: int = 2 << 30
    """Most memory of a corpus created over HTTP: texts, metadata, vectors."""


@dataclass(frozen=True, slots=True)
class CorpusSettings(SettingsGroup, places=SERVERS):
    """Corpora: shared ones, and those created over HTTP."""

    corpus: tuple[str, ...] = setting((), "Corpus that all tenants may read: FOLDER or NAME=FOLDER; repeatable.")
    data_dir: Path | None = setting(None, "Folder for corpora created over HTTP; none: in memory.")
    corpus_flat_chunks: int = 100_000
    """Most chunks of a corpus created over HTTP that are searched flat."""

    def index(self, kind: IndexKind | None = None) -> IndexConfig:
        """The index of a new corpus: of this `kind`, or IVF if faiss is installed, else flat.

        Raises:
            UsageError: the index needs an extra that is not installed.
        """
        if kind is None:
            kind = IndexKind.IVF if available(IndexKind.IVF) else IndexKind.FLAT
        check_available(kind)
        return IndexConfig(kind, flat_up_to=self.corpus_flat_chunks)


@dataclass(frozen=True, slots=True)
class ImprovingSettings(SettingsGroup, places=SERVERS):
    """Work in idle time."""

    improve_share: float = setting(
        0.0,
        "Share of idle time, 0 to 1, to compute means of chunks that have none or an outdated one; 0: off.",
        most=1,
    )
    compare: bool = setting(
        True, "Whether to compare answers with full prefill, to learn which methods keep a quality's bounds."
    )


@dataclass(frozen=True, slots=True)
class WatchSettings(SettingsGroup, places=SERVERS):
    """Logs, traces and metrics of the server."""

    log_form: LogForm = setting(LogForm.PLAIN, "Format of log lines: plain or json.")
    log_level: str = setting("INFO", "Lowest level that is logged: DEBUG, INFO, WARNING or ERROR.")
    otlp_endpoint: str | None = setting(None, "URL for traces (OTLP over HTTP); none: no traces.", secret=True)
    tenant_metrics: bool = setting(False, "Label metrics with tenants.")

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise UsageError(f"log_level must be DEBUG, INFO, WARNING or ERROR, not {self.log_level!r}")


@dataclass(frozen=True, slots=True)
class FleetSettings(SettingsGroup, places=_VLLM):
    """The vLLM servers, and routing between them."""

    replicas: int = setting(1, "vLLM servers to start, one process each.", positive=True)
    upstream: tuple[str, ...] = setting(
        (), "URL of a running vLLM server with the connector, instead of `replicas`; repeatable."
    )
    report_socket: Path | None = setting(
        None, "With upstream, socket for the reports of vLLM servers on this machine: their CHUNKWEAVE_REPORT_SOCKET."
    )
    replica_env: tuple[str, ...] = setting(
        (), "NUMBER:NAME=VALUE, environment variable of one replica (0:CUDA_VISIBLE_DEVICES=0,1); repeatable."
    )
    routing: str = setting(USUAL_ROUTING, f"Choice of a request's replica: {', '.join(ROUTING)}.")
    replica_requests: int = 32
    """Most concurrent requests with documents on a replica; more wait in the front."""
    speculate: bool = setting(True, "Start prefill before a search has ended, if no request waits.", places=SERVERS)
    first_token_timeout_s: float | None = setting(
        None,
        "Longest wait for a first token from vLLM, then the request is retried once; none: no limit.",
        positive=True,
    )
    max_prefill_batch: int | None = None
    """Speculate only while fewer requests wait for or run prefill (RAGCache's max_prefill_bs); none: 1 for each engine
    or replica.
    """
    start_timeout_s: float = 1800.0
    """Longest start of a vLLM server."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        Router(self.routing)
        if wrong := [url for url in self.upstream if not url.startswith(("http://", "https://"))]:
            raise UsageError(f"upstream must be a URL such as http://host:8000, not {wrong[0]!r}")
        self.environments()

    def environments(self) -> Mapping[int, dict[str, str]]:
        """`replica_env` by replica number."""
        environments: dict[int, dict[str, str]] = {}
        for entry in self.replica_env:
            number, colon, variable = entry.partition(":")
            name, equals, value = variable.partition("=")
            if not (colon and equals and name and number.isdecimal() and int(number) < self.replicas):
                raise UsageError(
                    f"replica_env must be NUMBER:NAME=VALUE with a number below {self.replicas}, not {entry!r}"
                )
            environments.setdefault(int(number), {})[name] = value
        return environments


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, in groups; each name occurs in one group only. `resolve` makes them.

    `vllm_flags` are settings that were given for the vLLM backend and that vLLM has under the same name: they are
    passed to vLLM unchanged.
    """

    model: ModelConfig
    plugins: PluginConfig
    requests: RequestDefaults
    capture: CaptureConfig
    compute: ComputeConfig
    store: StoreConfig
    ordering: OrderingConfig
    finding: FindConfig
    batching: BatchingConfig
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
        if self.improving.improve_share and self.capture.contexts == ContextSource.BUNDLED:
            raise UsageError("improve_share computes chunks behind other chunks: it needs contexts corpus, not bundled")
        if self.model.adapter is not None and self.fleet.upstream:
            raise UsageError("adapter is for vLLM servers that are started here: give those of upstream --lora-modules")

    def connector_config(self) -> dict[str, Any]:
        """The connector's extra config: values that differ from its defaults. Secrets are passed in its environment."""
        config = {}
        for group in (self.plugins, self.requests, self.store, self.weave, self.finding):
            for declared in settings_of(type(group)).values():
                value = getattr(group, declared.attribute)
                passed = {Place.VLLM, Place.CONNECTOR} <= declared.places and not declared.secret
                if passed and value != declared.default:
                    config[declared.name] = plain(declared, value)
        return config

    def connector_environment(self) -> dict[str, str]:
        """Additional environment variables of a vLLM server: secrets of the connector, so that no log shows them."""
        url = self.store.remote_url
        return {} if url is None else {f"{PREFIX}REMOTE_URL": url}


GROUPS: Mapping[str, Any] = {name: group for name, group in get_type_hints(Settings).items() if name != "vllm_flags"}
"""The class of each group of `Settings`, by its field."""
_VLLM_FLAGS = ("dtype", "served_model_name", "max_num_seqs", "max_num_batched_tokens")
"""Settings of our engine that vLLM has under the same name."""
_IN_VLLM = {
    "threads": "set OMP_NUM_THREADS or VLLM_CPU_OMP_THREADS_BIND in the environment of the vLLM server",
}
"""What to use with vLLM instead of a setting that only our engine has."""


def server_settings(backend: Backend | None = None) -> dict[str, Setting]:
    """Settings of the server by name, in the order of their groups; only those of `backend`, if it is given."""
    places = SERVERS if backend is None else {Place(backend)}
    return {
        name: declared
        for group in GROUPS.values()
        for name, declared in settings_of(group).items()
        if declared.places & places
    }


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and the origin of each value by name: `default`, the file, a variable or the command line."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each setting: `name`, `value` (secrets masked), `origin`, `meaning`."""
        rows = []
        for group, kind in GROUPS.items():
            for name, declared in settings_of(kind).items():
                if name in self.origins:
                    value = plain(declared, getattr(getattr(self.settings, group), declared.attribute))
                    if declared.secret and value is not None:
                        value = without_secrets(value)
                    rows.append(
                        {"name": name, "value": value, "origin": self.origins[name], "meaning": declared.meaning}
                    )
        return rows


def plain(declared: Setting, value: Any) -> Any:
    """A value for JSON; sizes and durations become text."""
    if declared.unit is not None and value is not None:
        return declared.unit.shown(value)
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
    """The server's settings from all sources. Precedence: command line, environment, file, defaults.

    Args:
        flags: values by name, as given on the command line; None is a value, too.
        environment: `CHUNKWEAVE_<NAME>` for each setting.
        file: TOML, or YAML by its suffix; None: the file that `CHUNKWEAVE_CONFIG` names, if it is set.
        backend: the backend, if it is fixed; None: the one that the sources name.

    Raises:
        UsageError: the file cannot be read, a setting is unknown or belongs to the other backend, or a value is
            invalid; the message names the setting and its source.
    """
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    settings = server_settings()
    written = {} if file is None else read_settings_file(file)
    refuse_unknown(written, settings, f"{file}: ")
    refuse_unknown(flags, settings)
    sources = [(name, value, str(file)) for name, value in written.items()]
    sources += [
        (name, text, PREFIX + name.upper()) for name, text in _variables(environment).items() if name in settings
    ]
    sources += [(name, value, COMMAND_LINE) for name, value in flags.items()]
    values = {name: (settings[name].read(value, origin), origin) for name, value, origin in sources}
    chosen = backend or values.get("backend", (Backend.ENGINE, ""))[0]
    return _resolved(values | {"backend": (chosen, values.get("backend", (None, "default"))[1])}, chosen)


def _resolved(named_values: Mapping[str, tuple[Any, str]], backend: Backend) -> Resolved:
    all_settings = server_settings()
    settings_here = server_settings(backend)
    vllm_flags: list[str] = []
    for name, (value, origin) in named_values.items():
        if name in settings_here or origin.startswith(PREFIX):
            continue
        if name not in _VLLM_FLAGS:
            instead = _IN_VLLM.get(name) if backend is Backend.VLLM else None
            hint = "" if instead is None else f"; {instead}"
            raise UsageError(f"{origin}: {name} is a setting of the other backend; this backend is {backend}{hint}")
        vllm_flags += [all_settings[name].flag, all_settings[name].text(value)]
    values = {name: value for name, (value, _) in named_values.items() if name in settings_here}
    groups: dict[str, Any] = {group: from_mapping(kind, values) for group, kind in GROUPS.items()}
    origins = {name: named_values[name][1] if name in named_values else "default" for name in settings_here}
    return Resolved(Settings(**groups, vllm_flags=tuple(vllm_flags)), origins)


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Values from the environment by setting; empty variables are ignored."""
    variables = {name: text for name, text in environment.items() if name.startswith(PREFIX) and text}
    return {name.removeprefix(PREFIX).lower(): text for name, text in variables.items() if name not in _OTHER_VARIABLES}


def unused_variables(environment: Mapping[str, str], backend: Backend | None = None) -> list[str]:
    """Variables that look like settings but are not settings of this backend, each with the closest setting's name."""
    settings = server_settings(backend)
    variables = [name.upper() for name in settings]
    names = sorted(name.upper() for name in _variables(environment))
    return [unknown_names([name], variables, PREFIX + "{}") for name in names if name not in variables]


def read_settings_file(path: Path) -> dict[str, Any]:
    """The table in a TOML or YAML file.

    Raises:
        UsageError: the file cannot be read or does not contain a table.
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
        raise UsageError(f"{path} does not contain a table of settings")
    return {str(name).replace("-", "_"): value for name, value in data.items()}


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
