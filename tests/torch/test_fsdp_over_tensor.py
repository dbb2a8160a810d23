"""Full sharding of parts that tensor parallelism has cut already: what it copies, and the policies of its units."""

import copy

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.execution.apply import apply_plan
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.placement import StridedShard
from tests.torch.all_ranks import on_all_ranks
from tests.torch.production import LLAMA, own_samples, planned, tokens
from tests.torch.test_hugging_face import FAMILIES, build


def test_a_part_is_cut_further_along_its_rows_without_copies():
    """A column-parallel weight is split twice along its rows, which is strided in the whole and is not in the part."""
    model = build(*LLAMA)
    plan = planned(model, {"shard": 2, "tensor": 2})
    ids = tokens(4, 6)

    def body(backend, own):
        own(input_ids=own_samples(plan, backend.collectives.rank(), ids), use_cache=False).logits.sum().backward()
        return {each.spec.name: each.counts.copied for unit in units_of(backend, own) for each in unit.parameters}

    assert isinstance(plan["model.layers.0.mlp.up_proj.weight"].placements["shard"], StridedShard)
    assert plan["model.layers.0.mlp.down_proj.weight"].placements["tensor"] == hp.Shard(1)
    for copied in on_all_ranks(model, plan, body):
        assert len(copied) == len(plan.parameters) and not any(copied.values()), copied


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (LLAMA, {"shard": 2, "tensor": 2}),
        (FAMILIES["gpt2"], {"replicate": 2, "tensor": 2}),
        (FAMILIES["qwen3_moe"], {"shard": 2, "expert": 2}),
        (LLAMA, {"tensor": 2}),
    ],
    ids=["sharded", "replicated, with biases", "experts", "tensor alone"],
)
def test_units_of_a_plan_compute_and_reduce_in_the_dtypes_of_a_policy(in_double_precision, family, sizes, validate):
    """Shards in bfloat16 and all else in float64: gradients are those of the whole model in float64, rounded once."""
    model = build(*family).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    plan = planned(model, sizes)
    ids, targets = tokens(4, 6), tokens(4, 6)
    models = [copy.deepcopy(model) for _ in plan.mesh.ranks]
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    hp.cross_entropy(model(input_ids=ids, use_cache=False).logits, targets, model).backward()
    policy = hp.MixedPrecisionPolicy("float64", "float64")

    def body(backend):
        rank = backend.collectives.rank()
        own = models[rank]
        apply_plan(backend, own, plan, validate, precision=policy, offload=hp.CPUOffloadPolicy())
        logits = own(input_ids=own_samples(plan, rank, ids), use_cache=False).logits
        hp.cross_entropy(logits, own_samples(plan, rank, targets), own).backward()
        expected = {name: each.grad for name, each in model.named_parameters()}
        for name, parameter in own.named_parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.bfloat16, name
            part = torch.from_numpy(plan.layout(name).shard(expected[name].numpy(), rank)).to(torch.bfloat16)
            # What lies between two numbers of bfloat16 may be rounded to either, after sums in another order.
            torch.testing.assert_close(parameter.grad, part, rtol=2**-7, atol=1e-12, msg=lambda text: f"{name}: {text}")

    InProcessWorld(backends.load("torch"), plan.mesh.size, timeout_s=60).run(body)
