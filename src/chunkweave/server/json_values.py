"""Values that a JSON parser takes and that no JSON can be written from.

Numbers that are not finite (`NaN` and `Infinity` are no JSON, 1e999 is more than a number holds), and texts that are no
valid Unicode (half of a surrogate pair).
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from chunkweave.server.errors import HttpError

_SUSPECT = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]|\d[eE]\+?\d{3}|\d{309}")
"""What a body's bytes hold if one of its values may be of that kind."""

_MOST_STEPS = 100_000
"""Values that are looked at to name the field that is wrong."""


def refuse_unsendable(raw: bytes, body: Any) -> None:
    """Refuse a body, parsed from `raw`, that holds such a value anywhere, names of fields included.

    Raises:
        HttpError: 400, it names the field.
    """
    if _SUSPECT.search(raw) is None:
        return
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError:
        place, why = next(
            _unsendable(body), ("", "the body holds a number that is not finite, or half of a surrogate pair")
        )
        raise HttpError(400, why, param=place or None) from None


def _unsendable(body: Any) -> Iterator[tuple[str, str]]:
    """Paths to such values, each with what is wrong with it."""
    waiting = [("", body)]
    for _ in range(_MOST_STEPS):
        if not waiting:
            return
        place, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}" if place else name, one) for name, one in value.items()]
            if not all(map(_encodable, value)):
                yield (
                    place,
                    f"{place or 'the body'}: a field's name must be valid Unicode: it has half of a surrogate pair",
                )
        elif isinstance(value, list):
            waiting += [(f"{place}[{number}]", one) for number, one in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            yield place, f"{place} must be a finite number: NaN and Infinity are no JSON"
        elif isinstance(value, str) and not _encodable(value):
            yield place, f"{place} must be valid Unicode: it has half of a surrogate pair"


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
