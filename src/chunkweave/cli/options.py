"""Options that commands share, alone and in blocks: a parameter of a block's type stands for all of its options."""

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack, get_type_hints

import typer

from chunkweave.chunking.documents import Document, read_documents
from chunkweave.cli.console import status, stderr
from chunkweave.config import AttentionKernel, ComputeConfig, ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.ordering.ordering import ChunkOrder, OrderingConfig, make_ordering
from chunkweave.tiers.blobs import without_secrets
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine, EngineOptions


Model = Annotated[
    Path | None,
    typer.Option("--model", help="Checkpoint folder in Hugging Face format, or `reader`, the bundled model."),
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", help="Random-weight model of a known geometry, for timing: its text means nothing."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Attention = Annotated[str, typer.Option(help="What computes attention: auto, triton or sdpa.")]
DecodeGraphs = Annotated[bool, typer.Option(help="On CUDA, decode by recorded graphs.")]
StoreBudget = Annotated[str, typer.Option(help="Most memory for stored segments, for example 2GiB.")]
RecomputeRatio = Annotated[
    float, typer.Option(help="Share of the reused chunks' tokens that is computed again, 0 to 1.")
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Warm = Annotated[str, typer.Option(help="`alone`, or `queries:N` by N earlier requests.")]
CheckLayers = Annotated[str, typer.Option(help="CacheBlend's check layers, separated by commas.")]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="Folder that keeps segments on disk, for later runs and for other processes.",
        file_okay=False,
    ),
]
DiskBudget = Annotated[str, typer.Option(help="Most disk space for stored segments, with --cache-dir.")]
RemoteUrl = Annotated[
    str | None,
    typer.Option(
        "--remote-url",
        envvar="CHUNKWEAVE_REMOTE_URL",
        help="Another machine that keeps segments too: redis://..., s3://..., file://...",
    ),
]
Codec = Annotated[str, typer.Option(help="How segments are encoded on disk and remote: raw, int8 or fp8.")]
Ttl = Annotated[str | None, typer.Option(help="Drop segments older than that: 30s, 90m, 12h or 7d.")]
CacheFolderPath = Annotated[Path, typer.Argument(metavar="CACHE_DIR", help="The folder given as --cache-dir.")]
Fingerprint = Annotated[
    str | None, typer.Option("--fingerprint", help="Only this model's; the beginning of its fingerprint is enough.")
]
DocumentName = Annotated[str | None, typer.Option("--document", help="Only segments of the document of this name.")]
ChunkPrefix = Annotated[
    str | None, typer.Option("--chunk", help="Only segments of this chunk: its id, or its beginning.")
]
SegmentPrefix = Annotated[str | None, typer.Option("--segment", help="Only this segment: its id, or its beginning.")]

DEFAULT_STORE_BUDGET = "4GiB"
DEFAULT_DISK_BUDGET = "64GiB"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)


def kept(store: StoreConfig) -> dict[str, Any]:
    """What a benchmark's result says about where segments were kept."""
    tiers = ["host"] + ["disk"] * (store.cache_dir is not None) + ["remote"] * (store.remote_url is not None)
    return {"tiers": tiers, "codec": store.codec}


def command_line() -> str:
    """The command as it was called, for a result that others read: URLs come without user, password and options."""
    return shlex.join(["chunkweave", *(_URL.sub(lambda url: without_secrets(url[0]), word) for word in sys.argv[1:])])


def names(text: str) -> tuple[str, ...]:
    """The names of a list such as `cacheblend,epic`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(text: str, option: str) -> list[float]:
    """The numbers of a list such as `0.5,1,2`.

    Raises:
        UsageError: it is no such list; the message names the option.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} takes numbers separated by commas, not {text!r}") from error


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """The whole numbers of a list such as `1,2,3`.

    Raises:
        UsageError: it is no such list; the message names the option.
    """
    values = numbers(text, option)
    if any(value != int(value) for value in values):
        raise UsageError(f"{option} takes whole numbers separated by commas, not {text!r}")
    return tuple(int(value) for value in values)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A checkpoint folder or a shape, and how to compute with it.

    Raises:
        UsageError: both were given, or neither.
    """

    folder: Path | None
    shape: str | None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.shape is None):
            raise UsageError("give either --model FOLDER or --shape NAME")

    @property
    def name(self) -> str:
        """What to call the model on screen."""
        return self.shape if self.folder is None else str(self.folder)  # type: ignore[return-value]

    @property
    def random_weights(self) -> bool:
        """Whether the weights are random, so that only times mean something."""
        return self.folder is None

    @contextmanager
    def open(self, **options: "Unpack[EngineOptions]") -> Iterator["Engine"]:
        """An engine that is closed afterwards, Ctrl-C and errors included: what was computed is written by then.

        Raises:
            ModelError: the model cannot be loaded or driven.
            UsageError: no such shape, method, quality, ordering or codec, a quality that was not calibrated, or a
                remote URL that cannot be used.
        """
        engine = self.load(**options)
        try:
            yield engine
        finally:
            with status("writing segments"):
                engine.close()
            stats = engine.store.stats
            if unwritten := stats.writes_failed + stats.writes_skipped:
                stderr().print(f"[yellow]{unwritten} writes of segments to disk or remote were not done.[/yellow]")

    def load(self, **options: "Unpack[EngineOptions]") -> "Engine":
        """Load the model and put an engine around it.

        Raises:
            ModelError: the model cannot be loaded or driven.
            UsageError: no such shape, method, quality or ordering, or a quality that was not calibrated.
        """
        options.setdefault("compute", self.compute)
        with status(f"loading {self.name}"):
            _quiet_transformers()
            from chunkweave.engine.engine import Engine

            if self.folder is not None:
                return Engine.load(self.folder, device=self.device, dtype=self.dtype, **options)
            shape = self.shape or ""
            return Engine.load_shape(shape, device=self.device, dtype=self.dtype, seed=self.seed, **options)


def _quiet_transformers() -> None:
    """No weight-loading bars and no advice from transformers between a command's own lines."""
    logging: Any = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def with_blocks(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as Typer is to see it: each parameter whose type is a dataclass is replaced by the fields of that.

    The fields are annotated as options are. The command is called with the block made of their values.
    """
    hints = get_type_hints(command, include_extras=True)
    shown: list[inspect.Parameter] = []
    blocks: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            blocks[parameter.name] = kind
            shown += _parameters_of(kind)
        else:
            shown.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> None:
        made = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in blocks.items()
        }
        command(**values, **made)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call


def _parameters_of(block: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(block, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(block)
    ]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model computes, and how."""

    model: Model = None
    shape: Shape = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    attention: Attention = "auto"
    decode_graphs: DecodeGraphs = False

    def choice(self) -> ModelChoice:
        """The model that was asked for.

        Raises:
            UsageError: none was, or two; or there is no such attention.
        """
        compute = ComputeConfig(AttentionKernel.parse(self.attention), self.decode_graphs)
        return ModelChoice(self.model, self.shape, self.device, self.dtype, compute=compute)


@dataclass(frozen=True, slots=True)
class SeededModelOptions(ModelOptions):
    """A model in a benchmark. Random weights are drawn with the seed, as everything else is."""

    seed: Seed = 0

    def choice(self) -> ModelChoice:
        """The model that was asked for.

        Raises:
            UsageError: none was, or two.
        """
        return replace(ModelOptions.choice(self), seed=self.seed)


@dataclass(frozen=True, slots=True)
class TimedModelOptions(SeededModelOptions):
    """A model whose times are measured."""

    threads: Annotated[int | None, typer.Option(help="CPU threads of PyTorch; its own choice if left out.")] = None

    def bound_threads(self) -> None:
        """Bound the CPU threads of PyTorch, if that was asked for.

        Raises:
            UsageError: less than one thread.
        """
        if self.threads is None:
            return
        if self.threads < 1:
            raise UsageError(f"threads must be at least 1, not {self.threads}")
        import torch

        torch.set_num_threads(self.threads)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where segments are kept."""

    store_budget: StoreBudget = DEFAULT_STORE_BUDGET
    cache_dir: CacheDir = None
    disk_budget: DiskBudget = DEFAULT_DISK_BUDGET
    remote_url: RemoteUrl = None
    codec: Codec = "raw"
    ttl: Ttl = None

    def config(self) -> StoreConfig:
        """What the options ask for.

        Raises:
            UsageError: a size, a duration, a codec or the cache folder is not one.
        """
        if self.cache_dir is not None and self.cache_dir.exists() and not self.cache_dir.is_dir():
            raise UsageError(f"--cache-dir {self.cache_dir} is not a folder")
        return StoreConfig.parse(**asdict(self))


@dataclass(frozen=True, slots=True)
class DocumentOptions:
    """Which documents, and how they are cut."""

    docs: Annotated[list[Path] | None, typer.Option("--docs", help="Text file or folder of them; repeatable.")] = None
    chunk_tokens: Annotated[int, typer.Option(help="Most tokens of a chunk.")] = 512
    overlap_tokens: Annotated[int, typer.Option(help="Tokens that neighbouring chunks share at most.")] = 0
    skip_bad_docs: Annotated[bool, typer.Option("--skip-bad-docs", help="Leave out unreadable documents.")] = False

    def read(self, paths: Sequence[Path]) -> list[Document]:
        """The documents at `paths`.

        Raises:
            DocumentError: one is not there, or cannot be read and is not to be left out.
            UsageError: no chunk can have the tokens asked for.
        """
        from chunkweave.chunking.documents import SplitConfig

        SplitConfig(self.chunk_tokens, self.overlap_tokens)  # refused now, not after the model is loaded
        return read_documents(paths, on_error="skip" if self.skip_bad_docs else "raise")

    def chunks(self, engine: "Engine", documents: Sequence[Document]) -> list[Chunk]:
        """The chunks of documents in order, bounded in the engine's own tokens."""
        from chunkweave.chunking.documents import SplitConfig, split_text

        tokenizer, config = engine.loaded.tokenizer, SplitConfig(self.chunk_tokens, self.overlap_tokens)
        return [chunk for one in documents for chunk in split_text(one.text, tokenizer, config, source=one.name)]


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """In which order chunks stand."""

    order: Annotated[
        str | None,
        typer.Option(
            help="free: chunks stand as is best for reuse; fixed: as they come.",
            show_default="free for what is retrieved, else fixed",
        ),
    ] = None
    ordering: Annotated[str, typer.Option(help="How a free order is chosen: frequency, tree-greedy or original.")] = (
        "frequency"
    )
    promote: Annotated[
        int | None,
        typer.Option(
            help="With a free order, keep and grow exact prefixes over chunks that this many questions took.",
            show_default="off: a command counts its own questions only",
        ),
    ] = None

    def config(self) -> OrderingConfig:
        """How a free order is chosen.

        Raises:
            UnknownMethodError: there is no such ordering.
            UsageError: a threshold below 1.
        """
        make_ordering(self.ordering)
        return OrderingConfig(self.ordering, promotion_threshold=self.promote, continuation_threshold=self.promote)

    def said(self, *, retrieved: bool) -> str:
        """What requests say, whose chunks were retrieved or not.

        Raises:
            UsageError: there is no such order.
        """
        return ChunkOrder.parse(self.order or ("free" if retrieved else "fixed"))


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """How chunks are reused."""

    method: Annotated[
        str | None,
        typer.Option(help="Reuse method; `prefix` is exact.", show_default="`balanced` if calibrated, else prefix"),
    ] = None
    quality: Annotated[
        str | None,
        typer.Option(
            help="exact, balanced or fast: how close to full prefill; the last two need `chunkweave calibrate`."
        ),
    ] = None
    recompute_ratio: Annotated[
        float | None, typer.Option(help="Share of the reused chunks' tokens that --method computes again, 0 to 1.")
    ] = None
    alpha: Annotated[
        float | None, typer.Option(help="Scale of what cachecraft computes again: 0 nothing, 3 nearly all.")
    ] = None

    @property
    def default(self) -> bool:
        """Whether the choice is left to the engine."""
        return self.method is None and self.quality is None

    def reuse(self) -> ReuseConfig:
        """What a named method is to be told.

        Raises:
            UsageError: a value is out of range, or there is no method that it could be for.
        """
        asked = {"recompute_ratio": self.recompute_ratio, "alpha": self.alpha}
        told: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        config = ReuseConfig(**told)
        if told and self.method is None:
            raise UsageError("--recompute-ratio and --alpha set a method: name it with --method")
        return config
