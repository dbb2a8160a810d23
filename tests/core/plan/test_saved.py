"""A plan in a file: the same after every way there and back, and never believed where it can't be."""

import copy

import pytest
import yaml
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, PlanError, ShardingPlan, plan
from hyper_parallel.core.mesh import AXES
from hyper_parallel.core.plan.saved import load_yaml, to_yaml
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
