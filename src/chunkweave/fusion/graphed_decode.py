"""A decode step over fixed buffers, recorded once as a CUDA graph and replayed.

Decoding computes little: for a few requests, launching its hundreds of kernels takes longer than running them. A graph
is one launch. It reads token ids, positions and the addresses of the requests' caches from buffers at fixed addresses,
so one recording serves any set of requests of the same size.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chunkweave.kv.request_cache import RequestCache
from chunkweave.models.base import LayerwiseModel
from chunkweave.models.triton_attention import (
    Blocks,
    FlatQueries,
    KeyPlaces,
    attend,
    choose_blocks,
    processors,
    tile_table,
    to_device,
    write_rows,
)

logger = logging.getLogger(__name__)

_MAX_REQUESTS = 64
"""With more requests, a step is no longer bound by launches."""

Step = Callable[[], torch.Tensor]
Record = Callable[[Step], Step]
"""Turns a step over fixed buffers into a cheaper equivalent: `record_cuda_graph`."""


@dataclass(slots=True, eq=False)
class DecodeBuffers:
    """Inputs of a step over a fixed number of requests.

    `inputs` int64 `[2, requests]` are token ids and positions. `places` int64 `[layers, requests, 4]` are addresses of
    each layer's keys and values (the last two columns stay 0) in the caches with these `versions`.
    """

    inputs: torch.Tensor
    places: torch.Tensor
    tiles: torch.Tensor
    blocks: Blocks
    versions: tuple[int, ...] = ()


def decode_step(model: LayerwiseModel, buffers: DecodeBuffers, stop: int) -> torch.Tensor:
    """One token of each request through all layers: logits `[requests, vocab]`. Mutates the caches at `places`.

    Only queues work on the device, without waiting; `stop` is above every position.
    """
    token_ids, positions = buffers.inputs
    row_counts = (1,) * len(token_ids)
    hidden = model.embed(token_ids)
    for layer in range(model.geometry.num_layers):
        q, k, v = model.qkv(layer, hidden)
        places = buffers.places[layer]
        write_rows(model.rotate_keys(layer, k, positions), v, positions, places)
        queries = FlatQueries(model.rotate_queries(layer, q, positions).contiguous(), positions, row_counts, stop)
        kv_places = KeyPlaces(places, model.geometry.num_kv_heads)
        window = model.geometry.window(layer)
        states = attend(queries, kv_places, blocks=buffers.blocks, tiles=buffers.tiles, window=window).states
        hidden = model.finish(layer, hidden, states)
    return model.logits(hidden)


class GraphedDecode:
    """Decodes requests by recorded steps, one per number of requests and of key splits.

    Not thread-safe. If recording fails, it logs a warning once, and `decode` returns None from then on; the caller
    falls back to the layer loop.
    """

    def __init__(
        self, model: LayerwiseModel, *, dtype: torch.dtype, device: torch.device, record: Record | None = None
    ) -> None:
        """Record steps of `model` with `record` (None: as CUDA graphs)."""
        self._model = model
        self._dtype, self._device = dtype, device
        self._record = record or record_cuda_graph()
        self._steps: dict[tuple[int, int], tuple[DecodeBuffers, Step]] = {}
        self._broken = False

    @property
    def in_use(self) -> bool:
        """Whether steps were recorded and no recording failed."""
        return bool(self._steps) and not self._broken

    def decode(
        self, caches: Sequence[RequestCache], token_ids: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor | None:
        """Logits `[requests, vocab]` of each request's next token; None if no recorded step applies."""
        if self._broken or not 0 < len(caches) <= _MAX_REQUESTS:
            return None
        # Round up to a power of two, so that growing contexts rarely need another recording.
        stop = 1 << max(positions).bit_length()
        blocks = self._blocks(len(caches), stop)
        key = len(caches), blocks.splits
        try:
            if key not in self._steps:
                buffers = self._buffers(len(caches), blocks)
                self._fill(buffers, caches, token_ids, positions)
                self._steps[key] = buffers, self._record(lambda: decode_step(self._model, buffers, stop))
            buffers, step = self._steps[key]
            self._fill(buffers, caches, token_ids, positions)
            return step().clone()
        except Exception as error:  # noqa: BLE001  (any device or compiler error: the layer loop decodes instead)
            self._broken = True
            logger.warning("CUDA graphs of decode steps cannot be recorded; steps run without them: %s", error)
            return None

    def _blocks(self, requests: int, stop: int) -> Blocks:
        sizes = self._model.geometry
        return choose_blocks(
            (1,) * requests,
            stop,
            sizes.num_heads,
            sizes.num_kv_heads,
            dtype=self._dtype,
            processors=processors(self._device),
        )

    def _buffers(self, requests: int, blocks: Blocks) -> DecodeBuffers:
        sizes = self._model.geometry
        tiles = tile_table((1,) * requests, blocks.rows // (sizes.num_heads // sizes.num_kv_heads))
        return DecodeBuffers(
            torch.zeros((2, requests), dtype=torch.long, device=self._device),
            torch.zeros((sizes.num_layers, requests, 4), dtype=torch.long, device=self._device),
            to_device(tiles, self._device),
            blocks,
        )

    def _fill(
        self, buffers: DecodeBuffers, caches: Sequence[RequestCache], token_ids: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Copy this step's inputs to the device; addresses only if the caches are others or have grown."""
        buffers.inputs.copy_(to_device([token_ids, positions], self._device, torch.long))
        versions = tuple(cache.version for cache in caches)
        if buffers.versions == versions:
            return
        places = []
        for layer in range(self._model.geometry.num_layers):
            views = [cache.view(layer, cache.capacity) for cache in caches]
            places += [[keys.data_ptr(), values.data_ptr(), 0, 0] for keys, values in views]
        buffers.places.copy_(to_device(places, self._device, torch.long).view_as(buffers.places))
        buffers.versions = versions


def record_cuda_graph() -> Record:
    """Records steps as CUDA graphs. They share memory, because no two run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Step:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up: kernels compile and libraries allocate workspaces before recording
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, such as the loader, may allocate during the recording.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return record
