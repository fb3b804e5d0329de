"""What a body would cost is counted without parsing it, as a reader of one character at a time counts it."""

import json
import random

import pytest

from chunkweave_server import bodies
from chunkweave_server.errors import HttpError


def counted(raw: bytes) -> int:
    """Lists, objects and commas outside of texts."""
    found, quoted, escaped = 0, False, False
    for one in raw.decode():
        if escaped:
            escaped = False
        elif one == "\\":
            escaped = quoted
        elif one == '"':
            quoted = not quoted
        elif not quoted and one in ",[{":
            found += 1
    return found


@pytest.mark.parametrize("window_bytes", [1, 2, 3, 7, 1 << 20])
def test_values_are_counted_across_quotes_and_backslashes(window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_WINDOW_BYTES", window_bytes)
    draw = random.Random(window_bytes)
    for _ in range(300):
        texts = ["".join(draw.choice('",\\[{a') for _ in range(draw.randrange(9))) for _ in range(draw.randrange(5))]
        raw = json.dumps(texts).encode()
        bodies.refuse_costly(raw, counted(raw))
        with pytest.raises(HttpError, match="values"):
            bodies.refuse_costly(raw, counted(raw) - 1)


def test_long_numbers_are_refused_and_long_texts_of_digits_are_not() -> None:
    bodies.refuse_costly(b'{"a":"' + b"9" * 50_000 + b'"}', 9)
    with pytest.raises(HttpError, match="digits"):
        bodies.refuse_costly(b'{"a":' + b"9" * 5000 + b"}", 9)
