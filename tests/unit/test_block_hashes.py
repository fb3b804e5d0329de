"""Hashes that are apart from a position on, against a hasher that works as vLLM's does."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from chunkweave.vllm.block_hashes import keep_apart


class Request:
    """One with tokens, more of which are generated."""

    def __init__(self, tokens: int, block_tokens: int, cache_salt: str | None = None) -> None:
        self.tokens, self.block_tokens, self.cache_salt = tokens, block_tokens, cache_salt
        self.block_hashes: list[bytes] = []
        self._block_hasher = Request.hashed
        self.update_block_hashes()

    def hashed(self) -> list[bytes]:
        hashes = list(self.block_hashes)
        for block in range(len(hashes), self.tokens // self.block_tokens):
            before = hashes[-1] if hashes else (self.cache_salt or "").encode()
            hashes.append(sha256(before + str(block).encode()).digest())
        return hashes[len(self.block_hashes) :]

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        self.update_block_hashes()


@given(
    tokens=st.integers(1, 60),
    more=st.lists(st.integers(1, 12), max_size=5),
    start=st.integers(0, 80),
    block_tokens=st.integers(1, 8),
    cache_salt=st.sampled_from([None, "acme"]),
)
def test_blocks_before_the_position_are_everybodys_and_no_other_is(tokens, more, start, block_tokens, cache_salt):
    plain, apart, other, at_once = (Request(tokens, block_tokens, cache_salt) for _ in range(4))
    for request, salt in ((apart, "one"), (other, "two")):
        keep_apart(request, salt, start=start, block_tokens=block_tokens)
    for count in more:
        for request in (plain, apart, other):
            request.grow(count)
    at_once.tokens += sum(more)
    keep_apart(at_once, "one", start=start, block_tokens=block_tokens)
    shared = start // block_tokens
    assert len(apart.block_hashes) == len(plain.block_hashes)
    assert apart.block_hashes == at_once.block_hashes, "it does not matter when a block is filled"
    assert apart.block_hashes[:shared] == other.block_hashes[:shared] == plain.block_hashes[:shared]
    hashes = [set(one.block_hashes[shared:]) for one in (plain, apart, other)]
    assert len(set().union(*hashes)) == sum(map(len, hashes))


def test_a_request_whose_blocks_are_not_hashed_stays_so():
    request = Request(40, 8)
    request._block_hasher, request.block_hashes = None, []
    request.update_block_hashes = lambda: None
    keep_apart(request, "one", start=16, block_tokens=8)
    assert request.block_hashes == []
