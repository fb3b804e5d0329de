"""Chat templates, cut where the parts go."""

import random
import time
import unicodedata

import pytest

from chunkweave.errors import UsageError
from chunkweave.prompt.rendering import Marks, folded
from chunkweave.prompt.template import (
    INSTRUCTION,
    PromptTemplate,
    chat_template,
    plain_template,
    rendered_exchange,
    template_for,
    template_with,
)
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from tests.chat_tools import TEMPLATE, TOOL, called, said
from tests.unit.chunking_tokenizers import bundled, chatml, family, llama, mistral, without_template


def filled(template: PromptTemplate, instruction: str, passage: str, question: str) -> str:
    return (
        template.head
        + template.instruction_text(instruction)
        + template.lead
        + template.chunk_text(passage)
        + template.question_text(question)
        + template.tail
    )


def test_without_a_system_role_the_instruction_opens_the_users_turn() -> None:
    template = chat_template(mistral(), "Be brief.")
    assert template.head == "<s>[INST] "
    assert filled(template, "Be brief.", "A passage.", "Why?") == (
        "<s>[INST] Be brief.\n\nA passage.\n\nQuestion: Why? [/INST]"
    )


def test_a_template_that_drops_the_system_message_counts_as_one_without() -> None:
    dropping = "{% for m in messages %}{% if m['role'] == 'user' %}[U]{{ m['content'] }}[/U]{% endif %}{% endfor %}"
    template = chat_template(family(dropping))
    assert (template.head, template.lead, template.tail) == ("[U]", "", "[/U]")
    assert template.instruction_text("Be brief.") == "Be brief.\n\n"


def test_a_template_that_moves_the_system_message_into_the_users_turn() -> None:
    merging = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}"
        "{% else %}[INST]{{ ns.system }}\n\n{{ m['content'] }}[/INST]{% endif %}{% endfor %}"
    )
    template = chat_template(family("{% set ns = namespace(system='') %}" + merging))
    assert (template.head, template.lead, template.tail) == ("[INST]", "\n\n", "[/INST]")


@pytest.mark.parametrize(
    "broken",
    [
        "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['role'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | lower }}{% endfor %}",
        "{{ raise_exception('no messages, please') }}",
    ],
    ids=["twice", "never", "changed", "refusing"],
)
def test_a_template_that_cannot_be_cut_is_refused(broken: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        template_for(family(broken))


def test_template_for_picks_chat_if_there_is_one() -> None:
    assert template_for(llama()) == chat_template(llama())
    assert template_for(without_template()) == plain_template()
    assert template_for(without_template(), "Be brief.").instruction == "Be brief."
    assert template_for(llama()).instruction == INSTRUCTION


def test_a_chat_template_is_needed_for_chat() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        chat_template(without_template())


def test_the_plain_template_reads_as_text() -> None:
    assert filled(plain_template(), "Answer.", "A {text} passage.", "Why {question}?") == (
        "Answer.\n\nA {text} passage.\n\nQuestion: Why {question}?\nAnswer:"
    )


@pytest.mark.parametrize("form", ["no placeholder", "{text}{text}"])
def test_a_format_holds_its_placeholder_once(form: str) -> None:
    with pytest.raises(UsageError, match="exactly once"):
        PromptTemplate(chunk_format=form)


@pytest.mark.parametrize(
    "tokenizer", [llama(), chatml(), bundled(), mistral()], ids=["llama", "chatml", "bundled", "mistral"]
)
def test_two_turns_put_together_are_what_the_template_renders(tokenizer: HuggingFaceTokenizer) -> None:
    template = chat_template(tokenizer)
    first = "A passage.\n\nQuestion: Why?"
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": first}]
    if tokenizer is mistral():  # which has no system role, and writes a space before an answer
        opening = [{"role": "user", "content": "Be brief.\n\n" + first}]
    second = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Next.\n\nQuestion: When?"}]
    rendered = tokenizer.render_chat([*opening, *second])
    space = " " if tokenizer is mistral() else ""
    assert rendered == (
        filled(template, "Be brief.", "A passage.", "Why?")
        + f"{space}So."
        + (template.turn_break or "")
        + template.chunk_text("Next.")
        + template.question_text("When?")
        + template.tail
    )


def test_a_template_that_takes_no_second_turn_says_so_by_an_empty_break() -> None:
    refusing = (
        "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    assert chat_template(family(refusing)).turn_break == ""
    dropping = "{% for m in messages %}{% if m['role'] != 'assistant' %}[U]{{ m['content'] }}{% endif %}{% endfor %}"
    assert chat_template(family(dropping)).turn_break == ""


def test_the_plain_template_ends_a_turn_with_the_models_end_of_text() -> None:
    assert plain_template().turn_break is None
    assert without_template().end_ids == tuple(without_template().encode("</s>", control_tokens=True))


def test_tools_stand_where_the_template_puts_them() -> None:
    tokenizer = family(TEMPLATE)
    template = template_with(tokenizer, {"tools": [TOOL]})
    assert "get_time" in template.head + template.lead
    assert template.tail == template_for(tokenizer).tail


@pytest.mark.parametrize(
    ("template", "variables", "why"),
    [
        (None, {"tools": [TOOL]}, "no chat template"),
        ("bundled", {"tools": [TOOL]}, "does not support tools"),
        (TEMPLATE, {"eos_token": ""}, "cannot be set"),
        (TEMPLATE, {"add_generation_prompt": False}, "cannot be set"),
        (TEMPLATE, {"messages": []}, "cannot be set"),
    ],
)
def test_what_a_template_cannot_take_is_refused(template: str | None, variables: dict, why: str) -> None:
    tokenizer = bundled() if template == "bundled" else family(template)
    with pytest.raises(UsageError, match=why):
        template_with(tokenizer, variables)


def test_what_tools_gave_stands_as_the_template_writes_it() -> None:
    behind = rendered_exchange(family(TEMPLATE), [said('He said "noon".')], {}, first=True, answered=False)
    assert 'said "noon".' in behind.text
    assert not behind.ordinary


def test_what_spells_a_control_token_in_tools_is_ordinary_keys_included() -> None:
    calling = called()
    calling["tool_calls"][0]["function"]["arguments"] = {"town": 'a</s>"b', "<|user|>": {"</s>": 1}}
    behind = rendered_exchange(family(TEMPLATE), [calling, said("c</s>")], {}, first=True, answered=False)
    ordinary = "".join(behind.text[at] for at in sorted(behind.ordinary))
    assert ordinary == "</><||></></>"
    assert '{"town": "a</s>\\"b", "<|user|>": {"</s>": 1}}' in behind.text


def test_a_template_that_leaves_out_what_a_tool_gave_is_refused() -> None:
    silent = TEMPLATE.replace("+ m.content + '</said>'", "+ '</said>'")
    with pytest.raises(UsageError, match="does not support these messages"):
        rendered_exchange(family(silent), [called(), said("noon")], {}, first=True, answered=False)


def test_marks_are_drawn_again_if_a_text_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter(["aa" * 16, "bb" * 16])
    monkeypatch.setattr("chunkweave.prompt.rendering.secrets.token_hex", lambda _: next(keys))
    marks = Marks.absent_from([{"content": ["AA" * 16]}])
    assert "BB" * 16 in marks.chunks


def test_folding_takes_linear_time_and_reads_ordinary_text_as_unicode_says():
    draw = random.Random(1)
    letters = ["a", "\u00e9", "e\u0301", " ", "\ufb01", "\uff21", "\u6f22", "\n"]
    for _ in range(300):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(400)))
        assert folded(text) == unicodedata.normalize("NFKC", text).casefold()
    begun_s = time.perf_counter()
    folded("a" + "\u0301" * 300_000 + "\u0316" * 300_000)
    assert time.perf_counter() - begun_s < 2
