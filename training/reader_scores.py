"""How well the reader answers held-out questions, with full prefill and with full KV reuse."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from reader_data import Row
from reader_model import Batch, Reader
from tokenizers import Tokenizer


@torch.no_grad()
def exact_matches(reader: Reader, rows: Sequence[Row], *, alone: bool = False) -> dict[str, float]:
    """Share of answers, by kind, that greedy decoding gives exactly, EOS included.

    One forward pass with the gold answers fed in: greedy decoding follows the gold answer just as long as each
    likeliest token is the gold one. Never take word overlap from such a pass: a model that repeats its input would
    score high.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(rows), 8):
        group = rows[start : start + 8]
        batch = Batch(group, reader.device, alone=alone)
        hidden = reader.hidden(batch)
        for which, row in enumerate(group):
            for first, stop, kind in row.answers:
                place = batch.place(row, first - 1)
                best = reader.model.lm_head(hidden[which, place : place + stop - first]).argmax(-1).tolist()
                scores[kind].append(float(best == row.ids[first:stop]))
    return _means(scores)


@torch.no_grad()
def decoded_f1(reader: Reader, rows: Sequence[Row], tokenizer: Tokenizer, *, alone: bool = False) -> dict[str, float]:
    """Word F1 by kind of greedily decoded answers, at most as long as the rows leave room for.

    All answers of a batch are decoded side by side: each guess takes its place in the ids before the next pass, and no
    gold token is ever in them.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(rows), 8):
        group = rows[start : start + 8]
        batch = Batch(group, reader.device, alone=alone)
        slots = [(w, batch.place(row, first), row, (first, stop), kind) for w, row in enumerate(group)
                 for first, stop, kind in row.answers]  # fmt: skip
        room = min(stop - first for _, _, _, (first, stop), _ in slots)
        for which, place, *_ in slots:
            batch.ids[which, place : place + room] = 2
        for step in range(room):
            hidden = reader.hidden(batch)
            for which, place, *_ in slots:
                batch.ids[which, place + step] = reader.model.lm_head(hidden[which, place + step - 1]).argmax()
        for which, place, row, (first, stop), kind in slots:
            guess = batch.ids[which, place : place + room].tolist()
            gold = row.ids[first:stop]
            scores[kind].append(_f1(*(tokenizer.decode(_until_eos(ids)) for ids in (guess, gold))))
    return _means(scores)


def _until_eos(ids: list[int]) -> list[int]:
    return ids[: ids.index(1)] if 1 in ids else ids


def _means(scores: dict[str, list[float]]) -> dict[str, float]:
    everything = [score for found in scores.values() for score in found]
    return {kind: sum(found) / len(found) for kind, found in sorted({**scores, "all": everything}.items())}


def _f1(guess: str, gold: str) -> float:
    said, right = guess.lower().split(), gold.lower().split()
    shared = sum(min(said.count(word), right.count(word)) for word in set(said))
    return 2 * shared / (len(said) + len(right)) if shared else 0.0
