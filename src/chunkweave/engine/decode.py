"""One request from its first token to its last: sampling, detokenizing, and the answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkweave.config import SamplingParams
from chunkweave.conversation.answer import Answer, Durations, PrefillReport, build_report
from chunkweave.conversation.prepare import PreparedRequest
from chunkweave.engine.prefill import Prefilled
from chunkweave.kv.segment import SegmentSource
from chunkweave.metrics import ReuseReport
from chunkweave.ordering.arrangement import Arranged
from chunkweave.planning.method_choice import EXACT_METHOD, MethodChoice, Why
from chunkweave.planning.outcome import (
    full_prefill_flops,
    prefill_flops,
)
from chunkweave.prompt.parts import PromptPart
from chunkweave.prompt.tokenizer import TextTokenizer
from chunkweave.scheduling.drafts import Drafts
from chunkweave.store.store import TieredStore
from chunkweave.types import Geometry, SegmentId


class Sampler:
    """Greedy or nucleus sampling for one answer, within its grammar; owns its random state."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._matching = None if params.grammar is None else params.grammar.begin()
        self._generator = torch.Generator()
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        elif params.temperature > 0:
            self._generator.seed()

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id from `logits` `[vocab]`; when greedy, the first of equal maxima.

        Raises:
            UsageError: the grammar needs too much work for this token.
            AnswerFormError: the grammar refuses the token that was chosen.
        """
        if self._matching is None:
            return self._chosen(logits)
        token = self._chosen(self._matching.masked(logits))
        self._matching.take(token)
        return token

    @property
    def ended(self) -> bool:
        """Whether the grammar, if there is one, allows no further token."""
        return self._matching is not None and self._matching.ended

    def _chosen(self, logits: torch.Tensor) -> int:
        if self._params.temperature == 0.0:
            return int(logits.argmax())
        behind_best = logits.double().cpu() - logits.max().double().cpu()  # at most 0: no overflow at low temperature
        probabilities = torch.softmax(behind_best / self._params.temperature, dim=-1)
        if self._params.top_p < 1.0:
            probabilities = _nucleus(probabilities, self._params.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the fewest most likely tokens whose probabilities sum to `top_p`; at least one stays."""
    ranked, order = probabilities.sort(descending=True, stable=True)
    outside = ranked.cumsum(0) - ranked >= top_p
    outside[0] = False  # `top_p` may round to 0
    return probabilities.index_fill(0, order[outside], 0.0)


_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Text of one answer so far; holds back incomplete characters and possible beginnings of stop texts.

    `text` is safe to show. It only grows; `finish` adds what was held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._whole = ""
        self.text = ""
        self.stopped = False

    def add(self, token_ids: Sequence[int]) -> str:
        """The text added since the last call, given all token ids so far. Sets `stopped` at a stop text, which is left
        out.
        """
        self._whole = self._decode(token_ids)
        cut = min((i for i in (self._whole.find(text) for text in self._stop) if i >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            self._whole = self._whole[:cut]
            return self._show(len(self._whole))
        return self._show(len(self._whole) - self._held_back())

    @property
    def length(self) -> int:
        """Characters of the text so far, including those held back."""
        return len(self._whole)

    def finish(self) -> str:
        """The text that was held back, once generation has ended."""
        return self._show(len(self._whole))

    def _show(self, length: int) -> str:
        new = self._whole[len(self.text) : length]
        self.text += new
        return new

    def _held_back(self) -> int:
        whole = self._whole
        if whole.endswith(_INCOMPLETE):
            return len(whole) - len(whole.rstrip(_INCOMPLETE))
        longest = max((len(text) for text in self._stop), default=1) - 1
        starts = range(max(0, len(whole) - longest), len(whole))
        return next((len(whole) - i for i in starts if any(text.startswith(whole[i:]) for text in self._stop)), 0)


@dataclass(frozen=True, slots=True)
class _TokenLogprobs:
    """A token's text, its offset in the answer, its log-probability, and the most likely alternatives by text."""

    text: str
    offset: int
    logprob: float
    alternatives: Mapping[str, float]


_CONTINUED_TOKENS = 8
"""Tokens before an answer that continues a text with which it is decoded."""


def _decoder(prepared: PreparedRequest, tokenizer: TextTokenizer) -> Callable[[Sequence[int]], str]:
    """Decodes an answer. One that continues a text is decoded together with its end: tokenizers drop a first space."""
    if not prepared.request.continued:
        return tokenizer.decode
    end_ids = prepared.prompt.token_ids[-_CONTINUED_TOKENS:]
    length = len(tokenizer.decode(end_ids))
    return lambda token_ids: tokenizer.decode((*end_ids, *token_ids))[length:]


class DecodeState:
    """The tokens generated for one prefilled request, and the data for its report."""

    def __init__(
        self,
        prepared: PreparedRequest,
        prefilled: Prefilled,
        tokenizer: TextTokenizer,
        store: TieredStore[SegmentSource],
    ) -> None:
        """Make the state of a request without tokens.

        Call it before loaded segments are promoted and new ones stored: it records each segment's tier, and storing may
        evict them.
        """
        self.prefilled = prefilled
        self.prefilled_again = False
        """Whether its KV is not that of the first prefill's plan."""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._prepared = prepared
        self._sampler = Sampler(prepared.request.sampling)
        self._detokenizer = Detokenizer(_decoder(prepared, tokenizer), prepared.request.sampling.stop)
        self._tokenizer = tokenizer
        self._logprobs: list[_TokenLogprobs] = []
        self._tiers = {segment: store.tier_of(segment) or "host" for segment in prefilled.plan.segments()}
        self._computed = 0
        self._drafts: Drafts | None = None
        self._drafted = self._accepted = 0

    @property
    def text(self) -> str:
        """The text that may be shown so far."""
        return self._detokenizer.text

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens after the prompt so far."""
        return tuple(self.token_ids)

    @property
    def pending(self) -> tuple[int, ...]:
        """The tokens without KV in the cache; the next step computes them."""
        return tuple(self.token_ids[self._computed :])

    @property
    def position(self) -> int:
        """Prompt position of the first pending token."""
        return len(self.prefilled.prompt) + self._computed

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def advance(self, logits: torch.Tensor) -> str:
        """Choose the next token from its logits `[vocab]`; returns the new text that may be shown.

        `logits` belong to the last known token. If the answer is complete, no token is chosen.
        """
        self._computed = len(self.token_ids)
        if self.finish_reason is not None:
            return ""
        token = self._sampler.choose(logits)
        if token in self._tokenizer.stop_ids:
            self.finish_reason = "stop"
            return ""
        if (most := self._prepared.request.sampling.logprobs) is not None:
            self._logprobs.append(self._logprobs_of(token, logits, most))
        self.token_ids.append(token)
        text = self._detokenizer.add(self.token_ids)
        if self._detokenizer.stopped or self._sampler.ended:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._prepared.room:
            self.finish_reason = "length"
        return text

    def take_logprobs(self) -> dict[str, Any] | None:
        """Log-probabilities since the last call, in the form of vLLM's completions; None if there are none.

        They are those of the model, before temperature and constraints.
        """
        taken, self._logprobs = self._logprobs, []
        if not taken:
            return None
        return {
            "tokens": [token.text for token in taken],
            "token_logprobs": [token.logprob for token in taken],
            "top_logprobs": [dict(token.alternatives) for token in taken],
            "text_offset": [token.offset for token in taken],
        }

    def _logprobs_of(self, token: int, logits: torch.Tensor, most: int) -> _TokenLogprobs:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        previous_id = self.token_ids[-1] if self.token_ids else self.prefilled.prompt.token_ids[-1]
        values, ids = logprobs.topk(most)
        texts = [self._tokenizer.token_text(int(token_id), previous_id) for token_id in ids]
        alternatives: dict[str, float] = {}
        for text, value in zip(texts, values.tolist(), strict=True):
            alternatives.setdefault(text, value)  # incomplete characters have the same text
        chosen_text = self._tokenizer.token_text(token, previous_id)
        return _TokenLogprobs(chosen_text, self._detokenizer.length, float(logprobs[token]), alternatives)

    def sibling(self, prepared: PreparedRequest, store: TieredStore[SegmentSource]) -> "DecodeState":
        """Another answer to the same prompt, without tokens and with an empty cache of its own."""
        empty = self.prefilled.cache.copy(0, 0)
        prefilled = replace(self.prefilled, cache=empty, captures=(), attention=None, loaded=(), lease=None)
        return DecodeState(prepared, prefilled, self._tokenizer, store)

    def find_drafts(self, most: int) -> tuple[tuple[int, ...], float]:
        """At most `most` tokens that may come next, and the probability that one is accepted if those before it are."""
        if self.finish_reason is not None:
            return (), 0.0
        if self._drafts is None:
            self._drafts = Drafts(self.prefilled.prompt.token_ids)
        room = self._prepared.room - len(self.token_ids) - 1
        return self._drafts.find(self.token_ids, min(most, room)), self._drafts.acceptance

    def verify(self, logits: torch.Tensor, drafts: Sequence[int]) -> int:
        """Choose tokens from the logits `[1 + drafts, vocab]` of the last known token and the drafts behind it.

        Each token is chosen as without drafts. If it is the draft, the draft's logits give the next one; otherwise they
        are discarded. So the answer's distribution does not depend on drafts: a draft is accepted with the probability
        that the model gives it, as in rejection sampling. Returns the number of accepted drafts.
        """
        accepted = 0
        for row, draft in zip(logits, (*drafts, None), strict=True):
            self.advance(row)
            if self.finish_reason is not None or self.token_ids[-1] != draft:
                break
            accepted += 1
        if self._drafts is not None and drafts:
            self._drafts.checked(len(drafts), accepted)
        self._drafted += len(drafts)
        self._accepted += accepted
        return accepted

    def let_go(self) -> None:
        """Free the KV cache, and what was captured for the store."""
        self.prefilled.cache.free()
        self.without_captures()

    def without_captures(self) -> None:
        """Drop what the prefill captured, once it is stored, and unpin; it is as large as the prompt's KV."""
        if self.prefilled.lease is not None:
            self.prefilled.lease.release()
        self.prefilled = replace(self.prefilled, captures=(), attention=None, loaded=(), lease=None)

    def continue_with(self, prefilled: Prefilled) -> None:
        """Continue with the cache of a second prefill, after preemption; the report stays that of the first."""
        self.prefilled = replace(self.prefilled, cache=prefilled.cache)
        self.prefilled_again = True

    def finish(self) -> str:
        """The text that was held back, once generation has ended."""
        return self._detokenizer.finish()

    def answer(self, geometry: Geometry, durations: Durations) -> Answer:
        """The whole answer, with its report."""
        prepared = self._prepared
        report = make_report(
            self.prefilled,
            geometry,
            durations,
            len(self.token_ids),
            self._tiers,
            prepared.choice,
            prepared.arranged,
            not_sent=prepared.not_sent,
        )
        report = replace(report, draft_tokens=self._drafted, accepted_tokens=self._accepted)
        return Answer(self.text, tuple(self.token_ids), self.finish_reason or "length", report)


def make_report(
    prefilled: Prefilled,
    geometry: Geometry,
    durations: Durations,
    new_tokens: int,
    tiers: Mapping[SegmentId, str] | None = None,
    choice: MethodChoice | None = None,
    arranged: Arranged | None = None,
    *,
    not_sent: Sequence[PromptPart] = (),
) -> ReuseReport:
    """The report of a prefill and its answer.

    `tiers` maps segments to tiers (default `host`), `choice` says why the method was chosen, `arranged` how the chunks
    were ordered, `not_sent` are chunks that earlier turns brought.
    """
    plan = prefilled.plan
    tiers = tiers or {}
    expected = plan.expected
    if choice is not None and expected is not None and plan.gave_way:
        why = Why.RECURS if expected.woven < expected.exact else Why.NO_GAIN
        choice = MethodChoice(EXACT_METHOD, choice.reuse, why)
    measured = expected is not None and expected.measured
    prefill = PrefillReport.of_plan(
        plan,
        parameters={} if choice is None else choice.parameters_raised(plan.raised_to),
        recomputed=[position for span in prefilled.recomputed for position in span.positions()],
        recompute_work=prefilled.recompute_work,
        num_layers=geometry.num_layers,
        stopped_at_layer=None if prefilled.stop is None else prefilled.stop.layer_if_dropped,
        tier_of=lambda segment: tiers.get(segment, "host"),
    )
    return build_report(
        arranged or Arranged(prefilled.prompt),
        choice,
        not_sent,
        prefill,
        durations,
        method=plan.method,
        new_tokens=new_tokens,
        lookup_s=prefilled.lookup_s,
        load_s=prefilled.load_s,
        weave_s=prefilled.weave_s,
        prefill_flops=prefill_flops(geometry, list(prefilled.work)),
        full_prefill_flops=full_prefill_flops(geometry, plan.prompt_tokens),
        lost_segments=prefilled.lost_segments,
        loaded_fraction=plan.loaded_fraction(geometry.windows),
        expected_s={"woven": expected.woven, "exact": expected.exact} if expected and measured else {},
    )
