"""One step under a plan held against one device: what the report says of right plans and of wrong ones."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.placement import Partial, Replicate, Shard
from tests.torch.all_ranks import double_precision
from tests.torch.test_hugging_face import FAMILIES, build

MESHES = {"tensor": {"tensor": 2}, "both": {"shard": 2, "tensor": 2}}


@pytest.fixture(autouse=True, scope="module")
def one_thread_for_each_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama():
    with double_precision():
        return build(*FAMILIES["llama"])


def planned(model, sizes, sequence_parallel=True):
    return hp.plan(model, hp.DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})


def batch(samples=4, length=6):
    return {"input_ids": np.random.default_rng(0).integers(1, 96, (samples, length)), "use_cache": False}


def check(model, plan, values=None, **options):
    return hp.check_gradients(lambda: copy.deepcopy(model), plan, batch() if values is None else values, **options)


def with_parameter(plan, name, **changes):
    return replace(plan, parameters=tuple(replace(p, **changes) if p.name == name else p for p in plan.parameters))


def with_contract(plan, module, side, number=0, **changes):
    def changed(boundary):
        contracts = list(getattr(boundary, side))
        contracts[number] = replace(contracts[number], **changes)
        return replace(boundary, **{side: tuple(contracts)})

    return replace(plan, boundaries=tuple(changed(b) if b.module == module else b for b in plan.boundaries))


def boundary(plan, module):
    return next(each for each in plan.boundaries if each.module == module)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("family", ["llama with biases", "qwen3_moe", "gpt2", "phi3", "deepseek_v3", "gpt_oss"])
def test_right_plans_give_the_numbers_of_one_device(family, sizes, sequence_parallel):
    with double_precision():
        model = build(*FAMILIES[family])
        report = check(model, planned(model, sizes, sequence_parallel))
    assert report.ok, str(report)
    assert (report.dtype, report.bound) == ("float64", 1e-10)
    assert {each.name for each in report.parameters} == {name for name, _ in model.named_parameters()}
    assert all(each.production and each.validation for each in report.parameters)


@pytest.mark.parametrize("sizes", [{"expert": 2}, {"shard": 2, "expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_so_do_experts_that_are_dealt_out(family, sizes):
    """Inside of them tokens of other ranks are seen, so that what goes in is not compared."""
    with double_precision():
        model = build(*FAMILIES[family])
        report = check(model, planned(model, sizes))
    assert report.ok, str(report)


def test_models_that_compute_in_float32_inside_get_its_bound(llama):
    report = check(llama, planned(llama, MESHES["tensor"]))
    assert report.ok, str(report)
    assert (report.dtype, report.bound, report.why) == ("float64", 1e-5, "the model computes in float32 inside")


def test_the_loss_and_the_gradients_on_one_device_are_the_models_own(llama):
    with double_precision():
        values = batch()
        model = copy.deepcopy(llama)
        ids = torch.from_numpy(values["input_ids"])
        expected = model(input_ids=ids, labels=ids).loss
        expected.backward()
        report = check(llama, planned(llama, MESHES["both"]), values)
    assert report.losses == pytest.approx(dict.fromkeys(["one device", "production", "validation"], expected.item()))
    largest = {name: each.grad.abs().max().item() for name, each in model.named_parameters()}
    assert {each.name: each.largest for each in report.parameters} == pytest.approx(largest)


def test_a_mesh_of_one_rank_is_the_model(llama):
    with double_precision():
        report = check(llama, planned(llama, {"shard": 1}))
    assert report.ok and report.worst.worst == 0.0, str(report)


def test_labels_that_count_nothing_may_lie_unevenly(llama):
    values = batch()
    values["labels"] = values["input_ids"].copy()
    values["labels"][0, :4] = -100
    with double_precision():
        report = check(llama, planned(llama, MESHES["both"]), values)
    assert report.ok, str(report)


def test_a_loss_of_ones_own(llama):
    def loss(model, values):
        logits = model(input_ids=values["input_ids"]).logits
        return hp.cross_entropy(logits[:, -1], values["input_ids"][:, 0], model)

    with double_precision():
        report = check(llama, planned(llama, MESHES["both"]), loss_fn=loss)
        ids = torch.from_numpy(batch()["input_ids"])
        expected = torch.nn.functional.cross_entropy(llama(input_ids=ids).logits[:, -1], ids[:, 0]).item()
    assert report.ok, str(report)
    assert report.losses["one device"] == pytest.approx(expected)


NORM = "model.layers.1.input_layernorm.weight"


def test_a_forgotten_sum_of_a_parameters_gradient_is_told_with_the_parameter(llama):
    with double_precision():
        plan = planned(llama, MESHES["tensor"])
        assert plan[NORM].pending == ("tensor",)
        report = check(llama, with_parameter(plan, NORM, pending=()))
    assert not report.ok
    assert [each.name for each in report.parameters if not each.worst <= report.bound] == [NORM]
    assert "model.layers.1.input_layernorm" in report.refused
    assert (report.worst.name, report.first_value, report.first_gradient) == (NORM, None, None)
    assert report.losses["production"] == pytest.approx(report.losses["one device"], rel=1e-12)


def test_a_forgotten_sum_of_an_activations_gradient_is_told_with_the_boundary(llama):
    """Going back everything is right up to the input of the second layer's feed-forward block."""
    with double_precision():
        plan = planned(llama, MESHES["tensor"], sequence_parallel=False)
        module = "model.layers.1.mlp"
        contract = boundary(plan, module).inputs[0]
        assert contract.gradient["tensor"] == Partial()
        report = check(llama, with_contract(plan, module, "inputs", gradient={"tensor": Replicate()}))
    assert not report.ok and report.first_value is None
    assert module in report.refused
    wrong = {each.name for each in report.parameters if not each.worst <= report.bound}
    assert "model.layers.1.post_attention_layernorm.weight" in wrong
    assert not any(name.startswith((module, "model.norm", "lm_head")) for name in wrong)
    assert (report.first_gradient.module, report.first_gradient.side) == (module, "input")


def test_the_first_boundary_whose_value_differs_is_told(llama):
    """A sum over ranks that is left out: every rank goes on with its own part."""
    with double_precision():
        plan = planned(llama, MESHES["tensor"], sequence_parallel=False)
        module = "model.layers.0.self_attn"
        report = check(llama, with_contract(plan, module, "outputs", before={"tensor": Replicate()}))
    assert not report.ok
    assert module in report.refused
    assert (report.first_value.module, report.first_value.side) == (module, "output")
    assert f"first value that differs in the forward: output 'hidden' of {module}" in str(report)


def test_what_frameworks_refuse_is_told_too(llama):
    with double_precision():
        plan = planned(llama, MESHES["tensor"], sequence_parallel=False)
        report = check(
            llama, with_parameter(plan, "model.layers.0.mlp.up_proj.weight", placements={"tensor": Shard(1)})
        )
    assert not report.ok
    assert report.failed.startswith("RuntimeError: ")
    assert "model.layers.0.mlp.up_proj" in report.refused
    assert set(report.losses) == {"one device"}


def test_the_table_shows_losses_errors_and_a_verdict(llama):
    with double_precision():
        right = check(llama, planned(llama, MESHES["tensor"]))
        wrong = check(llama, with_parameter(planned(llama, MESHES["tensor"]), NORM, pending=()))
    lines = right.table().splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:3]] == [
        "loss, one device",
        "loss, production",
        "loss, validation",
    ]
    assert lines[4].split() == ["gradient", "of", "largest", "production", "validation"]
    assert lines[17] == f"and {len(right.parameters) - 12} more that are off less"
    assert lines[19] == (
        "LlamaForCausalLM on tensor=2, in float64, bound 1e-10 (computed in float64): "
        "every number is that of one device"
    )
    assert len(right.table(full=True).splitlines()) == len(lines) + len(right.parameters) - 13
    assert wrong.table().splitlines()[4].startswith(NORM)
    assert "did not run" in wrong.table() and "this is not the model" in wrong.table()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"use_cache": False}, "found none"),
        (
            {"input_ids": np.ones((3, 4), int)},
            "3 samples can't be dealt out evenly to 2 ranks along shard; pass a multi",
        ),
        ({"input_ids": np.ones((4, 4), int), "labels": np.ones((2, 4), int)}, "{'input_ids': 4, 'labels': 2}"),
        (
            {"x": np.ones((4, 4), int), "y": np.ones((4, 4), int)},
            "its tokens could be each of ['x', 'y']; add 'labels'",
        ),
        ([1], "the batch maps argument names to arrays"),
    ],
)
def test_a_batch_that_can_not_be_is_refused(llama, values, told):
    with pytest.raises(hp.ConfigError) as error:
        check(llama, planned(llama, MESHES["both"]), values)
    assert told in str(error.value)


def test_a_bound_that_can_not_be_is_refused(llama):
    with pytest.raises(hp.ConfigError, match="tolerance is 0; write a number above 0"):
        check(llama, planned(llama, MESHES["both"]), tolerance=0)


class Narrow(torch.nn.Module):
    """A model whose kernels lack float64, with a parameter in half precision."""

    def __init__(self, shift: torch.dtype):
        super().__init__()
        self.table = torch.nn.Embedding(96, 8)
        self.shift = torch.nn.Parameter(torch.ones(8, dtype=shift))
        self.register_buffer("scale", torch.ones(1).expand(8))
        self.head = torch.nn.Linear(8, 96)

    def forward(self, input_ids):
        hidden = self.table(input_ids)
        if hidden.dtype == torch.float64:
            raise RuntimeError("not implemented for 'Double'")
        return self.head(hidden * self.scale + self.shift)


@pytest.mark.parametrize(
    ("shift", "bound", "why"),
    [(torch.float32, 1e-5, "computed in float32"), (torch.bfloat16, 5e-2, "computed in bfloat16")],
)
def test_what_does_not_run_in_float64_runs_as_it_is_made(shift, bound, why):
    model = Narrow(shift)
    values = {"input_ids": batch()["input_ids"]}
    report = check(model, hp.plan(model, hp.DeviceMesh.from_sizes({"shard": 2})), values)
    assert report.ok, str(report)
    assert (report.dtype, report.bound, report.why) == ("float32", bound, why)
