"""Worlds: small, consistent, invented places to ask questions about, made from a seed. Imports no torch.

`generate_world` makes passages, `sample_request` a question with shuffled chunks, `write_jsonl` a dataset file,
`check_question` derives a question's gold answer a second time.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkweave.eval.worlds.check import check_passage, check_question
    from chunkweave.eval.worlds.files import write_jsonl
    from chunkweave.eval.worlds.questions import ask_about, pick_passages, sample_request
    from chunkweave.eval.worlds.records import (
        Fact,
        Passage,
        Question,
        QuestionKind,
        Relation,
        Request,
        Split,
        ValueType,
        World,
    )
    from chunkweave.eval.worlds.world import generate_world

_HOME = {
    "Fact": "records",
    "Passage": "records",
    "Question": "records",
    "QuestionKind": "records",
    "Relation": "records",
    "Request": "records",
    "Split": "records",
    "ValueType": "records",
    "World": "records",
    "ask_about": "questions",
    "check_passage": "check",
    "check_question": "check",
    "generate_world": "world",
    "pick_passages": "requests",
    "sample_request": "requests",
    "write_jsonl": "files",
}

__all__ = [
    "Fact",
    "Passage",
    "Question",
    "QuestionKind",
    "Relation",
    "Request",
    "Split",
    "ValueType",
    "World",
    "ask_about",
    "check_passage",
    "check_question",
    "generate_world",
    "pick_passages",
    "sample_request",
    "write_jsonl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
