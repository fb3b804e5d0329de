"""The answers of a study, kept while it runs. Imports no torch."""

import json
from pathlib import Path
from typing import Any


class Answers:
    """Every answer of a study, in memory and, line by line, in a file that an interrupted run goes on from."""

    def __init__(self, path: Path, origin: dict[str, Any]) -> None:
        """Take over what `path` holds if it is of the same `origin`; else it is begun anew."""
        self._path = path
        self._head = json.dumps(origin)
        self.found: dict[tuple[str, int, str], dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        if lines[:1] != [self._head]:
            path.write_text(self._head + "\n", encoding="utf-8")
            return
        for line in map(json.loads, lines[1:]):
            self.found[line["setting"], line["question"], line["contender"]] = line
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")  # without a line that was cut off

    def add(self, line: dict[str, Any]) -> None:
        """Keep one answer."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.found[line["setting"], line["question"], line["contender"]] = line
