"""Attention kernels: batch and heads may be cut, queries too where nothing but the mask tells their places."""

from __future__ import annotations

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import refuse_cut, refuse_partial
from hyper_parallel.core.rules.contraction import contract
from hyper_parallel.core.rules.random import refuse_apart
from hyper_parallel.core.rules.state import State
from hyper_parallel.core.rules.table import RuleError, rule


@rule("attention", "query key value mask dropout causal scale grouped")
def attention(view: View) -> State:
    """`query` [..., heads, L, D], `key` [..., heads, S, D], `value` [..., heads, S, E], a mask that is broadcast to
    [..., heads, L, S]; the result is [..., heads, L, E]. With `grouped` several query heads share one of the others."""
    query, key, value = view["query"], view["key"], view["value"]
    refuse_partial(view.op, [each for each in view.operands if each is not value or view.get("dropout", 0.0)])
    refuse_cut(view.op, query, [query.dims - 1], "needs all features of a head before its softmax")
    for each in (key, value):
        refuse_cut(view.op, each, [each.dims - 2], "needs all keys for its softmax")
    refuse_cut(view.op, key, [key.dims - 1], "needs all features of a head before its softmax")
    if view.get("causal", False):
        refuse_cut(view.op, query, [query.dims - 2], "counts a causal mask from the first query of the rank's part")
    if view.get("grouped", False):
        key, value = (_shared(view.op, query, each) for each in (key, value))
    mask = [view["mask"]] if isinstance(view.get("mask"), Operand) else []
    batch = [f"batch {place}" for place in range(query.dims - 2)]
    labels = [[*batch, "query", "in"], [*batch, "key", "in"], [*batch, "key", "out"]]
    labels += [[*batch, "query", "key"][query.dims - each.dims :] for each in mask]
    for each in mask:
        refuse_cut(view.op, each, [each.dims - 1], "needs all keys for its softmax")
    result = contract(view.op, (query, key, value, *mask), labels, [*batch, "query", "out"])
    if view.get("dropout", 0.0):
        refuse_apart(view, query._replace(state=result.state))
    return State() if result.state.is_replicate else result.state


def _shared(op: str, query: Operand, other: Operand) -> Operand:
    """Keys or values as if each query head had its own. Query heads find theirs among as many groups as this rank has
    keys, so that keys are cut as queries are."""
    heads = query.dims - 3
    if query.state.cut != heads:
        return other
    if other.state.cut != heads and other.shape[heads] > 1:
        raise RuleError(
            f"{op}: query is {query.state} and {other.name} is {other.state}, so that a rank's queries would find the "
            "keys of other ranks' queries",
            f"{other.name} as shard({heads}), or only the heads that this rank's queries use",
        )
    shape = list(other.shape)
    shape[heads] = query.shape[heads] if other.state.cut == heads else 1
    return other._replace(shape=tuple(shape))
