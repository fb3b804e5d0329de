"""What is told of chunks that come and go: each change once, at the price of changes alone."""

from chunkweave.store.index import StoreChanges, StoreFollower
from chunkweave.types import ChunkId

A, B, C = ChunkId("a"), ChunkId("b"), ChunkId("c")


def made(*held: ChunkId) -> tuple[StoreFollower, set[ChunkId]]:
    store = set(held)
    follower = StoreFollower(store.__contains__)
    for chunk in held:
        follower.touched(chunk)
    return follower, store


def test_what_is_there_comes_first_and_only_once():
    follower, _ = made(A, B)
    assert follower.take() == StoreChanges(frozenset({A, B}))
    follower.touched(A)  # another variant of it
    assert follower.take() == StoreChanges()


def test_what_went_is_told_if_its_coming_was():
    follower, store = made(A)
    follower.take()
    for chunk in (A, B):
        follower.touched(chunk)
    store.clear()  # B came and went in between
    assert follower.take() == StoreChanges(removed=frozenset({A}))
    assert follower.take() == StoreChanges()


def test_as_many_at_a_time_as_asked_for():
    follower, _ = made(A, B, C)
    assert follower.take(2) == StoreChanges(frozenset({A, B}), more=True)
    assert follower.take(2) == StoreChanges(frozenset({C}))
