"""What can be said of the method `query` after a colon, for ablations: `query:last`, `query:last:layers=1+2`."""

from typing import Any

from chunkweave.config import Combine, DeviationFactor, WatchedLayers
from chunkweave.errors import UsageError

QUERY_SETTINGS: dict[str, dict[str, Any]] = {
    "last": {"tail": 1},
    "whole": {"tail": None},
    "all-layers": {"layers": WatchedLayers.ALL},
    "late": {"layers": WatchedLayers.LATE},
    "third": {"layers": WatchedLayers.FIRST_THIRD},
    "head-sum": {"over_heads": Combine.SUM},
    "head-max": {"over_heads": Combine.MAX},
    "token-sum": {"over_tokens": Combine.SUM},
    "token-max": {"over_tokens": Combine.MAX},
    "layer-sum": {"over_layers": Combine.SUM},
    "layer-max": {"over_layers": Combine.MAX},
    "no-factor": {"factor": DeviationFactor.NONE},
    "stored": {"factor": DeviationFactor.STORED},
    "measured": {"factor": DeviationFactor.MEASURED},
    "first-token": {"first_tokens": 1},
    "mixed": {"mixed_share": 0.25},
    "two-rounds": {"rounds": 2},
}

_LAYERS, _TAIL = "layers=", "tail="
PATTERNS = (f"{_LAYERS}1+2", f"{_TAIL}4")
"""Settings with numbers of one's own: the watched layers, and how many of the question's last tokens are watched."""


def query_setting(name: str) -> dict[str, Any] | None:
    """The fields of `QueryConfig` that a setting stands for; None if it is no setting of `query`.

    Raises:
        UsageError: the numbers of a setting are none.
    """
    if not name.startswith((_LAYERS, _TAIL)):
        return QUERY_SETTINGS.get(name)
    key, _, text = name.partition("=")
    try:
        numbers = tuple(int(number) for number in text.split("+"))
    except ValueError as error:
        raise UsageError(f"not a setting: {name!r}; write for example {PATTERNS[0]} or {PATTERNS[1]}") from error
    return {key: numbers if name.startswith(_LAYERS) else numbers[0]}
