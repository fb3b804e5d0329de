"""vLLM's own decoder layers, driven one by one over any set of positions of one request's blocks.

The trick that needs no kernel and no model code of ours: each run of consecutive active positions is presented to the
attention backend as a request of its own that shares the real block table. Its causal mask then is exact.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from chunkweave.config import AttentionKernel
from chunkweave.models.anatomy import anatomy_of
from chunkweave.models.attention import ALONE, Ranks
from chunkweave.models.huggingface import geometry_of
from chunkweave.models.kernels.choice import make_attention
from chunkweave.types import Geometry
from chunkweave.vllm.adapters import Adapters
from chunkweave.vllm.architectures import Call, architecture_of, sinks_of, windows_of
from chunkweave.vllm.layer_modules import LayerModules
from chunkweave.vllm.paged_kv import BlockTable, PagedKV, RequestBlocks
from chunkweave.vllm.rotation import Rotations, SharedRotary

MOST_RUNS = 1024
"""Runs in one call of a backend: some size buffers by the number of requests that there may be."""


@dataclass(frozen=True, slots=True, eq=False)
class ActiveSet:
    """Positions that go through a layer together, `[tokens]` ascending, with their attention metadata.

    `pieces` are at most as many rows and runs each as the backend was sized for, with metadata and slots by layer name.
    """

    positions: torch.Tensor
    pieces: tuple[tuple[slice, dict[str, Any], dict[str, torch.Tensor]], ...]


class StockLayers:
    """The decoder of a model that vLLM has loaded, for one worker: this rank's share of the heads.

    `run` is vLLM's whole layer with its own kernels. Those return no attention weights and cannot hide keys: where
    either is needed, the project's layer loop drives the same modules as `DecoderLayers` (`embed`, `qkv`,
    `rotate_queries`, `rotate_keys`, `finish`) and attends with `attention`.

    `geometry` is the whole model's, `own_geometry` has this rank's heads, `ranks` combines over all of them.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Learn the KV cache's layout; the caches must be bound, and `check_supported` must have passed.

        Raises:
            UnsupportedModelError: the layout or the rotation is one that weaving cannot handle.
        """
        config = vllm_config.model_config.hf_config
        architecture, anatomy = architecture_of(model, config), anatomy_of(config)
        assert architecture is not None, "a model that is not woven has no layers here"
        self._config, self._model = vllm_config, model
        self.adapters = Adapters(model)
        self._layers = [LayerModules(block, architecture, anatomy) for block in model.model.layers]
        self.num_layers = len(self._layers)
        attentions = [layer.attention for layer in self._layers]
        groups = kv_cache_config.kv_cache_groups
        group_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        names = [attention.layer_name for attention in attentions]
        self.paged = PagedKV(attentions, groups[0].kv_cache_spec.block_size, [group_of[name] for name in names])
        self.device, self.dtype = self.paged.device, self.paged.dtype
        self._shared_rotary: SharedRotary | None = None
        if architecture.call is Call.TRANSFORMERS:
            types = config.layer_types if anatomy.rope_by_layer_type else [""] * self.num_layers
            probe = torch.empty(0, dtype=self.dtype, device=self.device)
            tokens = vllm_config.model_config.max_model_len
            rotary = model.model.rotary_emb
            self._shared_rotary = SharedRotary(rotary, types, tokens, probe, interleaved=architecture.interleaved)
        self.rotations = Rotations([self._rotary_of(layer) for layer in range(self.num_layers)])
        builder = attentions[0].get_attn_backend().get_builder_cls()
        self._builders = []
        eager = _without_graphs(vllm_config)
        for group in groups:
            spec = group.kv_cache_spec.copy_with_new_block_size(self.paged.kernel_block)
            self._builders.append((group.layer_names, builder(spec, group.layer_names, eager, self.device)))
        self._most_rows = vllm_config.scheduler_config.max_num_batched_tokens
        windows, sinks = windows_of(attentions), sinks_of(attentions)
        self.geometry: Geometry = replace(geometry_of(config), windows=windows, sinks=sinks)
        heads = int(attentions[0].num_heads)
        self.own_geometry = replace(self.geometry, num_heads=heads, num_kv_heads=self.paged.shape[0])
        self.ranks: Ranks = ALONE if get_tensor_model_parallel_world_size() == 1 else TensorParallelRanks()
        self.attention = make_attention(AttentionKernel.AUTO, self.own_geometry, dtype=self.dtype, device=self.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[tokens]` -> `[tokens, hidden]`."""
        done = []
        for rows in self._pieces(len(token_ids)):
            self.adapters.map_rows(rows.stop - rows.start)
            done.append(self._model.embed_input_ids(token_ids[rows]))
        return _joined(done)

    def activate(self, positions: torch.Tensor, blocks: RequestBlocks) -> ActiveSet:
        """Prepare a set of positions, `[tokens]` ascending, of the request with those blocks.

        The host asks the device once where they are: all that it has to know of their runs follows.
        """
        pieces, where = [], positions.cpu()
        for rows in self._pieces_by_runs(where):
            metadata: dict[str, Any] = {}
            slots: dict[str, torch.Tensor] = {}
            runs = _Runs.of(where[rows])
            for table, (names, builder) in zip(blocks.tables, self._builders, strict=True):
                own = table.slots(positions[rows])
                metadata |= dict.fromkeys(names, builder.build(0, runs.metadata(positions[rows], table, own)))
                slots |= dict.fromkeys(names, own)
            pieces.append((rows, metadata, slots))
        return ActiveSet(positions, tuple(pieces))

    def run(
        self, layer: int, active: ActiveSet, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One whole layer, which writes its KV and attends; `[tokens, hidden]` each, the residual as it may be added.

        `hidden` and `residual` may be overwritten: vLLM's layers work in place.
        """
        done = []
        for rows, metadata, slots in active.pieces:
            positions = active.positions[rows]
            angles = None if self._shared_rotary is None else self._shared_rotary.angles(layer, positions)
            with self._context(metadata, slots, len(positions)):
                part = None if residual is None else residual[rows]
                done.append(self._layers[layer].run(positions, hidden[rows], part, angles))
        if len(done) == 1:
            return done[0]
        to_add = [part for _, part in done if part is not None]
        return torch.cat([part for part, _ in done]), torch.cat(to_add) if to_add else None

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, active: ActiveSet) -> torch.Tensor:
        """The model's own forward of the whole body, `[tokens, hidden]`: what the start-up check compares with."""
        ((rows, metadata, slots),) = active.pieces
        with self._context(metadata, slots, rows.stop):
            hidden: torch.Tensor = self._model(token_ids, positions)
        return hidden

    def keys_values(
        self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh keys before RoPE and values of a layer, `[tokens, kv_heads, head_dim]`; its inputs stay as they are."""
        _, keys, values = self.qkv(layer, hidden if residual is None else hidden + residual)
        return keys, values

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before RoPE of this rank's heads; queries are scaled as `DecoderLayers` says.

        There may be no tokens (any more): vLLM's modules are then left alone.
        """
        if not len(hidden):
            own = self.own_geometry
            none = hidden.new_empty(0, own.num_kv_heads, own.head_dim)
            return hidden.new_empty(0, own.num_heads, own.head_dim), none, none.clone()
        done = []
        for rows in self._pieces(len(hidden)):
            self.adapters.map_rows(rows.stop - rows.start)
            done.append(self._layers[layer].qkv(hidden[rows]))
        queries, keys, values = map(_joined, zip(*done, strict=True))
        return queries, keys, values

    def rotate_queries(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE with the table of the layer's own module."""
        return self.rotations.forward(layer, queries, positions)

    rotate_keys = rotate_queries

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer, by as many tokens at a time as vLLM was sized for. `hidden` is used up."""
        done = []
        for rows in self._pieces(len(hidden)):
            with self._context({}, {}, rows.stop - rows.start):
                done.append(self._layers[layer].finish(hidden[rows], attended[rows]))
        return _joined(done)

    def _rotary_of(self, layer: int) -> Any:
        """What a layer rotates with, None if it does not."""
        modules = self._layers[layer]
        if self._shared_rotary is None or not modules.rotates:
            return modules.rotary
        return self._shared_rotary.table(layer, int(modules.attention.head_size))

    def _pieces(self, rows: int) -> Iterator[slice]:
        """That many rows in pieces of at most as many as vLLM was sized for."""
        for start in range(0, rows, self._most_rows):
            yield slice(start, min(start + self._most_rows, rows))

    def _pieces_by_runs(self, where: torch.Tensor) -> Iterator[slice]:
        """Positions `[tokens]`, on the host, in pieces of as many rows and runs as there may be in one call."""
        starts = _starts(where).tolist()
        for rows in self._pieces(len(where)):
            inside = [start for start in starts if rows.start < start < rows.stop]
            cuts = [rows.start, *inside[MOST_RUNS - 1 :: MOST_RUNS], rows.stop]
            yield from (slice(first, stop) for first, stop in pairwise(cuts))

    @contextmanager
    def _context(self, metadata: dict[str, Any], slots: dict[str, torch.Tensor], tokens: int) -> Iterator[None]:
        """What vLLM's modules expect around them; attention needs `metadata` and `slots` by layer name."""
        self.adapters.map_rows(tokens)
        with set_forward_context(metadata, self._config, num_tokens=tokens, slot_mapping=slots, skip_compiled=True):
            yield


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _without_graphs(config: VllmConfig) -> VllmConfig:
    """What builders of metadata for eager passes are to see of vLLM's config.

    With CUDA graphs, backends copy metadata to addresses that are captured, in buffers for `max_num_seqs` requests.
    These builders are not vLLM's own, and what they build is seen by no graph.
    """
    eager = copy(config)
    eager.compilation_config = copy(config.compilation_config)
    eager.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    eager.scheduler_config = copy(config.scheduler_config)
    eager.scheduler_config.max_num_seqs = max(MOST_RUNS, config.scheduler_config.max_num_seqs)
    return eager


def _starts(where: torch.Tensor) -> torch.Tensor:
    """Rows at which runs of consecutive positions begin, but for the first."""
    return torch.nonzero(where[1:] != where[:-1] + 1).squeeze(1) + 1


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs of consecutive positions, each as a request whose cache ends with it; on the host.

    `starts` `[runs + 1]` are the rows at which they begin, and the end; `lengths` `[runs]` those of the caches.
    """

    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, where: torch.Tensor) -> "_Runs":
        """Those of positions `[tokens]`, ascending."""
        edge = torch.tensor([0])
        starts = torch.cat((edge, _starts(where), edge + len(where)))
        return cls(starts.to(torch.int32), (where[starts[1:] - 1] + 1).to(torch.int32))

    def metadata(self, positions: torch.Tensor, table: BlockTable, slots: torch.Tensor) -> CommonAttentionMetadata:
        """As vLLM has it of a batch; `positions` and their `slots` `[tokens]` are on the device."""
        device, count = positions.device, len(self.lengths)
        return CommonAttentionMetadata(
            query_start_loc=self.starts.to(device, non_blocking=True),
            query_start_loc_cpu=self.starts,
            seq_lens=self.lengths.to(device, non_blocking=True),
            num_reqs=count,
            num_actual_tokens=len(positions),
            max_query_len=int((self.starts[1:] - self.starts[:-1]).max()),
            max_seq_len=int(self.lengths.max()),
            block_table_tensor=table.rows(count),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            seq_lens_cpu_upper_bound=self.lengths,
        )


class TensorParallelRanks(Ranks):
    """`Ranks` by vLLM's own collectives; each has as many query heads as the others, in order."""

    def __init__(self) -> None:
        self._count = get_tensor_model_parallel_world_size()

    def own_heads(self, num_heads: int) -> range:
        """The query heads that this rank computes, of all `num_heads`."""
        share, rank = num_heads // self._count, get_tensor_model_parallel_rank()
        return range(rank * share, (rank + 1) * share)

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks."""
        total: torch.Tensor = tensor_model_parallel_all_reduce(states.contiguous())
        mean: torch.Tensor = total / self._count
        return mean

    def maximum(self, states: torch.Tensor) -> torch.Tensor:
        """Greatest of the ranks' tensors: there is no such reduction, so that all are gathered."""
        gathered: torch.Tensor = tensor_model_parallel_all_gather(states.unsqueeze(0).contiguous(), dim=0)
        greatest: torch.Tensor = gathered.amax(0)
        return greatest

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """The norm over all heads from those over each rank's own. Shared key heads count more often, each alike."""
        total: torch.Tensor = tensor_model_parallel_all_reduce(norms.square())
        return total.sqrt()
