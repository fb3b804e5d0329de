"""What every test starts from."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkweave import plugins


@pytest.fixture(autouse=True)
def _no_log_level() -> Iterator[None]:
    """The command line sets the library's log level for its process; here that is all tests' process."""
    logging.getLogger("chunkweave").setLevel(logging.NOTSET)
    yield
    logging.getLogger("chunkweave").setLevel(logging.NOTSET)


@pytest.fixture
def baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of the benchmarks' baselines, which are methods here as those of any `--method-file` are."""
    monkeypatch.setattr(plugins, "_FILES", {})
    folder = tmp_path / "baselines"
    folder.mkdir()
    kinds = {"random": "RandomTokens", "set_cache": "SetCache"}
    for name, kind in kinds.items():
        (folder / f"{name}.py").write_text(f"from chunkweave_lab.baselines import {kind} as METHOD\n")
    files = sorted(map(str, folder.iterdir()))
    plugins.load_plugin_files(files)
    return files
