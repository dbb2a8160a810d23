"""Products that sum over dims: each is an equation between the dims of its operands and of its result."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import only_partial, refuse_cut, refuse_partial
from hyper_parallel.core.rules.pointwise import broadcast
from hyper_parallel.core.rules.state import PARTIAL, State, cut
from hyper_parallel.core.rules.table import RuleError, rule

Labels = Sequence[str]
"""One name for each dim of a tensor; dims of the same name run together."""


@rule("linear", "input weight bias")
def linear(view: View) -> State:
    """`input` [..., K] times the transposed `weight` [O, K], or a `weight` [K]."""
    x, weight = view["input"], view["weight"]
    rows = _numbered("row", x.dims - 1)
    outputs = ["out"][: weight.dims - 1]
    product = contract(view.op, (x, weight), ([*rows, "in"], [*outputs, "in"]), [*rows, *outputs])
    return _plus(view.op, product, view.get("bias"))


@rule("matmul", "input other")
def matmul(view: View) -> State:
    """Products of matrices in the last two dims; the others are broadcast. A tensor of one dim is a vector."""
    x, y = view["input"], view["other"]
    batch = max(x.dims, y.dims, 2) - 2
    left = [*_numbered("batch", batch)[batch - max(x.dims - 2, 0) :], *(["row"] if x.dims > 1 else []), "in"]
    right = [*_numbered("batch", batch)[batch - max(y.dims - 2, 0) :], "in", *(["column"] if y.dims > 1 else [])]
    result = [*_numbered("batch", batch), *(["row"] if x.dims > 1 else []), *(["column"] if y.dims > 1 else [])]
    return contract(view.op, (x, y), (left, right), result).state


@rule("matmul_transposed", "input other transpose_input transpose_other")
def matmul_transposed(view: View) -> State:
    """As `matmul` of two matrices or more, with the last two dims of either exchanged."""
    x, y = view["input"], view["other"]
    batch = max(x.dims, y.dims) - 2
    names = _numbered("batch", batch)
    left = ["in", "row"] if view.get("transpose_input") else ["row", "in"]
    right = ["column", "in"] if view.get("transpose_other") else ["in", "column"]
    labels = ([*names[batch - x.dims + 2 :], *left], [*names[batch - y.dims + 2 :], *right])
    return contract(view.op, (x, y), labels, [*names, "row", "column"]).state


@rule("bias_add", "input bias")
def bias_add(view: View) -> State:
    """A bias of one dim added along dim 1."""
    return _plus(view.op, view["input"], view["bias"], dim=1)


@rule("outer", "input other")
def outer(view: View) -> State:
    """All products of two vectors."""
    return contract(view.op, (view["input"], view["other"]), (["row"], ["column"]), ["row", "column"]).state


@rule("addmm", "input left right beta alpha")
def added_product(view: View) -> State:
    """A product of matrices, plus a tensor that is broadcast to it."""
    left, right = view["left"], view["right"]
    names = _numbered("batch", left.dims - 2)
    labels = ([*names, "row", "in"], [*names, "in", "column"])
    product = contract(view.op, (left, right), labels, [*names, "row", "column"])
    return _plus(view.op, product, view["input"])


@rule("einsum", "equation *operands")
def einsum(view: View) -> State:
    """What the equation says, with an ellipsis for dims that are broadcast."""
    operands = view["operands"]
    sides = view["equation"].replace(" ", "").split("->")
    terms = sides[0].split(",")
    wide = max(
        (each.dims - len(term.replace("...", "")) for each, term in zip(operands, terms) if "..." in term), default=0
    )
    labels = [_labels(term, each.dims - len(term.replace("...", "")), wide) for each, term in zip(operands, terms)]
    if len(sides) == 2:
        result = _labels(sides[1], wide, wide)
    else:
        once = sorted(name for name in set(sides[0]) - set(".,") if sides[0].count(name) == 1)
        result = [*_numbered("batch", wide), *once]
    for operand, term in zip(operands, labels):
        twice = [dim for dim, name in enumerate(term) if term.count(name) > 1]
        refuse_cut(view.op, operand, twice, "takes a diagonal along it")
    return contract(view.op, operands, labels, result).state


@rule("grouped_mm", "input weight offs bias")
def grouped(view: View) -> State:
    """Rows of `input` [N, K], sorted by expert, times the expert's matrix of `weight` [E, K, O]; `offs` says where
    each expert's rows end."""
    x, weight = view["input"], view["weight"]
    if x.dims != 2 or weight.dims != 3:
        raise RuleError(
            f"grouped_mm of {x.dims} and {weight.dims} dims is not followed", "an input of 2 dims and a weight of 3"
        )
    whole = "is cut by expert, but the offsets count the rows of all experts"
    refuse_cut(view.op, x, [0], whole)
    refuse_cut(view.op, weight, [0], whole)
    others = [each for each in view.operands if each is not x and each is not weight]
    for each in others:
        refuse_cut(view.op, each, range(each.dims), "needs all of it")
    refuse_partial(view.op, others)
    return contract(view.op, (x, weight), (["row", "in"], ["expert", "in", "out"]), ["row", "out"]).state


@rule("solve_triangular", "matrix right")
def solve_triangular(view: View) -> State:
    """What `matrix` [..., N, N] takes to `right` [..., N, M]: linear in the latter, column by column."""
    matrix, right = view["matrix"], view["right"]
    refuse_partial(view.op, [matrix])
    refuse_cut(view.op, matrix, [matrix.dims - 2, matrix.dims - 1], "needs all of the matrix")
    refuse_cut(view.op, right, [right.dims - 2], "solves for all rows together")
    batch = max(matrix.dims, right.dims) - 2
    names = _numbered("batch", batch)
    labels = ([*names[batch - matrix.dims + 2 :], "row", "in"], [*names[batch - right.dims + 2 :], "in", "column"])
    return contract(view.op, (matrix, right), labels, [*names, "row", "column"]).state


@rule("conv1d", "input weight bias stride padding dilation groups")
def conv1d(view: View) -> State:
    """`input` [..., C, L] over windows of the last dim; `weight` [O, C / groups, window]."""
    x, weight = view["input"], view["weight"]
    refuse_cut(view.op, x, [x.dims - 1], "slides over it, past the ends of a part")
    refuse_cut(view.op, weight, [2], "sums over the window")
    batch = _numbered("batch", x.dims - 2)
    if view.get("groups", 1) == 1:
        labels = ([*batch, "in", "place"], ["out", "in", "window"])
    else:  # with as many groups as channels each channel meets its own rows of the weight
        refuse_cut(view.op, weight, [1], "has groups")
        labels = ([*batch, "out", "place"], ["out", "of group", "window"])
    product = contract(view.op, (x, weight), labels, [*batch, "out", "place"])
    return _plus(view.op, product, view.get("bias"), dim=x.dims - 2)


def contract(op: str, operands: Sequence[Operand], labels: Sequence[Labels], result: Labels) -> Operand:
    """A product that runs over the dims of all operands and sums over those that the result lacks."""
    sizes: dict[str, int] = {}
    for operand, names in zip(operands, labels):
        for name, size in zip(names, operand.shape):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    state = _product_state(op, operands, labels, result)
    return Operand("the product", tuple(sizes[name] for name in result), "", False, state)


def _product_state(op: str, operands: Sequence[Operand], labels: Sequence[Labels], result: Labels) -> State:
    pending = [each for each in operands if each.state.is_partial]
    if pending:
        return _scaled(op, pending, operands)
    cutting = [(each, names[each.state.cut]) for each, names in zip(operands, labels) if each.state.cut is not None]
    if not cutting:
        return State(same=_same(operands, labels, result))
    first, label = cutting[0]
    for operand, names in zip(operands, labels):
        _check_parts(op, (first, label), operand, names, label in result)
    if label not in result:
        return PARTIAL
    units = [each.state.unit for each, _ in cutting]
    return cut(list(result).index(label), first.state.blocks, max(units))


def _scaled(op: str, pending: Sequence[Operand], operands: Sequence[Operand]) -> State:
    """Products are linear in one pending sum."""
    if len(pending) > 1:
        raise RuleError(
            f"{op}: {' and '.join(each.name for each in pending)} are both partial, and a product of sums is no sum of "
            "products",
            "one of them as replicate: reduce it before the product",
        )
    for each in operands:
        if each.state.cut is not None:
            raise RuleError(
                f"{op}: {pending[0].name} is partial and {each.name} is {each.state}, so that parts of one would meet "
                "summands of the other",
                f"{each.name} as replicate, or {pending[0].name} reduced before the product",
            )
    return PARTIAL


def _check_parts(op: str, first: tuple[Operand, str], operand: Operand, names: Labels, kept: bool) -> None:
    """An operand has the dim that another one is cut along: then it is cut alike, or has one element there."""
    other, label = first
    if operand.state.cut is not None and names[operand.state.cut] != label:
        raise RuleError(
            f"{op}: {other.name} is {other.state} and {operand.name} is {operand.state}: each rank would have one "
            "block of the result, which is cut in two dims by one axis",
            f"one of {other.name} and {operand.name} as replicate",
        )
    if label not in names or operand is other:
        return
    dim = list(names).index(label)
    wanted = other.state.at(dim)
    if operand.state.cut is None:
        if kept and operand.repeats(dim):
            return
        raise RuleError(
            f"{op}: {other.name} is {other.state} and {operand.name} {list(operand.shape)} is whole along the dim "
            f"that meets it ({dim})",
            f"{operand.name} as {wanted.placement}, or {other.name} as replicate",
        )
    if operand.state.blocks != other.state.blocks or operand.shape[dim] != other.shape[other.state.cut]:
        raise RuleError(
            f"{op}: {other.name} {list(other.shape)} is {other.state} and {operand.name} {list(operand.shape)} is "
            f"{operand.state}, which are different parts of the dim that meets",
            f"{operand.name} as {wanted.placement}, of the same whole size",
        )


def _same(operands: Sequence[Operand], labels: Sequence[Labels], result: Labels) -> tuple[int, ...]:
    """Dims of the result along which it repeats itself, since no operand changes along them."""
    found = []
    for place, label in enumerate(result):
        holders = [(each, list(names).index(label)) for each, names in zip(operands, labels) if label in names]
        if all(each.repeats(dim) for each, dim in holders) and any(each.shape[dim] > 1 for each, dim in holders):
            found.append(place)
    return tuple(found)


def _plus(op: str, product: Operand, summand: Operand | None, dim: int | None = None) -> State:
    """The product plus a tensor that is broadcast to it, or one of one dim that stands along `dim`."""
    if summand is None:
        return product.state
    if dim is not None:
        summand = summand._replace(shape=summand.shape + (1,) * (product.dims - 1 - dim))
    if not (product.state.is_partial or summand.state.is_partial):
        return broadcast(op, (product, summand))
    if only_partial((product, summand)):
        return PARTIAL
    if product.state.is_partial:
        raise RuleError(
            f"{op}: the product is partial, since the dim that it sums over is cut, so {summand.name}, which is "
            f"{summand.state}, would be added once on every rank",
            f"no {summand.name} here: add it once, after the sum over the ranks",
        )
    raise RuleError(
        f"{op}: {summand.name} is partial, so the product, which is {product.state}, would be counted once on every "
        "rank",
        f"{summand.name} as replicate",
    )


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name} {place}" for place in range(count)]


def _labels(term: str, dims: int, wide: int) -> list[str]:
    """The dims of a term of an equation; `dims` of them hide behind the ellipsis, of `wide` at most."""
    before, dots, after = term.partition("...")
    return [*before, *(_numbered("batch", wide)[wide - dims :] if dots else []), *after]
