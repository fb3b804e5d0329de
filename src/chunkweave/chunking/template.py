"""Where the parts of a prompt stand: the fixed text around instruction, chunks and question."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkweave.chunking.tokenizer import TextTokenizer
from chunkweave.errors import UsageError

INSTRUCTION = (
    "Answer the question from the passages below. Be short and exact. "
    "If the passages do not hold the answer, say that it is not stated."
)
"""The instruction of both kinds of template, unless another is given."""

_INSTRUCTION_MARK = "CHUNKWEAVE-INSTRUCTION-MARK"
_CHUNKS_MARK = "CHUNKWEAVE-CHUNKS-MARK"
_QUESTION_MARK = "CHUNKWEAVE-QUESTION-MARK"
_ANSWER_MARK = "CHUNKWEAVE-ANSWER-MARK"
_TEXT_MARK = "CHUNKWEAVE-TEXT-{}-MARK"

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""What says how a template is rendered, or what its prompt is made of: no variable of a request."""

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat as templates read them."""

TextPieces = tuple[tuple[str, bool], ...]
"""Pieces of a text, each with whether control tokens in it count as such."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A prompt is `head` instruction `lead` chunk... question `tail`.

    In a conversation each answer follows its question's `tail`, and `turn_break` ends it (None: EOS, as for a base
    model; "": the template takes no second turn). `head`, `lead`, `tail` and `turn_break` come from the model's
    template: control tokens in them count as such. The three formats are ordinary text around what a user gives, never
    read as control tokens. `instruction` is the default. The builder drops a BOS at the start of `head`, since it
    places BOS.

    Raises:
        UsageError: a format does not hold its placeholder exactly once.
    """

    instruction: str = INSTRUCTION
    head: str = ""
    instruction_format: str = "{instruction}\n\n"
    lead: str = ""
    chunk_format: str = "{text}\n\n"
    question_format: str = "Question: {question}\nAnswer:"
    tail: str = ""
    turn_break: str | None = None

    def __post_init__(self) -> None:
        for form, placeholder in (
            (self.instruction_format, "{instruction}"),
            (self.chunk_format, "{text}"),
            (self.question_format, "{question}"),
        ):
            if form.count(placeholder) != 1:
                raise UsageError(f"the format {form!r} must hold {placeholder} exactly once")

    def instruction_text(self, instruction: str) -> str:
        """The instruction as it is tokenized; nothing for an empty one."""
        return self.instruction_format.replace("{instruction}", instruction) if instruction else ""

    def chunk_text(self, text: str) -> str:
        """A chunk's text as it is tokenized."""
        return self.chunk_format.replace("{text}", text)

    def question_text(self, question: str) -> str:
        """The question as it is tokenized."""
        return self.question_format.replace("{question}", question)


def plain_template(instruction: str | None = None) -> PromptTemplate:
    """The template of base models: instruction, passages and `Question: ...`, `Answer:` as plain text."""
    return PromptTemplate(instruction=INSTRUCTION if instruction is None else instruction)


def chat_template(
    tokenizer: TextTokenizer, instruction: str | None = None, variables: Mapping[str, Any] | None = None
) -> PromptTemplate:
    """The tokenizer's chat template, rendered once with marks where the parts go, and cut there.

    `variables` are what a request says to the template beside messages, such as `tools`.

    The instruction is the system message. If the template has no system role (it refuses one, or leaves it
    out), the instruction opens the user's turn instead. What ends a turn is cut out of a second rendering, of two
    turns, in which templates may put a system message where they like.

    Raises:
        UsageError: there is no chat template, or a mark does not come back exactly once and in order.
    """
    content = _CHUNKS_MARK + _QUESTION_MARK
    system = {"role": "system", "content": _INSTRUCTION_MARK}
    user = {"role": "user", "content": content}
    instruction_format = "{instruction}"
    try:
        head, lead, tail = _cut(tokenizer, [system, user], variables)
    except _NotCuttableError:
        instruction_format = "{instruction}\n\n"
        head, lead, tail = _cut(tokenizer, [{"role": "user", "content": _INSTRUCTION_MARK + content}], variables)
    return PromptTemplate(
        instruction=INSTRUCTION if instruction is None else instruction,
        head=head,
        instruction_format=instruction_format,
        lead=lead,
        question_format="Question: {question}",
        tail=tail,
        turn_break=_turn_break(tokenizer, variables),
    )


def template_for(tokenizer: TextTokenizer, instruction: str | None = None) -> PromptTemplate:
    """The chat template if the tokenizer has one, else the plain template.

    Raises:
        UsageError: there is a chat template that cannot be cut; see `chat_template`.
    """
    if _has_chat_template(tokenizer):
        return chat_template(tokenizer, instruction)
    return plain_template(instruction)


def template_with(tokenizer: TextTokenizer, variables: Mapping[str, Any]) -> PromptTemplate:
    """The chat template as `variables` of one request make it: `tools`, or what a template reads beside them.

    Raises:
        UsageError: there is no chat template or it cannot be cut, it has no place for tools, a text in them spells a
            control token, or a name is no variable's.
    """
    if not _has_chat_template(tokenizer):
        raise UsageError("the tokenizer has no chat template: it reads neither tools nor chat_template_kwargs")
    if reserved := sorted(_RESERVED & variables.keys()):
        raise UsageError(f"chat_template_kwargs: {', '.join(reserved)} cannot be set")
    if any(_spells_control(tokenizer, text) for text in _texts(variables)):
        raise UsageError("tools and chat_template_kwargs may not spell control tokens")
    template = chat_template(tokenizer, None, variables)
    tools = variables.get("tools")
    if tools and template == chat_template(tokenizer, None, {**variables, "tools": None}):
        raise UsageError("the model's chat template has no place for tools")
    return template


def exchange_pieces(
    tokenizer: TextTokenizer, messages: Messages, variables: Mapping[str, Any], *, first: bool, answered: bool
) -> TextPieces:
    """What the template writes behind a question: what the assistant said, what tools gave, and so on.

    Up to where the answer begins, or if it is `answered`, by the last of `messages`, to where the next question does.
    Some templates write tools into the `first` question's message. Control tokens count in what the template writes,
    not in what the messages say.

    Raises:
        UsageError: the template refuses these messages, or leaves one out.
    """
    guarded: list[str] = []
    texts = [_guarded(tokenizer, message, guarded) for message in messages]
    earlier = [{"role": "user", "content": _CHUNKS_MARK}, {"role": "assistant", "content": _ANSWER_MARK}]
    asked = [*([] if first else earlier), {"role": "user", "content": _QUESTION_MARK}, *texts]
    if answered:
        asked.append({"role": "user", "content": _CHUNKS_MARK})
    try:
        rendered = tokenizer.render_chat([{"role": "system", "content": _INSTRUCTION_MARK}, *asked], variables) or ""
    except UsageError:  # no system role
        rendered = tokenizer.render_chat(asked, variables) or ""
    _, found, behind = rendered.partition(_QUESTION_MARK)
    if answered:
        behind, goes_on, _ = behind.partition(_CHUNKS_MARK)
        found = found and goes_on
    marks = re.compile(_TEXT_MARK.format(r"(\d+)"))
    if not found or [int(one) for one in marks.findall(behind)] != list(range(len(guarded))):
        raise UsageError("the model's chat template does not take these messages of the assistant and of tools")
    pieces = marks.split(behind)  # texts of the template, and between them numbers
    return tuple(
        (guarded[int(piece)], False) if place % 2 else (piece, True) for place, piece in enumerate(pieces) if piece
    )


def _guarded(tokenizer: TextTokenizer, value: Any, guarded: list[str], *, quoted: bool = False) -> Any:
    """The same with marks in the place of texts that spell control tokens; those are added to `guarded`.

    Arguments of a tool's call are written as JSON: `quoted` texts are taken as they stand there.
    """
    if isinstance(value, Mapping):
        return {
            key: _guarded(tokenizer, one, guarded, quoted=quoted or key == "arguments") for key, one in value.items()
        }
    if isinstance(value, list):
        return [_guarded(tokenizer, one, guarded, quoted=quoted) for one in value]
    if not isinstance(value, str) or not _spells_control(tokenizer, value):
        return value
    guarded.append(json.dumps(value, ensure_ascii=False)[1:-1] if quoted else value)
    return _TEXT_MARK.format(len(guarded) - 1)


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, Mapping):
        return [*map(str, value), *(text for one in value.values() for text in _texts(one))]
    if isinstance(value, list):
        return [text for one in value for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _spells_control(tokenizer: TextTokenizer, text: str) -> bool:
    return tokenizer.encode(text) != tokenizer.encode(text, control_tokens=True)


class _NotCuttableError(UsageError):
    """A mark did not come back exactly once, or not in order."""


def _cut(
    tokenizer: TextTokenizer, messages: Messages, variables: Mapping[str, Any] | None = None
) -> tuple[str, str, str]:
    try:
        rendered = tokenizer.render_chat(messages, variables)
    except UsageError as error:
        raise _NotCuttableError(str(error)) from error
    if rendered is None:
        raise UsageError("the tokenizer has no chat template: use the plain template")
    for mark in (_INSTRUCTION_MARK, _CHUNKS_MARK, _QUESTION_MARK):
        if (count := rendered.count(mark)) != 1:
            raise _NotCuttableError(
                f"the chat template cannot be cut: a mark in a message comes back {count} times instead of once"
            )
    head, _, rest = rendered.partition(_INSTRUCTION_MARK)
    lead, found, tail = rest.partition(_CHUNKS_MARK + _QUESTION_MARK)
    if not found:
        raise _NotCuttableError("the chat template cannot be cut: it puts the instruction after the user's message")
    return head, lead, tail


def _turn_break(tokenizer: TextTokenizer, variables: Mapping[str, Any] | None = None) -> str:
    """What the template writes between an answer and the next user's message; "" if it takes no second turn.

    No template ends a turn with nothing, so that "" can stand for that.
    """
    messages = [
        {"role": "user", "content": _CHUNKS_MARK},
        {"role": "assistant", "content": _ANSWER_MARK},
        {"role": "user", "content": _QUESTION_MARK},
    ]
    try:
        rendered = tokenizer.render_chat(messages, variables) or ""
    except UsageError:
        return ""
    if any(rendered.count(mark) != 1 for mark in (_ANSWER_MARK, _QUESTION_MARK)):
        return ""
    behind = rendered.partition(_ANSWER_MARK)[2]
    between, found, _ = behind.partition(_QUESTION_MARK)
    return between if found else ""


def _has_chat_template(tokenizer: TextTokenizer) -> bool:
    try:
        return tokenizer.render_chat([{"role": "user", "content": "?"}]) is not None
    except UsageError:
        return True
