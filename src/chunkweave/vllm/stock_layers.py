"""vLLM's own decoder layers, driven one by one over any set of positions of one request's blocks.

The trick that needs no kernel and no model code of ours: each run of consecutive active positions is presented to the
attention backend as a request of its own that shares the real block table. Its causal mask then is exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
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
from chunkweave.models.attention import ALONE, Ranks, make_attention
from chunkweave.models.huggingface import geometry_of
from chunkweave.types import Geometry
from chunkweave.vllm.paged_kv import BlockTable, PagedKV, Rotation


@dataclass(frozen=True, slots=True, eq=False)
class ActiveSet:
    """Positions that go through a layer together, `[tokens]` ascending, with their attention metadata.

    `pieces` are at most as many rows each as the backend was sized for, with metadata and slots by layer name.
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
        self._config = vllm_config
        self._body = model.model
        self._layers = list(model.model.layers)
        self.num_layers = len(self._layers)
        attentions = [layer.self_attn.attn for layer in self._layers]
        group = kv_cache_config.kv_cache_groups[0]
        self.paged = PagedKV(attentions, group.kv_cache_spec.block_size)
        self.device, self.dtype = self.paged.device, self.paged.dtype
        first = self._layers[0].self_attn
        self.rotation = Rotation(first.rotary_emb)
        spec = group.kv_cache_spec.copy_with_new_block_size(self.paged.kernel_block)
        builder = attentions[0].get_attn_backend().get_builder_cls()
        self._names = [attention.layer_name for attention in attentions]
        self._builder = builder(spec, self._names, vllm_config, self.device)
        self._most_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self._query_scale = float(first.scaling) * int(first.head_dim) ** 0.5
        self.geometry: Geometry = geometry_of(vllm_config.model_config.hf_config)
        self.own_geometry = replace(self.geometry, num_heads=int(first.num_heads), num_kv_heads=self.paged.shape[0])
        self.ranks: Ranks = ALONE if get_tensor_model_parallel_world_size() == 1 else TensorParallelRanks()
        self.attention = make_attention(AttentionKernel.AUTO, self.own_geometry, dtype=self.dtype, device=self.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[tokens]` -> `[tokens, hidden]`."""
        hidden: torch.Tensor = self._body.embed_tokens(token_ids)
        return hidden

    def activate(self, positions: torch.Tensor, table: BlockTable) -> ActiveSet:
        """Prepare a set of positions, `[tokens]` ascending, of the request with that table."""
        pieces = []
        for rows in self._pieces(len(positions)):
            metadata = self._builder.build(0, _runs(positions[rows], table))
            slots = table.slots(positions[rows])
            pieces.append((rows, dict.fromkeys(self._names, metadata), dict.fromkeys(self._names, slots)))
        return ActiveSet(positions, tuple(pieces))

    def run(
        self, layer: int, active: ActiveSet, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One whole layer, which writes its KV and attends; `[tokens, hidden]` each.

        `hidden` and `residual` may be overwritten: vLLM's layers work in place.
        """
        done = []
        for rows, metadata, slots in active.pieces:
            with self._context(metadata, slots, rows.stop - rows.start):
                part = None if residual is None else residual[rows]
                done.append(self._layers[layer](active.positions[rows], hidden[rows], part))
        if len(done) == 1:
            return done[0]  # type: ignore[no-any-return]
        return torch.cat([one for one, _ in done]), torch.cat([other for _, other in done])

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, active: ActiveSet) -> torch.Tensor:
        """The model's own forward of the whole body, `[tokens, hidden]`: what the start-up check compares with."""
        ((rows, metadata, slots),) = active.pieces
        with self._context(metadata, slots, rows.stop):
            hidden: torch.Tensor = self._body(token_ids, positions, None, None)
        return hidden

    def keys_values(
        self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh keys before RoPE and values of a layer, `[tokens, kv_heads, head_dim]`; its inputs stay as they are."""
        block = self._layers[layer]
        if residual is None:
            normed = block.input_layernorm(hidden)
        else:
            normed, _ = block.input_layernorm(hidden.clone(), residual.clone())
        _, keys, values = self._projected(layer, normed)
        return self._by_head(layer, "k_norm", keys), self._by_head(layer, None, values)

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before RoPE of this rank's heads; queries are scaled as `DecoderLayers` says."""
        queries, keys, values = self._projected(layer, self._layers[layer].input_layernorm(hidden))
        queries = self._by_head(layer, "q_norm", queries)
        scaled = queries if self._query_scale == 1.0 else queries * self._query_scale
        return scaled, self._by_head(layer, "k_norm", keys), self._by_head(layer, None, values)

    def rotate_queries(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """RoPE with vLLM's own module, the same on all layers."""
        return self.rotation.forward(queries, positions)

    rotate_keys = rotate_queries

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer, by as many tokens at a time as vLLM was sized for. `hidden` is used up."""
        block = self._layers[layer]
        done = []
        for rows in self._pieces(len(hidden)):
            with self._context({}, {}, rows.stop - rows.start):
                out, _ = block.self_attn.o_proj(attended[rows])
                normed, residual = block.post_attention_layernorm(out, hidden[rows])
                done.append(block.mlp(normed) + residual)
        return done[0] if len(done) == 1 else torch.cat(done)

    def _pieces(self, rows: int) -> Iterator[slice]:
        """That many rows in pieces of at most as many as vLLM was sized for."""
        for start in range(0, rows, self._most_rows):
            yield slice(start, min(start + self._most_rows, rows))

    def _projected(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attention = self._layers[layer].self_attn
        qkv, _ = attention.qkv_proj(normed)
        parts: tuple[torch.Tensor, ...] = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        return parts

    def _by_head(self, layer: int, norm_name: str | None, states: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads * head_dim]` -> `[tokens, heads, head_dim]`, by the layer's norm of that name, if any."""
        head_dim = self.paged.shape[1]
        by_head = states.reshape(len(states), states.shape[-1] // head_dim, head_dim)
        norm = None if norm_name is None else getattr(self._layers[layer].self_attn, norm_name, None)
        normed: torch.Tensor = by_head if norm is None else norm(by_head.contiguous())
        return normed

    @contextmanager
    def _context(self, metadata: dict[str, Any], slots: dict[str, torch.Tensor], tokens: int) -> Iterator[None]:
        """What vLLM's modules expect around them; attention needs `metadata` and `slots` by layer name."""
        with set_forward_context(metadata, self._config, num_tokens=tokens, slot_mapping=slots, skip_compiled=True):
            yield


def _runs(positions: torch.Tensor, table: BlockTable) -> CommonAttentionMetadata:
    """Each run of consecutive positions as a request whose cache ends with the run."""
    breaks = torch.nonzero(positions[1:] != positions[:-1] + 1).squeeze(1) + 1
    edge = breaks.new_tensor([0])
    starts = torch.cat((edge, breaks, edge + len(positions))).to(torch.int32)
    lengths = (positions[starts[1:].long() - 1] + 1).to(torch.int32)
    count = len(lengths)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=lengths,
        num_reqs=count,
        num_actual_tokens=len(positions),
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table.rows(count),
        slot_mapping=table.slots(positions),
        causal=True,
        positions=positions,
        seq_lens_cpu_upper_bound=lengths.cpu(),
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
