"""Options that commands share, single and in blocks. A parameter whose type is a block adds all of its options."""

import copy
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, Unpack, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.models import OptionInfo

from chunkweave.cli.console import progress, status, stderr
from chunkweave.cli.files import documents_read, read_all, say_what_was_left_out
from chunkweave.config import (
    CaptureConfig,
    ComputeConfig,
    ModelConfig,
    PluginConfig,
    RequestDefaults,
    ReuseConfig,
    StoreConfig,
    Weights,
    adapted_name,
    is_hub_name,
)
from chunkweave.errors import UsageError
from chunkweave.models.adapters import read_adapter
from chunkweave.models.gguf import (
    check_gguf,
    config_file_of,
    dequantize,
    dequantized_folder,
    gguf_file,
    is_bundled_reader,
    models_folder,
)
from chunkweave.models.hub import cache_folder, cached_folder, hub_folder
from chunkweave.planning.method_choice import checked_method
from chunkweave.prompt.documents import Document, SplitConfig, split_text
from chunkweave.settings import (
    Place,
    Setting,
    SettingsGroup,
    Unit,
    from_mapping,
    refuse_unknown,
    setting,
    settings_at,
)
from chunkweave.tiers.blobs import without_secrets
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine, EngineOptions


Seed = Annotated[int, typer.Option(help="Random seed.")]
HOW_WARM = (
    "How chunks were computed: `alone`; after the `instruction`; after that and `neutral` passages; `corpus`, as the "
    "mean over several contexts of their corpus; `contexts:N`, each in N requests with others; `sources:N`, each in "
    "one of N requests; `first:N`, in one request that begins with a question's first N chunks; `queries:N`, by N "
    "earlier requests."
)
Samples = Annotated[
    Path | None,
    typer.Option(help="File for finished questions, one per line; the same command continues from them."),
]

Warm = Annotated[str, typer.Option(help=HOW_WARM)]
NewTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens of full prefill's answer that are compared.")]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if a file, or a line of one, cannot be read.")]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)


def kept(store: StoreConfig) -> dict[str, Any]:
    """Tiers and codec of segments, for a benchmark's result."""
    tiers = ["host"] + ["disk"] * (store.cache_dir is not None) + ["remote"] * (store.remote_url is not None)
    return {"tiers": tiers, "codec": store.codec}


def command_line() -> str:
    """The command line, for results that others read: URLs lose user, password and options."""
    return shlex.join(["chunkweave", *(_URL.sub(lambda url: without_secrets(url[0]), word) for word in sys.argv[1:])])


def names(text: str) -> tuple[str, ...]:
    """The names of a list such as `cacheblend,epic`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(text: str, option: str) -> list[float]:
    """The numbers of a list such as `0.5,1,2`.

    Raises:
        UsageError: the text is not such a list; the message names the option.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} takes numbers separated by commas, not {text!r}") from error


FLAGS = frozenset({"model", "method", "quality", "cache_dir", "max_new_tokens", "chunk_tokens", "deduplicate"})
"""Settings that have a flag also where a command takes settings by `--set`."""

SET = inspect.Parameter(
    "assignments",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting of docs/settings.md; repeatable."),
    ],
)
"""The option `--set`."""

_METAVARS = {Unit.BYTES: "SIZE", Unit.SECONDS: "DURATION", int: "INTEGER", float: "NUMBER", Path: "PATH"}

Command = Callable[..., None]


class Only(tuple[str, ...]):
    """`Annotated[StoreConfig, Only("ttl")]`: a command takes only these settings of a group."""

    def __new__(cls, *names: str) -> Self:
        """Names of settings."""
        return super().__new__(cls, names)


def with_blocks(command: Command) -> Command:
    """Decorator of a Typer command: replaces each parameter whose type is a dataclass, a block, by the block's fields.

    The help groups the options of a block under the first words of its docstring. A field is annotated as an option, or
    is a block itself; a group of settings is a block with a flag for each setting. The command receives the block, made
    from the options' values.
    """
    return _with_blocks(command, None, "")


def with_set(example: str) -> Callable[[Command], Command]:
    """`with_blocks` for commands that take settings without a flag, all but `FLAGS`, by `--set`.

    The help begins with the `example`.
    """
    return lambda command: _with_blocks(command, FLAGS, example)


def _with_blocks(command: Command, flags: Collection[str] | None, example: str) -> Command:
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    blocks: dict[str, Any] = {}
    settings: dict[str, Setting] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(_plain(kind)):
            blocks[parameter.name] = kind
            settings |= _settings(kind)
            parameters += _parameters_of(kind, heading(_plain(kind)), flags)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
    if flags is not None:
        parameters.append(SET)

    def call(**values: Any) -> None:
        chosen = given_settings(settings, values)
        for name, declared in settings.items():
            variable = f"CHUNKWEAVE_{name.upper()}"
            if declared.secret and os.environ.get(variable):
                chosen.setdefault(name, declared.read(os.environ[variable], variable))
        made = {name: _made(kind, values, chosen) for name, kind in blocks.items()}
        command(**values, **made)

    return as_command(call, command, parameters, settings, example)


def as_command(
    call: Command,
    command: Command,
    parameters: Sequence[inspect.Parameter],
    settings: Mapping[str, Setting],
    example: str = "",
) -> Command:
    """`call`, changed to have the name and help of `command`, and these `parameters`. `settings` may be set."""
    words = inspect.cleandoc(command.__doc__ or "")
    call.__name__ = command.__name__
    call.__doc__ = f"Example: {example}\n\n{words}" if example else words
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.summary, call.settings = words.partition("\n")[0], settings  # type: ignore[attr-defined]
    return call


def how_to_set(option: str, settings: Mapping[str, Setting]) -> str:
    """What to write instead of an option that does not exist; "" if it is no setting's name either.

    >>> how_to_set("--ttl=1h", settings_of(StoreConfig))
    '--ttl is not a flag of this command: write --set ttl=VALUE'
    """
    flag = option.partition("=")[0]
    name = flag.removeprefix("--").replace("-", "_")
    value = "VALUE"
    if name.startswith("no_") and name not in settings:
        name = name.removeprefix("no_")
        value = "false"
    if name not in settings:
        return ""
    return f"{flag} is not a flag of this command: write --set {name}={value}"


def _plain(kind: Any) -> Any:
    """A type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _settings(kind: Any) -> dict[str, Setting]:
    """The settings that a command takes for a block."""
    plain = _plain(kind)
    if not issubclass(plain, SettingsGroup):
        hints = get_type_hints(plain, include_extras=True)
        blocks = [hints[one.name] for one in fields(plain) if is_dataclass(_plain(hints[one.name]))]
        return {name: declared for block in blocks for name, declared in _settings(block).items()}
    settings = settings_at(plain, Place.COMMANDS)
    names = next((annotation for annotation in get_args(kind)[1:] if isinstance(annotation, Only)), settings)
    return {name: settings[name] for name in names}


def heading(kind: Any) -> str:
    """The heading of a block's options in the help: the first words of its docstring."""
    return re.split("[.,:;]", kind.__doc__ or "", maxsplit=1)[0]


def _parameters_of(kind: Any, panel: str, flags: Collection[str] | None) -> list[inspect.Parameter]:
    if issubclass(_plain(kind), SettingsGroup):
        settings = _settings(kind)
        return option_parameters([settings[name] for name in settings if flags is None or name in flags], panel)
    hints = get_type_hints(kind, include_extras=True)
    parameters = []
    for block_field in fields(kind):
        if is_dataclass(_plain(hints[block_field.name])):
            parameters += _parameters_of(hints[block_field.name], panel, flags)
        else:
            default = inspect.Parameter.empty if block_field.default is MISSING else block_field.default
            option = _under(panel, hints[block_field.name])
            parameters.append(
                inspect.Parameter(block_field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
            )
    return parameters


def _under(panel: str, kind: Any) -> Any:
    """A copy of an option's annotation, with `panel` as its heading in the help; the original may be shared."""
    plain, *annotations = get_args(kind) if get_origin(kind) is Annotated else (kind, typer.Option())
    moved = [copy.copy(annotation) for annotation in annotations]
    for option in moved:
        if isinstance(option, OptionInfo):
            option.rich_help_panel = option.rich_help_panel or panel
    return Annotated[plain, *moved]


def _made(kind: Any, values: dict[str, Any], chosen: Mapping[str, Any]) -> Any:
    """A block made from the values of its options, which are removed from `values`, and of its settings."""
    plain = _plain(kind)
    if issubclass(plain, SettingsGroup):
        return from_mapping(plain, {name: chosen[name] for name in _settings(kind) if name in chosen})
    hints = get_type_hints(plain, include_extras=True)
    made = {
        name: _made(hint, values, chosen) if is_dataclass(_plain(hint)) else values.pop(name)
        for name, hint in ((block_field.name, hints[block_field.name]) for block_field in fields(plain))
    }
    return plain(**made)


def option_parameters(settings: Iterable[Setting], panel: str) -> list[inspect.Parameter]:
    """A flag for each setting; its value is None if it was not given. `panel` is their heading in the help."""
    parameters = []
    for declared in settings:
        kind: Any = list[str] if declared.element is str else str
        flag = declared.flag
        metavar: str | None = _METAVARS.get(declared.unit or declared.kind, "TEXT")
        if declared.kind is bool:
            kind = bool
            flag = f"{flag}/--no-{flag[2:]}"
            metavar = None
        default = declared.default
        option = typer.Option(
            flag,
            help=declared.meaning,
            rich_help_panel=panel,
            show_default=False if default in (None, "", False, ()) else declared.text(default),
            metavar=metavar,
        )
        annotation: Any = Annotated[kind | None, option]
        parameters.append(
            inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return parameters


def warn(message: str) -> None:
    """Print a warning on stderr."""
    stderr().print(f"[yellow]{escape(message)}[/yellow]", soft_wrap=True)


def given_settings(settings: Mapping[str, Setting], values: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given by flag or by `--set`, by name; removes the options' values from `values`.

    Raises:
        UsageError: there is no such setting, it is given twice, or its value is wrong.
    """
    by_flag = {}
    for name, declared in settings.items():
        if (value := values.pop(name, None)) not in (None, []):
            by_flag[name] = declared.read(value, declared.flag)
    assigned: dict[str, Any] = {}
    for assignment in values.pop(SET.name, None) or []:
        name, equals, text = assignment.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"--set takes NAME=VALUE, not {assignment!r}")
        refuse_unknown([name], settings, "--set: ")
        if name in by_flag:
            raise UsageError(f"give either {settings[name].flag} or --set {name}=..., not both")
        value = settings[name].read(text, f"--set {name}")
        assigned[name] = (*assigned.get(name, ()), *value) if isinstance(value, tuple) else value
    return by_flag | assigned


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Model, and how it runs. PyTorch and transformers are imported when it is loaded."""

    model: ModelConfig = field(default_factory=ModelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def named(self) -> Self:
        """These options, if they name a shape or a model that is here or on the hub. Nothing is loaded.

        Raises:
            UsageError: they name neither.
            ModelNotFoundError: the model is not here.
        """
        model = self.model.model
        if (model is None) == (self.model.shape is None):
            raise UsageError(
                "give either --model (smollm2, a folder, a hub name) or a shape (in `ask` and `chat`: --set shape=NAME)"
            )
        if model and not is_hub_name(model) and not is_bundled_reader(model) and gguf_file(model) is None:
            config_file_of(Path(model))
        return self

    @property
    def name(self) -> str:
        """The model's name on screen."""
        return adapted_name(self.model.model or self.model.shape or "", self.model.adapter)

    @property
    def is_changed(self) -> bool:
        """Whether an adapter or rounding changes the checkpoint's weights."""
        return self.model.adapter is not None or self.model.weights == Weights.NATIVE

    def base(self) -> Self:
        """The same model with its checkpoint's own weights: without adapter, and not rounded."""
        return replace(self, model=replace(self.model, adapter=None, weights=Weights.AUTO))

    @property
    def how_to_calibrate(self) -> str:
        """The command that calibrates this model."""
        adapter = () if self.model.adapter is None else ("--adapter", self.model.adapter)
        weights = ("--weights", self.model.weights) if self.model.weights == Weights.NATIVE else ()
        return shlex.join(["chunkweave", "calibrate", self.model.model or "MODEL", *adapter, *weights])

    @property
    def random_weights(self) -> bool:
        """Whether the weights are random: only times are meaningful then."""
        return self.model.model is None

    @contextmanager
    def open(self, **options: "Unpack[EngineOptions]") -> Iterator["Engine"]:
        """An engine that is closed at the end, also after Ctrl-C or an error; closing it writes what was computed.

        Raises:
            ModelError: the model cannot be loaded or driven.
            UsageError: no such shape, method, quality, ordering or codec, a quality that was not calibrated, or a
                remote URL that cannot be used.
        """
        engine = self._load(**options)
        try:
            yield engine
        finally:
            with status("writing segments"):
                engine.close()
            stats = engine.store.stats
            if unwritten := stats.writes_failed + stats.writes_skipped:
                stderr().print(
                    f"[yellow]{unwritten} writes of segments to disk or remote failed or were skipped.[/yellow]"
                )

    @property
    def weights_seed(self) -> int:
        """Seed of random weights."""
        return 0

    def _load(self, **options: "Unpack[EngineOptions]") -> "Engine":
        options.setdefault("compute", self.compute)
        if self.model.adapter is not None:
            read_adapter(self.model.adapter)  # refused now, not after the model is downloaded
        if self.model.model is not None:
            if self.model.weights == Weights.NATIVE:
                check_gguf(self.model.model)
            download_once(self.model.model)
            if self.model.weights != Weights.NATIVE:
                dequantize_once(self.model.model)
        with status(f"loading {self.name}"):
            _quiet_transformers()
            from chunkweave.engine.engine import Engine
            from chunkweave.kv.request_cache import keep_freed_memory
            from chunkweave.models.threads import use_threads

            keep_freed_memory()
            use_threads(self.model.threads)
            where = {"device": self.model.device, "dtype": self.model.dtype, "weights": self.model.weights}
            if self.model.model is not None:
                return Engine.load(self.model.model, adapter=self.model.adapter, **where, **options)
            return Engine.load_shape(self.model.shape or "", **where, seed=self.weights_seed, **options)


def download_once(model: str) -> None:
    """Download the model of a hub name, unless the hub's cache has it.

    Raises:
        ModelNotFoundError: it cannot be downloaded.
    """
    if not is_hub_name(model) or cached_folder(model) is not None:
        return
    stderr().print(escape(f"downloading {model}, once: it is kept in {cache_folder()}"), soft_wrap=True)
    hub_folder(model)


def dequantize_once(model: str) -> None:
    """Dequantize the GGUF file of `model`, with a progress bar, unless that was done before.

    Raises:
        ModelError: it cannot be read, kept, or driven.
    """
    file = gguf_file(model)
    if file is None:
        return
    with status(f"reading {file.name}"):
        made = dequantized_folder(file)
    if made is not None:
        return
    stderr().print(escape(f"dequantizing {file.name}, once: the result is kept in {models_folder()}"), soft_wrap=True)
    with progress(f"dequantizing {file.name}") as report:
        dequantize(file, report)


def _quiet_transformers() -> None:
    """Switch off transformers' progress bars and advice."""
    logging: Any = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class SeededModelOptions(ModelOptions):
    """Model to measure. The seed also draws random weights."""

    seed: Seed = 0

    @property
    def weights_seed(self) -> int:
        """Seed of random weights."""
        return self.seed


@dataclass(frozen=True, slots=True)
class ValueOptions:
    """Parameter values of the compared methods, for methods that name none of their own."""

    recompute_ratio: Annotated[str, typer.Option(help="Ratios, separated by commas.")] = "0.15"
    alpha: Annotated[str, typer.Option(help="Cache-Craft's alphas, separated by commas.")] = "1"

    @property
    def ratios(self) -> tuple[float, ...]:
        """The recompute ratios."""
        return tuple(numbers(self.recompute_ratio, "--recompute-ratio"))

    @property
    def alphas(self) -> tuple[float, ...]:
        """The alphas."""
        return tuple(numbers(self.alpha, "--alpha"))


@dataclass(frozen=True, slots=True)
class SplitSettings(SettingsGroup, places=frozenset({Place.COMMANDS})):
    """How documents are read and cut."""

    chunk_tokens: int = setting(512, "Maximum tokens per chunk.")
    overlap_tokens: int = setting(0, "Maximum tokens that neighbouring chunks share.")
    strict: bool = setting(False, "Fail if a file, or a line of one, cannot be read.")


@dataclass(frozen=True, slots=True)
class DocumentOptions:
    """Documents, and how they are cut."""

    docs: Annotated[
        list[Path] | None, typer.Option("--docs", help="File or folder, of the kinds that `ingest` reads; repeatable.")
    ] = None
    split: SplitSettings = field(default_factory=SplitSettings)

    @property
    def split_config(self) -> SplitConfig:
        """How documents are cut.

        Raises:
            UsageError: the chunks' sizes are invalid.
        """
        return SplitConfig(self.split.chunk_tokens, self.split.overlap_tokens)

    def read(self, paths: Sequence[Path]) -> list[Document]:
        """The documents at `paths`. Unreadable files are left out, with a line on stderr.

        Raises:
            DocumentError: a path is not there, none can be read, or something was left out and `strict` is set.
            UsageError: the chunks' sizes are invalid.
        """
        _ = self.split_config  # refused now, not after the model is loaded
        if not paths:
            return []
        reads = read_all(paths)
        documents = documents_read(reads, strict=self.split.strict)
        say_what_was_left_out(reads)
        return [Document(document.id, document.text, document.tables) for document in documents]

    def chunks(self, engine: "Engine", documents: Sequence[Document]) -> list[Chunk]:
        """The chunks of documents, in order; sizes are in the engine's tokens."""
        tokenizer = engine.loaded.tokenizer
        config = self.split_config
        return [
            chunk
            for document in documents
            for chunk in split_text(document.text, tokenizer, config, source=document.name, tables=document.tables)
        ]


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """How chunks are reused."""

    plugins: PluginConfig
    requests: Annotated[RequestDefaults, Only("method", "quality")]
    capture: CaptureConfig

    @property
    def default(self) -> bool:
        """Whether the choice is left to the engine."""
        return self.requests.method is None and self.requests.quality is None

    def options(self, **others: "Unpack[EngineOptions]") -> "EngineOptions":
        """Options of an engine: these and `others`.

        Raises:
            UsageError: the method does not have a setting, or a value is out of range.
        """
        method = self.requests.method
        quality = self.requests.quality
        if method is not None:
            checked_method(method)
        return {**others, "method": method, "quality": quality, "reuse": ReuseConfig(capture=self.capture)}
