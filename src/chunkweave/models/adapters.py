"""LoRA adapters in PEFT's format: find, check, and merge them into the weights of a loaded model.

Merging needs the extra `lora`. Importing this module loads neither torch nor transformers.
"""

import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkweave.errors import ModelNotFoundError, UnsupportedModelError, UsageError, install_extra, one_line
from chunkweave.models.fingerprint import fingerprint_adapter

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_REFUSED = {
    "layer_replication": "it changes the number of layers",
    "alora_invocation_tokens": "it is active from certain tokens on, and merged weights always are",
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's folder, without weights. `key` identifies its configuration and weights."""

    name: str
    folder: Path
    base: str
    """The base model named in its configuration; may be empty."""
    rank: int
    """The highest rank of any module."""
    key: str


def adapter_folder(adapter: str | Path) -> Path:
    """The folder of an adapter.

    Raises:
        ModelNotFoundError: it does not exist.
    """
    path = Path(adapter)
    if not path.is_dir():
        raise ModelNotFoundError(f"no adapter folder at {adapter}: give one in PEFT's format")
    return path


def read_adapter(adapter: str | Path) -> Adapter:
    """Read and check an adapter's folder, without its weights.

    Raises:
        ModelNotFoundError: the folder or a file in it is missing or unreadable.
        UnsupportedModelError: it is no LoRA adapter, or cannot be merged.
    """
    folder = adapter_folder(adapter)
    config = _read_config(folder)
    if config.get("peft_type") != "LORA":
        raise _refused(folder.name, f"it is of the type {config.get('peft_type')}; only LORA is supported")
    for field, reason in _REFUSED.items():
        if config.get(field):
            raise _refused(folder.name, f"{field} is not supported: {reason}")
    rank = _highest_rank(config, folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        pickled = folder / "adapter_model.bin"
        why = " (adapter_model.bin is a pickle, which is never loaded: save it as safetensors)"
        raise ModelNotFoundError(f"{folder} has no {WEIGHTS_FILE}{why if pickled.exists() else ''}")
    try:
        key = fingerprint_adapter(config, weights)
    except OSError as error:
        raise ModelNotFoundError(f"{weights} cannot be read: {error.strerror or error}") from error
    base = str(config.get("base_model_name_or_path") or "")
    return Adapter(folder.resolve().name, folder, base, rank, key)


def merge_adapter(model: Any, adapter: Adapter) -> None:
    """Merge an adapter into the weights of a transformers model, by PEFT. Mutates `model`.

    What PEFT only warns about is refused, too: settings that it ignores, tied embeddings, missing weights.

    Raises:
        ModelNotFoundError: the weights file is damaged.
        UnsupportedModelError: the adapter does not fit the model; do not use the model afterwards.
        UsageError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    except ImportError as error:
        raise UsageError(f"adapters need the extra `lora`: {install_extra('lora')}") from error
    weights = _read_weights(adapter.folder / WEIGHTS_FILE)
    if other_weights := [key for key in weights if ".lora_" not in key]:
        raise _refused(adapter.name, f"its file holds {other_weights[0]}, which is no LoRA weight")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted = PeftModel(model, LoraConfig.from_pretrained(str(adapter.folder)))
            keys: Any = set_peft_model_state_dict(adapted, weights)
            missing = [key for key in keys.missing_keys if ".lora_" in key]
            if not missing and not keys.unexpected_keys:
                adapted.merge_and_unload(safe_merge=True)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise _refused(adapter.name, one_line(error)) from error
    if missing:
        raise _refused(adapter.name, f"its file has no {missing[0]}")
    if keys.unexpected_keys:
        raise _refused(adapter.name, f"its file has {keys.unexpected_keys[0]}, which the model has no place for")
    for warning in caught:
        if issubclass(warning.category, UserWarning) and "peft" in Path(warning.filename).parts:
            raise _refused(adapter.name, " ".join(str(warning.message).split()))


def warn_of_other_base(adapter: Adapter, model: str) -> None:
    """Log a warning if an adapter names another base model than `model`; a partial name matches."""
    base = Path(adapter.base).name.lower()
    name = model.lower()
    if base and base not in name and name not in base:
        logger.warning("the adapter %s names %s as its base model, not %s", adapter.name, adapter.base, model)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} has no {CONFIG_FILE}: it is no adapter in PEFT's format")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(f"{path} cannot be read: it is no JSON object")
    return config


def _highest_rank(config: dict[str, Any], folder: Path) -> int:
    ranks = config.get("rank_pattern") or {}
    try:
        return max(int(config["r"]), *(int(rank) for rank in ranks.values()), 1)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelNotFoundError(f"{folder / CONFIG_FILE} has no usable rank ({error!r})") from error


def _read_weights(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the adapter {name} cannot be used: {reason}")
