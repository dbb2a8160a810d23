"""What every rank does in test_decoder.py."""

import importlib

from hyper_parallel.models.config import DecoderConfig


def build(backend, config, weights):
    """The backend's decoder with `config` (a dict of its fields) and `weights`, and of their form: without norms of
    heads if there are no weights for them, and with experts in its layers if there are some."""
    decoder = importlib.import_module(f"hyper_parallel.models.{backend.name}_decoder").Decoder(DecoderConfig(**config))
    form = {name.removeprefix("model.layers.0.") for name in weights}
    for layer in decoder.model.layers:
        if "self_attn.q_norm.weight" not in form:
            nothing = importlib.import_module(backend.name).nn.Identity
            layer.self_attn.q_norm, layer.self_attn.k_norm = nothing(), nothing()
        if "mlp.gate.weight" in form:
            experts = importlib.import_module(f"tests.equivalence.moe_{backend.name}")
            layer.mlp = experts.MoE(experts_of(weights, normalised="self_attn.q_norm.weight" not in form))
    backend.modules.load_parameters(decoder, weights)
    return decoder


def experts_of(weights, normalised):
    """The sizes of a layer's experts; `normalised` makes the weights of a token's experts add up to one, as Mixtral
    does and Qwen3 by default does not."""
    experts, hidden, inner = weights["model.layers.0.mlp.experts.down_proj"].shape
    sizes = {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": inner}
    return sizes | {"norm_topk_prob": normalised}


def parameters(backend, config, weights):
    """Name -> shape of every use of a parameter, and the names that share one."""
    uses = backend.modules.parameter_uses(build(backend, config, weights))
    first = {}
    shared = {use.name: first.setdefault(id(use.parameter), use.name) for use in uses}
    return {use.name: tuple(use.parameter.shape) for use in uses}, {a: b for a, b in shared.items() if a != b}


def loss_and_gradients(backend, config, weights, ids):
    """The mean cross entropy of each next token, and name -> gradient."""
    decoder = build(backend, config, weights)
    uses = {id(use.parameter): use for use in reversed(backend.modules.parameter_uses(decoder))}
    trained = {use.name: use.parameter for use in uses.values()}
    tokens = backend.tensors.from_numpy(ids)

    def loss():
        return backend.training.cross_entropy(decoder(tokens)[:, :-1], tokens[:, 1:], "sum") / (ids[:, 1:].size)

    value, gradients = backend.autograd.value_and_grad(loss, list(trained.values()))()
    return float(backend.tensors.to_numpy(value)), {
        name: backend.tensors.to_numpy(gradient) for name, gradient in zip(trained, gradients, strict=True)
    }


def logits(backend, config, weights, *batches):
    """The logits of several batches of token ids, of any shapes, from one decoder."""
    decoder = build(backend, config, weights)
    return [backend.tensors.to_numpy(decoder(backend.tensors.from_numpy(ids))) for ids in batches]


def refusal(backend, config, weights, ids):
    """The message of the ValueError that a batch raises."""
    try:
        logits(backend, config, weights, ids)
    except ValueError as error:
        return str(error)
