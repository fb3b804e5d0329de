"""Train the reader: a small Llama model that answers questions over worlds. Resumable in slices.

    python training/train_reader.py train  --checkpoint FOLDER [--preset cpu|gpu] [--minutes 10] [--steps N]
    python training/train_reader.py test   --checkpoint FOLDER [--contexts 200] [--passages 6]
    python training/train_reader.py export --checkpoint FOLDER --out MODEL_FOLDER

`train` goes on from the checkpoint in FOLDER if there is one, else starts anew; it stops after `--minutes` or at
`--steps`, whichever is first, and on Ctrl-C, and leaves a checkpoint. What a run learns depends on seed, preset and
steps, not on how it is cut into slices.
"""

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from reader_card import write_card
from reader_data import Row, RowMaker, held_out_rows
from reader_model import PRESETS, Batch, Preset, Reader
from reader_scores import decoded_f1, exact_matches
from reader_tokenizer import train_tokenizer, write_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def lr_scale(step: int, preset: Preset) -> float:
    """Warm-up, constant, then linear to zero over the last `decay_share` of the steps."""
    left = (preset.steps - step) / (preset.decay_share * preset.steps)
    return min(1.0, (step + 1) / preset.warmup_steps, max(left, 0.0))


@dataclass(frozen=True, slots=True)
class Run:
    """A training run on disk: its folder and settings."""

    folder: Path
    preset: Preset
    seed: int

    @property
    def weights(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @property
    def record(self) -> Path:
        return self.folder / "run.json"

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, trained on first use."""
        path = self.folder / "tokenizer" / "tokenizer.json"
        if not path.exists():
            write_tokenizer(train_tokenizer(), path.parent)
        return Tokenizer.from_file(str(path))

    def save(self, reader: Reader, progress: dict[str, object]) -> None:
        """Write the checkpoint; the step is in the weights file too, so the two cannot come apart unseen."""
        fresh = self.weights.with_suffix(".tmp")
        save_file(reader.state(), fresh, metadata={"step": str(progress["step"])})
        fresh.replace(self.weights)
        settings = {"preset": asdict(self.preset), "seed": self.seed}
        self.record.write_text(json.dumps(settings | progress, indent=1) + "\n", "utf-8")

    def load(self, device: torch.device, workers: int = 1) -> tuple[Reader, dict[str, object]]:
        """The reader as the checkpoint has it, else a fresh one at step 0."""
        reader = Reader(self.preset, self.tokenizer().get_vocab_size(), device, self.seed, workers=workers)
        if not self.weights.exists():
            return reader, {"step": 0, "tokens": 0, "seconds": 0.0, "hardware": [], "results": {}}
        reader.restore(load_file(self.weights))
        return reader, json.loads(self.record.read_text("utf-8"))


def train(
    run: Run, device: torch.device, minutes: float, evaluate_every: int, stop_at: int | None, workers: int
) -> None:
    """One slice of training."""
    tokenizer = run.tokenizer()
    maker = RowMaker(tokenizer)
    reader, progress = run.load(device, workers)
    begun = saved = time.monotonic()
    step, earlier = int(str(progress["step"])), float(str(progress["seconds"]))
    progress["hardware"] = sorted({*progress["hardware"], _hardware(device, workers)})  # type: ignore[misc]
    held_out = held_out_rows(maker, 24, 6, run.seed)
    recent: list[tuple[float, float]] = []
    try:
        for batch_step, batches in _batches(maker, run, step, device, workers):
            generator = torch.Generator().manual_seed(run.seed * 1_000_003 + batch_step)
            losses = reader.learn(batches, generator, lr_scale(batch_step, run.preset))
            step = batch_step + 1
            recent.append(losses)
            progress |= {
                "step": step,
                "tokens": int(str(progress["tokens"])) + sum(batch.ids.numel() for batch in batches),
                "seconds": round(earlier + time.monotonic() - begun, 1),
            }
            if step % 25 == 0:
                mean = [sum(values) / len(values) for values in zip(*recent, strict=True)]
                print(f"{progress['seconds']:>8} s  step {step}  answers {mean[0]:.3f}  text {mean[1]:.3f}", flush=True)
                recent = []
            if step % evaluate_every == 0:
                _log_matches(reader, held_out)
            if time.monotonic() - saved > 180:
                run.save(reader, progress)
                saved = time.monotonic()
            if time.monotonic() - begun > 60 * minutes or step == stop_at:
                break
    except KeyboardInterrupt:
        print("stopped; the checkpoint holds every whole step")
    run.save(reader, progress)
    print(f"checkpoint at step {step} of {run.preset.steps} in {run.folder}")


def _batches(
    maker: RowMaker, run: Run, first: int, device: torch.device, workers: int
) -> Iterator[tuple[int, list[Batch]]]:
    """Steps and their batches, one a worker; made ahead by a few processes where the device is faster than one."""
    steps = range(first, run.preset.steps)
    if device.type == "cpu":
        made = (maker.batch(run.seed, step, run.preset.step_tokens) for step in steps)
        yield from ((step, _split(rows, device, workers)) for step, rows in zip(steps, made, strict=True))
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        tasks = ((maker, run.seed, step, run.preset.step_tokens) for step in steps)
        for step, rows in zip(steps, pool.imap(_rows, tasks), strict=True):
            yield step, _split(rows, device, workers)


def _split(rows: list[Row], device: torch.device, workers: int) -> list[Batch]:
    return [Batch(rows[part::workers], device) for part in range(min(workers, len(rows)))]


def _rows(task: tuple[RowMaker, int, int, int]) -> list[Row]:
    maker, seed, step, tokens = task
    return maker.batch(seed, step, tokens)


def _log_matches(reader: Reader, rows: Sequence[Row]) -> None:
    for name, alone in (("full", False), ("full-reuse", True)):
        found = exact_matches(reader, rows, alone=alone)
        print(f"  held out, exact match, {name}: " + "  ".join(f"{k} {v:.2f}" for k, v in found.items()), flush=True)


def test(run: Run, device: torch.device, contexts: int, passages: int) -> None:
    """Greedily decoded F1 by kind on held-out worlds; the results go into the run's record, and so into its card."""
    reader, progress = run.load(device)
    tokenizer = run.tokenizer()
    rows = held_out_rows(RowMaker(tokenizer), contexts, passages, run.seed + 1, answer_room=12)
    results = {
        name: decoded_f1(reader, rows, tokenizer, alone=alone)
        for name, alone in (("full", False), ("full-reuse", True))
    }
    for name, scores in results.items():
        print(f"F1, {name}: " + "  ".join(f"{kind} {score:.3f}" for kind, score in scores.items()))
    progress |= {
        "results": results,
        "tested": f"{sum(len(r.answers) for r in rows)} questions over {passages} passages",
    }
    run.save(reader, progress)


def _hardware(device: torch.device, workers: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {workers} workers"


def export(run: Run, out: Path) -> None:
    """Write a Hugging Face model folder: bf16 weights, config, tokenizer, model card."""
    reader, progress = run.load(torch.device("cpu"))
    out.mkdir(parents=True, exist_ok=True)
    reader.model.set_attn_implementation("sdpa")
    reader.model.save_pretrained(out)
    write_tokenizer(run.tokenizer(), out)
    PreTrainedTokenizerFast.from_pretrained(out)
    write_card(
        out / "README.md", asdict(run.preset), run.seed, progress, sum(p.numel() for p in reader.master.values())
    )
    print(f"exported step {progress['step']} to {out}")


def main() -> None:
    """Parse the command line and run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("train", "test", "export"))
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the run")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="default: gpu where there is one, else cpu")
    parser.add_argument("--steps", type=int, help="steps of the whole run; the learning rate falls towards them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of this slice")
    parser.add_argument("--stop-at", type=int, help="end this slice after that step")
    parser.add_argument("--threads", type=int, default=0, help="CPU workers of `train`; 0: as torch finds")
    parser.add_argument("--evaluate-every", type=int, default=250, help="steps between held-out scores")
    parser.add_argument("--contexts", type=int, default=200, help="held-out contexts to test on")
    parser.add_argument("--passages", type=int, default=6, help="passages of a held-out context")
    parser.add_argument("--out", type=Path, help="model folder to export to")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = 1 if device.type == "cuda" else arguments.threads or torch.get_num_threads()
    if arguments.command == "train" and device.type == "cpu":
        torch.set_num_threads(1)
    preset = PRESETS[arguments.preset or ("gpu" if device.type == "cuda" else "cpu")]
    if arguments.steps:
        preset = Preset(**(asdict(preset) | {"steps": arguments.steps}))
    arguments.checkpoint.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.checkpoint, preset, arguments.seed)
    if arguments.command == "train":
        train(run, device, arguments.minutes, arguments.evaluate_every, arguments.stop_at, workers)
    elif arguments.command == "test":
        test(run, device, arguments.contexts, arguments.passages)
    elif arguments.out is None:
        parser.error("export needs --out")
    else:
        export(run, arguments.out)


if __name__ == "__main__":
    main()
