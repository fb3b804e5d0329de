"""A forward that can be differentiated, under the attention that reuse gives: how a woven prompt is read.

All parts of a prompt and several questions about it are one flat batch. A chunk's tokens see what it was computed
behind and themselves, at the positions that they were computed at; questions see the opening and all chunks at the
positions that assembly gives them, and none of the other questions. This is what `full-reuse` computes over chunks that
were stored in the same way, in one pass.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import torch
from torch.utils.checkpoint import checkpoint

from chunkweave.models.attention import attend_masked, seen_keys
from chunkweave.models.base import LayerwiseModel
from chunkweave.prompt.parts import PartKind, PromptPart


class Reading(StrEnum):
    """What the tokens of a chunk see before it."""

    FULL = "full"
    """Everything, as in full prefill."""
    ALONE = "alone"
    """Nothing but the model's BOS."""
    INSTRUCTION = "instruction"
    """The instruction."""
    NEUTRAL = "neutral"
    """The instruction and neutral passages, as `Engine.precompute` has it."""


@dataclass(frozen=True, slots=True)
class Passages:
    """What questions are asked about: the opening of a prompt (START, SYSTEM), neutral passages, chunks in order.

    Neutral passages are no part of the prompt: chunks were computed behind them.
    """

    opening: tuple[PromptPart, ...]
    neutral: tuple[PromptPart, ...]
    chunks: tuple[PromptPart, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens in front of a question."""
        return sum(map(len, (*self.opening, *self.chunks)))

    def seen_tokens(self, reading: Reading) -> int:
        """How many tokens a chunk was computed behind, of opening and neutral passages; for `FULL` the opening's."""
        opening = sum(map(len, self.opening))
        if reading is Reading.ALONE:
            return sum(len(part) for part in self.opening if part.kind is PartKind.START)
        return opening + (sum(map(len, self.neutral)) if reading is Reading.NEUTRAL else 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where the rows of a flat batch are, and at which positions: head, chunks, questions."""

    token_ids: torch.Tensor
    computed_at: torch.Tensor
    """Position of each row where it is computed, `[rows]`."""
    placed_at: torch.Tensor
    """Position of each row as questions see it."""
    head: int
    opening: int
    chunks: tuple[slice, ...]
    seen: int
    owners: torch.Tensor
    """Which question each of the last rows belongs to."""

    @property
    def behind(self) -> int:
        """The first row of the questions."""
        return self.chunks[-1].stop if self.chunks else self.head

    def together(self, rows: int) -> Iterator[tuple[int, int]]:
        """Where some whole questions of `rows` rows or more (the last: of what is left) begin and end, by owner."""
        first = 0
        for stop in accumulate(torch.bincount(self.owners).tolist()):
            if stop - first >= rows or stop == len(self.owners):
                yield first, stop
                first = stop


_ROWS_TOGETHER = 128
"""Rows of questions, about, that look at their keys together: more see more of each other's, masked, for nothing."""

_Asking = tuple[slice, tuple[slice, ...], torch.Tensor]
"""Rows that ask, the rows that they look at, and the mask between the two."""


class PassageReader:
    """Reads passages and questions through a model's layers; everything it computes can be differentiated."""

    def __init__(self, model: LayerwiseModel, device: torch.device, *, recompute: bool = False) -> None:
        """`recompute` keeps what goes into each layer only, and computes the rest again for gradients."""
        self._model = model
        self._device = device
        self._recompute = recompute

    def logits(
        self, passages: Passages, questions: Sequence[Sequence[int]], reading: Reading, *, last: Sequence[int]
    ) -> list[torch.Tensor]:
        """Logits of the `last` tokens of each of the `questions`, `[tokens, vocab]` each.

        A question is its token ids, and those of an answer behind them, `[at least 1]`.
        """
        layout = self._layout(passages, questions, reading)
        hidden, _ = self._through_layers(layout, reading, keep=False)
        stops = accumulate(map(len, questions))
        rows = [torch.arange(stop - count, stop, device=self._device) for stop, count in zip(stops, last, strict=True)]
        return list(torch.split(self._model.logits(hidden[torch.cat(rows)]), list(last)))

    @torch.no_grad()
    def answer(
        self, passages: Passages, questions: Sequence[Sequence[int]], *, stop_ids: Collection[int], max_new_tokens: int
    ) -> list[tuple[list[int], torch.Tensor]]:
        """Full prefill's greedy answer to each question, a stop token last if one came, and what was expected at each.

        That is log-probabilities, `[answer tokens, vocab]` in float32.
        """
        layout = self._layout(passages, questions, Reading.FULL)
        hidden, cache = self._through_layers(layout, Reading.FULL, keep=True)
        stops = list(accumulate(map(len, questions)))
        logits = self._model.logits(hidden[torch.tensor(stops, device=self._device) - 1])
        answers: list[list[int]] = [[] for _ in questions]
        expected: list[list[torch.Tensor]] = [[] for _ in questions]
        prompt = torch.full((layout.behind,), -1, device=self._device)
        state = _Decoding(cache, torch.cat((prompt, layout.owners)), layout.placed_at)
        active = list(range(len(questions)))
        for step in range(max_new_tokens):
            log_probs = torch.log_softmax(logits, -1)
            chosen = log_probs.argmax(-1).tolist()
            for row, question in enumerate(active):
                answers[question].append(chosen[row])
                expected[question].append(log_probs[row])
            going = [question for question in active if answers[question][-1] not in stop_ids]
            if not going or step + 1 == max_new_tokens:
                break
            active = going
            positions = [passages.prompt_tokens + len(questions[i]) + len(answers[i]) - 1 for i in active]
            logits = self._next(state, active, [answers[i][-1] for i in active], positions)
        return [(tokens, torch.stack(rows)) for tokens, rows in zip(answers, expected, strict=True)]

    def _layout(self, passages: Passages, questions: Sequence[Sequence[int]], reading: Reading) -> _Layout:
        head = [*passages.opening, *(passages.neutral if reading is Reading.NEUTRAL else ())]
        opening, seen = sum(map(len, passages.opening)), passages.seen_tokens(reading)
        ids = [token for part in (*head, *passages.chunks) for token in part.token_ids]
        head_tokens = sum(map(len, head))
        computed, placed = list(range(head_tokens)), list(range(head_tokens))
        chunks, row, place = [], head_tokens, opening
        for part in passages.chunks:
            own = range(place, place + len(part))
            placed += own
            computed += own if reading is Reading.FULL else range(seen, seen + len(part))
            chunks.append(slice(row, row + len(part)))
            row, place = row + len(part), own.stop
        for question in questions:
            own = range(place, place + len(question))
            placed += own
            computed += own
            ids += question
        lengths = torch.tensor([len(question) for question in questions])
        owners = torch.repeat_interleave(torch.arange(len(questions)), lengths)
        return _Layout(
            torch.tensor(ids, device=self._device),
            torch.tensor(computed, device=self._device),
            torch.tensor(placed, device=self._device),
            head_tokens,
            opening,
            tuple(chunks),
            seen,
            owners.to(self._device),
        )

    def _through_layers(
        self, layout: _Layout, reading: Reading, *, keep: bool
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Hidden states of the questions behind the last layer, and, to `keep`, the KV of all rows as they see it."""
        model, hidden = self._model, self._model.embed(layout.token_ids)
        masks = {
            window: self._masks(layout, reading, window, hidden.dtype)
            for window in {model.geometry.window(layer) for layer in range(model.geometry.num_layers)}
        }
        cache = []
        shifted = not torch.equal(layout.computed_at, layout.placed_at)
        for layer in range(model.geometry.num_layers):
            asking = masks[model.geometry.window(layer)]
            if self._recompute and torch.is_grad_enabled():
                hidden, placed, v = checkpoint(
                    self._one_layer, layer, hidden, layout, asking, shifted, use_reentrant=False
                )
            else:
                hidden, placed, v = self._one_layer(layer, hidden, layout, asking, shifted)
            if keep:
                cache.append((placed, v))
        return hidden[layout.behind :], cache

    def _one_layer(
        self, layer: int, hidden: torch.Tensor, layout: _Layout, asking: Sequence[_Asking], shifted: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states behind one layer, and keys and values as questions see them."""
        model = self._model
        q, k, v = model.qkv(layer, hidden)
        queries = model.rotate_queries(layer, q, layout.computed_at)
        keys = model.rotate_keys(layer, k, layout.computed_at)
        placed = model.rotate_keys(layer, k, layout.placed_at) if shifted else keys
        scores = model.geometry.scores(layer)
        attended = []
        for own, seen, mask in asking:
            seen_as = placed if own.start >= layout.behind else keys
            attended.append(attend_masked(queries[own], _rows(seen_as, seen), _rows(v, seen), mask, scores))
        return model.finish(layer, hidden, torch.cat(attended)), placed, v

    def _masks(self, layout: _Layout, reading: Reading, window: int | None, dtype: torch.dtype) -> list[_Asking]:
        """Which rows ask, which rows they look at, and the mask between them: head, chunks, and some questions each."""
        opening, head, behind = slice(0, layout.opening), slice(0, layout.head), layout.behind
        asking: list[tuple[slice, tuple[slice, ...]]] = [(head, (head,))] if layout.head else []
        if reading is Reading.FULL:
            together = slice(layout.head, behind)
            asking += [(together, (opening, together))] if layout.chunks else []
        else:
            asking += [(chunk, (slice(0, layout.seen), chunk)) for chunk in layout.chunks]
        found = []
        for own, seen in asking:
            at = _rows(layout.computed_at, seen)
            found.append((own, seen, _additive(seen_keys(at, layout.computed_at[own][:, None], window), dtype)))
        everything = (opening, slice(layout.head, behind))
        for first, stop in layout.together(_ROWS_TOGETHER):
            own, seen = slice(behind + first, behind + stop), (*everything, slice(behind + first, behind + stop))
            visible = seen_keys(_rows(layout.placed_at, seen), layout.placed_at[own][:, None], window)
            owners = layout.owners[first:stop]
            visible[:, first - stop :] &= owners[:, None] == owners
            found.append((own, seen, _additive(visible, dtype)))
        return found

    def _next(
        self, state: "_Decoding", active: Sequence[int], token_ids: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """Logits behind one more token of each of the `active` questions, `[questions, vocab]`; extends the state."""
        model, device = self._model, self._device
        owner, at = torch.tensor(active, device=device), torch.tensor(positions, device=device)
        state.owners, state.positions = torch.cat((state.owners, owner)), torch.cat((state.positions, at))
        hidden = model.embed(torch.tensor(token_ids, device=device))
        mine = (state.owners == -1) | (state.owners == owner[:, None])
        masks = {
            window: _additive(mine & seen_keys(state.positions, at[:, None], window), hidden.dtype)
            for window in {model.geometry.window(layer) for layer in range(model.geometry.num_layers)}
        }
        for layer, (keys, values) in enumerate(state.cache):
            q, k, v = model.qkv(layer, hidden)
            keys, values = torch.cat((keys, model.rotate_keys(layer, k, at))), torch.cat((values, v))
            state.cache[layer] = keys, values
            queries, mask = model.rotate_queries(layer, q, at), masks[model.geometry.window(layer)]
            hidden = model.finish(
                layer, hidden, attend_masked(queries, keys, values, mask, model.geometry.scores(layer))
            )
        return model.logits(hidden)


@dataclass(slots=True, eq=False)
class _Decoding:
    """The KV of what was read, and whose each row is: -1 for what all see."""

    cache: list[tuple[torch.Tensor, torch.Tensor]]
    owners: torch.Tensor
    positions: torch.Tensor


def _rows(states: torch.Tensor, where: Sequence[slice]) -> torch.Tensor:
    return torch.cat([states[part] for part in where])


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)
