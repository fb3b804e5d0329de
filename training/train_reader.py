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
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from reader_card import write_card
from reader_data import Row, RowMaker, held_out_rows
from reader_tokenizer import train_tokenizer, write_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of the model and of a step. `steps` is where the learning rate has come down to nothing."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    step_tokens: int
    steps: int
    matrix_lr: float = 0.02
    other_lr: float = 0.003
    warmup_steps: int = 30
    decay_share: float = 0.3
    text_share: float = 0.25
    text_weight: float = 0.5


PRESETS = {
    "cpu": Preset(192, 512, 8, 3, 1, step_tokens=4096, steps=4000),
    "gpu": Preset(384, 1024, 12, 6, 2, step_tokens=65536, steps=6000),
    "test": Preset(32, 64, 2, 2, 1, step_tokens=512, steps=4),
}


class Batch:
    """Rows as tensors on a device: contexts padded to one length, then their questions padded to one length.

    `attention` is `[rows, 1, queries, tokens]`, 0 or very negative, for the questions' tokens alone: they see their
    context and themselves. The context before them is causal, see `_split_attention`. With `alone`, it is for all
    tokens, and a chunk sees BOS and itself only: what full KV reuse makes of it.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device, *, alone: bool = False) -> None:
        self.context = max(row.context for row in rows)
        longest = self.context + max(len(row) - row.context for row in rows)
        self.length = longest + (-longest) % 16
        self._rows = rows
        self.ids = self._table([row.ids for row in rows], 2).to(device)
        self.positions = self._table([row.positions for row in rows], 0).to(device)
        owners = self._table([row.owners for row in rows], -1).to(device)
        self.is_text = owners == 0
        self.is_answer = self._table([row.weights for row in rows], 0).to(device) > 0
        order = torch.arange(self.length, device=device)
        first = 0 if alone else self.context
        seen = (owners[:, None, :] == 0) | (owners[:, None, :] == owners[:, first:, None])
        seen &= order[None, :] <= order[first:, None]
        if alone:
            chunks = self._table([row.chunks for row in rows], -1).to(device)
            seen &= (chunks[:, :, None] <= 0) | (chunks[:, None, :] == chunks[:, :, None]) | (order == 0)
        bias = torch.zeros(seen.shape, dtype=torch.bfloat16, device=device)
        self.attention = bias.masked_fill_(~seen, -30000.0)[:, None]

    def place(self, row: Row, index: int) -> int:
        """Where token `index` of a row stands in the batch."""
        return index if index < row.context else index - row.context + self.context

    def _table(self, lists: Sequence[Sequence[float]], fill: int) -> Tensor:
        padded = []
        for row, values in zip(self._rows, lists, strict=True):
            context, rest = values[: row.context], values[row.context :]
            gap, end = self.context - len(context), self.length - self.context - len(rest)
            padded.append([*context, *[fill] * gap, *rest, *[fill] * end])
        return torch.tensor(padded, dtype=torch.long)


def _split_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Attention of `[rows, heads, tokens, head_dim]`; tokens before the mask's queries are causal among themselves.

    Two calls cost about half of one with a full mask: the fast kernels skip what a causal flag excludes.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    context = query.shape[2] - attention_mask.shape[2]
    attend = nn.functional.scaled_dot_product_attention
    parts = [attend(query[:, :, context:], key, value, attn_mask=attention_mask)]
    if context:
        before = (tensor[:, :, :context] for tensor in (query, key, value))
        parts.insert(0, attend(*before, is_causal=True))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("reader_split", _split_attention)


class Reader:
    """The model in bf16, its fp32 master weights and their optimizers. Owns all training state but the step."""

    def __init__(self, preset: Preset, vocab_size: int, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = LlamaForCausalLM(_config(preset, vocab_size))
        self.model.set_attn_implementation("reader_split")
        _scale_residual_projections(self.model, preset.layers)
        self.model.to(device)
        self.master = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for parameter in self.model.parameters():  # not `model.to`: rotary frequencies stay fp32
            parameter.data = parameter.data.bfloat16()
        matrices = [m for n, m in self.master.items() if m.dim() == 2 and "embed" not in n]
        others = [m for n, m in self.master.items() if m.dim() != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=preset.matrix_lr, weight_decay=0.05, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=preset.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._lrs = (preset.matrix_lr, preset.other_lr)
        self._trunk = torch.compile(self.model.model, dynamic=True) if device.type == "cuda" else self.model.model

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states, `[rows, tokens, hidden]`."""
        outputs = self._trunk(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.attention, use_cache=False
        )
        return outputs.last_hidden_state

    def losses(self, batch: Batch, preset: Preset, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy over answer tokens, and over a random share of the context's tokens."""
        hidden = self.hidden(batch)[:, :-1]
        targets = batch.ids[:, 1:]
        answer = batch.is_answer[:, :-1]
        drawn = torch.rand(targets.shape, generator=generator).to(self.device) < preset.text_share
        text = batch.is_text[:, 1:] & drawn & ~answer
        chosen = answer | text
        logits = self.model.lm_head(hidden[chosen]).float()
        each = nn.functional.cross_entropy(logits, targets[chosen], reduction="none")
        is_answer = answer[chosen]
        return each[is_answer].mean(), each[~is_answer].sum() / (~is_answer).sum().clamp(min=1)

    def update(self, lr_scale: float) -> None:
        """One optimizer step from the model's gradients, clipped to norm 1, at `lr_scale` times the full rate."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for name, parameter in self.model.named_parameters():
            self.master[name].grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        for optimizer, lr in zip(self.optimizers, self._lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * lr_scale
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])

    def state(self) -> dict[str, Tensor]:
        """Master weights and optimizer state by name."""
        tensors = {f"weight.{name}": tensor for name, tensor in self.master.items()}
        for which, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                tensors |= {f"state.{which}.{index}.{key}": torch.as_tensor(value) for key, value in values.items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` returned."""
        for name, tensor in self.master.items():
            tensor.copy_(tensors[f"weight.{name}"])
        for which, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = defaultdict(dict)
            for name, tensor in tensors.items():
                kind, *rest = name.split(".")
                if kind == "state" and rest[0] == str(which):
                    state[int(rest[1])][rest[2]] = tensor
            optimizer.load_state_dict(optimizer.state_dict() | {"state": dict(state)})
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])


def _config(preset: Preset, vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def _scale_residual_projections(model: LlamaForCausalLM, layers: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * layers) ** -0.5)


def lr_scale(step: int, preset: Preset) -> float:
    """Warm-up, constant, then linear to zero over the last `decay_share` of the steps."""
    left = (preset.steps - step) / (preset.decay_share * preset.steps)
    return min(1.0, (step + 1) / preset.warmup_steps, max(left, 0.0))


@torch.no_grad()
def answer_scores(reader: Reader, rows: Sequence[Row], decode: Tokenizer, *, alone: bool = False) -> dict[str, float]:
    """F1 by kind under teacher forcing: the likeliest token at each place of the answer, up to EOS.

    An answer is right here exactly if greedy decoding gives it; half-right ones may differ a little from decoding.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(rows), 8):
        group = rows[start : start + 8]
        batch = Batch(group, reader.device, alone=alone)
        hidden = reader.hidden(batch)
        for which, row in enumerate(group):
            for first, stop, kind in row.answers:
                place = batch.place(row, first - 1)
                best = reader.model.lm_head(hidden[which, place : place + stop - first]).argmax(-1).tolist()
                if 1 in best:
                    best = best[: best.index(1)]
                scores[kind].append(_f1(decode.decode(best), decode.decode(row.ids[first : stop - 1])))
    scores["all"] = [score for found in scores.values() for score in found]
    return {kind: sum(found) / len(found) for kind, found in sorted(scores.items())}


def _f1(guess: str, gold: str) -> float:
    said, right = guess.lower().split(), gold.lower().split()
    shared = sum(min(said.count(word), right.count(word)) for word in set(said))
    return 2 * shared / (len(said) + len(right)) if shared else 0.0


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

    def load(self, device: torch.device) -> tuple[Reader, dict[str, object]]:
        """The reader as the checkpoint has it, else a fresh one at step 0."""
        reader = Reader(self.preset, self.tokenizer().get_vocab_size(), device, self.seed)
        if not self.weights.exists():
            return reader, {"step": 0, "tokens": 0, "seconds": 0.0, "hardware": [], "results": {}}
        reader.restore(load_file(self.weights))
        return reader, json.loads(self.record.read_text("utf-8"))


def train(run: Run, device: torch.device, minutes: float, evaluate_every: int) -> None:
    """One slice of training."""
    tokenizer = run.tokenizer()
    maker = RowMaker(tokenizer)
    reader, progress = run.load(device)
    begun = saved = time.monotonic()
    step, earlier = int(str(progress["step"])), float(str(progress["seconds"]))
    progress["hardware"] = sorted({*progress["hardware"], _hardware(device)})  # type: ignore[misc]
    held_out = held_out_rows(maker, 24, 6, run.seed)
    recent: list[tuple[float, float]] = []
    try:
        for batch_step, batch in _batches(maker, run, step, device):
            generator = torch.Generator().manual_seed(run.seed * 1_000_003 + batch_step)
            answer_loss, text_loss = reader.losses(batch, run.preset, generator)
            (answer_loss + run.preset.text_weight * text_loss).backward()  # type: ignore[no-untyped-call]
            reader.update(lr_scale(batch_step, run.preset))
            step = batch_step + 1
            recent.append((answer_loss.item(), text_loss.item()))
            progress |= {
                "step": step,
                "tokens": int(str(progress["tokens"])) + batch.ids.numel(),
                "seconds": round(earlier + time.monotonic() - begun, 1),
            }
            if step % 25 == 0:
                mean = [sum(values) / len(values) for values in zip(*recent, strict=True)]
                print(f"{progress['seconds']:>8} s  step {step}  answers {mean[0]:.3f}  text {mean[1]:.3f}", flush=True)
                recent = []
            if step % evaluate_every == 0:
                _report(reader, held_out, tokenizer, progress)
            if time.monotonic() - saved > 180:
                run.save(reader, progress)
                saved = time.monotonic()
            if time.monotonic() - begun > 60 * minutes:
                break
    except KeyboardInterrupt:
        print("stopped; the checkpoint holds every whole step")
    run.save(reader, progress)
    print(f"checkpoint at step {step} of {run.preset.steps} in {run.folder}")


def _batches(maker: RowMaker, run: Run, first: int, device: torch.device) -> Iterator[tuple[int, Batch]]:
    """Steps and their batches, made ahead by a few processes where the device is faster than one of them."""
    steps = range(first, run.preset.steps)
    if device.type == "cpu":
        yield from ((step, Batch(maker.batch(run.seed, step, run.preset.step_tokens), device)) for step in steps)
        return
    import multiprocessing

    context = multiprocessing.get_context("fork")
    with context.Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        tasks = ((maker, run.seed, step, run.preset.step_tokens) for step in steps)
        for step, rows in zip(steps, pool.imap(_rows, tasks), strict=True):
            yield step, Batch(rows, device)


def _rows(task: tuple[RowMaker, int, int, int]) -> list[Row]:
    maker, seed, step, tokens = task
    return maker.batch(seed, step, tokens)


def _report(reader: Reader, rows: Sequence[Row], tokenizer: Tokenizer, progress: dict[str, object]) -> None:
    full, alone = (answer_scores(reader, rows, tokenizer, alone=flag) for flag in (False, True))
    print("  held out, full prefill: " + "  ".join(f"{kind} {score:.2f}" for kind, score in full.items()))
    print("  held out, full KV reuse: " + "  ".join(f"{kind} {score:.2f}" for kind, score in alone.items()), flush=True)
    progress["results"] = {"full": full, "full-reuse": alone}


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


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
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    parser.add_argument("--evaluate-every", type=int, default=250, help="steps between held-out scores")
    parser.add_argument("--contexts", type=int, default=200, help="held-out contexts to test on")
    parser.add_argument("--passages", type=int, default=6, help="passages of a held-out context")
    parser.add_argument("--out", type=Path, help="model folder to export to")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = PRESETS[arguments.preset or ("gpu" if device.type == "cuda" else "cpu")]
    if arguments.steps:
        preset = Preset(**(asdict(preset) | {"steps": arguments.steps}))
    arguments.checkpoint.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.checkpoint, preset, arguments.seed)
    if arguments.command == "train":
        train(run, device, arguments.minutes, arguments.evaluate_every)
    elif arguments.command == "test":
        reader, progress = run.load(device)
        rows = held_out_rows(RowMaker(run.tokenizer()), arguments.contexts, arguments.passages, run.seed + 1)
        _report(reader, rows, run.tokenizer(), progress)
        run.save(reader, progress)
    elif arguments.out is None:
        parser.error("export needs --out")
    else:
        export(run, arguments.out)


if __name__ == "__main__":
    main()
