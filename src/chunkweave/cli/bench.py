"""`chunkweave bench`: benchmarks."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chunkweave.cli import options
from chunkweave.cli.bench_loading import loading
from chunkweave.cli.bench_quality import quality
from chunkweave.cli.console import Output, progress, stderr
from chunkweave.cli.model_choice import ModelChoice
from chunkweave.cli.tables import size, ttft_table
from chunkweave.config import DEFAULT_RECOMPUTE_RATIO
from chunkweave.errors import UsageError
from chunkweave.eval.bundled import bundled_examples
from chunkweave.eval.datasets import load_dataset
from chunkweave.eval.results import BenchmarkResult, peak_rss_bytes
from chunkweave.eval.ttft_table import summarize

if TYPE_CHECKING:
    from chunkweave.engine.engine import Engine
    from chunkweave.eval.ttft import Sample, TtftConfig, Workload

app = typer.Typer(no_args_is_help=True, help="Measure reuse methods against each other.")

app.command()(quality)
app.command()(loading)


@app.command()
def ttft(
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="MuSiQue JSON, SQuAD 1.1 JSON, or JSONL of {question, chunks, answers}; bundled documents if left out."
        ),
    ] = None,
    model: options.Model = None,
    shape: options.Shape = None,
    methods: Annotated[
        str, typer.Option(help="Reuse methods, separated by commas; `full` is always added as the reference.")
    ] = "prefix,full-reuse,cacheblend",
    recompute_ratio: options.RecomputeRatio = DEFAULT_RECOMPUTE_RATIO,
    chunks: Annotated[int, typer.Option(help="Chunks of a prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of every chunk; 0 leaves passages as they are.")] = 512,
    warm: Annotated[str, typer.Option(help="`alone`, or `queries:N` by N earlier requests.")] = "alone",
    questions: Annotated[int, typer.Option(help="Questions that are measured.")] = 10,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of PyTorch; its own choice if left out.")] = None,
    hf_reference: Annotated[bool, typer.Option(help="Measure the Hugging Face forward too.")] = True,
    store_budget: options.StoreBudget = options.DEFAULT_STORE_BUDGET,
    cache_dir: options.CacheDir = None,
    disk_budget: options.DiskBudget = options.DEFAULT_DISK_BUDGET,
    remote_url: options.RemoteUrl = None,
    codec: options.Codec = "raw",
    ttl: options.Ttl = None,
    json: options.Json = False,
    out: options.Out = None,
) -> None:
    """Time to first token by reuse method: alternating contenders, one warm store, the same token ids for all."""
    output = Output(json, out)
    choice = ModelChoice(model, shape, device, dtype, seed)
    store = options.store_config(
        store_budget=store_budget,
        cache_dir=cache_dir,
        disk_budget=disk_budget,
        remote_url=remote_url,
        codec=codec,
        ttl=ttl,
    )
    set_threads(threads)
    from chunkweave.eval.ttft import TtftConfig, Warmth, make_workload

    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    config = TtftConfig(names, recompute_ratio, chunks, chunk_tokens, Warmth.parse(warm), questions, seed, hf_reference)
    examples = (
        load_dataset(dataset, seed=seed)
        if dataset is not None
        else bundled_examples(config.warm.queries + questions, seed=seed)
    )
    origin = {"model": choice.name, "dataset": str(dataset or "bundled documents"), **options.kept(store)}
    with choice.open(store=store) as engine:
        workload = make_workload(examples, engine, config)
        run = TtftRun(engine, config, origin)
        try:
            run.measure(workload)
        except KeyboardInterrupt:
            if run.samples:
                stderr().print("interrupted: the result covers the questions measured so far")
                _show(run, output, complete=False)
            raise
        _show(run, output, complete=True)


def set_threads(threads: int | None) -> None:
    """Bound the CPU threads of PyTorch.

    Raises:
        UsageError: less than one thread.
    """
    if threads is None:
        return
    if threads < 1:
        raise UsageError(f"threads must be at least 1, not {threads}")
    import torch

    torch.set_num_threads(threads)


class TtftRun:
    """One measurement on its way from samples to a table and a file. `samples` are those of the questions done."""

    def __init__(self, engine: "Engine", config: "TtftConfig", origin: dict[str, Any]) -> None:
        self._engine = engine
        self._config = config
        self._origin = origin
        self.samples: list[Sample] = []

    def measure(self, workload: "Workload") -> None:
        """Measure all questions behind a progress bar; interrupted, `samples` keeps what is done."""
        from chunkweave.eval.ttft import measure

        with progress("measuring") as report:
            for sample in measure(self._engine, workload, self._config, report):
                self.samples.append(sample)

    def result(self, *, complete: bool = True) -> dict[str, Any]:
        """The JSON object that docs/benchmarks.md describes."""
        samples = [
            {"question": sample.question, "method": sample.method, "ttft_s": sample.ttft_s} for sample in self.samples
        ]
        return BenchmarkResult(
            benchmark="ttft",
            command=options.command_line(),
            seed=self._config.seed,
            config={**asdict(self._config), **self._origin, **self._resolved()},
            rows=[row.as_dict() for row in summarize(self.samples)],
            more={"store": self._store(), "peak_rss_bytes": peak_rss_bytes(), "samples": samples},
            complete=complete,
        ).as_dict()

    def table(self, result: dict[str, Any]) -> Table:
        """The result for people."""
        config, store = result["config"], result["store"]
        size_of_one = f"{config['chunk_tokens']} tokens" if config["chunk_tokens"] else "whole passages"
        title = (
            f"{config['model']}, {config['chunks']} x {size_of_one}, recompute ratio "
            f"{config['recompute_ratio']:g}, warm {config['warm']}"
        )
        caption = (
            f"{result['rows'][0]['questions']} questions, {config['device']}, {config['dtype']}, threads: "
            f"{config['threads']}. Speed-up: median over questions of full / method. Limit: the same if time were "
            f"FLOPs.\nStore {size(store['bytes'])} of {size(store['budget_bytes'])}, {store['evictions']} evictions, "
            f"peak memory {size(result['peak_rss_bytes'])}."
        )
        return ttft_table(summarize(self.samples), title, caption)

    def _resolved(self) -> dict[str, Any]:
        """What "auto" became, and what JSON cannot hold as it is."""
        import torch

        model = self._engine.loaded.model
        return {
            "warm": str(self._config.warm),
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def _store(self) -> dict[str, int]:
        store = self._engine.store
        stats = store.stats
        return {
            "bytes": stats.bytes,
            "budget_bytes": store.budget_bytes,
            "segments": stats.segments,
            "evictions": stats.evictions,
        }


def _show(run: TtftRun, output: Output, *, complete: bool) -> None:
    result = run.result(complete=complete)
    output.show(run.table(result))
    output.finish(result)
