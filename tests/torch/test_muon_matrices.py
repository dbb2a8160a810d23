"""Routes, matrices and QK-clip of Hugging Face's models, held against the queries, keys and values that they make."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.muon.adapters import views_of
from hyper_parallel.core.muon.qk_clip import ClipOfRank, QKClip, plan
from hyper_parallel.core.muon.qk_heads import attentions_of
from hyper_parallel.core.muon.routing import routes_of
from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.model import ModelDescription, describe
from hyper_parallel.core.plan.roles import assign_roles
from tests.torch.all_ranks import double_precision
from tests.torch.test_hugging_face import FAMILIES, OTHERS, build

ZOO = FAMILIES | OTHERS
OWN_CODE = {
    *("bloom", "falcon with one key", "falcon with groups", "falcon with fewer groups", "falcon with slopes"),
    *("falcon with slopes and one key", "gpt_neo", "gpt_neox_japanese", "mpt", "mpt with clipped projections"),
    *("openai-gpt", "xglm", "deepseek_v32", "glm_moe_dsa"),
}
"""Models that hand their queries and keys to nobody."""


class Seen(Exception):
    """What the first attention of a model was called with: queries and keys as logits, and values."""


def look(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """An attention function, by Hugging Face's own interface, that ends the forward."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    raise Seen(module, query @ keys.mT, value)


AttentionInterface.register("look", look)


def described(model: torch.nn.Module) -> ModelDescription:
    return describe(model, backends.load("torch"))


def first_attention(model: torch.nn.Module) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The name of the first attention that runs, its logits before scaling [batch, heads, tokens, tokens], values."""
    model.set_attn_implementation("look")
    with pytest.raises(Seen) as seen:
        model(input_ids=torch.arange(1, 11).reshape(2, 5), use_cache=False)
    module, logits, values = seen.value.args
    return next(name for name, each in model.named_modules() if each is module), logits, values


@pytest.mark.parametrize("family", ZOO)
def test_every_parameter_has_a_route_every_matrix_a_view_and_heads_are_where_the_forward_has_them(family):
    with double_precision(), torch.no_grad():
        model = build(*ZOO[family])
        description = described(model)
        roles = assign_roles(description)
        routes, views = routes_of(description, roles=roles), views_of(description, roles=roles)
        assert list(routes) == [name for name, _ in model.named_parameters()]
        assert set(views) == {name for name, each in model.named_parameters() if each.ndim > 1}
        assert not [name for name, route in routes.items() if "taken as one matrix" in route.why]
        if family not in OWN_CODE:
            assert_clipping_makes_logits_smaller(model, description, roles)


def assert_clipping_makes_logits_smaller(
    model: torch.nn.Module, description: ModelDescription, roles: RoleResult
) -> None:
    """The logits of each head become smaller by its factors, and values stay. Positions turn queries and keys, but
    linearly; what norms them has to be known."""
    path, before, values = first_attention(model)
    attentions, unclear = attentions_of(description, roles)
    if path in unclear:
        assert unclear[path].endswith("norms what it would scale")
        return
    heads, groups = before.shape[1], values.shape[1]
    assert next(each.heads for each in attentions if each.path == path) == heads
    gamma = 0.5 ** torch.arange(1.0, heads + 1)
    clip = ClipOfRank(plan(description, QKClip(tau=1.0, alpha=0.25), roles), whole(description), 0)
    parameters = dict(model.named_parameters())
    for name, boxes, factors in clip.scales(clip.pack({path: (1 / gamma).tolist()})):
        assert name.startswith(path)
        for box, factor in zip(boxes, factors, strict=True):
            parameters[name][box] *= factor
    _, after, same = first_attention(model)
    shared = gamma.reshape(groups, -1).amin(1).repeat_interleave(heads // groups)
    factor = gamma**0.25 * shared**0.75
    # float64 rounds sums of a few hundred terms to some 1e-15
    torch.testing.assert_close(after, before * factor[:, None, None], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(same, values, rtol=0, atol=0)


def whole(description: ModelDescription) -> dict[str, hp.Layout]:
    """Every parameter on one rank."""
    return {each.name: hp.Layout(hp.DeviceMesh((1,), ("shard",)), {}, each.shape) for each in description.parameters}


def test_maxima_that_were_refused_are_over():
    model = build(*ZOO["llama"])
    optimizer = hp.Muon(model, qk_clip=hp.QKClip(tau=1.0))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.observe_attention({"model.layers.1.self_attn": torch.tensor([1.0, 2.0, torch.nan, 3.0])})
    with pytest.raises(hp.ConfigError, match="head 2 of model.layers.1.self_attn is nan; nothing was changed"):
        optimizer.step()
    assert all((one == other).all() for one, other in zip(model.parameters(), before))
    optimizer.step()
    assert all((one != other).any() for one, other in zip(model.parameters(), before))


def test_the_largest_logits_of_micro_batches_count_and_heads_are_scaled_after_the_update():
    plain, clipped = build(*ZOO["llama"]), build(*ZOO["llama"])
    for model, clip in ((plain, None), (clipped, hp.QKClip(tau=1.0))):
        optimizer = hp.Muon(model, qk_clip=clip, ns_dtype="float32")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if clip:
            optimizer.observe_attention({"model.layers.1.self_attn": [4.0, 0.5, 1.0, 2.0]})
            optimizer.observe_attention({"model.layers.1.self_attn": [1.0, 0.7, 1.0, 16.0]})
        optimizer.step()
    query = clipped.model.layers[1].self_attn.q_proj.weight / plain.model.layers[1].self_attn.q_proj.weight
    expected = torch.tensor([0.5, 1.0, 1.0, 0.25], dtype=torch.float64)  # square roots of 1/4, 1, 1, 1/16
    torch.testing.assert_close(query.detach().reshape(4, 8, 32), expected[:, None, None].expand(4, 8, 32))
    for (name, one), (_, other) in zip(clipped.named_parameters(), plain.named_parameters()):
        assert ("layers.1.self_attn.q_proj" in name or "layers.1.self_attn.k_proj" in name) or (one == other).all()
