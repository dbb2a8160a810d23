"""A plan in a file: the same after every way there and back, and never believed where it can't be."""

import copy
import random

import pytest
import yaml
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, PlanError, ShardingPlan, plan
from hyper_parallel.core.mesh import AXES
from hyper_parallel.core.plan.diff import differences
from hyper_parallel.core.plan.yaml_text import load_yaml, to_yaml
from tests.core.plan.by_hand import MODELS, stored

FAMILIES = sorted(path.stem for path in MODELS.glob("*.json"))
SIZES = st.fixed_dictionaries(
    {}, optional={axis: st.sampled_from([1, 2, 3, 4] if axis == "shard" else [1, 2, 4]) for axis in AXES[1:]}
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=40), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize("family", FAMILIES)
@given(sizes=SIZES, sequence_parallel=st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_plan_comes_back_as_it_was(family, sizes, sequence_parallel, tmp_path_factory):
    try:
        made = plan(stored(family), DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})
    except PlanError:
        reject()
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    made.save(path)
    text = path.read_bytes()
    loaded = ShardingPlan.load(path)
    assert loaded == made and loaded.to_dict() == made.to_dict()
    loaded.save(path)
    assert path.read_bytes() == text


@given(values=st.dictionaries(st.text(max_size=40), TREES, min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_yaml_of_the_same_values(values):
    text = to_yaml(values)
    assert text.isascii()
    assert yaml.safe_load(text) == load_yaml(text) == values


PLAN = plan(stored("qwen3_moe"), DeviceMesh.from_sizes(dict.fromkeys(("replicate", "shard", "expert", "tensor"), 2)))
FLAT = plan(stored("llama_tied"), DeviceMesh((2, 2), ("replicate", "shard")))
JUNK = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        3,
        10**30,
        1.5,
        "",
        "x",
        "shard(7)",
        "strided_shard(0, 999999999)",
        "partial",
        [],
        [1],
        {},
        {"a": 1},
    ]
)


@given(data=st.data(), start=st.sampled_from([PLAN.to_dict(), FLAT.to_dict()]))
@settings(max_examples=500, deadline=None)
def test_a_changed_file_is_refused_or_is_a_plan(data, start):
    values = copy.deepcopy(start)
    for _ in range(data.draw(st.integers(1, 3))):
        # A way is drawn step by step, so that what stands rarely is changed as often as what stands everywhere.
        holder, key = values, data.draw(st.sampled_from(list(values)))
        while isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.integers(0, 3)):
            holder = holder[key]
            key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
        how = data.draw(st.sampled_from(["drop", "junk", "rename"]))
        if how == "drop" or (how == "rename" and isinstance(holder, list)):
            del holder[key]
        elif how == "junk":
            holder[key] = copy.deepcopy(data.draw(JUNK))
        else:
            holder[data.draw(st.sampled_from([1, "x", "", None, "tensor"]))] = holder.pop(key)
        if not values:
            break
    try:
        read = ShardingPlan.from_dict(values)
    except PlanError as error:
        assert len(str(error)) < 1000
        return
    assert read.table() and all(read.explain(each.name) for each in read.parameters)
    assert ShardingPlan.from_dict(read.to_dict()) == read


PIECES = (
    *("shard(0)", "shard(1)", "strided_shard(0, 2)", "partial", "replicate", "hidden", "logits", "norm", "tensor", "x"),
    *("expert", "[]", "{}", "[tensor]", "true", "false", "null", "9", "-1", "1.5", "float16", "model.norm"),
)
MARKS = "{}[]:,\"'#&*!|>%@`\t\x00 - 0é"


def edited(text: str, chance: random.Random) -> str:
    """The text as somebody in a hurry leaves it."""
    lines = text.split("\n")
    place, at = chance.randrange(len(lines)), chance.randrange(len(text))
    how = chance.choice(["cut", "drop a line", "repeat a line", "move a line", "type", "replace", "replace", "replace"])
    if how == "cut":
        return text[:at]
    if how == "type":
        return text[:at] + chance.choice(MARKS) + text[at + chance.randrange(2) :]
    if how == "replace":
        found = [piece for piece in PIECES if piece in lines[place]]
        if found:
            lines[place] = lines[place].replace(chance.choice(found), chance.choice(PIECES), 1)
        return "\n".join(lines)
    line = lines.pop(place)
    if how != "drop a line":
        lines.insert(place if how == "repeat a line" else chance.randrange(len(lines)), line)
        lines[place:place] = [line] if how == "repeat a line" else []
    return "\n".join(lines)


@pytest.mark.parametrize("start", [PLAN, FLAT], ids=["every axis", "data parallel"])
def test_an_edited_file_is_refused_or_is_a_plan(start, tmp_path):
    path, text = tmp_path / "plan.yaml", to_yaml(start.to_dict())
    outcomes = set()
    for seed in range(200):
        chance = random.Random(seed)
        path.write_text(edited(text if chance.random() < 0.8 else edited(text, chance), chance), encoding="utf-8")
        try:
            read = ShardingPlan.load(path)
        except PlanError as error:
            assert str(path) in str(error) and len(str(error)) < 1000
            outcomes.add("refused")
            continue
        outcomes.add("read")
        assert read.table(full=True) and all(read.explain(each.module) for each in read.boundaries)
        assert (differences(start, read) == []) == (read == start)
        assert ShardingPlan.from_dict(load_yaml(to_yaml(read.to_dict()))) == read
    assert outcomes == {"refused", "read"}


def test_a_file_that_ends_early_is_refused(tmp_path):
    lines = to_yaml(PLAN.to_dict()).splitlines()
    for end in range(0, len(lines), 7):
        (tmp_path / "plan.yaml").write_text("\n".join(lines[:end]))
        with pytest.raises(PlanError):
            ShardingPlan.load(tmp_path / "plan.yaml")


QUERY = ("parameters", "model.layers.0.self_attn.q_proj.weight")
HIDDEN = ("boundaries", "model.layers.0.self_attn", "inputs", 0)
EDITS = {
    "a pending parameter": (
        (*QUERY, "placements", "tensor"),
        "partial",
        "self_attn.q_proj.weight: placements: tensor: a parameter is no partial value; write replicate or a shard",
    ),
    "a dim that there is not": (
        (*QUERY, "placements", "tensor"),
        "shard(2)",
        "parameters: model.layers.0.self_attn.q_proj.weight: placements: axis 'tensor': shard(2) names dim 2",
    ),
    "an axis that there is not": ((*QUERY, "placements", "data"), "shard(0)", "which the mesh"),
    "a key with a slip": (
        (*QUERY, "pendign"),
        [],
        "model.layers.0.self_attn.q_proj.weight has the key 'pendign', which says nothing; write one of shape, dtype",
    ),
    "a key that no plan has": (
        ("sequence_paralel",),
        True,
        "a plan has the key 'sequence_paralel', which says nothing",
    ),
    "a boundary that there is not": (
        (*QUERY, "boundary"),
        "model.layers.0.atn",
        "boundary: found 'model.layers.0.atn', write a module around the parameter, or one of `boundaries`",
    ),
    "a unit that there is not": ((*QUERY, "unit"), "model.layers.7", "unit: found 'model.layers.7', write one of"),
    "a role that there is not": ((*QUERY, "role"), "querry", "role: found 'querry', write one of"),
    "an axis twice": ((*QUERY, "pending"), ["shard", "shard"], "pending: 'shard' stands twice; leave one out"),
    "a kind that there is not": (
        ("boundaries", "model.layers.0.self_attn", "kind"),
        "atention",
        "boundaries: model.layers.0.self_attn: kind: found 'atention', write one of 'attention'",
    ),
    "a gradient that cannot be": (
        ("boundaries", "lm_head", "outputs", 0, "gradient", "tensor"),
        "replicate",
        "boundaries: lm_head: outputs: number 1: gradient: axis 'tensor': the gradient of shard(2) is shard(2), found "
        "replicate",
    ),
    "a gradient going on that cannot be": (
        (*HIDDEN, "gradient_before"),
        {"tensor": "partial"},
        "boundaries: model.layers.0.self_attn: inputs: number 1: gradient_before: axis",
    ),
    "one of two tensors of a name": (
        ("boundaries", "model.layers.0.self_attn", "inputs"),
        [PLAN.to_dict()["boundaries"]["model.layers.0.self_attn"]["inputs"][0]] * 2,
        "boundaries: model.layers.0.self_attn: inputs: 'hidden' stands twice; leave one out",
    ),
    "one of two units of a name": (
        ("units",),
        PLAN.to_dict()["units"] * 2,
        "units: 'model.layers.0' stands twice; leave one out",
    ),
    "text for a shape": ((*QUERY, "shape"), "32, 32", "shape: found '32, 32', write a list"),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_that_cannot_be_meant_is_refused_with_its_place(case):
    (*way, last), value, message = EDITS[case]
    values = copy.deepcopy(PLAN.to_dict())
    holder = values
    for key in way:
        holder = holder[key]
    holder[last] = value
    with pytest.raises(PlanError) as error:
        ShardingPlan.from_dict(values)
    assert message in str(error.value)


def test_a_placement_may_be_edited():
    values = copy.deepcopy(PLAN.to_dict())
    values["parameters"][QUERY[1]]["placements"] = {"shard": "shard(0)"}
    read = ShardingPlan.from_dict(values)
    assert read[QUERY[1]].local_shape == (PLAN[QUERY[1]].shape[0] // 2, PLAN[QUERY[1]].shape[1])
    lines = differences(PLAN, read)
    assert lines and all(line.startswith(f"parameters: {QUERY[1]}: placements: ") for line in lines)


def test_a_name_that_stands_twice_in_a_file_is_refused(tmp_path):
    lines = to_yaml(PLAN.to_dict()).splitlines()
    place = lines.index("  model.norm.weight:")
    (tmp_path / "plan.yaml").write_text("\n".join([*lines[:place], "  model.norm.weight: {}", *lines[place:]]))
    with pytest.raises(
        PlanError, match=f"line {place + 2}: the key 'model.norm.weight' stands twice; put both into one"
    ):
        ShardingPlan.load(tmp_path / "plan.yaml")


def test_plans_of_other_overrides_differ_in_what_these_decide():
    mesh = DeviceMesh((2,), ("tensor",))
    whole = {"parameters": {"model.layers.0.mlp.**": {"placements": "none"}}}
    logits = {"boundaries": {"lm_head": {"outputs": {"logits": {"after": {"tensor": "replicate"}}}}}}
    one, other = (plan(stored("llama"), mesh, asked) for asked in (whole, logits))
    mlp, entry = "model.layers.0.mlp", "parameters: model.layers.0.mlp.**: {placements: none}"
    lines = differences(one, other, ("a.yaml", "b.yaml"))
    assert [line for line in lines if line.startswith("overrides: ")] == [
        *(f"overrides: {mlp}.{name}_proj.weight: only in a.yaml ({entry})" for name in ("gate", "up", "down")),
        "overrides: lm_head: only in b.yaml (boundaries: lm_head: {outputs: {logits: {after: {tensor: replicate}}}})",
    ]
    assert [line for line in lines if line.startswith("boundaries: ")] == [
        f"boundaries: {mlp}: inputs: hidden: gradient: tensor: replicate -> partial",
        f"boundaries: {mlp}: outputs: hidden: before: tensor: replicate -> partial",
        "boundaries: lm_head: outputs: logits: after: tensor: shard(2) -> replicate",
        "boundaries: lm_head: outputs: logits: gradient: tensor: shard(2) -> replicate",
    ]
    assert f"parameters: {mlp}.up_proj.weight: placements: tensor: only in b.yaml (shard(0))" in lines


def test_the_place_in_the_file_is_named():
    values = PLAN.to_dict()
    values["parameters"]["lm_head.weight"]["pending"] = ["data"]
    with pytest.raises(PlanError, match="parameters: lm_head.weight: pending: the mesh .* has no axis 'data'"):
        ShardingPlan.from_dict(values)
    values = PLAN.to_dict()
    del values["boundaries"]["lm_head"]["inputs"][0]["after"]
    with pytest.raises(PlanError, match="boundaries: lm_head: inputs: number 1 needs the key 'after'"):
        ShardingPlan.from_dict(values)


@pytest.mark.parametrize("text", ["[" * 5000, "\x00", "a: 2001-99-99", "? [1]\n: 2", "&a [*a]"])
def test_text_that_is_no_plan_is_refused(text, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlanError, match="plan.yaml"):
        ShardingPlan.load(tmp_path / "plan.yaml")
