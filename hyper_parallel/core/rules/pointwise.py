"""Operators that work element by element, with broadcasting."""

from __future__ import annotations

from typing import Any, Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import merge_cuts, only_partial, refuse_partial
from hyper_parallel.core.rules.state import PARTIAL, State
from hyper_parallel.core.rules.table import RuleError, rule

UNARY = (
    "abs acos asin atan ceil celu cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh "
    "leaky_relu log log10 log1p log2 logit logsigmoid mish nan_to_num reciprocal relu relu6 round rsqrt selu sigmoid "
    "sign silu sin sinh softplus softsign sqrt square tan tanh threshold trunc xlogy"
)
BINARY = "atan2 bitwise_and bitwise_or bitwise_xor floor_divide fmod maximum minimum polar pow remainder"
COMPARISONS = "eq ge gt le lt ne isclose logical_and logical_or logical_xor"
TESTS = "bitwise_not isfinite isinf isnan logical_not truncate"


@rule("pointwise", "*input")
@rule(f"{UNARY} clamp", "input")
@rule(f"{BINARY} rpow rdiv", "input other")
@rule(COMPARISONS, "input other", constant=None)
@rule(TESTS, "input", constant=None)
@rule("addcmul addcdiv", "input tensor1 tensor2")
def pointwise(view: View) -> State:
    """Any function of elements that stand at the same place."""
    refuse_partial(view.op, view.operands)
    return broadcast(view.op, view.operands)


@rule("identity", "input")
@rule("neg real imag conj", "input")
@rule("cast", "input *dtype", silent=("dtype", "other"))
@rule("type_as", "input other", silent=("other",))
@rule("detach", "input", constant=None)
def linear_in_each(view: View) -> State:
    """The same elements, or a multiple of them. A cast to whole numbers rounds, so that it is no linear function."""
    operand = view["input"]
    if operand.state.is_partial and any(_is_integral(value) for name, value in view.values.items() if name != "input"):
        refuse_partial(view.op, [operand])
    return operand.state


@rule("add sub rsub complex", "input other")
@rule("lerp", "input end weight")
def summed(view: View) -> State:
    """Pending sums can be added to each other; what is not pending would be added once on every rank."""
    weight = view.get("weight")
    summands = [each for each in view.operands if each is not weight]
    if any(each.state.is_partial for each in view.operands):
        _check_summands(view, summands)
        if isinstance(weight, Operand):
            refuse_partial(view.op, [weight])
        return PARTIAL
    return broadcast(view.op, view.operands, linear=all(_is_zero(view.get(name)) for name in ("input", "other")))


@rule("mul", "input other")
def multiplied(view: View) -> State:
    """A pending sum may be scaled by what is the same on every rank."""
    pending = [each for each in view.operands if each.state.is_partial]
    if len(pending) > 1:
        raise RuleError(
            f"{' and '.join(each.name for each in pending)} are both partial, and a product of sums is no sum of "
            "products",
            "one of them as replicate: reduce it before the product",
        )
    return scaled(view.op, pending[0], view.operands) if pending else broadcast(view.op, view.operands)


@rule("div", "input other rounding_mode")
def divided(view: View) -> State:
    """A pending sum may be divided, not divide."""
    pending = isinstance(view["input"], Operand) and view["input"].state.is_partial
    if not pending or view.get("rounding_mode") is not None:
        return pointwise(view)
    others = [each for each in view.operands if each is not view["input"]]
    refuse_partial(view.op, others)
    return scaled(view.op, view["input"], view.operands)


@rule("where", "condition input other")
def chosen(view: View) -> State:
    """Of two pending sums the same elements are chosen on every rank; zero is one of them."""
    sides = [view.get(name) for name in ("input", "other")]
    tensors = [each for each in sides if isinstance(each, Operand)]
    refuse_partial(view.op, [each for each in (view["condition"],) if isinstance(each, Operand)])
    if any(each.state.is_partial for each in tensors):
        _check_summands(view, tensors, names=("input", "other"))
        _check_replicate(view.op, view.operands)
        return PARTIAL
    return broadcast(view.op, view.operands)


@rule("masked_fill", "input mask value")
def filled(view: View) -> State:
    """Elements of a pending sum may be set to zero, and to nothing else."""
    if view["input"].state.is_partial:
        if not _is_zero(view.get("value")):
            raise RuleError(
                f"input is partial, and masked_fill would set {_shown(view.get('value'))} on every rank, to be summed",
                "input as replicate or shard: reduce it first; only 0 can be filled in before",
            )
        _check_replicate(view.op, view.operands)
        return PARTIAL
    refuse_partial(view.op, view.operands)
    return broadcast(view.op, view.operands)


def broadcast(op: str, operands: Sequence[Operand], linear: bool = False) -> State:
    """The state of a result whose dims are those of the operands, aligned at their ends; none of them is partial.

    With `linear` zeros give zeros.
    """
    dims = max((each.dims for each in operands), default=0)
    placed = [(each, {dims - each.dims + dim: dim for dim in range(each.dims)}) for each in operands]
    merged = merge_cuts(op, placed)
    if merged is not None:
        return merged
    same = tuple(
        dim for dim in range(dims) if all(dim not in into or operand.repeats(into[dim]) for operand, into in placed)
    )
    wide = tuple(dim for dim in same if any(dim in into and each.shape[into[dim]] > 1 for each, into in placed))
    return State(same=wide, zero=linear and all(each.state.zero for each in operands))


def scaled(op: str, pending: Operand, operands: Sequence[Operand]) -> State:
    """A pending sum times what is the same on every rank."""
    _check_replicate(op, [each for each in operands if each is not pending])
    return PARTIAL


def _check_replicate(op: str, operands: Sequence[Operand]) -> None:
    for each in operands:
        if each.state.cut is not None:
            raise RuleError(
                f"{op}: {each.name} is {each.state}, but what it meets is partial and so has all elements on every "
                "rank",
                f"{each.name} as replicate, or the partial one reduced to {each.state}",
            )


def _check_summands(view: View, summands: Sequence[Operand], names: Sequence[str] = ("input", "other", "end")) -> None:
    """All summands are pending, or zero."""
    pending = next(each for each in view.operands if each.state.is_partial)
    for name in names:
        value = view.get(name)
        if value is not None and not isinstance(value, Operand) and not _is_zero(value):
            raise _added_on_every_rank(view.op, pending, f"the number {value}")
    if only_partial(summands):
        return
    other = next(each for each in summands if not each.state.is_partial and not each.state.zero)
    if other.state.cut is not None:
        _check_replicate(view.op, [other])
    raise _added_on_every_rank(view.op, pending, f"{other.name}, which is {other.state},")


def _added_on_every_rank(op: str, pending: Operand, what: str) -> RuleError:
    return RuleError(
        f"{op}: {pending.name} is partial, so {what} would be counted once for every rank",
        f"{pending.name} as replicate or shard: reduce it first; or partial on both sides",
    )


def _is_zero(value: Any) -> bool:
    """Tell whether nothing but zero comes from this argument; one that was not given gives nothing."""
    if isinstance(value, Operand):
        return value.state.zero
    return value is None or (isinstance(value, (int, float, complex)) and value == 0)


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Operand) else str(value)


def _is_integral(value: Any) -> bool:
    """Tell whether a dtype of whole numbers is among the arguments, in whichever framework's spelling, or a tensor of
    one."""
    if type(value) is tuple:
        return any(map(_is_integral, value))
    spelled = value.dtype if isinstance(value, Operand) else str(value).lower().split(".")[-1]
    return spelled.startswith(("int", "uint", "bool", "long", "short"))
