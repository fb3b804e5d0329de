"""The reader while it is trained: sizes, batches, the model with its master weights and optimizers."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from reader_data import Row
from reader_start import ROPE_THETA, plant_copying
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of the model and of a step. `steps` is where the learning rate has come down to nothing."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    step_tokens: int
    steps: int
    matrix_lr: float = 0.008
    other_lr: float = 0.003
    warmup_steps: int = 30
    decay_share: float = 0.3
    text_share: float = 0.25
    text_weight: float = 0.5


PRESETS = {
    "cpu": Preset(192, 384, 8, 4, 2, 64, step_tokens=8192, steps=3600),
    "gpu": Preset(384, 1024, 12, 6, 2, 64, step_tokens=65536, steps=6000),
    "test": Preset(64, 96, 2, 2, 1, 16, step_tokens=512, steps=4),
}


class Batch:
    """Rows as tensors on a device: contexts padded to one length, then their questions padded to one length.

    `attention` is `[rows, 1, queries, tokens]`, 0 or very negative, for the questions' tokens alone: they see their
    context and themselves. The context before them is causal, see `_split_attention`. With `alone`, it is for all
    tokens, and a chunk sees BOS and itself only: what full KV reuse makes of it.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device, *, alone: bool = False) -> None:
        self.context = _round_up(max(row.context for row in rows))
        self.length = self.context + _round_up(max(len(row) - row.context for row in rows))
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
        chunks = self._table([row.chunks for row in rows], -1).to(device)
        unseen = self._table([[row.hidden.get(owner, -2) for owner in row.owners] for row in rows], -2).to(device)
        seen &= chunks[:, None, :] != unseen[:, first:, None]
        if alone:
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


def _round_up(length: int) -> int:
    """To a multiple of 32: the CPU kernels are compiled for every shape that comes up, and few shapes save that."""
    return length + (-length) % 32


def _split_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Attention of `[rows, heads, tokens, head_dim]`; tokens before the mask's queries are causal among themselves."""
    context = query.shape[2] - attention_mask.shape[2]
    attend = _attend_in_kernel if query.is_cuda else _attend_in_steps
    parts = []
    if context:
        parts.append(attend(query[:, :, :context], key[:, :, :context], value[:, :, :context], None))
    if context < query.shape[2]:
        parts.append(attend(query[:, :, context:], key, value, attention_mask))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend_in_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


def _attend_in_steps(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scores, softmax and sum as three operations, causal without a mask.

    In bf16 on CPUs, forward and backward take a half to two thirds of the time of the fused kernel's.
    """
    rows, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    if mask is None:
        mask = query.new_full((tokens, tokens), -30000.0).triu(1)
    folded = (query * head_dim**-0.5).reshape(rows * kv_heads, -1, head_dim)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    scores = torch.bmm(folded, key.transpose(1, 2)).view(rows, heads, tokens, -1)
    weights = (scores + mask).softmax(-1).view(rows * kv_heads, -1, key.shape[1])
    return torch.bmm(weights, value).view(query.shape)


AttentionInterface.register("reader_split", _split_attention)


class Targets:
    """Which tokens of a batch are learned to predict: all of answers, and a random share of the context's.

    `chosen` is `[rows, tokens - 1]`, at the token before; `is_answer` `[chosen]`.
    """

    def __init__(self, batch: Batch, text_share: float, generator: torch.Generator) -> None:
        answer = batch.is_answer[:, :-1]
        drawn = torch.rand(answer.shape, generator=generator).to(answer.device) < text_share
        self.chosen = answer | (batch.is_text[:, 1:] & batch.is_text[:, :-1] & drawn)
        self.is_answer = answer[self.chosen]


class Reader:
    """The model in bf16, its fp32 master weights and their optimizers. Owns all training state but the step."""

    def __init__(self, preset: Preset, vocab_size: int, device: torch.device, seed: int, *, workers: int = 1) -> None:
        """`workers` batches are computed side by side; on CPUs that beats as many threads within each operation."""
        torch.manual_seed(seed)
        self.device = device
        self.model = LlamaForCausalLM(_config(preset, vocab_size))
        self.model.set_attn_implementation("reader_split")
        _scale_residual_projections(self.model, preset.layers)
        plant_copying(self.model, seed)
        self.model.to(device)
        self.master = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for parameter in self.model.parameters():  # not `model.to`: rotary frequencies stay fp32
            parameter.data = parameter.data.bfloat16()
        matrices = [m for n, m in self.master.items() if m.dim() == 2 and "embed" not in n]
        others = [m for n, m in self.master.items() if m.dim() != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            *(
                torch.optim.Muon(matrices[half::2], lr=preset.matrix_lr, weight_decay=0.05, adjust_lr_fn="original")
                for half in range(2)
            ),
            torch.optim.AdamW(others, lr=preset.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._lrs = (preset.matrix_lr, preset.matrix_lr, preset.other_lr)
        self._preset = preset
        self._pool = ThreadPoolExecutor(max_workers=workers)
        self._trunk = torch.compile(self.model.model, dynamic=True) if device.type == "cuda" else self.model.model

    def hidden(self, batch: Batch) -> Tensor:
        """Last hidden states, `[rows, tokens, hidden]`."""
        outputs = self._trunk(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.attention, use_cache=False
        )
        return outputs.last_hidden_state

    def losses(self, batch: Batch, targets: "Targets") -> tuple[Tensor, Tensor]:
        """Sums of cross-entropy over the answer tokens and over the context tokens that `targets` chose."""
        hidden = self.hidden(batch)[:, :-1]
        logits = self.model.lm_head(hidden[targets.chosen]).float()
        each = nn.functional.cross_entropy(logits, batch.ids[:, 1:][targets.chosen], reduction="none")
        return each[targets.is_answer].sum(), each[~targets.is_answer].sum()

    def learn(self, batches: Sequence[Batch], generator: torch.Generator, lr_scale: float) -> tuple[float, float]:
        """One step on batches that are computed side by side; returns mean loss on answers and on context tokens.

        The gradient is that of one batch of all rows: losses are divided by the step's token counts.
        """
        targets = [Targets(batch, self._preset.text_share, generator) for batch in batches]
        answers = sum(int(one.is_answer.sum()) for one in targets)
        texts = max(1, sum(int((~one.is_answer).sum()) for one in targets))

        def gradients(batch: Batch, chosen: Targets) -> tuple[float, float, tuple[Tensor, ...]]:
            on_answers, on_text = self.losses(batch, chosen)
            loss = on_answers / answers + self._preset.text_weight * on_text / texts
            return on_answers.item(), on_text.item(), torch.autograd.grad(loss, list(self.model.parameters()))

        done = list(self._pool.map(gradients, batches, targets))
        for index, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.stack([grads[index].float() for _, _, grads in done]).sum(0).to(parameter.dtype)
        self.update(lr_scale)
        return sum(one[0] for one in done) / answers, sum(one[1] for one in done) / texts

    def update(self, lr_scale: float) -> None:
        """One optimizer step from the model's gradients, clipped to norm 1, at `lr_scale` times the full rate."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for name, parameter in self.model.named_parameters():
            self.master[name].grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        for optimizer, lr in zip(self.optimizers, self._lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * lr_scale
        list(self._pool.map(lambda optimizer: optimizer.step(), self.optimizers))
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
        head_dim=preset.head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
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
