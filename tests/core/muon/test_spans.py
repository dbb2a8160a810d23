"""How many copies a matrix takes, on its way and back."""

from __future__ import annotations

from hyper_parallel import DeviceMesh, Layout, Shard
from hyper_parallel.core.muon.adapters import packed_view
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.muon.plan import make_plan


def test_the_rows_of_all_heads_are_one_copy():
    """Thirty-two heads of queries and keys, over two ranks: sixteen heads each, one copy for all of them."""
    view = packed_view((32 * 12, 64), [("query", 8), ("key", 4)], groups=32)
    layout = Layout(DeviceMesh((2,), ("shard",)), [Shard(0)], view.shape)
    plan = make_plan([MuonParameter("fused", layout, view, "float32", NewtonSchulz())])
    for rank in (0, 1):
        for batch in plan.program(rank).batches:
            assert all(len(feed.moves) == 1 for feed in batch.feeds)
            (move,) = batch.feeds[0].moves
            assert move.source_strides == (12 * 64, 1) and move.sizes[0] == 16


def test_rows_in_an_order_of_their_own_are_copied_one_after_the_other():
    view = packed_view((8, 4), [("", 8)])
    rows = (range(4, 8), range(0, 4))
    view = type(view)(view.shape, 0, 1, (view.matrices[0].__class__(rows, view.matrices[0].columns),))
    plan = make_plan(
        [MuonParameter("turned", Layout(DeviceMesh((1,), ("shard",)), {}, (8, 4)), view, "float32", NewtonSchulz())]
    )
    (batch,) = plan.program(0).batches
    assert sum(len(feed.moves) for feed in batch.feeds) == 2
