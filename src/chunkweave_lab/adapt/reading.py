"""A differentiable forward pass with the attention pattern of reuse.

All parts of a prompt and several questions about it are one flat batch. A chunk's tokens attend to the chunk and its
stored context, at the positions at which they were computed. Questions attend to the opening and all chunks, at their
positions in the prompt, but not to other questions. In one pass this computes the same as `full-reuse` over chunks that
were stored in the same way.
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
    """The context that the tokens of a chunk attend to."""

    FULL = "full"
    """All earlier text, as in full prefill."""
    ALONE = "alone"
    """Only the model's BOS."""
    INSTRUCTION = "instruction"
    """The instruction."""
    NEUTRAL = "neutral"
    """The instruction and neutral passages, as in `Engine.precompute`."""


@dataclass(frozen=True, slots=True)
class Passages:
    """The input of questions: a prompt's opening (START, SYSTEM), neutral passages, and chunks in order.

    Neutral passages are not part of the prompt: they are only the context in which chunks are computed.
    """

    opening: tuple[PromptPart, ...]
    neutral: tuple[PromptPart, ...]
    chunks: tuple[PromptPart, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before a question."""
        return sum(map(len, (*self.opening, *self.chunks)))

    def seen_tokens(self, reading: Reading) -> int:
        """Tokens of opening and neutral passages in a chunk's context; for `FULL` those of the opening."""
        opening = sum(map(len, self.opening))
        if reading is Reading.ALONE:
            return sum(len(part) for part in self.opening if part.kind is PartKind.START)
        return opening + (sum(map(len, self.neutral)) if reading is Reading.NEUTRAL else 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Rows and positions of a flat batch: head, chunks, questions."""

    token_ids: torch.Tensor
    computed_at: torch.Tensor
    """Position at which each row is computed, `[rows]`."""
    placed_at: torch.Tensor
    """Position of each row for questions, `[rows]`."""
    head: int
    opening: int
    chunks: tuple[slice, ...]
    seen: int
    owners: torch.Tensor
    """The question of each question row."""

    @property
    def behind(self) -> int:
        """Index of the first question row."""
        return self.chunks[-1].stop if self.chunks else self.head

    def together(self, rows: int) -> Iterator[tuple[int, int]]:
        """Groups of whole questions with at least `rows` rows (except the last): (begin, end) by owner."""
        first = 0
        for stop in accumulate(torch.bincount(self.owners).tolist()):
            if stop - first >= rows or stop == len(self.owners):
                yield first, stop
                first = stop


_ROWS_TOGETHER = 128
"""Approximate question rows per attention call. Larger groups waste more work on masked keys of other questions."""

_Asking = tuple[slice, tuple[slice, ...], torch.Tensor]
"""Query rows, the key rows that they attend to, and the mask between the two."""


class PassageReader:
    """Runs passages and questions through a model's layers; differentiable."""

    def __init__(self, model: LayerwiseModel, device: torch.device, *, recompute: bool = False) -> None:
        """`recompute` keeps only each layer's inputs, and recomputes the rest for gradients."""
        self._model = model
        self._device = device
        self._recompute = recompute

    def logits(
        self, passages: Passages, questions: Sequence[Sequence[int]], reading: Reading, *, last: Sequence[int]
    ) -> list[torch.Tensor]:
        """Logits of the `last` tokens of each of the `questions`, `[tokens, vocab]` each.

        A question is its token ids, followed by those of an answer; at least one token.
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
        """Full prefill's greedy answer to each question, with the log-probabilities at each token.

        A stop token, if any, is last. Log-probabilities are `[answer tokens, vocab]` in float32.
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
        """Hidden states of the questions after the last layer and, with `keep`, the KV of all rows for questions."""
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
        """Hidden states after one layer, and the keys and values that questions attend to."""
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
        """Query rows, key rows and masks for the head, the chunks, and each group of questions."""
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
        """Logits after one more token of each of the `active` questions, `[questions, vocab]`; extends the state."""
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
    """The KV of all rows, and each row's question: -1 for rows that all questions see."""

    cache: list[tuple[torch.Tensor, torch.Tensor]]
    owners: torch.Tensor
    positions: torch.Tensor


def _rows(states: torch.Tensor, where: Sequence[slice]) -> torch.Tensor:
    return torch.cat([states[part] for part in where])


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)
