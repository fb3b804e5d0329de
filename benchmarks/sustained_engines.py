"""The engines of benchmarks/sustained.py: chunkweave's own, and vLLM with the plug-in, behind one Protocol."""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, log
from typing import Any, Protocol

import torch
from transformers import AutoConfig

from chunkweave.config import ReuseConfig, StoreConfig
from chunkweave.engine.engine import Engine
from chunkweave.models.fingerprint import fingerprint_shape
from chunkweave.models.gguf import checkpoint_folder
from chunkweave.models.huggingface import HuggingFaceModel, geometry_of
from chunkweave.models.loading import LoadedModel, bundled_tokenizer, random_model, shape_config
from chunkweave.planning.method import RATIO, make_method, parameters_of
from chunkweave.planning.plan import KVSource
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id
from chunkweave_server.vllm_backend.process import VllmFlags

FULL = "full"
TOP = 20
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Query:
    """Token ids of the documents, in prompt order, and of the question."""

    documents: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds to the first token, the number of reused document tokens, and the token's distribution.

    `likeliest` are the log-probabilities of the `TOP` most likely tokens.
    """

    ttft_s: float
    stored_tokens: int
    likeliest: Mapping[int, float]

    def differs(self, full: "FirstToken") -> float:
        """KL divergence from full prefill's, in nats, over its most likely tokens, with all others as one.

        It is a lower bound if one of them is not among the most likely here: it then gets the lowest of these.
        """
        least = min(self.likeliest.values())
        pairs = [(theirs, self.likeliest.get(token, least)) for token, theirs in full.likeliest.items()]
        rest = [log(max(1e-9, 1 - sum(exp(one) for one in side))) for side in zip(*pairs, strict=True)]
        return sum(exp(theirs) * (theirs - own) for theirs, own in [*pairs, (rest[0], rest[1])])

    @property
    def token(self) -> int:
        """The most likely token."""
        return max(self.likeliest, key=self.likeliest.__getitem__)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model and the bytes for segments.

    The model is pretrained, or has a published geometry cut to `layers` and random weights of `seed`.
    """

    model: str | None
    shape: str
    layers: int
    dtype: str
    budget_bytes: int
    seed: int

    def config(self) -> Any:
        """The Hugging Face configuration."""
        if self.model is not None:
            return AutoConfig.from_pretrained(checkpoint_folder(self.model))
        config = shape_config(self.shape)
        config.num_hidden_layers = self.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: self.layers]
        return config

    def bytes_per_token(self) -> int:
        """KV bytes of one token."""
        return geometry_of(self.config()).kv_elements_per_token() * _BYTES[self.dtype]


class Served(Protocol):
    """An engine with a store that is kept over many queries."""

    def first_token(self, query: Query, method: str) -> FirstToken:
        """Serve one query by `method`, and store its segments (`full` neither reuses nor stores)."""


class OwnEngine:
    """chunkweave's own engine."""

    def __init__(self, sizes: Sizes, recompute_ratio: float) -> None:
        store = StoreConfig(sizes.budget_bytes)
        if sizes.model is not None:
            self._engine = Engine.load(sizes.model, dtype=sizes.dtype, store=store)
        else:
            config = sizes.config()
            model = random_model(config, dtype=getattr(torch, sizes.dtype), device="cpu", seed=sizes.seed)
            fingerprint = fingerprint_shape(config, sizes.dtype, sizes.seed)
            loaded = LoadedModel(HuggingFaceModel(model), bundled_tokenizer(), fingerprint, sizes.shape)
            self._engine = Engine(loaded, store=store)
        self._reuse = ReuseConfig(recompute_ratio=recompute_ratio)

    def first_token(self, query: Query, method: str) -> FirstToken:
        prompt = self._prompt(query)
        started = time.perf_counter()
        prefilled = self._engine.runner.prefill(prompt, make_method(method, self._reuse), capture=method != FULL)
        int(prefilled.logits.argmax())
        ttft_s = time.perf_counter() - started
        logs, tokens = prefilled.logits.float().flatten().log_softmax(-1).topk(TOP)
        if method != FULL:
            self._engine.runner.store_new(prefilled)
        plan = prefilled.plan
        stored = plan.tokens(KVSource.EXACT) + plan.tokens(KVSource.REUSED)
        return FirstToken(ttft_s, stored, dict(zip(tokens.tolist(), logs.tolist(), strict=True)))

    def close(self) -> None:
        """Audit and close the store."""
        self._engine.store.check()
        self._engine.close()

    def _prompt(self, query: Query) -> Prompt:
        documents = [PromptPart(PartKind.CHUNK, ids, chunk_id("sustained", "", ids)) for ids in query.documents]
        return Prompt((*documents, PromptPart(PartKind.QUESTION, query.question)))


class VllmEngine:
    """vLLM in this process, with the plug-in."""

    def __init__(self, folder: str, sizes: Sizes, max_tokens: int, recompute_ratio: float) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        self._ratio = recompute_ratio
        self._sent = 0

        async def start() -> Any:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy" if sizes.model is None else "auto",
                    seed=sizes.seed,
                    dtype=sizes.dtype,
                    max_model_len=max_tokens,
                    enforce_eager=True,
                    kv_transfer_config={  # type: ignore[arg-type]
                        "kv_connector": "ChunkweaveConnector",
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": {"host_budget": str(sizes.budget_bytes)},
                    },
                )
            )

        self._engine = self._loop.run_until_complete(start())

    def first_token(self, query: Query, method: str) -> FirstToken:
        return self._loop.run_until_complete(self._first_token(query, method))

    async def _first_token(self, query: Query, method: str) -> FirstToken:
        from vllm import SamplingParams

        self._sent += 1
        ids: list[int] = []
        spans = []
        for document in query.documents:
            spans.append([len(ids), len(ids) + len(document)])
            ids += document
        prompt: dict[str, Any] = {"prompt_token_ids": [*ids, *query.question]}
        extra = None
        if method == FULL:
            prompt["cache_salt"] = f"only-{self._sent}"
        else:
            params: dict[str, Any] = {"chunks": spans, "method": method}
            if RATIO in parameters_of(method):
                params[RATIO] = self._ratio
            extra = {"kv_transfer_params": {"chunkweave": params}}
        sampling = SamplingParams(
            max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, logprobs=TOP, extra_args=extra
        )
        started, ended, answer = time.perf_counter(), 0.0, None
        async for output in self._engine.generate(prompt, sampling, f"r{self._sent}"):
            ended = ended or time.perf_counter()
            answer = output
        assert answer is not None
        report = (answer.kv_transfer_params or {}).get("chunkweave", {})
        if "error" in report:
            raise RuntimeError(report["error"])
        found = ("prefix_exact_tokens", "reused_tokens", "recomputed_tokens")
        likeliest = {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}
        return FirstToken(ended - started, sum(report.get(name, 0) for name in found), likeliest)

    def close(self) -> None:
        """End vLLM's processes."""
        self._engine.shutdown()
        self._loop.close()


@contextmanager
def opened(engine: str, sizes: Sizes, max_tokens: int, recompute_ratio: float) -> Iterator[Served]:
    """The engine of that name, `own` or `vllm`, with an empty store."""
    if engine == "own":
        own = OwnEngine(sizes, recompute_ratio)
        yield own
        own.close()
        return
    with tempfile.TemporaryDirectory() as folder:
        if sizes.model is not None:
            folder = VllmFlags(sizes.model).source
        else:
            config = sizes.config()
            config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
            config.save_pretrained(folder)
        vllm = VllmEngine(folder, sizes, max_tokens, recompute_ratio)
        try:
            yield vllm
        finally:
            vllm.close()
