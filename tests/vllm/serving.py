"""A vLLM engine and what tests ask of it."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams, envs
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

from tests.vllm.checkpoints import VOCAB
from tests.vllm.environment import ENVIRONMENT
from tests.vllm.method_files import METHOD_FILES

_freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None
"""An engine in this process collects garbage six times while it starts and ends: of what came with it alone."""

WIDE: bool = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
"""Whether this CPU has AVX-512. Without it, vLLM has no KV caches of 8 bits and no weights of 4 bits."""


@dataclass(frozen=True)
class Ask:
    """One request: token ids and, unless it is plain, the value of `kv_transfer_params["chunkweave"]`."""

    ids: Sequence[int]
    params: Any = None
    tokens: int = 1
    top: int | None = VOCAB
    lora: LoRARequest | None = None
    salt: str | None = None

    @property
    def prompt(self) -> TokensPrompt:
        """As vLLM takes it."""
        salt: Any = {} if self.salt is None else {"cache_salt": self.salt}
        return TokensPrompt(prompt_token_ids=list(self.ids), **salt)


@dataclass(frozen=True)
class Got:
    """The answer: its tokens, log-probabilities `[tokens, vocab]`, and what the plug-in reported of it.

    Of a request that asked for the `top` few, or none, the others are NaN.
    """

    tokens: list[int]
    log_probs: torch.Tensor
    report: dict[str, Any] | None


class Served:
    """One engine in processes of its own; `options` go to vLLM."""

    def __init__(
        self, folder: Path, *, extra: dict[str, Any] | None = None, plugged: bool = True, **options: Any
    ) -> None:
        if plugged:
            options["kv_transfer_config"] = {
                "kv_connector": "ChunkweaveConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"method_file": METHOD_FILES, **(extra or {})},
            }
            options["worker_extension_cls"] = "tests.vllm.worker_probe.WorkerProbe"
        _freeze()
        self.llm = LLM(
            str(folder),
            **{
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "max_model_len": 1024,
                "num_gpu_blocks_override": 256,
                "block_size": 32,
                "enforce_eager": True,
                "max_logprobs": VOCAB,
                "disable_log_stats": False,
                **options,
            },
        )
        self._sent = 0

    def answer(self, *asks: Ask) -> list[Got]:
        """All requests at once."""
        prompts = [ask.prompt for ask in asks]
        adapters = [ask.lora for ask in asks]
        outputs = self.llm.generate(prompts, [sampling(ask) for ask in asks], lora_request=adapters, use_tqdm=False)
        return [got(output) for output in outputs]

    def one(self, ids: Sequence[int], params: Any = None, tokens: int = 1) -> Got:
        """One request alone."""
        return self.answer(Ask(ids, params, tokens))[0]

    def send(self, ask: Ask, *, priority: int = 0) -> str:
        """Add a request to the engine without waiting for it; returns its id."""
        self._sent += 1
        name = f"test-{self._sent}"
        engine = self.llm.llm_engine
        engine.add_request(name, ask.prompt, sampling(ask), lora_request=ask.lora, priority=priority)
        return name

    def abort(self, *names: str) -> None:
        self.llm.llm_engine.abort_request(list(names))

    def step(self) -> dict[str, Got]:
        """What has finished since the last step."""
        return {output.request_id: got(output) for output in self.llm.llm_engine.step() if output.finished}

    @property
    def busy(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def finish(self) -> dict[str, Got]:
        """Step until nothing is left to do; what has finished."""
        answers: dict[str, Got] = {}
        while self.busy:
            answers |= self.step()
        return answers

    def worker(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the probe in every worker."""
        return self.llm.collective_rpc(method, args=args)

    @contextmanager
    def broken_layer(self, layer: int) -> Iterator[None]:
        """Within the block, reading that layer of any segment fails, as a corrupt file would."""
        self.worker("chunkweave_break_layer", layer)
        try:
            yield
        finally:
            self.worker("chunkweave_break_layer", None)

    def blocks_are_free(self) -> bool:
        """Whether no request holds a block once what was computed is copied; forgets vLLM's own prefix cache."""
        return self.steps_until(self.llm.reset_prefix_cache)

    def steps_until(self, holds: Callable[[], bool], timeout_s: float = 20.0) -> bool:
        """Run steps, in which the scheduler hears what is stored, until it `holds`; False if it never does."""
        until = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > until:
                return False
            self.one([1])
        return True

    def metric(self, name: str) -> float:
        """Value of one of vLLM's counters or gauges."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            destroy_model_parallel()
            destroy_distributed_environment()


IN_PROCESS: dict[str, Any] = {
    "distributed_executor_backend": "uni",
    "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
"""Options for an engine in this process, which starts sooner. One at a time."""
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@contextmanager
def serving(folder: Path, *, environment: dict[str, str] | None = None, **options: Any) -> Iterator[Served]:
    """An engine for the duration of a block, with the environment that its processes start in.

    Skips the test if vLLM refuses its KV cache on this CPU.
    """
    if not WIDE and str(options.get("kv_cache_dtype", "")).startswith("fp8"):
        pytest.skip("vLLM has no KV caches of 8 bits on a CPU without AVX-512")
    wanted = {**ENVIRONMENT, **(environment or {})}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        served = Served(folder, **options)
        try:
            yield served
        finally:
            served.close()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def sampling(ask: Ask) -> SamplingParams:
    extra = None if ask.params is None else {"kv_transfer_params": {"chunkweave": ask.params}}
    return SamplingParams(
        max_tokens=ask.tokens, temperature=0, logprobs=ask.top, detokenize=False, ignore_eos=True, extra_args=extra
    )


def alike(got: Got, wanted: Got, tolerance: float = 5e-4) -> None:
    """Assert the same tokens, each with its log-probability; `wanted` need not have those of others."""
    assert got.tokens == wanted.tokens
    best = wanted.log_probs.nan_to_num(-1e9).argmax(-1, keepdim=True)
    assert (got.log_probs - wanted.log_probs).gather(1, best).abs().max().item() <= tolerance


def got(output: Any) -> Got:
    (answer,) = output.outputs
    rows = torch.full((len(answer.token_ids), VOCAB), float("nan"))
    for row, entries in zip(rows, answer.logprobs or [{}] * len(rows), strict=True):
        row[list(entries)] = torch.tensor([entry.logprob for entry in entries.values()])
    report = (output.kv_transfer_params or {}).get("chunkweave")
    return Got(list(answer.token_ids), rows, report)
