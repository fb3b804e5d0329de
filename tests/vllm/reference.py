"""Weaving as the papers describe it, in explicit float32 torch over a checkpoint's weights.

Nothing of chunkweave and no model code of transformers or vLLM: every product, mask and rotation is written out. Slow,
and right by inspection. Hidden states are `[tokens, hidden]`, keys and values `[layers, tokens, kv_heads, head_dim]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig


@dataclass(frozen=True)
class Stored:
    """A chunk's KV as it was computed at positions `start`.. of some prompt; `keys` are rotated to those."""

    keys: torch.Tensor
    values: torch.Tensor
    start: int


@dataclass(frozen=True)
class Piece:
    """A stretch of a prompt: its tokens, what is stored for it if anything, and whether that may be corrected."""

    token_ids: tuple[int, ...]
    stored: Stored | None = None
    exact: bool = False


@dataclass(frozen=True)
class Woven:
    """Log-probabilities `[vocab]` of the first new token, and the positions of chunks that were computed again."""

    log_probs: torch.Tensor
    recomputed: list[int]


class Reference:
    """A decoder of the Llama anatomy: RMS norm, RoPE, grouped-query attention, gated MLP.

    Other families say what they do otherwise in `tests.vllm.reference_families`.
    """

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        found = load_file(folder / "model.safetensors")  # a multimodal model has its decoder in a module of this name
        self.weights = {name.replace("language_model.", ""): tensor.float() for name, tensor in found.items()}
        self.layers = config.num_hidden_layers
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.config = config
        self.eps = getattr(config, "rms_norm_eps", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * self.layers
        used = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self.windows = [used if kind == "sliding_attention" else None for kind in kinds]
        ropes = [config.rope_parameters.get(kind, config.rope_parameters) for kind in kinds]
        self.scale = self.dim**-0.5
        self.frequencies = [self._angles(rope) for rope in ropes]
        """Angle of a step for each pair of dims, by layer."""

    def _angles(self, rope) -> torch.Tensor:
        dims = int(self.dim * rope.get("partial_rotary_factor", 1.0))
        return rope["rope_theta"] ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)

    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Plain full prefill, `[vocab]`."""
        return self.weave([Piece(tuple(ids))], "full-reuse", 0.0).log_probs

    def stored(self, ids: Sequence[int], start: int, stop: int) -> Stored:
        """The KV of positions `start` to `stop` after full prefill of `ids`."""
        keys, values, _ = self._compute(list(ids), *self._empty(len(ids)), [True] * len(ids), [], None, 0)
        return Stored(keys[:, start:stop], values[:, start:stop], start)

    def weave(
        self, pieces: Sequence[Piece], method: str, ratio: float, *, chosen: Sequence[int] = (), check_layer: int = 1
    ) -> Woven:
        """One prompt made of `pieces`; `chosen` are the positions that `random` drew, or `cacheblend` is to keep."""
        ids, keys, values, active = self._laid_out(pieces)
        reused: list[int] = []
        heads: list[int] = []
        at = 0
        for piece in pieces:
            span = range(at, at + len(piece.token_ids))
            at = span.stop
            if piece.stored is not None and not piece.exact:
                reused += span
                heads += list(span)[: ceil(ratio * len(span))]
        start = {"epic": heads, "random": list(chosen), "cacheblend": reused if ratio else []}.get(method, [])
        for position in start:
            active[position] = True
        candidates = reused if method == "cacheblend" else []
        count = ceil(ratio * len(reused))
        _, _, (last, final) = self._compute(ids, keys, values, active, candidates, check_layer, count, chosen)
        recomputed = [position for position in final if position in set(reused)]
        return Woven(torch.log_softmax(self._logits(last), -1), recomputed)

    def stored_behind(self, pieces: Sequence[Piece]) -> Stored:
        """The KV of the last of `pieces`, computed behind the others as they are stored."""
        ids, keys, values, active = self._laid_out(pieces)
        keys, values, _ = self._compute(ids, keys, values, active, [], None)
        start = len(ids) - len(pieces[-1].token_ids)
        return Stored(keys[:, start:], values[:, start:], start)

    def mean(self, computed: Sequence[Stored]) -> Stored:
        """The mean of a chunk's KV, keys without the rotation to where each was computed."""
        unturned = [
            torch.stack([self.turn(layer, own, -one.start) for layer, own in enumerate(one.keys)]) for one in computed
        ]
        return Stored(torch.stack(unturned).mean(0), torch.stack([one.values for one in computed]).mean(0), 0)

    def _laid_out(self, pieces: Sequence[Piece]):
        """The tokens, the KV of what is stored at its new places, and which positions are to be computed."""
        ids = [token for piece in pieces for token in piece.token_ids]
        keys, values = self._empty(len(ids))
        active: list[bool] = []
        for piece in pieces:
            span = range(len(active), len(active) + len(piece.token_ids))
            active += [piece.stored is None] * len(span)
            if piece.stored is not None:
                by = span.start - piece.stored.start
                turned = [self._moved(self.turn(layer, own, by)) for layer, own in enumerate(piece.stored.keys)]
                keys[:, span] = torch.stack(turned)
                values[:, span] = piece.stored.values
        return ids, keys, values, active

    def turn(self, layer: int, keys: torch.Tensor, by: int | torch.Tensor) -> torch.Tensor:
        """A layer's keys `[tokens, heads, head_dim]` that many positions on; each pair of dims is a complex number."""
        angles = torch.as_tensor(by, dtype=torch.float64).reshape(-1, 1, 1) * self.frequencies[layer]
        pairs, rest = self._pairs(keys.double(), 2 * angles.shape[-1])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((self._unpaired(turned), rest), -1).float()

    def _pairs(self, states, dims):
        """The rotated dims as complex numbers, dim i with i + dims/2; and the dims that are not rotated."""
        return torch.complex(states[..., : dims // 2], states[..., dims // 2 : dims]), states[..., dims:]

    def _unpaired(self, pairs):
        return torch.cat((pairs.real, pairs.imag), -1)

    def _compute(self, ids, keys, values, active, candidates, check_layer, count=0, chosen=()):
        """All layers; fills `keys` and `values` at the active positions. Returns them and the last hidden state."""
        positions = [position for position, on in enumerate(active) if on]
        hidden = self._embed([ids[position] for position in positions])
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            normed = self._before_attention(hidden, name)
            at = torch.tensor(positions)
            q, k = (
                self.turn(layer, self._project(normed, name, which, heads), at)
                for which, heads in (("q", self.heads), ("k", self.kv_heads))
            )
            v = self._project(normed, name, "v", self.kv_heads)
            if layer == check_layer and candidates:
                # A rotation changes no length, so the deviation of rotated keys is that of keys before RoPE.
                gap = (k - keys[layer, positions]).pow(2).sum((1, 2)) + (v - values[layer, positions]).pow(2).sum(
                    (1, 2)
                )
                allowed = set(candidates)
                ranked = sorted((-gap[row].item(), p) for row, p in enumerate(positions) if p in allowed)
                kept = set(chosen) or {p for _, p in ranked[:count]}
                rows = [row for row, p in enumerate(positions) if p not in allowed or p in kept]
                positions = [positions[row] for row in rows]
                q, k, v, hidden = q[rows], k[rows], v[rows], hidden[rows]
            keys[layer, positions], values[layer, positions] = self._kept(k), self._kept(v)
            attended = self._attend(q, keys[layer], values[layer], positions, layer)
            hidden = self._finish(hidden, self._with_bias(attended @ self._weight(name, "o").T, name, "o"), name)
        return keys, values, (hidden[-1], positions)

    def _kept(self, states):
        """Keys or values as the cache keeps them once they are computed."""
        return states

    def _moved(self, keys):
        """Keys as the cache keeps them once they are turned."""
        return keys

    def _embed(self, ids):
        return self.weights["model.embed_tokens.weight"][ids]

    def _before_attention(self, hidden, name):
        return self._norm(hidden, name + "input_layernorm")

    def _finish(self, hidden, attended, name):
        hidden = hidden + attended
        return hidden + self._mlp(self._norm(hidden, name + "post_attention_layernorm"), name)

    def _mlp(self, normed, name):
        return self._gated(normed, *(f"{name}mlp.{which}_proj.weight" for which in ("gate", "up", "down")))

    def _gated(self, normed, gate, up, down):
        gate, up, down = (self.weights[part] for part in (gate, up, down))
        return (self._activation(normed @ gate.T) * (normed @ up.T)) @ down.T

    def _activation(self, states):
        return torch.nn.functional.silu(states)

    def _attend(self, q, keys, values, positions, layer):
        window = self.windows[layer]
        groups = self.heads // self.kv_heads
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        scores = self._scores(torch.einsum("qhd,khd->hqk", q, keys) * self.scale)
        behind = torch.tensor(positions)[:, None] - torch.arange(len(keys))[None]
        sees = (behind >= 0) & (behind < (window or len(keys)))
        weights = self._softmax(scores.masked_fill(~sees, float("-inf")), layer)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(len(positions), -1)

    def _scores(self, scores):
        return scores

    def _softmax(self, scores, _layer):
        return torch.softmax(scores, -1)

    def _project(self, normed, name, which, heads):
        out = self._with_bias(normed @ self._weight(name, which).T, name, which).view(len(normed), heads, self.dim)
        scale = f"{name}self_attn.{which}_norm"
        return self._norm(out, scale) if f"{scale}.weight" in self.weights else out

    def _norm(self, states, name):
        scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled * self.weights[f"{name}.weight"]

    def _logits(self, hidden):
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self._norm(hidden, "model.norm") @ head.T

    def _with_bias(self, out, name, which):
        bias = self.weights.get(f"{name}self_attn.{which}_proj.bias")
        return out if bias is None else out + bias

    def _weight(self, name, which):
        return self.weights[f"{name}self_attn.{which}_proj.weight"]

    def _empty(self, tokens):
        shape = (self.layers, tokens, self.kv_heads, self.dim)
        return torch.zeros(shape), torch.zeros(shape)
