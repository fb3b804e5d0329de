"""The attention profile of a chunk of which only some tokens were computed in the prompt at hand."""

from collections.abc import Collection, Sequence

from chunkweave.store.attention_profile import AttentionProfile
from chunkweave.types import ChunkId


def woven_profile(
    fresh: AttentionProfile, before: AttentionProfile | None, recomputed: Collection[int]
) -> AttentionProfile:
    """`fresh` knows the tokens `recomputed`; what the others attended to is carried over from `before`.

    A stored profile has the mass by chunk and the mass by token, but not by both, so a token is taken to have spread
    its mass over the chunks as the whole segment did. Only chunks that stand before it again count; mass on others is
    gone, and so is all of it without a profile `before`. Intra, sink and received mass, which are not kept by token,
    come over in the share of tokens that were not recomputed.

    >>> old = AttentionProfile((ChunkId("a"), ChunkId("b")), (2, 2), (1.0, 3.0), 2.0, 0.4, (1.0, 3.0), (1.0, 0.0))
    >>> new = AttentionProfile((ChunkId("b"),), (2,), (0.5,), 0.3, 0.1, (0.5, 0.0), (0.2, 0.0))
    >>> woven = woven_profile(new, old, {0})  # the second token had 3/4 of the mass, and 3/4 of it was on b
    >>> woven.inter, woven.outward, woven.intra
    ((2.75,), (0.5, 2.25), 1.3)
    """
    known = frozenset(recomputed)
    others = [token for token in range(fresh.tokens) if token not in known]
    if before is None or not others:
        return fresh
    there = _mass_on(before, fresh.chunks)
    outward, total = sum(before.outward), sum(before.inter)
    by_others = sum(before.outward[token] for token in others) / outward if outward else 0.0
    still_there = sum(there) / total if total else 0.0
    share = len(others) / fresh.tokens
    return AttentionProfile(
        chunks=fresh.chunks,
        lengths=fresh.lengths,
        inter=tuple(new + by_others * old for new, old in zip(fresh.inter, there, strict=True)),
        intra=fresh.intra + share * before.intra,
        sink=fresh.sink + share * before.sink,
        outward=tuple(
            new if token in known else still_there * old
            for token, (new, old) in enumerate(zip(fresh.outward, before.outward, strict=True))
        ),
        received=tuple(new + share * old for new, old in zip(fresh.received, before.received, strict=True)),
    )


def _mass_on(profile: AttentionProfile, chunks: Sequence[ChunkId]) -> list[float]:
    """For each of `chunks` the mass that the profile has on it; one that it lists twice answers in order, each once."""
    left = list(zip(profile.chunks, profile.inter, strict=True))
    found: list[float] = []
    for chunk in chunks:
        match = next((entry for entry in left if entry[0] == chunk), None)
        found.append(0.0 if match is None else match[1])
        if match is not None:
            left.remove(match)
    return found
