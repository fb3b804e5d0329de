"""What tells the KV of LoRA adapters apart."""

from pathlib import Path
from typing import Any

from vllm.lora.utils import get_adapter_absolute_path

from chunkweave.errors import UsageError
from chunkweave.models.fingerprint import content_hash

_Files = dict[str, tuple[int, int]]
"""Sizes and times of change by name."""


class AdapterKeys:
    """What an adapter adds to its chunks' ids: a hash of its files, since its name may stand for others tomorrow.

    vLLM has read them some time before. If they change later, nobody knows which ones it computes with.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Path, _Files, str]] = {}

    def of(self, lora: Any) -> str:
        """That of a `LoRARequest`.

        Raises:
            UsageError: its files cannot be read here, or have changed since its first request.
        """
        number = int(lora.lora_int_id)
        try:
            if number not in self._known:
                folder = Path(get_adapter_absolute_path(lora.lora_path))
                before = _files(folder)
                hashes = [content_hash(folder / name) for name in before]
                self._known[number] = folder, before, "+".join(["lora", *hashes])
            folder, before, key = self._known[number]
            now = _files(folder)
        except (OSError, ValueError) as error:
            raise UsageError(f"the files of the adapter {lora.lora_name} cannot be read: {error}") from error
        if not now:
            raise UsageError(f"the adapter {lora.lora_name} has no files in {folder}")
        if now != before:
            raise UsageError(
                f"the files of the adapter {lora.lora_name} have changed since its first request: "
                "load them under another name, or start vLLM again"
            )
        return key


def _files(folder: Path) -> _Files:
    found = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}
