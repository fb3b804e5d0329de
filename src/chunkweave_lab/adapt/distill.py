"""Self-distillation: low-rank adapters learn to answer over reused chunks as the model does with full prefill.

The teacher is the model without adapters, with full attention. It answers the questions of a prompt greedily. The
student has the same weights and adapters, and reads the same passages as under reuse (`Reading`). The loss is
KL(teacher || student) along the teacher's answer, so no labels are needed. Full attention is one of the readings, so
that answers with full prefill change little. If a prompt has answers, they replace the teacher's.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from chunkweave.errors import UsageError
from chunkweave.models.fingerprint import content_hash
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.models.loading import LoadedModel
from chunkweave.prompt.builder import PromptBuilder
from chunkweave_lab.adapt.prompts import PromptSizes, TrainingPrompt, TrainingPrompts
from chunkweave_lab.adapt.reading import PassageReader, Passages, Reading

logger = logging.getLogger(__name__)

RECORD = "adaptation.json"
"""File beside the adapter's weights: its model, data and settings, and the results of training."""

_CHECKPOINT, _BEFORE = "checkpoint", ".checkpoint-before"
_WEIGHTS = "adapter_model.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """The settings of training.

    `targets` are names of linear modules, or `all-linear`. `readings` alternate. The learning rate rises over
    `warmup_steps` and falls along a cosine to a tenth at the end of `minutes`. A step has `prompts_a_step` prompts.
    Every `check_minutes` the adapters are evaluated on `held_out_prompts` held-out prompts in the readings `looked_at`;
    training stops after `patience` evaluations without improvement.
    """

    minutes: float = 60.0
    rank: int = 16
    scale: int = 32
    targets: tuple[str, ...] = ("all-linear",)
    learning_rate: float = 5e-4
    warmup_steps: int = 20
    readings: tuple[Reading, ...] = (Reading.ALONE, Reading.NEUTRAL, Reading.INSTRUCTION, Reading.FULL)
    looked_at: tuple[Reading, ...] = tuple(Reading)
    sizes: PromptSizes = field(default_factory=PromptSizes)
    answer_tokens: int = 24
    prompts_a_step: int = 2
    check_minutes: float = 10.0
    held_out_prompts: int = 8
    patience: int = 4
    recompute_activations: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes <= 0 or self.check_minutes <= 0:
            raise UsageError("minutes and check-minutes must be above 0")
        if self.rank < 1 or self.learning_rate <= 0:
            raise UsageError(
                f"rank must be at least 1 and the learning rate above 0: {self.rank}, {self.learning_rate}"
            )
        if not self.readings:
            raise UsageError("name at least one reading")

    @property
    def learnt(self) -> dict[str, Any]:
        """The settings that must equal a checkpoint's to continue from it: all except the duration."""
        values = asdict(self)
        for name in ("minutes", "check_minutes", "patience", "recompute_activations", "looked_at"):
            del values[name]
        return values


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one reading of the held-out prompts is from full prefill of the model without adapters.

    `kl` is the mean over answer tokens in nats, `agreement` the share of tokens with the same most likely token. For
    given answers they are the mean negative log-likelihood and the share of tokens where the most likely token is the
    answer's.
    """

    kl: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Look:
    """One evaluation on the held-out prompts, by reading, after `step` steps and `elapsed_s` seconds of training."""

    step: int
    elapsed_s: float
    loss: float | None
    held_out: dict[str, Distance]

    @property
    def kl(self) -> float:
        """Mean of the readings' `kl`."""
        return sum(one.kl for one in self.held_out.values()) / len(self.held_out)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training; `loss` is the mean of the last steps."""

    step: int
    elapsed_s: float
    total_s: float
    loss: float
    look: Look | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Lesson:
    """A prompt with the answers to its questions: tokens, and the teacher's distribution at each of them.

    The distribution is None if the answer is given: its tokens are then the target.
    """

    passages: Passages
    questions: list[tuple[int, ...]]
    answers: list[list[int]]
    expected: torch.Tensor | None


class Distiller:
    """Trains adapters of one model, which it owns meanwhile. Checkpoints and the result are written to `folder`.

    Mutates the model's modules: adds adapters to linear layers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        builder: PromptBuilder,
        frame: Passages,
        config: AdaptConfig,
        folder: Path,
        *,
        data: str,
        start: Path | None = None,
    ) -> None:
        """`frame` is an opening with neutral passages and no chunks, `data` a digest of the training data.

        `start` is a folder of initial adapters; the default ones have no effect.

        Raises:
            UsageError: PEFT is not installed, `start` does not fit, or `folder` has a checkpoint with another model,
                data or settings.
        """
        self._config, self._folder, self._builder, self._frame = config, folder, builder, frame
        self._made_of: dict[str, Any] = {
            "base": loaded.fingerprint,
            "data": data,
            "config": json.loads(json.dumps(config.learnt)),
        }
        self._base_name = loaded.name
        self._stop_ids = loaded.tokenizer.stop_ids
        torch.manual_seed(config.seed)
        self._adapted = _with_adapters(loaded.model.model, config)
        if start is not None:
            _begin_with(self._adapted, start)
            self._made_of["start"] = content_hash(start / _WEIGHTS)
        model = HuggingFaceModel(self._adapted.get_base_model())
        self._reader = PassageReader(model, model.device, recompute=config.recompute_activations)
        self._weights = {name: one for name, one in self._adapted.named_parameters() if one.requires_grad}
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=config.learning_rate, weight_decay=0.0)
        self._step, self._elapsed_s = 0, 0.0
        self._looks: list[Look] = []
        self._best = math.inf
        self._resume()

    @property
    def looks(self) -> tuple[Look, ...]:
        """All evaluations on the held-out prompts so far; the first is before training."""
        return tuple(self._looks)

    def train(self, source: TrainingPrompts, held_out: TrainingPrompts) -> Iterator[Progress]:
        """Train until the time is over or results stop improving; yields after each step.

        A checkpoint is written at each evaluation, and when the caller stops early.
        """
        kept = [self._lesson(held_out.prompt(index)) for index in range(self._config.held_out_prompts)]
        recent: list[float] = []
        total_s, begun, before = self._config.minutes * 60.0, time.monotonic(), self._elapsed_s
        looked_at = before
        try:
            if not self._looks:
                yield self._progress(0.0, self._look(kept, None))
            while self._elapsed_s < total_s and not self._nothing_gained:
                recent = [*recent[-19:], self._learn(source, total_s)]
                self._elapsed_s = before + time.monotonic() - begun
                loss, look = sum(recent) / len(recent), None
                if self._elapsed_s - looked_at >= self._config.check_minutes * 60.0:
                    look, looked_at = self._look(kept, loss), self._elapsed_s
                    self._save_checkpoint()
                yield self._progress(loss, look)
            if self._step > self._looks[-1].step:
                self._look(kept, sum(recent) / len(recent) if recent else None)
        finally:
            self._save_checkpoint()

    @property
    def _nothing_gained(self) -> bool:
        behind = [look.kl for look in self._looks]
        best = behind.index(min(behind))
        return len(behind) - 1 - best >= self._config.patience

    def _progress(self, loss: float, look: Look | None) -> Progress:
        return Progress(self._step, self._elapsed_s, self._config.minutes * 60.0, loss, look)

    def _lesson(self, prompt: TrainingPrompt) -> _Lesson:
        chunks = self._builder.chunk_parts(prompt.chunks)
        passages = Passages(self._frame.opening, self._frame.neutral, chunks)
        questions = [self._builder.question_part(one).token_ids for one in prompt.questions]
        if prompt.answers:
            stop = min(self._stop_ids)
            given = [[*self._builder.answer_ids(answer), stop] for answer in prompt.answers]
            return _Lesson(passages, questions, given, None)
        with self._adapted.disable_adapter():
            answers = self._reader.answer(
                passages, questions, stop_ids=self._stop_ids, max_new_tokens=self._config.answer_tokens
            )
        return _Lesson(passages, questions, [own for own, _ in answers], torch.cat([rows for _, rows in answers]))

    def _read(self, lesson: _Lesson, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        """Distance from the target at each answer token, in nats, and whether the most likely token is right."""
        pairs = zip(lesson.questions, lesson.answers, strict=True)
        questions = [(*question, *answer[:-1]) for question, answer in pairs]
        found = self._reader.logits(lesson.passages, questions, reading, last=[len(one) for one in lesson.answers])
        log_probs = torch.log_softmax(torch.cat(found), -1)
        if lesson.expected is not None:
            kl = (lesson.expected.exp() * (lesson.expected - log_probs)).sum(-1)
            return kl, lesson.expected.argmax(-1) == log_probs.argmax(-1)
        given = torch.tensor([token for answer in lesson.answers for token in answer], device=log_probs.device)
        return -log_probs.gather(1, given[:, None])[:, 0], log_probs.argmax(-1) == given

    def _learn(self, source: TrainingPrompts, total_s: float) -> float:
        """One step; returns its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * self._rate(total_s)
        self._optimizer.zero_grad(set_to_none=True)
        loss, count = 0.0, self._config.prompts_a_step
        for place in range(self._step * count, (self._step + 1) * count):
            reading = self._config.readings[place % len(self._config.readings)]
            own = self._read(self._lesson(source.prompt(place)), reading)[0].mean() / count
            own.backward()  # type: ignore[no-untyped-call]
            loss += own.item()
        torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0)
        self._optimizer.step()
        self._step += 1
        return loss

    def _rate(self, total_s: float) -> float:
        """The current fraction of the maximum learning rate."""
        if self._step < self._config.warmup_steps:
            return (self._step + 1) / self._config.warmup_steps
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, self._elapsed_s / total_s)))

    @torch.no_grad()
    def _look(self, kept: Sequence[_Lesson], loss: float | None) -> Look:
        """Evaluate the adapters on the held-out prompts, and save them if they are the best so far."""
        found: dict[str, Distance] = {}
        for reading in self._config.looked_at:
            kl, same = zip(*(self._read(lesson, reading) for lesson in kept), strict=True)
            found[reading] = Distance(torch.cat(kl).mean().item(), torch.cat(same).float().mean().item())
        look = Look(self._step, self._elapsed_s, loss, found)
        self._looks.append(look)
        if self._step and look.kl < self._best:
            self._best = look.kl
            self._save_result()
        return look

    def _save_result(self) -> None:
        """Write the adapters in PEFT's format, in bfloat16, and their record, each atomically."""
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = self._folder / ".partial"
        self._adapted.save_pretrained(scratch)
        weights = {name: one.to(torch.bfloat16) for name, one in load_file(scratch / _WEIGHTS).items()}
        save_file(weights, scratch / _WEIGHTS, metadata={"format": "pt"})
        settings = json.loads((scratch / "adapter_config.json").read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = self._base_name
        if isinstance(settings.get("target_modules"), list):
            settings["target_modules"].sort()
        (scratch / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        record = {"base_model": self._base_name, **self._made_of, "looks": [asdict(look) for look in self._looks]}
        (scratch / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for name in (_WEIGHTS, "adapter_config.json", RECORD):
            (scratch / name).replace(self._folder / name)
        shutil.rmtree(scratch)

    def _save_checkpoint(self) -> None:
        """Write everything needed to continue, atomically by renaming a temporary file."""
        scratch, place = self._folder / ".checkpoint", self._folder / _CHECKPOINT
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        save_file({name: one.detach() for name, one in self._weights.items()}, scratch / "weights.safetensors")
        moments = {
            f"{moment} {name}": self._optimizer.state[one][moment]
            for name, one in self._weights.items()
            if one in self._optimizer.state
            for moment in _MOMENTS
        }
        save_file(moments, scratch / "moments.safetensors")
        state = {
            **self._made_of,
            "step": self._step,
            "elapsed_s": self._elapsed_s,
            "looks": [asdict(look) for look in self._looks],
            "best": self._best if math.isfinite(self._best) else None,
        }
        (scratch / "state.json").write_text(json.dumps(state), encoding="utf-8")
        before = self._folder / _BEFORE
        shutil.rmtree(before, ignore_errors=True)
        if place.exists():
            place.rename(before)
        scratch.rename(place)
        shutil.rmtree(before, ignore_errors=True)

    def _resume(self) -> None:
        places = (self._folder / name for name in (_CHECKPOINT, _BEFORE))
        place = next((one for one in places if (one / "state.json").is_file()), None)
        if place is None:
            return
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        other = [name for name, value in self._made_of.items() if state.get(name) != value]
        if other:
            raise UsageError(
                f"{place} is a checkpoint of another {' and '.join(other)}; give another folder, or remove it to start "
                "again"
            )
        weights = load_file(place / "weights.safetensors")
        moments = load_file(place / "moments.safetensors")
        with torch.no_grad():
            for name, one in self._weights.items():
                one.copy_(weights[name])
        self._step, self._elapsed_s = state["step"], state["elapsed_s"]
        for name, one in self._weights.items():
            if f"exp_avg {name}" in moments:
                self._optimizer.state[one] = {
                    "step": torch.tensor(float(self._step)),
                    **{moment: moments[f"{moment} {name}"].to(one.device) for moment in _MOMENTS},
                }
        self._looks = [_look_of(look) for look in state["looks"]]
        self._best = math.inf if state["best"] is None else state["best"]
        logger.info("continuing from step %d of %s", self._step, place)


def _look_of(saved: dict[str, Any]) -> Look:
    held_out = {reading: Distance(**one) for reading, one in saved["held_out"].items()}
    return Look(saved["step"], saved["elapsed_s"], saved["loss"], held_out)


def _begin_with(adapted: Any, folder: Path) -> None:
    """Load the adapters' initial weights from `folder`."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot load initial adapters from {folder}: {error}") from error
    wanted = {name: one.shape for name, one in get_peft_model_state_dict(adapted).items()}
    if wanted != {name: one.shape for name, one in weights.items()}:
        raise UsageError(f"the adapters in {folder} have another rank or other modules; see --rank and --targets")
    set_peft_model_state_dict(adapted, weights)


def _with_adapters(model: Any, config: AdaptConfig) -> Any:
    """A `PeftModel` around `model`; adds float32 adapters to its linear modules in place."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("training adapters needs PEFT: pip install '.[adapt]' in a checkout of chunkweave") from error
    targets: Any = config.targets[0] if len(config.targets) == 1 else list(config.targets)
    made = LoraConfig(r=config.rank, lora_alpha=config.scale, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, made)
