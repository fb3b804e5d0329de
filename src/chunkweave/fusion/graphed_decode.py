"""A decode step over fixed buffers, so that it can be recorded once as a CUDA graph and replayed.

Decoding computes little: for a few requests, launching its hundreds of kernels takes longer than running them. A graph
is one launch. It reads token ids, positions and the addresses of the requests' caches from buffers that stay where they
are, so that one recording serves any requests, as many as it was made for.
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
"""More than this and a step is no longer bound by launches."""

Step = Callable[[], torch.Tensor]
Record = Callable[[Step], Step]
"""Makes of a step over fixed buffers one that does the same again, cheaper: `record_cuda_graph`."""


@dataclass(slots=True, eq=False)
class DecodeBuffers:
    """What a step over so many requests reads: `inputs` int64 `[2, requests]` are token ids and positions, `places`
    int64 `[layers, requests, 4]` the addresses of each layer's keys and values (the last two stay 0),
    those of the caches of `versions`.
    """

    inputs: torch.Tensor
    places: torch.Tensor
    tiles: torch.Tensor
    blocks: Blocks
    versions: tuple[int, ...] = ()


def decode_step(model: LayerwiseModel, buffers: DecodeBuffers, stop: int) -> torch.Tensor:
    """One token of each request through all layers: logits `[requests, vocab]`. Mutates the caches at `places`.

    Issues work to the device and nothing else; `stop` is above every position.
    """
    token_ids, positions = buffers.inputs
    ones = (1,) * len(token_ids)
    hidden = model.embed(token_ids)
    for layer in range(model.geometry.num_layers):
        q, k, v = model.qkv(layer, hidden)
        places = buffers.places[layer]
        write_rows(model.rotate_keys(layer, k, positions), v, positions, places)
        queries = FlatQueries(model.rotate_queries(layer, q, positions).contiguous(), positions, ones, stop)
        kv_places = KeyPlaces(places, model.geometry.num_kv_heads)
        window = model.geometry.window(layer)
        states = attend(queries, kv_places, blocks=buffers.blocks, tiles=buffers.tiles, window=window).states
        hidden = model.finish(layer, hidden, states)
    return model.logits(hidden)


class GraphedDecode:
    """Decodes requests by recorded steps, one for each number of requests and of splits of their keys.

    Not thread-safe. If recording fails it says so once, and `decode` gives None from then on: the caller goes the
    ordinary way.
    """

    def __init__(
        self, model: LayerwiseModel, *, dtype: torch.dtype, device: torch.device, record: Record | None = None
    ) -> None:
        """Steps of `model`, recorded by `record` (None: as CUDA graphs)."""
        self._model = model
        self._dtype, self._device = dtype, device
        self._record = record or record_cuda_graph()
        self._steps: dict[tuple[int, int], tuple[DecodeBuffers, Step]] = {}
        self._broken = False

    @property
    def in_use(self) -> bool:
        """Whether steps were recorded, and none failed to be."""
        return bool(self._steps) and not self._broken

    def decode(
        self, caches: Sequence[RequestCache], token_ids: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor | None:
        """Logits `[requests, vocab]` of each request's next token, or None if this is not for recorded steps."""
        if self._broken or not 0 < len(caches) <= _MAX_REQUESTS:
            return None
        # The next power of two, so that growing contexts seldom need another recording.
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
        except Exception as error:  # noqa: BLE001  (whatever the device or a compiler says: the loop decodes as well)
            self._broken = True
            logger.warning("decode steps cannot be recorded here and run one by one: %s", error)
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
        """Bring this step's numbers to the device; the addresses only if the caches are others, or have grown."""
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
    """Records steps as CUDA graphs that share their memory, since no two of them run at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Step:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled, and libraries take their workspaces, before the recording
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: the loader does.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return record
