"""Parts of later prompts are cut out of stored runs: their KV, context, exactness, attention and removal."""

from random import Random

import pytest

from chunkweave.prompt.parts import FOUND, PartKind, Prompt, PromptPart, RunView, chunk_id
from chunkweave.store.level import Level
from chunkweave.store.records import AttentionProfile, RemovedTexts, SegmentRecord, segment_id
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId

BYTES_A_TOKEN = 8
SYSTEM = ChunkId("5" * 32)


class Rows:
    """A payload: one number a token."""

    def __init__(self, rows):
        self.rows = rows
        self.nbytes = BYTES_A_TOKEN * len(rows)


def cut(payload, start, stop):
    return Rows(payload.rows[start:stop])


def new_store(budget_tokens=100_000, *, slow=False, cut=cut, **options):
    levels = [Level("host", SegmentStore(HostTier(), budget_bytes=BYTES_A_TOKEN * budget_tokens))]
    if slow:
        levels.append(Level("disk", SegmentStore(HostTier(), budget_bytes=BYTES_A_TOKEN * 100_000), background=True))
    return TieredStore(levels, cut=cut, **options)


def drawn_run(rng, *, attention=False):
    """A record of a run and its payload, exact or not, in a context or as a mean over some."""
    ids = tuple(rng.choices(range(1000), k=rng.randint(64, 200)))
    run = chunk_id("model", "", ids)
    context = rng.choice([(), (SYSTEM,), (SYSTEM, ChunkId("6" * 32))])
    profile = None
    if attention:
        outward = tuple(rng.random() for _ in ids)
        masses = tuple(rng.random() for _ in context)
        profile = AttentionProfile(context, (9,) * len(context), masses, rng.random() * 50, 0.5, outward)
    record = SegmentRecord.of(
        run,
        context,
        ids,
        exact=rng.random() < 0.5,
        nbytes=BYTES_A_TOKEN * len(ids),
        source=FOUND,
        attention=profile,
        novel=True,
    )
    if not record.exact and rng.random() < 0.3:
        record = record.mean_over(
            [context, (*context, ChunkId("7" * 32))], nbytes=record.nbytes, attention=profile, read=()
        )
    return record, Rows(list(range(len(ids))))


def view_of(record, offset, tokens):
    ids = record.token_ids[offset : offset + tokens]
    return PromptPart(PartKind.CHUNK, ids, chunk_id("model", "", ids), FOUND, view=RunView(record.chunk_id, offset))


def test_a_part_is_cut_out_of_a_run_with_what_is_known_of_it():
    rng = Random(1)
    for _ in range(300):
        store = new_store()
        record, payload = drawn_run(rng, attention=rng.random() < 0.5)
        store.insert(record, payload)
        offset = rng.choice([0, rng.randint(1, 30)])
        part = view_of(record, offset, rng.randint(16, len(record) - offset))
        (found,) = store.lookup(Prompt((part,))).parts[0].variants
        assert found.token_ids == part.token_ids
        assert store.get(found.id).rows == list(range(offset, offset + len(part)))
        assert found.nbytes == BYTES_A_TOKEN * len(part)
        assert found.exact == (record.exact and not offset)
        assert not found.novel
        assert store.record(record.id).novel, "the run stays as it was"
        contexts = record.contexts or (record.context,)
        begun = {context[: len(context) - bool(offset)] for context in found.contexts or (found.context,)}
        assert begun == {*contexts}
        assert (record.chunk_id in found.sources) == bool(offset)
        if record.attention is not None:
            of_run = record.attention
            profile = found.attention
            added = [new - old for new, old in zip(profile.outward, of_run.outward[offset:], strict=False)]
            assert added == pytest.approx([added[0]] * len(part))
            assert (added[0] > 0) == bool(offset), "the run's beginning is before it, so no token weighs nothing"
            assert profile.intra_per_pair == pytest.approx(of_run.intra_per_pair)
            assert profile.sink == pytest.approx(of_run.sink * len(part) / len(record))
            assert profile.cci >= of_run.cci - 1e-9, "its run's beginning is before it"
        store.check()
        assert store.forget_chunks([record.chunk_id]) == (2 if offset else 1)
        assert (store.record(found.id) is None) == bool(offset)


def test_the_beginning_of_a_run_on_the_same_path_is_on_the_exact_prefix():
    rng = Random(2)
    store = new_store()
    ids = tuple(rng.choices(range(1000), k=120))
    run = chunk_id("model", "", ids)
    first = SegmentRecord.of(run, (), ids, exact=True, nbytes=BYTES_A_TOKEN * 120)
    store.insert(first, Rows(list(range(120))))
    for offset, exact in ((0, True), (40, False)):
        part = view_of(first, offset, 50)
        looked_up = store.lookup(Prompt((part,))).parts[0]
        assert (looked_up.exact is not None) == exact
        assert looked_up.variants
        alone = PromptPart(part.kind, part.token_ids, part.id, in_place=True, view=part.view)
        assert bool(store.lookup(Prompt((alone,))).parts[0].variants) == exact


def test_a_run_with_other_ids_is_not_cut():
    """An id does not prove its tokens."""
    store = new_store()
    record, payload = drawn_run(Random(3))
    store.insert(record, payload)
    part = PromptPart(PartKind.CHUNK, (1, 2, 3), ChunkId("8" * 32), FOUND, view=RunView(record.chunk_id, 0))
    assert store.lookup(Prompt((part,))).parts[0].variants == ()
    assert len(store) == 1


def test_a_cut_during_a_removal_stores_nothing():
    ids = tuple(range(100))
    record = SegmentRecord.of(chunk_id("model", "", ids), (), ids, exact=True, nbytes=800, source=FOUND)
    stores = []

    def cut_while_removed(payload, start, stop):
        stores[0].forget_chunks([record.chunk_id])
        return cut(payload, start, stop)

    store = new_store(cut=cut_while_removed)
    stores.append(store)
    store.insert(record, Rows(list(ids)))
    assert not store.lookup(Prompt((view_of(record, 0, 50),))).parts[0].variants
    assert len(store) == 0


def test_a_cut_is_as_old_as_its_run_and_an_old_run_is_not_cut():
    now = [0.0]
    ids = tuple(range(100))
    record = SegmentRecord.of(chunk_id("model", "", ids), (), ids, exact=True, nbytes=800, source=FOUND)
    store = new_store(ttl_s=100, clock=lambda: now[0])
    store.insert(record, Rows(list(ids)))
    now[0] = 60.0
    assert store.lookup(Prompt((view_of(record, 0, 50),))).parts[0].variants
    now[0] = 110.0
    assert not store.lookup(Prompt((view_of(record, 0, 50),))).parts[0].variants
    assert not store.lookup(Prompt((view_of(record, 0, 60),))).parts[0].variants


def test_a_run_that_cannot_be_read_is_dropped_and_counted():
    record, payload = drawn_run(Random(6))
    store = new_store(cut=lambda payload, start, stop: None)
    store.insert(record, payload)
    assert not store.lookup(Prompt((view_of(record, 0, 30),))).parts[0].variants
    assert record.id not in store
    assert store.stats.lost == 1


def test_views_stay_within_the_budget():
    rng = Random(4)
    store = new_store(budget_tokens=400)
    for _ in range(40):
        record, payload = drawn_run(rng)
        store.insert(record, payload)
        for offset in (0, 20):
            store.lookup(Prompt((view_of(record, offset, 40),)))
        assert store.used_bytes <= BYTES_A_TOKEN * 400
        store.check()


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("budget_tokens", [700, 100_000])
def test_a_removed_text_is_in_no_run_or_view_on_any_level(budget_tokens, flushed):
    """In memory, evicted to a slow level, or waiting to be written there."""
    rng = Random(5)
    store = new_store(budget_tokens, slow=True)
    text = tuple(rng.choices(range(1000), k=80))
    kept = set()
    for number in range(30):
        around = [tuple(rng.choices(range(1000), k=rng.randint(40, 90))) for _ in range(2)]
        has = number % 3 == 0
        ids = (*around[0], *(text if has else ()), *around[1])
        run = chunk_id("model", "tenant", ids)
        record = SegmentRecord.of(run, (), ids, exact=True, nbytes=BYTES_A_TOKEN * len(ids), source=FOUND)
        store.insert(record, Rows(list(ids)))
        for offset, tokens in ((0, 35), (len(around[0]), 60), (len(ids) - 35, 35)):
            part = view_of(record, offset, tokens)
            store.lookup(Prompt((part,)))
        if not has:
            kept.add(record.id)
    if flushed:
        store.flush()
    store.forget_chunks([], RemovedTexts((text,), ("model",), ("tenant",)))
    store.flush()
    grams = {text[at : at + 31] for at in range(len(text) - 30)}
    for record in (record for level in store.levels for record in level.store.records()):
        assert not grams & {record.token_ids[at : at + 31] for at in range(len(record) - 30)}
    assert kept <= {record.id for record in store.records()}
    assert segment_id(chunk_id("model", "tenant", text), ()) not in store
    store.check()
    store.close()
