"""Results of a long measurement, kept in a file line by line, so that an interrupted one goes on. Imports no torch."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from chunkweave.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender on one question."""

    f1: float
    recompute_fraction: float


ResultT = TypeVar("ResultT", bound="Measured")


class Measurements(Generic[ResultT]):
    """Results by question and contender, in memory and, line by line, in a file.

    The file's first line has the settings; each further one a result. What was measured under other settings is not
    taken over, nor is a last line that was cut off while it was written.
    """

    def __init__(self, path: Path, settings: dict[str, Any], kind: type[ResultT]) -> None:
        """Take over what `path` holds of this `kind` for these `settings`; nothing is written before a first result."""
        self.path = path
        self._kind = kind
        self._settings = json.loads(json.dumps(settings))
        self._found: dict[tuple[int, str], ResultT] = {}
        self._lines = 0
        self._read()

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: tuple[int, str]) -> bool:
        return key in self._found

    def of(self, contender: str) -> list[ResultT]:
        """One contender's results in the order of the questions."""
        return [self._found[key] for key in sorted(key for key in self._found if key[1] == contender)]

    def add(self, question: int, contender: str, measured: ResultT) -> None:
        """Keep a result, on disk before this returns to the caller's next question.

        Raises:
            UsageError: the file cannot be written.
        """
        lines = [] if self._lines else [json.dumps({"settings": self._settings})]
        lines.append(json.dumps({"question": question, "contender": contender, **asdict(measured)}))
        try:
            with self.path.open("a" if self._lines else "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._found[question, contender] = measured
        self._lines += len(lines)

    def discard(self) -> None:
        """Remove the file: the record has what it held."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return
        whole, _, cut_off = text.rpartition("\n")
        try:
            first, *rest = [json.loads(line) for line in whole.split("\n")]
            if first["settings"] != self._settings:
                logger.warning("%s was measured under other settings; it is replaced", self.path)
                return
            for line in rest:
                key = line.pop("question"), line.pop("contender")
                self._found[key] = self._kind(**line)
        except (ValueError, KeyError, TypeError):
            logger.warning("%s is damaged; it is replaced", self.path)
            self._found.clear()
            return
        self._lines = 1 + len(rest)
        if cut_off:
            self.path.write_text(whole + "\n", encoding="utf-8")
