"""Sizes and durations as people write them."""

import re

from chunkweave.errors import UsageError

GIB = 1 << 30
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}
_DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_bytes(text: str) -> int:
    """Bytes named by a text such as `2GiB`, `500 MB` or `4096`.

    Raises:
        UsageError: the text is no size.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"not a size in bytes: {text!r}; write for example 2GiB, 500MB or 4096")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_duration(text: str) -> float:
    """Seconds named by a text such as `90m`, `7d` or `30`.

    Raises:
        UsageError: the text is no duration.

    >>> parse_duration("1.5h")
    5400.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if match is None:
        raise UsageError(f"not a duration: {text!r}; write for example 30s, 90m, 12h or 7d")
    return float(match[1]) * _DURATION_UNITS_S[match[2] or "s"]
