"""What the scheduler knows of what workers hold."""

from chunkweave.types import ChunkId
from chunkweave.vllm.store_events import StoredMirror

A, B = ChunkId("a"), ChunkId("b")


def test_a_chunk_is_there_once_all_ranks_have_it_and_gone_once_one_has_not():
    mirror = StoredMirror(ranks=2)
    mirror.add([A])
    assert A not in mirror
    mirror.note({A: 1, B: 1})
    assert A in mirror
    assert B not in mirror
    mirror.note({A: -1})
    assert A not in mirror
    mirror.note({A: 1})
    assert A in mirror
    assert None not in mirror
