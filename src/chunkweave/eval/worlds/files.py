"""Requests as a dataset file: one JSON object a line."""

import json
from collections.abc import Iterable
from pathlib import Path

from chunkweave.eval.worlds.records import Request


def write_jsonl(path: Path, requests: Iterable[Request]) -> int:
    """Write `{question, chunks: [{text, source}], answers, kind, needed}` a line; returns the number of lines.

    `needed` lists the places in `chunks` that the answer takes. An existing file is replaced.
    """
    lines = 0
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            row = {
                "question": request.question,
                "chunks": [{"text": chunk.text, "source": chunk.source} for chunk in request.chunks],
                "answers": list(request.answers),
                "kind": str(request.kind),
                "needed": list(request.needed),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            lines += 1
    return lines
