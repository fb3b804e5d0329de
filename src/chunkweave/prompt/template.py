"""Prompt templates: the fixed text around instruction, chunks and question."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.prompt.rendering import Marks, Messages, Rendered, refuse_reserved, rendered_chat
from chunkweave.prompt.tokenizer import TextTokenizer

INSTRUCTION = (
    "Answer the question from the passages below. Be short and exact. "
    "If the passages do not hold the answer, say that it is not stated."
)
"""The default instruction of both kinds of template."""


@dataclass(frozen=True, slots=True)
class OrdinaryCharacters:
    """Positions of a request's characters in a template's texts: no control token includes one of them."""

    head: frozenset[int] = frozenset()
    lead: frozenset[int] = frozenset()
    tail: frozenset[int] = frozenset()
    turn_break: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A prompt is `head` instruction `lead` chunk... question `tail`.

    In a conversation each answer follows its question's `tail`, and `turn_break` ends it (None: EOS, as for a base
    model; "": the template does not support a second turn). `head`, `lead`, `tail` and `turn_break` come from the
    model's template: control tokens in them are read as such, except at `ordinary` positions. The three formats are
    ordinary text around the user's text, never read as control tokens. `instruction` is the default. The builder drops
    a BOS at the start of `head`, since it adds BOS itself.

    Raises:
        UsageError: a format does not contain its placeholder exactly once.
    """

    instruction: str = INSTRUCTION
    head: str = ""
    instruction_format: str = "{instruction}\n\n"
    lead: str = ""
    chunk_format: str = "{text}\n\n"
    question_format: str = "Question: {question}\nAnswer:"
    tail: str = ""
    turn_break: str | None = None
    ordinary: OrdinaryCharacters = OrdinaryCharacters()

    def __post_init__(self) -> None:
        for form, placeholder in (
            (self.instruction_format, "{instruction}"),
            (self.chunk_format, "{text}"),
            (self.question_format, "{question}"),
        ):
            if form.count(placeholder) != 1:
                raise UsageError(f"the format {form!r} must contain {placeholder} exactly once")

    def instruction_text(self, instruction: str) -> str:
        """The formatted instruction; "" for an empty one."""
        return self.instruction_format.replace("{instruction}", instruction) if instruction else ""

    def chunk_text(self, text: str) -> str:
        """The formatted text of a chunk."""
        return self.chunk_format.replace("{text}", text)

    def question_text(self, question: str) -> str:
        """The formatted question."""
        return self.question_format.replace("{question}", question)


def plain_template(instruction: str | None = None) -> PromptTemplate:
    """The template of base models: instruction, passages and `Question: ...`, `Answer:` as plain text."""
    return PromptTemplate(instruction=INSTRUCTION if instruction is None else instruction)


def chat_template(
    tokenizer: TextTokenizer, instruction: str | None = None, variables: Mapping[str, Any] | None = None
) -> PromptTemplate:
    """The tokenizer's chat template, rendered once with placeholders for the parts and split at them.

    `variables` are a request's other inputs to the template, such as `tools`. The instruction is the system message. If
    the template has no system role (it refuses or omits it), the instruction starts the user's turn instead. The end of
    a turn is taken from a second rendering with two turns, in which the system message may be anywhere.

    Raises:
        UsageError: there is no chat template, or its output does not contain each placeholder exactly once and in
            order.
    """
    marks = Marks.absent_from(variables)
    content = marks.chunks + marks.question
    system = {"role": "system", "content": marks.instruction}
    user = {"role": "user", "content": content}
    instruction_format = "{instruction}"
    try:
        head, lead, tail = _cut(tokenizer, [system, user], variables, marks)
    except _NotCuttableError:
        instruction_format = "{instruction}\n\n"
        alone = {"role": "user", "content": marks.instruction + content}
        head, lead, tail = _cut(tokenizer, [alone], variables, marks)
    turn_break = _turn_break(tokenizer, variables, marks)
    return PromptTemplate(
        instruction=INSTRUCTION if instruction is None else instruction,
        head=head.text,
        instruction_format=instruction_format,
        lead=lead.text,
        question_format="Question: {question}",
        tail=tail.text,
        turn_break=turn_break.text,
        ordinary=OrdinaryCharacters(head.ordinary, lead.ordinary, tail.ordinary, turn_break.ordinary),
    )


def template_for(tokenizer: TextTokenizer, instruction: str | None = None) -> PromptTemplate:
    """The chat template if the tokenizer has one, else the plain template.

    Raises:
        UsageError: the chat template cannot be split; see `chat_template`.
    """
    if _has_chat_template(tokenizer):
        return chat_template(tokenizer, instruction)
    return plain_template(instruction)


def template_with(tokenizer: TextTokenizer, variables: Mapping[str, Any]) -> PromptTemplate:
    """The chat template with the `variables` of one request: `tools` and others that the template reads.

    Raises:
        UsageError: there is no chat template or it cannot be split, it does not support tools, or a name is reserved.
    """
    if not _has_chat_template(tokenizer):
        raise UsageError("the tokenizer has no chat template, so tools and chat_template_kwargs cannot be used")
    refuse_reserved(variables)
    template = chat_template(tokenizer, None, variables)
    tools = variables.get("tools")
    if tools and template == chat_template(tokenizer, None, {**variables, "tools": None}):
        raise UsageError("the model's chat template does not support tools")
    return template


def calls_in_template(tokenizer: TextTokenizer, begin: str) -> bool:
    """Whether the chat template describes tools and writes calls of them with `begin` before the call."""
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": {}}}
    messages: Messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "call_1"},
    ]
    variables = {"tools": [tool]}
    try:
        template_with(tokenizer, variables)
        return begin in rendered_exchange(tokenizer, messages, variables, first=True, answered=False).text
    except UsageError:
        return False


def rendered_exchange(
    tokenizer: TextTokenizer, messages: Messages, variables: Mapping[str, Any], *, first: bool, answered: bool
) -> Rendered:
    """The template's text after a question: messages of the assistant, results of tools, and so on.

    It ends where the answer begins; if the last of `messages` is the answer (`answered`), where the next question
    begins. Some templates write tools into the `first` question's message. Control tokens are read in the template's
    text, not in the messages' texts.

    Raises:
        UsageError: the template refuses these messages, or omits a tool's result.
    """
    marks = Marks.absent_from(messages, variables)
    earlier = [{"role": "user", "content": marks.chunks}, {"role": "assistant", "content": marks.answer}]
    exchange = [*([] if first else earlier), {"role": "user", "content": marks.question}, *messages]
    if answered:
        exchange.append({"role": "user", "content": marks.chunks})
    try:
        rendered = rendered_chat(tokenizer, [{"role": "system", "content": marks.instruction}, *exchange], variables)
    except UsageError:  # no system role
        rendered = rendered_chat(tokenizer, exchange, variables)
    _, found, behind = (rendered or Rendered()).partition(marks.question)
    if answered:
        behind, continued, _ = behind.partition(marks.chunks)
        found = found and continued
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if not found or not all(_holds(behind.text, text) for text in results):
        raise UsageError("the model's chat template does not support these messages of the assistant and of tools")
    return behind


def _holds(rendered: str, text: str) -> bool:
    """Whether a rendering contains a text, plain or escaped as JSON; templates may trim it."""
    text = text.strip()
    return any(form in rendered for form in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]))


class _NotCuttableError(UsageError):
    """The output does not contain a placeholder exactly once, or not in order."""


def _cut(
    tokenizer: TextTokenizer, messages: Messages, variables: Mapping[str, Any] | None, marks: Marks
) -> tuple[Rendered, Rendered, Rendered]:
    try:
        rendered = rendered_chat(tokenizer, messages, variables)
    except UsageError as error:
        raise _NotCuttableError(str(error)) from error
    if rendered is None:
        raise UsageError("the tokenizer has no chat template: use the plain template")
    for mark in (marks.instruction, marks.chunks, marks.question):
        if (count := rendered.text.count(mark)) != 1:
            raise _NotCuttableError(
                f"the chat template cannot be split: its output has a message {count} times instead of once"
            )
    head, _, rest = rendered.partition(marks.instruction)
    lead, found, tail = rest.partition(marks.chunks + marks.question)
    if not found:
        raise _NotCuttableError("the chat template cannot be split: it puts the instruction after the user's message")
    return head, lead, tail


def _turn_break(tokenizer: TextTokenizer, variables: Mapping[str, Any] | None, marks: Marks) -> Rendered:
    """The template's text between an answer and the next user's message; empty if it does not support a second turn.

    No template ends a turn with an empty text, so the meaning is unambiguous.
    """
    messages = [
        {"role": "user", "content": marks.chunks},
        {"role": "assistant", "content": marks.answer},
        {"role": "user", "content": marks.question},
    ]
    try:
        rendered = rendered_chat(tokenizer, messages, variables) or Rendered()
    except UsageError:
        return Rendered()
    if any(rendered.text.count(mark) != 1 for mark in (marks.answer, marks.question)):
        return Rendered()
    _, _, behind = rendered.partition(marks.answer)
    between, found, _ = behind.partition(marks.question)
    return between if found else Rendered()


def _has_chat_template(tokenizer: TextTokenizer) -> bool:
    try:
        return tokenizer.render_chat([{"role": "user", "content": "?"}]) is not None
    except UsageError:
        return True
