"""Where members lie in fused buffers, and where pieces of a parameter go: arithmetic, held against numpy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import hyper_parallel as hp
from hyper_parallel.core.fsdp.buffers import ALIGNMENT, FusedBuffer
from hyper_parallel.core.fsdp.spec import ShardSpec


@given(st.lists(st.integers(0, 300), max_size=6), st.sampled_from([2, 4, 8]), st.integers(0, 2000))
def test_a_fused_buffer_begins_and_ends_at_512_bytes_and_holds_its_members_in_a_row(sizes, item_bytes, place):
    address = place * item_bytes
    buffer = FusedBuffer(tuple(sizes), item_bytes)
    first = buffer.first(address)
    assert (address + first * item_bytes) % ALIGNMENT == 0 or not buffer.numel
    assert buffer.numel * item_bytes % ALIGNMENT == 0
    assert 0 <= buffer.numel - sum(sizes) < ALIGNMENT // item_bytes
    assert first + buffer.numel <= buffer.allocated or not buffer.numel
    ends = [start + size for start, size in zip(buffer.starts, sizes)]
    assert list(buffer.starts) == [0, *ends][: len(sizes)], "no gap between members"


def moved(moves, target, source):
    """`target` after the moves."""
    for sizes, target_start, target_strides, source_start, source_strides in moves:
        for index in np.ndindex(sizes):
            at = target_start + sum(i * stride for i, stride in zip(index, target_strides))
            target[at] = source[source_start + sum(i * stride for i, stride in zip(index, source_strides))]
    return target


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 2), st.booleans())
def test_pieces_are_put_together_into_the_whole_and_taken_apart_again(ranks, shape, dim, exact):
    dim %= len(shape)
    layout = hp.Layout(hp.DeviceMesh((ranks,), ("shard",)), {"shard": hp.Shard(dim)}, tuple(shape))
    spec = ShardSpec("w", layout, 0, "float32")
    whole = np.arange(1, spec.numel + 1)
    length = max(spec.piece_numels)
    pieces = []
    for rank in range(ranks):
        piece = layout.shard(whole.reshape(shape), rank).reshape(-1)
        pieces.append(piece if exact else np.pad(piece, (0, length - piece.size)))
    sent = np.concatenate(pieces)
    assert spec.sent_numel(exact) == sent.size
    np.testing.assert_array_equal(moved(spec.put_together(exact), np.zeros(spec.numel, int), sent), whole)
    np.testing.assert_array_equal(moved(spec.take_apart(exact), np.zeros(sent.size, int), whole), sent)
    if dim == 0:
        np.testing.assert_array_equal(sent[: spec.numel], whole, "a leading dim needs no move")
    assert spec.sent_pieces(exact) in (None, tuple(piece.size for piece in pieces))
