r"""What vLLM's fp8 KV cache and n-gram drafts change in answers, beside what weaving and the batch size change.

    python benchmarks/vllm_flags.py --dataset xquad.en.json --questions 20 --work flags --out vllm-flags.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). One engine after the other answers the same
prompts by the same methods; each chunk was computed alone before. An engine's answers are kept in `--work`, so a run
that was interrupted continues where it stopped. Modes:

- `plain`: the model's dtype, one request at a time; `plain again`: the same in a new process;
- `pairs`: the same, two questions at a time, as another batch size rounds sums differently;
- `ngram`: with n-gram drafts of `--drafts` tokens;
- `fp8_e4m3`, `fp8_e5m2`: with that KV cache. A chunk's keys are turned to their position in float32 and rounded once.

Of each mode and method: the share of whole greedy answers (`--new-tokens`) that equal `plain`'s, and the KL of the
first token's distribution, in nats: from the same mode's full prefill (what weaving changes there), and from `plain`'s
by the same method (what the mode changes; for a woven answer with rotation).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_program import parse, prepare_vllm, settings, write
from docs_tables import markdown_table
from rich.console import Console

from chunkweave.calibration.summaries import mean_interval
from chunkweave.prompt.builder import PromptBuilder
from chunkweave.prompt.parts import PartKind, Prompt
from chunkweave.prompt.template import template_for
from chunkweave_lab.datasets import read_dataset
from chunkweave_server.vllm_backend.prepare import load_tokenizer
from chunkweave_server.vllm_backend.process import VllmFlags

MODES = ("plain", "plain again", "pairs", "ngram", "fp8_e4m3", "fp8_e5m2")
METHODS: dict[str, dict[str, Any]] = {
    "full-reuse": {"method": "full-reuse"},
    "cacheblend": {"method": "cacheblend", "recompute_ratio": 0.15},
    "full": {"method": "full"},
}
"""`full` is last: it stores the prompt exactly, and the others would find that."""
SLACK = 64


def prompts_of(args: argparse.Namespace, source: str) -> list[Prompt]:
    """The prompts of the questions, in the model's chat template."""
    tokenizer = load_tokenizer(source, {})
    builder = PromptBuilder(tokenizer, template_for(tokenizer), "flags")
    examples = read_dataset(Path(args.dataset), count=args.questions, chunks=args.chunks, seed=args.seed)
    return [builder.build(example.question, example.chunks) for example in examples[: args.questions]]


def engine_of(args: argparse.Namespace, source: str, most_tokens: int) -> Any:
    """An engine of the mode `args.serve`."""
    from vllm import LLM

    mode: dict[str, Any] = {}
    if args.serve == "ngram":
        mode["speculative_config"] = {"method": "ngram", "num_speculative_tokens": args.drafts}
    elif args.serve.startswith("fp8"):
        mode["kv_cache_dtype"] = args.serve
    connector: Any = {"kv_connector": "ChunkweaveConnector", "kv_role": "kv_both"}
    return LLM(
        source,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=most_tokens + args.new_tokens + SLACK,
        enforce_eager=True,
        max_logprobs=-1,
        kv_transfer_config=connector,
        **mode,
    )


def generate(
    engine: Any, ids: Sequence[Sequence[int]], params: Sequence[dict[str, Any]], tokens: int, top: int | None = None
) -> list[Any]:
    """Outputs of these prompts at once, each with its request to the plug-in."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            max_tokens=tokens,
            temperature=0,
            logprobs=top,
            detokenize=False,
            extra_args={"kv_transfer_params": {"chunkweave": one}},
        )
        for one in params
    ]
    return list(engine.generate([{"prompt_token_ids": list(one)} for one in ids], sampling, use_tqdm=False))


def answers(engine: Any, prompts: Sequence[Prompt], new_tokens: int) -> list[dict[str, Any]]:
    """For each prompt, by method, the first token's log-probabilities, the answer, and the number of reused tokens."""
    chunks = [part.token_ids for prompt in prompts for part in prompt.parts if part.kind is PartKind.CHUNK]
    for chunk in chunks:
        alone = {"chunks": [[0, len(chunk)]], "start_tokens": 0, "method": "prefix"}
        generate(engine, [chunk], [alone], 1)
    found: list[dict[str, Any]] = [{} for _ in prompts]
    ids = [prompt.token_ids for prompt in prompts]
    for name, method in METHODS.items():
        params = [{"chunks": chunks_of(prompt), "start_tokens": 0, **method} for prompt in prompts]
        begun = generate(engine, ids, params, 1, -1)
        whole = generate(engine, ids, params, new_tokens)
        for one, first, answer in zip(found, begun, whole, strict=True):
            (row,) = first.outputs[0].logprobs
            report = answer.kv_transfer_params["chunkweave"]
            one[f"{name} logprobs"] = np.array([row[token].logprob for token in range(len(row))], "f4")
            one[f"{name} answer"] = np.array(answer.outputs[0].token_ids)
            one[f"{name} reused"] = np.array(report["reused_tokens"] + report["recomputed_tokens"])
    return found


def serve(args: argparse.Namespace) -> None:
    """Main function of an engine's process: answers all questions that have no file yet."""
    source = VllmFlags(args.model).source
    prompts = prompts_of(args, source)
    engine = engine_of(args, source, max(map(len, prompts)))
    size = 2 if args.serve == "pairs" else 1
    for first in range(0, len(prompts), size):
        files = [file_of(args, args.serve, number) for number in range(first, min(first + size, len(prompts)))]
        if all(file.exists() for file in files):
            continue
        for file, one in zip(files, answers(engine, prompts[first : first + size], args.new_tokens), strict=True):
            partial = file.with_suffix(".partial.npz")
            np.savez(partial, **one)
            partial.rename(file)
        print(json.dumps({"mode": args.serve, "answered": first + len(files)}), flush=True)


def chunks_of(prompt: Prompt) -> list[list[int]]:
    """Positions of the parts that are stored, as the plug-in takes them."""
    spans = zip(prompt.parts, prompt.spans(), strict=True)
    return [[span.start, span.stop] for part, span in spans if part.kind is PartKind.CHUNK]


def file_of(args: argparse.Namespace, mode: str, number: int) -> Path:
    """The file of one mode's answers to one question."""
    return Path(args.work) / f"{mode.replace(' ', '-')}-{number}.npz"


def divergence(of: np.ndarray, other: np.ndarray) -> float:
    """KL of two rows of log-probabilities, in nats."""
    return float(np.sum(np.exp(of, dtype="f8") * (of.astype("f8") - other)))


def rows_of(args: argparse.Namespace, modes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each mode and method, over the questions that all modes have answered."""
    found = {mode: [np.load(file_of(args, mode, number)) for number in range(args.questions)] for mode in modes}
    rows: list[dict[str, Any]] = []
    for mode, answers in found.items():
        for name in METHODS:
            probs = f"{name} logprobs"
            within = [divergence(one["full logprobs"], one[probs]) for one in answers]
            from_plain = [divergence(a[probs], b[probs]) for a, b in zip(found["plain"], answers, strict=True)]
            same = [
                float(np.array_equal(a[f"{name} answer"], b[f"{name} answer"]))
                for a, b in zip(found["plain"], answers, strict=True)
            ]
            rows.append(
                {
                    "mode": mode,
                    "method": name,
                    "questions": len(answers),
                    "same_answers": sum(same),
                    "kl_to_its_full": vars_of(within),
                    "kl_to_plain": vars_of(from_plain),
                    "reused_tokens": [int(one[f"{name} reused"]) for one in answers],
                }
            )
    return rows


def vars_of(values: Sequence[float]) -> dict[str, float]:
    """Mean and 95 % interval over questions."""
    found = mean_interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def table_of(result: dict[str, Any]) -> str:
    """The table of a result: a row for each mode, whose values are those of the methods in order."""
    by_mode: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_mode.setdefault(row["mode"], []).append(row)

    def shown(rows: Sequence[dict[str, Any]], name: str, digits: int) -> str:
        return ", ".join(f"{row[name]['mean']:.{digits}f}" for row in rows)

    cells = [
        [
            mode,
            ", ".join(f"{row['same_answers']:.0f}" for row in rows),
            shown([row for row in rows if row["method"] != "full"], "kl_to_its_full", 3),
            shown(rows, "kl_to_plain", 4),
        ]
        for mode, rows in by_mode.items()
        if mode != "plain again"
    ]
    heads = ["mode", f"same answers ({', '.join(METHODS)})", "KL to full", "to plain"]
    return markdown_table(heads, cells)


def tables(result: dict[str, Any]) -> dict[str, str]:
    """The tables of a result for the documentation."""
    return {"vllm-flags": table_of(result)}


def main() -> None:
    """Parse the command line, run the engines, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--work", type=Path, required=True, help="folder of the answers so far")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parse(parser)
    prepare_vllm()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.serve:
        serve(args)
        return
    for mode in args.modes:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--serve", mode], check=True)  # noqa: S603  (itself)
    rows = rows_of(args, args.modes)
    Console().print(table_of({"rows": rows}))
    write("vllm-flags", args, settings(args, "serve", "seed", "work", "modes"), rows)


if __name__ == "__main__":
    main()
