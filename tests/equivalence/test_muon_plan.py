"""Muon's plans on real ranks: what is replayed equals what the interpreter makes of the same programs, bit for bit."""

from __future__ import annotations

from random import Random

import numpy as np

from hyper_parallel import DeviceMesh, Layout, Shard, Topology
from hyper_parallel.core.muon.matrices import split_rows, usual_view
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter, MuonPolicy
from hyper_parallel.core.muon.plan import make_plan
from hyper_parallel.core.placement import RaggedShard, StridedShard
from tests.core.muon import plan_cases
from tests.equivalence import muon_plan_bodies as bodies
from tests.equivalence.muon_plan_bodies import Case

FLOAT32, BFLOAT16 = NewtonSchulz(dtype="float32"), NewtonSchulz()


def on(mesh: DeviceMesh, settings: NewtonSchulz, **layouts) -> list[MuonParameter]:
    """Parameters by name: shape, placements and, where it is not the usual one, the view."""
    made = []
    for name, (shape, placements, *view) in layouts.items():
        layout = Layout(mesh, placements, shape)
        made.append(MuonParameter(name, layout, view[0] if view else usual_view(shape), "float32", settings))
    return made


def chosen() -> list[Case]:
    """One axis; empty shards; two axes, strided; ragged; packed experts; replicas; supernodes."""
    shard, strided = DeviceMesh((4,), ("shard",)), DeviceMesh((2, 2), ("shard", "tensor"))
    experts, replicas = DeviceMesh((2, 2), ("shard", "expert")), DeviceMesh((2, 2), ("replicate", "shard"))
    rows, packed, thirds = {"shard": Shard(0)}, {"shard": Shard(1), "expert": Shard(0)}, split_rows((9, 6), (5, 2, 2))
    gate_up, over_tensor = split_rows((5, 6, 4), (3, 3), lead=1), {"shard": StridedShard(0, 2), "tensor": Shard(0)}
    planes, few = {"shard": RaggedShard((0, 1), (1, 0, 3, 2))}, {"shard": RaggedShard((0,), (1, 0, 0, 3))}
    one_axis = on(shard, FLOAT32, a=((8, 6), rows), b=((6, 8), rows), c=((9, 6), rows, thirds))
    uneven = on(shard, BFLOAT16, a=((5, 7), rows), b=((2, 9), rows), c=((3, 3), rows), d=((1, 6), {"shard": Shard(1)}))
    two_axes = on(strided, FLOAT32, a=((8, 5), over_tensor), b=((7, 6), {"shard": Shard(0), "tensor": Shard(1)}))
    ragged = on(shard, BFLOAT16, a=((3, 4, 5), planes), b=((4, 6), few))
    moe = on(experts, FLOAT32, a=((5, 6, 4), packed), b=((5, 6, 4), packed, gate_up), c=((4, 4), {}))
    copies = on(
        replicas, BFLOAT16, a=((5, 6), rows), b=((6, 5), rows), c=((4, 4), {}), d=((3, 4, 6), rows), e=((3, 4, 6), {})
    )
    pairs, odd = Topology.regular(4, 2), Topology((0, 1, 1, 1), (0, 1, 1, 1))
    across = MuonPolicy(slow_shard="hierarchical")
    return [
        Case(make_plan(one_axis), "newton_schulz"),
        Case(make_plan(one_axis, policy=MuonPolicy(batch_elements=60)), "linear"),
        Case(make_plan(uneven), "small", skipped=(1,)),
        Case(make_plan(two_axes), "linear"),
        Case(make_plan(ragged), "small"),
        Case(make_plan(moe), "linear"),
        Case(make_plan(copies), "small"),
        Case(make_plan(copies, policy=MuonPolicy(batch_elements=1)), "small", skipped=(0, 4)),
        Case(make_plan(copies, pairs), "small"),
        Case(make_plan(copies, policy=MuonPolicy(replicas="everywhere")), "small"),
        Case(make_plan(one_axis, pairs, across), "linear"),
        Case(make_plan(two_axes, odd, across), "linear"),
    ]


def any_cases(count: int) -> list[Case]:
    """Random plans over all ranks."""
    randoms = [Random(seed) for seed in range(count)]
    return [Case(plan_cases.draw_plan(each.randint, each.sample(range(4), 4)), "small") for each in randoms]


def expected(case: Case, seed: int) -> dict[int, list[np.ndarray]]:
    """What each rank holds after a step, by the interpreter, computed in the dtype in which ranks compute."""
    function = getattr(plan_cases, case.function)
    values = plan_cases.values_of(case.plan, seed)
    return plan_cases.interpreted(
        case.plan, values, lambda matrices: function(matrices.astype(np.float32)), case.skipped
    ).shards


def test_what_ranks_do_is_what_the_interpreter_does(pool, backend_name):
    cases = chosen() + any_cases(25)
    found = pool(backend_name, 4).run(bodies.steps, cases)
    for number, case in enumerate(cases):
        for seed in range(2):
            wanted = expected(case, seed)
            for rank in range(4):
                mine = found[rank][number][seed]
                for each, one, other in zip(case.plan.parameters, mine, wanted[rank], strict=True):
                    message = f"case {number}, step {seed}, rank {rank}, {each.name}: {each.layout}"
                    np.testing.assert_array_equal(one, other, err_msg=message)
