"""Full prefill on our layer loop against the Hugging Face forward with SDPA, on the same ids.

    PYTHONPATH=src python benchmarks/gpu/full_prefill.py --shape llama-3-8b --out full-prefill.json

The two alternate. `of_hf` above 1 means that ours is slower; `tflop_per_s` is our rate over the operations needed.
"""

from statistics import median
from typing import Any

import torch
from bench_setup import Report, as_row, ceilings, load_model, parse, parser_of, prompt_of, runner_over, seconds

from chunkweave.config import ComputeConfig
from chunkweave.planning.method import make_method
from chunkweave.planning.outcome import full_prefill_flops
from chunkweave.tiers.host import HostTier


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    arguments = parse(parser, shape="demo", contexts=[64])
    report = Report("full-prefill", arguments)
    report.more["ceilings"] = as_row(ceilings(arguments))
    model = load_model(arguments.shape, arguments, max(arguments.contexts) + 64)
    runner = runner_over(model, "host", HostTier(), ComputeConfig())
    for context in arguments.contexts:
        prompt = prompt_of(1, context - 33)
        ids = torch.tensor([prompt.token_ids], device=arguments.device)

        def ours(prompt=prompt) -> int:
            return int(runner.prefill(prompt, make_method("full"), capture=False).logits.argmax())

        @torch.inference_mode()
        def theirs(ids=ids) -> int:
            return int(model.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

        def row(ours=ours, theirs=theirs, prompt=prompt) -> dict[str, Any]:
            pairs = [
                (seconds(ours, arguments.device, repeats=1), seconds(theirs, arguments.device, repeats=1))
                for _ in range(arguments.repeats)
            ]
            ours_s, theirs_s = (median(times) for times in zip(*pairs, strict=True))
            return {
                "ours_ms": ours_s * 1e3,
                "hf_ms": theirs_s * 1e3,
                "of_hf": ours_s / theirs_s,
                "tflop_per_s": full_prefill_flops(model.geometry, len(prompt)) / ours_s / 1e12,
                "same_token": ours() == theirs(),
            }

        report.measure(row, shape=arguments.shape, context=len(prompt))
    report.finish()


if __name__ == "__main__":
    main()
