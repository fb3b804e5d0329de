"""What other families do otherwise than Llama, in the same explicit torch as `Reference`."""

from math import log, pi
from pathlib import Path

import torch
from transformers import AutoConfig

from tests.vllm.reference import Reference

SURELY = 1e-4
"""By so much the logit of the last expert chosen has to be above the next one's."""


class NearTieError(Exception):
    """Two experts of a token are so near that rounding chooses: this prompt tells nothing."""


def _experts_of(logits, count):
    best = logits.topk(count + 1, dim=-1)
    if (best.values[:, -2] - best.values[:, -1]).min() < SURELY:
        raise NearTieError
    return best.indices[:, :-1]


class Mixtral(Reference):
    """A token goes through the experts that its router ranks highest, by their shares among those."""

    router, prefix, parts = "block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")
    renormalised = True

    def _mlp(self, normed, name):
        experts, chosen = self._routed(normed @ self.weights[f"{name}{self.router}.weight"].T, name)
        if self.renormalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        out = torch.zeros_like(normed)
        for row, states in enumerate(normed):
            for share, expert in zip(chosen[row], experts[row].tolist(), strict=True):
                parts = (f"{name}{self.prefix}.{expert}.{part}.weight" for part in self.parts)
                out[row] += share * self._gated(states, *parts)
        return out

    def _routed(self, logits, _name):
        experts = _experts_of(logits, self.config.num_experts_per_tok)
        return experts, torch.softmax(logits, -1).gather(-1, experts)


class Qwen3Moe(Mixtral):
    """As Mixtral, but for the names, and shares may be left as they are."""

    router, prefix, parts = "mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.renormalised = self.config.norm_topk_prob


class Phi3(Reference):
    """Projections stand in one matrix: queries, keys, values; gate and up. LongRoPE divides each angle by a factor."""

    def _angles(self, rope):
        angles = super()._angles(rope)
        if rope["rope_type"] != "longrope":
            return angles
        original = rope["original_max_position_embeddings"]
        attention_factor = (1 + log(self.config.max_position_embeddings / original) / log(original)) ** 0.5
        self.scale = self.dim**-0.5 * attention_factor**2
        return angles / torch.tensor(rope["short_factor"], dtype=torch.float64)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in [name for name in self.weights if name.endswith("qkv_proj.weight")]:
            parts = self.weights[name].split([self.heads * self.dim, *(self.kv_heads * self.dim,) * 2])
            for which, part in zip("qkv", parts, strict=True):
                self.weights[name.replace("qkv", which)] = part
        for name in [name for name in self.weights if name.endswith("gate_up_proj.weight")]:
            for which, part in zip(("gate", "up"), self.weights[name].chunk(2), strict=True):
                self.weights[name.replace("gate_up", which)] = part


class Qwen2Moe(Qwen3Moe):
    """And through one more MLP, as far as a gate of its own lets it."""

    def _mlp(self, normed, name):
        parts = (f"{name}mlp.shared_expert.{part}.weight" for part in self.parts)
        share = torch.sigmoid(normed @ self.weights[f"{name}mlp.shared_expert_gate.weight"].T)
        return super()._mlp(normed, name) + share * self._gated(normed, *parts)


class NormedOverHeads(Reference):
    """Queries and keys are normed over all heads at once."""

    def _project(self, normed, name, which, heads):
        out = normed @ self._weight(name, which).T
        scale = f"{name}self_attn.{which}_norm"
        out = self._norm(out, scale) if f"{scale}.weight" in self.weights else out
        return out.view(len(normed), heads, self.dim)


class Olmoe(NormedOverHeads, Qwen3Moe):
    """A mixture of experts."""


class Gemma(Reference):
    """Scaled embeddings, norms of 1 + weight, GELU."""

    def _embed(self, ids):
        return super()._embed(ids) * self.config.hidden_size**0.5

    def _activation(self, states):
        return torch.nn.functional.gelu(states, approximate="tanh")

    def _norm(self, states, name):
        scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled * (1 + self.weights[f"{name}.weight"])


class Gemma3(Gemma):
    """Norms behind attention and MLP too; queries by a scale of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.scale = self.config.query_pre_attn_scalar**-0.5

    def _finish(self, hidden, attended, name):
        hidden = hidden + self._norm(attended, name + "post_attention_layernorm")
        made = self._mlp(self._norm(hidden, name + "pre_feedforward_layernorm"), name)
        return hidden + self._norm(made, name + "post_feedforward_layernorm")


class Gemma2(Gemma3):
    """Scores and logits are capped: they approach a bound and never reach it."""

    def _scores(self, scores):
        return self._capped(scores, self.config.attn_logit_softcapping)

    def _logits(self, hidden):
        return self._capped(super()._logits(hidden), self.config.final_logit_softcapping)

    def _capped(self, states, cap):
        return cap * torch.tanh(states / cap)


class Interleaved(Reference):
    """Dim 2i is rotated with dim 2i + 1."""

    def _pairs(self, states, dims):
        return torch.complex(states[..., 0:dims:2], states[..., 1:dims:2]), states[..., dims:]

    def _unpaired(self, pairs):
        return torch.stack((pairs.real, pairs.imag), -1).flatten(-2)


class Glm4(Interleaved, Phi3):
    """Norms behind attention and MLP, under other names than Gemma's."""

    def _finish(self, hidden, attended, name):
        hidden = hidden + self._norm(attended, name + "post_self_attn_layernorm")
        made = self._mlp(self._norm(hidden, name + "post_attention_layernorm"), name)
        return hidden + self._norm(made, name + "post_mlp_layernorm")


class Stablelm(Reference):
    """Norms take the mean off, and add a bias if there is one."""

    more_weight = 0.0

    def _norm(self, states, name):
        named = ("layer_norm_eps", "norm_eps", "norm_epsilon")
        eps = next(getattr(self.config, name) for name in named if hasattr(self.config, name))
        centred = states - states.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
        return scaled * (self.more_weight + self.weights[f"{name}.weight"]) + self.weights.get(f"{name}.bias", 0.0)


class Nemotron(Stablelm):
    """Norms of 1 + weight, and an MLP without a gate."""

    more_weight = 1.0

    def _mlp(self, normed, name):
        up, down = (self.weights[f"{name}mlp.{which}_proj.weight"] for which in ("up", "down"))
        return torch.relu(normed @ up.T).pow(2) @ down.T


class Cohere(Interleaved, Stablelm):
    """Attention and MLP side by side; scaled logits."""

    def _finish(self, hidden, attended, name):
        return hidden + attended + self._mlp(self._before_attention(hidden, name), name)

    def _logits(self, hidden):
        return super()._logits(hidden) * self.config.logit_scale


class PostNorm(Reference):
    """Norms behind attention and MLP only."""

    def _before_attention(self, hidden, name):
        return hidden

    def _finish(self, hidden, attended, name):
        hidden = hidden + self._norm(attended, name + "post_attention_layernorm")
        return hidden + self._norm(self._mlp(hidden, name), name + "post_feedforward_layernorm")


class Olmo(NormedOverHeads, PostNorm):
    """OLMo 2 and 3."""


class Exaone4(PostNorm):
    """Layers without a window do not rotate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.frequencies = [
            angles if window else 0 * angles for angles, window in zip(self.frequencies, self.windows, strict=True)
        ]


class SmolLM3(Reference):
    """Some layers do not rotate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        rotates = self.config.no_rope_layers
        self.frequencies = [angles * does for angles, does in zip(self.frequencies, rotates, strict=True)]


class Glm(Interleaved, Phi3):
    """GLM 4 9B and earlier."""


class Phi(Stablelm):
    """Attention and MLP side by side, an MLP of two matrices, biases everywhere, modules of other names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for part in ("weight", "bias"):
            self.weights[f"model.norm.{part}"] = self.weights[f"model.final_layernorm.{part}"]
            for layer in range(self.layers):
                name = f"model.layers.{layer}.self_attn."
                self.weights[f"{name}o_proj.{part}"] = self.weights[f"{name}dense.{part}"]

    def _finish(self, hidden, attended, name):
        return hidden + attended + self._mlp(self._before_attention(hidden, name), name)

    def _mlp(self, normed, name):
        up, down = (self.weights[f"{name}mlp.{which}.weight"] for which in ("fc1", "fc2"))
        more, last = (self.weights[f"{name}mlp.{which}.bias"] for which in ("fc1", "fc2"))
        return torch.nn.functional.gelu(normed @ up.T + more, approximate="tanh") @ down.T + last

    def _logits(self, hidden):
        return super()._logits(hidden) + self.weights["lm_head.bias"]


class Granite(Reference):
    """Embeddings, scores, what is added to the stream, and logits are scaled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.scale = self.config.attention_multiplier

    def _embed(self, ids):
        return super()._embed(ids) * self.config.embedding_multiplier

    def _finish(self, hidden, attended, name):
        hidden = hidden + self.config.residual_multiplier * attended
        made = self._mlp(self._norm(hidden, name + "post_attention_layernorm"), name)
        return hidden + self.config.residual_multiplier * made

    def _logits(self, hidden):
        return super()._logits(hidden) / self.config.logits_scaling


class GraniteMoe(Granite, Mixtral):
    """The experts' matrices are in one tensor each."""

    router = "block_sparse_moe.router.layer"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for layer in range(self.layers):
            name = f"model.layers.{layer}.block_sparse_moe."
            both, down = (self.weights[f"{name}{which}_linear.weight"] for which in ("input", "output"))
            for expert in range(len(both)):
                parts = (*both[expert].chunk(2), down[expert])
                for which, part in zip(self.parts, parts, strict=True):
                    self.weights[f"{name}experts.{expert}.{which}.weight"] = part


class BySigmoid(Mixtral):
    """Experts are chosen by sigmoids plus a bias, and weighed by the sigmoids alone."""

    bias = "block_sparse_moe"

    def _routed(self, logits, name):
        scores = torch.sigmoid(logits)
        biased = scores + self.weights[f"{name}{self.bias}.e_score_correction_bias"]
        experts = _experts_of(biased, self.config.num_experts_per_tok)
        return experts, scores.gather(-1, experts)


class Glm4Moe(BySigmoid):
    """And through one more MLP; the first layers have no experts."""

    router, prefix, parts, bias = "mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate"

    def _mlp(self, normed, name):
        if f"{name}{self.router}.weight" not in self.weights:
            return Reference._mlp(self, normed, name)
        shared = self._gated(normed, *(f"{name}mlp.shared_experts.{part}.weight" for part in self.parts))
        return shared + self.config.routed_scaling_factor * super()._mlp(normed, name)


class Ungated(Reference):
    """An MLP without a gate: two matrices, with biases if there are any."""

    up, down = "up_proj", "down_proj"

    def _mlp(self, normed, name):
        return self._linear(self._activation(self._linear(normed, f"{name}mlp.{self.up}")), f"{name}mlp.{self.down}")

    def _linear(self, states, name):
        return states @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _activation(self, states):
        return torch.relu(states).pow(2)


class Jais2(Ungated, Stablelm):
    """Norms of Stablelm."""


class Starcoder2(Ungated, Stablelm):
    """GELU, and modules of other names."""

    up, down = "c_fc", "c_proj"

    def _activation(self, states):
        return torch.nn.functional.gelu(states, approximate="tanh")


class GptOss(Reference):
    """Sinks in the softmax, YaRN, experts with clamped gates, biases everywhere."""

    def _angles(self, rope):
        angles = super()._angles(rope)
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
        low, high = (
            self.dim * log(original / (turns * 2 * pi)) / (2 * log(rope["rope_theta"]))
            for turns in (rope["beta_fast"], rope["beta_slow"])
        )
        slow = ((torch.arange(len(angles), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        self.scale = self.dim**-0.5 * (0.1 * log(factor) + 1) ** 2
        return angles / factor * slow + angles * (1 - slow)

    def _softmax(self, scores, layer):
        sinks = self.weights[f"model.layers.{layer}.self_attn.sinks"][:, None, None].expand(-1, scores.shape[1], 1)
        return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]

    def _mlp(self, normed, name):
        router, bias = (self.weights[f"{name}mlp.router.{part}"] for part in ("weight", "bias"))
        logits = normed @ router.T + bias
        experts = _experts_of(logits, self.config.num_experts_per_tok)
        shares = torch.softmax(logits.gather(-1, experts), -1)
        out = torch.zeros_like(normed)
        for row, states in enumerate(normed):
            for share, expert in zip(shares[row], experts[row].tolist(), strict=True):
                out[row] += share * self._expert(states, f"{name}mlp.experts.", expert)
        return out

    def _expert(self, states, name, expert):
        both = states @ self.weights[name + "gate_up_proj"][expert] + self.weights[name + "gate_up_proj_bias"][expert]
        gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        made = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return made @ self.weights[name + "down_proj"][expert] + self.weights[name + "down_proj_bias"][expert]


FAMILIES: dict[str, type[Reference]] = {
    "arcee": Ungated,
    "cohere": Cohere,
    "ernie4_5": Interleaved,
    "exaone4": Exaone4,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "glm": Glm,
    "glm4": Glm4,
    "glm4_moe": Glm4Moe,
    "gpt_oss": GptOss,
    "granite": Granite,
    "granitemoe": GraniteMoe,
    "helium": Interleaved,
    "jais2": Jais2,
    "mixtral": Mixtral,
    "nemotron": Nemotron,
    "olmo2": Olmo,
    "olmo3": Olmo,
    "olmoe": Olmoe,
    "phi": Phi,
    "phi3": Phi3,
    "qwen2_moe": Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
    "smollm3": SmolLM3,
    "stablelm": Stablelm,
    "starcoder2": Starcoder2,
}


def reference_of(folder: Path) -> Reference:
    """The reference for a checkpoint of any family."""
    return FAMILIES.get(AutoConfig.from_pretrained(folder).get_text_config().model_type, Reference)(folder)
