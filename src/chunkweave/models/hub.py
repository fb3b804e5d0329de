"""Models by hub name: from the hub's local cache, or downloaded into it once.

Importing this module loads neither torch nor transformers.
"""

import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

from chunkweave.errors import ModelNotFoundError, one_line

logger = logging.getLogger(__name__)

_SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
"""Configurations, tokenizers and chat templates."""
_WEIGHTS = ["*.safetensors"]
_DUPLICATES = ["*/*", "consolidated*"]
"""Other forms of the same weights: folders such as `original/` and `onnx/`, and Mistral's own format."""
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def cached_folder(name: str, *, revision: str | None = None, weights: bool = True) -> Path | None:
    """The folder of a hub name in the local hub cache, if complete; uses no network.

    Without `weights`, configuration and tokenizer are enough.
    """
    try:
        folder = _snapshot(name, revision, weights, local_files_only=True)
    except (OSError, ValueError):
        return None
    return folder if _whole(folder, weights) else None


def hub_folder(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a hub name: from the local hub cache if complete, else downloaded, with a progress bar on a
    terminal.

    Downloads only safetensors, configurations and tokenizer; without `weights` only the last two.

    Raises:
        ModelNotFoundError: it is not cached and the download failed, or it has no safetensors; the message says what to
            do.
    """
    if (cached := cached_folder(name, revision=revision, weights=weights)) is not None:
        return cached
    errors: Any = import_module("huggingface_hub.errors")
    logger.info("downloading %s into %s, once", name, cache_folder())
    try:
        folder = _snapshot(name, revision, weights)
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{name}"
        advice = f"accept its terms at {page}, then run `hf auth login` or set HF_TOKEN"
        raise ModelNotFoundError(f"{name} is a gated model of the hub: {advice}") from error
    except errors.RepositoryNotFoundError as error:
        advice = "a private one needs `hf auth login` or HF_TOKEN"
        raise ModelNotFoundError(
            f"there is no folder {name}, and the hub has no model of that name: {advice}"
        ) from error
    except (OSError, ValueError, errors.HTTPError) as error:
        why = one_line(error).removeprefix("Got: ")
        if import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        raise ModelNotFoundError(
            f"there is no folder {name}, the hub cache {cache_folder()} has no such model, and the download failed "
            f"({why}): connect to the hub, set HF_HOME to a cache that has it, or give --model FOLDER"
        ) from error
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(f"{name} has no safetensors weights on the hub; other formats are not loaded")
    return folder


def cache_folder() -> Path:
    """The local hub cache; HF_HOME and HF_HUB_CACHE move it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot(name: str, revision: str | None, weights: bool, *, local_files_only: bool = False) -> Path:
    import huggingface_hub

    wanted = [*_SMALL, *(_WEIGHTS if weights else [])]
    folder = huggingface_hub.snapshot_download(
        name,
        revision=revision,
        allow_patterns=wanted,
        ignore_patterns=_DUPLICATES,
        local_files_only=local_files_only,
    )
    return Path(folder)


def _whole(folder: Path, weights: bool) -> bool:
    """Whether all files to load exist: a download may have been interrupted, or partial."""
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        return False
    if not weights:
        return True
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)
