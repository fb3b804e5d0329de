"""The tensor-parallel ranks that vLLM divides a model over."""

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

from chunkweave.models.ranks import ALONE, Ranks


def ranks_here() -> Ranks:
    """Those of this worker's model."""
    return ALONE if get_tensor_model_parallel_world_size() == 1 else TensorParallelRanks()


class TensorParallelRanks:
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
