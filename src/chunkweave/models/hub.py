"""Models by their hub name: from the hub's cache on this machine, or downloaded into it once.

Importing this loads neither torch nor transformers.
"""

import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

from chunkweave.errors import ModelNotFoundError

logger = logging.getLogger(__name__)

_SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
"""Configurations, tokenizers and chat templates."""
_WEIGHTS = ["*.safetensors"]
_DUPLICATES = ["*/*", "consolidated*"]
"""The same weights in other forms: folders such as `original/` and `onnx/`, and Mistral's own format."""
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def cached_folder(name: str, *, revision: str | None = None, weights: bool = True) -> Path | None:
    """The folder of a hub name in the hub's cache, if all is there that is loaded; asks no network.

    Without `weights` configuration and tokenizer are enough.
    """
    try:
        folder = _snapshot(name, revision, weights, local_files_only=True)
    except (OSError, ValueError):
        return None
    return folder if _whole(folder, weights) else None


def hub_folder(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a hub name: in the hub's cache if all is there, else it is downloaded, with a bar at a terminal.

    A download fetches safetensors, configurations and tokenizer only; without `weights` the latter two.

    Raises:
        ModelNotFoundError: it is neither cached nor can it be downloaded, or it has no safetensors; the message says
            what to do.
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
        raise ModelNotFoundError(f"the hub gives {name} only to those who asked for it: {advice}") from error
    except errors.RepositoryNotFoundError as error:
        advice = "a private one needs `hf auth login` or HF_TOKEN"
        raise ModelNotFoundError(
            f"there is no folder {name} here, and the hub has no model of that name: {advice}"
        ) from error
    except (OSError, ValueError, errors.HTTPError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        if import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        raise ModelNotFoundError(
            f"there is no folder {name} here, the hub's cache {cache_folder()} has no such model, and it cannot be "
            f"downloaded ({why}): connect to the hub, set HF_HOME to a cache that has it, or give --model FOLDER"
        ) from error
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(f"{name} has no weights in safetensors format on the hub, and no others are loaded")
    return folder


def cache_folder() -> Path:
    """Where the hub's models lie on this machine; HF_HOME and HF_HUB_CACHE move it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot(name: str, revision: str | None, weights: bool, *, local_files_only: bool = False) -> Path:
    import huggingface_hub

    wanted = [*_SMALL, *(_WEIGHTS if weights else [])]
    found = huggingface_hub.snapshot_download(
        name,
        revision=revision,
        allow_patterns=wanted,
        ignore_patterns=_DUPLICATES,
        local_files_only=local_files_only,
    )
    return Path(found)


def _whole(folder: Path, weights: bool) -> bool:
    """Whether all that is loaded is there: a download may have ended early, or have been of a part."""
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
