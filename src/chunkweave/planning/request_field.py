"""The `chunkweave` field of a request, to our server and inside vLLM: names, ranges, and what is said of wrong ones."""

from collections.abc import Collection, Iterable
from typing import Any

from chunkweave.errors import UnknownMethodError, UsageError

FIELD = "chunkweave"
"""The key in a request, and of the report in its answer."""

ORDERS = ("free", "fixed")
"""Who says in which order chunks stand in the prompt: chunkweave, or the request."""


def refuse_unknown_keys(given: Iterable[Any], known: Collection[str]) -> None:
    """Refuse a field with keys that mean nothing.

    Raises:
        UsageError: there are such keys; the message names them, and those there are.
    """
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        raise UsageError(f"unknown fields of {FIELD}: {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def checked_method(value: Any, methods: Collection[str]) -> str:
    """A reuse method's name, if it is one of `methods`.

    Raises:
        UnknownMethodError: there is no such method.
    """
    if not isinstance(value, str) or value not in methods:
        raise UnknownMethodError(f"unknown reuse method {value!r}; there are: {', '.join(methods)}")
    return value


def checked_ratio(value: Any) -> float:
    """A recompute ratio.

    Raises:
        UsageError: it is no number between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"recompute_ratio must be a number between 0 and 1, not {value!r}")
    return float(value)


def checked_whole(value: Any, name: str) -> int:
    """A whole number.

    Raises:
        UsageError: it is none; the message calls it `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    return value
