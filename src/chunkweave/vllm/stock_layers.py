"""vLLM's own decoder layers, driven one by one over any set of positions of one request's blocks.

This needs no kernel and no model code of ours: each run of consecutive active positions is passed to the attention
backend as a separate request that shares the real block table. Its causal mask is then exact.
"""

from collections.abc import Iterable, Iterator, Sequence
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
from chunkweave.models.anatomy import Anatomy, NormOver, anatomy_of
from chunkweave.models.attention import ALONE, Ranks
from chunkweave.models.huggingface import geometry_of
from chunkweave.models.kernels.choice import make_attention
from chunkweave.types import Geometry
from chunkweave.vllm.architectures import (
    Architecture,
    Call,
    architecture_of,
    language_model_of,
    sinks_of,
    windows_of,
)
from chunkweave.vllm.lora import Adapters
from chunkweave.vllm.paged_kv import BlockTable, PagedKV, RequestBlocks
from chunkweave.vllm.rotation import Rotations, SharedRotary

MOST_RUNS = 1024
"""Most runs in one backend call: some backends size buffers by the maximum number of requests."""

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "CPU_ATTN")
"""vLLM's attention backends whose contract is known: what builders take, how long metadata is valid, how KV is written.
Tests compare it with vLLM's source.
"""


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines for transformers' layers."""


class LayerModules:
    """One layer. `run` and `finish` need a vLLM forward context.

    `attention` is vLLM's `Attention`; `rotary` its rotary module, None if the layer does not rotate or the model owns
    the module. `rotates` says whether it rotates.
    """

    def __init__(self, block: Any, architecture: Architecture, anatomy: Anatomy) -> None:
        own_attention = getattr(block, architecture.attention)
        self._block, self._own, self._anatomy, self._call = block, own_attention, anatomy, architecture.call
        self._output, self._mlp = getattr(own_attention, architecture.output), getattr(block, architecture.mlp)
        self.attention = own_attention.attn
        self.rotates = architecture.rotates(own_attention)
        self.rotary = getattr(own_attention, "rotary_emb", None) if self.rotates else None
        self._head_dim = int(self.attention.head_size)
        self._sizes = [self._head_dim * int(heads) for heads in (self.attention.num_heads, self.attention.num_kv_heads)]
        self.query_scale = float(own_attention.scaling) * self._head_dim**0.5
        self._residual_scale = float(getattr(block, "residual_multiplier", 1.0))

    def run(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, angles: Angles | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the whole layer with vLLM's kernels; if a residual is returned, it is still to be added."""
        block = self._block
        match self._call:
            case Call.ADDED_LATER:
                added, to_add = block(positions, hidden, residual)
                return added, to_add
            case Call.HIDDEN_FIRST:
                added, to_add = block(hidden, positions, residual)
                return added, to_add
            case Call.ADDED:
                return block(positions, hidden, None)[0], None
            case Call.STREAM:
                return _first(block(positions, hidden)), None
            case Call.TRANSFORMERS:
                stream = block(hidden[None], position_ids=positions[None], position_embeddings=angles)
                return _first(stream)[0], None

    def qkv(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values from the stream before the layer, `[tokens, heads, head_dim]`, before RoPE.

        Queries are scaled as in `DecoderLayers`.
        """
        queries, keys = self._sizes
        projected = _first(self._own.qkv_proj(self._normed(self._anatomy.before_attention, hidden)))
        q, k, v = torch.split(projected, [queries, keys, keys], dim=-1)
        q, k = self._head_normed(q, k)
        return q if self.query_scale == 1.0 else q * self.query_scale, k, self._by_head(v)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer after attention: output projection, residuals, norms and MLP."""
        anatomy = self._anatomy
        added = hidden + self._scaled(self._normed(anatomy.behind_attention, _first(self._output(attended))))
        norm_input = (anatomy.before_attention, hidden) if anatomy.parallel else (anatomy.before_mlp, added)
        return added + self._scaled(self._normed(anatomy.behind_mlp, _first(self._mlp(self._normed(*norm_input)))))

    def _scaled(self, states: torch.Tensor) -> torch.Tensor:
        """What is added to the stream, by the family's multiplier."""
        return states if self._residual_scale == 1.0 else states * self._residual_scale

    def _head_normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split by head and apply the norms, if there are any."""
        query_norm, key_norm = (getattr(self._own, name, None) for name in self._anatomy.head_norms)
        if query_norm is None or key_norm is None:
            return self._by_head(q), self._by_head(k)
        if hasattr(self._own, "_apply_qk_norm"):  # vLLM's own, over the heads of all ranks
            q, k = self._own._apply_qk_norm(q, k)
            return self._by_head(q), self._by_head(k)
        if self._anatomy.norm_over is NormOver.ALL_HEADS:
            return self._by_head(query_norm(q.contiguous())), self._by_head(key_norm(k.contiguous()))
        return query_norm(self._by_head(q).contiguous()), key_norm(self._by_head(k).contiguous())

    def _normed(self, norm_name: str, states: torch.Tensor) -> torch.Tensor:
        """`states` after the norm of that name; unchanged without a name."""
        return _first(getattr(self._block, norm_name)(states)) if norm_name else states

    def _by_head(self, states: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads * head_dim]` -> `[tokens, heads, head_dim]`."""
        return states.reshape(len(states), states.shape[-1] // self._head_dim, self._head_dim)


def _first(output: Any) -> torch.Tensor:
    """A module's output, or the first element if it is a tuple."""
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of an active set for one call: at most the rows and runs that the backend was sized for.

    `batches` are the inputs of the metadata builders, one per group of layers; `slots` are by layer name.
    """

    rows: slice
    batches: tuple[CommonAttentionMetadata, ...]
    slots: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ActiveSet:
    """Positions that run through a layer together, `[tokens]` ascending, in pieces."""

    positions: torch.Tensor
    pieces: tuple[Piece, ...]


class StockLayers:
    """The decoder of a model loaded by vLLM, for one worker: this rank's share of the heads.

    `run` is vLLM's whole layer with its own kernels. These return no attention weights and cannot hide keys. Where
    either is needed, our layer loop drives the same modules as `DecoderLayers` (`embed`, `qkv`, `rotate_queries`,
    `rotate_keys`, `finish`) and attends with `attention`.

    `geometry` is the whole model's, `own_geometry` has this rank's heads, `ranks` combines over all of them.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Learn the KV cache's layout; caches must be bound, and `check_supported` must have passed.

        Raises:
            UnsupportedModelError: weaving cannot handle the layout or the rotation.
        """
        config = vllm_config.model_config.hf_text_config
        text = language_model_of(model)
        architecture = architecture_of(type(text).__name__, config)
        anatomy = anatomy_of(config)
        assert architecture is not None, "a model that is not woven has no layers here"
        self._config, self._model, self._embed = vllm_config, model, text.embed_input_ids
        self._embedding_scale = float(getattr(config, "embedding_multiplier", 1.0))
        self.adapters = Adapters(model)
        self._layers = [LayerModules(block, architecture, anatomy) for block in text.model.layers]
        self.num_layers = len(self._layers)
        attentions = [layer.attention for layer in self._layers]
        groups = kv_cache_config.kv_cache_groups
        group_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        names = [attention.layer_name for attention in attentions]
        self.paged = PagedKV(
            attentions,
            groups[0].kv_cache_spec.block_size,
            [group_of[name] for name in names],
            vllm_config.model_config.dtype,
        )
        self.device, self.dtype = self.paged.device, self.paged.dtype
        self._shared_rotary: SharedRotary | None = None
        if architecture.call is Call.TRANSFORMERS:
            types = config.layer_types if anatomy.rope_by_layer_type else [""] * self.num_layers
            probe = torch.empty(0, dtype=self.dtype, device=self.device)
            tokens = vllm_config.model_config.max_model_len
            rotary = text.model.rotary_emb
            self._shared_rotary = SharedRotary(rotary, types, tokens, probe, interleaved=architecture.interleaved)
        self.rotations = Rotations([self._rotary_of(layer) for layer in range(self.num_layers)])
        builder = attentions[0].get_attn_backend().get_builder_cls()
        self._builders = []
        eager = _without_graphs(vllm_config)
        for group in groups:
            spec = group.kv_cache_spec.copy_with_new_block_size(self.paged.kernel_block)
            self._builders.append((group.layer_names, builder(spec, group.layer_names, eager, self.device)))
        self._built: list[tuple[CommonAttentionMetadata, Any] | None] = [None] * len(groups)
        self._most_rows = vllm_config.scheduler_config.max_num_batched_tokens
        windows = windows_of(attentions)
        sinks = sinks_of(attentions)
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
            done.append(self._embed(token_ids[rows]) * self._embedding_scale)
        return _joined(done)

    def activate(self, positions: torch.Tensor, blocks: RequestBlocks) -> ActiveSet:
        """Prepare a set of positions, `[tokens]` ascending, of the request with those blocks.

        The host reads the positions from the device once; everything about their runs follows from them.
        """
        pieces = []
        where = positions.cpu()
        for rows in self._pieces_by_runs(where):
            batches: list[CommonAttentionMetadata] = []
            slots: dict[str, torch.Tensor] = {}
            runs = _Runs.of(where[rows])
            for table, (names, _) in zip(blocks.tables, self._builders, strict=True):
                own_slots = table.slots(positions[rows])
                batches.append(runs.batch(positions[rows], table, own_slots))
                slots |= dict.fromkeys(names, own_slots)
            pieces.append(Piece(rows, tuple(batches), slots))
        return ActiveSet(positions, tuple(pieces))

    def run(
        self, layer: int, active: ActiveSet, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one whole layer, which writes its KV and attends; `[tokens, hidden]` each.

        `hidden` and `residual` may be overwritten: vLLM's layers work in place. A returned residual is still to be
        added.
        """
        done = []
        for piece in active.pieces:
            rows = piece.rows
            positions = active.positions[piece.rows]
            angles = None if self._shared_rotary is None else self._shared_rotary.angles(layer, positions)
            with self._context(len(positions), piece, (self.paged.groups[layer],)):
                part = None if residual is None else residual[rows]
                done.append(self._layers[layer].run(positions, hidden[rows], part, angles))
        if len(done) == 1:
            return done[0]
        to_add = [part for _, part in done if part is not None]
        return torch.cat([part for part, _ in done]), torch.cat(to_add) if to_add else None

    def attend(
        self, layer: int, active: ActiveSet, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """A layer's attention alone, by vLLM's kernel over the request's blocks, `[tokens, heads * head_dim]`.

        `queries` (scaled as by `qkv`) and the same tokens' `keys` are after RoPE; keys and `values` are written to the
        blocks.
        """
        modules = self._layers[layer]
        done = []
        if modules.query_scale != 1.0:
            queries = queries / modules.query_scale
        for piece in active.pieces:
            rows = piece.rows
            with self._context(rows.stop - rows.start, piece, (self.paged.groups[layer],)):
                row_states = (states[rows].flatten(1) for states in (queries, keys, values))
                done.append(modules.attention(*row_states))
        return _joined(done)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, active: ActiveSet) -> torch.Tensor:
        """The model's own forward of the whole body, `[tokens, hidden]`, for comparison in the start-up check.

        M-RoPE takes three positions of each token; those of text are equal, and its layers take one then.
        """
        (piece,) = active.pieces
        if self._config.model_config.uses_mrope:
            positions = positions.expand(3, -1)
        with self._context(len(token_ids), piece, range(len(self._builders))):
            hidden: torch.Tensor = self._model(token_ids, positions)
        return hidden

    def keys_values(
        self, layer: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh keys before RoPE and values of a layer, `[tokens, kv_heads, head_dim]`; does not mutate its inputs."""
        _, keys, values = self.qkv(layer, hidden if residual is None else hidden + residual)
        return keys, values

    def qkv(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values before RoPE of this rank's heads; queries are scaled as in `DecoderLayers`.

        Accepts no tokens; vLLM's modules are then not called.
        """
        if not len(hidden):
            geometry = self.own_geometry
            none = hidden.new_empty(0, geometry.num_kv_heads, geometry.head_dim)
            return hidden.new_empty(0, geometry.num_heads, geometry.head_dim), none, none.clone()
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
        """The rest of a layer, in pieces that vLLM was sized for. Overwrites `hidden`."""
        done = []
        for rows in self._pieces(len(hidden)):
            with self._context(rows.stop - rows.start):
                done.append(self._layers[layer].finish(hidden[rows], attended[rows]))
        return _joined(done)

    def _rotary_of(self, layer: int) -> Any:
        """The rotary module or table of a layer, None if it does not rotate."""
        modules = self._layers[layer]
        if self._shared_rotary is None or not modules.rotates:
            return modules.rotary
        return self._shared_rotary.table(layer, int(modules.attention.head_size))

    def _pieces(self, rows: int) -> Iterator[slice]:
        """Rows in pieces of at most the size that vLLM was sized for."""
        for start in range(0, rows, self._most_rows):
            yield slice(start, min(start + self._most_rows, rows))

    def _pieces_by_runs(self, where: torch.Tensor) -> Iterator[slice]:
        """Positions `[tokens]`, on the host, in pieces of at most the rows and runs allowed in one call."""
        starts = _starts(where).tolist()
        for rows in self._pieces(len(where)):
            inside = [start for start in starts if rows.start < start < rows.stop]
            cuts = [rows.start, *inside[MOST_RUNS - 1 :: MOST_RUNS], rows.stop]
            yield from (slice(first, stop) for first, stop in pairwise(cuts))

    @contextmanager
    def _context(self, tokens: int, piece: Piece | None = None, groups: Iterable[int] = ()) -> Iterator[None]:
        """The forward context of vLLM's modules; attention needs a `piece`, and the `groups` of its layers."""
        self.adapters.map_rows(tokens)
        metadata: dict[str, Any] = {}
        if piece is not None:
            for group in groups:
                metadata |= dict.fromkeys(self._builders[group][0], self._metadata(group, piece.batches[group]))
        slots = {} if piece is None else piece.slots
        with set_forward_context(metadata, self._config, num_tokens=tokens, slot_mapping=slots, skip_compiled=True):
            yield

    def _metadata(self, group: int, batch: CommonAttentionMetadata) -> Any:
        """The backend's metadata of a batch, valid until another batch of the group is built.

        Metadata may refer to a plan and to buffers of its builder, which the next `build` overwrites (FlashInfer,
        FlexAttention). All pieces and weaves share the builder, and a weave may pause between any two layers. So
        metadata is built right before its use, and used again only if nothing was built since.
        """
        built = self._built[group]
        if built is None or built[0] is not batch:
            self._built[group] = None  # if this build fails, the metadata before it is not valid either
            built = self._built[group] = batch, self._builders[group][1].build(0, batch)
        return built[1]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _without_graphs(config: VllmConfig) -> VllmConfig:
    """The vLLM config for metadata builders of eager passes.

    With CUDA graphs, backends copy metadata to captured addresses, in buffers for `max_num_seqs` requests. These
    builders are separate from vLLM's own, and no graph reads their output.
    """
    eager = copy(config)
    eager.compilation_config = copy(config.compilation_config)
    eager.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    eager.scheduler_config = copy(config.scheduler_config)
    eager.scheduler_config.max_num_seqs = max(MOST_RUNS, config.scheduler_config.max_num_seqs)
    return eager


def _starts(where: torch.Tensor) -> torch.Tensor:
    """Rows at which runs of consecutive positions begin, except the first."""
    return torch.nonzero(where[1:] != where[:-1] + 1).squeeze(1) + 1


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs of consecutive positions, each as a request whose cache ends with it; on the host.

    `starts` `[runs + 1]` are their first rows, and the end; `lengths` `[runs]` are the lengths of the caches.
    """

    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, where: torch.Tensor) -> "_Runs":
        """The runs of positions `[tokens]`, ascending."""
        edge = torch.tensor([0])
        starts = torch.cat((edge, _starts(where), edge + len(where)))
        return cls(starts.to(torch.int32), (where[starts[1:] - 1] + 1).to(torch.int32))

    def batch(self, positions: torch.Tensor, table: BlockTable, slots: torch.Tensor) -> CommonAttentionMetadata:
        """The runs as a vLLM batch; `positions` and their `slots` `[tokens]` are on the device."""
        device = positions.device
        count = len(self.lengths)
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
    """`Ranks` by vLLM's own collectives; all have the same number of query heads, in order."""

    def __init__(self) -> None:
        self._count = get_tensor_model_parallel_world_size()

    def own_heads(self, num_heads: int) -> range:
        """The query heads that this rank computes, of all `num_heads`."""
        share = num_heads // self._count
        rank = get_tensor_model_parallel_rank()
        return range(rank * share, (rank + 1) * share)

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks."""
        total: torch.Tensor = tensor_model_parallel_all_reduce(states.contiguous())
        mean: torch.Tensor = total / self._count
        return mean

    def maximum(self, states: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over the ranks' tensors; gathers all, because there is no such reduction."""
        gathered: torch.Tensor = tensor_model_parallel_all_gather(states.unsqueeze(0).contiguous(), dim=0)
        greatest: torch.Tensor = gathered.amax(0)
        return greatest

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """The norm over all heads, from each rank's. Shared key heads count several times, all equally often."""
        total: torch.Tensor = tensor_model_parallel_all_reduce(norms.square())
        return total.sqrt()
