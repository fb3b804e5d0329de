import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import chunkweave

SOURCES = Path(chunkweave.__file__).parents[1]
TORCH_FREE = (
    "chunkweave.errors",
    "chunkweave.types",
    "chunkweave.config",
    "chunkweave.settings",
    "chunkweave.metrics",
    "chunkweave.prompt",
    "chunkweave.store",
    "chunkweave.ordering",
    "chunkweave.planning",
    "chunkweave.scheduling",
    "chunkweave.conversation",
    "chunkweave.engine.request_state",
    "chunkweave.engine.scheduler",
    "chunkweave.retrieval.speculation",
    "chunkweave.tiers.host",
    "chunkweave_server.app",
    "chunkweave_server.vllm_backend.backend",
    "chunkweave.calibration.contenders",
    "chunkweave.calibration.questions",
    "chunkweave.calibration.results",
    "chunkweave.calibration.summaries",
    "chunkweave_lab.chunk_order",
    "chunkweave_lab.datasets",
    "chunkweave_lab.simulator",
    "chunkweave.retrieval.corpus",
    "chunkweave.retrieval.documents",
    "chunkweave.retrieval.faiss_indexes",
    "chunkweave.retrieval.indexes",
    "chunkweave.retrieval.corpus_store",
    "chunkweave.cli",
    "chunkweave_server.tenants",
    "chunkweave_server.settings",
    "chunkweave.vllm.request",
    "chunkweave_lab.cli",
    "chunkweave_server.cli",
)
"""Everything above the torch line, and what of the rest must start fast."""


def test_the_exported_names():
    assert sorted(chunkweave.__all__) == [
        "Answer",
        "AnswerStream",
        "AsyncEngine",
        "BatchingConfig",
        "Chunk",
        "ChunkweaveError",
        "Corpus",
        "CorpusDocument",
        "Engine",
        "OrderingConfig",
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
    folder = SOURCES / Path(*name.split("."))
    inside = [module.name for module in walk_packages([str(folder)], f"{name}.")] if folder.is_dir() else []
    return [name, *inside]


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-c", f"import sys; {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_decisions_servers_and_command_line_load_without_torch():
    names = [module for name in TORCH_FREE for module in modules_of(name)]
    assert len(names) > 30
    hidden = "sys.modules['torch'] = sys.modules['transformers'] = None; import chunkweave; import importlib; "
    done = run(f"{hidden} [importlib.import_module(name) for name in {names!r}]")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import chunkweave",
        "import chunkweave; [getattr(chunkweave, name) for name in chunkweave.__all__]",
        "import chunkweave.cli.app, chunkweave.cli.calibrate, chunkweave.cli.demo",
        "import chunkweave.calibration.measurement, chunkweave.calibration.fidelity",
    ],
)
def test_the_library_loads_neither_the_server_nor_the_laboratory(code):
    others = "name.startswith(('chunkweave_server', 'chunkweave_lab'))"
    done = run(f"{code}; print([name for name in sys.modules if {others}])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_system_without_posix_modules_is_refused_with_the_reason():
    done = run("sys.modules['fcntl'] = None; import chunkweave.types")
    assert done.returncode == 1
    assert "chunkweave needs Linux, macOS or WSL: this Python has no module fcntl" in done.stderr


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
    for module in walk_packages([str(SOURCES)]):
        if module.ispkg or not module.name.startswith(TORCH_FREE):
            continue
        if not import_module(module.name).__doc__:
            without.append(module.name)
    assert without == []
