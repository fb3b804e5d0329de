"""`PartsInProgress` against a list of claims in the order in which they were made."""

from hypothesis import given
from hypothesis import strategies as st

from chunkweave.vllm.waiting import PartsInProgress

OWNERS = st.sampled_from("ABC")
KEYS = st.lists(st.sampled_from("wxyz"), max_size=4)
OPERATIONS = st.one_of(
    st.tuples(st.just("claim"), OWNERS, KEYS),
    st.tuples(st.just("drop"), OWNERS, KEYS),
    st.tuples(st.just("release"), OWNERS, st.just([])),
)


@given(st.lists(OPERATIONS, max_size=30))
def test_it_knows_the_owners_of_every_part_in_the_order_of_their_claims(operations: list) -> None:
    parts = PartsInProgress[str]()
    claims: list[tuple[str, str]] = []
    for name, owner, keys in operations:
        if name == "claim":
            parts.claim(owner, keys)
            for key in keys:
                if (owner, key) not in claims:
                    claims.append((owner, key))
        elif name == "drop":
            parts.drop(owner, keys)
            claims = [one for one in claims if one[0] != owner or one[1] not in keys]
        else:
            parts.release(owner)
            claims = [one for one in claims if one[0] != owner]
        parts.check()
        assert len(parts) == len({key for _, key in claims})
        for key in "wxyz":
            owners = tuple(owner for owner, claimed in claims if claimed == key)
            assert parts.owners_of(key) == owners
