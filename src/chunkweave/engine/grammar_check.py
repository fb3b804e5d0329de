"""The process that checks one grammar; `grammar` starts it. It imports neither torch nor anything else that is large.

Regular expressions of a schema that must all match can take llguidance's compiler any time, which its own limits do not
bound. Here the kernel ends it.
"""

import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

MOST_S = 2
"""Most processor time for checking a grammar, in seconds."""

_MEMORY_BYTES = 1 << 30

LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 500_000,  # 10 ms of building expressions
    "step_lexer_fuel": 100_000,  # 7 ms for one token
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
"""Limits of llguidance on a grammar and on the work for one token."""


def main(read: Callable[[], str], write: Callable[[str], Any]) -> None:
    """Write the error of the grammar that is read; nothing if it is valid."""
    from llguidance import LLMatcher, LLParserLimits

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(read(), None, limits=LLParserLimits(**LIMITS))
    if is_wrong:
        write(messages[0])


if __name__ == "__main__":
    main(sys.stdin.read, sys.stdout.write)
