"""Muon's kernels in PyTorch: values, batches, memory, and PyTorch's own optimizer."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import backends
from hyper_parallel.backends.torch import muon, tensors
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.scaling import scale_of
from tests.core.muon.kernel_checks import KernelChecks
from tests.core.muon.reference import gaussian


@pytest.fixture(autouse=True)
def one_thread():
    """For matrices this small several threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def backend():
    return backends.load("torch")


class TestKernels(KernelChecks):
    """See `KernelChecks`."""


# PyTorch's own optimizer

SHAPES = [(24, 16), (16, 40), (32, 32), (1, 12)]


def both(settings, scale, theirs, steps=20):
    """Parameters at the start, after steps of ours and after steps of PyTorch's, on the same gradients of full rank."""
    start = [tensors.from_numpy(gaussian(*shape, seed=1), "float32") for shape in SHAPES]
    ours = [each.clone() for each in start]
    buffers = [torch.zeros_like(each) for each in start]
    parameters = [torch.nn.Parameter(each.clone()) for each in start]
    optimizer = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1, momentum=0.95, **theirs)
    nesterov = theirs.get("nesterov", True)
    for step in range(steps):
        gradients = [tensors.from_numpy(gaussian(*shape, seed=100 + step), "float32") for shape in SHAPES]
        ahead = muon.momenta_(buffers, gradients, 0.95, "ema", nesterov, settings.wire_dtype)
        updates = [muon.newton_schulz(each[None], settings)[0] for each in ahead]
        muon.apply_(ours, updates, 0.02, [scale_of(scale, shape) for shape in SHAPES], 0.1)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        optimizer.step()
    return zip(start, ours, [parameter.detach() for parameter in parameters])


SETTINGS = [
    ("original", {}),
    ("match_rms", {"adjust_lr_fn": "match_rms_adamw"}),
    ("original", {"nesterov": False, "ns_steps": 3}),
    ("match_rms", {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (3.0, -3.2, 1.2)}),
]


def ours_for(theirs, dtype):
    """The settings that mean the same."""
    coefficients = theirs.get("ns_coefficients", "legacy")
    return NewtonSchulz(coefficients, theirs.get("ns_steps", 5), dtype, method="direct")


@pytest.mark.parametrize(("scale", "theirs"), SETTINGS)
def test_steps_are_those_of_pytorchs_muon_in_float32(monkeypatch, scale, theirs):
    # PyTorch's casts to bfloat16 whatever it is given: here its own code runs without that cast.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for _, ours, wanted in both(ours_for(theirs, "float32"), scale, theirs):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("scale", "theirs"), SETTINGS)
def test_steps_are_those_of_pytorchs_muon_in_bfloat16(scale, theirs):
    for start, ours, wanted in both(ours_for(theirs, "bfloat16"), scale, theirs):
        # PyTorch rounds the norm to bfloat16: 3e-2 is what that alone may make of an update.
        assert torch.linalg.vector_norm(ours - wanted) < 3e-2 * torch.linalg.vector_norm(wanted - start)


# Batches

ON_CPU = tensors.device().type == "cpu"


@pytest.mark.skipif(not ON_CPU, reason="an accelerator's libraries choose other kernels for other batches")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(7, 24, 40), (5, 40, 24), (3, 16, 16), (4, 1, 9), (3, 64, 200)])
def test_a_batch_is_computed_as_its_matrices_bit_for_bit(monkeypatch, dtype, shape):
    batch = tensors.from_numpy(gaussian(*shape), "float32")
    for method in ("auto", "direct"):
        settings = NewtonSchulz("asym5", dtype=dtype, method=method)
        alone = torch.cat([muon.newton_schulz(matrix[None], settings) for matrix in batch])
        for cached in (muon._CACHED, 2 * batch[0].nbytes, 1):  # all together, by two or four, one by one
            with monkeypatch.context() as patch:
                patch.setattr(muon, "_CACHED", cached)
                assert torch.equal(muon.newton_schulz(batch, settings), alone)


# Memory


class Allocations(TorchDispatchMode):
    """Bytes of each storage that operators make inside, those of less than a matrix left out."""

    def __init__(self, least):
        super().__init__()
        self.least, self.seen, self.kept = least, [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            each.untyped_storage().data_ptr() for each in (*args, *(kwargs or {}).values()) if torch.is_tensor(each)
        }
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in given:
                self.kept.append(each)  # so that its memory is not taken for new memory later
                self.seen += [each.nbytes] if each.nbytes >= self.least else []
        return result


@pytest.mark.parametrize(
    ("dtype", "method", "long", "short"),
    [("bfloat16", "direct", 2, 2), ("float32", "direct", 2, 2), ("float32", "gram", 2, 4)],
)
def test_memory_is_taken_once_for_a_batch_however_many_steps_and_matrices(dtype, method, long, short):
    """Two of the size of the batch, and two or four of its grams."""
    k, m, n = 6, 16, 48
    size = tensors.item_bytes(dtype)
    for steps in (2, 9):
        batch = tensors.from_numpy(gaussian(k, m, n), dtype)
        with Allocations(least=m * m) as made:
            muon.newton_schulz(batch, NewtonSchulz("asym5", steps, dtype, method=method))
        assert sorted(made.seen) == [k * m * m * size] * short + [k * m * n * size] * long


# Within a training program


def test_a_step_is_the_same_under_autocast_and_records_nothing():
    def step():
        parameter = torch.nn.Parameter(tensors.from_numpy(gaussian(8, 12), "float32"))
        buffer = torch.zeros_like(parameter)
        (ahead,) = muon.momenta_([buffer], [parameter * 2], 0.9, "ema", True)
        update = muon.newton_schulz(ahead[None], NewtonSchulz(dtype="float32"))[0]
        muon.normalize_rows_(update[None], torch.zeros(1, 8, device=update.device), 0.9, 1e-10)
        muon.apply_([parameter], [update], 0.1, [1.0], 0.1)
        muon.scale_blocks_(parameter, [(slice(0, 4), slice(0, 12))], [0.5])
        assert not (ahead.requires_grad or update.requires_grad) and parameter.grad_fn is None
        return parameter.detach()

    plain = step()
    with torch.autocast(tensors.device().type, dtype=torch.bfloat16):
        assert torch.equal(step(), plain)


def test_gradients_and_batches_of_any_strides_give_contiguous_results():
    gradient = tensors.from_numpy(gaussian(12, 8), "float32").T
    buffer = torch.zeros(8, 12, device=gradient.device)
    for nesterov in (True, False):
        (ahead,) = muon.momenta_([buffer], [gradient], 0.9, "ema", nesterov)
        assert ahead.is_contiguous()
    settings = NewtonSchulz(dtype="float32")
    batch = tensors.from_numpy(gaussian(8, 3, 12), "float32").transpose(0, 1)
    assert torch.equal(muon.newton_schulz(batch, settings), muon.newton_schulz(batch.contiguous(), settings))
