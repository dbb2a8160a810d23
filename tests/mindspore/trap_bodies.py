"""What `test_traps.py` runs on the ranks. Each function shows first that a trap of MindSpore 2.10 on a CPU is still
there (the day it is mended, the handling can go), then that the backend does the right thing all the same."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import mint, ops
from mindspore.mint import distributed as dist
from mindspore.mint.distributed import distributed as dist_module

from hyper_parallel.core.backend import Backend, Tensor


def raises(call, *words: str) -> bool:
    """Tell whether `call` raises an error whose text has all `words`."""
    try:
        call()
    except Exception as error:
        return all(word in str(error) for word in words)
    return False


def count_to(n: int) -> Tensor:
    """A tensor that MindSpore owns: 0, 1, ..., n - 1."""
    return ms.Tensor(np.arange(n, dtype=np.float32))


# One rank: tensors


def arithmetic_in_place_changes_nothing(backend: Backend) -> None:
    tensors, one = backend.tensors, ms.Tensor([1.0, 1.0])
    for change in ("add_", "sub_", "mul_", "div_"):
        target = ms.Tensor([2.0, 4.0])
        result = getattr(target, change)(ms.Tensor([2.0, 2.0]))
        assert result.asnumpy().tolist() != [2, 4]
        assert target.asnumpy().tolist() == [2, 4], f"mended: {change} changes its tensor"
    target = ms.Tensor([2.0, 4.0])
    tensors.add_(target, one)
    assert target.asnumpy().tolist() == [3, 5]
    tensors.scale_(target, 2.0)
    assert target.asnumpy().tolist() == [6, 10]


def a_copy_into_a_view_behind_the_start_is_lost(backend: Backend) -> None:
    tensors = backend.tensors
    for make_view in (
        lambda buffer: mint.narrow(buffer, 0, 2, 2),
        lambda buffer: buffer[2:4],
        lambda buffer: tensors.alias(buffer, 2, (2,)),
    ):
        buffer = mint.zeros((6,))
        make_view(buffer).copy_(ms.Tensor([5.0, 7.0]))
        assert buffer.asnumpy().tolist() == [0] * 6, "mended: copy_ writes through a view"
        tensors.copy_(make_view(buffer), ms.Tensor([5.0, 7.0]))
        assert buffer.asnumpy().tolist() == [0, 0, 5, 7, 0, 0]


def a_copy_from_or_into_a_part_of_a_storage_fails(backend: Backend) -> None:
    for target, source in (
        (lambda: mint.zeros((2,)), lambda: count_to(6)[:2]),
        (lambda: backend.tensors.alias(mint.zeros((6,)), 0, (2,)), lambda: count_to(2)),
    ):
        assert raises(lambda t=target, s=source: t().copy_(s()), "unexpected kernel"), (
            "mended: copy_ takes a part of a storage"
        )
        written = target()
        backend.tensors.copy_(written, source())
        assert backend.tensors.to_numpy(written).tolist() == [0, 1]


def numpy_sees_a_copy_of_a_view(backend: Backend) -> None:
    buffer = mint.zeros((6,))
    for view in (buffer[2:4], buffer.view(2, 3), backend.tensors.alias(buffer, 0, (5,))):
        view.asnumpy()[...] = 9
        assert buffer.asnumpy().tolist() == [0] * 6, "mended: asnumpy of a view shares its memory"
    backend.tensors.memory(backend.tensors.alias(buffer, 2, (2,)))[...] = 9
    assert buffer.asnumpy().tolist() == [0, 0, 9, 9, 0, 0]


def an_alias_remembers_the_size_of_a_released_storage(backend: Backend) -> None:
    tensors = backend.tensors
    buffer = mint.zeros((6,))
    alias = tensors.alias(buffer, 2, (2,))
    tensors.release_storage(buffer)
    assert alias.untyped_storage().nbytes() == 24, "mended: an alias knows that its storage is released"
    assert tensors.storage_bytes(alias) == 0


def memory_that_numpy_owns_is_never_released(backend: Backend) -> None:
    array = np.ones(4, np.float32)
    borrowed = ms.from_numpy(array)
    borrowed.untyped_storage().resize_(0)
    assert borrowed.data_ptr() == array.ctypes.data, "mended: numpy's memory is let go"
    owned = backend.tensors.from_numpy(array)
    backend.tensors.release_storage(owned)
    assert owned.data_ptr() == 0


def a_numpy_view_from_before_a_release_shows_other_tensors(backend: Backend) -> None:
    tensors = backend.tensors
    buffer = mint.zeros((1000,))
    old = buffer.asnumpy()
    tensors.release_storage(buffer)
    taker = mint.ones((1000,))
    assert old[0] == 1, "mended: a numpy view keeps its memory"
    tensors.restore_storage(buffer)
    tensors.copy_(buffer, count_to(1000))
    assert taker.asnumpy().sum() == 1000
    assert tensors.memory(buffer).tolist() == list(range(1000))


def autograd_saves_copies_of_views(backend: Backend) -> None:
    """An alias of a whole buffer is none: what autograd saved is valid, and new, after a refill."""
    tensors = backend.tensors
    x = ms.Parameter(ms.Tensor([[1.0, 2.0]]), name="x")

    def gradient(see_weights) -> list[list[float]]:
        buffer = tensors.empty((4,), "float32")
        tensors.copy_(buffer, mint.ones((4,)))

        def loss() -> Tensor:
            value = mint.matmul(x, see_weights(buffer)).sum()
            tensors.release_storage(buffer)
            taker = mint.zeros((4,))  # takes the memory that was given back
            tensors.restore_storage(buffer)
            tensors.copy_(buffer, ms.Tensor([1.0, 2.0, 3.0, 4.0]))
            return value + taker.sum()

        value, (found,) = ms.value_and_grad(loss, None, weights=[x])()
        assert value.asnumpy() == 6
        return found.asnumpy().tolist()

    assert gradient(lambda buffer: buffer.view(2, 2)) == [[2, 2]], "mended: autograd saves a view as it is"
    assert gradient(lambda buffer: tensors.alias(buffer, 0, (2, 2))) == [[3, 7]]
    assert gradient(lambda buffer: tensors.alias(tensors.flat(tensors.alias(buffer, 0, (4, 1))), 0, (2, 2))) == [[3, 7]]


def a_full_tensor_takes_its_dtype_from_nowhere(backend: Backend) -> None:
    assert ops.full((2,), 3.5).dtype == ms.int64, "mended: ops.full keeps a fraction"
    assert backend.tensors.dtype_name(backend.tensors.from_numpy(np.full(2, 3.5))) == "float64"
    assert backend.tensors.dtype_name(backend.tensors.zeros((2,), "float32")) == "float32"


def bfloat16_has_no_arithmetic_to_speak_of(backend: Backend) -> None:
    tensors = backend.tensors
    halves = tensors.from_numpy(np.full(4, 0.5), "bfloat16")
    assert raises(halves.sum), "mended: bfloat16 has a sum"
    assert raises(lambda: mint.matmul(halves.reshape(2, 2), halves.reshape(2, 2))), "mended: bfloat16 has a matmul"
    assert tensors.squared_norm([halves]) == 1.0
    tensors.add_(halves, halves)
    tensors.scale_(halves, 3.0)
    assert tensors.to_numpy(halves).tolist() == [3, 3, 3, 3]


def products_in_half_precision_have_no_kernels(backend: Backend) -> None:
    """They are made in float32, and each is rounded once."""
    numbers = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float16).astype(np.float32)
    wide = ms.Tensor(numbers)
    half = wide.astype(ms.bfloat16)
    assert raises(lambda: mint.bmm(half, half), "Unsupported data type"), "mended: bfloat16 has batched products"
    assert raises(lambda: ops.baddbmm(half, half, half, beta=0.3, alpha=0.7), "must be integ"), "mended: fractions"
    assert raises(lambda: mint.baddbmm(wide, wide, wide, beta=0.3, alpha=0.7), "unregistered"), "mended: mint.baddbmm"
    half = wide.astype(ms.float16)
    several = ops.baddbmm(half, half, half, beta=0.3, alpha=0.7).asnumpy()
    once = (0.3 * np.float64(numbers) + 0.7 * np.float64(numbers) @ numbers).astype(np.float16)
    assert (several != once).mean() > 0.1, "mended: ops.baddbmm rounds once"
    found = backend.muon._Products("float16").fused(wide, 0.3, wide, wide, 0.7, None)
    assert (found.asnumpy() == once).all()


def memory_statistics_are_zero(backend: Backend) -> None:
    held = mint.zeros((1000,))
    assert ms.runtime.max_memory_allocated() == 0, "mended: MindSpore counts a CPU's memory"
    assert backend.tensors.memory_bytes() > held.nbytes


def a_failing_operator_raises_at_once_and_spoils_nothing(backend: Backend) -> None:
    for _ in range(5):
        assert raises(lambda: mint.nn.functional.layer_norm(count_to(4), (4,)), "LayerNormExt")
        for n in range(20):
            assert (count_to(3) + n).asnumpy().tolist() == [n, n + 1, n + 2]


# Two ranks: collectives


def collectives_into_views_are_lost(backend: Backend) -> None:
    comm, tensors = backend.collectives, backend.tensors
    buffer = mint.ones((6,))
    dist.all_reduce(mint.narrow(buffer, 0, 2, 2))
    dist.all_gather([mint.narrow(buffer, 0, 0, 1), mint.narrow(buffer, 0, 5, 1)], ms.Tensor([7.0]))
    assert buffer.asnumpy()[1:].tolist() == [1] * 5, "mended: a collective writes into views"
    buffer = mint.ones((6,))
    comm.all_reduce(tensors.alias(buffer, 2, (2,)), comm.world())
    comm.all_gather(tensors.alias(buffer, 4, (2,)), ms.Tensor([7.0 + comm.rank()]), comm.world())
    assert buffer.asnumpy().tolist() == [1, 1, 2, 2, 7, 8]


def most_collectives_have_no_kernel(backend: Backend) -> None:
    comm = backend.collectives
    four, two = count_to(4), count_to(2)
    for call in (
        lambda: dist.all_gather_into_tensor(mint.zeros((4,)), two),
        lambda: dist.reduce_scatter_tensor(mint.zeros((2,)), four),
        lambda: dist.all_to_all_single(mint.zeros((4,)), four),
    ):
        assert raises(call, "unregistered"), "mended: mccl has this collective"
    gathered, scattered, exchanged = mint.zeros((4,)), mint.zeros((2,)), mint.zeros((4,))
    comm.all_gather(gathered, two, comm.world())
    comm.reduce_scatter(scattered, four, comm.world())
    comm.all_to_all(exchanged, four, comm.world())
    assert gathered.asnumpy().tolist() == [0, 1, 0, 1]
    assert scattered.asnumpy().tolist() == ([0, 2], [4, 6])[comm.rank()]
    assert exchanged.asnumpy().tolist() == ([0, 1, 0, 1], [2, 3, 2, 3])[comm.rank()]


def an_exception_in_forward_spoils_indexing(backend: Backend) -> None:
    weight = ms.Parameter(mint.ones((2, 3)), name="weight")

    def failing() -> Tensor:
        raise ValueError(f"{(weight * 2).sum()}")

    def first_row() -> Tensor:
        return weight[0].sum()

    ms.value_and_grad(first_row, None, weights=[weight])()
    try:
        assert raises(lambda: ms.value_and_grad(failing, None, weights=[weight])())
        spoilt = raises(lambda: ms.value_and_grad(first_row, None, weights=[weight])(), "as index, but got 0")
    finally:
        assert raises(lambda: backend.autograd.value_and_grad(failing, [weight])())
    assert spoilt, "mended: the engine forgets a graph whose forward failed"
    assert float(ms.value_and_grad(first_row, None, weights=[weight])()[0]) == 3
    assert not backend.autograd.grad_enabled()


def what_meets_an_empty_tensor_gets_any_gradient(backend: Backend) -> None:
    weight, empty = ms.Parameter(mint.ones((4,)), name="weight"), mint.zeros((2, 0, 4))
    found = []
    for _ in range(5):
        used_before = [mint.ones((4,)) * 7 for _ in range(50)]
        del used_before
        found += ms.value_and_grad(lambda: (empty * weight).sum(), None, weights=[weight])()[1][0].asnumpy().tolist()
    assert any(found), "mended: MindSpore knows that a sum over nothing is zero"
    assert not backend.autograd.differentiates_empty_tensors()


def some_dtypes_are_refused(backend: Backend) -> None:
    comm, tensors = backend.collectives, backend.tensors

    def bools() -> Tensor:
        return tensors.from_numpy(np.array([comm.rank() == 0, True]))

    wide = tensors.from_numpy(np.array([1.0, 2.0**-40]))
    assert raises(lambda: dist.all_reduce(wide), "AllReduce failed"), "mended: mccl sums float64"
    assert raises(lambda: dist.broadcast(bools(), 0)), "mended: mccl sends bool"
    assert raises(lambda: dist.all_reduce(mint.zeros((0,)))), "mended: mccl takes an empty tensor"
    comm.all_reduce(wide, comm.world())
    assert tensors.to_numpy(wide).tolist() == [2.0, 2.0**-39]
    flags, everyone = bools(), tensors.zeros((4,), "bool")
    comm.broadcast(flags, 0, comm.world())
    comm.all_gather(everyone, bools(), comm.world())
    assert tensors.to_numpy(flags).tolist() == [True, True]
    assert tensors.to_numpy(everyone).tolist() == [True, True, False, True]
    comm.all_reduce(mint.zeros((0,)), comm.world())


def messages_look_for_their_group_under_a_wrong_name(backend: Backend) -> None:
    comm = backend.collectives
    other = 1 - comm.rank()
    rank = dist_module._GROUP_RANK_CACHE.pop("hccl_world_group")
    try:
        assert raises(lambda: dist.isend(count_to(1), other)), "mended: isend knows mccl's world"
    finally:
        dist_module._GROUP_RANK_CACHE["hccl_world_group"] = rank
    received = mint.zeros((3,))
    comm.send(count_to(3), other, comm.world())
    comm.receive(received, other, comm.world())
    assert received.asnumpy().tolist() == [0, 1, 2]


def a_message_is_not_taken_for_a_part_of_a_later_collective(backend: Backend) -> None:
    """The receives are asked for first, but waited for only after a collective between the same two ranks."""
    comm = backend.collectives
    other = 1 - comm.rank()
    first, second = mint.zeros((2,)), mint.zeros((2,))
    works = [comm.receive(each, other, comm.world(), async_op=True) for each in (first, second)]
    for value in (10.0, 20.0):
        comm.send(ms.Tensor([value, value + comm.rank()]), other, comm.world())
    total = ms.Tensor([1.0, 2.0])
    comm.all_reduce(total, comm.world())
    for work in reversed(works):
        work.wait()
    assert total.asnumpy().tolist() == [2, 4]
    assert first.asnumpy().tolist() == [10, 10 + other]
    assert second.asnumpy().tolist() == [20, 20 + other]


def two_ranks_that_receive_before_they_send_do_not_block(backend: Backend) -> None:
    comm = backend.collectives
    other = 1 - comm.rank()
    received = mint.zeros((100_000,))
    work = comm.receive(received, other, comm.world(), async_op=True)
    comm.send(mint.ones((100_000,)), other, comm.world())
    work.wait()
    assert received.asnumpy().sum() == 100_000


# Ranks that are spent afterwards


def an_untagged_message_is_mistaken(backend: Backend) -> bool:
    """MindSpore alone: a message that is received after a collective. Returns whether a rank got a wrong value."""
    other = 1 - backend.collectives.rank()
    total, received = ms.Tensor([1.0, 2.0]), mint.zeros((2,))
    dist.isend(ms.Tensor([10.0, 20.0]), other)
    try:
        dist.all_reduce(total)
        dist.irecv(received, other)
    except RuntimeError:
        return True
    return total.asnumpy().tolist() != [2, 4] or received.asnumpy().tolist() != [10, 20]


def a_group_made_by_a_rank_outside(backend: Backend) -> str | None:
    """MindSpore alone: what the rank that is not in a new group gets when it takes part in making it."""
    if backend.collectives.rank() == 2:
        return dist.new_group([0, 1])
    return None


# Three ranks


def groups_are_made_by_their_members_only(backend: Backend) -> None:
    comm = backend.collectives
    for members in ([0, 1], [1, 2], [0, 2]):
        group = comm.groups([members])
        assert (group is None) == (comm.rank() not in members)
        if group is not None:
            total = ms.Tensor([1.0 + comm.rank()])
            comm.all_reduce(total, group)
            assert total.asnumpy().tolist() == [2.0 + sum(members)]
