"""One request's share of a flat batch: which of its tokens are active, and how the rules narrow them.

How many rows survive a rule is known beforehand, which ones only the device knows: so the rows are chosen, and
everything is gathered by them, on the device. The host asks where they are at most once after each rule, and only if
something on the host has to know: parts that are kept for the store, and attention without a kernel of ours.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self

import torch

from chunkweave.fusion.capture import AttentionCapture, FocusWatch, PartCapture, QuestionWatch
from chunkweave.kv.request_cache import Rotate
from chunkweave.models.attention import ALONE, Measured, OwnQueries, Ranks, ScatteredQueries
from chunkweave.planning.outcome import LayerWork, Stop
from chunkweave.planning.plan import Evidence, Pass, TopBy
from chunkweave.types import Geometry, Scattered, ScoreRule, Span, spans_of


class PassCache(Protocol):
    """One request's KV, layer by layer: a cache of its own (`RequestCache`), or blocks that vLLM owns.

    Shapes, and what each method does, are those of `RequestCache`, where they are documented. A layer is loaded, and
    then read and written, before the next one is.
    """

    @property
    def capacity(self) -> int: ...
    @property
    def kept_from(self) -> int | None: ...
    @property
    def geometry(self) -> Geometry: ...
    def load_layer(self, layer: int, rotate: Rotate) -> None: ...
    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor: ...
    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None: ...
    def keep(self, layer: int, positions: torch.Tensor, keys: torch.Tensor) -> None: ...
    def clear(self, layer: int, hidden: torch.Tensor) -> None: ...
    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def flags_of(spans: Sequence[Span | Scattered], tokens: int) -> torch.Tensor:
    """Which of so many `tokens` are at the positions of `spans`, bool `[tokens]` on the host."""
    flags = torch.zeros(tokens, dtype=torch.bool)
    for span in spans:
        if isinstance(span, Scattered):
            flags[span.positions()] = True
        else:
            flags[span.start : span.stop] = True
    return flags


def measure(
    by: Evidence,
    keys: torch.Tensor,
    values: torch.Tensor,
    cached: torch.Tensor,
    read: torch.Tensor | None = None,
    *,
    ranks: Ranks = ALONE,
) -> torch.Tensor:
    """Evidence of each token, `[tokens]` in float32: the L2 norm of fresh minus cached KV (CacheBlend §4.1).

    `keys` and `values` are fresh, `[tokens, kv_heads, head_dim]`, `cached` is `[2, tokens, kv_heads, head_dim]`; all
    before RoPE, so that the position plays no part. `read` `[tokens]` is what the question gave to each in the pass
    before, where that counts. The heads are this rank's; the evidence is over those of all `ranks`. The paper says
    "absolute difference"; here it is the norm of keys and values together.
    """
    fresh = torch.stack((keys, values)).float()
    deviation = ranks.norm((fresh - cached.float()).pow(2).sum(dim=(0, 2, 3)).sqrt())
    match by:
        case Evidence.KV_DEVIATION:
            return deviation
        case Evidence.READ_DEVIATION:
            assert read is not None, "a pass that ranks by what was read starts by it"
            return deviation * read


CountedWork = tuple[LayerWork, torch.Tensor]
"""The work of a layer without its visible keys, and these as a tensor: only the device knows where its tokens are."""


def counted(work: Sequence[CountedWork]) -> list[LayerWork]:
    """The work with its visible keys. Asks the device, so that it is for when a prefill is over."""
    if not work:
        return []
    visible = torch.stack([keys for _, keys in work]).tolist()
    return [replace(layer, visible_keys=keys) for (layer, _), keys in zip(work, visible, strict=True)]


_NO_RULES = Pass(required=())


class ActiveRows:
    """The active tokens of one request during one pass. Owned and narrowed by the layer loop.

    `positions` `[rows]` ascend; `token_ids` are the ids at the positions that were active first. `stop` is set once a
    rule has found the focused chunks; `kept` has the positions of the candidates that each layer's rule kept.
    """

    def __init__(
        self,
        cache: PassCache,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        dtype: torch.dtype,
        stop: int,
        where: Sequence[int] | None = None,
        a_pass: Pass = _NO_RULES,
        candidates: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        answers: bool = True,
        decided: Mapping[int, torch.Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`token_ids` and `positions` are `[rows]`, on the model's device; no position is at `stop` or behind it.

        `where` are the positions as the host knows them, if it does. `a_pass` has the rules, what is watched, and the
        number of layers; `candidates` are the rows, ascending, that its rules may drop. `read` `[positions]` is what
        the question gave to each in the pass before, `hidden` flags the positions that no query sees. Only if it
        `answers` has the last row logits. `decided` has by layer the positions that its rule keeps, where that was
        decided before. The heads of keys and queries are this rank's of all `ranks`.
        """
        device = positions.device
        unfocused, watch = a_pass.stop_unfocused, a_pass.watch
        self._candidates = candidates if candidates is not None else positions.new_empty(0)
        self.depth = a_pass.depth
        self.answers = answers
        self.cache = cache
        self.token_ids = token_ids
        self.key_stop = stop
        self.stop: Stop | None = None
        self.kept: dict[int, torch.Tensor] = {}
        self.work: list[CountedWork] = []
        """What each layer computed so far."""
        self._rules = {rule.layer: rule for rule in a_pass.keep_top}
        self._decided = decided or {}
        self._ranks = ranks
        focuses = unfocused is not None and len(self._candidates) > 0
        self._watch = FocusWatch(unfocused, device, ranks=ranks) if unfocused is not None and focuses else None
        self._question = None if watch is None else QuestionWatch(watch, device, hidden=hidden, ranks=ranks)
        self._read = read
        self._hidden = hidden
        self._hidden_positions = None if hidden is None else torch.nonzero(hidden).squeeze(1)
        self._captured: list[tuple[PartCapture, slice]] = []
        self._attention: AttentionCapture | None = None
        self._dtype = dtype
        self._where = where
        self._activate(positions, where)

    @classmethod
    def of_pass(
        cls,
        cache: PassCache,
        prompt_ids: torch.Tensor,
        a_pass: Pass,
        *,
        dtype: torch.dtype,
        evidence: torch.Tensor | None = None,
        recomputed: Sequence[Span] = (),
        answers: bool = True,
        decided: Mapping[int, torch.Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> Self:
        """The rows that `a_pass` starts with; `prompt_ids` `[tokens]` is the whole prompt, on the model's device.

        If the pass starts by `evidence` `[tokens]`, which the pass before found, the rows are chosen on the device: of
        equal candidates the earlier ones, none that earlier passes `recomputed`. Only the last pass gives `answers`.
        """
        tokens, device = len(prompt_ids), prompt_ids.device
        required = flags_of(a_pass.required, tokens)
        candidate = flags_of(a_pass.candidates, tokens) & ~required
        where: list[int] | None = None
        if a_pass.start is None:
            positions = torch.nonzero(required | candidate).squeeze(1)
            candidates = torch.nonzero(candidate[positions]).squeeze(1).to(device)
            where = positions.tolist()
            stop = where[-1] + 1 if where else 0
            positions = positions.to(device)
        else:
            assert evidence is not None, "a pass that starts by evidence follows one that watched"
            evidence = _weighted(evidence, a_pass, a_pass.start)
            candidate &= ~flags_of(recomputed, tokens)
            last = torch.nonzero(required | candidate)[-1:]
            stop = int(last) + 1 if len(last) else 0
            from_which = torch.nonzero(candidate).squeeze(1).to(device)
            order = torch.sort(evidence[from_which], descending=True, stable=True).indices
            chosen = from_which[order[: a_pass.start.count]].sort().values
            positions = torch.cat((torch.nonzero(required).squeeze(1).to(device), chosen)).sort().values
            candidates = torch.searchsorted(positions, chosen)
        return cls(
            cache,
            prompt_ids[positions],
            positions,
            dtype=dtype,
            stop=stop,
            where=where,
            a_pass=a_pass,
            candidates=candidates,
            read=evidence,
            hidden=flags_of(a_pass.hidden, tokens).to(device) if a_pass.hidden else None,
            answers=answers,
            decided=decided,
            ranks=ranks,
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
        return self.positions.shape[0]  # a tenth of what a tensor's own len takes, and asked for at every layer

    @property
    def where(self) -> Sequence[int]:
        """The active positions, for the host; asks the device if a rule has narrowed them since."""
        if self._where is None:
            where: list[int] = self.positions.tolist()
            self._where = where
        return self._where

    @property
    def candidates(self) -> torch.Tensor:
        """Positions of the active tokens that rules may drop, ascending."""
        return self.positions[self._candidates]

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
        rows = self._candidates
        if layer in self._decided:
            stay = torch.isin(self.positions[rows], self._decided[layer])
            dropped, candidates = rows[~stay], rows[stay]
        else:
            cached = self.cache.cached_before_rope(layer, self.positions[rows])
            read = None if self._read is None else self._read[self.positions[rows]]
            evidence = measure(rule.by, keys[rows], values[rows], cached, read, ranks=self._ranks)
            by_rank = rows[torch.sort(evidence, descending=True, stable=True).indices]
            dropped, candidates = by_rank[rule.count :], by_rank[: rule.count].sort().values
        self.kept[layer] = self.positions[candidates]
        return self._drop(dropped, candidates)

    def end(self) -> None:
        """This layer is the last: behind it only the hidden state of the last token is read, and only for an answer.

        So that one row is attended and finished, or none, and the pass ends with the KV of this layer. Focus does not
        matter any more.
        """
        self._watch = None
        if not self.answers:
            self._finish_only(self.positions[:0])
            return
        self._finish_only(self.positions[-1:])

    @property
    def finishing(self) -> int:
        """How many active tokens, the last ones, go through attention and MLP."""
        return self._finishing.shape[0]

    @property
    def queried(self) -> int:
        """How many active tokens, the last ones, have their queries read: by attention, or by a watch where it ends."""
        return self.finishing or len(self)

    def record(self, entered: int) -> None:
        """Note the work of the layer that was just finished; `entered` rows had q, k, v computed."""
        window = self.cache.geometry.window(len(self.work))
        if window not in self._visible_keys:
            seen = self._finishing + 1
            self._visible_keys[window] = (seen if window is None else seen.clamp(max=window)).sum()
        self.work.append((LayerWork(entered, len(self), self.finishing, 0), self._visible_keys[window]))

    def write(self, layer: int, keys: torch.Tensor, rotated: torch.Tensor, values: torch.Tensor) -> None:
        """Put the active rows into the request's cache, and into the captures of parts to be stored."""
        if self._hidden_positions is not None:
            self.cache.clear(layer, self._hidden_positions)
        self.cache.write(layer, self.positions, rotated, values)
        if self._first_kept < len(self):
            self.cache.keep(layer, self.positions[self._first_kept :], keys[self._first_kept :])
        for capture, rows in self._captured:
            capture.take(keys[rows], values[rows])

    def own_queries(self, layer: int) -> OwnQueries:
        """What the `finishing` rows' queries look at; with the parts of the keys if their mass is to be captured."""
        keys, values = self.cache.view(layer, self.key_stop)
        wanted = self._attention is not None and self._attention.wants(layer) and self.finishing == len(self)
        parts = self._attention.key_parts if wanted and self._attention is not None else None
        return OwnQueries(self._queries_of(layer), keys, values, parts, self.cache.geometry.scores(layer))

    def _queries_of(self, layer: int) -> ScatteredQueries:
        """How the `finishing` rows attend on this layer, worked out once for all layers of its window."""
        window = self.cache.geometry.window(layer)
        if window not in self._queries:
            only_last = self.finishing < len(self)
            where = None if self._where is None else self._where[len(self) - self.finishing :]
            hidden = None if only_last else self._hidden
            self._queries[window] = ScatteredQueries(
                self._finishing, self._dtype, hidden=hidden, where=where, window=window
            )
        return self._queries[window]

    def look(self, layer: int, queries: torch.Tensor, measured: Measured | None = None) -> torch.Tensor | None:
        """After attention of a layer: note what the rows attended to, then drop the candidates in unfocused chunks.

        `queries` `[rows, heads, head_dim]` are those of all active rows, after RoPE; `measured` is what the kernel
        summed of their weights, if it did. Returns the rows that stay active from the next layer on, ascending, or None
        if none is dropped. Mutates the active set.
        """
        keys, _ = self.cache.view(layer, self.key_stop)
        if self._attention is not None and self._attention.wants(layer):
            self._attention.read(layer, queries, keys, measured)
            self._note(captured_scores=self._attention.scores(layer))
        if self._question is not None and layer in self._question.watch.layers and self._tells_apart(layer):
            question = self._question.watch.question
            first = self._row_of(question.start)
            self._question.look(queries[first : first + len(question)], keys, *self._seen_on(layer))
            self._note_evidence(question, layer)
        if self._watch is None or not self._tells_apart(layer):
            return None
        rows = slice(self._question_row, self._question_row + len(self._watch.rule.question))
        focused = self._watch.look(queries[rows], keys, *self._seen_on(layer))
        self._note_evidence(self._watch.rule.question, layer)
        return None if focused is None else self._drop_unfocused(layer, self._watch, focused)

    def _seen_on(self, layer: int) -> tuple[int | None, ScoreRule]:
        return self.cache.geometry.window(layer), self.cache.geometry.scores(layer)

    def _tells_apart(self, layer: int) -> bool:
        """Whether this layer's attention says which chunks a question reads.

        One that does not see the beginning would only say which are near. Where no layer sees it, all are read.
        """
        geometry = self.cache.geometry
        reaches = geometry.sees_all(layer, self.key_stop)
        return reaches or not any(geometry.sees_all(other, self.key_stop) for other in range(geometry.num_layers))

    def _note_evidence(self, question: Span, layer: int) -> None:
        """Count the looking in the work of the layer that was just finished."""
        window = self.cache.geometry.window(layer)
        keys = sum(min(position + 1, window or position + 1) for position in question.positions())
        self._note(evidence_keys=self.work[-1][0].evidence_keys + keys)

    def _note(self, **counts: int) -> None:
        work, visible = self.work[-1]
        self.work[-1] = replace(work, **counts), visible

    def _drop_unfocused(self, layer: int, watch: FocusWatch, focused: frozenset[int]) -> torch.Tensor | None:
        """How many rows go is known only now: the host asks, as it did for the question's attention."""
        others = [span for index, span in enumerate(watch.rule.chunks) if index not in focused]
        unfocused = flags_of(others, self.cache.capacity)
        going = unfocused.to(self.positions.device)[self.positions[self._candidates]]
        dropped = self._candidates[going]
        chunks = tuple(watch.rule.chunks[index] for index in sorted(focused))
        self.stop = Stop(layer + 1, chunks, spans_of(self.positions[dropped].tolist()))
        self._watch = None
        return self._drop(dropped, self._candidates[~going]) if self.stop.dropped else None

    def _drop(self, dropped: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Make all rows but the `dropped` active, with these `candidates` (ascending); returns those that stay.

        A stable sort by a flag finds them without a count that only the device knows.
        """
        flags = torch.zeros(len(self), dtype=torch.uint8, device=dropped.device).index_fill_(0, dropped, 1)
        keep = torch.sort(flags, stable=True).indices[: len(self) - len(dropped)]
        self._candidates = torch.searchsorted(keep, candidates)
        self._activate(self.positions[keep], None)
        return keep

    def _activate(self, positions: torch.Tensor, where: Sequence[int] | None) -> None:
        """Make `positions` the active ones; everything that follows from them is worked out once, here."""
        self.positions = positions
        self._where = where
        self._finish_only(positions)
        self._first_kept = len(self) if self.cache.kept_from is None else self._row_of(self.cache.kept_from)
        if self._watch is not None:
            self._question_row = self._row_of(self._watch.rule.question.start)
        self._follow()

    def _finish_only(self, positions: torch.Tensor) -> None:
        """From now on only the rows at these positions, the last ones, go through attention and MLP."""
        self._finishing = positions
        self._queries: dict[int | None, ScatteredQueries] = {}
        self._visible_keys: dict[int | None, torch.Tensor] = {}

    def _follow(self) -> None:
        """Tell the captures which rows are theirs; a part of which too few are left is given up."""
        if not self._captured:
            return
        followed = []
        for capture, _ in self._captured:
            span = capture.part.span
            rows = slice(self._row_of(span.start), self._row_of(span.stop))
            if capture.follow([position - span.start for position in self.where[rows]]):
                followed.append((capture, rows))
        self._captured = followed
        if self._attention is not None:
            self._attention.follow(
                sorted({row for _, rows in followed for row in range(rows.start, rows.stop)}), self.where
            )

    def _row_of(self, position: int) -> int:
        """The first row at `position` or behind it."""
        return bisect_left(self.where, position)


def _weighted(evidence: torch.Tensor, a_pass: Pass, start: TopBy) -> torch.Tensor:
    """The evidence times the weights of the candidates; where they are no candidates it does not matter."""
    if not start.weights:
        return evidence
    where = [position for span in a_pass.candidates for position in span.positions()]
    result = evidence.clone()
    result[where] *= evidence.new_tensor(start.weights)
    return result
