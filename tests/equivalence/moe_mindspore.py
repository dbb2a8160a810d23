"""A language model of experts only, in plain MindSpore. See `production_bodies.py`."""

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops
from mindspore.mint.nn.functional import linear, silu


def _zeros(*shape):
    return ms.Parameter(ms.Tensor(np.zeros(shape, "float32")), name="zeros")


class Qwen3MoeExperts(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.num_experts, self.inner = config["num_experts"], config["moe_intermediate_size"]
        self.gate_up_proj = _zeros(self.num_experts, 2 * self.inner, config["hidden_size"])
        self.down_proj = _zeros(self.num_experts, config["hidden_size"], self.inner)

    def construct(self, tokens, chosen, weights):
        result = ops.zeros_like(tokens)
        for expert in range(self.num_experts):
            both = linear(tokens, self.gate_up_proj[expert])
            half = both.shape[-1] // 2
            inner = silu(both[..., :half]) * both[..., half:]
            share = ((chosen == expert).to(weights.dtype) * weights).sum(-1, keepdims=True)
            result = result + linear(inner, self.down_proj[expert]) * share
        return result


class Router(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.weight = _zeros(config["num_experts"], config["hidden_size"])
        self.normalised = config.get("norm_topk_prob", False)

    def construct(self, tokens):
        weights, chosen = ops.topk(mint.softmax(linear(tokens, self.weight), -1), 2)
        return (weights / weights.sum(-1, keepdims=True) if self.normalised else weights), chosen


class MoE(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.gate, self.experts = Router(config), Qwen3MoeExperts(config)

    def construct(self, hidden):
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.gate(tokens)
        return self.experts(tokens, chosen, weights).reshape(hidden.shape)


class RMSNorm(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.weight = _zeros(config["hidden_size"])

    def construct(self, x):
        return x * mint.rsqrt(mint.mean(x * x, -1, True) + 1e-6) * self.weight


class Layer(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm, self.mlp = RMSNorm(config), MoE(config)

    def construct(self, hidden):
        return hidden + self.mlp(self.input_layernorm(hidden))


class Model(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.CellList([Layer(config) for _ in range(config["num_hidden_layers"])])
        self.norm = RMSNorm(config)
        self.lm_head = nn.Dense(config["hidden_size"], config["vocab_size"], has_bias=False)

    def construct(self, ids):
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))
