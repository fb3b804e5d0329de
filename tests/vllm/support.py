"""What of vLLM the plug-in was tried with: the source of the table in docs/vllm.md (`results_check.py --update`).

Tests of this folder try what is `TRIED`, and show the reason of what is `REFUSED`; `test_check.py` holds both to it.
"""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    TRIED = "woven"
    UNTRIED = "built, not tried"
    REFUSED = "not woven"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag or feature of vLLM's; `test` is the test file that tries it or shows the refusal."""

    name: str
    verdict: Verdict
    test: str
    note: str = ""


FLAGS = (
    Flag("`--tensor-parallel-size`", Verdict.TRIED, "test_numerics.py", "two ranks, Llama; not Cohere's classes"),
    Flag("`--pipeline-parallel-size`", Verdict.REFUSED, "test_unsupported.py"),
    Flag(
        "`--data-parallel-size`",
        Verdict.TRIED,
        "test_unsupported.py",
        "not mixtures of experts; 0.33 wants a CPU memory node per rank",
    ),
    Flag("context parallelism", Verdict.REFUSED, "test_unsupported.py"),
    Flag(
        "`--enable-prefix-caching`, `--enable-chunked-prefill`, `--async-scheduling`, preemption, abort, `n`",
        Verdict.TRIED,
        "test_preemption.py",
    ),
    Flag("`torch.compile`, `--enforce-eager`", Verdict.TRIED, "test_numerics.py"),
    Flag("`--enable-lora`", Verdict.TRIED, "test_adapters.py"),
    Flag("`--enable-sleep-mode`, `/reset_prefix_cache`", Verdict.TRIED, "test_life_cycle.py"),
    Flag(
        "`--speculative-config`",
        Verdict.TRIED,
        "test_speculation.py",
        "`ngram`, `suffix`; not draft models, EAGLE, MTP",
    ),
    Flag(
        "`--kv-cache-dtype`",
        Verdict.TRIED,
        "test_quantized_cache.py",
        "`fp8`, with `codec` `raw`, no device tier",
    ),
    Flag(
        "`--quantization`",
        Verdict.TRIED,
        "test_quantized_weights.py",
        "AWQ, GPTQ, int8 of compressed-tensors; others not tried",
    ),
    Flag("`--scheduling-policy priority`", Verdict.TRIED, "test_sharing.py"),
    Flag("`MultiConnector`", Verdict.REFUSED, "test_unsupported.py"),
    Flag(
        "`--attention-backend`",
        Verdict.UNTRIED,
        "test_backend_contract.py",
        "FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION, CPU_ATTN; no other",
    ),
    Flag("`--kv-events-config`", Verdict.TRIED, "test_kv_events.py"),
    Flag("LongRoPE", Verdict.TRIED, "test_families.py", "if `--max-model-len` ends before it sets in"),
)

NOT_WOVEN = (
    "MLA (DeepSeek, Kimi): latents, no keys of heads before RoPE",
    "linear attention and Mamba (hybrid): a state of all earlier tokens",
    "sparse attention by an index",
    "queries scaled by position, dynamic NTK, Cohere 2",
    "prompts with an image, which vLLM serves alone",
    "all other classes",
)
"""Kinds of models that are refused, and why."""
