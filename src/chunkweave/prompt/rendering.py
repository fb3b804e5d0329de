"""Renders a chat template so that no text of a request is read as a control token.

A tokenizer finds control tokens by their characters, so a request's text could spell one, or complete one that begins
in the text beside it. Therefore the characters of control tokens are replaced by stand-ins in every string of a
request, keys included, before the template is rendered, and restored afterwards. Their positions are then known, and
the tokenizer reads no control token there. The stand-ins are drawn for each rendering from characters that none of its
strings contains.
"""

import json
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from chunkweave.errors import UsageError
from chunkweave.prompt.tokenizer import TextTokenizer

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat in the form that templates read."""

_FIXED = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments"),
        *("description", "parameters", "strict", "system", "user", "assistant", "tool"),
    }
)
"""Names and roles of messages and tools that the API defines, not the request."""

_CONTAINERS = ("function", "tool_calls")
"""Fields whose content also has names that the API defines; content of other fields has the request's own names."""

_NAMED = ("role", "type")
"""Fields whose values the API defines."""

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
"""Variables that control how a template is rendered; a request must not set them."""

_CONTROL_NAMES = ("_token", "_tokens")
"""Suffixes of variables that hold control tokens: a request that sets `eos_token` would change the template."""

_STAND_INS = range(0x20000, 0x110000)
_USUAL_STAND_INS = range(0x20000, 0x2A6D0)
"""Rare ideographs: printable by templates, and unchanged by case folding and normalization."""

_ESCAPED = re.compile(r"\\u(d8[4-9a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Rendered:
    """The output of a chat template; no control token includes a character at one of the `ordinary` positions."""

    text: str = ""
    ordinary: frozenset[int] = frozenset()

    def part(self, start: int, stop: int) -> "Rendered":
        """The characters from `start` up to `stop`."""
        return Rendered(self.text[start:stop], frozenset(at - start for at in self.ordinary if start <= at < stop))

    def partition(self, mark: str) -> tuple["Rendered", bool, "Rendered"]:
        """The text before the first `mark`, whether there is one, and the text after it."""
        at = self.text.find(mark)
        if at < 0:
            return self, False, Rendered()
        return self.part(0, at), True, self.part(at + len(mark), len(self.text))


@dataclass(frozen=True, slots=True)
class Marks:
    """Placeholders for the parts of a prompt in a template; no string of a request contains one."""

    instruction: str
    chunks: str
    question: str
    answer: str

    @classmethod
    def absent_from(cls, *values: Any) -> "Marks":
        """Random placeholders that occur in none of the strings of `values`."""
        texts = strings_of(values)
        while True:
            key = secrets.token_hex(16).upper()
            if not any(key in text for text in texts):
                return cls(*(f"CHUNKWEAVE{name}{key}MARK" for name in ("INSTRUCTION", "CHUNKS", "QUESTION", "ANSWER")))


class _Seen(set[str]):
    """Collects the strings of a structure."""

    def __call__(self, text: str) -> str:
        self.add(text)
        return text


def strings_of(value: Any) -> Set[str]:
    """All strings in a JSON structure, including keys."""
    seen = _Seen()
    _changed(value, seen)
    return seen


def refuse_reserved(variables: Mapping[str, Any]) -> None:
    """Refuse variables of a request that would change its template.

    Raises:
        UsageError: a name is reserved.
    """
    if reserved := sorted(name for name in variables if name in _RESERVED or name.endswith(_CONTROL_NAMES)):
        raise UsageError(f"chat_template_kwargs: {', '.join(reserved)} cannot be set")


def rendered_chat(
    tokenizer: TextTokenizer, messages: Messages, variables: Mapping[str, Any] | None = None
) -> Rendered | None:
    """Render messages and `variables` with the tokenizer's chat template; None if it has no template.

    Raises:
        UsageError: a variable is reserved, the template refuses them, or its output depends on a word that would become
            a control token within the template's own brackets.
    """
    template_variables = dict(variables or {})
    refuse_reserved(template_variables)
    texts = _Seen()
    _change_all(messages, template_variables, texts)
    stand_ins = _StandIns(texts)
    table = str.maketrans(
        {character: stand_ins[character] for character in tokenizer.control_signs.intersection("".join(texts))}
    )

    def render(change: Callable[[str], str]) -> Rendered | None:
        written = tokenizer.render_chat(*_change_all(messages, template_variables, change))
        return None if written is None else stand_ins.put_back(written)

    rendered = render(lambda text: text.translate(table))
    if rendered is None:
        return None
    joins = _Joins(tokenizer.control_texts(rendered.text))
    risky = {text for text in texts if joins.may_take(text.translate(table))}
    if not risky:
        return rendered
    exact = render(lambda text: (joins.hidden(text, stand_ins) if text in risky else text).translate(table))
    if exact is None or exact.text != rendered.text:
        words = ", ".join(sorted(repr(text[:40]) for text in risky)[:3])
        raise UsageError(f"the chat template cannot treat these texts as ordinary text: {words}")
    return exact


def _changed(value: Any, change: Callable[[str], str], fixed: Set[str] = frozenset()) -> Any:
    """A copy of a structure with `change` applied to all strings and keys, except `fixed` ones that the API defines."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_changed(element, change, fixed) for element in value]
    if not isinstance(value, Mapping):
        return value
    changed: dict[Any, Any] = {}
    for key, element in value.items():
        is_fixed = key in fixed
        if is_fixed and key in _NAMED and isinstance(element, str) and element in fixed:
            changed[key] = element
            continue
        below = fixed if is_fixed and key in _CONTAINERS else frozenset[str]()
        changed[key if is_fixed else _changed(key, change)] = _changed(element, change, below)
    return changed


def _change_all(
    messages: Messages, variables: Mapping[str, Any], change: Callable[[str], str]
) -> tuple[list[Any], dict[str, Any]]:
    """Both with `change` applied to their strings. Names of variables stay, since templates never output them."""
    fixed = {"tools": _FIXED}
    changed = {name: _changed(value, change, fixed.get(name, frozenset())) for name, value in variables.items()}
    return _changed(messages, change, _FIXED), changed


class _StandIns(dict[str, str]):
    """Maps characters to stand-ins, each drawn at its first use and absent from all `texts`."""

    def __init__(self, texts: Iterable[str]) -> None:
        super().__init__()
        self._taken = {character for text in texts for character in text}
        for text in texts:
            for pair in _ESCAPED.findall(text):
                self._taken.add(json.loads('"\\u{}\\u{}"'.format(*pair)))

    def __missing__(self, character: str) -> str:
        usual = len(self._taken) < len(_USUAL_STAND_INS) // 2
        drawn_from = _USUAL_STAND_INS if usual else _STAND_INS
        while (drawn := chr(drawn_from[secrets.randbelow(len(drawn_from))])) in self._taken:
            pass
        self._taken.add(drawn)
        self[character] = drawn
        return drawn

    def put_back(self, written: str) -> Rendered:
        """Restore the original characters and record their positions. Templates may have escaped them as JSON."""
        if not self:
            return Rendered(written)
        forms = {stand_in: character for character, stand_in in self.items()}
        forms |= {json.dumps(stand_in)[1:-1]: json.dumps(character)[1:-1] for stand_in, character in forms.items()}
        pieces: list[str] = []
        ordinary: list[int] = []
        length = done = 0
        for match in re.finditer("|".join(map(re.escape, forms)), written):
            character = forms[match.group()]
            pieces += [written[done : match.start()], character]
            length += match.start() - done
            ordinary += range(length, length + len(character))
            length += len(character)
            done = match.end()
        return Rendered("".join((*pieces, written[done:])), frozenset(ordinary))


class _Joins:
    """Finds texts that may become part of control tokens by characters that are not replaced, mostly letters.

    A template that puts a name between its own brackets may turn it into a control token.
    """

    def __init__(self, control_texts: Iterable[str]) -> None:
        self._controls = tuple(control_texts)
        wholes = [folded(control) for control in self._controls]
        self._parts = {whole[a:b] for whole in wholes for a in range(len(whole)) for b in range(a + 1, len(whole) + 1)}
        self._beginnings = {whole[:stop] for whole in wholes for stop in range(1, len(whole) + 1)}
        self._ends = {whole[start:] for whole in wholes for start in range(len(whole))}
        self._wholes = tuple(wholes)
        self._most = max(map(len, wholes), default=0)

    def may_take(self, text: str) -> bool:
        """Whether a text is part of a control token, contains one, or may be joined with one at its start or end."""
        text = folded(text.strip())
        lengths = range(1, min(self._most, len(text)) + 1)
        return (
            text in self._parts
            or any(whole in text for whole in self._wholes)
            or any(text[:length] in self._ends or text[-length:] in self._beginnings for length in lengths)
        )

    def hidden(self, text: str, stand_ins: _StandIns) -> str:
        """A text with stand-ins for characters that a control token would include."""
        word = text.strip()
        begins = text.find(word)
        places = {0, len(word) - 1} if folded(word) == word.casefold() else set(range(len(word)))
        for control in self._controls:
            places |= {match.start() for match in re.finditer(re.escape(control), word, re.IGNORECASE)}
        characters = list(text)
        for place in places:
            characters[begins + place] = stand_ins[characters[begins + place]]
        return "".join(characters)


_PIECES = re.compile(r"(?s).{1,128}[^\x00-\x7f]{0,128}")
"""Pieces of a text that end before an ASCII character, which never combines with earlier ones, or after 256."""


def folded(text: str) -> str:
    """A text in compatibility form (NFKC), case-folded.

    Works piece by piece: `unicodedata` needs quadratic time for a long run of combining marks.
    """
    if text.isascii():
        return text.casefold()
    return "".join(unicodedata.normalize("NFKC", piece) for piece in _PIECES.findall(text)).casefold()
