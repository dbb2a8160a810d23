"""A language model of experts only, in plain PyTorch. See `production_bodies.py`."""

import torch
from torch import nn
from torch.nn import functional as F


class Qwen3MoeExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts, inner = config["num_experts"], config["moe_intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.zeros(self.num_experts, 2 * inner, config["hidden_size"]))
        self.down_proj = nn.Parameter(torch.zeros(self.num_experts, config["hidden_size"], inner))

    def forward(self, tokens, chosen, weights):
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            gate, up = F.linear(tokens, self.gate_up_proj[expert]).chunk(2, -1)
            share = ((chosen == expert).to(weights.dtype) * weights).sum(-1, keepdim=True)
            result = result + F.linear(F.silu(gate) * up, self.down_proj[expert]) * share
        return result


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config["num_experts"], config["hidden_size"]))
        self.normalised = config.get("norm_topk_prob", False)

    def forward(self, tokens):
        weights, chosen = torch.topk(torch.softmax(F.linear(tokens, self.weight), -1), 2, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.normalised else weights), chosen


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate, self.experts = Router(config), Qwen3MoeExperts(config)

    def forward(self, hidden):
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.gate(tokens)
        return self.experts(tokens, chosen, weights).reshape(hidden.shape)


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config["hidden_size"]))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm, self.mlp = RMSNorm(config), MoE(config)

    def forward(self, hidden):
        return hidden + self.mlp(self.input_layernorm(hidden))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids):
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))
