"""Small frozen configurations, checked when they are made, and the pure functions that resolve "auto"."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from pathlib import Path

from chunkweave.errors import UsageError
from chunkweave.plugins import METHODS, POLICIES, load_plugin_files
from chunkweave.settings import GIB, PROGRAMS, REQUESTS, SERVERS, Place, configuration, setting

DEFAULT_RECOMPUTE_RATIO = 0.15
"""CacheBlend §5.1: the least ratio with negligible loss of quality in its Figure 16."""

DEFAULT_MAX_VARIANTS = 5
"""M of Cache-Craft's evaluation (its §5.1.2)."""


_OWN_ENGINE = frozenset({Place.COMMANDS, Place.ENGINE})
"""Places with an engine of ours: in the others vLLM loads the model, batches, and has the accelerator's memory."""


_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)


def is_hub_name(model: str) -> bool:
    """Whether a model is named as on the Hugging Face hub, `MAKER/NAME`: a folder of that name here comes first.

    >>> is_hub_name("Qwen/Qwen2.5-0.5B-Instruct"), is_hub_name("./models/qwen"), is_hub_name("models/qwen.gguf")
    (True, False, False)
    """
    return _HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).exists()


def adapted_name(model: str, adapter: str | Path | None) -> str:
    """What a model is called whose weights an adapter was merged into.

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

    @property
    def place(self) -> Place:
        """Where its settings are changed."""
        return Place(self.value)


class Weights(StrEnum):
    """How the weights of a model's linear layers are kept."""

    AUTO = "auto"
    """In the order that oneDNN reads them in, where that is faster: bfloat16 on CPUs. Not a bit of a result differs."""
    PLAIN = "plain"
    """As transformers loads them."""
    INT8 = "int8"
    """One byte a weight, on CPUs: half the memory of bfloat16, and slightly other results."""


@configuration(_OWN_ENGINE)
@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model answers, and what computes it."""

    model: str | None = setting(
        None,
        "Checkpoint folder in Hugging Face format, hub name, GGUF file, `smollm2`, or the bundled `reader`.",
        places=PROGRAMS,
    )
    adapter: str | None = setting(
        None,
        "LoRA adapter of the model: folder in PEFT's format, or the name of a bundled one.",
        places=PROGRAMS,
    )
    shape: str | None = setting(None, "Random-weight model of a known geometry, for timing: its text means nothing.")
    device: str = setting("auto", "auto, cpu or cuda.")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16.")
    weights: Weights = setting(
        Weights.AUTO,
        "How weights are kept: auto, in the order that is read fastest; plain, as they are loaded; int8, a byte each, "
        "on CPUs. vLLM has its own --quantization.",
    )
    backend: Backend = setting(
        Backend.ENGINE, "What computes answers: engine, the one of this package, or vllm.", places=SERVERS
    )
    served_model_name: str | None = setting(
        None,
        "What /v1/models calls the model; its folder's or hub name if left out, with +ADAPTER where it has one.",
        places=frozenset({Place.ENGINE}),
    )

    def __post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise UsageError("give either model (--model FOLDER) or shape (--shape NAME), not both")
        if self.adapter is not None and self.shape is not None:
            raise UsageError("an adapter (--adapter FOLDER) is for a model (--model FOLDER): random weights have none")

    @property
    def name(self) -> str:
        """What clients call the model: a name that was given, a hub name, or a folder's name; never a path."""
        if name := self.served_model_name or self.shape:
            return name
        model = self.model or ""
        return adapted_name(model if is_hub_name(model) else Path(model).resolve().name, self.adapter)


@configuration()
@dataclass(frozen=True, slots=True)
class PluginConfig:
    """Files that bring methods, orderings and eviction policies.

    They run when this is made. They are code: what is read from a request never gets here.
    """

    method_file: tuple[str, ...] = setting(
        (),
        "Python file with a reuse method, ordering or eviction policy of your own (docs/extending.md); repeatable.",
    )

    def __post_init__(self) -> None:
        load_plugin_files(self.method_file)


@configuration(REQUESTS)
@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What a request gets that does not say."""

    method: str | None = setting(
        None,
        "Reuse method of requests that name none, with its settings after colons if it has any "
        "(`query:whole:late:stored`); `prefix` is exact. Else `balanced` if calibrated, or prefix.",
        plugins=METHODS,
    )
    quality: str | None = setting(
        None,
        "exact, balanced or fast, for requests that name neither this nor a method: how close to full prefill; the "
        "last two need `chunkweave calibrate`.",
    )
    order: str | None = setting(
        "fixed",
        "fixed: chunks stand as they come; free: as is best for reuse, which is another prompt than the one sent.",
        places=PROGRAMS | {Place.REQUEST},
    )
    document_tag: str = setting(
        "",
        "Tag between which messages have documents, for clients that know no `documents`: doc reads <doc>...</doc>; "
        "none: off.",
        places=SERVERS,
    )

    def __post_init__(self) -> None:
        if self.document_tag and not re.fullmatch(r"[A-Za-z][\w-]*", self.document_tag):
            raise UsageError(f"document_tag must be a name such as doc, without brackets, not {self.document_tag!r}")


@configuration()
@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where segments are kept, how much room they may take there, and which one leaves first when it is full.

    >>> from chunkweave import Engine, StoreConfig
    >>> store = StoreConfig(host_budget_bytes=1 << 30, policy="gdsf")
    >>> with Engine.load("reader", store=store) as engine:
    ...     engine.store.budget_bytes
    1073741824
    """

    host_budget_bytes: int = setting(4 * GIB, "Most host memory for stored segments.", least=0)
    policy: str = setting("lru", "Eviction policy.", plugins=POLICIES)
    cost_model: Path | None = setting(
        None,
        "File of `chunkweave profile`, for policies that weigh what computing costs (pgdsf), and for loading; none: "
        "the one in cache_dir, else prefill is measured at the first start, for such policies alone.",
    )
    device_budget_bytes: int = setting(
        0, "Most accelerator memory for stored segments, beside vLLM's own; 0 keeps them on the host.", least=0
    )
    cache_dir: Path | None = setting(
        None, "Folder that keeps segments on disk, for later runs and for other processes."
    )
    disk_budget_bytes: int = setting(64 * GIB, "Most disk space for stored segments, with cache_dir.", least=0)
    remote_url: str | None = setting(
        None, "Another machine that keeps segments too: redis://..., s3://..., file://...", secret=True
    )
    remote_budget_bytes: int | None = setting(
        None, "Most bytes that this process keeps at remote_url; none leaves it to the server.", least=0
    )
    codec: str = setting("raw", "How segments are encoded on disk and remote: raw, int8 or fp8.")
    admission: int = setting(1, "Write a segment to disk or remote once it was seen so often.", least=1)
    ttl_s: float | None = setting(None, "Drop segments older than that: 30s, 90m, 12h or 7d.", above=0)
    max_variants: int | None = setting(
        DEFAULT_MAX_VARIANTS, "Most segments of one chunk in different contexts, beside exact prefixes; none: all."
    )
    max_instances: int | None = setting(None, "Most segments in all; none: as many as fit.")
    replicated_nodes: int = setting(
        64,
        "With device_budget, so many of the most used upper nodes have a copy in host memory (RAGCache §6); 0: none.",
        least=0,
    )
    pinned_bytes: int | None = setting(
        None,
        "With a GPU, most of host_budget that is page-locked, so that it reads while it computes; none: all.",
        name="host_pinned",
        least=0,
    )

    @property
    def most_pinned_bytes(self) -> int:
        """Most bytes that are page-locked, with a GPU."""
        return self.host_budget_bytes if self.pinned_bytes is None else self.pinned_bytes

    def __post_init__(self) -> None:
        for limit in (self.max_variants, self.max_instances):
            if limit is not None and limit < 1:
                raise UsageError(f"at least one variant must be allowed, not {limit}; None sets no limit")
        if self.remote_url is not None and "://" not in self.remote_url:
            raise UsageError("remote_url must be a URL such as redis://host:6379 or s3://bucket/path")


class AttentionKernel(StrEnum):
    """What computes attention."""

    AUTO = "auto"
    """Our Triton kernel on CUDA, oneDNN on CPUs with bfloat16 products and no AMX; PyTorch's where neither runs."""
    TRITON = "triton"
    ONEDNN = "onednn"
    SDPA = "sdpa"


@configuration(_OWN_ENGINE)
@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """How a model is run on its device; none of it changes what is computed.

    With `decode_graphs`, on CUDA and with the Triton kernel, a step in which all requests decode is recorded once as a
    CUDA graph and replayed, so that it costs one launch instead of hundreds.
    """

    attention: AttentionKernel = setting(AttentionKernel.AUTO, "What computes attention: auto, triton, onednn or sdpa.")
    decode_graphs: bool = setting(False, "On CUDA, decode by recorded graphs.")
    pinned_bytes: int = setting(
        4 * GIB,
        "On CUDA, most page-locked host memory for segments on their way from slower tiers.",
        name="staging_pinned",
        least=0,
    )


class ContextSource(StrEnum):
    """What chunks are computed behind before anybody asks."""

    BUNDLED = "bundled"
    """Neutral passages: text that concerns no document."""
    CORPUS = "corpus"
    """The nearest chunks of the same corpus, or of the same request: the mean over several such contexts."""


@configuration()
@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """What a prefill keeps for the store, besides the KV of the parts that it computed.

    With `profile` it notes what the tokens of those parts attend to (Cache-Craft §3.1), averaged over that many
    `layers` and query `heads`, evenly spread (None: all; the last layer is never among them, since it is finished for
    one token only). Without, a method that scores segments by their attention finds nothing to score later. Noting
    costs time to the first token, so that by default no request pays for what neither its own method nor the usual
    one reads (`planning.method_choice.Kept`).

    What `cachecraft` has recomputed of a reused chunk becomes a variant of this prompt's context, if it is at least
    `variant_fraction` of its tokens (Cache-Craft §3.3; None: never). Its other tokens keep KV of an earlier context, so
    that it is of the next generation (`SegmentRecord.generation`). One of `variant_generations` is recomputed whole
    where anything of it has to be (None: no limit; not in the paper).

    What is computed before anybody asks comes behind the instruction and at most `neutral_tokens` tokens of neutral
    passages, those of `neutral_file` or others (`prompt.parts.neutral_passages`); with 0 it is computed alone. With
    `contexts` of the corpus it is the mean over `context_count` contexts of other chunks instead, of `context_tokens`
    tokens each (docs/methods.md). Where there are no other chunks, it comes behind neutral passages.
    """

    profile: bool | None = setting(
        None,
        "Keep what the tokens of new chunks attend to, for cachecraft; none: if the request's method or the "
        "usual one reads it.",
        name="capture",
    )
    neutral_tokens: int = setting(
        400,
        "Tokens of neutral passages that a chunk is computed behind when it is computed beforehand; 0: it is computed "
        "alone, without the instruction too.",
        places=PROGRAMS,
        least=0,
    )
    neutral_file: Path | None = setting(
        None,
        "Neutral passages, separated by empty lines, of the kind of your documents; none: neutral.txt beside the "
        "model, or the bundled ones.",
        places=PROGRAMS,
    )
    contexts: ContextSource = setting(
        ContextSource.CORPUS,
        "What chunks are computed behind beforehand: `corpus`, the nearest chunks of the same corpus or request, "
        "several times, and the mean is kept; or `bundled`, neutral passages, once (for documents that not all readers "
        "may see).",
        places=PROGRAMS,
    )
    context_count: int = setting(
        4,
        "In how many contexts a chunk is computed beforehand: computing it takes as many times as long.",
        places=PROGRAMS,
        least=1,
        most=32,
    )
    context_tokens: int = setting(
        400,
        "Least tokens of other chunks in each of these contexts, as far as there are so many.",
        places=PROGRAMS,
        least=1,
    )
    layers: int | None = 8
    heads: int | None = 4
    variant_fraction: float | None = setting(
        0.0,
        "cachecraft stores a reused chunk as a variant of its new context if this share of its tokens, and all that it "
        "chose, was recomputed; none: no variants.",
        least=0,
        most=1,
    )
    variant_generations: int | None = setting(
        2,
        "A variant that was made from another one so many times in a row is recomputed whole; none: no limit.",
        least=1,
    )

    def __post_init__(self) -> None:
        if min(1 if count is None else count for count in (self.layers, self.heads)) < 1:
            raise UsageError(f"attention is averaged over at least one layer and head, not {self.layers}, {self.heads}")


class Combine(StrEnum):
    """How several numbers about one token become one."""

    SUM = "sum"
    MAX = "max"


class WatchedLayers(StrEnum):
    """In which layers the question's attention is read."""

    ALL = "all"
    LATE = "late"
    """The second half, where it looks for the answer's words."""
    FIRST_THIRD = "first-third"
    """So that recomputation can start while the rest of a slow tier still loads."""

    def of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a model with that many, at least one.

        >>> WatchedLayers.FIRST_THIRD.of(8), WatchedLayers.LATE.of(3)
        ((0, 1, 2), (1, 2))
        """
        if self is WatchedLayers.FIRST_THIRD:
            return tuple(range(ceil(num_layers / 3)))
        return tuple(range(num_layers // 2 if self is WatchedLayers.LATE else 0, num_layers))


class DeviationFactor(StrEnum):
    """By what the question's attention on a token is multiplied: how much its KV may differ from what is stored."""

    NONE = "none"
    STORED = "stored"
    """What the token gave to earlier chunks when it was computed in a context (Cache-Craft eq. 14)."""


@dataclass(frozen=True, slots=True)
class QueryConfig:
    """How the method `query` reads the question's attention and what it makes of it.

    The attention of the question's last `tail` tokens (None: of all) is read in `layers` and multiplied by `factor`.
    With 2 `rounds` the question is asked again after half the budget was spent, about the other half.
    """

    tail: int | None = 1
    layers: WatchedLayers = WatchedLayers.ALL
    factor: DeviationFactor = DeviationFactor.NONE
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.tail is not None and self.tail < 1:
            raise UsageError(f"at least one token of the question must be watched, not {self.tail}")
        if self.rounds not in (1, 2):
            raise UsageError(f"there are 1 or 2 rounds, not {self.rounds}")


@configuration(REQUESTS)
@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Parameters of reuse methods; each takes those that concern it.

    A request may say `recompute_ratio` (the share of the reused chunks' tokens that are computed again), `check_layers`
    (where CacheBlend compares fresh with cached KV), `alpha` (Cache-Craft's scale of the share of a chunk that is
    recomputed, its eq. 12) and `focus` (whether Cache-Craft stops recomputing chunks that the question does not attend
    to), each with a method that takes it. `seed` feeds what is drawn at random.

    `query` has the settings of that method, which a request says after colons (`query:whole:late:stored`). `capture` is
    no method's: it says what is kept of a prefill for the methods of later ones.

    >>> from chunkweave import Engine, ReuseConfig
    >>> with Engine.load("reader", method="cacheblend", reuse=ReuseConfig(recompute_ratio=0.3)) as engine:
    ...     answer = engine.generate("Who leads the choir?", ["It is led by Otto Gunmark."])
    >>> answer.report.parameters
    {'recompute_ratio': 0.3, 'check_layers': [1]}
    """

    recompute_ratio: float = setting(
        DEFAULT_RECOMPUTE_RATIO,
        "Share of the reused chunks' tokens that a named method computes again, 0 to 1.",
        least=0,
        most=1,
    )
    check_layers: tuple[int, ...] = setting((1,), "Layers at which cacheblend compares fresh with cached KV.")
    seed: int = setting(0, "Feeds what a method draws at random.", places=frozenset({Place.CONNECTOR}))
    alpha: float = setting(1.0, "Scale of what cachecraft computes again: 0 nothing, 3 nearly all.", least=0)
    focus: bool = setting(
        True,
        "Have cachecraft stop to compute again chunks that the question does not attend to.",
    )
    query: QueryConfig = QueryConfig()
    capture: CaptureConfig = CaptureConfig()

    def __post_init__(self) -> None:
        layers = self.check_layers
        if not layers or min(layers) < 1 or list(layers) != sorted(set(layers)):
            raise UsageError(
                f"check_layers must be ascending layer numbers from 1 on (layer 0 cannot deviate), not {layers}"
            )


_WEAVES = frozenset({Place.VLLM, Place.CONNECTOR})


@configuration(PROGRAMS)
@dataclass(frozen=True, slots=True)
class ConversationConfig:
    """How long conversations may get and how many there may be.

    Where a turn's prompt would have more than `max_tokens`, the oldest turns are cut off: as many latest ones stay as
    fit, and have at most the share `keep` of those tokens. The less stays, the more turns go by until the next cut,
    which makes exact mode compute again what is kept: with a half, all cuts together about double what a long
    conversation computes. `deduplicate` is CRAFT's §4.3; it changes what the model reads, so it is asked for.

    >>> from chunkweave import ConversationConfig, Engine
    >>> with Engine.load("reader", conversations=ConversationConfig(max_tokens=512, deduplicate=True)) as engine:
    ...     engine.conversation().turns
    0
    """

    max_tokens: int | None = setting(
        None,
        "Most tokens of a turn's prompt, older turns are cut off; none: the model's context, less the answer.",
        name="conversation_tokens",
        least=1,
    )
    keep: float = setting(
        0.5, "Share of conversation_tokens that a cut leaves at most.", name="conversation_keep", least=0, most=1
    )
    deduplicate: bool = setting(
        False, "Do not send a chunk again that an earlier turn has, of a conversation or of the same messages."
    )
    max_conversations: int = setting(
        1024,
        "Conversations that are kept; of more, the one that was idle longest is forgotten, of a tenant with more than "
        "its share.",
        places=SERVERS,
        least=1,
    )
    share: int | None = setting(
        None,
        "Conversations of each tenant that others' never push out, up to an equal part of max_conversations for each "
        "tenant that has any; none: that part.",
        name="conversation_share",
        places=SERVERS,
        least=1,
    )
    idle_s: float | None = setting(
        3600.0,
        "Forget a conversation that was idle for so long; none: never.",
        name="conversation_idle",
        places=SERVERS,
        above=0,
    )


@configuration(_WEAVES)
@dataclass(frozen=True, slots=True)
class WeaveConfig:
    """How woven requests share vLLM's steps.

    A request whose segments were not read within `load_timeout_s` is computed by vLLM. So is one that has waited that
    long for chunks that another request computes.
    """

    weave_step_tokens: int | None = setting(
        None,
        "Tokens that weaves compute, through all layers, in a step with other requests; none: an eighth of vLLM's "
        "max_num_batched_tokens.",
        least=1,
    )
    load_timeout_s: float = setting(
        10.0,
        "Maximum wait for a request's segments, and for chunks that another request computes, before it is prefilled "
        "normally.",
        above=0,
    )
    lookup_timeout_s: float = setting(
        0.5, "Maximum wait for a remote lookup before the request is prefilled normally.", above=0
    )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `temperature=0` is greedy and deterministic.

    >>> from chunkweave import SamplingParams
    >>> SamplingParams(max_new_tokens=32).greedy, SamplingParams(temperature=0.7, top_p=0.9, seed=1).greedy
    (True, False)
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not self.temperature >= 0.0:
            raise UsageError(f"temperature must not be negative, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if any(not text for text in self.stop):
            raise UsageError("a stop text must not be empty")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0.0


def resolve_device(device: str, *, cuda_available: bool) -> str:
    """`auto` becomes `cuda` where there is one, else `cpu`; anything else stays.

    Raises:
        UsageError: CUDA was asked for and is not there.
    """
    if device == "auto":
        return "cuda" if cuda_available else "cpu"
    if device.startswith("cuda") and not cuda_available:
        raise UsageError(f"device {device!r} was asked for, but PyTorch sees no CUDA GPU; use device='cpu'")
    return device


def resolve_dtype(dtype: str, *, device: str, checkpoint: str, fast_bf16: bool) -> str:
    """The name of the floating-point type to compute in.

    `auto` takes the checkpoint's type on CUDA. On a CPU a half-precision checkpoint is computed in bfloat16 where the
    CPU has instructions for it (`fast_bf16`) and in float32 elsewhere.

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
