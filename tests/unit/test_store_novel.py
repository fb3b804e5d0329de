"""Text that was seen once does not evict what is in use: a share of the budget for it."""

from dataclasses import replace

from chunkweave.prompt.parts import PartKind, Prompt, PromptPart
from chunkweave.store.index import RequestUse, path_request_of
from chunkweave.store.level import Level
from chunkweave.store.records import SegmentRecord
from chunkweave.store.store import TieredStore
from chunkweave.store.tier_store import NOVEL_SHARE, SegmentStore
from chunkweave.tiers.host import HostTier
from chunkweave.types import ChunkId
from tests.unit.tier_fakes import payload_of

SEGMENT_BYTES, BUDGET_BYTES = 10, 1000


def record_of(name, *, novel=False, context=(), owner=""):
    token = abs(hash(name)) % 1000
    return SegmentRecord.of(
        ChunkId(name), context, (token,), exact=True, nbytes=SEGMENT_BYTES, novel=novel, owner=owner
    )


def store_of():
    return SegmentStore(HostTier(), budget_bytes=BUDGET_BYTES)


def put(store, *records):
    for record in records:
        store.insert(record, payload_of(record))


def use(store, record):
    prompt = Prompt((PromptPart(PartKind.CHUNK, record.token_ids, record.chunk_id),))
    found = store.lookup(prompt)
    hit = found.parts[0].exact is not None
    store.note_request(path_request_of(found), [record.id] if hit else [])
    return hit


def insert_prompt(store, number, *, pieces=5):
    """A prompt that is sent once."""
    context = ()
    for piece in range(pieces):
        record = record_of(f"novel-{number}-{piece}", novel=True, context=context)
        put(store, record)
        context = (*context, record.chunk_id)


def test_a_thousand_novel_prompts_evict_nothing_beyond_their_share():
    store = store_of()
    hot = [record_of(f"hot-{number}") for number in range(90)]
    put(store, *hot)
    for number in range(1000):
        insert_prompt(store, number)
        assert number % 50 or all(use(store, record) for record in hot[:80])
    store.check()
    assert all(use(store, record) for record in hot)
    novel = sum(record.nbytes for record in store.records() if record.novel)
    assert novel <= NOVEL_SHARE * BUDGET_BYTES


def test_novel_segments_may_use_free_room_and_leave_it_first():
    store = store_of()
    for number in range(15):
        insert_prompt(store, number)
    assert store.used_bytes == 750
    put(store, *(record_of(f"hot-{number}") for number in range(90)))
    assert sum(record.novel for record in store.records()) == 10
    store.check()


def test_a_used_segment_is_not_novel_any_more():
    store = store_of()
    record = record_of("piece", novel=True)
    put(store, record)
    assert use(store, record)
    for number in range(200):
        insert_prompt(store, number)
    assert not store.record(record.id).novel
    store.check()


def test_a_novel_prompt_beyond_the_share_is_stored_up_to_it():
    """Its own beginning is not evicted for its end."""
    store = store_of()
    put(store, *(record_of(f"hot-{number}") for number in range(100)))
    insert_prompt(store, 1, pieces=30)
    contexts = sorted(len(record.context) for record in store.records() if record.novel)
    assert contexts == list(range(10))


def test_a_flood_leaves_other_owners_novel_segments_as_long_as_its_own_are_there():
    store = store_of()
    store.shares = lambda owner, owners: 0.5
    put(store, *(record_of(f"quiet-{number}", novel=True, owner="quiet") for number in range(4)))
    put(store, *(record_of(f"flood-{number}", novel=True, owner="flood") for number in range(500)))
    assert sum(record.owner == "quiet" for record in store.records()) == 4


def test_novel_segments_are_written_to_slow_levels_at_their_second_sighting():
    memory, disk = HostTier(), HostTier()
    levels = [
        Level("host", SegmentStore(memory, budget_bytes=BUDGET_BYTES)),
        Level("disk", SegmentStore(disk, budget_bytes=BUDGET_BYTES), background=True),
    ]
    store = TieredStore(levels)
    once, twice, plain = record_of("once", novel=True), record_of("twice", novel=True), record_of("plain")
    put(store, once, twice, plain)
    prompt = Prompt((PromptPart(PartKind.CHUNK, twice.token_ids, twice.chunk_id),))
    store.note_request(RequestUse.of(store.lookup(prompt), [twice.id]))
    store.flush()
    assert {record.id for record in disk.records()} == {twice.id, plain.id}
    store.close()


def test_of_an_exact_part_only_the_exact_prefix_is_found():
    store = store_of()
    one, other = record_of("one"), record_of("other", context=(ChunkId("one"),))
    put(store, one, other)
    parts = [PromptPart(PartKind.CHUNK, record.token_ids, record.chunk_id, in_place=True) for record in (one, other)]
    found = store.lookup(Prompt(tuple(parts))).parts
    assert [entry.exact is not None for entry in found] == [True, True]
    found = store.lookup(Prompt((parts[1],))).parts
    assert (found[0].exact, found[0].variants) == (None, ())
    found = store.lookup(Prompt((replace(parts[1], in_place=False),))).parts
    assert found[0].variants
