import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import chunkweave

TORCH_FREE = (
    "errors",
    "types",
    "config",
    "settings",
    "metrics",
    "page",
    "chunking",
    "trees",
    "store",
    "ordering",
    "planning",
    "scheduling",
    "eval.chunk_order",
    "eval.datasets",
    "eval.results",
    "eval.summaries",
    "eval.simulator",
    "eval.worlds",
    "retrieval.corpus",
    "retrieval.documents",
    "retrieval.faiss_indexes",
    "retrieval.indexes",
    "retrieval.corpus_files",
    "cli",
    "server.auth",
    "server.settings",
    "vllm.request",
)
"""Everything above the torch line, and what of the rest must start fast."""


def test_the_exported_names():
    assert sorted(chunkweave.__all__) == [
        "Answer",
        "AnswerStream",
        "AsyncEngine",
        "AsyncRagPipeline",
        "BatchingConfig",
        "Chunk",
        "ChunkweaveError",
        "Conversation",
        "ConversationConfig",
        "Corpus",
        "CorpusDocument",
        "Engine",
        "OrderingConfig",
        "RagAnswer",
        "RagPipeline",
        "Request",
        "ReuseConfig",
        "ReuseReport",
        "SamplingParams",
        "StoreConfig",
        "StreamEvent",
        "__version__",
    ]
    assert dir(chunkweave) == sorted(chunkweave.__all__)


@pytest.mark.parametrize(
    "name", ["BatchingConfig", "Chunk", "ChunkweaveError", "Corpus", "CorpusDocument", "ReuseConfig", "ReuseReport"]
)
def test_exported_names_load_on_first_use(name):
    assert getattr(chunkweave, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = chunkweave.Motor


def modules_of(name: str) -> list[str]:
    folder = Path(chunkweave.__file__).parent / Path(*name.split("."))
    inside = [module.name for module in walk_packages([str(folder)], f"chunkweave.{name}.")] if folder.is_dir() else []
    return [f"chunkweave.{name}", *inside]


def test_decisions_and_command_line_load_without_torch():
    names = [module for name in TORCH_FREE for module in modules_of(name)]
    assert len(names) > 30
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import chunkweave\n"
        f"for name in {names!r}:\n"
        "    import_module(name)\n"
    )
    path = {"PYTHONPATH": str(Path(chunkweave.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **path}
    )
    assert done.returncode == 0, done.stderr


def test_no_hint_names_a_package_that_no_index_has():
    root = Path(chunkweave.__file__).parents[2]
    places = [
        *(root / "src").rglob("*.py"),
        *(root / "docs").glob("*.md"),
        *(root / "benchmarks").glob("*.py"),
        root / "README.md",
    ]
    assert len(places) > 100
    assert [str(place) for place in places if "chunkweave[" in place.read_text(encoding="utf-8")] == []


def test_every_module_says_what_it_is():
    without = []
    for module in walk_packages(chunkweave.__path__, "chunkweave."):
        if module.ispkg or not any(module.name.startswith(f"chunkweave.{name}") for name in TORCH_FREE):
            continue
        if not import_module(module.name).__doc__:
            without.append(module.name)
    assert without == []
