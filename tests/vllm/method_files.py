"""Methods that are the benchmarks' alone, as files that a connector's extra config names."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from chunkweave.plugins import load_plugin_files

_BASELINE = "from chunkweave_lab.baselines import {} as METHOD\n"
_FILES = {
    "random": _BASELINE.format("RandomTokens"),
    "set-cache": _BASELINE.format("SetCache"),
}

_VARIABLE = "CHUNKWEAVE_TEST_METHOD_FILES"
"""The folder of the files, which workers inherit: one of their own would bring the same names from other files."""

if _VARIABLE not in os.environ:
    _folder = TemporaryDirectory(prefix="chunkweave-methods-")
    for _name, _source in _FILES.items():
        (Path(_folder.name) / f"{_name.replace('-', '_')}.py").write_text(_source)
    os.environ[_VARIABLE] = _folder.name

METHOD_FILES = sorted(map(str, Path(os.environ[_VARIABLE]).glob("*.py")))
load_plugin_files(METHOD_FILES)
