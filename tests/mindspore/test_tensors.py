"""MindSpore's tensors as the core sees them: in-place functions that change something, aliases, storage that comes
and goes."""

from __future__ import annotations  # noqa: I001 (our backend first: it sets launch_blocking)

import gc

import numpy as np
import pytest

from hyper_parallel.backends.mindspore import tensors  # before mindspore is used: it sets launch_blocking
from hyper_parallel.core.errors import ConfigError, LayoutError

import mindspore as ms
from mindspore import mint

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def ones(*shape):
    return tensors.from_numpy(np.ones(shape, "float32"))


def count_to(n, dtype="float32"):
    return tensors.from_numpy(np.arange(n), dtype)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_numpy_goes_there_and_back_as_a_copy(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = tensors.from_numpy(array)
    back = tensors.to_numpy(tensor)
    assert tensors.dtype_name(tensor) == dtype
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    array[...] = 0
    back[...] = 0
    assert tensors.to_numpy(tensor).any()


def test_bfloat16_comes_from_and_goes_to_float32():
    tensor = tensors.from_numpy(np.float32([1.0, 1.00390625, -2.5]), "bfloat16")
    assert tensors.dtype_name(tensor) == "bfloat16"
    back = tensors.to_numpy(tensor)
    assert back.dtype == np.float32
    assert back.tolist() == [1.0, 1.0, -2.5]  # 1 + 2^-8 lies between two bfloat16 numbers; the even one is 1


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3.0),
        np.zeros((0, 2)),
        np.arange(6.0).reshape(2, 3).T,
        np.arange(3)[::-1],
        np.broadcast_to(1.0, (2, 2)),
        np.frombuffer(bytes(8)),  # read-only
    ],
)
def test_numpy_arrays_of_any_form_are_copied(array):
    tensor = tensors.from_numpy(array)
    assert tensor.is_contiguous()
    assert tuple(tensor.shape) == array.shape
    np.testing.assert_array_equal(tensors.to_numpy(tensor), array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_and_zeros_have_the_shape_and_dtype_asked_for(dtype):
    empty, zeros = tensors.empty((2, 0), dtype), tensors.zeros((2, 3), dtype)
    assert tuple(empty.shape) == (2, 0) and tensors.dtype_name(empty) == dtype
    assert tuple(zeros.shape) == (2, 3) and tensors.dtype_name(zeros) == dtype
    assert not tensors.to_numpy(zeros).any()


@pytest.mark.parametrize("name", ["float31", "Tensor", ""])
def test_an_unknown_dtype_is_an_error_that_names_it(name):
    with pytest.raises(ConfigError, match=f"unknown dtype '{name}'"):
        tensors.zeros((1,), name)


def test_only_tensors_are_tensors():
    assert tensors.is_tensor(ms.Parameter(ones(1), name="weight"))
    assert not tensors.is_tensor(np.zeros(1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_writes_through_an_alias_show_in_the_buffer_and_the_other_way_round(dtype):
    flat = tensors.zeros((10,), dtype)
    alias = tensors.alias(flat, 3, (2, 2))
    tensors.copy_(alias, count_to(4))
    tensors.scale_(alias, 2.0)
    tensors.add_(alias, tensors.from_numpy(np.ones((2, 2)), dtype))
    assert tensors.to_numpy(flat).tolist() == [0, 0, 0, 1, 3, 5, 7, 0, 0, 0]
    tensors.scale_(flat, 0.0)
    assert tensors.to_numpy(alias).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("start", [0, 4])
def test_operators_read_what_was_written_through_an_alias(start):
    flat = mint.zeros((12,))
    alias = tensors.alias(flat, start, (2, 3))
    assert (alias + 1).asnumpy().sum() == 6  # an operator has seen the old contents
    tensors.copy_(alias, count_to(6))
    assert (alias + 1).asnumpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert (flat + 1).asnumpy()[start : start + 6].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(mint.matmul(ones(1, 2), alias).asnumpy(), [[3, 5, 7]])


def test_an_alias_of_a_whole_buffer_works_like_any_tensor():
    flat = mint.zeros((4,))
    alias = tensors.alias(flat, 0, (2, 2))
    alias.copy_(ones(2, 2))
    ms.ops.assign_add(alias, ones(2, 2))
    assert flat.asnumpy().tolist() == [2, 2, 2, 2]


def test_an_alias_of_a_whole_view_stays_inside_it():
    buffer = count_to(6)
    for view, expected in ((buffer[2:4], [[2], [3]]), (buffer.view(3, 2)[1:], [[2, 3], [4, 5]])):
        alias = tensors.alias(tensors.flat(view), 0, np.shape(expected))
        assert (alias + 0).asnumpy().tolist() == expected


def test_an_alias_of_an_alias_counts_from_its_start():
    inner = tensors.alias(tensors.alias(count_to(10), 2, (6,)), 3, (2,))
    assert tensors.to_numpy(inner).tolist() == [5, 6]


def test_an_alias_keeps_the_memory_alive():
    for make in (count_to, lambda n: mint.ones((n,)) * 1):
        alias = tensors.alias(make(100_000), 99_998, (2,))
        expected = tensors.to_numpy(alias)
        gc.collect()
        others = [mint.zeros((100_000,)) for _ in range(4)]
        np.testing.assert_array_equal(tensors.to_numpy(alias), expected)
        del others


def test_an_alias_has_no_history():
    weight = ms.Parameter(ones(4), name="weight")

    def loss():
        through_alias = tensors.alias(tensors.flat(weight), 0, (2, 2))
        return through_alias.sum() + (3 * weight).sum()

    _, (gradient,) = ms.value_and_grad(loss, None, weights=[weight])()
    assert gradient.asnumpy().tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    "shape, start, wanted",
    [((4,), 1, (4,)), ((4,), -1, (2,)), ((4,), 5, (0,)), ((2, 2), 0, (2,))],
)
def test_an_alias_outside_a_flat_buffer_is_refused(shape, start, wanted):
    with pytest.raises(LayoutError):
        tensors.alias(ones(*shape), start, wanted)


def test_an_alias_of_a_strided_tensor_is_refused():
    with pytest.raises(LayoutError, match="not contiguous"):
        tensors.alias(mint.transpose(ones(4, 2), 0, 1)[0], 0, (2,))


def test_flat_shares_the_storage_of_a_contiguous_tensor():
    matrix = tensors.zeros((2, 3), "float32")
    tensors.copy_(tensors.flat(matrix), count_to(6))
    assert tensors.to_numpy(matrix).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors.to_numpy(tensors.flat(mint.transpose(matrix, 0, 1))).tolist() == [0, 3, 1, 4, 2, 5]
    assert tensors.to_numpy(tensors.flat(tensors.from_numpy(np.float32(7)))).tolist() == [7]


@pytest.mark.parametrize("target_dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_copy_casts_between_all_dtypes(source_dtype, target_dtype):
    target = tensors.zeros((4,), target_dtype)
    tensors.copy_(target, tensors.from_numpy(np.array([0, 1, 1, 0]), source_dtype))
    assert tensors.to_numpy(target).tolist() == [0, 1, 1, 0]


def test_copy_takes_any_shape_of_the_same_size_and_views():
    target = tensors.zeros((2, 3), "float64")
    tensors.copy_(target, mint.transpose(count_to(6).reshape(3, 2), 0, 1))
    assert tensors.to_numpy(target).tolist() == [[0, 2, 4], [1, 3, 5]]


def test_parameters_are_written_in_place():
    parameter = ms.Parameter(ones(3), name="weight")
    tensors.copy_(parameter, count_to(3))
    tensors.scale_(parameter, 2.0)
    tensors.add_(parameter, ones(3))
    assert (parameter + 0).asnumpy().tolist() == [1, 3, 5]


def test_in_place_functions_refuse_what_numpy_would_repeat_or_misplace():
    with pytest.raises(LayoutError, match=r"shape \(1,\) into shape \(3,\)"):
        tensors.copy_(ones(3), ones(1))
    with pytest.raises(LayoutError, match=r"add shape \(1,\) to shape \(3,\)"):
        tensors.add_(ones(3), ones(1))
    strided = mint.transpose(ones(2, 3), 0, 1)
    for write in (
        lambda: tensors.scale_(strided, 2.0),
        lambda: tensors.add_(strided, ones(3, 2)),
    ):
        with pytest.raises(LayoutError, match="not contiguous"):
            write()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64", "complex64", "complex128"])
def test_strided_tensors_are_overwritten_in_row_major_order(dtype):
    flat = tensors.zeros((8,), dtype)
    strided = tensors._strided(flat, 1, (3, 2), (1, 3))
    values = np.array([1, 0, 1, 1, 0, 1], bool)
    tensors.copy_(strided, tensors.from_numpy(values, dtype))
    assert tensors.to_numpy(flat).tolist() == [0, 1, 1, 0, 0, 1, 1, 0]
    tensors.zero_(tensors._strided(flat, 2, (2, 2), (1, 3)))
    assert tensors.to_numpy(flat).tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_an_expanded_tensor_repeats_its_elements():
    assert tensors.repeats_elements(mint.broadcast_to(ones(1, 3), (4, 3)))
    others = ones(1, 3), mint.transpose(ones(2, 3), 0, 1), ones(5, 0), ones()
    assert not any(map(tensors.repeats_elements, others))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_are_contiguous_copies_and_concatenate_undoes_them(dtype):
    tensor = tensors.from_numpy(np.arange(12).reshape(3, 4) % 2, dtype)
    before = tensors.to_numpy(tensor)
    pieces = tensors.chunk_rows(tensor, -1, [1, 0, 3])
    assert [tuple(piece.shape) for piece in pieces] == [(3, 1), (3, 0), (3, 3)]
    assert all(piece.is_contiguous() for piece in pieces)
    np.testing.assert_array_equal(tensors.to_numpy(tensors.concatenate(pieces, 1)), before)
    tensors.copy_(pieces[2], tensors.zeros((9,), dtype))
    np.testing.assert_array_equal(tensors.to_numpy(tensor), before)


def test_a_single_chunk_is_a_copy_too():
    tensor = ones(3)
    (piece,) = tensors.chunk_rows(tensor, 0, [3])
    tensors.scale_(piece, 5.0)
    assert tensors.to_numpy(tensor).tolist() == [1, 1, 1]


@pytest.mark.parametrize("pieces", [[1, 1], [2, 2], [-1, 4], []])
def test_chunks_that_do_not_make_up_the_dim_are_refused(pieces):
    with pytest.raises(LayoutError, match=r"do not make up dim 0 of shape \(3, 2\)"):
        tensors.chunk_rows(ones(3, 2), 0, pieces)


@pytest.mark.parametrize("make", [lambda n: tensors.empty((n,), "float32"), lambda n: count_to(n)])
def test_released_storage_holds_nothing_and_restored_storage_serves_every_alias(make):
    flat = make(1000)
    alias = tensors.alias(flat, 500, (100, 5))
    assert tensors.storage_bytes(flat) == tensors.storage_bytes(alias) == 4000
    tensors.release_storage(flat)
    assert tensors.storage_bytes(flat) == tensors.storage_bytes(alias) == 0
    assert tuple(alias.shape) == (100, 5)
    tensors.restore_storage(flat)
    assert tensors.storage_bytes(flat) == tensors.storage_bytes(alias) == 4000
    tensors.copy_(flat, count_to(1000))
    assert (alias + 0).asnumpy()[0].tolist() == [500, 501, 502, 503, 504]


def test_released_storage_is_refused_where_mindspore_would_crash():
    flat = tensors.zeros((4,), "float32")
    alias = tensors.alias(flat, 2, (2,))
    tensors.release_storage(flat)
    for use in (
        lambda: tensors.copy_(flat, ones(4)),
        lambda: tensors.scale_(alias, 2.0),
        lambda: tensors.add_(alias, ones(2)),
        lambda: tensors.alias(flat, 0, (4,)),
    ):
        with pytest.raises(LayoutError, match="released"):
            use()


def test_restoring_twice_keeps_the_contents():
    flat = tensors.zeros((4,), "float32")
    tensors.copy_(flat, count_to(4))
    tensors.restore_storage(flat)
    assert tensors.to_numpy(flat).tolist() == [0, 1, 2, 3]


def test_squared_norm_is_summed_in_float64():
    many_ones = mint.ones((2**24 + 1,))  # float32 can't count that far one by one
    assert tensors.squared_norm([many_ones, tensors.from_numpy(np.full(2, 3.0), "bfloat16")]) == 2**24 + 19
    assert tensors.squared_norm([mint.transpose(count_to(6).reshape(2, 3), 0, 1)]) == 55
    assert tensors.squared_norm(iter([])) == 0.0
    assert tensors.squared_norm([tensors.zeros((0,), "float32")]) == 0.0


def test_memory_bytes_grows_with_what_the_process_has_held():
    before = tensors.memory_bytes()
    assert before > 10 * 2**20
    size = before + 64 * 2**20
    held = np.ones(size, dtype=np.uint8)
    assert tensors.memory_bytes() >= size  # all of it is resident at once, whatever was given back before
    del held
