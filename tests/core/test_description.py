"""Descriptions of models as JSON: real families, our own form, and everything that is no description."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import ModelDescription, PlanError
from hyper_parallel.core.plan.model import BufferDescription, ParameterDescription
from hyper_parallel.core.plan.model_json import config_of

MODELS = sorted((Path(__file__).parents[1] / "data" / "models").glob("*.json"))
REALLY_TIED = {
    "falcon": "transformer.word_embeddings.weight",
    "gemma2": "model.embed_tokens.weight",
    "gemma3": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
    "llama_tied": "model.embed_tokens.weight",
    "mamba": "backbone.embeddings.weight",
}
SMALL = {
    "model_class": "Small",
    "config": {"hidden_size": 4},
    "parameters": [
        {"name": "embed.weight", "shape": [10, 4], "dtype": "bfloat16", "module": "Embedding", "requires_grad": False},
        {"name": "layers.0.up.weight", "shape": [8, 4], "dtype": "float32"},
        {"name": "scale", "shape": [], "dtype": "float32"},
    ],
    "buffers": [{"name": "layers.0.table", "shape": [0, 4], "dtype": "int64", "persistent": False}],
    "modules": {
        "embed": "Embedding",
        "layers": "ModuleList",
        "layers.0": "Block",
        "layers.0.up": "Linear",
        "head": "Linear",
    },
    "tied": {"head.weight": "embed.weight"},
}


def changed(*path, **change):
    """SMALL with the value at a path replaced by `to`, or with keys of `add` there, or without the key `drop`."""
    values = copy.deepcopy(SMALL)
    *way, last = path
    place = values
    for step in way:
        place = place[step]
    if "to" in change:
        place[last] = change["to"]
    if "add" in change:
        place[last].update(change["add"])
    if "drop" in change:
        del place[last][change["drop"]]
    return values


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_real_family_is_read_and_comes_back_equal(path, tmp_path):
    written = json.loads(path.read_text())
    found = ModelDescription.load(path)
    firsts = [each for each in written["parameters"] if each["name"] not in found.tied]
    assert found.class_name == written["model_class"]
    assert found.modules == {"": written["model_class"], **written["modules"]}
    assert found.config == written["config"]
    assert [(each.name, list(each.shape), each.dtype, each.module_class) for each in found.parameters] == [
        (each["name"], each["shape"], each["dtype"], each["module"]) for each in firsts
    ]
    assert [(each.name, list(each.shape), each.persistent) for each in found.buffers] == [
        (each["name"], each["shape"], each["persistent"]) for each in written["buffers"]
    ]
    assert found.tied == ({"lm_head.weight": REALLY_TIED[path.stem]} if path.stem in REALLY_TIED else {})
    found.save(tmp_path / "again.json")
    assert ModelDescription.load(tmp_path / "again.json") == found
    assert [each.name for each in tmp_path.iterdir()] == ["again.json"]


def test_all_families_are_tried():
    assert len(MODELS) == 21 and set(REALLY_TIED) <= {path.stem for path in MODELS}


def test_a_description_holds_what_the_file_says():
    assert ModelDescription.from_dict(SMALL) == ModelDescription(
        class_name="Small",
        parameters=(
            ParameterDescription("embed.weight", (10, 4), "bfloat16", "Embedding", trainable=False),
            ParameterDescription("layers.0.up.weight", (8, 4), "float32", "Linear", trainable=True),
            ParameterDescription("scale", (), "float32", "Small", trainable=True),
        ),
        modules={"": "Small", **SMALL["modules"]},
        tied={"head.weight": "embed.weight"},
        buffers=(BufferDescription("layers.0.table", (0, 4), "int64", persistent=False),),
        config={"hidden_size": 4},
    )


def test_a_name_that_is_a_parameter_as_well_is_tied_only_where_the_configuration_says_so():
    head = {"name": "head.weight", "shape": [10, 4], "dtype": "bfloat16", "requires_grad": False}
    both = changed("parameters", to=[*SMALL["parameters"], head])
    assert ModelDescription.from_dict(both).tied == {}
    assert len(ModelDescription.from_dict(both).parameters) == 4
    both["config"]["tie_word_embeddings"] = True
    assert ModelDescription.from_dict(both) == ModelDescription.from_dict(
        changed("config", to={"hidden_size": 4, "tie_word_embeddings": True})
    )
    both["parameters"][-1]["shape"] = [11, 4]
    with pytest.raises(PlanError, match=r"tied.head.weight: it has shape \(11, 4\), and 'embed.weight' has \(10, 4\)"):
        ModelDescription.from_dict(both)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"a description is a mapping with the keys model_class, .*found \[\]"),
        ({"model_type": "llama"}, "this is a configuration, not a description"),
        (changed("model_class", to=""), "model_class is ''; write text on one line"),
        (changed("modules", to=[]), r"modules is \[\]; write a mapping"),
        ({"model_class": "A", "parameters": []}, "modules is missing; write a mapping"),
        ({"model_class": "A", "modules": {}, "parameter": []}, "parameter: there is no such key; did you mean param"),
        (changed("parameters", 0, add={"shape": [3, -1]}), r"parameters\[0\].shape: 'embed.weight' has a dim of -1"),
        (changed("parameters", 0, add={"shape": [3, True]}), "has a dim of True; write whole numbers from 0 up"),
        (changed("parameters", 0, add={"shape": [3.0]}), "has a dim of 3.0"),
        (changed("parameters", 0, add={"shape": 3}), r"parameters\[0\].shape is 3; write a list of sizes"),
        (changed("parameters", 0, add={"dtype": "float23"}), "unknown dtype 'float23'; write one of bool, int8"),
        (changed("parameters", 0, add={"requires_grad": 1}), r"parameters\[0\].requires_grad is 1; write true or fal"),
        (changed("parameters", 0, add={"module": "Linear"}), "a 'Linear', and modules says that 'embed' is a 'Embed"),
        (changed("parameters", 0, drop="shape"), r"parameters\[0\].shape is missing; write a list of sizes"),
        (changed("parameters", 0, add={"name": "emb.weight"}), "'emb.weight' stands below 'emb', which is not in mod"),
        (changed("parameters", 0, add={"name": "embed..weight"}), "'embed..weight' is no qualified name"),
        (changed("parameters", 1, add={"name": "scale"}), r"parameters\[2\].name: 'scale' is the name of something"),
        (changed("parameters", 0, add={"name": "layers.0"}), "'layers.0' is the name of something else already"),
        (changed("parameters", 0, to="embed"), r"parameters\[0\] is a mapping with a name, .*found 'embed'"),
        (changed("buffers", 0, add={"name": "layers.0.up.weight"}), r"buffers\[0\].name: .* something else already"),
        (changed("buffers", 0, add={"persistent": None}), r"buffers\[0\].persistent is None; write true or false"),
        (changed("modules", add={"a.b": "C"}), "modules: 'a.b' stands below 'a', which is no module listed before it"),
        (changed("modules", add={"": "Other"}), "the model itself is a 'Other', and model_class says 'Small'"),
        (changed("modules", add={"a": 3}), "modules.a is 3; write text"),
        (changed("tied", add={"head.weight": "head.weight"}), "tied.head.weight: 'head.weight' is not the first name"),
        (changed("tied", add={"head.bias": "head.weight"}), "tied.head.bias: 'head.weight' is not the first name of"),
        (changed("tied", add={"tail.weight": "scale"}), "tied: 'tail.weight' stands below 'tail', which is not in"),
        (changed("tied", add={"head.weight": 1}), "tied.head.weight is 1; write text"),
        (changed("config", to=3), "config is 3; write a mapping"),
    ],
)
def test_what_is_no_description_is_refused_with_the_key(values, message):
    with pytest.raises(PlanError, match=message):
        ModelDescription.from_dict(values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: .*No such file"),
        (b"{", "can't be read: "),
        (b"\xff\xfe", "can't be read: "),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "can't be read: "),
        (b'{"modules": {"a": "A", "a": "B"}}', "the key 'a' stands twice"),
        (b"3", "the description .*model.json: a description is a mapping"),
    ],
    ids=["missing", "cut off", "no text", "deep", "long number", "twice", "a number"],
)
def test_an_unreadable_file_is_named(content, message, tmp_path):
    if content is not None:
        (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        ModelDescription.load(tmp_path / "model.json")
    assert str(tmp_path / "model.json") in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_any_json_is_a_description_or_an_error_of_ours(tmp_path_factory, data):
    """A real description in which something was replaced, taken away or added, wherever."""
    values = copy.deepcopy(SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        place = values
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = data.draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
                break
            place = place[key]
        action = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "add" and isinstance(place, dict):
            name = data.draw(st.sampled_from(["", "embed", "head.weight", "layers.1"]) | st.text(max_size=8))
            place[name] = data.draw(JSON)
        elif action == "remove" and key is not None:
            del place[key]
        elif key is not None:
            place[key] = data.draw(JSON | st.sampled_from(["embed", "scale", "head.weight", [1, 2], 0, True, "int8"]))
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps(values))
    try:
        found = ModelDescription.load(path)
    except PlanError:
        return
    found.save(path)
    assert ModelDescription.load(path) == found


@given(JSON)
def test_json_that_is_no_description_at_all_is_an_error_of_ours(values):
    with pytest.raises(PlanError):
        ModelDescription.from_dict(values)


class WithDictionary:
    hidden = object()

    def to_dict(self):
        return {"hidden_size": 4, "labels": {0: "no", 1: "yes"}, "sizes": (1, 2)}


@dataclass
class WithFields:
    hidden_size: int = 4
    eps: float = float("inf")
    dtype: object = object


class Base:
    hidden_size, heads, _cache = 4, 2, 3


class WithAttributes(Base):
    heads = 8

    def __init__(self):
        self.layers = 6

    @property
    def width(self):
        raise RuntimeError("nobody asked")

    @classmethod
    def make(cls):
        return cls()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (WithDictionary(), {"hidden_size": 4, "labels": {"0": "no", "1": "yes"}, "sizes": [1, 2]}),
        (WithFields(), {"hidden_size": 4}),
        ({"layers": [1, object()], "heads": 2}, {"heads": 2}),
        (SimpleNamespace(heads=2, _cache=3), {"heads": 2}),
        (WithAttributes(), {"hidden_size": 4, "heads": 8, "layers": 6}),
        (WithAttributes, {"hidden_size": 4, "heads": 8}),
        (WithFields, {"hidden_size": 4}),
        (7, {}),
        (None, {}),
    ],
    ids=[
        "to_dict",
        "dataclass",
        "mapping",
        "attributes",
        "attributes of its class",
        "a class",
        "a class of dataclasses",
        "a number",
        "nothing",
    ],
)
def test_the_configuration_is_what_json_can_hold_of_it(config, expected):
    assert config_of(SimpleNamespace(config=config)) == expected


def test_a_model_without_a_configuration_has_an_empty_one():
    assert config_of(object()) == {}


def test_a_configuration_that_holds_itself_loses_that_entry():
    config = {"heads": 2}
    config["parent"] = config
    deep = []
    for _ in range(1000):
        deep = [deep]
    assert config_of(SimpleNamespace(config=config | {"deep": deep})) == {"heads": 2}
