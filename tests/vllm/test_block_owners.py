"""Which of vLLM's own blocks are forgotten with a salt: with vLLM's own pool."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool

from chunkweave.vllm.block_owners import BlockOwners

BLOCKS = 16


class Request:
    """One that has computed blocks with these hashes."""

    def __init__(self, name: str, salt: str | None, *hashes: str) -> None:
        self.request_id, self.cache_salt = name, salt
        self.block_hashes = [hashed(one) for one in hashes]


def hashed(name: str) -> bytes:
    return name.encode().ljust(32, b".")


class Cache:
    """vLLM's bookkeeping: two groups of layers over one pool, each block of a request in both."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=1)
        group = SimpleNamespace(block_pool=self.pool)
        self.owners = BlockOwners(SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=(group, group))))

    def compute(self, request: Request, first: int = 0, *, free: bool = True) -> None:
        """Fill blocks from the `first` one on."""
        for group in range(2):
            count = len(request.block_hashes)
            blocks = [self.pool.null_block] * first + self.pool.get_new_blocks(count - first)
            self.pool.cache_full_blocks(request, blocks, first, count, 1, group)
            if free:
                self.pool.free_blocks(reversed(blocks[first:]))

    def found(self, *names: str) -> str:
        """Those of the blocks that a request finds, in both groups."""
        return "".join(name for name in names if self.pool.get_cached_block(hashed(name), [0, 1]))


@pytest.fixture
def cache() -> Cache:
    return Cache()


def served(cache: Cache, request: Request) -> None:
    cache.owners.begin(request)
    cache.compute(request)
    cache.owners.finish(request)


@pytest.mark.parametrize(("salt", "left"), [("x", "cde"), ("y", "abe"), ("", "abcd"), (None, ""), ("z", "abcde")])
def test_blocks_of_a_salt_are_forgotten_and_those_of_others_stay(cache, salt, left):
    served(cache, Request("1", "x", "a", "b"))
    served(cache, Request("2", "y", "c", "d"))
    served(cache, Request("3", None, "e"))
    cache.owners.forget(None if salt is None else [salt])
    assert cache.found("a", "b", "c", "d", "e") == left
    assert cache.pool.get_num_free_blocks() == BLOCKS - 1


def test_blocks_of_an_unknown_salt_are_forgotten_with_each(cache):
    cache.compute(Request("1", "x", "a"))
    served(cache, Request("2", "y", "b"))
    cache.owners.forget(["z"])
    assert cache.found("a", "b") == "b"


def test_a_running_request_keeps_its_blocks_and_leaves_none_to_be_found(cache):
    running, other = Request("1", "x", "a", "b"), Request("2", "y", "c")
    for request in (running, other):
        cache.owners.begin(request)
        cache.compute(request, free=False)
    free = cache.pool.get_num_free_blocks()
    cache.owners.forget(["x"])
    assert cache.found("a", "b", "c") == "c"
    assert cache.pool.get_num_free_blocks() == free
    running.block_hashes.append(hashed("d"))
    cache.compute(running, first=2, free=False)
    assert cache.found("d") == "d"
    cache.owners.finish(running)
    cache.owners.finish(other)
    assert cache.found("a", "b", "c", "d") == "c"


def test_a_request_that_comes_later_under_the_salt_keeps_what_it_computes(cache):
    cache.owners.forget(["x"])
    served(cache, Request("1", "x", "a"))
    assert cache.found("a") == "a"


def test_hashes_that_are_remembered_are_bounded(cache):
    """The oldest are dropped, and their blocks forgotten with any salt."""
    served(cache, Request("1", "x", "a"))
    for number in range(5 * BLOCKS):
        request = Request(str(number + 2), "y", f"b{number}")
        cache.owners.begin(request)
        cache.owners.finish(request)
    cache.owners.forget(["z"])
    assert cache.found("a") == ""
