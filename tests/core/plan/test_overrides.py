"""Overrides: what a file may say, what wins, what is refused, and that no file whatever ends in a traceback."""

from __future__ import annotations

import copy
import random
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_parallel.core.errors import ConfigError, PlanError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Partial, Replicate, Shard
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.lint import lint
from hyper_parallel.core.plan.override_file import _ROLES as ROLES
from hyper_parallel.core.plan.overrides import Overrides
from hyper_parallel.core.plan.patterns import matching
from hyper_parallel.core.plan.plan import ShardingPlan
from tests.core.plan.by_hand import by_hand, stored
from tests.core.plan.linting import drafted

MESH = DeviceMesh.from_sizes({"shard": 2, "tensor": 2})
ATTENTION = "model.layers.*.self_attn.**"
QUERY = "model.layers.0.self_attn.q_proj.weight"
DOCUMENT = Path(__file__).parents[3] / "docs" / "overrides.md"


def read(overrides, model="llama", mesh=MESH) -> Overrides:
    return Overrides.read(overrides, stored(model), mesh)


def refused(overrides, model="llama", mesh=MESH) -> list[str]:
    """The lines of the refusal."""
    with pytest.raises(PlanError) as error:
        read(overrides, model, mesh)
    return str(error.value).splitlines()


def boundary(plan: ShardingPlan, module: str):
    (found,) = [each for each in plan.boundaries if each.module == module]
    return found


# patterns

NAMES = ["", "a", "a.b", "a.b.c", "a.0.c", "a.10.c", "x.b.c", "a.bc.d"]


@pytest.mark.parametrize(
    "pattern, names",
    [
        ("a.b", ["a.b"]),
        ("*", ["a"]),
        ("a.*", ["a.b"]),
        ("a.*.c", ["a.b.c", "a.0.c", "a.10.c"]),
        ("a.1*.c", ["a.10.c"]),
        ("a.b*.*", ["a.b.c", "a.bc.d"]),
        ("**", NAMES),
        ("a.**", ["a", "a.b", "a.b.c", "a.0.c", "a.10.c", "a.bc.d"]),
        ("**.c", ["a.b.c", "a.0.c", "a.10.c", "x.b.c"]),
        ("a.**.c", ["a.b.c", "a.0.c", "a.10.c"]),
        ("**.b.**", ["a.b", "a.b.c", "x.b.c"]),
        ("b", []),
    ],
)
def test_a_star_is_a_segment_or_part_of_one_and_two_are_any_number(pattern, names):
    assert matching(pattern, NAMES) == names


def test_many_stars_take_no_time():
    assert matching(".".join(["**", "*a*"] * 40), [".".join(["ba"] * 60) + ".c"]) == []
    assert matching("*a" * 12 + "b", ["a" * 60]) == []


# roles and placements


def test_a_list_and_a_mapping_say_the_same():
    entry = {"placements": {"tensor": "replicate"}}
    listed = read({"parameters": [{"match": ATTENTION, **entry}]})
    assert listed.parameters == read({"parameters": {ATTENTION: entry}}).parameters
    assert listed.placements(QUERY) == {"tensor": Replicate()}


def test_what_is_kept_whole_is_cut_over_shard_as_if_there_were_no_tensor():
    plan = derive(stored("llama"), MESH, {"parameters": {ATTENTION: {"placements": {"tensor": "replicate"}}}})
    kept = plan[QUERY]
    assert (kept.role, dict(kept.placements), kept.local_shape) == ("query", {"shard": Shard(0)}, (16, 32))
    assert kept.pending == ("shard",)
    cut = plan["model.layers.0.mlp.up_proj.weight"]
    assert cut.placements["tensor"] == Shard(0)


def test_none_is_whole_on_every_axis():
    mesh = DeviceMesh.from_sizes({"expert": 2, "tensor": 2})
    plan = derive(stored("mixtral"), mesh, {"parameters": {"model.layers.*.mlp.**": {"placements": "none"}}})
    experts = plan["model.layers.0.mlp.experts.down_proj"]
    assert (dict(experts.placements), experts.pending) == ({}, ("expert",))
    assert boundary(plan, "model.layers.0.mlp.experts").region == "checked"
    assert boundary(plan, "model.layers.0.mlp").outputs[0].before["tensor"] == Replicate()


def test_a_role_by_hand_is_placed_as_any_other():
    parameters = {
        "layers.0.mlp.expand.weight": ((48, 32), "Linear"),
        "layers.0.mlp.expand.bias": ((48,), "Linear"),
        "layers.0.mlp.shrink.weight": ((32, 48), "Linear"),
    }
    model = by_hand(parameters, {"layers.0.mlp": "Feed", "layers.0": "Block"})
    roles = {"layers.*.mlp.expand.*": {"role": "up"}, "layers.*.mlp.shrink.weight": {"role": "down"}}
    plan = derive(model, DeviceMesh((2,), ("tensor",)), {"parameters": roles})
    assert {each.name: (each.role, each.placements["tensor"]) for each in plan.parameters} == {
        "layers.0.mlp.expand.weight": ("up", Shard(0)),
        "layers.0.mlp.expand.bias": ("up", Shard(0)),
        "layers.0.mlp.shrink.weight": ("down", Shard(1)),
    }
    assert plan["layers.0.mlp.expand.weight"].rule == "an override makes it an up: in 32 = hidden_size"
    assert boundary(plan, "layers.0.mlp").outputs[0].before["tensor"] == Partial()


@pytest.mark.parametrize(
    "role, name, why",
    [
        (
            "query",
            "model.layers.0.mlp.up_proj.weight",
            "dim 0 of model.layers.0.mlp.up_proj.weight [48, 32] is 48, expected 32",
        ),
        ("norm", "model.layers.0.mlp.up_proj.weight", "has 2 dims, [48, 32]; expected 1"),
        ("sink", "model.layers.0.mlp.up_proj.weight", "no weight or bias has that role"),
        ("qkv", "model.layers.0.mlp.up_proj.weight", "only the code of LlamaMLP tells the order of its features"),
    ],
)
def test_a_role_that_the_shape_does_not_have_is_refused_with_the_reason(role, name, why):
    with pytest.raises(PlanError) as error:
        derive(stored("llama"), MESH, {"parameters": {name: {"role": role}}})
    assert f"[unknown] {name}: an override makes it a" in str(error.value)
    assert why in str(error.value)


# precedence and conditions


def chosen(*entries) -> str:
    """What several entries for one parameter come to."""
    found = read({"parameters": [{"match": match, "placements": placements} for match, placements in entries]})
    return {axis: str(each) for axis, each in found.placements(QUERY).items()}.get("tensor", "auto")


def test_a_later_entry_wins_whatever_its_pattern():
    whole, cut = {"tensor": "replicate"}, {"tensor": "shard(0)"}
    assert chosen((QUERY, whole), ("**", cut)) == "shard(0)"
    assert chosen(("**", cut), (QUERY, whole)) == "replicate"
    assert chosen(("**", whole), (QUERY, {"tensor": "auto"})) == "auto"
    assert chosen(("**", "none"), (QUERY, "auto")) == "auto"
    assert chosen((QUERY, "auto"), ("**", "none")) == "replicate"


def test_fields_win_one_by_one():
    entries = [
        {"match": "**", "role": "none", "placements": {"tensor": "replicate", "expert": "replicate"}},
        {"match": QUERY, "placements": {"tensor": "shard(0)"}},
        {"match": QUERY, "role": "auto"},
    ]
    found = read({"parameters": entries})
    assert found.placements(QUERY) == {"expert": Replicate(), "tensor": Shard(0)}
    assert QUERY not in found.roles and found.roles["model.norm.weight"] == ("whole", "an override")


def test_contracts_win_axis_by_axis_and_end_by_end():
    mesh = DeviceMesh.from_sizes({"context": 2, "tensor": 2})
    first = {"match": "lm_head", "inputs": {"hidden": {"before": {"tensor": "replicate", "context": "replicate"}}}}
    second = {"match": "lm_head", "inputs": {"hidden": {"before": {"context": "auto"}}}}
    before = next(plan for plan in drafted("llama", {"context": 2, "tensor": 2}).boundaries if plan.module == "lm_head")
    overrides = {"boundaries": [first, second]}
    after = next(
        plan
        for plan in drafted("llama", dict(zip(mesh.names, mesh.shape)), overrides).boundaries
        if plan.module == "lm_head"
    )
    assert after.inputs[0].before == {"context": Shard(1), "tensor": Replicate()}
    assert after.inputs[0].after == before.inputs[0].after and after.outputs == before.outputs


@pytest.mark.parametrize(
    "when, holds",
    [
        ({}, True),
        ({"tensor": 2}, True),
        ({"tensor": 4}, False),
        ({"tensor": ">1"}, True),
        ({"tensor": ">= 3"}, False),
        ({"expert": 1}, True),
        ({"tensor": "!=2"}, False),
        ({"tensor": [1, 2]}, True),
        ({"ranks": "<=4"}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": ["qwen3", "llama"]}, True),
        ({"model_type": "!=llama"}, False),
        ({"model_class": "LlamaForCausalLM", "tensor": 2}, True),
        ({"hidden_size": "<32", "tensor": 2}, False),
        ({"tensor": True}, False),
    ],
)
def test_an_entry_holds_only_when_all_its_conditions_do(when, holds):
    found = read({"parameters": {QUERY: {"role": "none", "when": when}}})
    assert (QUERY in found.roles) == holds


def test_what_does_not_hold_may_name_nothing_but_must_be_well_formed():
    read({"parameters": {"nothing": {"role": "none", "when": {"tensor": 8}}}})
    (line,) = refused({"parameters": {"nothing": {"role": "norn", "when": {"tensor": 8}}}})
    assert "did you mean" in line


# boundaries and regions


def test_a_boundary_by_hand():
    asked = {"boundaries": {"lm_head": {"outputs": {"logits": {"after": {"tensor": "replicate"}}}}}}
    logits = boundary(derive(stored("llama"), MESH, asked), "lm_head").outputs[0]
    assert logits.before == {"shard": Shard(0), "tensor": Shard(2)}
    assert logits.after == {"shard": Shard(0), "tensor": Replicate()}
    assert logits.gradient == logits.after
    asked["boundaries"]["lm_head"]["outputs"]["logits"]["gradient"] = {"tensor": "partial"}
    assert boundary(derive(stored("llama"), MESH, asked), "lm_head").outputs[0].gradient["tensor"] == Partial()


def test_a_region_where_there_is_no_boundary():
    layouts = {"hidden": {"after": {"tensor": "replicate"}}}
    asked = {
        "parameters": {"**.mixer.**": {"role": "none"}},
        "regions": {
            "backbone.layers.*.mixer.conv1d": {"kind": "opaque", "inputs": {"state": {"size": 64, **layouts["hidden"]}}}
        },
    }
    plan = derive(stored("mamba"), MESH, asked)
    region = boundary(plan, "backbone.layers.1.mixer.conv1d")
    assert (region.kind, region.region) == ("region", "opaque")
    (state,) = region.inputs
    assert (state.name, state.size, state.after["tensor"]) == ("state", 64, Replicate())
    assert state.before == boundary(plan, "backbone.layers.1.mixer").inputs[0].after
    assert region.outputs == ()


def test_a_region_between_boundaries_takes_hidden_states_as_they_lie():
    parameters, modules = {}, {}
    for block in ("layers.0", "layers.1", "layers.2"):
        parameters |= {f"{block}.mixer.weight": ((7,), "Strange"), f"{block}.norm.weight": ((32,), "RMSNorm")}
        modules[block] = "Block"
    asked = {"parameters": {"**.mixer.**": {"role": "none"}}, "regions": {"layers.*": {"kind": "transparent"}}}
    plan = derive(by_hand(parameters, modules), MESH, asked)
    regions = [boundary(plan, block) for block in modules]
    assert {(each.kind, each.region) for each in regions} == {("region", "transparent")}
    ends = [
        [each.inputs[0].before, each.inputs[0].after, each.outputs[0].before, each.outputs[0].after] for each in regions
    ]
    whole, part = ({"shard": Shard(0), "tensor": each} for each in (Replicate(), Shard(1)))
    assert ends == [[whole, part, part, part], [part, part, part, part], [part, part, part, whole]]


def test_a_region_where_there_is_a_boundary_keeps_its_contracts():
    plan = derive(stored("llama"), MESH, {"regions": {"model.layers.*.mlp": {"kind": "opaque"}}})
    plain = derive(stored("llama"), MESH)
    for module in ("model.layers.0.mlp", "model.layers.1.mlp"):
        region, usual = boundary(plan, module), boundary(plain, module)
        assert (region.region, usual.region) == ("opaque", "checked")
        assert (region.kind, region.inputs, region.outputs) == (usual.kind, usual.inputs, usual.outputs)


# the file as a whole


def test_the_defaults():
    assert (read(None).sequence_parallel, read(None).tokens) == (True, (2, 4096))
    assert not read(None, mesh=DeviceMesh((2,), ("expert",))).sequence_parallel
    assert not read({"sequence_parallel": False}).sequence_parallel
    assert read({"tokens": [6, 128]}).tokens == (6, 128)


def test_the_plan_remembers_what_applied():
    asked = {"parameters": {ATTENTION: {"placements": "none"}}, "boundaries": {"lm_head": {"type": "head"}}}
    remembered = derive(stored("llama"), MESH, asked).overrides
    assert remembered[QUERY] == "parameters: model.layers.*.self_attn.**: {placements: none}"
    assert remembered["lm_head"] == "boundaries: lm_head: {type: head}"
    assert len(remembered) == 9


def test_a_file_and_a_mapping_make_the_same_plan(tmp_path):
    asked = {"sequence_parallel": False, "parameters": {ATTENTION: {"placements": {"tensor": "replicate"}}}}
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump(asked))
    assert derive(stored("llama"), MESH, tmp_path / "overrides.yaml") == derive(stored("llama"), MESH, asked)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert derive(stored("llama"), MESH, tmp_path / "empty.yaml") == derive(stored("llama"), MESH)


REFUSALS = {
    "a list": ([], "overrides: overrides are a mapping with the keys sequence_parallel, tokens, parameters"),
    "an unknown key": ({"parameter": {}}, "overrides: there is no key 'parameter'; did you mean parameters?"),
    "a word for a truth value": (
        {"sequence_parallel": "yes"},
        "sequence_parallel: found 'yes', write true, false or auto",
    ),
    "one number of tokens": ({"tokens": 8}, "tokens: found 8, write [SEQUENCES, LENGTH]"),
    "too few sequences": (
        {"tokens": [1, 64]},
        "tokens: 1 sequence for 2 ranks that each take other ones; write at least [2, 64]",
    ),
    "an entry without a pattern": (
        {"parameters": [{"role": "none"}]},
        "overrides: parameters, entry 1: found {'role': 'none'}, write a mapping with `match: PATTERN`",
    ),
    "a number for a pattern": ({"parameters": {3: {"role": "none"}}}, "entry 1 (3): a pattern is text"),
    "a pattern of stars and letters": ({"parameters": {"a**": {"role": "none"}}}, "the segment 'a**': ** stands alone"),
    "a pattern that fits nothing": (
        {"parameters": {"model.layers.*.self_atn.q_proj.weight": {"role": "none"}}},
        "no parameter is called so; did you mean model.layers.",
    ),
    "an entry that decides nothing": (
        {"parameters": {QUERY: {}}},
        "decides nothing; write role, placements or pending",
    ),
    "an entry that is no mapping": (
        {"parameters": {QUERY: "none"}},
        "found 'none', write a mapping with role, placements or pending",
    ),
    "an unknown role": (
        {"parameters": {QUERY: {"role": "querry"}}},
        "role: there is no role 'querry'; did you mean query?",
    ),
    "null for none": ({"parameters": {QUERY: {"role": None}}}, "role: there is no role None; write auto, none,"),
    "an unknown key of an entry": ({"parameters": {QUERY: {"rol": "up"}}}, "there is no key 'rol'; did you mean role?"),
    "a placement over shard": (
        {"parameters": {QUERY: {"placements": {"shard": "shard(1)"}}}},
        "placements.shard: placements over 'shard' are never set by hand, fully sharded data parallelism decides them",
    ),
    "a placement over replicate": (
        {"parameters": {QUERY: {"placements": {"replicate": "replicate"}}}},
        "placements over 'replicate' are never set by hand",
    ),
    "an unknown axis": (
        {"parameters": {QUERY: {"placements": {"tenso": "replicate"}}}},
        "there is no mesh axis 'tenso'; did you mean tensor?",
    ),
    "a pipeline": ({"parameters": {QUERY: {"placements": {"pipeline": "replicate"}}}}, "pipelines are not planned"),
    "no placement": (
        {"parameters": {QUERY: {"placements": {"tensor": "shard"}}}},
        "placements.tensor: 'shard' is no placement; write replicate",
    ),
    "a pending parameter": (
        {"parameters": {QUERY: {"placements": {"tensor": "partial"}}}},
        "a parameter is no partial value",
    ),
    "an unknown type": (
        {"boundaries": {"lm_head": {"type": "heads"}}},
        "type: there is no type 'heads'; did you mean head?",
    ),
    "an unknown end of a contract": (
        {"boundaries": {"lm_head": {"inputs": {"hidden": {"befor": {"tensor": "replicate"}}}}}},
        "inputs.hidden: there is no key 'befor'; did you mean before?",
    ),
    "an unknown kind of region": (
        {"regions": {"lm_head": {"kind": "closed"}}},
        "kind: there is no kind 'closed'; write auto, opaque or transparent",
    ),
    "a module that there is not": (
        {"regions": {"lm_hed": {"kind": "opaque"}}},
        "no module is called so; did you mean lm_head?",
    ),
    "a condition on nothing": (
        {"parameters": {QUERY: {"role": "none", "when": {"tenso": 2}}}},
        "when: nothing is known of 'tenso'; did you mean tensor?",
    ),
    "a comparison with text": (
        {"parameters": {QUERY: {"role": "none", "when": {"model_type": ">2"}}}},
        "when.model_type: '> 2' compares numbers, and model_type is 'llama'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_is_told_with_what_to_write(case):
    overrides, message = REFUSALS[case]
    (line,) = refused(overrides)
    assert message in line


def test_everything_that_is_wrong_is_told_at_once_with_its_place(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "tokens: 3\nparameters:\n- {match: lm_head.weight, role: hed}\n- {match: nothing, role: none}\nboundary: {}\n"
    )
    assert refused(tmp_path / "mine.yaml") == [
        "mine.yaml: tokens: found 3, write [SEQUENCES, LENGTH], such as [8, 4096], or auto",
        "mine.yaml: parameters, entry 1 ('lm_head.weight'): role: there is no role 'hed'; did you mean head?",
        "mine.yaml: there is no key 'boundary'; did you mean boundaries?",
        "mine.yaml: parameters, entry 2 ('nothing'): no parameter is called so",
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [", "can't be read: while parsing a flow node"),
        ("parameters:\n  a: {role: none}\n  a: {role: up}\n", "line 3: the key 'a' stands twice; put both into one"),
        ("!!python/name:os.system", "could not determine a constructor"),
        ("\0", "can't be read"),
        ("[" * 5000, "can't be read"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(PlanError, match=re.escape("bad.yaml can't be read")) as error:
        derive(stored("llama"), MESH, tmp_path / "bad.yaml")
    assert message in str(error.value)
    with pytest.raises(PlanError, match="No such file"):
        derive(stored("llama"), MESH, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"model.layers": {"type": "none"}}, "model.layers is no boundary; did you mean model.layers."),
        ({"lm_head": {"inputs": {"hiden": {"before": "auto"}}}}, "lm_head: it has no input 'hiden'; write hidden"),
        ({"model.norm": {"type": "mlp"}}, "model.norm is norm by the roles of its parameters, and can't be mlp"),
    ],
)
def test_a_boundary_that_there_is_not(asked, message):
    with pytest.raises(PlanError) as error:
        derive(stored("llama"), MESH, {"boundaries": asked})
    assert message in str(error.value)


# whatever a file says

MODELS = ("llama", "mixtral", "olmo2", "phi3", "gpt_oss", "llama_tied", "mamba", "gpt2", "deepseek_v3")
PLANNED = tuple(name for name in MODELS if name != "mamba")
SIZES = (
    {"tensor": 2},
    {"shard": 2, "expert": 2, "tensor": 2},
    {"replicate": 2, "context": 2, "tensor": 4},
    {"tensor": 3},
)
WORDS = (
    *(
        "parameters",
        "boundaries",
        "regions",
        "match",
        "when",
        "role",
        "placements",
        "type",
        "kind",
        "inputs",
        "outputs",
    ),
    *(
        "hidden",
        "before",
        "after",
        "gradient",
        "tensor",
        "expert",
        "shard",
        "context",
        "replicate",
        "auto",
        "none",
        "opaque",
    ),
    *("shard(0)", "shard(1)", "shard(-1)", "shard(9)", "strided_shard(0, 2)", "ragged_shard([0], [1, 1])", "partial"),
    *("**", "*", "**.mlp.**", "lm_head", "model.norm.weight", "up", "query", "norm", "mlp", ">1", "tokens", ""),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.sampled_from(WORDS), st.text(max_size=6)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | SCALARS, inner, max_size=3),
    max_leaves=12,
)
VALID = (
    {"parameters": {ATTENTION: {"placements": {"tensor": "replicate"}}, "model.norm.weight": {"role": "norm"}}},
    {"parameters": [{"match": "**.mixer.**", "role": "none", "when": {"tensor": ">1"}}], "tokens": [8, 64]},
    {
        "boundaries": {
            "lm_head": {"outputs": {"logits": {"after": {"tensor": "replicate"}, "gradient": {"tensor": "partial"}}}}
        }
    },
    {"regions": {"model.layers.*.mlp": {"kind": "opaque", "inputs": {"hidden": {"before": {"tensor": "replicate"}}}}}},
    {
        "sequence_parallel": False,
        "parameters": {"**": {"placements": "none"}},
        "boundaries": {"**.mlp": {"type": "auto"}},
    },
)


def mutated(values, chance: random.Random, anything):
    """A copy of `values` in which some part, wherever it lies, is another."""
    if chance.random() < 0.04:
        return chance.choice([chance.choice(WORDS), anything, None, 0, [values], {"tensor": values}])
    if isinstance(values, dict):
        keys = {key: chance.choice(WORDS) if chance.random() < 0.03 else key for key in values}
        return {keys[key]: mutated(each, chance, anything) for key, each in values.items()}
    if isinstance(values, list):
        return [mutated(each, chance, anything) for each in values for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 2]))]
    return values


described = cache(stored)


def is_answered(name: str, sizes, overrides) -> None:
    """An error of the library's own, or a plan in which lint finds nothing."""
    model, mesh = described(name), DeviceMesh.from_sizes(sizes)
    try:
        plan = derive(model, mesh, overrides)
    except (PlanError, ConfigError) as error:
        assert str(error)
        return
    assert lint(drafted(model, sizes, overrides)) == []
    assert ShardingPlan.from_dict(plan.to_dict()) == plan


FUZZ = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=300, **FUZZ)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(SIZES),
    st.dictionaries(st.sampled_from(WORDS[:3]) | SCALARS, ANYTHING, max_size=3),
)
def test_any_structure_is_answered(model, sizes, overrides):
    is_answered(model, sizes, overrides)


@settings(max_examples=200, **FUZZ)
@given(st.sampled_from(MODELS), st.sampled_from(SIZES), st.sampled_from(VALID), st.integers(0, 2**32), ANYTHING)
def test_any_change_to_what_is_valid_is_answered(model, sizes, valid, seed, anything):
    is_answered(model, sizes, mutated(copy.deepcopy(valid), random.Random(seed), anything))


ROLES_BY_HAND = (*ROLES, *["none"] * len(ROLES), "auto")
PLACES = (*["replicate"] * 4, *["auto", "none"], *["shard(0)", "shard(1)", "shard(2)", "strided_shard(0, 2)"])
ENDS = ("before", "after", "gradient", "gradient_before")


@cache
def usual_boundaries(name: str, tensor: int):
    return drafted(name, {"expert": 2, "context": 2, "tensor": tensor}).boundaries


class Writer:
    """Writes files of names, roles, placements, boundaries and contracts that a model and its plan have."""

    def __init__(self, name: str, sizes, seed: int) -> None:
        self.chance = random.Random(seed)
        model = described(name)
        self.axes = [axis for axis in ("expert", "context", "tensor") if axis in sizes] * 3 + ["expert", "context"]
        self.names = [*(each.name for each in model.parameters), *model.tied]
        self.modules = [each for each in model.modules if each]
        self.boundaries = usual_boundaries(name, sizes["tensor"])

    def file(self):
        pick = self.chance.choice
        sections = {
            "parameters": lambda: (self.pattern(pick(self.names)), self.parameter()),
            "boundaries": lambda: self.boundary(self.chance.random() < 0.3),
            "regions": self.region,
        }
        chosen = [pick(("parameters", "parameters", "boundaries", "regions")) for _ in range(pick((1, 1, 2, 3)))]
        file = {"sequence_parallel": pick((True, False))}
        for section in chosen:
            file.setdefault(section, {}).update([sections[section]()])
        return file

    def pattern(self, name: str) -> str:
        segments = name.split(".")
        for _ in range(self.chance.choice((0, 1, 1, 2))):
            segments[self.chance.randrange(len(segments))] = self.chance.choice(("*", "*", "**"))
        return ".".join(segments)

    def parameter(self):
        entry = {"role": self.chance.choice(ROLES_BY_HAND), "placements": self.placements()}
        kept = self.chance.choice((("role",), ("placements",), ("role", "placements")))
        return {key: each for key, each in entry.items() if key in kept}

    def placements(self, pending: bool = False):
        places = [each for each in PLACES if each != "none"] + ["partial"] * (2 * pending)
        return {self.chance.choice(self.axes): self.chance.choice(places) for _ in range(self.chance.choice((1, 2)))}

    def boundary(self, typed: bool):
        plan = self.chance.choice(self.boundaries)
        entry = self.sides(plan.inputs, plan.outputs)
        if typed or not entry:
            entry["type"] = self.chance.choice(("none", "none", "auto", plan.kind))
        return self.layerless(plan.module), entry

    def region(self):
        if self.chance.random() < 0.3:
            return self.layerless(self.chance.choice(self.modules)), {"kind": "transparent"} | self.sides((), ())
        module, entry = self.boundary(False)
        entry.pop("type", None)
        return module, {"kind": self.chance.choice(("opaque", "transparent"))} | entry

    def sides(self, inputs, outputs):
        entry = {}
        for side, contracts in (("inputs", inputs), ("outputs", outputs)):
            if self.chance.random() < 0.5:
                name = self.chance.choice([each.name for each in contracts] or ["hidden"])
                entry[side] = {name: {self.chance.choice(ENDS): self.placements(pending=True)}}
        return entry

    def layerless(self, module: str) -> str:
        return re.sub(r"\.\d+\.", ".*.", module) if self.chance.random() < 0.5 else module


@settings(max_examples=600, **FUZZ)
@given(st.sampled_from(PLANNED), st.sampled_from(SIZES), st.integers(0, 2**32))
def test_any_file_of_what_the_model_has_is_answered(model, sizes, seed):
    is_answered(model, sizes, Writer(model, sizes, seed).file())


def test_what_such_files_say_reaches_the_rules():
    """Most of them are well-formed and refused by lint with a line, and a fair share are planned."""
    ends = {"file": 0, "lint": 0, "plan": 0}
    for seed in range(120):
        model, sizes = PLANNED[seed % len(PLANNED)], SIZES[seed % len(SIZES)]
        try:
            derive(described(model), DeviceMesh.from_sizes(sizes), Writer(model, sizes, seed).file())
            ends["plan"] += 1
        except PlanError as error:
            ends["lint" if "can't be planned on" in str(error) else "file"] += 1
    assert ends["lint"] > 50 and ends["plan"] > 10 and ends["file"] < 30, ends


@settings(max_examples=200, **FUZZ)
@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 400), st.text(max_size=2)), max_size=4))
def test_any_text_is_answered(tmp_path_factory, valid, edits):
    text = yaml.safe_dump(valid)
    for place, inserted in edits:
        place %= len(text) + 1
        text = text[:place] + inserted + text[place + 1 :]
    path = tmp_path_factory.mktemp("fuzz") / "overrides.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    is_answered("llama", {"tensor": 2}, path)


# the page


def examples() -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)


@pytest.mark.parametrize("text", examples())
def test_an_example_of_the_page_is_accepted_for_the_model_that_it_names(tmp_path, text):
    model = re.match(r"# for (\w+)", text)
    (tmp_path / "overrides.yaml").write_text(text)
    sizes = {"shard": 2, "expert": 2, "context": 2, "tensor": 2}
    derive(stored(model.group(1)), DeviceMesh.from_sizes(sizes), tmp_path / "overrides.yaml")


def test_the_page_names_every_key_and_word():
    from hyper_parallel.core.plan import override_file as file

    text = DOCUMENT.read_text()
    words = [*file.KEYS, *file.SIDES, *file.MODEL_AXES, "auto", "none", "match", "when", "opaque", "transparent"]
    words += [key for keys in file._FIELDS.values() for key in keys] + [*file._ROLES, *file.TYPES]
    assert [word for word in words if f"`{word}`" not in text] == []
