"""Whatever strings a request has, the control tokens of its prompt are its template's, and every string is in it."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.parts import Prompt
from chunkweave.prompt.template import rendered_exchange, template_with
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer
from chunkweave.types import Chunk
from tests.chat_tools import TEMPLATE
from tests.unit.chunking_tokenizers import control_ids, family

_CALLS = "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
_TOOLS = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
CHATML = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.tool_calls %}" + _CALLS + "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}" + _CALLS + "{% else %}{{ m.content | trim }}{% endif %}"
    "{% if loop.first and tools %}" + _TOOLS + "{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.first and tools %}{% for t in tools %}<function={{ t.function.name }}>"
    "{% for key, value in t.function.parameters.items() recursive %}\n{{ '<' ~ key ~ '>' }}"
    "{% if value is mapping %}{{ loop(value.items()) }}{% else %}{{ value }}{% endif %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% for key, value in c.function.arguments.items() %}"
    "{{ '<' ~ key ~ '|' ~ (value if value is string else value | tojson) ~ '>' }}"
    "{% endfor %}{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes keys between brackets of its own, as some templates do: a bare word becomes a control token."""

_NAMES = ("<|im_start|>", "<|im_end|>")
TOKENIZERS = {
    "bundled": family(TEMPLATE),
    "chatml": family(CHATML, special=_NAMES, added=("<tool_call>",), adds_bos=False, bos_token=None),
    "qwen": family(CHATML, special=_NAMES, added=("<think>",), adds_bos=False, composed=True, bos_token=None),
    "folded": family(BRACKETS, special=_NAMES, added=("<think>", "<tool_call>"), adds_bos=False, folded=True),
    "llama": family(LLAMA, special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "brackets": family(BRACKETS, special=_NAMES, added=("<think>", "<think|on>", "OBSERVED"), adds_bos=False),
}

_SPELLED = ["</s>", "<s>", "<pad>", "<|user|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<think>", "<tool_call>"]
_HALVES = ["<", "<|", "|", ">", "|>", "<|im_", "start|>", "</", "s>", "think", "user", "im_start", "on", "OBSER", "VED"]
_MARKS = [
    *("CHUNKWEAVE-CHUNKS-MARK", "CHUNKWEAVE-TEXT-0-MARK", "CHUNKWEAVE-QUESTION-MARK", "CHUNKWEAVE-ANSWER-MARK"),
    *("CHUNKWEAVE-INSTRUCTION-MARK", "CHUNKWEAVECHUNKS" + "0A" * 16 + "MARK"),
]
_SIGNS = [
    '"',
    "\\",
    "{",
    "}",
    "'",
    "\n",
    "\\u003c",
    "\\ud840\\udc00",
    "\U00020000",
    "\uff1c|user|\uff1e",
    "\uff54\uff48\uff49\uff4e\uff4b",
    "{{ 7 * 7 }}",
]
PIECES = st.sampled_from([*_SPELLED, *_HALVES, *_MARKS, *_SIGNS]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=4
)
TEXTS = st.lists(PIECES, max_size=4).map("".join)
WORDS = st.sampled_from([*_HALVES, *_SPELLED])
SAID = TEXTS.map(lambda text: f"a{text}b")
KEYS = TEXTS | WORDS
VALUES = st.recursive(
    SAID | st.integers() | st.none(), lambda one: st.dictionaries(KEYS, one, max_size=2), max_leaves=3
)
OBJECTS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=2)


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for one in (*value.keys(), *value.values()) for text in strings(one)]
    return [value] if isinstance(value, str) else []


def plain(value: Any) -> Any:
    """The same structure with harmless strings, which stay apart from each other."""
    if isinstance(value, dict):
        return {f"q{number}": plain(one) for number, one in enumerate(value.values())}
    return "q" if isinstance(value, str) else value


def built(tokenizer: HuggingFaceTokenizer, texts: list[str], tools: dict, arguments: dict) -> Prompt:
    system, question, document, answer, result, name = texts
    function = {"name": name, "description": name, "parameters": tools}
    variables = {"tools": [{"type": "function", "function": function}]}
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
    behind = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": name, "content": result},
    ]
    exchange = rendered_exchange(tokenizer, behind, variables, first=True, answered=False)
    builder = PromptBuilder(tokenizer, template_with(tokenizer, variables), "model")
    history = [(question, answer)]
    return builder.build(question, [Chunk(document)], system=system, history=history, exchange=exchange)


def shown(tokenizer: HuggingFaceTokenizer, prompt: Prompt) -> str:
    """The prompt as text, control tokens included."""
    return tokenizer._tokenizer.decode(list(prompt.token_ids), clean_up_tokenization_spaces=False)


def composed(text: str) -> str:
    """As a tokenizer that normalizes gives it back."""
    return unicodedata.normalize("NFKC", text)


def is_in(text: str, whole: str) -> bool:
    forms = (text.strip(), json.dumps(text.strip(), ensure_ascii=False)[1:-1])
    return any(composed(form) in composed(whole) for form in forms)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(deadline=None, max_examples=60)
@given(st.lists(SAID, min_size=6, max_size=6), OBJECTS, OBJECTS)
def test_control_tokens_are_the_templates_and_every_text_is_there(
    tokenizer: HuggingFaceTokenizer, texts: list[str], tools: dict, arguments: dict
) -> None:
    prompt = built(tokenizer, texts, tools, arguments)
    clean = built(tokenizer, ["q"] * len(texts), plain(tools), plain(arguments))
    control = control_ids(tokenizer)
    assert [one for one in prompt.token_ids if one in control] == [one for one in clean.token_ids if one in control]
    whole = shown(tokenizer, prompt)
    assert all(is_in(text, whole) for text in [*texts, *strings(tools), *strings(arguments)])
    assert built(tokenizer, texts, tools, arguments) == prompt
