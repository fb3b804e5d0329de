import pytest

from chunkweave.calibration.prompts import PromptMaker, alone_prompts
from chunkweave.calibration.questions import Example
from chunkweave.errors import UsageError
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.parts import PartKind
from chunkweave.prompt.template import PromptTemplate
from chunkweave.types import Chunk


class CharacterTokenizer:
    start_ids = (1,)
    stop_ids = frozenset()

    def encode(self, text, *, control_tokens=False, ordinary=frozenset()):
        return [ord(character) for character in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))

    def render_chat(self, messages, variables=None):
        return None


EXAMPLES = [
    Example("One?", (Chunk("aaaaaaaaaa", "a"), Chunk("bb", "b")), ()),
    Example("Two?", (Chunk("cccc", "c"), Chunk("bb", "b")), ()),
    Example("Three?", (Chunk("dddddd", "d"),), ()),
]


def maker(**changes) -> PromptMaker:
    builder = PromptBuilder(CharacterTokenizer(), PromptTemplate(chunk_format="{text}"), "model")
    return PromptMaker(EXAMPLES, builder, "model", **{"chunks": 2, "chunk_tokens": 5, **changes})


def chunk_texts(prompt):
    return ["".join(map(chr, part.token_ids)) for part in prompt.parts if part.kind is PartKind.CHUNK]


def test_every_chunk_has_exactly_the_asked_tokens():
    texts = chunk_texts(maker().prompt(EXAMPLES[0]))
    assert texts == ["aaaaa", "bbccc"]


def test_a_passage_is_the_same_chunk_in_every_question():
    first, second = (maker().prompt(example) for example in EXAMPLES[:2])
    assert first.parts[3].id == second.parts[3].id
    assert chunk_texts(second) == ["ccccd", "bbccc"]


def test_missing_passages_come_from_those_that_follow_around_the_end():
    assert chunk_texts(maker(chunks=4, chunk_tokens=0).prompt(EXAMPLES[2])) == ["dddddd", "aaaaaaaaaa", "bb", "cccc"]


def test_zero_chunk_tokens_leave_passages_as_they_are():
    prompt = maker(chunk_tokens=0).prompt(EXAMPLES[0])
    assert chunk_texts(prompt) == ["aaaaaaaaaa", "bb"]
    assert [part.kind for part in prompt.parts] == ["start", "system", "chunk", "chunk", "question"]


def test_uncut_chunks_have_the_ids_that_requests_give_them():
    builder = PromptBuilder(CharacterTokenizer(), PromptTemplate(chunk_format="{text}"), "model")
    own = PromptMaker(EXAMPLES, builder, "model", chunks=2, chunk_tokens=0).prompt(EXAMPLES[0])
    assert own == builder.build("One?", EXAMPLES[0].chunks)


def test_the_data_set_must_have_enough():
    with pytest.raises(UsageError, match="4 passages, but 5"):
        maker(chunks=5)
    with pytest.raises(UsageError, match="22 tokens of text, less than a chunk of 23"):
        maker(chunk_tokens=23).prompt(EXAMPLES[0])
    with pytest.raises(UsageError, match="chunks must be at least 1"):
        maker(chunks=0)


def test_alone_prompts_hold_one_stored_part_each_behind_start():
    prompt = maker().prompt(EXAMPLES[0])
    alone = alone_prompts(prompt)
    assert [part.parts[-1] for part in alone] == list(prompt.parts[1:4])
    assert all(part.parts[0].kind is PartKind.START and len(part.parts) == 2 for part in alone)
