"""What tests ask of a worker: vLLM mixes this class into it (`worker_extension_cls`)."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from chunkweave.kv.segment import SegmentKV


class WorkerProbe:
    """Methods for `LLM.collective_rpc`."""

    def chunkweave_state(self) -> dict[str, Any]:
        """What the worker's side of the connector holds on to."""
        worker: Any = get_kv_transfer_group()._worker
        if worker is None:
            return {"weaves": False}
        return {
            "weaves": True,
            "jobs": len(worker._jobs),
            "woven": len(worker._woven),
            "segments": len(worker._store),
        }

    def chunkweave_chunks(self) -> list[str]:
        """Ids of the chunks in the store."""
        return [record.chunk_id for record in get_kv_transfer_group()._worker._store.records()]

    def chunkweave_check(self) -> bool:
        """The store's own invariants; raises if one does not hold."""
        get_kv_transfer_group()._worker._store.check()
        return True

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
