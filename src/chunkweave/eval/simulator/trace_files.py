"""Traces from files: Mooncake's format and our own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chunkweave.errors import DocumentError
from chunkweave.eval.simulator.trace import Arrival, Part

MOONCAKE_BLOCK_TOKENS = 512


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace; the format is found by the first line.

    - Mooncake: `{"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [..]}`. A hash id names a block of
      512 tokens behind all blocks before it, so each is a part; a last, shorter block counts as a whole one, as
      KV memory is allotted in blocks.
    - Our own: `{"arrival_s": 0.5, "system": {"id": "s", "tokens": 90}, "chunks": [{"id": "a", "tokens": 512}, ..],
      "question_tokens": 30, "conversation_id": "c"}`, only time and chunks being needed.

    Raises:
        DocumentError: the file cannot be read or a line is not a request; the message has file, line and reason.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8: bad byte at offset {error.start}") from error
    except OSError as error:
        raise DocumentError(f"cannot read the trace {path}: {error.strerror or error}") from error
    read: Callable[[dict[str, Any]], Arrival] | None = None
    arrivals = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        entry = _object(where, line)
        if read is None:
            read = _mooncake if "hash_ids" in entry else _own
        try:
            arrivals.append(read(entry))
        except KeyError as error:
            raise DocumentError(f"{where}: no {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise DocumentError(f"{where}: {error}") from error
    if not arrivals:
        raise DocumentError(f"{path} holds no request")
    return arrivals


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: not JSON: {error.msg}") from error
    if not isinstance(entry, dict):
        raise DocumentError(f"{where}: not an object but {type(entry).__name__}")
    return entry


def _mooncake(entry: dict[str, Any]) -> Arrival:
    blocks = _list(entry, "hash_ids")
    return Arrival(
        _number(entry, "timestamp") / 1000.0, tuple(Part(str(block), MOONCAKE_BLOCK_TOKENS) for block in blocks)
    )


def _own(entry: dict[str, Any]) -> Arrival:
    parts = [_part(chunk, f"chunk {place}") for place, chunk in enumerate(_list(entry, "chunks"))]
    system = entry.get("system")
    if system is not None:
        parts.insert(0, _part(system, "system"))
    question_tokens = _whole(entry, "question_tokens") if "question_tokens" in entry else 0
    conversation = str(entry.get("conversation_id") or "")
    return Arrival(_number(entry, "arrival_s"), tuple(parts), question_tokens, system is not None, conversation)


def _part(entry: object, what: str) -> Part:
    if not isinstance(entry, dict):
        raise TypeError(f"{what} is not an object but {type(entry).__name__}")
    tokens = _whole(entry, "tokens")
    if tokens == 0:
        raise ValueError(f"{what} has no tokens")
    return Part(str(entry["id"]), tokens)


def _list(entry: dict[str, Any], key: str) -> list[Any]:
    value = entry[key]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} is not a list with something in it")
    return value


def _number(entry: dict[str, Any], key: str) -> float:
    value = entry[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{key!r} is not a number from 0 on: {value!r}")
    return float(value)


def _whole(entry: dict[str, Any], key: str) -> int:
    value = _number(entry, key)
    if value != int(value):
        raise ValueError(f"{key!r} is not a whole number: {value!r}")
    return int(value)
