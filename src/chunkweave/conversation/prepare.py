"""From a question over chunks to a prompt, an order and a method, for every backend: a tokenizer is all it needs."""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chunkweave.config import SamplingParams
from chunkweave.conversation.turns import Build, NextTurn, TurnBuilder, TurnUnderWay
from chunkweave.errors import PromptTooLongError
from chunkweave.ordering.arrangement import Arranged, Arranger, Promotion
from chunkweave.ordering.ordering import ChunkOrder
from chunkweave.planning.adaptive_methods import ContextMethod, FirstPassMethod, method_for
from chunkweave.planning.cost import Loading
from chunkweave.planning.method import ReuseMethod, make_method, prefer_least_read
from chunkweave.planning.method_choice import EXACT_METHODS, Kept, MethodChoice, MethodChooser, MethodRequest
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.contexts import ContextPool, ContextRule, MeanShare, fitted
from chunkweave.prompt.parts import Prompt, PromptPart, mean_id
from chunkweave.prompt.request import Request
from chunkweave.scheduling.shadow import ShadowMonitor
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.types import Chunk, ChunkId, SegmentId


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request with its prompt, the method chosen for it, what it keeps, and how many tokens it may generate.

    `order` says whether chunks may be reordered: a preparer without an arranger leaves that to its caller. A `raisable`
    request has not said how much is to be recomputed, so that it may be more where that hides loading. `again` says
    what a request that is none of a conversation's does not send again, since its messages hold it. `mean` says of
    which mean the last part is a share, for what is computed beforehand.
    """

    request: Request
    order: ChunkOrder
    arranged: Arranged
    choice: MethodChoice
    method: ReuseMethod
    kept: Kept
    room: int
    turn: TurnUnderWay | None = None
    raisable: bool = False
    again: NextTurn | None = None
    mean: MeanShare | None = None

    @property
    def content(self) -> NextTurn | None:
        """What of a conversation is in its prompt, and what is not sent again; None if nothing is known of one."""
        return self.again if self.turn is None else self.turn.content

    def raised(self, loading: Loading | None) -> ReuseMethod:
        """The method for a plan that is made while nothing else is computed: its ratio may be what hides `loading`."""
        if loading is None or not self.raisable:
            return self.method
        return method_for(self.choice, _promotion(self.arranged, self.turn), loading)

    @property
    def closing(self) -> tuple[int, ...]:
        """Tokens that are computed after its answer: those that end a conversation's turn."""
        return () if self.turn is None else self.turn.closing

    @property
    def history(self) -> Mapping[int, SegmentId] | None:
        """Of a conversation, the segments of its earlier turns by the number of their part."""
        return None if self.turn is None else self.turn.places(self.prompt)

    @property
    def prompt(self) -> Prompt:
        """The prompt with its chunks in order."""
        return self.arranged.prompt

    @property
    def weaves(self) -> bool:
        """Whether KV of chunks may come from other prompts."""
        return self.choice.method not in EXACT_METHODS


@dataclass(eq=False)
class RequestPreparer:
    """Makes prompts, puts their chunks in order, and chooses methods, for one model.

    Its only state is what the arranger has counted, and what conversations have said. May be called from several
    threads; they tokenize beside each other. Prompt and answer have at most `context_tokens`; layers that a request
    names are held against `num_layers`, where they are known. Chunks are computed beforehand behind `neutral_tokens` of
    the neutral `passages`, or with a `rule` in contexts of their own corpus. `order` is for requests that say nothing.

    A backend that computes KV itself has an `arranger` and a `store`. `shadow`, if there is one, may replace the method
    that was chosen by the exact one.
    """

    builder: PromptBuilder
    chooser: MethodChooser
    turn_builder: TurnBuilder
    context_tokens: int
    num_layers: int | None = None
    passages: tuple[str, ...] = ()
    neutral_tokens: int = 0
    rule: ContextRule | None = None
    order: ChunkOrder = ChunkOrder.FIXED
    arranger: Arranger | None = None
    store: TieredStore[Any] | None = None
    shadow: ShadowMonitor | None = None
    _arranging: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def prepare(
        self,
        request: Request,
        method_request: MethodRequest,
        *,
        most_tokens: int | None = None,
        speculative: bool = False,
        build: Build | None = None,
    ) -> PreparedRequest:
        """Everything that is known of a request before anything is computed. It counts as asked for then.

        `end` or `abandon` it. A `speculative` one counts once it is confirmed. A conversation is cut down to
        `most_tokens`, its answer among them; a prompt with far more is refused before all of it is tokenized. `build`
        takes the place of the builder's usual prompt.

        Raises:
            UsageError: an empty question or chunk, no such order, a conversation that is still being answered, or a
                method_request that cannot be met.
            PromptTooLongError: chunks and question do not fit the model's context.
        """
        order = self.order if request.order is None else ChunkOrder.parse(request.order)
        if self.num_layers is not None:
            method_request.refuse_layers_beyond(self.num_layers)
        choice, raisable = self.chooser.choose(method_request), not method_request.sets_budget
        make_method(choice.method, choice.reuse)  # refused before anything is tokenized, also where it is switched off
        if self.shadow is not None:
            choice = self.shadow.allowed(choice)
        turn: TurnUnderWay | None = None
        again: NextTurn | None = None
        if request.conversation_id is None:
            most = min(self.context_tokens, most_tokens or self.context_tokens)
            request, prompt, again = self.turn_builder.without_id(request, build or self._built, most)
        else:
            turn, prompt = self.turn_builder.begin(request, most_tokens=most_tokens)
        room = prompt.room_in(self.context_tokens) - (0 if turn is None else len(turn.closing))
        arranged = self._arrange(prompt, order, request.tenant, counted=not speculative)
        kept = self.chooser.kept(choice)
        if turn is not None:  # its later turns may be answered by another method
            kept = replace(kept, kv=True)
        room = min(request.sampling.max_new_tokens, room)
        method = method_for(choice, _promotion(arranged, turn), None)
        return PreparedRequest(request, order, arranged, choice, method, kept, room, turn, raisable, again)

    def prepare_beforehand(
        self,
        chunk: Chunk | str,
        *,
        pool: ContextPool | None = None,
        without: Collection[ChunkId] = (),
        cache_salt: str = "",
        most_tokens: int | None = None,
    ) -> Iterator[PreparedRequest]:
        """What computes a chunk before a request needs it, as `beforehand` does of its part; nothing if it is stored.

        Chunks of the pool that have left meanwhile are those `without` which it is done; so is one of these itself.

        Raises:
            UsageError: an empty chunk, or one that is not in the pool.
            PromptTooLongError: the chunk alone does not fit the model's context, or `most_tokens`.
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
        """What computes a chunk before a request needs it, each with one token behind it; nothing if that is stored.

        With `contexts` it is the mean over these, as far as they fit: each request is for one of them, and before them
        come those of their chunks that are not stored, behind neutral passages. Ask for the next one when the one
        before is stored. With `anew` a mean is computed though there is one. `opening=None` is that of the template's
        instruction. What a chunk's tokens attend to is kept if the usual method reads it, or if it is configured
        (`CaptureConfig`).

        Raises:
            PromptTooLongError: the chunk alone does not fit the model's context.
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
        for before in {one.id: one for context in contexts for one in context}.values():
            found = prefer_least_read(self._stored(Prompt((before,))))
            if found is None or (found.alone and self.neutral_tokens):
                yield self._computing(first_pass(before), cache_salt)
        prompts = [Prompt((*opening, *context, part)) for context in contexts]
        group = f"{mean_id(prompt.contexts()[-1] for prompt in prompts)} {part.id}"
        for prompt in prompts:
            if not anew and self._has_mean(part):
                return  # another call has computed it meanwhile
            yield self._computing(prompt, cache_salt, MeanShare(group, len(prompts), anew=anew))

    def _has_mean(self, part: PromptPart) -> bool:
        return any(record.contexts for record in self._stored(Prompt((part,))))

    def _stored(self, prompt: Prompt) -> Sequence[SegmentRecord]:
        """What is stored of a prompt's last part."""
        return () if self.store is None else self.store.lookup(prompt).parts[-1].variants

    def _computing(self, prompt: Prompt, cache_salt: str, mean: MeanShare | None = None) -> PreparedRequest:
        room = min(1, prompt.room_in(self.context_tokens))
        choice = self.chooser.choose(MethodRequest.of("prefix" if mean is None else "full-reuse"))
        kept = Kept(profiles=self.chooser.kept(self.chooser.choose(MethodRequest())).profiles)
        request = Request("", sampling=SamplingParams(1, temperature=0.0), cache_salt=cache_salt)
        method = FirstPassMethod() if mean is None else ContextMethod()
        return PreparedRequest(request, ChunkOrder.FIXED, Arranged(prompt), choice, method, kept, room, mean=mean)

    def pool_of(self, chunks: Sequence[Chunk | str], *, cache_salt: str = "") -> ContextPool | None:
        """Chunks that are computed beforehand together, behind each other; None if neutral passages are wanted.

        Raises:
            UsageError: an empty chunk.
        """
        if self.rule is None:
            return None
        return ContextPool(self.storable_parts(chunks, cache_salt=cache_salt))

    def drop_first_passes(self, pool: ContextPool | None) -> int:
        """Remove what contexts were woven from, of the chunks of which a mean is stored; returns how many segments."""
        if pool is None or self.store is None:
            return 0
        chunks = {part.id for part in pool.parts if part.id is not None}
        return self.store.drop_first_passes(chunks, alone=not self.neutral_tokens)

    def preamble(self, opening: Sequence[PromptPart]) -> tuple[PromptPart, ...]:
        """What chunks are computed behind beforehand with this opening."""
        return self.builder.preamble(self.passages, self.neutral_tokens, opening=opening)

    def storable_parts(self, chunks: Sequence[Chunk | str], *, cache_salt: str) -> list[PromptPart]:
        """Chunks as they are in every prompt, without those that no context can hold: nothing is stored of these."""
        parts = []
        for chunk in chunks:
            with suppress(PromptTooLongError):
                limit = PromptLimit(self.context_tokens)
                parts.append(self.builder.chunk_part(chunk, cache_salt=cache_salt, limit=limit))
        return parts

    def confirm(self, prepared: PreparedRequest) -> None:
        """A speculative request is asked for."""
        if self.arranger is not None:
            with self._arranging:
                self.arranger.count(prepared.prompt, free=prepared.arranged.free, tenant=prepared.request.tenant)

    def load_counts(self, path: Path | None) -> None:
        """Count what an earlier process saved."""
        if self.arranger is not None:
            with self._arranging:
                self.arranger.load(path)

    def save_counts(self, path: Path | None) -> None:
        """Keep what was asked for over a restart."""
        if self.arranger is not None:
            with self._arranging:
                self.arranger.save(path)

    def answered(self, prepared: PreparedRequest, arranged: Arranged) -> None:
        """A request was answered with its chunks `arranged` so; a later one may send its messages again."""
        if prepared.turn is None:
            ranks = sorted(arranged.ranks.items())
            self.turn_builder.answered(prepared.request, [prepared.request.chunks[rank] for _, rank in ranks])

    def abandon(self, prepared: PreparedRequest) -> None:
        """A request ends without an answer; a no-op after its end."""
        if prepared.turn is not None:
            self.turn_builder.abandon(prepared.turn)

    def _built(self, request: Request, limit: PromptLimit) -> Prompt:
        return self.builder.build(
            request.question,
            request.chunks,
            system=request.system,
            history=request.history,
            history_chunks=request.history_chunks,
            cache_salt=request.cache_salt,
            limit=limit,
        )

    def _arrange(self, prompt: Prompt, order: ChunkOrder, tenant: str, *, counted: bool) -> Arranged:
        if self.arranger is None:
            return Arranged(prompt)
        with self._arranging:
            return self.arranger.arrange(prompt, order, counted=counted, tenant=tenant)


def _promotion(arranged: Arranged, turn: TurnUnderWay | None) -> Promotion | None:
    """Over what an exact prefix may grow; a conversation keeps all that its next turn builds on."""
    return arranged.promotion if turn is None else None
