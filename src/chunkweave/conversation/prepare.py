"""Prepares requests for every backend: prompt, chunk order and method. Needs only a tokenizer."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chunkweave.config import SamplingParams
from chunkweave.conversation.turns import Build, TurnBuilder
from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.errors import PromptTooLongError
from chunkweave.ordering.arrangement import Arranged, Arranger
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.adaptive_methods import ContextMethod, FirstPassMethod, method_for
from chunkweave.planning.cost import Loading, PrefillCosts
from chunkweave.planning.method import ReuseMethod, prefer_least_read
from chunkweave.planning.method_choice import EXACT_METHODS, Kept, MethodChooser, MethodRequest
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.contexts import ContextPool, ContextRule, MeanShare, fitted
from chunkweave.prompt.find_chunks import ChunkFinder, with_usable_views
from chunkweave.prompt.parts import Prompt, PromptPart, mean_id
from chunkweave.prompt.request import Request
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.types import CacheUse, Chunk, ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest(WeaveRequest):
    """A client's request with its prompt, chosen method, and maximum number of generated tokens (`room`).

    `reuse_method` makes its plan. `not_sent` are chunks that are not sent again because earlier messages brought them.
    With `continues` its answer is stored for a later prompt that continues the conversation. Its parts were found by a
    `finder`, or named by the client (None). `costs` are those by which the method may be exact after all. `weavable` is
    the prompt with all views of stored text that were found in it, if some of them are of no use to this request.
    """

    request: Request
    reuse_method: ReuseMethod
    room: int
    arranged: Arranged
    not_sent: tuple[PromptPart, ...] = ()
    continues: bool = False
    finder: ChunkFinder | None = None
    costs: PrefillCosts | None = None
    weavable: Prompt | None = None

    def sampled_as(self, index: int) -> "PreparedRequest":
        """The same request for another answer; with a seed, each of them has its own."""
        sampling = self.request.sampling
        seed = None if sampling.seed is None else sampling.seed + index
        return replace(self, request=replace(self.request, sampling=replace(sampling, seed=seed)))

    def raised(self, loading: Loading | None) -> ReuseMethod:
        """The method for a plan while nothing else is computed: its ratio may be raised to hide `loading`."""
        if loading is None or not self.raisable:
            return self.reuse_method
        return method_for(self.choice, self.promotion, loading, self.costs, stores=self.kept.kv)

    @property
    def weaves(self) -> bool:
        """Whether KV of chunks may come from other prompts."""
        return self.choice.method not in EXACT_METHODS


@dataclass(eq=False)
class RequestPreparer:
    """Builds prompts, orders their chunks, and chooses methods, for one model.

    Its only state is the arranger's counts and the chunks sent in earlier turns. Thread-safe; threads tokenize
    concurrently. Prompt and answer have at most `context_tokens`. Ahead of requests, chunks are computed behind
    `neutral_tokens` of the neutral `passages` or, with a `rule`, in contexts of their own corpus. `order` is the
    default for requests.

    A backend that computes KV itself has a `store`, and the `costs` of its prefills, by which a calibrated method may
    give way to an exact one.
    """

    builder: PromptBuilder
    chooser: MethodChooser
    turn_builder: TurnBuilder
    context_tokens: int
    arranger: Arranger
    passages: tuple[str, ...] = ()
    neutral_tokens: int = 0
    rule: ContextRule | None = None
    order: ChunkOrder = ChunkOrder.FIXED
    store: TieredStore[Any] | None = None
    costs: PrefillCosts | None = None
    _arranging: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def prepare(
        self,
        request: Request,
        method_request: MethodRequest,
        *,
        most_tokens: int | None = None,
        speculative: bool = False,
        build: Build | None = None,
        finder: ChunkFinder | None = None,
    ) -> PreparedRequest:
        """Prepare a request before anything is computed, and count it as requested.

        A `speculative` request is counted once it is confirmed. A prompt with far more than `most_tokens` is refused
        before it is wholly tokenized. `build` replaces the builder's usual prompt. Chunks that a `finder` found in
        it are neither reordered nor counted.

        Raises:
            UsageError: an empty question or chunk, an unknown order, or a method_request that cannot be met.
            PromptTooLongError: chunks and question do not fit the model's context.
        """
        order = self.order if request.order is None else ChunkOrder.parse(request.order)
        if request.cache is CacheUse.OFF:
            method_request = MethodRequest.of("full")
        choice = self.chooser.choose(method_request, request.tenant)
        most = min(self.context_tokens, most_tokens or self.context_tokens)
        request, prompt, not_sent = self.turn_builder.build(request, build or self._built, most)
        room = min(request.sampling.max_new_tokens, prompt.room_in(self.context_tokens))  # may refuse: before counting
        stores = request.cache is CacheUse.USE
        counted = stores and not speculative
        if finder is not None and stores:
            self.builder.add_to(finder, prompt, cache_salt=request.cache_salt)
        weavable = prompt if finder is not None and stores else None
        if finder is not None:
            prompt = with_usable_views(prompt, weaves=choice.method not in EXACT_METHODS, stores=stores)
        arranged = (
            Arranged(prompt) if finder is not None else self._arrange(prompt, order, request.tenant, counted=counted)
        )
        return PreparedRequest(
            arranged.prompt,
            choice,
            self.chooser.kept(choice) if stores else Kept(kv=False),
            promotion=arranged.promotion,
            raisable=not method_request.sets_budget,
            reads_only=request.cache is CacheUse.READ,
            request=request,
            reuse_method=method_for(choice, arranged.promotion, None, self.costs, stores=stores),
            costs=self.costs,
            room=room,
            arranged=arranged,
            not_sent=not_sent,
            continues=stores and (finder is not None or not request.continued),
            finder=finder,
            weavable=weavable,
        )

    def prepare_beforehand(
        self,
        chunk: Chunk | str,
        *,
        pool: ContextPool | None = None,
        without: Collection[ChunkId] = (),
        cache_salt: str = "",
        most_tokens: int | None = None,
    ) -> Iterator[PreparedRequest]:
        """Requests that compute a chunk ahead of requests (see `beforehand`); none if it is stored.

        Chunks in `without`, which have left the pool since, are neither computed nor used as contexts.

        Raises:
            UsageError: the chunk is empty or not in the pool.
            PromptTooLongError: the chunk alone does not fit into the model's context, or `most_tokens`.
        """
        most = min(self.context_tokens, most_tokens or self.context_tokens)
        part = self.builder.chunk_part(chunk, cache_salt=cache_salt, limit=PromptLimit(most))
        if part.id in without:
            return iter(())
        contexts = [] if pool is None or self.rule is None else pool.contexts(part, self.rule, without=without)
        return self.beforehand(part, contexts, cache_salt=cache_salt, most_tokens=most)

    def beforehand(
        self,
        part: PromptPart,
        contexts: Sequence[Sequence[PromptPart]] = (),
        *,
        opening: Sequence[PromptPart] | None = None,
        cache_salt: str = "",
        most_tokens: int | None = None,
        anew: bool = False,
    ) -> Iterator[PreparedRequest]:
        """Requests that compute a chunk ahead of requests, each with one generated token; none if it is stored.

        With `contexts` they compute the mean over those that fit: one request per context, preceded by requests that
        compute their missing chunks behind neutral passages. Take the next request only when the one before is stored.
        With `anew` an existing mean is computed again. `opening=None` means the opening with the template's
        instruction. Attention profiles are kept if the default method reads them, or if configured (`CaptureConfig`).

        Raises:
            PromptTooLongError: the chunk alone does not fit into the model's context.
        """
        most = self.context_tokens if most_tokens is None else most_tokens
        opening = self.builder.opening(cache_salt=cache_salt) if opening is None else opening

        def first_pass(part: PromptPart) -> Prompt:
            room = most - len(part) - 1
            preamble = self.builder.preamble(
                self.passages, self.neutral_tokens, opening=opening, cache_salt=cache_salt, room=room
            )
            return Prompt((*preamble, part))

        contexts = fitted(part, contexts, opening=opening, most_tokens=most)
        if not contexts:
            prompt = first_pass(part)
            stored = self._stored(prompt)
            mean = self.rule is not None and any(record.contexts for record in stored)
            if not mean and prompt.contexts()[-1] not in [record.context for record in stored]:
                yield self._computing(prompt, cache_salt)
            return
        if not anew and self._has_mean(part):
            return
        for context_part in {part.id: part for context in contexts for part in context}.values():
            found = prefer_least_read(self._stored(Prompt((context_part,))))
            if found is None or (found.alone and self.neutral_tokens):
                yield self._computing(first_pass(context_part), cache_salt)
        prompts = [Prompt((*opening, *context, part)) for context in contexts]
        group = f"{mean_id(prompt.contexts()[-1] for prompt in prompts)} {part.id}"
        for prompt in prompts:
            if not anew and self._has_mean(part):
                return  # another call has computed it
            yield self._computing(prompt, cache_salt, MeanShare(group, len(prompts), anew=anew))

    def _has_mean(self, part: PromptPart) -> bool:
        return any(record.contexts for record in self._stored(Prompt((part,))))

    def _stored(self, prompt: Prompt) -> Sequence[SegmentRecord]:
        """The stored segments of a prompt's last part."""
        return () if self.store is None else self.store.lookup(prompt).parts[-1].variants

    def _computing(self, prompt: Prompt, cache_salt: str, mean: MeanShare | None = None) -> PreparedRequest:
        room = min(1, prompt.room_in(self.context_tokens))
        return PreparedRequest(
            prompt,
            self.chooser.choose(MethodRequest.of("prefix" if mean is None else "full-reuse")),
            Kept(profiles=self.chooser.kept(self.chooser.choose(MethodRequest())).profiles),
            mean=mean,
            request=Request("", sampling=SamplingParams(1, temperature=0.0), cache_salt=cache_salt),
            reuse_method=FirstPassMethod() if mean is None else ContextMethod(),
            room=room,
            arranged=Arranged(prompt),
        )

    def pool_of(self, chunks: Sequence[Chunk | str], *, cache_salt: str = "") -> ContextPool | None:
        """The pool in which chunks are computed ahead of requests; None if neutral passages are configured instead.

        Raises:
            UsageError: a chunk is empty.
        """
        if self.rule is None:
            return None
        return ContextPool(self.storable_parts(chunks, cache_salt=cache_salt))

    def drop_first_passes(self, pool: ContextPool | None) -> int:
        """Remove the first-pass segments of chunks that have a stored mean; returns how many copies were removed."""
        if pool is None or self.store is None:
            return 0
        chunks = {part.id for part in pool.parts if part.id is not None}
        return self.store.drop_first_passes(chunks, alone=not self.neutral_tokens)

    def preamble(self, opening: Sequence[PromptPart]) -> tuple[PromptPart, ...]:
        """The preamble with this opening, behind which chunks are computed ahead of requests."""
        return self.builder.preamble(self.passages, self.neutral_tokens, opening=opening)

    def storable_parts(self, chunks: Sequence[Chunk | str], *, cache_salt: str) -> list[PromptPart]:
        """The parts for chunks, without chunks that do not fit into the model's context: these are never stored."""
        parts = []
        for chunk in chunks:
            with suppress(PromptTooLongError):
                limit = PromptLimit(self.context_tokens)
                parts.append(self.builder.chunk_part(chunk, cache_salt=cache_salt, limit=limit))
        return parts

    def confirm(self, prepared: PreparedRequest) -> None:
        """Count a confirmed speculative request."""
        if prepared.request.cache is CacheUse.USE:
            with self._arranging:
                self.arranger.count(prepared.prompt, free=prepared.arranged.free, tenant=prepared.request.tenant)

    def load_counts(self, path: Path | None) -> None:
        """Load the arranger's counts of an earlier process."""
        with self._arranging:
            self.arranger.load(path)

    def save_counts(self, path: Path | None) -> None:
        """Save the arranger's counts for a restart."""
        with self._arranging:
            self.arranger.save(path)

    def answered_turn(self, prepared: PreparedRequest, answer: str, answer_ids: Sequence[int]) -> PromptPart | None:
        """The part of a later prompt that has a request's question and its answer; None if it is not to be stored."""
        if not prepared.continues:
            return None
        salt = prepared.request.cache_salt
        return self.builder.answered_turn(prepared.prompt, answer, answer_ids, finder=prepared.finder, cache_salt=salt)

    def answered(self, prepared: PreparedRequest) -> None:
        """Note that a request was answered; a later one may send its messages again."""
        if prepared.request.cache is CacheUse.USE:
            ranks = sorted(prepared.arranged.ranks.items())
            self.turn_builder.answered(prepared.request, [prepared.request.chunks[rank] for _, rank in ranks])

    def _built(self, request: Request, limit: PromptLimit) -> Prompt:
        return self.builder.build(
            request.question,
            request.chunks,
            system=request.system,
            history=request.history,
            history_chunks=request.history_chunks,
            continued=request.continued,
            cache_salt=request.cache_salt,
            limit=limit,
        )

    def _arrange(self, prompt: Prompt, order: ChunkOrder, tenant: str, *, counted: bool) -> Arranged:
        with self._arranging:
            return self.arranger.arrange(prompt, order, counted=counted, tenant=tenant)
