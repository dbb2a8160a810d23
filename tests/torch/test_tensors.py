"""PyTorch's tensors as the core sees them: aliases that autograd does not notice, storage that comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyper_parallel.backends.torch import tensors
from hyper_parallel.core.backend import Move
from hyper_parallel.core.errors import ConfigError, LayoutError
from tests.work import imported


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "int64", "uint8", "bool"])
def test_numpy_goes_there_and_back_as_a_copy(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = tensors.from_numpy(array)
    back = tensors.to_numpy(tensor)
    assert tensors.dtype_name(tensor) == dtype
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    array[...] = 0
    back[...] = 0
    assert tensor.any()


def test_bfloat16_comes_from_and_goes_to_float32():
    tensor = tensors.from_numpy(np.float32([1.0, 1.00390625, -2.5]), "bfloat16")
    assert tensors.dtype_name(tensor) == "bfloat16"
    back = tensors.to_numpy(tensor)
    assert back.dtype == np.float32
    assert back.tolist() == [1.0, 1.0, -2.5]  # 1 + 2^-8 lies between two bfloat16 numbers; the even one is 1


@pytest.mark.parametrize(
    "array", [np.float32(3.0), np.zeros((0, 2)), np.arange(6.0).reshape(2, 3).T, np.arange(3)[::-1]]
)
def test_numpy_arrays_of_any_form_are_copied(array):
    tensor = tensors.from_numpy(array)
    assert tensor.is_contiguous()
    assert tuple(tensor.shape) == array.shape
    np.testing.assert_array_equal(tensors.to_numpy(tensor), array)


def test_to_numpy_leaves_the_autograd_history_behind():
    assert tensors.to_numpy(torch.ones(2, requires_grad=True) * 2).tolist() == [2.0, 2.0]


def test_empty_and_zeros_have_the_shape_and_dtype_asked_for():
    assert tensors.empty((2, 0), "int32").shape == (2, 0)
    zeros = tensors.zeros((2, 3), "bfloat16")
    assert zeros.dtype == torch.bfloat16 and not zeros.any()


@pytest.mark.parametrize("name", ["float31", "Tensor", ""])
def test_an_unknown_dtype_is_an_error_that_names_it(name):
    with pytest.raises(ConfigError, match=f"unknown dtype '{name}'"):
        tensors.zeros((1,), name)


def test_only_tensors_are_tensors():
    assert tensors.is_tensor(torch.nn.Parameter(torch.zeros(1)))
    assert not tensors.is_tensor(np.zeros(1))


def test_writes_through_an_alias_show_in_the_buffer_and_the_other_way_round():
    flat = torch.zeros(10)
    alias = tensors.alias(flat, 3, (2, 2))
    tensors.copy_(alias, torch.arange(4.0))
    tensors.scale_(alias, 2.0)
    tensors.add_(alias, torch.ones(2, 2))
    assert flat.tolist() == [0, 0, 0, 1, 3, 5, 7, 0, 0, 0]
    flat.zero_()
    assert alias.tolist() == [[0, 0], [0, 0]]


def test_an_alias_of_an_alias_counts_from_its_start():
    flat = torch.arange(10.0)
    inner = tensors.alias(tensors.alias(flat, 2, (6,)), 3, (2,))
    assert inner.tolist() == [5, 6]


def test_an_alias_has_no_history():
    flat = torch.zeros(4, requires_grad=True) * 1
    assert not tensors.alias(flat, 0, (4,)).requires_grad
    assert not tensors.flat(torch.zeros(2, 2, requires_grad=True)).requires_grad


def test_a_write_through_an_alias_does_not_invalidate_what_autograd_has_saved():
    flat = torch.full((4,), 2.0)
    weight = tensors.alias(flat, 0, (2, 2))
    x = torch.ones(2, 2, requires_grad=True)
    loss = (x * weight).sum()
    tensors.release_storage(flat)
    tensors.restore_storage(flat)
    tensors.copy_(tensors.alias(flat, 0, (4,)), torch.full((4,), 3.0))
    tensors.scale_(flat, 1.0)
    loss.backward()  # torch would refuse if the counter of `weight` had moved
    assert x.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_moves_and_zeros_do_not_invalidate_what_autograd_has_saved():
    flat = torch.full((4,), 2.0)
    x = torch.ones(4, requires_grad=True)
    loss = (x * flat).sum()
    tensors.zero_(flat)
    tensors.move_(flat, torch.full((2,), 3.0), [Move((2,), 0, (1,), 0, (1,))])
    loss.backward()
    assert x.grad.tolist() == [3.0, 3.0, 0.0, 0.0]


def test_moves_leave_no_history():
    target, source = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    tensors.move_(target, source, [Move((2,), 0, (1,), 0, (1,))])
    assert target.grad_fn is None and target.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "flat, start, shape",
    [
        (torch.zeros(4), 1, (4,)),
        (torch.zeros(4), -1, (2,)),
        (torch.zeros(4), 5, (0,)),
        (torch.zeros(2, 2), 0, (2,)),
        (torch.zeros(4)[::2], 0, (2,)),
    ],
)
def test_an_alias_outside_a_flat_buffer_is_refused(flat, start, shape):
    with pytest.raises(LayoutError):
        tensors.alias(flat, start, shape)


def test_flat_shares_the_storage_of_a_contiguous_tensor():
    matrix = torch.zeros(2, 3)
    tensors.copy_(tensors.flat(matrix), torch.arange(6))
    assert matrix.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors.flat(matrix.t()).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("tensor", [torch.arange(8)[::2], torch.ones(()).expand(4), torch.ones(2, 1).expand(2, 3)])
def test_flat_is_contiguous_whatever_it_is_made_from(tensor):
    assert tensors.flat(tensor).is_contiguous()
    assert tensors.flat(tensor).tolist() == tensor.reshape(-1).tolist()


def test_copy_casts_and_takes_any_shape_of_the_same_size():
    target = torch.zeros(2, 3, dtype=torch.float64)
    tensors.copy_(target, torch.arange(6, dtype=torch.int32).reshape(3, 2).t())
    assert target.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_parameters_are_written_in_place():
    parameter = torch.nn.Parameter(torch.ones(3))
    tensors.copy_(parameter, torch.arange(3.0))
    tensors.scale_(parameter, 2.0)
    tensors.add_(parameter, torch.ones(3))
    assert parameter.tolist() == [1, 3, 5]


def test_in_place_functions_refuse_what_torch_would_repeat_or_misplace():
    with pytest.raises(LayoutError, match=r"shape \(1,\) into shape \(3,\)"):
        tensors.copy_(torch.zeros(3), torch.zeros(1))
    with pytest.raises(LayoutError, match=r"add shape \(1,\) to shape \(3,\)"):
        tensors.add_(torch.zeros(3), torch.zeros(1))
    with pytest.raises(LayoutError, match="not contiguous"):
        tensors.add_(torch.zeros(2, 3).t(), torch.zeros(3, 2))


def test_strided_tensors_are_overwritten_in_row_major_order():
    flat = torch.zeros(8)
    strided = flat[1:7].view(2, 3).t()
    tensors.copy_(strided, torch.arange(1.0, 7.0))
    assert strided.tolist() == [[1, 2], [3, 4], [5, 6]] and flat.tolist() == [0, 1, 3, 5, 2, 4, 6, 0]
    tensors.zero_(strided[1:])
    assert flat.tolist() == [0, 1, 0, 0, 2, 0, 0, 0]


def test_an_expanded_tensor_repeats_its_elements():
    assert tensors.repeats_elements(torch.zeros(1, 3).expand(4, 3))
    others = torch.zeros(1, 3).expand(1, 3), torch.zeros(2, 3).t(), torch.zeros(()), torch.zeros(5, 0)
    assert not any(map(tensors.repeats_elements, others))


def test_chunks_are_contiguous_copies_and_concatenate_undoes_them():
    tensor = torch.arange(12.0).reshape(3, 4)
    pieces = tensors.chunk_rows(tensor, 1, [1, 0, 3])
    assert [tuple(piece.shape) for piece in pieces] == [(3, 1), (3, 0), (3, 3)]
    assert all(piece.is_contiguous() for piece in pieces)
    assert torch.equal(tensors.concatenate(pieces, 1), tensor)
    pieces[2].zero_()
    assert tensor.sum() == 66


@pytest.mark.parametrize("pieces", [[1, 1], [2, 2], [-1, 4], []])
def test_chunks_that_do_not_make_up_the_dim_are_refused(pieces):
    with pytest.raises(LayoutError, match=r"do not make up dim 0 of shape \(3, 2\)"):
        tensors.chunk_rows(torch.zeros(3, 2), 0, pieces)


def test_released_storage_holds_nothing_and_restored_storage_serves_every_alias():
    flat = torch.zeros(1000)
    alias = tensors.alias(flat, 500, (100, 5))
    assert tensors.storage_bytes(alias) == 4000
    tensors.release_storage(flat)
    assert tensors.storage_bytes(alias) == 0
    assert alias.shape == (100, 5)
    with pytest.raises(LayoutError, match="released"):
        tensors.alias(flat, 0, (4,))
    tensors.restore_storage(flat)
    assert tensors.storage_bytes(alias) == 4000
    tensors.copy_(flat, torch.arange(1000.0))
    assert alias[0].tolist() == [500, 501, 502, 503, 504]


def test_storage_can_be_released_although_its_values_came_from_numpy_and_went_there():
    flat = tensors.from_numpy(np.arange(4.0))
    seen = tensors.to_numpy(flat)
    tensors.release_storage(flat)  # torch can't resize a storage that numpy shares
    assert seen.tolist() == [0, 1, 2, 3]


def test_restoring_twice_keeps_the_contents():
    flat = torch.arange(4.0)
    tensors.restore_storage(flat)
    assert flat.tolist() == [0, 1, 2, 3]


def test_squared_norm_is_summed_in_float64():
    many_ones = torch.ones(2**24 + 1)  # float32 can't count that far one by one
    assert tensors.squared_norm([many_ones, torch.full((2,), 3.0, dtype=torch.bfloat16)]) == 2**24 + 19
    assert tensors.squared_norm(iter([])) == 0.0
    assert tensors.squared_norm([torch.zeros(0)]) == 0.0


def test_memory_bytes_grows_with_what_the_process_has_held():
    before = tensors.memory_bytes()
    assert before > 10 * 2**20
    size = before + 64 * 2**20
    held = np.ones(size, dtype=np.uint8)
    assert tensors.memory_bytes() >= size  # all of it is resident at once, whatever was given back before
    del held


def test_the_backend_does_not_wait_for_what_pytorch_leaves_until_it_is_asked_for():
    _, others = imported("from hyper_parallel import backends\nbackends.load('torch')")
    assert "torch" in others and "sympy" not in others
