"""How close reuse methods come to full prefill of the same model on the same prompts. Needs no labels.

Full prefill answers each question greedily. Those tokens are fed to every contender, and its next-token distribution
is compared with full prefill's at each of them; the time to the first token is taken in the same run. Where the data
set has answers, how likely they are is compared too. A model with an adapter can be held against the one without.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from chunkweave.config import DEFAULT_RECOMPUTE_RATIO, ReuseConfig, StoreConfig
from chunkweave.conversation.report import Durations
from chunkweave.engine.decode import make_report
from chunkweave.engine.engine import Engine
from chunkweave.engine.prefill import PrefillOptions
from chunkweave.engine.runner import Prefilled, Runner
from chunkweave.errors import UsageError
from chunkweave.metrics import ReuseReport
from chunkweave.models.attention import attend_masked, seen_keys
from chunkweave.models.base import LayerwiseModel
from chunkweave.planning.method import ALPHA, ReuseMethod, make_method, parameter_of
from chunkweave.prompt.parts import Prompt
from chunkweave_lab.baselines import BENCH_METHODS, bench_contenders
from chunkweave_lab.dataset_formats import Example
from chunkweave_lab.datasets import PromptMaker
from chunkweave_lab.decoding import answer_text, decode_greedily
from chunkweave_lab.prompt_baselines import PromptBaseline, split_baselines
from chunkweave_lab.scores import f1
from chunkweave_lab.summaries import FidelitySample
from chunkweave_lab.ttft import Contender, Progress, woven_prefill
from chunkweave_lab.warming import Warmth, company_of, prefill_and_store

REFERENCE = "full"
"""The contender that the others are compared with."""

FULL_REUSE = "full-reuse"

SLICED = "full-in-slices"
"""Full prefill once more, `SLICE_TOKENS` at a time: as far from full prefill as arithmetic alone takes one."""

SLICE_TOKENS = 256

HELD = 16
"""Most contenders whose caches of one question are held while full prefill has not had its turn."""

OF_BASE = " of base"
"""How rows of the model without its adapter end, where the one with it is held against that."""

EXACT = (SLICED, "prefix")
"""Contenders that differ from full prefill by arithmetic alone: a few questions tell."""


@dataclass(frozen=True, slots=True)
class FidelityConfig:
    """What is measured.

    Contenders are full prefill, full KV reuse, the noise floor, and the methods as `make_contenders` makes them; with
    `fractions` a method has those values of its parameter that make its mean recompute fraction that, instead of
    `ratios` and `alphas`. Baselines that change the prompt may be among the methods. Chunks have `chunk_tokens` tokens
    (0: passages stay whole). `new_tokens` bounds the continuation; answers are decoded freely on the first `free`
    questions. The reuse methods come once more over chunks that were computed in each of the ways of `also_warm`.
    """

    methods: tuple[str, ...]
    ratios: tuple[float, ...] = (DEFAULT_RECOMPUTE_RATIO,)
    alphas: tuple[float, ...] = (1.0,)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    fractions: tuple[float, ...] = ()
    warm: Warmth = field(default_factory=Warmth)
    also_warm: tuple[Warmth, ...] = ()
    chunks: int = 6
    chunk_tokens: int = 0
    new_tokens: int = 16
    free: int = 40
    fit_questions: int = 4

    def __post_init__(self) -> None:
        if not all(0.0 < fraction <= 1.0 for fraction in self.fractions):
            raise UsageError("a recompute fraction is above 0 and at most 1")
        if self.new_tokens < 1:
            raise UsageError(f"new_tokens must be at least 1, not {self.new_tokens}")
        if self.free < 0 or self.fit_questions < 1:
            raise UsageError(
                f"free must not be negative and fit_questions at least 1, not {self.free}, {self.fit_questions}"
            )
        if self.also_warm and any(parameter_of_spec(spec) == ALPHA for spec in self.fitted):
            raise UsageError("alpha is fitted over one way to compute chunks: name one --warm, or give alphas")
        if self.also_warm and any(warm.queries for warm in (self.warm, *self.also_warm)):
            raise UsageError("earlier questions warm one store: --warm queries:N cannot be had with another way")
        self.contenders({})

    @property
    def fitted(self) -> tuple[str, ...]:
        """The methods, with their settings, whose values are found by `fitted_values`."""
        return tuple(
            spec for spec in self._reuse_methods if self.fractions and "@" not in spec and parameter_of_spec(spec)
        )

    @property
    def baselines(self) -> dict[str, PromptBaseline]:
        """Contenders that are asked from another prompt, by the names of their rows.

        Compression comes at the fractions, if there are any: as many tokens of the chunks as a method recomputes.
        """
        return split_baselines(self.methods, self.fractions or self.ratios)[1]

    @property
    def _reuse_methods(self) -> tuple[str, ...]:
        return split_baselines(self.methods)[0]

    def contenders(self, values: Mapping[str, float | None]) -> dict[str, ReuseMethod]:
        """The methods by the names of their rows, full prefill and full reuse first; `values` are the fitted ones.

        Raises:
            UnknownMethodError: a method does not exist.
            UsageError: a value is out of range, or a setting unknown.
        """
        fixed = [spec for spec in (REFERENCE, FULL_REUSE, *self._reuse_methods) if spec not in self.fitted]
        made = bench_contenders(tuple(dict.fromkeys(fixed)), self.ratios, self.alphas, self.reuse)
        found = {label: self.at(label.rpartition("@")[0], x) for label, x in values.items() if x is not None}
        return {**made, **found}

    def at(self, spec: str, value: float) -> ReuseMethod:
        """A method with its settings at one value of its parameter."""
        return next(iter(bench_contenders((f"{spec}@{value!r}",), reuse=self.reuse).values()))


def parameter_of_spec(spec: str) -> str | None:
    return parameter_of(spec.partition(":")[0], BENCH_METHODS)


@dataclass(frozen=True, slots=True)
class Task:
    """One question: its prompt, the tokens of the first answer that counts as right, and all those answers."""

    prompt: Prompt
    answer_ids: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The model without the adapter of the one that is measured, and the same questions as that one asks them.

    Its full prefill is what everything is compared with.
    """

    engine: Engine
    tasks: Sequence[Task]


def judges_of(base: bool) -> dict[str, str]:
    """The rows that `summarize_fidelity` compares with, with or without a base."""
    ending = OF_BASE if base else ""
    return {"reference": REFERENCE + ending, "reused": FULL_REUSE + ending}


def make_tasks(
    engine: Engine,
    examples: Sequence[Example],
    drawn: Sequence[Example],
    config: FidelityConfig,
    instruction: str | None = None,
) -> list[Task]:
    """The drawn examples as they are asked; passages that one lacks come from all `examples`.

    `instruction=None` is the template's own.

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
    )
    tasks = []
    for example in drawn:
        prompt = maker.prompt(example)
        answer_ids = engine.builder.answer_ids(example.answers[0]) if example.answers else ()
        engine.runner.room_for_new_tokens(prompt)
        tasks.append(Task(prompt, answer_ids, example.answers))
    return tasks


def warm_by_earlier(engine: Engine, earlier: Sequence[Task], progress: Progress | None = None) -> None:
    """Prefill earlier requests in full and store them."""
    for done, task in enumerate(earlier, start=1):
        prefill_and_store(engine, task.prompt)
        if progress is not None:
            progress(done, len(earlier))


def prepare(engine: Engine, tasks: Sequence[Task], index: int, warm: Warmth) -> None:
    """Put into the store what one task is to find there."""
    warm.prepare(engine, tasks[index].prompt, company_of([task.prompt for task in tasks], index))


def measure_fidelity(
    engine: Engine,
    tasks: Sequence[Task],
    methods: Mapping[str, ReuseMethod],
    config: FidelityConfig,
    *,
    base: Base | None = None,
    exact: int | None = None,
    skip: Callable[[int], bool] = lambda _: False,
    store: StoreConfig | None = None,
    progress: Progress | None = None,
) -> Iterator[dict[str, FidelitySample]]:
    """Every contender on every task that is not to be left out; a task's samples come together, in the order of rows.

    Contenders run once uncounted before they are first measured, then alternate, and take turns in going first. What is
    measured stores nothing, so that all find the same: what a store of its own would hold, warmed in the same way.
    Each of `also_warm` has a store of its own in memory, with the codec and budget of `store`.
    With a `base` all are compared with its full prefill. Of the base there are rows of their own: full prefill, in
    slices too, and full reuse in each way of warming.
    Baselines that ask from another prompt come after the `methods`. They run on tasks that are answered freely; what is
    exact but for arithmetic (`EXACT`) does so on the first `exact` tasks, or on those too. Each is decoded by itself,
    as an engine answers one request: in a batch, in bfloat16, two tokens that are nearly level may come out the other
    way round.
    """
    assert base is None or all(a.prompt.token_ids == b.prompt.token_ids for a, b in zip(tasks, base.tasks, strict=True))
    reference = judges_of(base is not None)["reference"]
    exactly = {*EXACT, SLICED + OF_BASE}
    with ExitStack() as stack:
        ways = [] if base is None else _ways_of_base(base, methods, config, store, stack)
        ways += _ways(engine, tasks, methods, config, store, stack, sliced=base is None)
        labels = [label for way in ways for label in way.labels]
        warmed_up = False
        for index in range(len(tasks)):
            if not skip(index):
                free, floor = index < config.free, index < (config.free if exact is None else exact)
                left_out = {*(() if floor else exactly), *(() if free else config.baselines)}
                question = _Question(index, config, reference, free=free)
                found: dict[str, FidelitySample] = {}
                for way in ways:
                    prepare(way.engine, way.tasks, index, way.warm)
                    order = _taking_turns([label for label in way.labels if label not in left_out], index, reference)
                    if not warmed_up:
                        way.run_once(way.tasks[index].prompt, order)
                    found |= question.samples(way, order)
                warmed_up = True
                yield {label: found[label] for label in labels if label in found}
            if progress is not None:
                progress(index + 1, len(tasks))


def _taking_turns(labels: Sequence[str], index: int, reference: str) -> list[str]:
    """Each goes first once in so many tasks as there are; the `reference`, if there, is among the first `HELD`."""
    turn = index % len(labels)
    order = [*labels[turn:], *labels[:turn]]
    if reference in order:
        place = order.index(reference)
        order.insert(place % HELD, order.pop(place))
    return order


def _room(config: FidelityConfig) -> int:
    return config.new_tokens + 1


@dataclass(frozen=True, slots=True)
class _Way:
    """Who runs over chunks that were computed in one way, in a store of their own; `tasks` are as its model asks them.

    `runs` are prefills of a question's prompt, `baselines` ask from another one, both by the names of their rows.
    """

    warm: Warmth
    engine: Engine
    tasks: Sequence[Task]
    runs: Mapping[str, Contender]
    baselines: Mapping[str, PromptBaseline] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """Names of all, in the order of rows."""
        return [*self.runs, *self.baselines]

    def run_once(self, prompt: Prompt, labels: Sequence[str]) -> None:
        """Run each prefill once, to warm up."""
        for label in labels:
            if label in self.runs:
                self.runs[label](prompt)


def _ways(
    engine: Engine,
    tasks: Sequence[Task],
    methods: Mapping[str, ReuseMethod],
    config: FidelityConfig,
    store: StoreConfig | None,
    stack: ExitStack,
    *,
    sliced: bool,
) -> list[_Way]:
    """All methods and what is asked from another prompt, then the methods in each further way of warming.

    If it is also to run in slices, that is how far another arithmetic takes full prefill.
    """
    runs = _weaves(engine, {REFERENCE: methods[REFERENCE]}, config)
    if sliced:
        runs[SLICED] = sliced_prefill(engine.runner, SLICE_TOKENS, new_tokens=_room(config))
    runs |= _weaves(engine, {label: method for label, method in methods.items() if label != REFERENCE}, config)
    ways = [_Way(config.warm, engine, tasks, runs, config.baselines)]
    for warm in config.also_warm:
        other = stack.enter_context(beside(engine, store))
        ways.append(_Way(warm, other, tasks, _weaves(other, _named_by_way(methods, warm), config)))
    return ways


def _ways_of_base(
    base: Base,
    methods: Mapping[str, ReuseMethod],
    config: FidelityConfig,
    store: StoreConfig | None,
    stack: ExitStack,
) -> list[_Way]:
    """The base's full prefill and full reuse, under names of their own."""
    judges = {label: methods[label] for label in (REFERENCE, FULL_REUSE)}
    ways = _ways(base.engine, base.tasks, judges, config, store, stack, sliced=True)
    return [replace(way, runs={label + OF_BASE: run for label, run in way.runs.items()}, baselines={}) for way in ways]


def _weaves(engine: Engine, methods: Mapping[str, ReuseMethod], config: FidelityConfig) -> dict[str, Contender]:
    room = _room(config)
    return {label: woven_prefill(engine.runner, method, new_tokens=room) for label, method in methods.items()}


def _named_by_way(methods: Mapping[str, ReuseMethod], warm: Warmth) -> dict[str, ReuseMethod]:
    """The reuse methods under the names of their rows over chunks that were computed so: `query neutral@5%`."""
    named = {}
    for label, method in methods.items():
        if label not in (REFERENCE, *EXACT):
            name, at, value = label.partition("@")
            named[f"{name} {warm}{at}{value}"] = method
    return named


def beside(engine: Engine, store: StoreConfig | None) -> Engine:
    """Another one over the same model, with an empty store in memory, in which KV is kept as in `store`."""
    store = StoreConfig() if store is None else replace(store, cache_dir=None)
    reuse = ReuseConfig(capture=engine.runner.capture)
    return Engine(engine.loaded, store=store, method=REFERENCE, reuse=reuse, compute=engine.runner.compute)


@dataclass(frozen=True, slots=True, eq=False)
class _Ran:
    """A contender's prefill, or that of its last prompt, what is reported of it, and its answer if it has one by now.

    It `follows` full prefill if its prompt asks the same.
    """

    prefilled: Prefilled
    report: ReuseReport
    recompute_fraction: float | None
    decoded: tuple[int, ...] | None = None
    follows: bool = True


class _Question:
    """One task, and what the full prefill that is the `reference` says to it once it has run."""

    def __init__(self, index: int, config: FidelityConfig, reference: str, *, free: bool) -> None:
        self._index, self._config, self._reference, self._free = index, config, reference, free
        self._continuation: tuple[int, ...] = ()
        self._expected = torch.empty(0)

    def samples(self, way: _Way, order: Sequence[str]) -> dict[str, FidelitySample]:
        """All of `order`, one after the other; those that come before the reference wait for what it says."""
        found: dict[str, FidelitySample] = {}
        held: dict[str, _Ran] = {}
        for label in order:
            held[label] = self._run(way, label)
            if label == self._reference:
                full = held[label].prefilled
                self._continuation = self._decoded(way.engine, full)
                self._expected = self._behind(way, full, follows=True)[0]
            if self._continuation:
                found |= {ran: self._sample(way, ran, one) for ran, one in held.items()}
                held.clear()
        return found

    def _decoded(self, engine: Engine, prefilled: Prefilled) -> tuple[int, ...]:
        return decode_greedily(engine, [prefilled], self._config.new_tokens)[0].token_ids

    def _run(self, way: _Way, label: str) -> _Ran:
        prompt, baseline = way.tasks[self._index].prompt, way.baselines.get(label)
        if baseline is None:
            started = time.perf_counter()
            prefilled = way.runs[label](prompt)
            ttft_s = time.perf_counter() - started
            assert prefilled is not None, "every contender here gives a cache"
            report = _report(way.engine, prefilled, ttft_s)
            return _Ran(prefilled, report, report.recompute_fraction)
        baseline.warm(way.engine, prompt)
        answer = baseline.answer(way.engine, prompt, self._config.new_tokens)
        room = _room(self._config)
        final = way.engine.runner.prefill(answer.final_prompt, make_method(REFERENCE), new_tokens=room, capture=False)
        return _Ran(final, answer.report, None, answer.token_ids, baseline.follows_full)

    def _behind(self, way: _Way, one: Prefilled, *, follows: bool) -> list[torch.Tensor]:
        """Distributions along full prefill's continuation, if the prompt is its, and along the answer, if there is one.

        Always in one pass of one shape, so that full prefill is not even arithmetic away from itself.
        """
        answer_ids = way.tasks[self._index].answer_ids
        wanted = [*([self._continuation] if follows else []), *([answer_ids] if answer_ids else [])]
        return list(log_probabilities(way.engine.loaded.model, one, *wanted))

    def _sample(self, way: _Way, label: str, one: _Ran) -> FidelitySample:
        answers, answer_ids = way.tasks[self._index].answers, way.tasks[self._index].answer_ids
        decoded = one.decoded
        if self._free and decoded is None:
            decoded = self._continuation if label == self._reference else self._decoded(way.engine, one.prefilled)
        found = self._behind(way, one.prefilled, follows=one.follows)
        kl: list[float] = []
        agrees: list[bool] = []
        if one.follows:
            kl, agrees = divergence(self._expected, found.pop(0))
        text = None if decoded is None else answer_text(way.engine, decoded)
        return FidelitySample(
            kl=tuple(kl),
            agrees=tuple(agrees),
            answer_nll=negative_log_likelihood(found.pop(), answer_ids) if answer_ids else None,
            identical=None if decoded is None else decoded == self._continuation,
            f1=None if text is None or not answers else max(f1(text, answer) for answer in answers),
            ttft_s=one.report.ttft_s,
            flops_limit=one.report.flops_limit,
            recompute_fraction=one.recompute_fraction,
            prompt_tokens=one.report.prompt_tokens,
            text=text,
        )


def _report(engine: Engine, prefilled: Prefilled, ttft_s: float) -> ReuseReport:
    return replace(make_report(prefilled, engine.loaded.model.geometry, Durations(ttft_s, 0.0, 0.0), 0), chunks=())


def sliced_prefill(runner: Runner, slice_tokens: int, *, new_tokens: int = 0) -> Contender:
    """Full prefill that takes `slice_tokens` of the prompt at a time, as a batching engine may."""
    full = make_method(REFERENCE)

    @torch.inference_mode()
    def first_token(prompt: Prompt) -> Prefilled:
        with runner.start(prompt, full, PrefillOptions(new_tokens, capture=False)) as job:
            while job.prefilled is None:
                runner.step([], [(job, slice_tokens)])
            job.prefilled.logits.argmax().item()
            return job.prefilled

    return first_token


def log_probabilities(
    model: LayerwiseModel, prefilled: Prefilled, *continuations: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """What the model expects at each token of each of the `continuations` of the prompt: `[tokens, vocab]` in float64.

    Row i is the distribution of token i given the prompt and the tokens before it. None may be empty. All are run in
    one pass, none sees another, and the cache is not changed.
    """
    behind = [tuple(tokens[:-1]) for tokens in continuations]
    logits = iter(_continued(model, prefilled, [tokens for tokens in behind if tokens]))
    first = prefilled.logits[None]
    rows = [torch.cat((first, next(logits))) if tokens else first for tokens in behind]
    return tuple(functional.log_softmax(one.double(), dim=-1) for one in rows)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> tuple[list[float], list[bool]]:
    """D_KL(expected || found) in nats at each position of log-probabilities `[tokens, vocab]`; whether top-1 agrees."""
    kl = (expected.exp() * (expected - found)).sum(-1).clamp(min=0.0)
    return kl.tolist(), (expected.argmax(-1) == found.argmax(-1)).tolist()


def negative_log_likelihood(log_probs: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Of `token_ids`, in nats a token, under the distributions `[tokens, vocab]` of each."""
    wanted = torch.tensor(list(token_ids), device=log_probs.device)
    return -float(log_probs.gather(1, wanted[:, None]).mean())


@torch.inference_mode()
def _continued(model: LayerwiseModel, prefilled: Prefilled, branches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits behind each token of each branch when it follows the prompt, `[tokens, vocab]` a branch."""
    if not branches:
        return []
    device, tokens = prefilled.logits.device, len(prefilled.prompt)
    lengths = [len(branch) for branch in branches]
    positions = torch.cat([torch.arange(tokens, tokens + length, device=device) for length in lengths])
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    own = owner[:, None] == owner
    same_branch = torch.cat((own.new_ones(len(positions), tokens), own), dim=1)
    keys_at = torch.cat((torch.arange(tokens, device=device), positions))
    hidden = model.embed(torch.tensor([token for branch in branches for token in branch], device=device))
    masks: dict[int | None, torch.Tensor] = {}
    for window in {model.geometry.window(layer) for layer in range(model.geometry.num_layers)}:
        seen = same_branch & seen_keys(keys_at, positions[:, None], window)
        masks[window] = torch.zeros(seen.shape, dtype=hidden.dtype, device=device).masked_fill(~seen, -torch.inf)
    for layer in range(model.geometry.num_layers):
        q, k, v = model.qkv(layer, hidden)
        past_keys, past_values = prefilled.cache.view(layer, tokens)
        keys, values = torch.cat((past_keys, model.rotate_keys(layer, k, positions))), torch.cat((past_values, v))
        queries, mask = model.rotate_queries(layer, q, positions), masks[model.geometry.window(layer)]
        attended = attend_masked(queries, keys, values, mask, model.geometry.scores(layer))
        hidden = model.finish(layer, hidden, attended)
    return list(torch.split(model.logits(hidden), lengths))
