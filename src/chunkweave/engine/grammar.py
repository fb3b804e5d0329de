"""Grammars that answers must match, compiled with llguidance (extra `server`) for one tokenizer."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from chunkweave.engine.grammar_check import LIMITS, MOST_S
from chunkweave.errors import AnswerFormError, UsageError
from chunkweave.prompt.tokenizer import HuggingFaceTokenizer

_COSTLY = ("allOf", "format", "multipleOf", "oneOf", "pattern", "patternProperties", "propertyNames")
"""Keywords of JSON schema that become regular expressions which must all match."""

_LONGEST_S = 20.0
"""Longest check of a grammar, which gets less processor time: other processes may be busy."""

_TOO_COSTLY = f"this form of answers takes more than {MOST_S} s to compile: give a simpler schema"
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables that the process receives; others may have keys."""

_SAME_TEXT = ("ByteLevel", "Prepend", "Replace", "Sequence")
"""Normalizers that change how a text is written, but not the text that tokens spell. llguidance undoes `Prepend`."""

_COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""JSON without free white space: a small model would write nothing else."""


_PLACE = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")
_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])|(\w+) constraints are not supported")
"""Messages of llguidance: where in a grammar, and which keywords."""


class KeywordError(UsageError):
    """A schema has `keywords` of JSON schema that are not supported."""

    def __init__(self, keywords: Sequence[str]) -> None:
        super().__init__(f"not supported in a JSON schema: {', '.join(keywords)}")
        self.keywords = tuple(keywords)


def grammars_available() -> bool:
    """Whether llguidance is installed."""
    return find_spec("llguidance") is not None


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; llguidance releases the interpreter's lock meanwhile.

    Sizes and work are bounded: see `compile`.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer

    def compile(self, lark: str) -> "Grammar":
        """Compile a grammar in llguidance's variant of Lark, with JSON schemas as `%json`.

        A schema whose keywords can make that arbitrarily long is checked in a process first, for at most 2 s of
        processor time.

        Raises:
            KeywordError: the grammar has a keyword of JSON schema that is not supported.
            UsageError: it is invalid or too large.
        """
        from llguidance import LLMatcher, LLParserLimits

        if any(f'"{name}"' in lark for name in _COSTLY):
            _check_in_process(lark)
        matcher = LLMatcher(self._tokens, lark, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise _not_supported(matcher.get_error())
        return Grammar(matcher)

    @cached_property
    def _tokens(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(_spelling(self._tokenizer.serialized), eos_token=sorted(self._tokenizer.stop_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, shared by all answers that must match it."""

    matcher: Any

    def begin(self) -> "Matching":
        """The state of a new answer."""
        return Matching(self.matcher.deep_copy())


class Matching:
    """How far one answer has matched its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[vocab]` with -inf for all tokens that may not come next.

        Raises:
            UsageError: the grammar needs too much work for this token.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"this form of answers is too costly: {_first_line(self._matcher.get_error())}")
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        bitmask = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: len(logits)])
        allowed[: len(bitmask)] = bitmask.bool()
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    def take(self, token: int) -> None:
        """Add the next token, one that `masked` allows.

        Raises:
            AnswerFormError: the grammar refuses it.
        """
        if not self._matcher.consume_token(token):
            raise AnswerFormError(f"token {token} was refused: {_first_line(self._matcher.get_error())}")

    @property
    def ended(self) -> bool:
        """Whether the grammar allows no further token."""
        return bool(self._matcher.is_stopped())


def json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON schema as an expression of a Lark grammar."""
    return f"%json {json.dumps({**schema, **_COMPACT})}"


def _spelling(serialized: str) -> str:
    """A tokenizer whose tokens spell exactly the text that they are made from.

    llguidance tokenizes what must come next: a first space that the text does not have, or a normalized character,
    would not match the grammar.
    """
    tokenizer = json.loads(serialized)
    tokenizer["normalizer"] = _without_changes(tokenizer["normalizer"])
    pre_tokenizer = tokenizer["pre_tokenizer"] or {}
    for step in (pre_tokenizer, *pre_tokenizer.get("pretokenizers", ())):
        if step.get("type") == "ByteLevel":
            step["add_prefix_space"] = False
    return json.dumps(tokenizer)


def _without_changes(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer without the steps that change a text, such as NFC or lower case."""
    if normalizer is None or normalizer["type"] not in _SAME_TEXT:
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    steps = [step for step in map(_without_changes, normalizer["normalizers"]) if step is not None]
    return {**normalizer, "normalizers": steps}


def _check_in_process(lark: str) -> None:
    """Check a grammar in a process with limits on time and memory.

    Raises:
        KeywordError: it has a keyword of JSON schema that is not supported.
        UsageError: it is invalid, or takes too long.
    """
    command = [sys.executable, "-P", "-m", "chunkweave.engine.grammar_check"]
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, input=lark, capture_output=True, text=True, timeout=_LONGEST_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(_TOO_COSTLY) from None
    if done.stdout:
        raise _not_supported(done.stdout)
    if done.returncode:
        raise UsageError(_TOO_COSTLY)


def _not_supported(text: str) -> UsageError:
    """The error of a grammar that llguidance does not compile, from llguidance's message."""
    reason = _PLACE.sub("", _first_line(text))
    if (lacking := _KEYWORDS.match(reason)) is not None:
        return KeywordError(json.loads(lacking[1]) if lacking[1] else [lacking[2]])
    return UsageError(f"this form of answers is not supported: {reason}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "unknown"
