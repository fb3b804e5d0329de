"""Earlier text in prompts without marks: what is found, under which salt, at what cost, and what is not woven."""

import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.prompt.find_chunks import QUESTION_TOKENS, ChunkFinder, TokenTable
from chunkweave.prompt.parts import FOUND, NEW, PartKind, chunk_id, chunk_salt, neutral_passages
from chunkweave.prompt.runs import GRAM, LEAST, RunIndex
from chunkweave.store.records import RemovedTexts, SegmentRecord
from tests.unit.chunking_tokenizers import bundled, chatml, llama, mistral, sentencepiece, without_template

PASSAGES = [text for text in neutral_passages() if len(bundled().encode(text)) >= 48]
SALTS = ["", "a", "a\0", "a\0start:1", "b", "ab"]
"""Salts of tenants, some of which look alike."""


def index(**options):
    return RunIndex(lambda chunk: True, **options)


def finder(tokenizer=None, runs=None):
    return ChunkFinder(TokenTable.of(tokenizer or bundled()), runs or index())


def noise(count, seed=0, words=50_000):
    """Token ids without any structure."""
    rng = random.Random(seed)
    return [rng.randrange(10, 10 + words) for _ in range(count)]


def prompt_of(ids, own, *, start=(), salt=""):
    prompt = own.prompt(ids, start, fingerprint="model", salt=salt)
    if prompt.parts:
        own.add(prompt, start, fingerprint="model", salt=salt)
    return prompt


def put(runs, ids, salt=""):
    chunk = chunk_id("model", salt, ids)
    runs.add([(chunk, ids)], salt)
    return chunk


def test_ten_thousand_drawn_prompts_get_only_ids_that_are_stored_under_their_salt():
    """Runs over few words repeat each other, so that there are many places for most fingerprints."""
    rng = random.Random(7)
    for case in range(1000):
        runs = index()
        words = rng.choice((2, 20, 500))
        stored = {}
        for number in range(rng.randint(1, 6)):
            salt = rng.choice(SALTS)
            ids = noise(rng.randint(1, 160), seed=100 * case + number, words=words)
            stored[put(runs, ids, salt)] = (salt, ids)
        texts = [ids for _, ids in stored.values()]
        for _ in range(10):
            ids = []
            while len(ids) < 120:
                text = rng.choice(texts)
                first = rng.randrange(len(text))
                ids += text[first : first + rng.randint(1, 90)] if rng.random() < 0.8 else noise(rng.randint(1, 30))
            salt = rng.choice(SALTS)
            fences = sorted(rng.sample(range(1, len(ids)), k=rng.randint(0, 3)))
            matches = runs.matches(ids, salt, fences)
            begun = runs.beginning(ids, salt)
            for match in (*matches, *begun):
                own_salt, run = stored[match.run]
                span = match.span
                assert own_salt == salt
                assert ids[span.start : span.stop] == run[match.offset : match.offset + len(span)]
                assert match.whole == (len(span) == len(run))
            assert all(one.span.stop <= other.span.start for one, other in pairwise(matches))
            assert all(len(match.span) >= LEAST for match in matches)
            assert not any(match.span.start < fence < match.span.stop for match in matches for fence in fences)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.tuples(st.integers(32, 90), st.integers(0, 40)), min_size=1, max_size=5))
def test_any_run_of_another_prompt_is_found_at_any_offset(seed, cuts):
    """Between new text; a few ids at its ends may be missing where that text begins or ends as the run goes on."""
    run = noise(2_000, seed=seed)
    runs = index()
    put(runs, run)
    ids = []
    planted = []
    offset = 0
    for length, between in cuts:
        ids += noise(between, seed=seed + len(ids) + 1)
        planted.append((len(ids), length))
        ids += run[offset : offset + length]
        offset += length + 50
    found = {place for match in runs.matches(ids, "") for place in range(match.span.start, match.span.stop)}
    for first, length in planted:
        assert set(range(first, first + length)) <= found


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 120), min_size=1, max_size=6), st.integers(0, 600))
def test_a_stored_beginning_is_found_up_to_the_first_other_id(seed, lengths, common):
    """However it was cut; less than the ids since the last hash if the next part is reached by none."""
    ids = noise(sum(lengths), seed=seed)
    runs = index()
    path = []
    done = 0
    for length in lengths:
        part = ids[done : done + length]
        path.append((chunk_id("model", "", part), part))
        done += length
    runs.add(path, "")
    other = [*ids[:common], *noise(40, seed=seed + 1)]
    equal = min(common, len(ids))
    matches = runs.beginning(other, "")
    stop = matches[-1].span.stop if matches else 0
    edges = [0, *np.cumsum(lengths).tolist()]
    part_start = max(edge for edge in edges if edge <= max(0, equal - 1))
    expected = equal if equal // LEAST * LEAST > part_start else part_start
    assert stop <= equal
    assert stop >= expected or equal - stop < LEAST
    assert runs.beginning(other, "another") == []


def test_the_beginning_is_found_behind_runs_that_have_left():
    stored = {}
    runs = RunIndex(lambda chunk: chunk in stored)
    ids = noise(300)
    first, second, third = (ids[0:100], ids[100:200], ids[200:300])
    path = [(chunk_id("model", "", part), part) for part in (first, second, third)]
    runs.add(path, "")
    whole = [(chunk_id("model", "", ids), ids)]
    for present, reached in (([], 0), (path[:1], 100), (path[:2], 200), (path, 300), (path[1:], 0)):
        stored = {chunk for chunk, _ in present}
        matches = runs.beginning(ids, "")
        assert (matches[-1].span.stop if matches else 0) == reached
    runs.add(whole, "")  # the same text in one run, which is found first, and then leaves
    for present in (whole, path):
        stored = {chunk for chunk, _ in present}
        matches = runs.beginning(ids, "")
        assert not matches or matches[-1].span.stop == 300
    runs.add(path, "")


def test_what_is_dropped_for_room_is_found_no_more_and_the_rest_is():
    stored = set()
    runs = RunIndex(stored.__contains__, most_tokens=10_000)
    texts = [noise(500, seed=number) for number in range(100)]
    for number, text in enumerate(texts):
        chunk = put(runs, text)
        if number >= 90:
            stored.add(chunk)
    assert len(runs) == 15
    assert [bool(runs.matches(text, "")) for text in texts] == [False] * 90 + [True] * 10
    assert [bool(runs.beginning(text, "")) for text in texts] == [False] * 90 + [True] * 10


def test_another_model_finds_nothing_of_the_same_salt():
    """As with adapters, and after the weights were replaced."""
    own = finder()
    ids = bundled().encode(" ".join(PASSAGES[:4]))
    prompt_of(ids, own)
    other = own.prompt(ids, (), fingerprint="model+adapter", salt="")
    assert not any(part.source == FOUND for part in other.parts)
    assert any(part.source == FOUND for part in prompt_of(ids, own).parts)


def test_a_salt_that_looks_like_one_with_a_start_is_another():
    ids = tuple(noise(100))
    assert chunk_salt("x", (), (3,)) != chunk_salt("x\0start:", (3,), (3,))
    own = finder()
    own.add(own.prompt((3, *ids), (3,), fingerprint="m", salt="x\0start:"), (3,), fingerprint="m", salt="x\0start:")
    assert not any(part.source == FOUND for part in own.prompt(ids, (3,), fingerprint="m", salt="x").parts)


def test_what_is_known_of_paths_is_bounded():
    runs = index(most_tokens=100_000)
    rng = random.Random(0)
    parts = [noise(64, seed=number) for number in range(12)]
    path = [(chunk_id("model", "", part), part) for part in parts]
    for _ in range(3000):
        rng.shuffle(path)
        runs.add(path, "")
    assert len(runs._nodes) <= 100_000 // 128
    assert sum(len(run.nodes) for run in runs._runs.values()) <= 2 * 100_000 // 128
    assert runs.beginning([token for _, part in path for token in part], "")[-1].span.stop == 12 * 64
    tiny = index(most_tokens=100_000)
    for number in range(10_000):
        put(tiny, [number, number + 1])
    assert len(tiny) <= 1000


def test_runs_that_have_left_the_store_hide_no_later_ones():
    stored = set()
    runs = RunIndex(stored.__contains__)
    passage = noise(100, seed=1)
    for number in range(12):
        stored.clear()
        stored.add(put(runs, [*noise(40, seed=100 + number), *passage]))
        matches = runs.matches([*noise(40, seed=7), *passage], "")
        assert sum(len(match.span) for match in matches) == 100


def test_a_prompt_of_many_pieces_has_few_parts():
    run = noise(70_000)
    pieces = [run[at : at + 33] for at in range(0, 66_000, 33)]
    random.Random(0).shuffle(pieces)
    runs = index()
    put(runs, run)
    assert len(runs.matches([token for piece in pieces for token in piece], "")) <= 512


def test_the_same_text_in_another_prompt_is_found_and_its_ids_stay():
    own = finder()
    chat = [{"role": "system", "content": "Be kind."}]
    texts = [*PASSAGES[:3], "Who is it, and who was it before?"]

    def ids_of(order):
        content = "\n\n".join(texts[n] for n in order)
        rendered = bundled().render_chat([*chat, {"role": "user", "content": content}])
        return bundled().encode(rendered, control_tokens=True)

    first = prompt_of(ids_of((0, 1, 2, 3)), own, start=bundled().start_ids)
    assert list(first.token_ids) == ids_of((0, 1, 2, 3))
    assert {part.source for part in first.parts[1:-1]} == {NEW}
    moved = prompt_of(ids_of((2, 0, 1, 3)), own, start=bundled().start_ids)
    assert list(moved.token_ids) == ids_of((2, 0, 1, 3))
    found = [part for part in moved.parts if part.source == FOUND and not part.in_place]
    assert sum(map(len, found)) > 0.85 * len(moved.token_ids)
    assert all(part.view is not None for part in found)
    assert "who was it before?" in bundled().decode(moved.parts[-1].token_ids)


def test_an_answer_continues_its_prompt_up_to_the_first_other_id():
    """As when it is tokenized otherwise in the next turn: its end alone is computed again."""
    rng = random.Random(3)
    for case in range(50):
        own = finder(chatml())
        text = " ".join(rng.sample(PASSAGES, 3))
        ids = chatml().encode(chatml().render_chat([{"role": "user", "content": text}]), control_tokens=True)
        prompt = prompt_of(ids, own)
        answer = noise(rng.randint(20, 60), seed=case)
        own.answered(prompt, answer, (), fingerprint="model", salt="")
        same = rng.randint(0, len(answer) - 1)
        later = [*ids, *answer[:same], 5, *noise(50, seed=case + 1)]
        parts = prompt_of(later, own).parts
        begun = 0
        for part in parts:
            if part.source != FOUND:
                break
            begun += len(part)
        assert begun == len(ids) + same


def test_what_stands_at_the_end_is_the_question():
    own = finder(chatml())
    texts = []
    for question in ("Who is it?", f"{PASSAGES[2]} Who is it?"):
        chat = [{"role": "user", "content": f"{PASSAGES[0]}\n\n{PASSAGES[1]}\n\n{question}"}]
        ids = chatml().encode(chatml().render_chat(chat), control_tokens=True)
        prompt_of(ids, own)
        parts = prompt_of(ids[:-30] + ids[-20:], own).parts
        texts.append(chatml().decode(parts[-1].token_ids))
        assert len(parts[-1]) >= 1
    new = prompt_of(bundled().encode(" ".join(PASSAGES))[:500], finder()).parts
    assert [len(part) for part in new] == [500 - QUESTION_TOKENS - 1, QUESTION_TOKENS + 1]
    assert [part.kind for part in prompt_of(bundled().encode("Who?"), finder()).parts] == [PartKind.QUESTION]
    assert prompt_of([], finder()).parts == ()


@pytest.mark.parametrize("begun", ["", "It is led by"])
def test_text_before_the_last_message_is_stored_and_the_message_is_the_question(begun):
    """Documents in a system message, and a short question: also if the answer's beginning is given."""
    chat = [{"role": "system", "content": PASSAGES[0]}, {"role": "user", "content": "Who leads it?"}]
    ids = [*chatml().encode(chatml().render_chat(chat), control_tokens=True), *chatml().encode(begun)]
    *_, new, question = prompt_of(ids, finder(chatml())).parts
    assert PASSAGES[0] in chatml().decode(new.token_ids)
    assert chatml().decode(question.token_ids).startswith("Who leads it?")


@pytest.mark.parametrize("tokenizer", [chatml(), llama(), bundled(), mistral(), sentencepiece()])
@pytest.mark.parametrize("text", ["", " ", "\n\n"])
def test_a_prompt_that_ends_with_an_empty_message_keeps_its_tokens_and_has_a_question(tokenizer, text):
    turns = [("user", PASSAGES[0]), ("assistant", PASSAGES[1]), ("user", text)]
    rendered = tokenizer.render_chat([{"role": role, "content": content} for role, content in turns])
    ids = tokenizer.encode(rendered, control_tokens=True)
    own = finder(tokenizer)
    for cut in range(len(ids) - 12, len(ids) + 1):
        prompt = prompt_of(ids[:cut], own, start=tokenizer.start_ids)
        assert list(prompt.token_ids) == list(ids[:cut])
        assert prompt.parts[-1].kind is PartKind.QUESTION


@pytest.mark.parametrize("tokenizer", [chatml(), llama(), bundled(), mistral(), sentencepiece()])
def test_woven_parts_cross_no_control_token(tokenizer):
    rng = random.Random(11)
    own = finder(tokenizer)
    for _ in range(30):
        texts = [" ".join(rng.sample(PASSAGES, 2)) for _ in range(3)]
        chat = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)
        ]
        if tokenizer is not mistral():
            chat.insert(0, {"role": "system", "content": rng.choice(PASSAGES)})
        ids = tokenizer.encode(tokenizer.render_chat(chat), control_tokens=True)
        prompt = prompt_of(ids, own, start=tokenizer.start_ids)
        assert list(prompt.token_ids) == list(ids)
        woven = [part for part in prompt.parts if part.id is not None and not part.in_place and not part.novel]
        assert not any(tokenizer.control_ids & {*part.token_ids} for part in woven)
    assert woven


@pytest.mark.parametrize("tokenizer", [chatml(), llama(), sentencepiece()])
@pytest.mark.parametrize("plain", [False, True])
def test_results_of_tools_are_reused_on_the_exact_prefix_only(tokenizer, plain):
    """A template may have a role for them; without tools in a template they are text of the user."""

    def ids_of(texts):
        text = "\n\n".join(texts)
        result = {"role": "user", "content": f"<tool_response>{text}</tool_response>"}
        if not plain:
            result = {"role": "tool", "tool_call_id": "1", "content": text}
        asked = {"role": "user", "content": f"{PASSAGES[0]}\n\nWho is it?"}
        chat = [asked, {"role": "assistant", "content": "I search."}, result]
        return tokenizer.encode(tokenizer.render_chat(chat), control_tokens=True)

    own = finder(tokenizer)
    prompt_of(ids_of(PASSAGES[1:5]), own)
    parts = prompt_of(ids_of((PASSAGES[3], PASSAGES[1], PASSAGES[2])), own).parts
    found = [part for part in parts if part.source == FOUND and len(part) >= LEAST]
    assert len(found) >= 2
    assert all(part.in_place for part in found[1:])


def test_numbers_and_code_are_reused_on_the_exact_prefix_only():
    code = "\n".join(f"    if (rows[{n}] != null) {{ total += rows[{n}].value(); }}" for n in range(12))
    table = "\n".join(f"| {n} | {n * 17.5} | {n * n * 12345} |" for n in range(20))
    calls = str([{"name": "search", "arguments": {"query": "a b", "limit": n}} for n in range(8)])
    for text, exact in ((code, True), (calls, True), (table, True), (PASSAGES[0], False)):
        own = finder()
        ids = bundled().encode(text)
        prompt_of([*noise(40, seed=1), *ids, *noise(40, seed=2)], own)
        again = prompt_of([*noise(50, seed=3), *ids, *noise(50, seed=4)], own).parts
        found = [part for part in again if part.source == FOUND]
        assert found, text
        assert all(part.in_place == exact for part in found)


def test_without_a_table_or_roles_nothing_is_woven():
    ids = [3, *noise(2_000)]
    own = ChunkFinder(None, index(), control={3})
    for _ in range(2):
        prompt = prompt_of(ids, own, start=(3,))
        assert prompt.token_ids == tuple(ids)
        assert all(part.in_place for part in prompt.parts if part.id is not None)
    assert TokenTable.of(without_template()).headers == {}


def test_text_is_novel_at_its_first_sighting_under_its_salt():
    ids, own = bundled().encode("\n\n".join((*PASSAGES[:3], "Who?"))), finder()
    first, second = (prompt_of(ids, own) for _ in range(2))
    assert [part.novel for part in first.parts[:-1]] == [True]
    assert [part.novel for part in second.parts[:-1]] == [False]
    other = prompt_of(ids, own, salt="another tenant")
    assert [part.novel for part in other.parts[:-1]] == [True]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 200), st.integers(0, 60), st.integers(0, 60), st.sampled_from(SALTS))
def test_a_removed_text_is_recognized_wherever_it_stands(seed, length, before, behind, salt):
    text = tuple(noise(length, seed=seed))
    removed = RemovedTexts((text,), ("model",), (salt,))
    ids = (*noise(before, seed=seed + 1), *text, *noise(behind, seed=seed + 2))

    def record(ids, salt, source=FOUND):
        return SegmentRecord.of(chunk_id("model", salt, ids), (), ids, exact=True, nbytes=1, source=source)

    assert removed(record(ids, salt))
    assert not removed(record(ids, f"{salt}x"))
    assert not removed(record(ids, salt, "a document"))
    assert not removed(record(tuple(noise(150, seed=seed + 3)), salt))
    if length >= 62:
        assert removed(record((*noise(before, seed=1), *text[: length // 2]), salt)), "31 ids of it are enough"
    runs = index()
    put(runs, ids, salt)
    runs.forget(removed.are_in)
    assert not runs.matches(ids, salt)
    assert not runs.beginning(ids, salt)


def best_seconds(work, times=15):
    seconds = []
    for _ in range(times):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def looked_up_in(runs, ids):
    return runs.beginning(ids, ""), runs.matches(ids, "")


def million_fingerprints():
    """An index of 8.6 million ids; each has 2 of 17 grams in it, so that there are a million fingerprints."""
    runs = index()
    rng = np.random.default_rng(0)
    for _ in range(3000):
        ids = rng.integers(10, 50_000, 2_870)
        put(runs, ids.tolist())
    return runs


@pytest.mark.timed
def test_looking_up_costs_a_tenth_of_tokenizing_and_the_table_five_bytes_a_token():
    runs = million_fingerprints()
    assert runs.nbytes <= 5 * runs.tokens
    words = " ".join(PASSAGES).split()
    rng = random.Random(1)
    text = "\n\n".join(" ".join(rng.choices(words, k=rng.randrange(60, 300))) for _ in range(25))
    ids = bundled().encode(text)
    own = finder(runs=runs)
    tokenized = best_seconds(lambda: bundled().encode(text))
    looked_up = best_seconds(lambda: looked_up_in(runs, np.fromiter(ids, np.int64, len(ids))))
    assert looked_up < 0.1 * tokenized, (looked_up, tokenized, len(ids))
    numbers = iter(range(1_000_000))
    stored = best_seconds(lambda: prompt_of([next(numbers) + 10, *ids], own))
    assert stored < 0.5 * tokenized, (stored, tokenized)


@pytest.mark.timed
def test_equal_lines_and_colliding_text_cost_no_more_than_other_text():
    line = bundled().encode("The same line stands here again and again.\n")
    equal = (line * 100_000)[:100_000]
    rng = np.random.default_rng(0)
    other = rng.integers(10, 50_000, 100_000).tolist()
    pair = rng.integers(10, 12, 100_000).tolist()

    def cost(ids):
        runs = index()
        began = time.process_time()
        for number in range(3):
            put(runs, [number + 5, *ids])
            runs.beginning(ids, "")
            runs.matches(ids, "")
        return time.process_time() - began

    usual = cost(other)
    short = [token for _ in range(25_000) for token in (1, 7, 7, 7)]
    fenced = index()
    put(fenced, short)
    began = time.process_time()
    fenced.matches(short, "", [at for at in range(len(short)) if at % 4 < 2])
    assert time.process_time() - began < usual
    assert cost(equal) < 2 * usual
    assert cost(pair) < 2 * usual
    assert GRAM < LEAST


@pytest.mark.timed
def test_a_thousand_novel_prompts_do_not_slow_lookups_down():
    runs = index(most_tokens=400_000)
    own = finder(runs=runs)
    seconds = []
    for number in range(1000):
        ids = np.random.default_rng(number).integers(10, 50_000, 2_500).tolist()
        began = time.process_time()
        prompt_of(ids, own)
        seconds.append(time.process_time() - began)
    assert np.median(seconds[-200:]) < 2 * np.median(seconds[100:300])
