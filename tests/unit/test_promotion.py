"""What promotion changes in a plan, for exact methods and for those that weave."""

from hypothesis import given
from hypothesis import strategies as st

from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.adaptive_methods import PrefixGrowingMethod
from chunkweave.planning.method import make_method
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave.store.index import PartLookup, PromptLookup
from chunkweave.store.records import SegmentRecord
from chunkweave.types import Geometry

GEOMETRY = Geometry(4, 64, 4, 2, 16, 96, 4096, 512)
chunks_known = st.lists(st.tuples(st.sampled_from(["exact", "variant", "missing"]), st.booleans()), max_size=5)


def lookup_of(known: list[tuple[str, bool]]) -> tuple[PromptLookup, frozenset[str]]:
    """A stored system part, then chunks that are stored so; exact ones count only in front. And the hot ones."""
    parts = [PromptPart(PartKind.START, (1,))]
    for number in range(len(known) + 1):
        ids = (10 + number, 11)
        parts.append(PromptPart(PartKind.CHUNK if number else PartKind.SYSTEM, ids, chunk_id("m", "", ids)))
    parts.append(PromptPart(PartKind.QUESTION, (5, 6)))
    prompt = Prompt(tuple(parts))
    entries, unbroken = [], True
    for part, span, context, how in zip(
        parts, prompt.spans(), prompt.contexts(), ["", "exact", *(one for one, _ in known), ""], strict=True
    ):
        unbroken = unbroken and how in ("", "exact")
        alone = SegmentRecord.of(part.id, (), part.token_ids, exact=True, nbytes=8) if part.id else None
        behind = SegmentRecord.of(part.id, context, part.token_ids, exact=True, nbytes=8) if part.id else None
        exact = behind if how == "exact" and unbroken else None
        variants = () if how in ("", "missing") else (exact or alone,)
        entries.append(PartLookup(part, span, exact, variants))
    hot = frozenset(part.id for part, (_, is_hot) in zip(parts[2:], known, strict=False) if is_hot)
    return PromptLookup(tuple(entries)), hot


@given(chunks_known)
def test_an_exact_method_keeps_no_more_than_the_promoted_prefix(known):
    lookup, hot = lookup_of(known)
    for name in ("prefix", "full"):
        plain = make_method(name).plan(lookup, GEOMETRY)
        plan = PrefixGrowingMethod(make_method(name), Promotion(kept=hot)).plan(lookup, GEOMETRY)
        assert plan.passes == plain.passes
        assert [part.kv_source for part in plan.parts] == [part.kv_source for part in plain.parts]
        chunks = [(part, entry) for part, entry in zip(plan.parts, lookup.parts, strict=True)][2:-1]
        promoted = True
        for part, entry in chunks:
            promoted = promoted and (entry.exact is not None or part.part.id in hot)
            assert part.kept == promoted
        assert plan.parts[1].kept


@given(chunks_known, st.sampled_from(["cacheblend", "cachecraft", "query", "epic", "full-reuse"]))
def test_a_weaving_method_computes_the_next_hot_chunk_and_no_other(known, name):
    lookup, hot = lookup_of(known)
    plain = make_method(name).plan(lookup, GEOMETRY)
    plan = PrefixGrowingMethod(make_method(name), Promotion(continued=hot)).plan(lookup, GEOMETRY)
    plan.validate(GEOMETRY.num_layers)
    following = next((n for n, entry in enumerate(lookup.parts) if n > 1 and entry.part.id and not entry.exact), None)
    for number, (before, after) in enumerate(zip(plain.parts, plan.parts, strict=True)):
        promoted = number == following and after.part.id in hot
        assert after.kv_source is (KVSource.COMPUTED if promoted else before.kv_source)
        assert after.kept
