"""LoRA adapters: keys that separate their KV, and computing a weave with its request's adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.lora.layers import LoRAMapping
from vllm.lora.utils import get_adapter_absolute_path

from chunkweave.errors import UsageError
from chunkweave.models.fingerprint import content_hash
from chunkweave.vllm.orders import NotWoven

_Files = dict[str, tuple[int, int]]
"""Sizes and modification times by name."""


class AdapterKeys:
    """An adapter's part of its chunks' ids: a hash of its files, because its name may later mean other files.

    vLLM reads the files some time earlier. If they change later, it is unknown which ones vLLM uses.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Path, _Files, str]] = {}

    def of(self, lora: Any) -> str:
        """The key of a `LoRARequest`.

        Raises:
            UsageError: its files cannot be read here, or have changed since its first request.
        """
        number = int(lora.lora_int_id)
        try:
            if number not in self._known:
                folder = Path(get_adapter_absolute_path(lora.lora_path))
                files = _files(folder)
                hashes = [content_hash(folder / name) for name in files]
                self._known[number] = folder, files, "+".join(["lora", *hashes])
            folder, files, key = self._known[number]
            now = _files(folder)
        except (OSError, ValueError) as error:
            raise UsageError(f"the files of the adapter {lora.lora_name} cannot be read: {error}") from error
        if not now:
            raise UsageError(f"the adapter {lora.lora_name} has no files in {folder}")
        if now != files:
            raise UsageError(
                f"the files of the adapter {lora.lora_name} have changed since its first request: "
                "load them under another name, or start vLLM again"
            )
        return key


def _files(folder: Path) -> _Files:
    files = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in files.items()}


class Adapters:
    """Adapters of a loaded model: its modules compute each row with the adapter in a mapping.

    vLLM maps the rows of a step's requests; a weave's rows differ, and belong to one request.
    """

    def __init__(self, model: Any) -> None:
        self._manager = getattr(model, "lora_manager", None)
        self._adapter = 0

    @contextmanager
    def using(self, adapter: int) -> Iterator[None]:
        """Compute rows with an adapter, by its number in vLLM (0: none); restores the mapping afterwards.

        Raises:
            NotWoven: it is not loaded, or the step's own adapters use all slots.
        """
        if self._manager is None:
            yield
            return
        mapping = self._manager._last_mapping
        if adapter:
            self._activate(adapter, set() if mapping is None else set(mapping.prompt_mapping) - {0})
        self._adapter = adapter
        try:
            yield
        finally:
            self._adapter = 0
            if mapping is not None:
                self._manager.set_adapter_mapping(mapping)

    def map_rows(self, count: int) -> None:
        """Map the next `count` rows to the weave's adapter."""
        if self._manager is not None:
            self._manager.set_adapter_mapping(LoRAMapping((self._adapter,) * count, (self._adapter,), is_prefill=True))

    def _activate(self, adapter: int, step: set[int]) -> None:
        """Load an adapter into a slot, replacing one that this step does not use if necessary."""
        manager = self._manager
        assert manager is not None
        if adapter not in manager.list_adapters():
            raise NotWoven(f"adapter {adapter} is not loaded yet")
        if len(step | {adapter}) > manager.lora_slots:
            raise NotWoven("the step's own adapters use all slots (--max-loras)")
        for active in [*step, adapter]:  # marks the step's as recently used, so that the oldest other one is evicted
            manager.activate_adapter(active)
