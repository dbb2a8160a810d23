"""What a step copies around its collectives: nothing for leading dims, however uneven, and counted for others."""

import pytest

from tests.equivalence.toy import ToyConfig

BODIES = "tests.equivalence.fsdp_counts_bodies"
LINEAR = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head.weight")
FLOAT = 8  # bytes

LEADING = {
    "even": ToyConfig(inputs=4, width=4, hidden=8),
    "a row more than even": ToyConfig(inputs=5, width=3, hidden=7),
    "one rank has nothing": ToyConfig(inputs=1, width=1, hidden=1),
}


def unavoidable(backend_name, config):
    """Copies that have nothing to do with how parameters are cut.

    The gradient of the scalar, which every rank holds, is put into the buffer that is all-reduced. On a CPU,
    MindSpore's linear gives its weight a transposed gradient, which is laid out in order first.
    """
    expected = {"temperature": FLOAT}
    if backend_name == "mindspore" and config.width > 1:
        blocks = config.width * config.hidden * FLOAT
        expected |= {name: blocks for name in LINEAR} | {"head.weight": config.inputs * config.width * FLOAT}
    return expected


@pytest.mark.parametrize("case", LEADING)
def test_leading_dims_are_gathered_and_reduced_from_where_they_lie(pool, backend_name, case):
    for found in pool(backend_name, 2).run(f"{BODIES}:copied", LEADING[case]):
        assert found == {name: (0, size) for name, size in unavoidable(backend_name, LEADING[case]).items()}


def test_three_ranks_leave_other_remainders(pool, backend_name):
    config = ToyConfig(inputs=5, width=4, hidden=7)
    for found in pool(backend_name, 3).run(f"{BODIES}:copied", config):
        assert found == {name: (0, size) for name, size in unavoidable(backend_name, config).items()}


@pytest.mark.parametrize("config", [ToyConfig(inputs=4, width=4, hidden=8), ToyConfig()], ids=["even", "uneven"])
def test_a_library_of_equal_pieces_costs_a_copy_of_uneven_gradients_and_gives_the_same_bits(pool, backend_name, config):
    workers = pool(backend_name, 2)
    sizes = workers.run(f"{BODIES}:whole_bytes", config)[0]
    rows = {"embed": config.inputs, "head.weight": config.inputs, "extra": config.width}
    for block in ("layers.0", "layers.1"):
        rows |= {f"{block}.up": config.hidden, f"{block}.down": config.width, f"{block}.scale": config.width}
    expected = {name: size for name, size in unavoidable(backend_name, config).items()}
    for name in rows:
        if rows[name] % 2:
            expected[name] = expected.get(name, 0) + sizes[name]
    for same, found, scaled in workers.run(f"{BODIES}:on_equal_pieces", config):
        assert same
        assert {name: reduced for name, (_, reduced) in found.items() if reduced} == expected
        gathered = {name for name, (gathered, _) in found.items() if gathered}
        # PyTorch's shards have room for the padding; MindSpore's can have none on a CPU.
        assert gathered == ({name for name in rows if rows[name] % 2} if backend_name == "mindspore" else set())
        assert scaled == sum(-(-rows[name] // 2) * sizes[name] // rows[name] for name in rows)


@pytest.mark.parametrize("config", [ToyConfig(inputs=4, width=4, hidden=8), ToyConfig()], ids=["even", "uneven"])
def test_another_dim_costs_one_copy_for_each_gather_and_each_reduction(pool, backend_name, config):
    sizes = pool(backend_name, 2).run(f"{BODIES}:whole_bytes", config)[0]
    expected = {name: (0, size) for name, size in unavoidable(backend_name, config).items()}
    for name in ("embed", *LINEAR):
        gathers = 2 if name.startswith("layers") else 1  # the outermost unit stays gathered for backward
        expected[name] = (gathers * sizes[name], sizes[name] + expected.get(name, (0, 0))[1])
    for found in pool(backend_name, 2).run(f"{BODIES}:copied", config, 1):
        assert found == expected


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("config", [ToyConfig(inputs=4, width=4, hidden=8), ToyConfig()], ids=["even", "uneven"])
def test_what_travels_is_what_the_plan_says_of_the_rank_with_the_most(pool, backend_name, config, sizes):
    """Pieces are not alike: what a rank gets of most is what others have, or what it sums itself."""
    ranks = pool(backend_name, 4 if len(sizes) == 2 else 2).run(f"{BODIES}:travelled", config, sizes)
    said = ranks[0][1]
    assert tuple(max(found[kind] for found, _ in ranks) for kind in range(len(said))) == said


def test_waits_are_counted_and_timed(pool, backend_name):
    for times, seconds in pool(backend_name, 2).run(f"{BODIES}:waited", ToyConfig()):
        assert times == {"gather": 2 * 2 + 1, "scatter": 3, "sum": 3}  # two blocks twice, and the outermost unit
        assert 0 <= seconds < 60


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_reduced_gradients_are_parts_of_aligned_buffers_with_zeros_behind(pool, backend_name, sizes):
    for buffers, inside in pool(backend_name, 2).run(f"{BODIES}:fused_buffers", ToyConfig(), sizes):
        assert len(buffers) == 3 and inside and all(inside)
        for address, size, padding in buffers:
            assert address % 512 == 0 and size % 512 == 0 and len(padding) * FLOAT < 512
            assert not any(padding)
