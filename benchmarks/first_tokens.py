"""First tokens of our engine and of Hugging Face's forward, over prompts whose chunks are stored."""

from collections.abc import Callable

import torch

from chunkweave.calibration.fidelity import Comparison, Task, make_tasks, woven_prefill
from chunkweave.calibration.questions import bundled_examples
from chunkweave.engine.engine import Engine
from chunkweave.models.huggingface import HuggingFaceModel
from chunkweave.prompt.parts import Prompt

HUGGING_FACE = "hf-forward"
"""The row of Hugging Face's forward on the same ids: shows that `full` is a fair reference."""

Contender = Callable[[Prompt], object]
"""Prefills a prompt up to its first token, and waits for it."""


def comparison(methods: tuple[str, ...], *, chunks: int, chunk_tokens: int) -> Comparison:
    """The settings of prompts of bundled documents, whose chunks are computed alone."""
    return Comparison(methods, chunks=chunks, chunk_tokens=chunk_tokens, new_tokens=1, free=0)


def tasks_of(engine: Engine, config: Comparison, count: int, seed: int = 0) -> list[Task]:
    """`count` questions over the bundled documents."""
    examples = bundled_examples(count, seed=seed)
    return make_tasks(engine, examples, examples, config)


def contenders(engine: Engine, config: Comparison, *, hugging_face: bool = True) -> dict[str, Contender]:
    """Full prefill, then Hugging Face's forward, then full reuse and the methods, by name of their rows."""
    runs: dict[str, Contender] = {
        label: woven_prefill(engine.runner, method) for label, method in config.contenders().items()
    }
    full = {"full": runs.pop("full")}
    theirs = {HUGGING_FACE: hugging_face_forward(engine.loaded.model)} if hugging_face else {}
    return full | theirs | runs


def hugging_face_forward(model: HuggingFaceModel) -> Contender:
    """The model's own forward on the whole prompt, as in `generate`."""

    @torch.inference_mode()
    def first_token(prompt: Prompt) -> object:
        ids = torch.tensor([prompt.token_ids], device=model.device)
        return model.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()

    return first_token
