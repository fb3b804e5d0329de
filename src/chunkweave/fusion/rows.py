"""One request's share of a flat batch: which of its tokens are active, and how the rules narrow them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch

from chunkweave.fusion.attention_capture import AttentionCapture
from chunkweave.fusion.capture import PartCapture
from chunkweave.fusion.evidence import measure
from chunkweave.fusion.focus import FocusWatch
from chunkweave.fusion.question_watch import QuestionWatch
from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.attention import ScatteredQueries
from chunkweave.planning.explanation import Stop
from chunkweave.planning.flops import LayerWork
from chunkweave.planning.plan import KeepTop, Pass, StopUnfocused, TopBy, Watch
from chunkweave.types import Scattered, Span, spans_of


class ActiveRows:
    """The active tokens of one request during one pass. Owned and narrowed by the layer loop.

    `positions` `[rows]` ascend; `token_ids` are the ids at the positions that were active first. `stop` is set once a
    rule has found the focused chunks.
    """

    def __init__(
        self,
        cache: RequestCache,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        dtype: torch.dtype,
        candidate: torch.Tensor | None = None,
        rules: Sequence[KeepTop] = (),
        stop_unfocused: StopUnfocused | None = None,
        watch: Watch | None = None,
        read: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        depth: int | None = None,
        answers: bool = True,
    ) -> None:
        """`token_ids` and `positions` are `[rows]`; `candidate` flags the rows that rules may drop (none if absent).

        `read` `[positions]` is what the question gave to each in the pass before, `hidden` flags the positions that
        nobody sees. The rows run `depth` layers (None: all), and have no logits unless they are to give `answers`.
        """
        self.depth = depth
        self.answers = answers
        self.cache = cache
        self.token_ids = token_ids
        self.work: list[LayerWork] = []
        self.stop: Stop | None = None
        self._rules = {rule.layer: rule for rule in rules}
        self._watch = None if stop_unfocused is None else FocusWatch(stop_unfocused, positions.device)
        self._question = None if watch is None else QuestionWatch(watch, positions.device, hidden=hidden)
        self._read = read
        self._hidden = hidden
        self._candidate = candidate if candidate is not None else torch.zeros_like(positions, dtype=torch.bool)
        self._captured: list[tuple[PartCapture, slice]] = []
        self._attention: AttentionCapture | None = None
        self._dtype = dtype
        self._activate(positions)

    @classmethod
    def of_pass(
        cls,
        cache: RequestCache,
        prompt_ids: torch.Tensor,
        a_pass: Pass,
        *,
        dtype: torch.dtype,
        evidence: torch.Tensor | None = None,
        recomputed: Sequence[Span] = (),
        answers: bool = True,
    ) -> Self:
        """The rows that `a_pass` starts with; `prompt_ids` `[tokens]` is the whole prompt, on the model's device.

        `evidence` `[tokens]` is what the pass before found, for one that starts by it; `recomputed` is what earlier
        passes did, and not chosen again. Only the last pass gives `answers`.
        """
        device = prompt_ids.device
        required = torch.zeros(len(prompt_ids), dtype=torch.bool)
        candidate = torch.zeros(len(prompt_ids), dtype=torch.bool)
        _mark(required, a_pass.required)
        _mark(candidate, a_pass.candidates)
        candidate &= ~required
        if a_pass.start is not None:
            assert evidence is not None, "a pass that starts by evidence follows one that watched"
            done = torch.zeros(len(prompt_ids), dtype=torch.bool)
            _mark(done, recomputed)
            evidence = _weighted(evidence, a_pass, a_pass.start)
            candidate = _best(candidate & ~done, evidence, a_pass.start.count)
        hidden = torch.zeros(len(prompt_ids), dtype=torch.bool)
        _mark(hidden, a_pass.hidden)
        positions = torch.nonzero(required | candidate).squeeze(1)
        return cls(
            cache,
            prompt_ids[positions.to(device)],
            positions.to(device),
            dtype=dtype,
            candidate=candidate[positions].to(device),
            rules=a_pass.keep_top,
            stop_unfocused=a_pass.stop_unfocused if candidate.any() else None,
            watch=a_pass.watch,
            read=evidence,
            hidden=hidden.to(device) if a_pass.hidden else None,
            depth=a_pass.depth,
            answers=answers,
        )

    def keep(
        self, captures: Sequence[PartCapture], attention: AttentionCapture | None, *, in_slices: bool = False
    ) -> None:
        """Let `captures` take the KV of their parts' rows, and `attention` what those rows attend to.

        With `in_slices` these are some of the rows of a pass, and the captures see the others in other slices.
        """
        for capture in captures:
            capture.start(in_slices=in_slices)
        self._captured = [(capture, slice(0)) for capture in captures]
        self._attention = attention
        self._follow()

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def evidence(self) -> torch.Tensor | None:
        """What this pass found for the next one, a number a position up to the question's last; None if unwatched."""
        return None if self._question is None else self._question.attention

    def refine(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Apply this layer's rule to fresh keys and values before RoPE, `[rows, kv_heads, head_dim]`.

        Returns the rows that stay active, ascending, or None if the layer has no rule. Mutates the active set.
        """
        rule = self._rules.get(layer)
        if rule is None:
            return None
        keep = self._surviving_rows(rule, layer, keys, values)
        self._narrow(keep)
        return keep

    def end(self) -> None:
        """This layer is the last: nobody reads hidden states behind it but that of the last token, for an answer.

        So only that one is attended and finished, or none, and the pass ends with the KV of this layer.
        """
        if not self.answers:
            self._finishing = self.positions[:0]
            return
        self._finishing = self.positions[-1:]
        self._queries = ScatteredQueries(self._finishing, self._dtype)

    @property
    def finishing(self) -> int:
        """How many active tokens, the last ones, go through attention and MLP."""
        return len(self._finishing)

    @property
    def asking(self) -> int:
        """How many active tokens, the last ones, have their queries read: by attention, or by a watch where it ends."""
        return self.finishing or len(self)

    def record(self, entered: int) -> None:
        """Note the work of the layer that was just finished; `entered` rows had q, k, v computed."""
        visible = int(self._finishing.sum()) + len(self._finishing)
        self.work.append(LayerWork(entered, len(self), len(self._finishing), visible))

    def write(self, layer: int, keys: torch.Tensor, rotated: torch.Tensor, values: torch.Tensor) -> None:
        """Put the active rows into the request's cache, and into the captures of parts to be stored."""
        if self._hidden is not None:
            self.cache.clear(layer, self._hidden)
        self.cache.write(layer, self.positions, rotated, values)
        if self._first_kept < len(self):
            self.cache.keep(layer, self.positions[self._first_kept :], keys[self._first_kept :])
        for capture, rows in self._captured:
            capture.take(keys[rows], values[rows])

    def attend(self, layer: int, queries: torch.Tensor, stop: int) -> torch.Tensor:
        """Attention of the `finishing` rows' queries over the request's cache below position `stop`."""
        keys, values = self.cache.view(layer, stop)
        return self._queries.attend(queries, keys, values)

    def look(self, layer: int, queries: torch.Tensor, stop: int) -> torch.Tensor | None:
        """After attention of a layer: note what the rows attended to, then drop the candidates in unfocused chunks.

        `queries` `[rows, heads, head_dim]` are those of all active rows, after RoPE. Returns the rows that stay active
        from the next layer on, ascending, or None if none is dropped. Mutates the active set.
        """
        keys, _ = self.cache.view(layer, stop)
        if self._attention is not None and self._attention.wants(layer):
            self._attention.read(layer, queries, keys)
            self.work[-1] = replace(self.work[-1], captured_scores=self._attention.scores)
        if self._question is not None and self._question.wants(layer):
            question = self._question.watch.question
            first = self._row_of(question.start)
            self._question.look(queries[first : first + len(question)], keys)
            self._note_evidence(question)
        if self._watch is None:
            return None
        rows = slice(self._question_row, self._question_row + len(self._watch.rule.question))
        focused = self._watch.look(queries[rows], keys)
        self._note_evidence(self._watch.rule.question)
        return None if focused is None else self._drop_unfocused(layer, self._watch, focused)

    def _note_evidence(self, question: Span) -> None:
        """Count the looking in the work of the layer that was just finished."""
        keys = sum(position + 1 for position in question.positions())
        self.work[-1] = replace(self.work[-1], evidence_keys=self.work[-1].evidence_keys + keys)

    def _drop_unfocused(self, layer: int, watch: FocusWatch, focused: frozenset[int]) -> torch.Tensor | None:
        unfocused = torch.zeros(self.cache.capacity, dtype=torch.bool)
        _mark(unfocused, watch.unfocused(focused))
        drop = self._candidate & unfocused.to(self.positions.device)[self.positions]
        chunks = tuple(watch.rule.chunks[index] for index in sorted(focused))
        self.stop = Stop(layer + 1, chunks, spans_of(self.positions[drop].tolist()))
        self._watch = None
        if not self.stop.dropped:
            return None
        keep = torch.nonzero(~drop).squeeze(1)
        self._narrow(keep)
        return keep

    def _surviving_rows(self, rule: KeepTop, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(self._candidate).squeeze(1)
        cached = self.cache.cached_before_rope(layer, self.positions[rows])
        read = None if self._read is None else self._read[self.positions[rows]]
        evidence = measure(rule.by, keys[rows], values[rows], cached, read)
        best = torch.sort(evidence, descending=True, stable=True).indices[: rule.count]
        keep = ~self._candidate
        keep[rows[best]] = True
        return torch.nonzero(keep).squeeze(1)

    def _narrow(self, keep: torch.Tensor) -> None:
        self._candidate = self._candidate[keep]
        self._activate(self.positions[keep])

    def _activate(self, positions: torch.Tensor) -> None:
        """Make `positions` the active ones; everything that follows from them is worked out once, here."""
        self.positions = positions
        self._queries = ScatteredQueries(positions, self._dtype, hidden=self._hidden)
        self._finishing = positions
        self._first_kept = len(self) if self.cache.kept_from is None else self._row_of(self.cache.kept_from)
        if self._watch is not None:
            self._question_row = self._row_of(self._watch.rule.question.start)
        self._follow()

    def _follow(self) -> None:
        """Tell the captures which rows are theirs; a part of which too few are left is given up."""
        if not self._captured:
            return
        followed = []
        for capture, _ in self._captured:
            span = capture.part.span
            rows = slice(self._row_of(span.start), self._row_of(span.stop))
            if capture.follow(self.positions[rows] - span.start):
                followed.append((capture, rows))
        self._captured = followed
        if self._attention is not None:
            indices = {index for _, rows in followed for index in range(rows.start, rows.stop)}
            rows_followed = torch.tensor(sorted(indices), dtype=torch.long, device=self.positions.device)
            self._attention.follow(rows_followed, self.positions[rows_followed])

    def _row_of(self, position: int) -> int:
        """The first row at `position` or behind it."""
        return int(torch.searchsorted(self.positions, position))


def _weighted(evidence: torch.Tensor, a_pass: Pass, start: TopBy) -> torch.Tensor:
    """The evidence times the weights of the candidates; where they are no candidates it does not matter."""
    if not start.weights:
        return evidence
    where = [position for span in a_pass.candidates for position in span.positions()]
    weighted = evidence.clone()
    weighted[where] *= evidence.new_tensor(start.weights)
    return weighted


def _best(candidate: torch.Tensor, evidence: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` flagged positions with the most evidence, flagged; of equal ones the earlier."""
    where = torch.nonzero(candidate).squeeze(1)
    order = torch.sort(evidence[where.to(evidence.device)], descending=True, stable=True).indices
    best = torch.zeros_like(candidate)
    best[where[order[:count].to(where.device)]] = True
    return best


def _mark(flags: torch.Tensor, spans: Sequence[Span | Scattered]) -> None:
    for span in spans:
        if isinstance(span, Scattered):
            flags[span.positions()] = True
        else:
            flags[span.start : span.stop] = True
