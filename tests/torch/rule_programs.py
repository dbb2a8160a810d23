"""Programs for the numerical check of the rules: PyTorch's operators on small arrays, written for local shapes."""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

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
    return lambda generator: generator.standard_normal(shape)


def positive(*shape: int, scale: float = 1.0) -> Draw:
    return lambda generator: (np.abs(generator.standard_normal(shape)) + 0.5) * scale


def whole(high: int, *shape: int) -> Draw:
    """Whole numbers below `high`, of which as few as can be are equal: parts must not be mistaken for each other."""
    numbers = np.arange(max(high, np.prod(shape))) % high
    return lambda generator: generator.permutation(numbers)[: np.prod(shape)].reshape(shape)


def truths(*shape: int) -> Draw:
    return lambda generator: generator.standard_normal(shape) > 0


def of(run: Callable, *arrays: np.ndarray | Draw, constants: tuple[int, ...] = (), packed: bool = True) -> Program:
    return Program(run, arrays, constants, packed)


UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp exp2 expm1 floor frac log log10 log1p log2 logit nan_to_num neg "
    "reciprocal relu round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
)
ACTIVATIONS = (
    "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus softsign "
    "softmin gumbel_softmax"
)

POINTWISE = {
    **{name: of(getattr(torch, name), positive(4, 4, scale=0.125)) for name in UNARY.split()},
    **{
        name: of(getattr(F, name), real(4, 4))
        for name in ACTIVATIONS.split()
        if name not in ("softmin", "gumbel_softmax")
    },
    "x + y": of(lambda x, y: x + y, real(4, 8), real(4, 8)),
    "x + row": of(lambda x, y: x + y, real(4, 8), real(8)),
    "x + column": of(lambda x, y: x + y, real(4, 8), real(4, 1)),
    "x + 2": of(lambda x: x + 2, real(4, 4)),
    "x + 0": of(lambda x: x + 0, real(4, 4)),
    "x - 2y": of(lambda x, y: torch.sub(x, y, alpha=2), real(4, 4), real(4, 4)),
    "1 - x": of(lambda x: 1 - x, real(4, 4)),
    "x * y": of(lambda x, y: x * y, real(4, 8), real(4, 8)),
    "x * row": of(lambda x, y: x * y, real(4, 8), real(8)),
    "x * table": of(lambda x, y: x * y, real(2, 4, 4), real(4, 4), constants=(1,)),
    "3 * x": of(lambda x: 3 * x, real(4, 4)),
    "x / y": of(lambda x, y: x / y, real(4, 8), positive(4, 8)),
    "x / column": of(lambda x, y: x / y, real(4, 8), positive(4, 1)),
    "x / 2": of(lambda x: x / 2, real(4, 4)),
    "2 / x": of(lambda x: 2 / x, positive(4, 4)),
    "x // y": of(lambda x, y: x // y, positive(4, 4), positive(4, 4), constants=(0, 1)),
    "div with rounding": of(
        lambda x, y: torch.div(x, y, rounding_mode="floor"), positive(4, 4), positive(4, 4), constants=(0, 1)
    ),
    "x ** y": of(lambda x, y: x**y, positive(4, 4), positive(4, 4)),
    "x ** 2": of(lambda x: x**2, real(4, 4)),
    "2 ** x": of(lambda x: 2**x, real(4, 4)),
    "x % y": of(lambda x, y: x % y, positive(4, 4), positive(4, 4)),
    "fmod": of(torch.fmod, positive(4, 4), positive(4, 4)),
    "threshold": of(lambda x: F.threshold(x, 0.1, -1.0), real(4, 4)),
    "addcdiv": of(torch.addcdiv, real(4, 4), real(4, 4), positive(4, 4)),
    "complex": of(lambda x, y: torch.complex(x, y).conj().imag + 2 * torch.complex(x, y).real, real(4, 4), real(4, 4)),
    "minimum": of(torch.minimum, real(4, 4), real(4, 4)),
    "maximum": of(torch.maximum, real(4, 4), real(4, 1)),
    "max of two": of(torch.max, real(4, 4), real(4)),
    "atan2": of(torch.atan2, real(4, 4), positive(4, 4)),
    "xlogy": of(torch.xlogy, real(4, 4), positive(4, 4)),
    "clamp": of(lambda x: x.clamp(-0.5, 0.5), real(4, 4)),
    "clamp by tensors": of(lambda x, y: torch.clamp(x, max=y), real(4, 4), real(4)),
    "lerp": of(lambda x, y: torch.lerp(x, y, 0.25), real(4, 4), real(4, 4)),
    "lerp by a tensor": of(torch.lerp, real(4, 4), real(4, 4), positive(4, 4)),
    "addcmul": of(lambda x, y, z: torch.addcmul(x, y, z, value=0.5), real(4, 4), real(4, 4), real(4, 4)),
    "comparison": of(lambda x, y: x > y, real(4, 8), real(4, 8)),
    **{name: of(getattr(torch, name), real(4, 8), real(4, 8)) for name in "le lt".split()},
    **{name: of(getattr(torch, name), whole(3, 4, 8), whole(3, 4, 8)) for name in "eq ne isclose".split()},
    **{name: of(getattr(torch, name), real(4, 8)) for name in "isinf isnan".split()},
    **{name: of(getattr(torch, f"logical_{name}"), truths(8, 8), truths(8, 8)) for name in "and or xor".split()},
    "not": of(torch.logical_not, truths(4, 4)),
    "xor of bits": of(lambda x, y: x ^ y, whole(64, 4, 8), whole(64, 4, 8)),
    "comparison with a number": of(lambda x: x >= 0.1, real(4, 4)),
    "isfinite": of(torch.isfinite, real(4, 4)),
    "logical": of(lambda x, y: ~x & y | x, truths(4, 4), truths(4, 4)),
    "where": of(torch.where, truths(4, 8), real(4, 8), real(4, 1)),
    "where or zero": of(lambda c, x: torch.where(c, x, 0.0), truths(4, 8), real(4, 8)),
    "where or a number": of(lambda c, x: torch.where(c, x, 2.0), truths(4, 8), real(4, 8)),
    "x where": of(lambda c, x, y: x.where(c, y), np.array([True, True, False, False]), real(4, 4), real(4, 4)),
    "masked_fill with zero": of(lambda x, m: x.masked_fill(m, 0), real(4, 8), truths(4, 8)),
    "masked_fill": of(lambda x, m: x.masked_fill(m, -9.0), real(4, 8), truths(4, 8)),
    "cast": of(lambda x: x.to(torch.float64), real(4, 4)),
    "cast and back": of(lambda x: x.double().type(torch.float64).type_as(x), real(4, 4)),
    "whole numbers": of(lambda x: (4 * x).long(), real(4, 4)),
    "cast to whole numbers": of(lambda x: (4 * x).to(torch.int32), real(4, 4)),
    "contiguous": of(lambda x: x.contiguous().clone(), real(4, 4)),
    "detach": of(lambda x: x.detach(), real(4, 4)),
    "stop one side": of(lambda x: x * x.detach().sigmoid(), real(4, 4)),
    "rotate": of(
        lambda x, c, s: x * c + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * s,
        real(2, 4, 2, 4),
        real(2, 4),
        real(2, 4),
        constants=(1, 2),
    ),
    "in place add": of(lambda x, y: x.clone().add_(y), real(4, 4), real(4)),
    "in place multiply": of(lambda x, y: x.clone().mul_(y), real(4, 4), real(4, 4)),
    "+=": of(lambda x, y: _plus_equals(x.clone(), y), real(4, 4), real(4, 4)),
    "/=": of(lambda x: _divide_equals(x.clone()), real(4, 4)),
    "in place relu": of(lambda x: F.relu(x.clone(), inplace=True), real(4, 4)),
    "in place fill": of(lambda x, m: x.clone().masked_fill_(m, 0.0), real(4, 4), truths(4, 4)),
    "turn as complex": of(
        lambda x, a: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(a), a)
        ).flatten(-2),
        real(2, 4, 8),
        real(4, 4),
        constants=(1,),
    ),
}


def _plus_equals(x, y):
    x += y
    return x


def _divide_equals(x):
    x /= 4
    return x


CONTRACTION = {
    "linear": of(F.linear, real(2, 4, 4), real(8, 4)),
    "linear with a bias": of(F.linear, real(4, 4), real(8, 4), real(8)),
    "matmul": of(torch.matmul, real(4, 8), real(8, 4)),
    "x @ y batched": of(lambda x, y: x @ y, real(2, 4, 4), real(2, 4, 8)),
    "x @ y broadcast": of(lambda x, y: x @ y, real(2, 1, 4, 4), real(2, 4, 8)),
    "batch times a matrix": of(torch.matmul, real(2, 4, 4), real(4, 8)),
    "matrix times vector": of(lambda x, y: x.matmul(y), real(4, 8), real(8)),
    "vector times matrix": of(torch.matmul, real(4), real(4, 8)),
    "dot": of(torch.dot, real(8), real(8)),
    "mm": of(torch.mm, real(4, 8), real(8, 4)),
    "mv": of(torch.mv, real(4, 8), real(8)),
    "bmm": of(torch.bmm, real(4, 2, 4), real(4, 4, 2)),
    "outer": of(torch.outer, real(4), real(8)),
    "addmm": of(torch.addmm, real(8), real(4, 4), real(4, 8)),
    "baddbmm": of(
        lambda b, x, y: b.baddbmm(batch1=x, batch2=y, beta=1.0, alpha=0.5), real(4, 1, 2), real(4, 2, 4), real(4, 4, 2)
    ),
    "einsum of heads": of(lambda q, k: torch.einsum("bthd,bshd->bhts", q, k), real(2, 2, 4, 4), real(2, 4, 4, 4)),
    "einsum with dots": of(lambda x, w: torch.einsum("...d,de->...e", x, w), real(2, 4, 4), real(4, 8)),
    "einsum without a result": of(lambda x, y: torch.einsum("ij,jk", x, y), real(4, 8), real(8, 4)),
    "einsum of a diagonal": of(lambda x: torch.einsum("ii->i", x), real(4, 4)),
    "grouped_mm": of(
        lambda x, w, ends: torch._grouped_mm(x, w, offs=ends),
        lambda generator: generator.standard_normal((6, 16)).astype(np.float32),
        lambda generator: generator.standard_normal((2, 16, 16)).astype(np.float32),
        np.array([2, 6], np.int32),
    ),
    "solve_triangular": of(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        lambda generator: generator.standard_normal((2, 4, 4)) + 4 * np.eye(4),
        real(2, 4, 4),
    ),
    "conv1d": of(lambda x, w, b: F.conv1d(x, w, b, padding=1), real(2, 4, 8), real(4, 4, 3), real(4)),
    "conv1d by channel": of(
        lambda x, w, b: F.conv1d(x, w, b, groups=x.shape[1]), real(2, 4, 8), real(4, 1, 4), real(4)
    ),
}

REDUCTION = {
    "sum": of(torch.sum, real(4, 4)),
    "sum of a dim": of(lambda x: x.sum(-1), real(2, 4, 8)),
    "sum of dims, kept": of(lambda x: x.sum((0, 2), keepdim=True), real(4, 4, 4)),
    "mean": of(lambda x: x.mean(), real(4, 4)),
    "mean of a dim": of(lambda x: x.mean(-1, keepdim=True), real(2, 4, 8)),
    "amax": of(lambda x: x.amax(1), real(4, 4, 4)),
    "amin": of(lambda x: x.amin(0, keepdim=True), real(4, 8)),
    "argmin": of(lambda x: x.argmin(0), real(4, 8)),
    "cummin": of(lambda x: tuple(x.cummin(0)), real(4, 8)),
    "logcumsumexp": of(lambda x: x.logcumsumexp(-1), real(4, 8)),
    "logsumexp": of(lambda x: torch.logsumexp(x, dim=-1), real(4, 8)),
    "prod": of(lambda x: x.prod(0), real(4, 4)),
    "std": of(lambda x: x.std(-1), real(4, 8)),
    "var": of(lambda x: torch.var(x, dim=0, correction=0, keepdim=True), real(4, 8)),
    "var of all": of(lambda x: x.var(False), real(4, 8)),
    "norm": of(lambda x: x.norm(), real(4, 4)),
    "norm of a dim": of(lambda x: x.norm(dim=-1, keepdim=True), real(4, 8)),
    "vector norm": of(lambda x: torch.linalg.vector_norm(x, dim=-1), real(4, 8)),
    "max": of(lambda x: x.max(), real(4, 8)),
    "max of a dim": of(lambda x: x.max(dim=-1, keepdim=True), real(4, 8)),
    "min of a dim": of(lambda x: tuple(torch.min(x, 0)), real(4, 8)),
    "argmax": of(lambda x: x.argmax(-1), real(4, 8)),
    "any": of(lambda x: x.any(-1), np.eye(4) > 0),
    "all": of(lambda x: torch.all(x), np.arange(16).reshape(4, 4) < 15),
    "count": of(lambda x: x.sum(), truths(4, 8)),
    "count_nonzero": of(lambda x: torch.count_nonzero(x, dim=0), truths(4, 8)),
    "cumsum": of(lambda x: x.cumsum(-1), real(4, 8)),
    "cumprod": of(lambda x: x.cumprod(0), real(4, 8)),
    "cummax": of(lambda x: tuple(x.cummax(1)), real(4, 8)),
    "diff": of(lambda x: torch.diff(x, dim=-1), real(4, 8)),
    "diff with a first element": of(lambda x, y: torch.diff(x, prepend=y, dim=-1), whole(9, 4, 8), whole(9, 4, 1)),
    "median": of(lambda x: x.median(), real(4, 8)),
}

NORMALISATION = {
    "softmax": of(lambda x: x.softmax(-1), real(4, 4, 4)),
    "softmax of a dim": of(lambda x: F.softmax(x, dim=1, dtype=torch.float64), real(4, 4, 4)),
    "softmin": of(lambda x: F.softmin(x, 0), real(4, 4)),
    "log_softmax": of(lambda x: torch.log_softmax(x, -1), real(4, 4)),
    "layer_norm": of(lambda x, w, b: F.layer_norm(x, (4,), w, b), real(2, 4, 4), real(4), real(4)),
    "layer_norm without weights": of(lambda x: F.layer_norm(x, x.shape[-2:]), real(4, 4, 4)),
    "rms_norm": of(lambda x, w: F.rms_norm(x, (4,), w, 1e-6), real(2, 4, 4), real(4)),
    "rms_norm by hand": of(
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), real(2, 4, 4), real(4)
    ),
    "normalize": of(lambda x: F.normalize(x, dim=-1), real(4, 8)),
    "group_norm": of(lambda x: F.group_norm(x, 2), real(4, 4, 4)),
    "glu": of(lambda x: F.glu(x, -1), real(4, 8)),
    "cross_entropy": of(F.cross_entropy, real(4, 8), whole(8, 4)),
    "cross_entropy, summed": of(lambda x, y: F.cross_entropy(x, y, reduction="sum"), real(4, 8), whole(8, 4)),
    "cross_entropy of each": of(lambda x, y: F.cross_entropy(x, y, reduction="none"), real(4, 8, 2), whole(8, 4, 2)),
    "nll_loss": of(lambda x, y: F.nll_loss(x, y, reduction="sum"), real(4, 8), whole(8, 4)),
}

SHAPE = {
    "heads": of(lambda x: x.view(*x.shape[:-1], -1, 4), real(2, 4, 16)),
    "heads, one on each rank": of(lambda x: x.view(*x.shape[:-1], -1, 8), real(2, 2, 16), packed=False),
    "heads by number, one on each rank": of(
        lambda x: x.view(*x.shape[:-1], x.shape[-1] // 8, 8), real(2, 2, 16), packed=False
    ),
    "packed heads": of(lambda x: x.view(*x.shape[:-1], -1, 3, 2), real(2, 2, 12)),
    "heads merged": of(lambda x: x.reshape(*x.shape[:2], -1), real(2, 2, 4, 4)),
    "heads merged by number": of(lambda x: x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]), real(2, 2, 2, 4)),
    "tokens merged": of(lambda x: x.reshape(-1, x.shape[-1]), real(4, 4, 4)),
    "tokens merged and split": of(lambda x: x.reshape(-1, x.shape[-1]).view(*x.shape), real(4, 4, 4), packed=False),
    "heads and samples merged and split": of(
        lambda x: (x.reshape(-1, *x.shape[2:]) * 2).view(x.shape[0], x.shape[1], *x.shape[2:]),
        real(4, 2, 2, 4),
        packed=False,
    ),
    "everything merged": of(lambda x: x.reshape(-1), real(2, 4, 4)),
    "a dim put in": of(lambda x: x.view(x.shape[0], 1, *x.shape[1:]), real(2, 4, 4)),
    "a dim taken away": of(lambda x: x.reshape(x.shape[0], *x.shape[2:]), real(2, 1, 4, 4)),
    "sizes regrouped": of(lambda x: x.reshape(x.shape[0] // 2, 2 * x.shape[1]), real(8, 4)),
    "reshape_as": of(lambda x, y: x.reshape_as(y), real(4, 4), real(4, 4)),
    "view_as": of(lambda x, y: x.view_as(y), real(4, 4), real(4, 4)),
    "flatten": of(lambda x: x.flatten(1, 2), real(2, 4, 2, 4)),
    "flatten heads": of(lambda x: x.flatten(-2), real(2, 4, 4)),
    "unflatten": of(lambda x: x.unflatten(-1, (-1, 4)), real(2, 16)),
    "permute": of(lambda x: x.permute(0, 2, 1, 3), real(2, 4, 4, 2)),
    "transpose": of(lambda x: x.transpose(1, 2), real(2, 4, 8)),
    "T": of(lambda x: x.T, real(4, 8)),
    "t": of(lambda x: x.t(), real(4, 8)),
    "mT": of(lambda x: x.mT, real(2, 4, 8)),
    "movedim": of(lambda x: torch.movedim(x, 1, -1), real(2, 4, 8)),
    "unsqueeze": of(lambda x: x.unsqueeze(1), real(4, 4)),
    "squeeze": of(lambda x: x.squeeze(1), real(4, 1, 4)),
    "squeeze all": of(lambda x: x.squeeze(), real(4, 1, 2)),
    "squeeze a pair": of(lambda x: x.squeeze(-1), real(4, 2)),
    "expand": of(lambda x: x.expand(-1, 4, -1), real(4, 1, 4)),
    "expand in front": of(lambda x: x.expand(2, *x.shape), real(4, 4)),
    "one number for each head": of(lambda x, y: x + y.view(1, -1, 1), real(2, 4, 4), real(4)),
    "one number for each of two heads": of(lambda x, y: x + y.reshape(1, -1, 1, 1), real(2, 2, 4, 4), real(2)),
    "keys repeated, one on each rank": of(
        lambda x: x[:, :, None].expand(*x.shape[:2], 2, *x.shape[2:]).reshape(x.shape[0], -1, *x.shape[2:]),
        real(2, 2, 4, 4),
        packed=False,
    ),
    "keys repeated by number, one on each rank": of(
        lambda x: x[:, :, None].expand(*x.shape[:2], 2, *x.shape[2:]).reshape(x.shape[0], 2 * x.shape[1], *x.shape[2:]),
        real(2, 2, 4, 4),
        packed=False,
    ),
    "heads merged with samples": of(
        lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) @ x.reshape(-1, *x.shape[2:]).mT,
        real(2, 2, 4, 4),
        packed=False,
    ),
    "heads grouped by keys, one on each rank": of(
        lambda x: x.view(x.shape[0], x.shape[1] // 2, 2, *x.shape[2:]), real(2, 4, 4, 2), packed=False
    ),
    "heads behind tokens grouped by keys, one on each rank": of(
        lambda x: x.view(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3]), real(2, 4, 4, 2), packed=False
    ),
    "heads unflattened by keys, one on each rank": of(
        lambda x: x.unflatten(1, (x.shape[1] // 2, 2)).flatten(1, 2), real(2, 4, 4, 2), packed=False
    ),
    "heads against the key of their group": of(
        lambda q, k: q.view(2, q.shape[1] // 2, 2, *q.shape[2:]) @ k.unsqueeze(2).mT,
        real(2, 4, 2, 4),
        real(2, 2, 2, 4),
        packed=False,
    ),
    "broadcast_to": of(lambda x: torch.broadcast_to(x, (2, *x.shape)), real(4, 4)),
    "expand_as": of(lambda x, y: x.expand_as(y), real(4, 1), real(4, 8)),
    "repeat keys": of(
        lambda x: x[:, :, None].expand(*x.shape[:2], 2, *x.shape[2:]).reshape(x.shape[0], -1, *x.shape[2:]),
        real(2, 4, 4, 2),
    ),
    "one key for all heads": of(
        lambda x, k: x @ k.expand(-1, x.shape[1], -1, -1).transpose(2, 3), real(2, 4, 2, 4), real(2, 1, 2, 4)
    ),
    "one key for all heads, merged": of(
        lambda x, k: x @ k[:, :, None].expand(-1, -1, x.shape[1], -1, -1).reshape(x.shape[0], x.shape[1], 2, 4).mT,
        real(2, 4, 2, 4),
        real(2, 1, 2, 4),
    ),
    "joined to what is expanded": of(
        lambda x, k: torch.cat((x, k.expand(*x.shape[:-1], -1)), -1), real(2, 4, 2, 4), real(2, 1, 2, 2)
    ),
    "written beside what is expanded": of(
        lambda x, k: _side_by_side(x, k.expand(*x.shape[:-1], -1)), real(2, 4, 2, 4), real(2, 1, 2, 2)
    ),
    "repeat": of(lambda x: x.repeat(1, 2), real(4, 4)),
    "repeat in front": of(lambda x: x.repeat(2, 1, 1), real(4, 4)),
    "tile": of(lambda x: torch.tile(x, (2,)), real(4, 4)),
    "repeat_interleave": of(lambda x: x.repeat_interleave(2, dim=1), real(2, 4, 4)),
    "repeat_interleave of all": of(lambda x: x.repeat_interleave(2), real(4, 4)),
    "repeat_interleave by counts": of(lambda x, n: x.repeat_interleave(n, dim=0), real(4, 4), np.array([1, 2, 0, 1])),
    "diagonal": of(lambda x: torch.diagonal(x, dim1=-2, dim2=-1), real(4, 4, 4)),
}


def _side_by_side(x, y):
    made = x.new_empty(*x.shape[:-1], x.shape[-1] + y.shape[-1])
    made[..., : x.shape[-1]] = x
    made[..., x.shape[-1] :] = y
    return made


SLICING = {
    "split": of(lambda x: x.split(x.shape[-1] // 2, -1), real(2, 8)),
    "split by sizes": of(lambda x: torch.split(x, [2, 6], dim=-1), real(4, 8)),
    "chunk": of(lambda x: x.chunk(2, dim=-1), real(2, 8)),
    "chunk in three": of(lambda x: x.chunk(3, 0), real(4, 4)),
    "tensor_split": of(lambda x: torch.tensor_split(x, 3, -1), real(4, 8)),
    "unbind": of(lambda x: x.unbind(1), real(4, 4, 2)),
    "select": of(lambda x: x.select(1, 0), real(4, 4)),
    "narrow": of(lambda x: x.narrow(-1, 0, x.shape[-1] // 2), real(4, 8)),
    "x[:, :half]": of(lambda x: x[:, : x.shape[1] // 2], real(4, 8)),
    "x[..., half:]": of(lambda x: x[..., x.shape[-1] // 2 :], real(4, 8)),
    "x[..., ::2]": of(lambda x: x[..., ::2], real(4, 8)),
    "x[..., 1::2]": of(lambda x: x[..., 1::2], real(4, 8)),
    "x[:, :100]": of(lambda x: x[:, :100], real(4, 8)),
    "x[:, :5]": of(lambda x: x[:, :5], real(2, 8)),
    "x[:, -1]": of(lambda x: x[:, -1], real(4, 8)),
    "x[:, -6:]": of(lambda x: x[:, -6:], real(2, 8)),
    "x[:, None]": of(lambda x: x[:, None], real(4, 4)),
    "x[..., None, :]": of(lambda x: x[..., None, :], real(4, 4)),
    "x[0]": of(lambda x: x[0], real(4, 4)),
    "x[0, :, None]": of(lambda x: x[0, :, None], real(4, 4, 2)),
    "x[ids]": of(lambda x, i: x[i], real(4, 4), whole(4, 6)),
    "x[:, ids]": of(lambda x, i: x[:, i], real(4, 4), whole(4, 2, 2)),
    "x[ids, :, ids]": of(lambda x, i: x[i, :, i], real(4, 2, 4), whole(4, 4)),
    "x[ids, None, ids]": of(lambda x, i: x[i, None, i], real(4, 4, 2), whole(4, 4)),
    "x[0, :, ids]": of(lambda x, i: x[0, :, i], real(2, 4, 4), whole(4, 2)),
    "x[rows, ids]": of(lambda x, i, j: x[i, j], real(4, 4), whole(4, 4), whole(4, 4)),
    "x[rows of a column, ids]": of(lambda x, i, j: x[i[:, None], j], real(4, 4), whole(4, 4), whole(4, 4)),
    "x[[0, 2]]": of(lambda x: x[[0, 2]], real(4, 4)),
    "x[mask]": of(lambda x, m: x[m], real(4, 4), np.array([False, True, True, True])),
    "x[mask of all]": of(lambda x, m: x[m], real(4, 4), np.arange(16).reshape(4, 4) > 4),
    "x[:, mask]": of(lambda x, m: x[:, m], real(4, 4), np.array([False, True, True, True])),
    "x[0] = y": of(lambda x, y: _set(x.clone(), 0, y), real(4, 4), real(4)),
    "x[:, :half] = y": of(lambda x, y: _set(x.clone(), (..., slice(0, 2)), y), real(4, 8), real(4, 2)),
    "x[:, :, 1] = y": of(lambda x, y: _set(x.clone(), (..., 1), y), real(2, 4, 4), real(2, 4)),
    "x[:, 0] = 0": of(lambda x: _set(x.clone(), (slice(None), 0), 0.0), real(4, 4)),
    "x[:, 0] = 1": of(lambda x: _set(x.clone(), (slice(None), 0), 1.0), real(4, 4)),
    "x[mask] = 0": of(lambda x, m: _set(x.clone(), m, 0.0), real(4, 4), truths(4, 4)),
    "x[ids] = y": of(lambda x, i, y: _set(x.clone(), i, y), real(4, 4), np.array([2, 0]), real(2, 4)),
    "zeros[..., :2] = y": of(lambda x, y: _set(torch.zeros_like(x), (..., slice(0, 2)), y), real(4, 8), real(4, 2)),
    "cat": of(lambda x, y: torch.cat((x, y), dim=-1), real(2, 4), real(2, 4)),
    "cat of different sizes": of(lambda x, y: torch.cat((x, y)), real(4, 4), real(8, 4)),
    "cat with nothing": of(lambda x: torch.cat((x, x[..., :0]), -1), real(4, 4)),
    "cat with a column": of(lambda x, y: torch.cat((x, y), 1), real(4, 4), real(4, 1)),
    "concat": of(lambda x, y: torch.concat((x, y), dim=0), real(4, 2), real(4, 2)),
    "stack": of(lambda x, y: torch.stack((x, y), dim=1), real(4, 4), real(4, 4)),
    "interleave by stack": of(lambda x, y: torch.stack((x, y), dim=-1).flatten(-2), real(4, 4), real(4, 4)),
    "roll": of(lambda x: x.roll(1, -1), real(4, 4)),
    "roll all": of(lambda x: torch.roll(x, 1), real(4, 4)),
    "flip": of(lambda x: x.flip(0), real(4, 4)),
    "tril": of(lambda x: x.tril(), real(4, 4, 4)),
    "triu": of(lambda x: torch.triu(x, 1), real(4, 4)),
    "pad": of(lambda x: F.pad(x, (1, 0)), real(4, 4)),
    "pad with a number": of(lambda x: F.pad(x, (0, 0, 1, 1), value=2.0), real(2, 4, 4)),
    "unfold": of(lambda x: x.unfold(1, 2, 1), real(4, 4)),
}


def _set(x, index, value):
    x[index] = value
    return x


GATHERING = {
    "embedding": of(lambda i, w: F.embedding(i, w), whole(8, 4, 4), real(8, 4)),
    "index_select": of(lambda x, i: x.index_select(1, i), real(4, 4, 2), whole(4, 4)),
    "gather": of(lambda x, i: x.gather(1, i), real(4, 4), whole(4, 4, 2)),
    "gather in front": of(
        lambda x, i: torch.gather(x, dim=0, index=i), real(4, 4), np.array([[0, 1, 2, 3], [3, 0, 1, 2]])
    ),
    "take_along_dim": of(lambda x, i: torch.take_along_dim(x, i, dim=-1), real(4, 4), whole(4, 4, 4)),
    "scatter": of(lambda x, i, y: x.scatter(1, i, y), real(4, 4), np.array([[0], [2], [1], [3]]), real(4, 1)),
    "scatter, multiplied": of(
        lambda x, i, y: x.scatter(1, i, y, reduce="multiply"),
        real(4, 4),
        np.array([[0], [2], [1], [3]]),
        real(4, 1),
        constants=(0, 2),
    ),
    "scatter a number": of(lambda x, i: x.scatter(-1, i, -9.0), real(4, 4), whole(4, 4, 1)),
    "scatter zero": of(lambda x, i: torch.scatter(x, -1, i, 0.0), real(4, 4), np.array([[0], [2], [1], [3]])),
    "scatter_ into zeros": of(
        lambda x, i: torch.zeros_like(x).scatter_(1, i, 1.0), real(4, 4), np.array([[0, 1], [2, 2], [1, 0], [3, 3]])
    ),
    "scatter_add": of(lambda x, i, y: x.scatter_add(0, i, y), real(4, 4), whole(4, 4, 4), real(4, 4)),
    "index_add": of(lambda x, i, y: x.index_add(0, i, y), real(4, 4), whole(4, 6), real(6, 4)),
    "index_add_ into zeros": of(
        lambda x, i, y: torch.zeros_like(x).index_add_(0, i, y), real(4, 4), whole(4, 6), real(6, 4)
    ),
    "one_hot": of(lambda i: F.one_hot(i, 4), whole(4, 4, 2)),
    "one_hot of the largest": of(lambda i: F.one_hot(i), np.array([3, 1, 0, 2])),
    "bincount": of(lambda i: torch.bincount(i, minlength=4), whole(4, 8)),
    "histc": of(lambda x: torch.histc(x, bins=4, min=-2, max=2), real(8), constants=(0,)),
    "topk": of(lambda x: tuple(x.topk(2, dim=-1)), real(4, 4)),
    "topk in front": of(lambda x: tuple(torch.topk(x, 2, dim=0)), real(4, 4)),
    "sort": of(lambda x: tuple(torch.sort(x, dim=-1)), real(4, 4)),
    "argsort": of(lambda x: x.argsort(), real(4, 4)),
    "kthvalue": of(lambda x: tuple(x.kthvalue(2)), real(4, 4)),
    "unique": of(torch.unique, whole(4, 8)),
    "nonzero": of(lambda x: x.nonzero(), truths(4, 4)),
    "nonzero of each dim": of(lambda x: torch.nonzero(x, as_tuple=True), truths(4, 4)),
    "where alone": of(lambda x: torch.where(x), truths(4, 4)),
    "masked_select": of(lambda x, m: x.masked_select(m), real(4, 4), np.arange(16).reshape(4, 4) > 4),
    "searchsorted": of(
        lambda t, x: torch.searchsorted(t, x),
        lambda generator: np.sort(generator.standard_normal(4)),
        real(4, 2),
        constants=(0, 1),
    ),
    "bucketize": of(
        lambda x, t: torch.bucketize(x, t),
        real(4, 2),
        lambda generator: np.sort(generator.standard_normal(4)),
        constants=(0, 1),
    ),
}

ATTENTION = {
    "attention": of(F.scaled_dot_product_attention, real(2, 2, 4, 4), real(2, 2, 4, 4), real(2, 2, 4, 4)),
    "causal attention": of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
    ),
    "attention with a mask": of(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
        real(2, 1, 4, 4),
        constants=(3,),
    ),
    "attention of groups": of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        real(2, 4, 4, 2),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
    ),
    "attention of one group": of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        real(2, 4, 4, 2),
        real(2, 1, 4, 2),
        real(2, 1, 4, 2),
    ),
    "attention by hand": of(
        lambda q, k, v: ((q @ k.transpose(2, 3)) * 0.5).softmax(-1) @ v,
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
        real(2, 2, 4, 2),
    ),
}

RANDOM_AND_FACTORY = {
    "dropout in evaluation": of(lambda x: F.dropout(x, 0.5, training=False), real(4, 4)),
    "dropout of nothing": of(lambda x: F.dropout(x, 0.0), real(4, 4)),
    "zeros_like": of(torch.zeros_like, real(4, 4)),
    "ones_like": of(torch.ones_like, real(4, 4)),
    "full_like": of(lambda x: torch.full_like(x, 2.0), real(4, 4)),
    "x + zeros_like": of(lambda x: x + torch.zeros_like(x), real(4, 4)),
    "x + ones_like": of(lambda x: x + torch.ones_like(x), real(4, 4)),
    "zeros + x": of(lambda x: x.new_zeros(x.shape) + x, real(4, 4)),
    "new_full": of(lambda x: x.new_full(x.shape, 3.0) * x, real(4, 4)),
    "new_ones": of(lambda x: x.new_ones(1, x.shape[1]) * x, real(4, 4)),
    "new_tensor": of(lambda x: x.new_tensor([1.0, 2.0]), real(4, 4)),
    "zero_": of(lambda x: x.clone().zero_(), real(4, 4)),
    "fill_": of(lambda x: x.clone().fill_(2.0), real(4, 4)),
    "copy_": of(lambda x, y: x.clone().copy_(y), real(4, 4), real(4)),
    "copy_ into empty": of(lambda x: torch.empty_like(x).copy_(x), real(4, 4)),
    "copy_ into new": of(lambda x: x.new_empty(x.shape).copy_(x), real(4, 4)),
}

PROGRAMS = {
    "pointwise": POINTWISE,
    "contraction": CONTRACTION,
    "reduction": REDUCTION,
    "normalisation": NORMALISATION,
    "shape": SHAPE,
    "slicing": SLICING,
    "gathering": GATHERING,
    "attention": ATTENTION,
    "random and factory": RANDOM_AND_FACTORY,
}
