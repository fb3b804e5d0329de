"""How a weave computes with the LoRA adapter of its request."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.lora.layers import LoRAMapping

from chunkweave.vllm.orders import NotWoven


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
