"""Options that commands share in blocks: a parameter of a block's type stands for all of its options."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from chunkweave.chunking.documents import Document, read_documents
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.options import (
    DEFAULT_DISK_BUDGET,
    DEFAULT_STORE_BUDGET,
    Attention,
    CacheDir,
    Codec,
    DecodeGraphs,
    Device,
    DiskBudget,
    Dtype,
    Model,
    RemoteUrl,
    Seed,
    Shape,
    StoreBudget,
    Ttl,
)
from chunkweave.config import AttentionKernel, ComputeConfig, ReuseConfig, StoreConfig
from chunkweave.errors import UsageError
from chunkweave.ordering.ordering_config import ChunkOrder, OrderingConfig
from chunkweave.ordering.registry import make_ordering
from chunkweave.types import Chunk

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine


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
        from chunkweave.chunking.splitter import SplitConfig

        SplitConfig(self.chunk_tokens, self.overlap_tokens)  # refused now, not after the model is loaded
        return read_documents(paths, on_error="skip" if self.skip_bad_docs else "raise")

    def chunks(self, engine: "Engine", documents: Sequence[Document]) -> list[Chunk]:
        """The chunks of documents in order, bounded in the engine's own tokens."""
        from chunkweave.chunking.splitter import SplitConfig, split_text

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
