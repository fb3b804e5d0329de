"""Measures how close reuse methods come to full prefill of the same model on the same prompts. Needs no labels.

Full prefill answers each question greedily. The same tokens are fed to every contender, and at each of them its
next-token distribution is compared with full prefill's. The time to the first token is measured in the same run. If the
data set has answers, their likelihoods are compared too.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from chunkweave.calibration.contenders import make_contenders
from chunkweave.calibration.prompts import ContextCorpus, PromptMaker, Warming, Warmth, company_of, prefill_and_store
from chunkweave.calibration.questions import Example
from chunkweave.calibration.summaries import FidelitySample, f1
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO, ReuseConfig, StoreConfig
from chunkweave.conversation.answer import Durations
from chunkweave.engine.decode import make_report
from chunkweave.engine.engine import Engine, Progress
from chunkweave.engine.prefill import PrefillOptions
from chunkweave.engine.runner import Prefilled, Runner
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.models.attention import attend_masked, seen_keys
from chunkweave.models.base import LayerwiseModel
from chunkweave.planning.method import ReuseMethod, make_method
from chunkweave.prompt.parts import Prompt

REFERENCE = "full"
"""The contender that the others are compared with."""

FULL_REUSE = "full-reuse"

SLICED = "full-in-slices"
"""Full prefill in slices of `SLICE_TOKENS`: it differs from full prefill only by rounding, which is the noise floor."""

SLICE_TOKENS = 256

HELD = 16
"""Maximum number of contenders whose caches are held until full prefill has run on the question."""

EXACT = (SLICED, "prefix")
"""Contenders that differ from full prefill only by rounding: a few questions are enough."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The settings of a measurement.

    Contenders are full prefill, full KV reuse, the noise floor, and the methods of `make_contenders`. Chunks have
    `chunk_tokens` tokens (0: passages stay whole); they are the question's own, or found `by_retrieval`. `new_tokens`
    limits the continuation; answers are also decoded freely on the first `free` questions.
    """

    methods: tuple[str, ...]
    ratios: tuple[float, ...] = (DEFAULT_RECOMPUTE_RATIO,)
    alphas: tuple[float, ...] = (1.0,)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    warm: Warming = field(default_factory=Warmth)
    chunks: int = 6
    chunk_tokens: int = 0
    by_retrieval: bool = False
    new_tokens: int = 16
    free: int = 40

    def __post_init__(self) -> None:
        if self.new_tokens < 1:
            raise UsageError(f"new_tokens must be at least 1, not {self.new_tokens}")
        if self.free < 0:
            raise UsageError(f"free must not be negative, not {self.free}")
        self.contenders()

    def contenders(self) -> dict[str, ReuseMethod]:
        """The methods by name of their rows; full prefill and full reuse are first.

        Raises:
            UnknownMethodError: a method does not exist.
            UsageError: a value is out of range, or a setting unknown.
        """
        return make_contenders((REFERENCE, FULL_REUSE, *self.methods), self.ratios, self.alphas, self.reuse)


@dataclass(frozen=True, slots=True)
class Task:
    """One question: its prompt, the tokens of the first right answer, and all right answers.

    `corpus` is the source of its chunks.
    """

    prompt: Prompt
    answer_ids: tuple[int, ...]
    answers: tuple[str, ...]
    corpus: ContextCorpus | None = None


def make_tasks(
    engine: Engine,
    examples: Sequence[Example],
    drawn: Sequence[Example],
    config: Comparison,
    instruction: str | None = None,
) -> list[Task]:
    """The drawn examples as tasks; if an example has too few passages, others of `examples` are added.

    `instruction=None` means the template's.

    Raises:
        UsageError: the data set has too little text.
        PromptTooLongError: a prompt does not fit the model's context.
    """
    maker = PromptMaker(
        examples,
        engine.builder,
        engine.loaded.fingerprint,
        chunks=config.chunks,
        chunk_tokens=config.chunk_tokens,
        instruction=instruction,
        by_retrieval=config.by_retrieval,
    )
    corpus = ContextCorpus(maker, grouped=not config.by_retrieval)
    tasks = []
    for example in drawn:
        prompt = maker.prompt(example)
        answer_ids = engine.builder.answer_ids(example.answers[0]) if example.answers else ()
        engine.runner.room_for_new_tokens(prompt)
        tasks.append(Task(prompt, answer_ids, example.answers, corpus))
    return tasks


def warm_by_earlier(engine: Engine, earlier: Sequence[Task], progress: Progress | None = None) -> None:
    """Prefill earlier requests in full and store them."""
    for done, task in enumerate(earlier, start=1):
        prefill_and_store(engine, task.prompt)
        if progress is not None:
            progress(done, len(earlier))


def prepare(engine: Engine, tasks: Sequence[Task], index: int, warm: Warming) -> None:
    """Fill the store for one task."""
    task = tasks[index]
    warm.prepare(engine, task.prompt, company_of([task.prompt for task in tasks], index), task.corpus)


FirstToken = Callable[[Prompt], Prefilled]
"""Prefills a prompt up to its first token and waits for it."""


def woven_prefill(runner: Runner, method: ReuseMethod, *, new_tokens: int = 0) -> FirstToken:
    """A reuse method on our own layer loop, with room for `new_tokens`. Nothing is captured, so nothing is stored."""

    def first_token(prompt: Prompt) -> Prefilled:
        prefilled = runner.prefill(prompt, method, new_tokens=new_tokens, capture=False)
        prefilled.logits.argmax().item()
        return prefilled

    return first_token


def sliced_prefill(runner: Runner, slice_tokens: int, *, new_tokens: int = 0) -> FirstToken:
    """Full prefill in slices of `slice_tokens`, as in a batching engine."""
    full = make_method(REFERENCE)

    @torch.inference_mode()
    def first_token(prompt: Prompt) -> Prefilled:
        with runner.start(prompt, full, PrefillOptions(new_tokens, capture=False)) as job:
            while job.prefilled is None:
                runner.step([], [(job, slice_tokens)])
            job.prefilled.logits.argmax().item()
            return job.prefilled

    return first_token


def measured_report(engine: Engine, prefilled: Prefilled, ttft_s: float) -> ReuseReport:
    """The report of a prefill that took `ttft_s`, without the reports of chunks."""
    return replace(make_report(prefilled, engine.loaded.model.geometry, Durations(ttft_s, 0.0, 0.0), 0), chunks=())


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """A contender's prefill and its report."""

    prefilled: Prefilled
    report: ReuseReport


@dataclass(frozen=True, slots=True)
class Way:
    """The contenders over chunks that were computed in one way, with their own store; `tasks` are for their model.

    `runs` prefill a question's prompt, by name of their rows.
    """

    warm: Warming
    engine: Engine
    tasks: Sequence[Task]
    runs: Mapping[str, FirstToken]

    @property
    def labels(self) -> list[str]:
        """Names of all contenders, in the order of rows."""
        return list(self.runs)

    def run_once(self, prompt: Prompt, labels: Sequence[str]) -> None:
        """Run each prefill once for warm-up."""
        for label in labels:
            self.runs[label](prompt)

    def run(self, prompt: Prompt, label: str) -> Timed:
        """Run and time one contender."""
        started = time.perf_counter()
        prefilled = self.runs[label](prompt)
        return Timed(prefilled, measured_report(self.engine, prefilled, time.perf_counter() - started))


def way_of(
    engine: Engine,
    tasks: Sequence[Task],
    methods: Mapping[str, ReuseMethod],
    config: Comparison,
    *,
    sliced: bool = True,
) -> Way:
    """All `methods` over the engine's store. With `sliced`, full prefill in slices runs too, after full prefill."""
    room = config.new_tokens + 1
    runs = {label: woven_prefill(engine.runner, method, new_tokens=room) for label, method in methods.items()}
    if sliced:
        first = {REFERENCE: runs[REFERENCE], SLICED: sliced_prefill(engine.runner, SLICE_TOKENS, new_tokens=room)}
        runs = {**first, **runs}
    return Way(config.warm, engine, tasks, runs)


def compare(
    ways: Sequence[Way],
    config: Comparison,
    *,
    reference: str = REFERENCE,
    exact: int | None = None,
    skip: Callable[[int], bool] = lambda _: False,
    progress: Progress | None = None,
) -> Iterator[dict[str, FidelitySample]]:
    """Run every contender on every task that is not skipped; yields the samples of a task together, in the order of
    rows.

    Contenders run once for warm-up, then alternate, and take turns in running first. Measured runs store nothing, so
    all contenders find the same store. The `reference` is in the first way. Contenders that are exact up to rounding
    (`EXACT`) run on the first `exact` tasks, by default on those that are answered freely. Each contender is decoded
    separately, as an engine answers one request: in a bfloat16 batch, two tokens of nearly equal probability may swap.
    `progress` counts contenders that have run, over all tasks; skipped ones count with their task.
    """
    labels = [label for way in ways for label in way.labels]
    exactly = {label for label in labels if label.split(" ")[0] in EXACT}
    steps = _Steps(len(labels), len(ways[0].tasks), progress)
    warmed_up = False
    for index in range(len(ways[0].tasks)):
        if not skip(index):
            left_out = set() if index < (config.free if exact is None else exact) else exactly
            question = _Question(index, config, reference, free=index < config.free, ran=steps.ran)
            samples: dict[str, FidelitySample] = {}
            for way in ways:
                prepare(way.engine, way.tasks, index, way.warm)
                order = _taking_turns([label for label in way.labels if label not in left_out], index, reference)
                if not warmed_up:
                    way.run_once(way.tasks[index].prompt, order)
                samples |= question.samples(way, order)
            warmed_up = True
            yield {label: samples[label] for label in labels if label in samples}
        steps.ended(index)


class _Steps:
    """How far a comparison is, in contenders that have run."""

    def __init__(self, contenders: int, tasks: int, progress: Progress | None) -> None:
        self._contenders, self._total, self._progress = contenders, contenders * tasks, progress
        self._done = 0

    def ran(self) -> None:
        """One more contender has run."""
        self._to(self._done + 1)

    def ended(self, index: int) -> None:
        """A task has ended, or was left out."""
        self._to((index + 1) * self._contenders)

    def _to(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(done, self._total)


def _taking_turns(labels: Sequence[str], index: int, reference: str) -> list[str]:
    """Rotates `labels`, so that each is first equally often; the `reference`, if any, is among the first `HELD`."""
    turn = index % len(labels)
    order = [*labels[turn:], *labels[:turn]]
    if reference in order:
        place = order.index(reference)
        order.insert(place % HELD, order.pop(place))
    return order


def beside(engine: Engine, store: StoreConfig | None) -> Engine:
    """Another engine over the same model, with an empty store in memory and the codec and budget of `store`."""
    store = StoreConfig() if store is None else replace(store, cache_dir=None)
    reuse = ReuseConfig(capture=engine.runner.capture)
    return Engine(engine.loaded, store=store, method=REFERENCE, reuse=reuse, compute=engine.runner.compute)


class _Question:
    """One task, and the output of full prefill (the `reference`) on it once that has run."""

    def __init__(self, index: int, config: Comparison, reference: str, *, free: bool, ran: Callable[[], None]) -> None:
        self._index, self._config, self._reference, self._free, self._ran = index, config, reference, free, ran
        self._continuation: tuple[int, ...] = ()
        self._expected = torch.empty(0)

    def samples(self, way: Way, order: Sequence[str]) -> dict[str, FidelitySample]:
        """The samples of all of `order`. Contenders before the reference are compared once it has run."""
        samples: dict[str, FidelitySample] = {}
        held: dict[str, Timed] = {}
        for label in order:
            held[label] = way.run(way.tasks[self._index].prompt, label)
            self._ran()
            if label == self._reference:
                full = held[label].prefilled
                self._continuation = self._decoded(way.engine, full)
                self._expected = self._behind(way, full)[0]
            if self._continuation:
                samples |= {ran: self._sample(way, ran, prefilled) for ran, prefilled in held.items()}
                held.clear()
        return samples

    def _decoded(self, engine: Engine, prefilled: Prefilled) -> tuple[int, ...]:
        return decode_greedily(engine, [prefilled], self._config.new_tokens)[0].token_ids

    def _behind(self, way: Way, prefilled: Prefilled) -> list[torch.Tensor]:
        """Distributions along full prefill's continuation, and along the answer, if any.

        Always in one pass of one shape, so that full prefill compared with itself has no rounding differences.
        """
        answer_ids = way.tasks[self._index].answer_ids
        wanted = [self._continuation, *([answer_ids] if answer_ids else [])]
        return list(log_probabilities(way.engine.loaded.model, prefilled, *wanted))

    def _sample(self, way: Way, label: str, timed: Timed) -> FidelitySample:
        answers = way.tasks[self._index].answers
        answer_ids = way.tasks[self._index].answer_ids
        distributions = self._behind(way, timed.prefilled)
        kl, agrees = divergence(self._expected, distributions[0])
        decoded: tuple[int, ...] | None = None
        if self._free:
            decoded = self._continuation if label == self._reference else self._decoded(way.engine, timed.prefilled)
        text = None if decoded is None else answer_text(way.engine, decoded)
        return FidelitySample(
            kl=tuple(kl),
            agrees=tuple(agrees),
            answer_nll=negative_log_likelihood(distributions[1], answer_ids) if answer_ids else None,
            # Greedy decoding follows full prefill's answer as long as both expect the same token.
            identical=all(agrees) if decoded is None else decoded == self._continuation,
            f1=None if text is None or not answers else max(f1(text, answer) for answer in answers),
            ttft_s=timed.report.ttft_s,
            flops_limit=timed.report.flops_limit,
            recompute_fraction=timed.report.recompute_fraction,
            prompt_tokens=timed.report.prompt_tokens,
            text=text,
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoded tokens of one prompt: token ids (a stop token last, if any) and their log-probabilities."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def decode_greedily(engine: Engine, prefilled: Sequence[Prefilled], max_new_tokens: int) -> list[Decoded]:
    """Decode greedily, each prompt up to and including a stop token. The caches have room for `max_new_tokens`."""
    stop_ids = engine.loaded.tokenizer.stop_ids
    tokens: list[list[int]] = [[] for _ in prefilled]
    log_probs: list[list[float]] = [[] for _ in prefilled]
    active = list(range(len(prefilled)))
    logits = torch.stack([result.logits for result in prefilled])
    for step in range(max_new_tokens):
        if step:
            logits = engine.runner.decode(
                [prefilled[i].cache for i in active],
                [tokens[i][-1] for i in active],
                [len(prefilled[i].prompt) + step - 1 for i in active],
            )
        best = logits.max(dim=-1)
        chosen = zip(best.indices.tolist(), (best.values - logits.logsumexp(-1)).tolist(), strict=True)
        for i, (token, log_prob) in zip(active, chosen, strict=True):
            tokens[i].append(token)
            log_probs[i].append(log_prob)
        active = [i for i in active if tokens[i][-1] not in stop_ids]
        if not active:
            break
    return [Decoded(tuple(ids), tuple(log_prob)) for ids, log_prob in zip(tokens, log_probs, strict=True)]


def answer_text(engine: Engine, token_ids: Sequence[int]) -> str:
    """Decoded tokens as text, without the stop token that may end them."""
    tokenizer = engine.loaded.tokenizer
    ended = token_ids[:-1] if token_ids and token_ids[-1] in tokenizer.stop_ids else token_ids
    return tokenizer.decode(list(ended)).strip()


def log_probabilities(
    model: LayerwiseModel, prefilled: Prefilled, *continuations: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities at each token of each of the `continuations` of a prompt: `[tokens, vocab]` in float64.

    Row i is the distribution of token i given the prompt and the tokens before it. Continuations must not be empty. All
    run in one pass without seeing each other, and the cache is not changed.
    """
    behind = [tuple(tokens[:-1]) for tokens in continuations]
    logits = iter(_continued(model, prefilled, [tokens for tokens in behind if tokens]))
    first = prefilled.logits[None]
    rows = [torch.cat((first, next(logits))) if tokens else first for tokens in behind]
    return tuple(functional.log_softmax(row.double(), dim=-1) for row in rows)


def divergence(expected: torch.Tensor, actual: torch.Tensor) -> tuple[list[float], list[bool]]:
    """D_KL(expected || found) in nats at each position of log-probabilities `[tokens, vocab]`; whether top-1 agrees."""
    kl = (expected.exp() * (expected - actual)).sum(-1).clamp(min=0.0)
    return kl.tolist(), (expected.argmax(-1) == actual.argmax(-1)).tolist()


def negative_log_likelihood(log_probs: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Mean negative log-likelihood of `token_ids` in nats per token, under their distributions `[tokens, vocab]`."""
    wanted = torch.tensor(list(token_ids), device=log_probs.device)
    return -float(log_probs.gather(1, wanted[:, None]).mean())


@torch.inference_mode()
def _continued(model: LayerwiseModel, prefilled: Prefilled, branches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits after each token of each branch, when it follows the prompt: `[tokens, vocab]` per branch."""
    if not branches:
        return []
    device = prefilled.logits.device
    tokens = len(prefilled.prompt)
    lengths = [len(branch) for branch in branches]
    positions = torch.cat([torch.arange(tokens, tokens + length, device=device) for length in lengths])
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    same_owner = owner[:, None] == owner
    same_branch = torch.cat((same_owner.new_ones(len(positions), tokens), same_owner), dim=1)
    keys_at = torch.cat((torch.arange(tokens, device=device), positions))
    hidden = model.embed(torch.tensor([token for branch in branches for token in branch], device=device))
    masks: dict[int | None, torch.Tensor] = {}
    for window in {model.geometry.window(layer) for layer in range(model.geometry.num_layers)}:
        seen = same_branch & seen_keys(keys_at, positions[:, None], window)
        masks[window] = torch.zeros(seen.shape, dtype=hidden.dtype, device=device).masked_fill(~seen, -torch.inf)
    for layer in range(model.geometry.num_layers):
        q, k, v = model.qkv(layer, hidden)
        past_keys, past_values = prefilled.cache.view(layer, tokens)
        keys = torch.cat((past_keys, model.rotate_keys(layer, k, positions)))
        values = torch.cat((past_values, v))
        queries = model.rotate_queries(layer, q, positions)
        mask = masks[model.geometry.window(layer)]
        attended = attend_masked(queries, keys, values, mask, model.geometry.scores(layer))
        hidden = model.finish(layer, hidden, attended)
    return list(torch.split(model.logits(hidden), lengths))
