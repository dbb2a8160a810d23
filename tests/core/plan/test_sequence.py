"""Sequence parallelism where it is not known who sees all tokens: told, and mended by doing without it."""

from __future__ import annotations

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.violations import report
from tests.core.plan.by_hand import by_hand
from tests.core.plan.linting import mended, wrong
from tests.core.plan.test_whole import ATTENTION, MLP, SIZES, TWO, Parameters, decoder, kept

PARTS = ATTENTION | MLP


def model(*lists: str, block: str = "Block", outside: Parameters | None = None) -> ModelDescription:
    """Two blocks in each of the lists, a table before and a norm and a head behind."""
    parameters: Parameters = {"embed_tokens.weight": ((96, 32), "Embedding"), "lm_head.weight": ((96, 32), "Linear")}
    modules = {}
    for each in lists or ("layers",):
        modules[each] = "ModuleList"
        for layer in range(2):
            modules[f"{each}.{layer}"] = block
            parts = PARTS if each == "layers" else MLP
            parameters |= {f"{each}.{layer}.{name}": part for name, part in parts.items()}
    parameters |= {"norm.weight": ((32,), "RMSNorm")} | (outside or {})
    return by_hand(parameters, modules, SIZES)


WRONG = {
    "several lists": (
        model("layers", "more"),
        None,
        "more",
        "blocks stand in 2 lists, layers and more, and nothing tells which comes first",
    ),
    "blocks that are never called": (
        model(block="ModuleDict"),
        None,
        "layers.0",
        "is a ModuleDict, which is never called, and the sequence is to be cut when it is",
    ),
    "attention between blocks": (
        model(outside={f"shared.{name}": each for name, each in ATTENTION.items()} | {}),
        {"parameters": {"shared.**": {"role": "auto"}}},
        "shared.self_attn",
        "is attention outside of the blocks in layers, and nothing tells whether it is called between them",
    ),
    "two norms": (
        model(outside={"mid_norm.weight": ((32,), "RMSNorm")}),
        None,
        "norm",
        "and mid_norm are norms outside of the blocks, and nothing tells which stands behind",
    ),
    "a linear outside": (
        model(outside={"time.weight": ((32, 7), "Linear")}),
        kept("time.weight"),
        "time.weight",
        "is whole outside of the blocks, and nothing tells whether they use it, each rank on its tokens",
    ),
    "rows for positions in a block": (
        decoder({"positions": ((7, 32), "Block")}),
        kept("positions"),
        "layers.0.positions",
        "stands bare in a block, and may have one row for each of all tokens",
    ),
    "a linear alone in a block": (
        decoder({"mix.weight": ((32, 32), "Linear")}),
        kept("mix.weight"),
        "layers.0.mix.weight",
        "is computed with alone in a block, and nothing tells whether tokens are mixed behind it",
    ),
    "a bias that a module may hand out": (
        decoder({"conv.mix.weight": ((32, 32), "Linear"), "conv.mix_bias": ((32,), "Conv")}),
        kept("conv.**"),
        "layers.0.conv.mix_bias",
        "has the hidden size 32 in dim 0 and stands bare in a module that has all tokens, and nothing tells whether "
        "that hands it to what has a part of them; `pending: none` says that it does not, and `pending: [tensor]` that "
        "it does",
    ),
    "attention to other tokens": (
        decoder({"cross_attn.mix.weight": ((32, 32), "Linear")}),
        kept("cross_attn.mix.weight"),
        "layers.0.cross_attn.mix.weight",
        "stands in attention to other tokens, which nothing tells to be cut or whole",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_who_sees_which_tokens_must_be_known(case):
    described, asked, where, message = WRONG[case]
    (found,) = mended(described, TWO, asked)
    assert (found.rule, found.where, found.line, found.section) == ("sequence", where, "sequence_parallel: false", "")
    assert found.message == message


BIAS = "self_attn.out_bias"


@pytest.mark.parametrize("whole", ["layers.*.self_attn.**", f"layers.*.{BIAS}"])
def test_a_bias_that_may_be_added_behind_its_module_is_not_pasted_into_a_wrong_plan(whole):
    """Kept whole with all of its attention, or alone in an attention that is whole too, as GPT-NeoX-Japanese has it."""
    described = decoder({BIAS: ((32,), "Attention")})
    parameters = [{"match": whole, "role": "none"}, {"match": "**.self_attn.**", "placements": {"tensor": "replicate"}}]
    (found,) = mended(described, TWO, {"parameters": parameters})
    assert (found.rule, found.where) == ("sequence", f"layers.0.{BIAS}")
    found = mended(described, TWO)
    assert [each.rule for each in found] == ["unknown", "sequence"]


@pytest.mark.parametrize("said, pending", [(["tensor"], ("tensor",)), ("none", ())])
def test_who_adds_a_bias_is_asked(said, pending):
    entries = [{"match": "**.self_attn.**", "role": "none"}, {"match": f"**.{BIAS}", "pending": said}]
    plan = derive(decoder({BIAS: ((32,), "Attention")}), DeviceMesh.from_sizes(TWO), {"parameters": entries})
    assert plan.sequence_parallel and plan[f"layers.1.{BIAS}"].pending == pending
    assert not plan["layers.1.self_attn.q_proj.weight"].pending


def test_what_modules_hold_for_their_own_use_is_not_handed_out():
    extra: Parameters = {
        "conv.mix.weight": ((32, 32), "Linear"),
        "conv.mix.bias": ((32,), "Linear"),
        "conv.norm.weight": ((32,), "RMSNorm"),
        "conv.gate.rate": ((32,), "Gate"),
        "conv.scale": ((7,), "Conv"),
        "conv.packed": ((3, 32, 7), "Conv"),
    }
    assert wrong(decoder(extra), TWO, kept("conv.**")) == []
    assert wrong(decoder({"mixer.bias": ((32,), "Block")}), TWO, kept("mixer.bias")) == []


def test_the_line_stands_at_the_top_of_the_file():
    found = wrong(decoder({"mix.weight": ((32, 32), "Linear")}), TWO)
    assert report(found).endswith(
        "all lines together, as an override file:\n"
        "  sequence_parallel: false\n"
        "  parameters:\n"
        "    layers.*.mix.weight: {role: none}"
    )
    assert str(found[-1]).endswith("; write at the top level\n    sequence_parallel: false")


@pytest.mark.parametrize(
    "outside",
    [
        {"word_embeddings_layernorm.weight": ((32,), "RMSNorm")},
        {"unembed.weight": ((96, 32), "Linear")},
    ],
)
def test_what_is_usual_outside_of_the_blocks_is_allowed(outside):
    asked = kept(*(name for name in outside if name.startswith("unembed")))
    plan = derive(model(outside=outside), DeviceMesh.from_sizes(TWO), asked if asked["parameters"] else None)
    assert plan.sequence_parallel and not plan["norm.weight"].pending


@pytest.mark.parametrize("said, pending", [(["tensor"], ("tensor",)), ("none", ())])
def test_who_uses_a_bare_parameter_is_asked(said, pending):
    described = model(outside={"temperature": ((1,), "Model")})
    off = {"sequence_parallel": False}
    (found,) = mended(described, TWO, off | kept("temperature"))
    assert found.line == '"**": {placements: {tensor: replicate}}'
    assert found.message.startswith(
        "stays whole with role: none, and stands bare outside of the blocks, and nothing tells whether cut modules use "
        "it, each rank for its part"
    )
    told = {"parameters": {"temperature": {"role": "none", "pending": said}}}
    plan = derive(described, DeviceMesh.from_sizes(TWO), off | told)
    assert plan["temperature"].pending == pending
    assert plan["layers.0.mlp.up_proj.weight"].placements


def test_pending_axes_of_a_role_are_its_own():
    asked = {"parameters": {"layers.*.mlp.up_proj.weight": {"pending": ["tensor"]}}}
    (found,) = mended(model(), TWO, asked)
    assert (found.rule, found.line) == ("override", "layers.*.mlp.up_proj.weight: {pending: auto}")
    assert found.message == "is up, which decides along which axes its gradient is pending"
