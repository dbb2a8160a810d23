"""Full sharding of parts that tensor parallelism has cut already: what it copies."""

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.placement import StridedShard
from tests.torch.all_ranks import on_all_ranks
from tests.torch.production import LLAMA, own_samples, planned, tokens
from tests.torch.test_hugging_face import build


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
