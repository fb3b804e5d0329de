"""LoRA adapters: what tells their KV apart, and how a weave computes with that of its request."""

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


class Adapters:
    """Those of a loaded model: its modules compute each row with the one that a mapping names.

    vLLM maps the rows of a step's requests. Those of a weave are others, and of one request alone.
    """

    def __init__(self, model: Any) -> None:
        self._manager = getattr(model, "lora_manager", None)
        self._adapter = 0

    @contextmanager
    def using(self, adapter: int) -> Iterator[None]:
        """Inside, rows are computed with an adapter, by its number in vLLM; 0 is none. Afterwards all is as before.

        Raises:
            NotWoven: it is not loaded, or the step's own adapters take up all the places.
        """
        if self._manager is None:
            yield
            return
        before = self._manager._last_mapping
        if adapter:
            self._activate(adapter, set() if before is None else set(before.prompt_mapping) - {0})
        self._adapter = adapter
        try:
            yield
        finally:
            self._adapter = 0
            if before is not None:
                self._manager.set_adapter_mapping(before)

    def map_rows(self, count: int) -> None:
        """The next so many rows that modules see are the weave's."""
        if self._manager is not None:
            self._manager.set_adapter_mapping(LoRAMapping((self._adapter,) * count, (self._adapter,), is_prefill=True))

    def _activate(self, adapter: int, step: set[int]) -> None:
        """Give it a place, if need be that of an adapter that this step has no use for."""
        manager = self._manager
        assert manager is not None
        if adapter not in manager.list_adapters():
            raise NotWoven(f"adapter {adapter} is not loaded yet")
        if len(step | {adapter}) > manager.lora_slots:
            raise NotWoven("the step's own adapters take up all the places (--max-loras)")
        for one in [*step, adapter]:  # the one that was not used for longest has to give way
            manager.activate_adapter(one)
