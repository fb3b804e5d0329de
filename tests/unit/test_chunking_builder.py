"""Prompts from instruction, chunks and question."""

import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.errors import PromptTooLongError, UsageError
from chunkweave.prompt.builder import PromptBuilder, PromptLimit
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, is_neutral, neutral_passages
from chunkweave.prompt.template import PromptTemplate, plain_template, template_for
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer, TokenCache
from chunkweave.types import Chunk
from tests.unit.chunking_tokenizers import bundled, chatml, control_ids, llama, mistral, phi, qwen, without_template

HOSTILE_FAMILIES = [bundled(), llama(), chatml(), mistral(), qwen(), phi()]
FAMILIES = [bundled(), llama(), chatml(), mistral(), without_template()]


def builder_for(tokenizer: HuggingFaceTokenizer, instruction: str | None = None) -> PromptBuilder:
    return PromptBuilder(tokenizer, template_for(tokenizer, instruction), "fingerprint")


def kinds(prompt: Prompt) -> list[str]:
    return [str(part.kind) for part in prompt.parts]


@pytest.mark.parametrize("tokenizer", FAMILIES, ids=["bundled", "llama", "chatml", "mistral", "plain"])
def test_parts_stand_in_order_and_bos_stands_once(tokenizer: HuggingFaceTokenizer) -> None:
    prompt = builder_for(tokenizer).build("Why?", [Chunk("One.", "a.md"), "Two."])
    start = ["start"] if tokenizer.start_ids else []
    assert kinds(prompt) == [*start, "system", "chunk", "chunk", "question"]
    assert prompt.token_ids[: len(tokenizer.start_ids)] == tokenizer.start_ids
    assert prompt.token_ids.count(0) == len(tokenizer.start_ids)
    assert [part.source for part in prompt.parts if part.kind is PartKind.CHUNK] == ["a.md", ""]


@pytest.mark.parametrize("tokenizer", FAMILIES, ids=["bundled", "llama", "chatml", "mistral", "plain"])
def test_decoded_parts_read_as_the_prompt(tokenizer: HuggingFaceTokenizer) -> None:
    template = template_for(tokenizer, "Be brief.")
    text = tokenizer.decode(list(PromptBuilder(tokenizer, template, "f").build("Why?", ["One."]).token_ids))
    rendered = template.head + template.instruction_text("Be brief.") + template.lead
    rendered += "One.\n\n" + template.question_text("Why?") + template.tail
    assert text == tokenizer.decode(tokenizer.encode(rendered, control_tokens=True))


@settings(deadline=None)
@given(st.lists(st.sampled_from(["alpha", "beta\n", " gamma ", "</s>", "delta. "]), min_size=1, max_size=5))
def test_a_chunk_has_the_same_ids_wherever_it_stands(texts: list[str]) -> None:
    builder = builder_for(llama())
    fresh = {text: builder_for(llama()).chunk_part(text) for text in texts}
    for order in (texts, texts[::-1]):
        parts = [part for part in builder.build("Why?", order).parts if part.kind is PartKind.CHUNK]
        assert parts == [fresh[text] for text in order]


def hostile(tokenizer: HuggingFaceTokenizer) -> st.SearchStrategy[str]:
    """Texts of a tokenizer's control tokens, whole and in pieces, among words and white space."""
    spelled = [token.content for token in tokenizer._tokenizer.added_tokens_decoder.values()]
    halves = [half for text in spelled for half in (text[: len(text) // 2], text[len(text) // 2 :]) if half]
    pieces = st.sampled_from([*spelled, *spelled, *halves, " ", "\n\n", "word", "e\u0301", "\uff1c", "<|"])
    return st.lists(pieces | st.text(max_size=3), max_size=8).map("".join)


def control_of(tokenizer: HuggingFaceTokenizer, part: PromptPart) -> list[int]:
    return [token for token in part.token_ids if token in control_ids(tokenizer)]


@pytest.mark.parametrize("tokenizer", HOSTILE_FAMILIES, ids=["bundled", "llama", "chatml", "mistral", "qwen", "phi"])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_no_text_puts_a_control_token_into_a_prompt(tokenizer: HuggingFaceTokenizer, data: st.DataObject) -> None:
    """Instruction, chunk, question and answer have those of the template, and read as they were given."""
    builder, template = builder_for(tokenizer), template_for(tokenizer)
    system, chunk, question, answer = (data.draw(hostile(tokenizer)) for _ in range(4))
    written = [template.instruction_text(f"s{system}"), template.chunk_text(f"c{chunk}")]
    written += [template.question_text(f"q{question}"), f"a{answer}"]

    def parts_of(system: str, chunk: str, question: str, answer: str) -> list[PromptPart]:
        asked = builder.question_part(question)
        known, end = builder.turn_parts(asked, builder.answer_ids(answer))
        turn = replace(known, token_ids=(*known.token_ids, *end.token_ids))
        return [*builder.opening(system=system), builder.chunk_part(chunk), asked, turn]

    attacked = parts_of(f"s{system}", f"c{chunk}", f"q{question}", f"a{answer}")
    clean = parts_of("s", "c", "q", "a")
    assert [control_of(tokenizer, part) for part in attacked] == [control_of(tokenizer, part) for part in clean]
    opening, of_chunk, asked, turn = attacked[-4:]
    reads = [normalized(tokenizer, tokenizer.decode(part.token_ids)) for part in (opening, of_chunk, asked, turn)]
    for text, read in zip(written, reads, strict=True):
        assert normalized(tokenizer, text) in read


def normalized(tokenizer: HuggingFaceTokenizer, text: str) -> str:
    return unicodedata.normalize("NFC", text) if tokenizer is qwen() else text


def test_ids_depend_on_fingerprint_salt_and_template() -> None:
    tokenizer = bundled()
    template = plain_template()
    parts = [
        PromptBuilder(tokenizer, template, "one").chunk_part("text"),
        PromptBuilder(tokenizer, template, "two").chunk_part("text"),
        PromptBuilder(tokenizer, template, "one").chunk_part("text", cache_salt="tenant"),
        PromptBuilder(tokenizer, PromptTemplate(chunk_format="- {text}\n"), "one").chunk_part("text"),
    ]
    assert len({part.id for part in parts}) == 4


def test_salt_reaches_system_and_chunks() -> None:
    builder = builder_for(bundled())
    plain, salted = (builder.build("Why?", ["One."], cache_salt=salt) for salt in ("", "tenant"))
    assert plain.token_ids == salted.token_ids
    for one, other in zip(plain.parts, salted.parts, strict=True):
        assert (one.id is None and other.id is None) or one.id != other.id


def test_system_none_is_the_templates_and_empty_is_none() -> None:
    builder = builder_for(without_template(), "Be brief.")
    assert builder.build("Why?", []) == builder.build("Why?", [], system="Be brief.")
    assert kinds(builder.build("Why?", [], system="")) == ["start", "question"]
    assert "Be brief." in without_template().decode(list(builder.build("Why?").token_ids))


def test_neutral_passages_are_chunks_with_marked_ids_as_many_as_fit() -> None:
    builder = builder_for(bundled())
    passages = neutral_passages()
    plain = [builder.chunk_part(text) for text in passages]
    room = sum(map(len, plain[:2])) + 1
    parts = builder.neutral_parts(passages, room)
    assert [part.token_ids for part in parts] == [part.token_ids for part in plain[:2]]
    assert all(part.id and is_neutral(part.id) for part in parts)
    assert not any(part.id and is_neutral(part.id) for part in plain)
    salted = builder.neutral_parts(passages, room, cache_salt="acme")
    assert not {part.id for part in parts} & {part.id for part in salted}


def test_neutral_passages_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("One\npassage.\n\n\nAnother.\n", encoding="utf-8")
    assert neutral_passages(path) == ("One passage.", "Another.")
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(UsageError, match="no text"):
        neutral_passages(path)
    with pytest.raises(UsageError, match="cannot read"):
        neutral_passages(tmp_path / "none.txt")
    assert neutral_passages(folder=tmp_path) == neutral_passages()
    (tmp_path / "neutral.txt").write_text("Beside the model.", encoding="utf-8")
    assert neutral_passages(folder=tmp_path) == ("Beside the model.",)


def test_no_question_is_a_prompt_to_precompute() -> None:
    assert kinds(builder_for(bundled()).build(None, ["One."])) == ["start", "system", "chunk"]


def test_empty_input_is_refused_by_name() -> None:
    builder = builder_for(without_template(), "Be brief.")
    with pytest.raises(UsageError, match="question is empty"):
        builder.build(" \n", ["One."])
    with pytest.raises(UsageError, match=r"chunk 1 \(b\.md\) is empty"):
        builder.build("Why?", ["One.", Chunk(" ", "b.md")])
    with pytest.raises(UsageError, match="the chunk is empty"):
        builder.chunk_part("")
    with pytest.raises(UsageError, match="the prompt is empty"):
        builder.build(None, [], system="")


def test_a_chunk_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = without_template()
    builder = builder_for(tokenizer)
    first = builder.build("Why?", ["One."])
    encoded: list[str] = []
    encode = tokenizer.encode

    def recording(text: str, *, control_tokens: bool = False) -> list[int]:
        encoded.append(text)
        return encode(text, control_tokens=control_tokens)

    monkeypatch.setattr(tokenizer, "encode", recording)
    assert builder.build("Why?", ["One."]) == first
    assert not any("One." in text for text in encoded)


def test_the_cache_forgets_the_least_recently_used() -> None:
    cache = TokenCache(max_tokens=5)
    cache.put("a", (1, 2))
    cache.put("b", (3, 4))
    assert cache.get("a") == (1, 2)
    cache.put("c", (5, 6))
    assert cache.get("b") is None
    assert cache.get("a") == (1, 2)
    cache.put("a", (7,))
    cache.put("long", tuple(range(6)))
    assert cache.get("long") is None
    assert (len(cache), cache._held_tokens) == (2, 3)


@pytest.mark.parametrize("tokenizer", FAMILIES, ids=["bundled", "llama", "chatml", "mistral", "plain"])
def test_a_turn_is_the_question_the_answers_tokens_and_the_break(tokenizer: HuggingFaceTokenizer) -> None:
    builder = builder_for(tokenizer)
    question = builder.question_part("Why?")
    assert question == builder.build("Why?").parts[-1]
    turn, end = builder.turn_parts(question, (5, 6), cache_salt="tenant")
    assert turn.kind is end.kind is PartKind.TURN
    assert turn.token_ids == (*question.token_ids, 5), "the last generated token has no KV yet"
    assert end.token_ids == (6, *builder.turn_break_ids)
    assert builder.turn_break_ids
    assert turn.id != builder.turn_parts(question, (5, 6))[0].id


def test_turns_as_the_bundled_reader_was_trained_on_them() -> None:
    """training/reader_data.py: question, a space and the answer, EOS, and the next question right behind it."""
    tokenizer = without_template()
    builder = PromptBuilder(tokenizer, plain_template(), "reader")
    parts = builder.turn_parts(builder.question_part("Why?"), tokenizer.encode(" So it is."))
    trained = [*tokenizer.encode("Question: Why?\nAnswer:"), *tokenizer.encode(" So it is."), *tokenizer.end_ids]
    assert [token for part in parts for token in part.token_ids] == trained


def longest_tokens(tokenizer: HuggingFaceTokenizer, count: int) -> str:
    """A text of `count` tokens, of the longest that the vocabulary has."""
    pieces = sorted((tokenizer.decode([token]) for token in range(4096)), key=len, reverse=True)
    longest = next(piece for piece in pieces if len(tokenizer.encode(piece * 3)) == 3)
    assert len(longest) > 8
    return longest * count


@pytest.mark.parametrize("tokenizer", FAMILIES, ids=["bundled", "llama", "chatml", "mistral", "plain"])
def test_a_prompt_that_fits_is_never_refused_however_long_its_tokens_are(tokenizer: HuggingFaceTokenizer) -> None:
    builder = builder_for(tokenizer)
    long = longest_tokens(tokenizer, 9000)
    for question, chunks in ((long, ()), ("Why?", (long,)), ("Why?", (long[: len(long) // 2], long[len(long) // 2 :]))):
        whole = builder.build(question, chunks)
        assert max(map(len, (question, *chunks))) > 65536 or len(chunks) == 2
        assert builder.build(question, chunks, limit=PromptLimit(len(whole))) == whole


@pytest.mark.parametrize("where", ["question", "system", "chunk"])
def test_what_is_far_too_long_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    tokenizer = without_template()
    builder, read, encode = builder_for(tokenizer), [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: read.append(len(text)) or encode(text, **more))
    long = "The ferry leaves at seven. " * 40_000
    texts = {"question": "Why?", "system": "Be brief.", "chunk": "One.", where: long}
    with pytest.raises(PromptTooLongError, match=r"at most 4096 fit .* send fewer or smaller"):
        builder.build(texts["question"], [texts["chunk"]], system=texts["system"], limit=PromptLimit(4096))
    assert sum(read) < 100_000


def test_of_too_many_chunks_the_last_ones_are_not_tokenized() -> None:
    builder = builder_for(without_template())
    chunks = [f"{number} " + "The ferry leaves at seven. " * 100 for number in range(50)]
    with pytest.raises(PromptTooLongError, match=r"before chunk \d+ have \d+ tokens, but at most 1000 fit"):
        builder.build("Why?", chunks, limit=PromptLimit(1000))
    assert builder._cache._held_tokens < 3000
    assert len(builder.build("Why?", [chunks[0]] * 50, limit=PromptLimit(1000))) > 2000, "its own length says more"


@settings(deadline=None)
@given(st.sampled_from(FAMILIES), st.text(max_size=60), st.text(max_size=60))
def test_a_cut_changes_few_tokens(tokenizer: HuggingFaceTokenizer, left: str, right: str) -> None:
    cut = len(tokenizer.encode(left)) + len(tokenizer.encode(right))
    assert cut - len(tokenizer.encode(left + right)) <= 16
