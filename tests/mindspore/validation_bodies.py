"""What a rank does in test_validation.py."""

import copy

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function

import hyper_parallel as hp
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, cut
from hyper_parallel.core.validation.watch import Track, Watch
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.mindspore_decoder import Decoder


def tensor(*shape):
    return Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 10)


class Followed:
    """Followed tensors of one watch."""

    def __init__(self, backend):
        self.backend = backend
        self.watch = Watch(backend, ("tensor",), (2,))

    def __call__(self, value, state):
        return self.backend.interception.follow(value, Track(self.watch, (state,), "the line", True))

    def state(self, value):
        return str(self.backend.interception.track_of(value).states[0])


def operators(backend):
    """How results lie, by what was done: reflected operators, indexing and functions, each of which takes another way
    through MindSpore."""
    followed = Followed(backend)
    x, plain = followed(tensor(2, 4), cut(1)), Tensor(np.ones((2, 4), np.float32))
    made = {
        "x + plain": x + plain,
        "plain + x": plain + x,
        "plain - x": plain - x,
        "plain * x": plain * x,
        "plain / x": plain / (x + 1),
        "2 * x": 2 * x,
        "1 - x": 1 - x,
        "plain > x": plain > x,
        "x[0]": x[0],
        "x[..., None]": x[..., None],
        "x.reshape": x.reshape(2, 4, 1),
        "x.astype": x.astype(ms.float16),
        "x.T": x.T,
        "softmax": ops.softmax(x, 0),
        "silu": mint.nn.functional.silu(x),
        "cat": mint.cat((x, x), 0),
        "matmul": mint.matmul(x, followed(tensor(4, 3), cut(0))),
        "sum": x.sum(0),
    }
    return {name: followed.state(value) for name, value in made.items()}


def values(backend):
    """What is read of a whole tensor, and what is said of one that is not."""
    followed = Followed(backend)
    whole = followed(Tensor(3.0, ms.float32), WHOLE)
    read = [float(whole), int(whole), bool(whole > 2), whole.item(), whole.asnumpy().item(), whole.tolist()]
    told = []
    for reading in (float, bool, Tensor.item, lambda each: each.asnumpy(), lambda each: each.tolist()):
        try:
            pending = followed(Tensor(3.0, ms.float32), PARTIAL)
            pending.item() if reading is Tensor.item else reading(pending)
        except ContractError as error:
            told.append("partial" in str(error))
    return read, told


def objects(backend):
    """Writing in place, copies and printing."""
    followed = Followed(backend)
    target = Tensor(np.zeros((2, 4), np.float32))
    target_view = followed(target, WHOLE)
    target_view[0] = 5.0
    x = followed(tensor(2, 2), cut(0))
    copied = copy.deepcopy(x)
    return {
        "written": target.asnumpy()[0].tolist(),
        "identity": target_view is target,
        "copy": followed.state(copied),
        "copy is another": copied is not x,
        "print": str(x).startswith("tensor: shard(0)"),
        "plain": type(backend.interception.plain(x)) is Tensor,
    }


def gradients(backend):
    """Gradients through followed tensors are those through plain ones."""
    weight = ms.Parameter(tensor(3, 4), name="weight")
    x = tensor(2, 4)
    seen = []

    def loss(follow):
        shown, hidden = weight * 1.0, x * 1.0
        if follow is not None:
            shown, hidden = follow(shown, cut(0)), follow(hidden, COPIED)
            backend.interception.watch_gradient(shown, lambda gradient: seen.append(tuple(gradient.shape)))
        out = mint.nn.functional.silu(mint.matmul(hidden, shown.T))
        return backend.interception.plain((out * out).sum())

    def gradient(follow):
        return ms.value_and_grad(lambda: loss(follow), None, weights=[weight])()[1][0].asnumpy()

    found, expected = gradient(Followed(backend)), gradient(None)
    return np.array_equal(found, expected), seen


class Doubled(_Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class DoubledCell(nn.Cell):
    """The same as a cell."""

    def construct(self, x):
        return x * 2

    def bprop(self, x, result, gradient):
        return (gradient * 2,)


def own_backwards(backend):
    """What is said of functions whose backward nobody sees, by the boundary and by the next operator."""
    weight = ms.Parameter(tensor(3, 4), name="weight")
    told = []
    for function in (Doubled.apply, DoubledCell()):

        def loss(function=function):
            follow = Followed(backend)
            follow.watch.boundary_modules = frozenset({"model.mlp"})
            follow.watch.running.append("model.mlp.up")
            made = function(follow(weight * 1.0, cut(0)))
            return backend.interception.plain(made + follow(tensor(3, 4), cut(0)))

        try:
            ms.value_and_grad(lambda: loss().sum(), None, weights=[weight])()
        except ContractError as error:
            told.append(str(error))
            backend.autograd.value_and_grad(lambda: (weight * 1.0).sum(), [weight])()
    return told


def on_zeros(backend):
    """What validation without devices says of the decoder."""
    config = DecoderConfig(
        vocab_size=97, hidden_size=32, intermediate_size=49, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    told = []
    for sequence_parallel in (False, True):
        model = Decoder(config)
        mesh = hp.DeviceMesh.from_sizes({"shard": 2, "tensor": 2})
        plan = hp.plan(model, mesh, {"sequence_parallel": sequence_parallel})
        verdict = hp.validate(model, plan, (2, 7))
        told.append((verdict.ranks, verdict.boundaries, verdict.operators > 300, verdict.trusted))
    return told
