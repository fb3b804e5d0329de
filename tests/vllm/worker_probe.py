"""What tests ask of a worker: vLLM mixes this class into it (`worker_extension_cls`)."""

from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from chunkweave.kv.segment import SegmentKV
from chunkweave.vllm import worker
from chunkweave.vllm.paged_kv import RequestBlocks

_begins: list[list[int]] = []


class NotedBlocks(RequestBlocks):
    """Notes where the blocks of each weave begin."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        _begins.append([table.begins for table in self.tables])


worker.RequestBlocks = NotedBlocks  # type: ignore[misc]


def _store() -> Any:
    """The store, after what waits to be copied."""
    side: Any = get_kv_transfer_group()._worker
    side._between_steps.finish()
    return side._store


class WorkerProbe:
    """Methods for `LLM.collective_rpc`."""

    def chunkweave_state(self) -> dict[str, Any]:
        """What the worker's side of the connector holds on to."""
        side: Any = get_kv_transfer_group()._worker
        if side is None:
            return {"weaves": False}
        store = _store()
        return {
            "weaves": True,
            "jobs": len(side._queue),
            "woven": len(side._woven),
            "segments": len(store),
            "in_memory": len(store.levels[0].store),
        }

    def chunkweave_stored(self) -> list[str]:
        """Ids of the chunks in the store, and of its exact segments."""
        records = _store().records()
        return [record.chunk_id for record in records] + [record.id for record in records if record.exact]

    def chunkweave_records(self) -> dict[str, dict[str, Any]]:
        """What is stored, by id: whether it is exact, and what its tokens attended to when it was computed."""
        records = _store().records()
        return {
            record.id: {"exact": record.exact, "attention": record.attention and asdict(record.attention)}
            for record in records
        }

    def chunkweave_sources(self) -> list[dict[str, Any]]:
        """Of each segment, what it was computed behind, and all that was read for it."""
        return [
            {
                "tokens": list(record.token_ids),
                "contexts": len(record.contexts),
                "neutral": record.neutral,
                "exact": record.exact,
                "profile": record.attention is not None,
                "sources": sorted(record.sources),
            }
            for record in _store().records()
        ]

    def chunkweave_check(self) -> bool:
        """The store's own invariants; raises if one does not hold."""
        _store().check()
        return True

    def chunkweave_flush(self) -> bool:
        """Wait until what is stored is written to the slow tiers."""
        return bool(_store().flush(30))

    def chunkweave_scale_norms(self, factor: float) -> None:
        """Replace weights, as an update of them does."""
        for name, parameter in self.model_runner.model.named_parameters():  # type: ignore[attr-defined]
            if name.endswith("input_layernorm.weight"):
                parameter.data.mul_(factor)

    def chunkweave_forget_memory(self) -> None:
        """As after a restart, but for what the slow tiers know: nothing is in memory."""
        store: Any = _store()
        store.levels[0].store.remove_where(lambda _: True)

    def chunkweave_is_of(self, segment: str, token_ids: list[int]) -> bool:
        """Whether a stored segment is of a chunk of these tokens."""
        return _store().record(segment).token_ids == tuple(token_ids)

    def chunkweave_woven_blocks(self) -> list[int]:
        """Where the blocks of the latest weave began, by group of layers."""
        return _begins[-1]

    def chunkweave_break_layer(self, layer: int | None) -> None:
        """From now on reading that layer of any segment fails, as a corrupt file would; None ends it."""
        original = getattr(SegmentKV, "_sound_layer", SegmentKV.layer)
        if layer is None:
            SegmentKV.layer = original
            return

        def broken(segment: SegmentKV, wanted: int) -> Any:
            if wanted == layer:
                raise OSError("this layer cannot be read")
            return original(segment, wanted)

        SegmentKV._sound_layer = original
        SegmentKV.layer = broken
