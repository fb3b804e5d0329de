"""A string that changes whenever a model's KV would change; part of every chunk id."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkweave.store.shared_folder import replace_file

logger = logging.getLogger(__name__)

KV_LAYOUT = "layers,2,tokens,kv_heads,head_dim;keys-before-rope;v1"
_WEIGHTS = ("*.safetensors", "*.bin")
_BLOCK_BYTES = 8 << 20


def fingerprint_folder(
    folder: Path, config: Any, dtype: str, adapter: str = "", *, quantized: str = "", file: Path | None = None
) -> str:
    """Fingerprint of a checkpoint: config, content of every weight file, dtype, layout and adapter.

    `adapter` is the result of `fingerprint_adapter`, or empty; `quantized` names how weights are rounded, if they are.
    `file` has the weights, if they are not in the folder. Paths have no influence. Content hashes are cached by size
    and modification time (`memo_path`), so only the first load reads the files twice.
    """
    memo = _read_memo()
    files = [file] if file else sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    hashes = [_file_hash(path, memo) for path in files]
    _write_memo(memo)
    return _digest([_config_text(config), *hashes, dtype, KV_LAYOUT, adapter, *_if_any(quantized)])


def fingerprint_shape(config: Any, dtype: str, seed: int, device: str = "cpu", *, quantized: str = "") -> str:
    """Fingerprint of a random-weight model: geometry and seed instead of weights.

    The type of `device` counts too, because each has its own random numbers.
    """
    kind = device.split(":")[0]
    drawn = f"seed={seed}" if kind == "cpu" else f"seed={seed} on {kind}"
    return _digest([_config_text(config), drawn, dtype, KV_LAYOUT, *_if_any(quantized)])


def fingerprint_adapter(settings: Mapping[str, Any], weights: Path) -> str:
    """Fingerprint of an adapter: its settings and the content of its weights file. Raises `OSError`."""
    return _digest(["lora", json.dumps(settings, sort_keys=True), content_hash(weights)])


def content_hash(file: Path) -> str:
    """A hash of a file's content, cached as for weights; raises `OSError` if the file cannot be read."""
    memo = _read_memo()
    memo_size = len(memo)
    file_hash = _file_hash(file, memo)
    if len(memo) > memo_size:
        _write_memo(memo)
    return file_hash


def cache_root() -> Path:
    """The user's cache folder for chunkweave: `$XDG_CACHE_HOME/chunkweave`, or `~/.cache/chunkweave`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chunkweave"


def memo_path() -> Path:
    """The file with cached content hashes."""
    return cache_root() / "weight-hashes.json"


def _config_text(config: Any) -> str:
    values = config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        values.pop(volatile, None)
    return json.dumps(values, sort_keys=True, default=str)


def _if_any(quantized: str) -> list[str]:
    """Empty if weights are not rounded, so that such fingerprints stay as they were before rounding existed."""
    return [f"weights={quantized}"] if quantized else []


def _digest(parts: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _file_hash(path: Path, memo: dict[str, str]) -> str:
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    if key not in memo:
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        memo[key] = digest.hexdigest()
    return memo[key]


def _read_memo() -> dict[str, str]:
    try:
        memo = json.loads(memo_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memo if isinstance(memo, dict) else {}


def _write_memo(memo: dict[str, str]) -> None:
    path = memo_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(memo))
    except OSError as error:
        logger.info("weight hashes cannot be cached (%s): the next load reads the files again", error)
