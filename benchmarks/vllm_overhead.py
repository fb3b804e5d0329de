"""What the plug-in costs requests that do not use it: vLLM with the connector against vLLM without, in turn.

    python benchmarks/vllm_overhead.py --out vllm-overhead.json

Needs an environment with vLLM and chunkweave (`make test-vllm` makes one). Every start is a process of its own; within
one, `--repeats` batches of plain requests prefill and decode on a small model of random weights, where vLLM's own work
per step is least and any extra weighs most.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkweave.eval.results import BenchmarkResult, check_writable, write_json
from chunkweave.models.loading import shape_config

BATCH, TOKENS, PROMPT = 8, 64, 256
WITHOUT, WITH = "vLLM alone", "with the plug-in"


def serve(folder: str, contender: str, repeats: int) -> list[float]:
    """Seconds of each batch; runs in a process of its own."""
    from vllm import LLM, SamplingParams

    connector = {"kv_connector": "ChunkweaveConnector", "kv_role": "kv_both"} if contender == WITH else None
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_transfer_config=connector,  # type: ignore[arg-type]
    )
    rng = Random(0)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    times = []
    for _ in range(repeats + 2):
        prompts: Any = [{"prompt_token_ids": [rng.randrange(10, 4000) for _ in range(PROMPT)]} for _ in range(BATCH)]
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        times.append(time.perf_counter() - started)
    return times[2:]


def measure(starts: int, repeats: int) -> dict[str, list[float]]:
    """Alternating starts of both; all their batches' seconds."""
    found: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    with tempfile.TemporaryDirectory() as folder:
        config = shape_config("demo")
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        for start in range(starts):
            for contender in sorted(found, reverse=bool(start % 2)):
                command = [
                    sys.executable,
                    __file__,
                    "--serve",
                    contender,
                    "--folder",
                    folder,
                    "--repeats",
                    str(repeats),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603  (this very file)
                found[contender] += json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="of each")
    parser.add_argument("--repeats", type=int, default=8, help="batches a start, after two that warm up")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.serve:
        print(json.dumps(serve(args.folder, args.serve, args.repeats)))
        return
    if args.out is not None:
        check_writable(args.out)
    found = measure(args.starts, args.repeats)
    base = statistics.median(found[WITHOUT])
    rows = [
        {
            "method": name,
            "batch_median_s": statistics.median(times),
            "batch_min_s": min(times),
            "over_alone": statistics.median(times) / base,
        }
        for name, times in found.items()
    ]
    table = Table(title=f"Plain requests: {BATCH} x ({PROMPT} + {TOKENS}) tokens", title_justify="left")
    for name in ("", "median", "least", "over vLLM alone"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row["method"], f"{row['batch_median_s']:.3f} s", f"{row['batch_min_s']:.3f} s", f"{row['over_alone']:.3f}"
        )
    Console().print(table)
    if args.out is not None:
        config = {"starts": args.starts, "repeats": args.repeats, "batch": BATCH, "tokens": TOKENS, "prompt": PROMPT}
        command = shlex.join(["python", *sys.argv])
        write_json(args.out, BenchmarkResult("vllm-overhead", command, 0, config, rows, {}).as_dict())


if __name__ == "__main__":
    main()
