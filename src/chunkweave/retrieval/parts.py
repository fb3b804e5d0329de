"""The parts that a corpus consists of: how documents leave them, and how small ones are joined."""

from collections.abc import Iterator, Sequence

import numpy as np

from chunkweave.retrieval.corpus_files import Part, StoredDocument

_COMMIT_CHUNKS = 512
"""Chunks embedded between two commits: what an interruption loses at most."""

_MOST_PART_CHUNKS = 4096
"""Parts are joined up to this size: removing a document writes its part again."""


def next_batch(documents: Iterator[StoredDocument]) -> list[StoredDocument]:
    """The next documents, of enough chunks together for one commit; none at the end."""
    batch: list[StoredDocument] = []
    chunks = 0
    for document in documents:
        batch.append(document)
        chunks += len(document.chunks)
        if chunks >= _COMMIT_CHUNKS:
            break
    return batch


def without(parts: Sequence[Part], leaving: frozenset[str]) -> list[Part]:
    """The parts without some documents; those that have none of them are the same objects."""
    kept = []
    for part in parts:
        if not any(document.id in leaving for document in part.documents):
            kept.append(part)
            continue
        documents = tuple(document for document in part.documents if document.id not in leaving)
        stays = [document.id not in leaving for document in part.documents for _ in document.chunks]
        if documents:
            kept.append(Part(documents, part.vectors[np.array(stays)]))
    return kept


def appended(parts: Sequence[Part], new: Part) -> list[Part]:
    """Parts with one more, joined with those before it as long as they are no larger and the whole stays small.

    So there are few small parts, and a part is written again only when its size doubles.
    """
    kept = list(parts)
    while kept and len(kept[-1]) <= len(new) and len(kept[-1]) + len(new) <= _MOST_PART_CHUNKS:
        last = kept.pop()
        new = Part((*last.documents, *new.documents), np.concatenate([last.vectors, new.vectors]))
    return [*kept, new]
