"""Programs for the numerical check of the rules: MindSpore's operators that have a kernel on a CPU, on small arrays."""

from __future__ import annotations

from typing import Callable, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

F = mint.nn.functional


Draw = Callable[[np.random.Generator], np.ndarray]


class Program(NamedTuple):
    """A program and the arrays it is run on, or how they are drawn; those at the places `constants` ask for no
    gradient. Where `packed` is not so, no dim is taken for several blocks that are each cut: the program says that it
    is one."""

    run: Callable
    arrays: tuple[np.ndarray | Draw, ...]
    constants: tuple[int, ...] = ()
    packed: bool = True

    def draw(self, seed: int) -> tuple[np.ndarray, ...]:
        """The arrays, those that are drawn anew for each seed."""
        generator = np.random.default_rng(seed)
        return tuple(each(generator) if callable(each) else each for each in self.arrays)


def real(*shape: int) -> Draw:
    return lambda generator: generator.standard_normal(shape).astype(np.float32)


def positive(*shape: int, scale: float = 1.0) -> Draw:
    return lambda generator: ((np.abs(generator.standard_normal(shape)) + 0.5) * scale).astype(np.float32)


def whole(high: int, *shape: int) -> Draw:
    """Whole numbers below `high`, of which as few as can be are equal: parts must not be mistaken for each other."""
    numbers = np.arange(max(high, np.prod(shape))).astype(np.int32) % high
    return lambda generator: generator.permutation(numbers)[: np.prod(shape)].reshape(shape)


def truths(*shape: int) -> Draw:
    return lambda generator: generator.standard_normal(shape) > 0


def of(run: Callable, *arrays: np.ndarray | Draw, constants: tuple[int, ...] = (), packed: bool = True) -> Program:
    return Program(run, arrays, constants, packed)


UNARY = "abs cos exp log neg reciprocal relu rsqrt sigmoid sin sqrt square tanh"

POINTWISE = {
    **{name: of(getattr(mint, name), positive(4, 4)) for name in UNARY.split() if hasattr(mint, name)},
    "silu": of(F.silu, real(4, 4)),
    "gelu": of(ops.gelu, real(4, 4)),
    "softplus by hand": of(lambda x: mint.log(mint.exp(x) + 1), real(4, 4)),
    "x + y": of(lambda x, y: x + y, real(4, 8), real(4, 8)),
    "x + row": of(lambda x, y: x + y, real(4, 8), real(8)),
    "x + 2": of(lambda x: x + 2, real(4, 4)),
    "2 + x": of(lambda x: 2 + x, real(4, 4)),
    "x - y": of(lambda x, y: mint.sub(x, y, alpha=2), real(4, 4), real(4, 1)),
    "1 - x": of(lambda x: 1 - x, real(4, 4)),
    "x * y": of(lambda x, y: x * y, real(4, 8), real(8)),
    "ops.mul": of(ops.mul, real(4, 4), real(4, 1)),
    "3 * x": of(lambda x: 3 * x, real(4, 4)),
    "x / y": of(lambda x, y: x / y, real(4, 8), positive(4, 1)),
    "x / 2": of(lambda x: x / 2, real(4, 4)),
    "2 / x": of(lambda x: 2 / x, positive(4, 4)),
    "x ** 2": of(lambda x: x**2, real(4, 4)),
    "maximum": of(mint.maximum, real(4, 4), real(4, 4)),
    "comparison": of(lambda x, y: x > y, real(4, 4), real(4, 4)),
    "logical": of(lambda x, y: ops.logical_and(x, ops.logical_not(y)), truths(8, 8), truths(8, 8)),
    "where": of(mint.where, truths(4, 8), real(4, 8), real(4, 1)),
    "masked_fill": of(lambda x, m: x.masked_fill(m, -9.0), real(4, 8), truths(4, 8)),
    "cast": of(lambda x: x.astype(ms.float64).astype(ms.float32), real(4, 4)),
    "whole numbers": of(lambda x: (4 * x).astype(ms.int32), real(4, 4)),
    "stop one side": of(lambda x: x * mint.sigmoid(ops.stop_gradient(x)), real(4, 4)),
    "clamp": of(lambda x: mint.clamp(x, -0.5, 0.5), real(4, 4)),
    "copy": of(lambda x: x.copy(), real(4, 4)),
    "copy_": of(lambda x, y: x.copy().copy_(y), real(4, 4), real(4, 4), constants=(0, 1)),
}


def _dense(x, weight, bias):
    rows = ops.MatMul(transpose_b=True)(x.reshape(-1, x.shape[-1]), weight)
    return ops.bias_add(rows, bias).reshape(*x.shape[:-1], -1)


CONTRACTION = {
    "linear": of(F.linear, real(2, 4, 4), real(8, 4)),
    "linear with a bias": of(F.linear, real(4, 4), real(8, 4), real(8)),
    "matmul": of(mint.matmul, real(4, 8), real(8, 4)),
    "batch times a matrix": of(mint.matmul, real(2, 4, 4), real(4, 8)),
    "bmm": of(mint.bmm, real(4, 2, 4), real(4, 4, 2)),
    "MatMul": of(ops.MatMul(), real(4, 4), real(4, 8)),
    "MatMul, transposed": of(ops.MatMul(transpose_b=True), real(4, 4), real(8, 4)),
    "BatchMatMul": of(ops.BatchMatMul(), real(2, 2, 4, 4), real(2, 2, 4, 2)),
    "BatchMatMul, transposed": of(ops.BatchMatMul(transpose_a=True), real(2, 4, 4), real(2, 4, 8)),
    "addmm": of(ops.addmm, real(8), real(4, 4), real(4, 8)),
    "baddbmm": of(ops.baddbmm, real(4, 2, 2), real(4, 2, 4), real(4, 4, 2)),
    "a linear as the framework has it": of(
        _dense,
        real(4, 4, 4),
        real(8, 4),
        real(8),
    ),
}

REDUCTION = {
    "sum": of(lambda x: x.sum(), real(4, 4)),
    "sum of a dim": of(lambda x: mint.sum(x, -1), real(2, 4, 8)),
    "sum of dims, kept": of(lambda x: mint.sum(x, (0, 2), True), real(4, 4, 4)),
    "mean": of(lambda x: x.mean(), real(4, 4)),
    "mean of a dim": of(lambda x: mint.mean(x, -1, True), real(2, 4, 8)),
    "max": of(lambda x: mint.max(x), real(4, 8)),
    "max of a dim": of(lambda x: mint.max(x, -1), real(4, 8)),
    "argmax": of(lambda x: ops.argmax(x, -1), real(4, 8)),
    "logsumexp": of(lambda x: ops.logsumexp(x, -1), real(4, 8)),
    "var": of(lambda x: ops.var(x, -1), real(4, 8)),
    "cumsum": of(lambda x: ops.cumsum(x, -1), real(4, 8)),
    "norm": of(lambda x: x.norm(), real(4, 4)),
    "all": of(lambda x: mint.all(x), np.arange(16).reshape(4, 4) < 15),
}

NORMALISATION = {
    "softmax": of(lambda x: mint.softmax(x, -1), real(4, 4, 4)),
    "softmax of the framework": of(lambda x: ops.Softmax(1)(x), real(4, 4, 4)),
    "log_softmax": of(lambda x: ops.log_softmax(x, -1), real(4, 4)),
    "layer_norm": of(lambda x, w, b: ops.LayerNorm(-1, -1)(x, w, b)[0], real(2, 4, 4), real(4), real(4)),
    "rms_norm by hand": of(
        lambda x, w: w * (x * mint.rsqrt(mint.mean(x * x, -1, True) + 1e-6)), real(2, 4, 4), real(4)
    ),
}

SHAPE = {
    "heads": of(lambda x: x.reshape(*x.shape[:-1], -1, 4), real(2, 4, 16)),
    "heads, one on each rank": of(lambda x: x.view(*x.shape[:-1], -1, 8), real(2, 2, 16), packed=False),
    "heads merged": of(lambda x: x.reshape(*x.shape[:2], -1), real(2, 2, 4, 4)),
    "tokens merged": of(lambda x: mint.reshape(x, (-1, x.shape[-1])), real(4, 4, 4)),
    "tokens merged and split": of(lambda x: x.reshape(-1, x.shape[-1]).reshape(*x.shape), real(4, 4, 4), packed=False),
    "flatten": of(lambda x: mint.flatten(x, 1, 2), real(2, 4, 4)),
    "transpose": of(lambda x: mint.transpose(x, 1, 2), real(2, 4, 8)),
    "transpose of all": of(lambda x: ops.transpose(x, (0, 2, 1, 3)), real(2, 4, 4, 2)),
    "permute": of(lambda x: mint.permute(x, (2, 0, 1)), real(2, 4, 8)),
    "T": of(lambda x: x.T, real(4, 8)),
    "unsqueeze": of(lambda x: mint.unsqueeze(x, 1), real(4, 4)),
    "squeeze": of(lambda x: mint.squeeze(x, 1), real(4, 1, 4)),
    "broadcast_to": of(lambda x: mint.broadcast_to(x, (2, *x.shape)), real(4, 4)),
    "expand": of(lambda x: ops.broadcast_to(x, (-1, 4, -1)), real(4, 1, 4)),
    "tile": of(lambda x: mint.tile(x, (1, 2)), real(4, 4)),
    "repeat_interleave": of(lambda x: ops.repeat_interleave(x, 2, 1), real(2, 4, 4)),
}

SLICING = {
    "split": of(lambda x: ops.split(x, x.shape[-1] // 2, -1), real(2, 8)),
    "chunk": of(lambda x: mint.chunk(x, 2, -1), real(2, 8)),
    "narrow": of(lambda x: mint.narrow(x, -1, 0, x.shape[-1] // 2), real(4, 8)),
    "x[:, :half]": of(lambda x: x[:, : x.shape[1] // 2], real(4, 8)),
    "x[..., half:]": of(lambda x: x[..., x.shape[-1] // 2 :], real(4, 8)),
    "x[:, None]": of(lambda x: x[:, None], real(4, 4)),
    "x[0]": of(lambda x: x[0], real(4, 4)),
    "x[ids]": of(lambda x, i: x[i], real(4, 4), whole(4, 6)),
    "cat": of(lambda x, y: mint.cat((x, y), -1), real(2, 4), real(2, 4)),
    "rotate": of(
        lambda x, c, s: x * c + mint.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * s,
        real(2, 4, 2, 4),
        real(4, 1, 4),
        real(4, 1, 4),
        constants=(1, 2),
    ),
    "flip": of(lambda x: mint.flip(x, (0,)), real(4, 4)),
    "tril": of(lambda x: ops.tril(x), real(4, 4, 4)),
    "pad": of(lambda x: ops.pad(x, (1, 0)), real(4, 4)),
}

GATHERING = {
    "rows": of(lambda w, i: ops.gather(w, i, 0), real(8, 4), whole(8, 4, 4)),
    "rows of the framework": of(lambda w, i: w.index_select(0, i), real(8, 4), whole(8, 4)),
    "gather": of(lambda x, i: mint.gather(x, 1, i), real(4, 4), np.array([[0, 1], [3, 2], [2, 0], [1, 3]])),
    "scatter_add": of(
        lambda x, i, y: ops.tensor_scatter_elements(x, i, y, 0, "add"), real(4, 4), whole(4, 4, 4), real(4, 4)
    ),
    "one_hot": of(lambda i: ops.one_hot(i, 4, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)), whole(4, 4, 2)),
    "topk": of(lambda x: ops.topk(x, 2), real(4, 4)),
    "sort": of(lambda x: ops.sort(x), real(4, 4)),
    "cross_entropy": of(
        lambda x, y: ops.cross_entropy(x, y, reduction="sum"), real(4, 8), np.array([1, 5, 0, 7], np.int32)
    ),
}

ATTENTION_AND_FACTORY = {
    "attention by hand": of(
        lambda q, k, v: ops.BatchMatMul()(mint.softmax(ops.BatchMatMul(transpose_b=True)(q, k) * 0.5, -1), v),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
    ),
    "dropout in evaluation": of(lambda x: nn.Dropout(p=0.5).set_train(False)(x), real(4, 4)),
    "zeros_like": of(ops.zeros_like, real(4, 4)),
    "x + zeros_like": of(lambda x: x + ops.zeros_like(x), real(4, 4)),
    "ones_like": of(ops.ones_like, real(4, 4)),
}

PROGRAMS = {
    "pointwise": POINTWISE,
    "contraction": CONTRACTION,
    "reduction": REDUCTION,
    "normalisation": NORMALISATION,
    "shape": SHAPE,
    "slicing": SLICING,
    "gathering": GATHERING,
    "attention and factory": ATTENTION_AND_FACTORY,
}
