"""One request's share of a flat batch: which of its tokens are active, and how rules narrow them.

The number of rows that survive a rule is known in advance; only the device knows which. So rows are chosen and gathered
on the device. The host reads their positions at most once per rule, and only if host code needs them: for parts that
are captured for the store, and for attention without our kernel.

Index spaces. A *position* is a token's place in the prompt. A *row* counts this request's active tokens, ascending by
position; `positions[row]` maps a row to its position. Rows change whenever a rule drops tokens, positions never do. So
what outlives a rule (`kept`, `stop`, evidence) is stored by position, and `_candidates` (rows) is renumbered with every
drop.
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
    """One request's KV, layer by layer: its own cache (`RequestCache`), or blocks that vLLM owns.

    Shapes and methods are documented at `RequestCache`. A layer is loaded, then read and written, before the next one
    is loaded.
    """

    @property
    def capacity(self) -> int: ...
    @property
    def geometry(self) -> Geometry: ...
    def load_layer(self, layer: int, rotate: Rotate) -> None: ...
    def cached_before_rope(self, layer: int, positions: torch.Tensor) -> torch.Tensor: ...
    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None: ...
    def clear(self, layer: int, hidden: torch.Tensor) -> None: ...
    def view(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def flags_of(spans: Sequence[Span | Scattered], tokens: int) -> torch.Tensor:
    """Bool `[tokens]` on the host: True at the positions of `spans`."""
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

    `keys` and `values` are fresh, `[tokens, kv_heads, head_dim]`; `cached` is `[2, tokens, kv_heads, head_dim]`. All
    are before RoPE, so the position has no influence. `read` `[tokens]` is the question's attention to each token in
    the pass before, where `by` needs it. Heads are this rank's; the evidence covers those of all `ranks`. Deviation:
    the paper says "absolute difference"; this is the norm over keys and values together.
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
"""A layer's work without its visible keys, and these as a tensor: only the device knows the tokens' positions."""


def counted(work: Sequence[CountedWork]) -> list[LayerWork]:
    """The work with its visible keys. Waits for the device, so call it after the prefill."""
    if not work:
        return []
    visible = torch.stack([keys for _, keys in work]).tolist()
    return [replace(layer, visible_keys=keys) for (layer, _), keys in zip(work, visible, strict=True)]


_NO_RULES = Pass(required=())


class ActiveRows:
    """The active tokens of one request during one pass. Owned and narrowed by the layer loop.

    `positions` `[rows]` ascend; `token_ids` are those of the rows at the start. `stop` is set once a rule has found the
    focused chunks; `kept` has, by layer, the positions of candidates that the layer's rule kept.
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
        pass_: Pass = _NO_RULES,
        candidates: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        answers: bool = True,
        answering: int = 1,
        decided: Mapping[int, torch.Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`token_ids` and `positions` are `[rows]`, on the model's device; all positions are below `stop`.

        `where` are the positions on the host, if known there. `pass_` has the rules, the watch, and the depth;
        `candidates` are the rows, ascending, that its rules may drop. `read` `[positions]` is the question's attention
        to each position in the pass before; `hidden` `[positions]` flags those that no query sees. Only with `answers`
        do the last `answering` rows get logits. `decided` has, by layer, the positions that a rule keeps if that was
        decided earlier. Heads of keys and queries are this rank's among all `ranks`.
        """
        device = positions.device
        unfocused = pass_.stop_unfocused
        watch = pass_.watch
        self._candidates = candidates if candidates is not None else positions.new_empty(0)
        self.depth = pass_.depth
        self.answers = answers
        self.answering = answering
        self.cache = cache
        self.token_ids = token_ids
        self.key_stop = stop
        self.stop: Stop | None = None
        self.kept: dict[int, torch.Tensor] = {}
        self.work: list[CountedWork] = []
        """Work of each finished layer."""
        self._rules = {rule.layer: rule for rule in pass_.keep_top}
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
        pass_: Pass,
        *,
        dtype: torch.dtype,
        evidence: torch.Tensor | None = None,
        recomputed: Sequence[Span] = (),
        answers: bool = True,
        decided: Mapping[int, torch.Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> Self:
        """The rows that `pass_` starts with; `prompt_ids` `[tokens]` is the whole prompt, on the model's device.

        If the pass starts by `evidence` `[tokens]` from the pass before, the rows are chosen on the device: the highest
        ranked candidates, earlier ones among equals, none that earlier passes `recomputed`. Only the last pass gives
        `answers`.
        """
        tokens = len(prompt_ids)
        device = prompt_ids.device
        required = flags_of(pass_.required, tokens)
        candidate = flags_of(pass_.candidates, tokens) & ~required
        where: list[int] | None = None
        if pass_.start is None:
            positions = torch.nonzero(required | candidate).squeeze(1)
            candidates = torch.nonzero(candidate[positions]).squeeze(1).to(device)
            where = positions.tolist()
            stop = where[-1] + 1 if where else 0
            positions = positions.to(device)
        else:
            assert evidence is not None, "a pass that starts by evidence follows one that watched"
            evidence = _weighted(evidence, pass_, pass_.start)
            candidate &= ~flags_of(recomputed, tokens)
            last = torch.nonzero(required | candidate)[-1:]
            stop = int(last) + 1 if len(last) else 0
            from_which = torch.nonzero(candidate).squeeze(1).to(device)
            # `order` indexes `from_which`, not positions. The sort is stable: among equals the earlier positions win,
            # on every device and rank.
            order = torch.sort(evidence[from_which], descending=True, stable=True).indices
            chosen = from_which[order[: pass_.start.count]].sort().values
            positions = torch.cat((torch.nonzero(required).squeeze(1).to(device), chosen)).sort().values
            candidates = torch.searchsorted(positions, chosen)
        return cls(
            cache,
            prompt_ids[positions],
            positions,
            dtype=dtype,
            stop=stop,
            where=where,
            pass_=pass_,
            candidates=candidates,
            read=evidence,
            hidden=flags_of(pass_.hidden, tokens).to(device) if pass_.hidden else None,
            answers=answers,
            decided=decided,
            ranks=ranks,
        )

    def keep(
        self, captures: Sequence[PartCapture], attention: AttentionCapture | None, *, in_slices: bool = False
    ) -> None:
        """Let `captures` take the KV of their parts' rows, and `attention` what these rows attend to.

        With `in_slices` these are some of the pass's rows; the captures receive the others in other slices.
        """
        for capture in captures:
            capture.start(in_slices=in_slices)
        self._captured = [(capture, slice(0)) for capture in captures]
        self._attention = attention
        self._follow()

    def __len__(self) -> int:
        return self.positions.shape[0]  # ten times faster than len(tensor), and called at every layer

    @property
    def where(self) -> Sequence[int]:
        """The active positions, on the host; reads them from the device if a rule has narrowed them."""
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
        """Evidence for the next pass, one number per position up to the question's last; None without a watch."""
        return None if self._question is None else self._question.attention

    def refine(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Apply this layer's rule to fresh keys and values before RoPE, `[rows, kv_heads, head_dim]`.

        Returns the rows (numbered as before the rule) that stay active, ascending; None if the layer has no rule.
        Mutates the active set.
        """
        rule = self._rules.get(layer)
        if rule is None:
            return None
        rows = self._candidates
        if layer in self._decided:
            stay = torch.isin(self.positions[rows], self._decided[layer])
            dropped = rows[~stay]
            candidates = rows[stay]
        else:
            cached = self.cache.cached_before_rope(layer, self.positions[rows])
            read = None if self._read is None else self._read[self.positions[rows]]
            evidence = measure(rule.by, keys[rows], values[rows], cached, read, ranks=self._ranks)
            # Kept rows are sorted again: positions must ascend, because attention cuts them into blocks by position
            # and a capture's rows must be contiguous.
            by_rank = rows[torch.sort(evidence, descending=True, stable=True).indices]
            dropped = by_rank[rule.count :]
            candidates = by_rank[: rule.count].sort().values
        self.kept[layer] = self.positions[candidates]  # by position: `_drop` renumbers the rows
        return self._drop(dropped, candidates)

    def end(self) -> None:
        """Mark this layer as the pass's last: only outputs of the `answering` rows are read, and only for an answer.

        So these rows or none run attention and MLP, and the pass ends with this layer's KV. Focus is no longer tracked.
        """
        self._watch = None
        if not self.answers:
            self._finish_only(self.positions[:0])
            return
        self._finish_only(self.positions[-self.answering :])

    @property
    def finishing(self) -> int:
        """Number of active tokens, counted from the end, that run attention and MLP."""
        return self._finishing.shape[0]

    @property
    def queried(self) -> int:
        """Number of active tokens, counted from the end, whose queries are read, by attention or by a watch."""
        return self.finishing or len(self)

    def record(self, entered: int) -> None:
        """Record the work of the layer just finished; `entered` rows computed q, k, v."""
        window = self.cache.geometry.window(len(self.work))
        if window not in self._visible_keys:
            seen = self._finishing + 1
            self._visible_keys[window] = (seen if window is None else seen.clamp(max=window)).sum()
        self.work.append((LayerWork(entered, len(self), self.finishing, 0), self._visible_keys[window]))

    def write(self, layer: int, keys: torch.Tensor, rotated: torch.Tensor, values: torch.Tensor) -> None:
        """Write the active rows to the request's cache, and to the captures of parts to store."""
        if self._hidden_positions is not None:
            self.cache.clear(layer, self._hidden_positions)
        self.cache.write(layer, self.positions, rotated, values)
        for capture, rows in self._captured:
            capture.take(keys[rows], values[rows])

    def own_queries(self, layer: int) -> OwnQueries:
        """Inputs of attention for the `finishing` rows; with the parts of the keys if their mass is captured."""
        keys, values = self.cache.view(layer, self.key_stop)
        wanted = self._attention is not None and self._attention.wants(layer) and self.finishing == len(self)
        parts = self._attention.key_parts if wanted and self._attention is not None else None
        return OwnQueries(self._queries_of(layer), keys, values, parts, self.cache.geometry.scores(layer))

    def _queries_of(self, layer: int) -> ScatteredQueries:
        """Attention pattern of the `finishing` rows, computed once for all layers with the same window."""
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
        """After a layer's attention: record what the rows attended to, then drop candidates in unfocused chunks.

        `queries` `[rows, heads, head_dim]` are those of all active rows, after RoPE; `measured` are the kernel's sums
        of their weights, if any. Returns the rows that stay active from the next layer on, ascending; None if none is
        dropped. Mutates the active set.
        """
        keys, _ = self.cache.view(layer, self.key_stop)
        if self._attention is not None and self._attention.wants(layer):
            self._attention.read(layer, queries, keys, measured)
            self._note(captured_scores=self._attention.scores(layer))
        if self._question is not None and layer in self._question.watch.layers and self._tells_apart(layer):
            question = self._question.watch.question
            first = self._row_of(question.start)  # no rule drops the question, so its rows are contiguous
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
        """Whether this layer's attention tells which chunks a question reads.

        A layer that does not see the whole prompt only tells which chunks are near. If no layer does, all are used.
        """
        geometry = self.cache.geometry
        reaches = geometry.sees_all(layer, self.key_stop)
        return reaches or not any(geometry.sees_all(layer, self.key_stop) for layer in range(geometry.num_layers))

    def _note_evidence(self, question: Span, layer: int) -> None:
        """Add the keys read for evidence to the work of the layer just finished."""
        window = self.cache.geometry.window(layer)
        keys = sum(min(position + 1, window or position + 1) for position in question.positions())
        self._note(evidence_keys=self.work[-1][0].evidence_keys + keys)

    def _note(self, **counts: int) -> None:
        work, visible = self.work[-1]
        self.work[-1] = replace(work, **counts), visible

    def _drop_unfocused(self, layer: int, watch: FocusWatch, focused: frozenset[int]) -> torch.Tensor | None:
        """Drop the candidates in unfocused chunks. Waits for the device: the number of rows is known only now."""
        others = [span for index, span in enumerate(watch.rule.chunks) if index not in focused]
        unfocused = flags_of(others, self.cache.capacity)
        going = unfocused.to(self.positions.device)[self.positions[self._candidates]]
        dropped = self._candidates[going]
        chunks = tuple(watch.rule.chunks[index] for index in sorted(focused))
        self.stop = Stop(layer + 1, chunks, spans_of(self.positions[dropped].tolist()))
        self._watch = None
        return self._drop(dropped, self._candidates[~going]) if self.stop.dropped else None

    def _drop(self, dropped: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Drop these rows, and set the remaining `candidates` (rows, ascending); returns the rows that stay.

        A stable sort by a flag finds them. A boolean mask would wait for the device to count its True values.
        """
        flags = torch.zeros(len(self), dtype=torch.uint8, device=dropped.device).index_fill_(0, dropped, 1)
        keep = torch.sort(flags, stable=True).indices[: len(self) - len(dropped)]
        # `keep` maps new rows to old ones and ascends, so searching it maps the candidates' old rows to new ones.
        self._candidates = torch.searchsorted(keep, candidates)
        self._activate(self.positions[keep], None)
        return keep

    def _activate(self, positions: torch.Tensor, where: Sequence[int] | None) -> None:
        """Set the active positions, and compute everything that derives from them."""
        self.positions = positions
        self._where = where
        self._finish_only(positions)
        if self._watch is not None:
            self._question_row = self._row_of(self._watch.rule.question.start)
        self._follow()

    def _finish_only(self, positions: torch.Tensor) -> None:
        """Let only the rows at these positions, the last ones, run attention and MLP from now on."""
        self._finishing = positions
        self._queries: dict[int | None, ScatteredQueries] = {}
        self._visible_keys: dict[int | None, torch.Tensor] = {}

    def _follow(self) -> None:
        """Set the rows of each capture; a part with too few rows left is dropped."""
        if not self._captured:
            return
        followed = []
        for capture, _ in self._captured:
            span = capture.part.span
            # A part's rows are contiguous, because rows ascend by position; captures take offsets within the part.
            rows = slice(self._row_of(span.start), self._row_of(span.stop))
            if capture.follow([position - span.start for position in self.where[rows]]):
                followed.append((capture, rows))
        self._captured = followed
        if self._attention is not None:
            self._attention.follow(
                sorted({row for _, rows in followed for row in range(rows.start, rows.stop)}), self.where
            )

    def _row_of(self, position: int) -> int:
        """The first row at or after `position`."""
        return bisect_left(self.where, position)


def _weighted(evidence: torch.Tensor, pass_: Pass, start: TopBy) -> torch.Tensor:
    """The evidence, multiplied by the candidates' weights; values at other positions are not used."""
    if not start.weights:
        return evidence
    where = [position for span in pass_.candidates for position in span.positions()]
    result = evidence.clone()
    result[where] *= evidence.new_tensor(start.weights)
    return result
