"""Frozen configurations, checked on construction, and pure functions that resolve "auto"."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf
from pathlib import Path
from typing import Any, Protocol

from chunkweave.errors import UsageError
from chunkweave.plugins import METHODS, POLICIES, load_plugin_files
from chunkweave.settings import GIB, PROGRAMS, REQUESTS, SERVERS, Place, SettingsGroup, setting

DEFAULT_RECOMPUTE_RATIO = 0.15
"""CacheBlend §5.1: the lowest ratio with negligible loss of quality in its Figure 16."""

DEFAULT_MAX_VARIANTS = 5
"""M of Cache-Craft's evaluation (its §5.1.2)."""


_OWN_ENGINE = frozenset({Place.COMMANDS, Place.ENGINE})
"""Places that run this package's engine. In the others vLLM loads the model, batches, and owns the device memory."""


_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)


def is_hub_name(model: str) -> bool:
    """Whether a model is a Hugging Face hub name, `MAKER/NAME`. An existing local folder of that name takes precedence.

    >>> is_hub_name("Qwen/Qwen2.5-0.5B-Instruct"), is_hub_name("./models/qwen"), is_hub_name("models/qwen.gguf")
    (True, False, False)
    """
    return _HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).exists()


def adapted_name(model: str, adapter: str | Path | None) -> str:
    """The name of a model with an adapter merged into its weights.

    >>> adapted_name("smollm2", "adapters/reader"), adapted_name("smollm2", None)
    ('smollm2+reader', 'smollm2')
    """
    return model if adapter is None else f"{model}+{Path(adapter).resolve().name}"


class Backend(StrEnum):
    """What computes the answers."""

    ENGINE = "engine"
    """The engine of this package, in this process."""
    VLLM = "vllm"
    """vLLM servers, with the connector of this package."""


class Choice(StrEnum):
    """How a request that names no method is answered, where one is calibrated."""

    CHEAPEST = "cheapest"
    """By it, or exactly where that is expected to be no later; measured times and earlier requests decide."""
    FIXED = "fixed"
    """Always by it: equal prompts over equal stores are answered in the same way, whatever the load."""


class Weights(StrEnum):
    """The memory format of the weights of linear layers."""

    AUTO = "auto"
    """oneDNN's weight order where it is faster (bfloat16 on CPUs), else plain. Results are bitwise equal."""
    PLAIN = "plain"
    """As transformers loads them."""
    NATIVE = "native"
    """A GGUF file's own groups of 4 and 8 bits, on CPUs in bfloat16: about the file's size in memory, and no converted
    copy on disk. Decoding is faster, prefill slower; results differ slightly."""


@dataclass(frozen=True, slots=True)
class ModelConfig(SettingsGroup, places=_OWN_ENGINE):
    """Model and backend."""

    model: str | None = setting(
        None,
        "Checkpoint folder in Hugging Face format, hub name, GGUF file, `smollm2`, or `reader` (bundled, for tests).",
        places=PROGRAMS,
    )
    adapter: str | None = setting(
        None,
        "LoRA adapter: folder in PEFT's format.",
        places=PROGRAMS,
    )
    shape: str | None = setting(None, "Random weights in a known geometry, for timing.")
    device: str = setting("auto", "auto, cpu or cuda.")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16.")
    weights: Weights = setting(
        Weights.AUTO,
        "Weights in memory: auto, in the fastest order; plain, as loaded; native, as in a GGUF file (on CPUs).",
    )
    threads: int | None = setting(
        None, "CPU threads of PyTorch; none: one per core, within the CPU quota.", positive=True
    )
    backend: Backend = setting(Backend.ENGINE, "What computes answers: engine (this package) or vllm.", places=SERVERS)
    served_model_name: str | None = setting(
        None,
        "Model's name in /v1/models; none: its folder or hub name, with +ADAPTER for an adapter.",
        places=frozenset({Place.ENGINE}),
    )

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        if self.model is not None and self.shape is not None:
            raise UsageError("give either model (--model FOLDER) or shape, not both")
        if self.adapter is not None and self.shape is not None:
            raise UsageError("an adapter is for a model (--model FOLDER): random weights have none")

    @property
    def name(self) -> str:
        """The model's name for clients: the configured name, a hub name, or a folder's name; never a path."""
        if name := self.served_model_name or self.shape:
            return name
        model = self.model or ""
        return adapted_name(model if is_hub_name(model) else Path(model).resolve().name, self.adapter)


@dataclass(frozen=True, slots=True)
class PluginConfig(SettingsGroup):
    """Plug-in files.

    The constructor runs these files. They are code, so no request may name one.
    """

    method_file: tuple[str, ...] = setting(
        (),
        "Python file with your own reuse method, ordering or eviction policy (docs/extending.md); repeatable.",
    )

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        load_plugin_files(self.method_file)


@dataclass(frozen=True, slots=True)
class RequestDefaults(SettingsGroup, places=REQUESTS):
    """Defaults of requests."""

    method: str | None = setting(
        None,
        "Reuse method, with its settings after colons (`query:whole:late:stored`); `prefix` is exact. none: quality "
        "`balanced` if calibrated, else `prefix`.",
        plugins=METHODS,
    )
    quality: str | None = setting(
        None,
        "Closeness to full prefill if no method is named: exact, balanced or fast; the last two need `chunkweave "
        "calibrate`.",
    )
    order: str | None = setting(
        "fixed",
        "Order of chunks: fixed, as given; free, reordered to maximize reuse (changes the prompt).",
        places=PROGRAMS | {Place.REQUEST},
    )
    choice: Choice = setting(
        Choice.CHEAPEST,
        "Where a method is calibrated: cheapest, exact prefixes or full prefill if they are expected to be no later; "
        "fixed, never, so that answers do not depend on measured times.",
        places=frozenset({Place.ENGINE}),
    )


@dataclass(frozen=True, slots=True)
class StoreConfig(SettingsGroup):
    """Segment store: tiers, budgets, eviction.

    >>> from chunkweave import Engine, StoreConfig
    >>> store = StoreConfig(host_budget_bytes=1 << 30, policy="gdsf")
    >>> with Engine.load("reader", store=store) as engine:
    ...     engine.store.budget_bytes
    1073741824
    """

    host_budget_bytes: int = setting(4 * GIB, "Maximum host memory for segments.")
    policy: str = setting("lru", "Eviction policy.", plugins=POLICIES)
    cost_model: Path | None = setting(
        None,
        "File of prefill times and tiers' speeds, by which segments are loaded or computed; measured and "
        "written at the first start. none: all are loaded.",
    )
    device_budget_bytes: int = setting(0, "Maximum accelerator memory for segments, besides vLLM's own; 0: host only.")
    cache_dir: Path | None = setting(None, "Folder for segments on disk, for later runs and other processes.")
    disk_budget_bytes: int = setting(64 * GIB, "Maximum disk space for segments in cache_dir.")
    remote_url: str | None = setting(None, "Remote store: redis://..., s3://..., file://...", secret=True)
    codec: str = setting("raw", "Encoding on disk and remote: raw, int8 or fp8.")
    admission: int = 1
    """Times a segment is stored or used before it is written to disk or remote."""
    ttl_s: float | None = setting(None, "Maximum age of segments: 30s, 90m, 12h or 7d.", positive=True)
    max_variants: int | None = setting(
        DEFAULT_MAX_VARIANTS,
        "Maximum segments per chunk in different contexts, without exact prefixes; none: no limit.",
        positive=True,
    )
    max_instances: int | None = None
    """Maximum segments in total; none: as many as fit."""
    replicated_nodes: int = 64
    """With device_budget, most used upper nodes with a copy in host memory (RAGCache §6)."""
    pinned_bytes: int | None = None
    """With a GPU, maximum page-locked part of host_budget; none: all."""
    device_staging_bytes: int = GIB
    """With a GPU, maximum device memory for KV sent ahead of its layer, over all requests; 0: none."""

    @property
    def most_pinned_bytes(self) -> int:
        """Maximum page-locked bytes, with a GPU."""
        return self.host_budget_bytes if self.pinned_bytes is None else self.pinned_bytes

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        if self.max_instances == 0:
            raise UsageError("max_instances must be positive, not 0; None sets no limit")
        if self.remote_url is not None and "://" not in self.remote_url:
            raise UsageError("remote_url must be a URL such as redis://host:6379 or s3://bucket/path")


@dataclass(frozen=True, slots=True)
class FindConfig(SettingsGroup, places=SERVERS | {Place.CONNECTOR}):
    """Chunks found in prompts that name none."""

    find_chunks: bool = setting(
        False,
        "Find chunks in prompts that name none.",
        places=SERVERS | {Place.CONNECTOR, Place.REQUEST},
    )


class AttentionKernel(StrEnum):
    """Implementations of attention."""

    AUTO = "auto"
    """The Triton kernel on CUDA; oneDNN on CPUs with bfloat16 products and no AMX; PyTorch where neither runs."""
    TRITON = "triton"
    ONEDNN = "onednn"
    SDPA = "sdpa"


@dataclass(frozen=True, slots=True)
class ComputeConfig(SettingsGroup, places=_OWN_ENGINE):
    """How a model runs on its device. None of it changes results by more than rounding.

    With `decode_graphs`, on CUDA with the Triton kernel, a step of decoding requests only is recorded once as a CUDA
    graph and replayed: one launch instead of hundreds, 6 ms a token instead of 24 (Llama-3-8B's shape, an H200).
    """

    attention: AttentionKernel = AttentionKernel.AUTO
    """Attention kernel: auto, triton, onednn or sdpa."""
    decode_graphs: bool = True
    """On CUDA, decode by recorded graphs."""
    draft_tokens: int = setting(
        0,
        "Maximum tokens per request and step that are guessed from the prompt and checked together (prompt lookup "
        "decoding); 0: off.",
    )
    pinned_bytes: int = 4 * GIB
    """On CUDA, maximum page-locked host memory for segments from slower tiers."""


class ContextSource(StrEnum):
    """Contexts for chunks that are computed ahead of requests."""

    BUNDLED = "bundled"
    """Neutral passages: text about no document."""
    CORPUS = "corpus"
    """The nearest chunks of the same corpus or request: the mean over several such contexts."""


@dataclass(frozen=True, slots=True)
class CaptureConfig(SettingsGroup):
    """What a prefill stores besides KV, and contexts of chunks computed ahead.

    `profile`: record what the tokens of those parts attend to (Cache-Craft §3.1), averaged over `layers` layers and
    `heads` query heads, evenly spread (None: all). The last layer is excluded, because only one token completes it.
    Methods that score segments by attention need this record. Recording delays the first token, so by default it is
    done only if the request's method or the default one reads it (`planning.method_choice.Kept`).

    `variant_fraction`: if `cachecraft` recomputed at least this share of a reused chunk's tokens, the result is stored
    as a variant for the prompt's context (Cache-Craft §3.3; None: never). The other tokens keep KV of an earlier
    context, so the variant's `SegmentRecord.generation` is one higher. A variant of generation `variant_generations` is
    recomputed whole if any of its tokens must be (None: no limit; not in the paper).

    A chunk that is computed ahead of requests is placed after the instruction and up to `neutral_tokens` tokens of
    neutral passages, from `neutral_file` or bundled (`prompt.parts.neutral_passages`); with 0 it is computed alone.
    With `contexts` = `corpus` it is the mean over `context_count` contexts of other chunks, at least `context_tokens`
    tokens each (docs/methods.md). Without other chunks it is placed after neutral passages.
    """

    profile: bool | None = None
    """Store what tokens of new chunks attend to; none: if the request's or the default method reads it."""
    neutral_tokens: int = 400
    """Tokens of neutral passages before a chunk computed beforehand; 0: alone, without the instruction."""
    neutral_file: Path | None = None
    """Neutral passages, separated by empty lines; none: neutral.txt beside the model, or bundled ones."""
    contexts: ContextSource = setting(
        ContextSource.CORPUS,
        "Contexts of chunks computed beforehand: `corpus`, a mean over several of nearest chunks in the same corpus or "
        "request; `bundled`, neutral passages (for documents that not all readers may see).",
        places=PROGRAMS,
    )
    context_count: int = 4
    """Contexts per chunk computed beforehand, up to 32; compute time is proportional."""
    context_tokens: int = 400
    """Minimum tokens of other chunks per context, if there are enough."""
    layers: int | None = 8
    heads: int | None = 4
    variant_fraction: float | None = 0.0
    """cachecraft stores a reused chunk as a variant if all tokens it chose, and at least this share, were recomputed;
    none: never.
    """
    variant_generations: int | None = 2
    """Generations of variants after which a chunk is recomputed whole; none: no limit."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        if min(1 if count is None else count for count in (self.layers, self.heads)) < 1:
            raise UsageError(f"attention is averaged over at least one layer and head, not {self.layers}, {self.heads}")
        if not 1 <= self.context_count <= 32:
            raise UsageError(f"context_count must be between 1 and 32, not {self.context_count}")
        if self.context_tokens < 1:
            raise UsageError(f"context_tokens must be at least 1, not {self.context_tokens}")
        if self.variant_fraction is not None and not 0 <= self.variant_fraction <= 1:
            raise UsageError(f"variant_fraction must be between 0 and 1, not {self.variant_fraction}")


class Combine(StrEnum):
    """How several numbers about one token are combined."""

    SUM = "sum"
    MAX = "max"


class WatchedLayers(StrEnum):
    """The layers in which the question's attention is read."""

    ALL = "all"
    LATE = "late"
    """The second half, where the question attends to the words of the answer."""
    FIRST_THIRD = "first-third"
    """The first third, so that recomputation starts while a slow tier still loads the rest."""

    def of(self, num_layers: int) -> tuple[int, ...]:
        """Layer numbers for a model of `num_layers` layers; at least one.

        >>> WatchedLayers.FIRST_THIRD.of(8), WatchedLayers.LATE.of(3)
        ((0, 1, 2), (1, 2))
        """
        if self is WatchedLayers.FIRST_THIRD:
            return tuple(range(ceil(num_layers / 3)))
        return tuple(range(num_layers // 2 if self is WatchedLayers.LATE else 0, num_layers))


class DeviationFactor(StrEnum):
    """Factor on the question's attention to a token: an estimate of how far its KV deviates from the stored KV."""

    NONE = "none"
    STORED = "stored"
    """The token's attention to earlier chunks when it was computed in a context (Cache-Craft eq. 14)."""


@dataclass(frozen=True, slots=True)
class QueryConfig:
    """Settings of the method `query`: how it reads the question's attention.

    The attention of the question's last `tail` tokens (None: all) is read in `layers` and multiplied by `factor`.
    """

    tail: int | None = 1
    layers: WatchedLayers = WatchedLayers.ALL
    factor: DeviationFactor = DeviationFactor.NONE

    def __post_init__(self) -> None:
        if self.tail is not None and self.tail < 1:
            raise UsageError(f"at least one token of the question must be watched, not {self.tail}")


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Parameters of reuse methods.

    Each method reads those it has: `recompute_ratio` is the share of the reused chunks' tokens to recompute (0 to 1),
    `check_layers` are where CacheBlend compares fresh with cached KV, `alpha` is Cache-Craft's scale of the recomputed
    share (its eq. 12: 0 nothing, 3 nearly all), with `focus` it stops recomputing chunks that the question does not
    attend to, `query` is for the method of that name, `seed` for random choices. A request changes them by settings
    after the method's name: `cacheblend:ratio=0.3`, `query:whole:late:stored`.

    `capture` belongs to no method: it says what a prefill stores for later requests. `choice` is about requests that
    name none.

    >>> from chunkweave import Engine
    >>> with Engine.load("reader", method="cacheblend:ratio=0.3") as engine:
    ...     answer = engine.generate("Who leads the choir?", ["It is led by Otto Gunmark."])
    >>> answer.report.parameters
    {'recompute_ratio': 0.3, 'check_layers': [1]}
    """

    recompute_ratio: float = DEFAULT_RECOMPUTE_RATIO
    check_layers: tuple[int, ...] = (1,)
    seed: int = 0
    alpha: float = 1.0
    focus: bool = True
    query: QueryConfig = QueryConfig()
    capture: CaptureConfig = CaptureConfig()
    choice: Choice = Choice.CHEAPEST

    def __post_init__(self) -> None:
        if not 0 <= self.recompute_ratio <= 1:
            raise UsageError(f"recompute_ratio must be between 0 and 1, not {self.recompute_ratio}")
        if not 0 <= self.alpha < inf:
            raise UsageError(f"alpha must be a number from 0 on, not {self.alpha}")
        layers = self.check_layers
        if not layers or min(layers) < 1 or list(layers) != sorted(set(layers)):
            raise UsageError(
                f"check_layers must be ascending layer numbers from 1 on (layer 0 cannot deviate), not {layers}"
            )


_WEAVES = frozenset({Place.VLLM, Place.CONNECTOR})


@dataclass(frozen=True, slots=True)
class WeaveConfig(SettingsGroup, places=_WEAVES):
    """How woven requests share vLLM's steps."""

    weave_step_tokens: int | None = setting(
        None,
        "Tokens that weaves compute, through all layers, in a step shared with other requests; none: 1/8 of vLLM's "
        "max_num_batched_tokens.",
        positive=True,
    )


class AnswerMatching(Protocol):
    """How far one answer has matched its grammar."""

    def masked(self, logits: Any) -> Any:
        """Logits `[vocab]` with -inf for all tokens that may not come next."""

    def take(self, token: int) -> None:
        """Add the next token; raises an error if the grammar refuses it."""

    @property
    def ended(self) -> bool:
        """Whether the grammar allows no further token."""


class AnswerGrammar(Protocol):
    """A grammar compiled for the model's tokenizer (`chunkweave.engine.grammar`)."""

    def begin(self) -> AnswerMatching:
        """The state of a new answer."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled and when to stop. `temperature=0` is greedy and deterministic.

    `logprobs` is the number of alternatives whose log-probabilities are returned with each token's own; None: none are.
    Answers match the `grammar`, if one is given.

    >>> from chunkweave import SamplingParams
    >>> SamplingParams(max_new_tokens=32).temperature, SamplingParams(temperature=0.7, top_p=0.9, seed=1).temperature
    (0.0, 0.7)
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())
    logprobs: int | None = None
    grammar: AnswerGrammar | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and self.logprobs < 0:
            raise UsageError(f"logprobs must not be negative, not {self.logprobs}")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not self.temperature >= 0.0:
            raise UsageError(f"temperature must not be negative, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if any(not text for text in self.stop):
            raise UsageError("a stop text must not be empty")


def resolve_device(device: str, *, cuda_available: bool) -> str:
    """Resolve `auto` to `cuda` if available, else `cpu`; any other value is returned unchanged.

    Raises:
        UsageError: CUDA was requested but is not available.
    """
    if device == "auto":
        return "cuda" if cuda_available else "cpu"
    if device.startswith("cuda") and not cuda_available:
        raise UsageError(f"device {device!r} was asked for, but PyTorch sees no CUDA GPU; use device='cpu'")
    return device


DTYPES_ON_CPU = ("float32", "bfloat16")
"""What models compute in on CPUs."""


def resolve_dtype(dtype: str, *, device: str, checkpoint: str, fast_bf16: bool) -> str:
    """The name of the floating-point type to compute in.

    `auto` takes the checkpoint's type on CUDA. On a CPU a half-precision checkpoint runs in bfloat16 if that is faster
    there (`fast_bf16`), else in float32.

    Raises:
        UsageError: an unknown type, or float16 on a CPU.
    """
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    name = short.get(dtype, dtype)
    if name == "auto":
        if device != "cpu":
            return checkpoint
        return "bfloat16" if fast_bf16 and checkpoint in ("bfloat16", "float16") else "float32"
    if name not in short.values():
        raise UsageError(f"unknown dtype {dtype!r}; use auto, float32, bfloat16 or float16")
    if name == "float16" and device == "cpu":
        raise UsageError("float16 is not supported on a CPU; use bfloat16 or float32")
    return name
