"""`chunkweave adapt`: adapters learn, training goes on where it ended, and what comes out is in PEFT's format."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from chunkweave import Engine
from chunkweave.config import CaptureConfig, ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.testing import toy_model
from chunkweave.types import Chunk
from chunkweave_lab.adapt.distill import RECORD, AdaptConfig, Distiller, Progress
from chunkweave_lab.adapt.prompts import Group, PromptSizes, PromptSource, TrainingPrompt, held_out
from chunkweave_lab.adapt.reading import Passages, Reading
from tests.integration.command_line import invoke

pytest.importorskip("peft", reason="training adapters needs PEFT")

SIZES = PromptSizes(least_chunks=2, most_chunks=3, most_tokens=90, questions=2)
GROUPS = [
    Group(
        tuple(
            Chunk(f"In {place} the mill of {name} stands behind the bridge over the river, near {place} square.", name)
            for name in ("Ada", "Bo")
        )
    )
    for place in ("Aldwick", "Norham", "Selby", "Whitby", "Kelso", "Ripon", "Morpeth", "Durham", "Hexham", "Alnwick")
]


def _config(**changes: object) -> AdaptConfig:
    values = {"minutes": 1e4, "check_minutes": 1e4, "warmup_steps": 4, "sizes": SIZES, "answer_tokens": 6}
    return AdaptConfig(**{**values, "held_out_prompts": 3, "learning_rate": 2e-3, **changes})  # type: ignore[arg-type]


def _training(
    folder: Path, config: AdaptConfig, data: str = "data", start: Path | None = None
) -> tuple[Distiller, Iterator[Progress]]:
    reuse = ReuseConfig(capture=CaptureConfig(neutral_tokens=150))
    engine = Engine(toy_model(), method="full", reuse=reuse)
    opening = engine.builder.opening()
    frame = Passages(opening, engine.preparer.preamble(opening)[len(opening) :], ())
    distiller = Distiller(engine.loaded, engine.builder, frame, config, folder, data=data, start=start)
    tokenizer = engine.loaded.tokenizer
    sources = [
        PromptSource(groups, lambda text: len(tokenizer.encode(text)), SIZES, seed=str(i))
        for i, groups in enumerate(held_out(GROUPS, 0.1, Random(0)))
    ]
    return distiller, distiller.train(*sources)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "weights.safetensors")


def test_adapters_bring_the_student_nearer(tmp_path: Path) -> None:
    distiller, steps = _training(tmp_path, _config(check_minutes=0.02, patience=100, readings=(Reading.ALONE,)))
    for number, _ in enumerate(steps):  # looks come by the clock, and this machine may be busy
        first, last = distiller.looks[0], distiller.looks[-1]
        if number > 400 or last.held_out["alone"].kl < 0.9 * first.held_out["alone"].kl:
            break
    steps.close()  # type: ignore[attr-defined]
    assert last.held_out["alone"].kl < 0.9 * first.held_out["alone"].kl
    assert first.held_out["full"].kl == pytest.approx(0.0, abs=1e-5)


def test_training_goes_on_where_it_ended(tmp_path: Path) -> None:
    for folder, parts in (("whole", [6]), ("parts", [2, 1, 3])):
        for count in parts:
            _, steps = _training(tmp_path / folder, _config())
            look_first = folder == "whole" or count == parts[0]
            list(islice(steps, count + look_first))
            steps.close()  # type: ignore[attr-defined]
    whole, parts = _weights(tmp_path / "whole"), _weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(weight, parts[name], rtol=1e-4, atol=1e-6)
    assert any(weight.abs().max() > 0 for name, weight in whole.items() if "lora_B" in name)


@pytest.mark.parametrize(("changes", "data", "named"), [({"rank": 4}, "data", "config"), ({}, "others", "data")])
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, object], data: str, named: str
) -> None:
    _, steps = _training(tmp_path, _config())
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=f"another {named}"):
        _training(tmp_path, _config(**changes), data)


def test_a_checkpoint_whose_writing_was_cut_off_is_not_lost(tmp_path: Path) -> None:
    _, steps = _training(tmp_path, _config())
    list(islice(steps, 3))
    steps.close()  # type: ignore[attr-defined]
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint-before")
    (tmp_path / ".checkpoint").mkdir()
    _, steps = _training(tmp_path, _config())
    assert next(steps).step == 3


def test_training_can_begin_with_other_adapters(tmp_path: Path) -> None:
    _, steps = _training(tmp_path / "first", _config(check_minutes=1e-6))
    list(islice(steps, 4))
    steps.close()  # type: ignore[attr-defined]
    first = load_file(tmp_path / "first" / "adapter_model.safetensors")
    _, steps = _training(tmp_path / "second", _config(), start=tmp_path / "first")
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    for name, weight in _weights(tmp_path / "second").items():
        torch.testing.assert_close(weight.bfloat16(), first[name.replace(".default", "")])
    with pytest.raises(UsageError, match="another rank"):
        _training(tmp_path / "third", _config(rank=4), start=tmp_path / "first")
    with pytest.raises(UsageError, match="cannot load initial adapters"):
        _training(tmp_path / "third", _config(), start=tmp_path)


def test_it_ends_when_nothing_is_gained(tmp_path: Path) -> None:
    distiller, steps = _training(tmp_path, _config(check_minutes=1e-6, patience=2, learning_rate=1e-9))
    assert len(list(steps)) < 20
    best = min(distiller.looks, key=lambda look: look.kl)
    assert len(distiller.looks) - 1 - distiller.looks.index(best) == 2


class _Answered:
    """The same prompt again and again, with the same answers."""

    def prompt(self, _: int) -> TrainingPrompt:
        return TrainingPrompt(GROUPS[0].chunks, ("Who?", "Where?"), ("Ada of Aldwick", "behind the bridge"))


def test_given_answers_are_learnt(tmp_path: Path) -> None:
    config = _config(readings=(Reading.FULL,), looked_at=(Reading.FULL,), learning_rate=1e-2)
    distiller, _ = _training(tmp_path, config)
    steps = distiller.train(_Answered(), _Answered())
    losses = [now.loss for now in islice(steps, 12)]
    steps.close()  # type: ignore[attr-defined]
    assert losses[-1] < 0.8 * losses[1]
    assert list(distiller.looks[0].held_out) == ["full"]


def test_recomputed_activations_give_the_same_weights(tmp_path: Path) -> None:
    for folder, recompute in (("kept", False), ("recomputed", True)):
        _, steps = _training(tmp_path / folder, _config(recompute_activations=recompute))
        list(islice(steps, 3))
        steps.close()  # type: ignore[attr-defined]
    kept, recomputed = _weights(tmp_path / "kept"), _weights(tmp_path / "recomputed")
    for name, weight in kept.items():
        torch.testing.assert_close(weight, recomputed[name], rtol=1e-4, atol=1e-6)


def test_the_command_makes_an_adapter_and_goes_on(tmp_path: Path) -> None:
    documents = tmp_path / "docs"
    documents.mkdir()
    for place, group in enumerate(GROUPS):
        (documents / f"{place}.txt").write_text(" ".join(chunk.text for chunk in group.chunks), encoding="utf-8")
    out = tmp_path / "adapter"
    words = ["adapt", str(out), "--model", "reader", "--docs", str(documents), "--check-minutes", "0.02", "--json"]
    words += ["--chunks", "2", "--prompt-tokens", "80", "--questions", "1", "--answer-tokens", "4", "--rank", "2"]
    first = json.loads(invoke(*words, "--minutes", "0.05").stdout)
    assert first["rows"][0]["step"] == 0
    settings = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["peft_type"] == "LORA"
    assert settings["r"] == 2
    assert settings["base_model_name_or_path"] == "reader"
    weights = load_file(out / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") for name in weights)
    assert {one.dtype for one in weights.values()} == {torch.bfloat16}
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    assert {"base", "data", "config", "looks"} <= record.keys()
    second = json.loads(invoke(*words, "--minutes", "0.1").stdout)
    assert second["rows"][: len(first["rows"])] == first["rows"]
    assert second["rows"][-1]["elapsed_s"] >= first["rows"][-1]["elapsed_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to train on"),
        (("--questions-file", "q.txt", "--dataset", "worlds"), "needs --docs"),
        (("--dataset", "worlds", "--readings", "backwards"), "unknown reading"),
        (("--dataset", "worlds", "--minutes", "0"), "above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    result = invoke("adapt", str(tmp_path / "a"), "--model", "reader", *words)
    assert result.exit_code == 2
    assert said in result.stderr
