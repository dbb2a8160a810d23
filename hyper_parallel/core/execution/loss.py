"""Cross entropy of logits whose vocabulary is cut over ranks. No rank ever holds all logits of a token.

With the largest logit m of a token over the whole vocabulary, and t its target,

    loss = log(sum over the vocabulary of exp(logit - m)) - (logit of t - m)

Each rank computes its part of the sum; the rank that holds t adds its logit. Two exchanges do it, of a few numbers for
each token: the largest logits of all ranks, then the sums together with the targets' logits. The gradient of a rank's
logits, softmax minus one at t, needs what the rank has already, so backward exchanges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hyper_parallel.core.backend import Backend, Group, LocatedTargets, Tensor
from hyper_parallel.core.errors import ConfigError, ContractError, LayoutError
from hyper_parallel.core.peers import group_along
from hyper_parallel.core.placement import Replicate, Shard
from hyper_parallel.core.plan.contracts import BoundaryPlan
from hyper_parallel.core.plan.plan import ShardingPlan
from hyper_parallel.core.regions import chunk_bounds
from hyper_parallel.core.validation.loss import check_same_targets, followed_loss


class Vocabulary(NamedTuple):
    """What the last dim of logits ranges over: `size` entries, of which a rank holds its part if they are `cut`."""

    size: int
    cut: bool

    def part(self, ranks: int, place: int) -> int:
        """Entries that a rank holds."""
        start, stop = chunk_bounds(self.size, ranks if self.cut else 1, place if self.cut else 0)
        return stop - start


FLOATING = ("float16", "bfloat16", "float32", "float64")
WHOLE_NUMBERS = ("int8", "uint8", "int16", "int32", "int64")
REDUCTIONS = ("mean", "sum")


def vocabulary_cross_entropy(
    backend: Backend,
    logits: Tensor,
    targets: Tensor,
    vocabulary: int,
    group: Group,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """The cross entropy of logits whose last dim is cut over `group`. Called by all its ranks, with equal targets.

    The loss is the same on every rank, and so is the gradient that must reach it: each rank's logits then get their
    part of the gradient of the whole logits, without a factor of the number of ranks. Every call reads the targets on
    the host to check them, so on an accelerator it waits for what computes them.

    Args:
        backend: the framework of the tensors.
        logits: `[..., V_local]`, floating: this rank's part when `vocabulary` is split by ceil-chunk over the group. It
            may be empty. Computed in float32 at least; the gradient has the dtype of the logits.
        targets: `[...]`, whole numbers: ids of the whole vocabulary.
        vocabulary: how many entries the whole vocabulary has.
        group: the ranks that share the vocabulary, in the order of their parts.
        reduction: "sum" over the tokens that count, or their "mean", which is NaN (with a gradient of zeros) when no
            token counts.
        ignore_index: tokens with this target count nothing.

    Returns:
        A scalar, of float64 for float64 logits, else of float32.

    Raises:
        ConfigError: a wrong dtype or argument, or a target that is no entry of the vocabulary. Nothing is sent then.
        LayoutError: the logits are not of the shape that this rank's part and the targets give; likewise.
    """
    check_arguments(backend, logits, targets, reduction, ignore_index)
    start, stop = chunk_bounds(vocabulary, group.size, group.index)
    if logits.shape[-1] != stop - start:
        raise LayoutError(
            f"cross_entropy: the logits hold {logits.shape[-1]} entries of the vocabulary at rank "
            f"{group.ranks[group.index]}, which has [{start}, {stop}) of {vocabulary}, {stop - start} entries; pass "
            "this rank's part, as the head returns it"
        )
    check_targets(backend, targets, vocabulary, ignore_index)
    located = backend.training.locate_targets(targets, start, stop - start, ignore_index)
    loss = _CutLoss(backend, group, located, reduction == "mean")
    return backend.autograd.differentiable(logits, loss.forward, loss.backward)


def planned_cross_entropy(
    backend: Backend,
    plan: ShardingPlan,
    logits: Tensor,
    targets: Tensor,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """The cross entropy of what the head of a model gives that runs under `plan`.

    Arguments, result and errors are those of `vocabulary_cross_entropy`.

    Raises:
        LayoutError: the logits are of the size of none of several heads, or can be of more than one.
        ContractError: the plan hands logits on in a layout that has no loss.
    """
    track = None if backend.interception is None else backend.interception.track_of(logits)
    if track is not None:
        check_same_targets(track, targets, ignore_index)
    check_arguments(backend, logits, targets, reduction, ignore_index)
    group = group_along(backend.collectives, plan.mesh, ["tensor"])
    vocabulary = _vocabulary_of(plan, int(logits.shape[-1]), group)
    is_cut = vocabulary is not None and vocabulary.cut

    def compute(logits: Tensor, targets: Tensor) -> Tensor:
        if not is_cut:
            return whole_cross_entropy(backend, logits, targets, reduction, ignore_index)
        return vocabulary_cross_entropy(backend, logits, targets, vocabulary.size, group, reduction, ignore_index)

    return compute(logits, targets) if track is None else followed_loss(track, logits, targets, is_cut, compute)


def _vocabulary_of(plan: ShardingPlan, length: int, group: Group) -> Vocabulary | None:
    """The vocabulary of the head that gives `length` logits on this rank; None where the plan knows no head."""
    heads = {each.module: _vocabulary(each) for each in plan.boundaries if each.kind == "head"}
    found = set(heads.values())
    if len(found) > 1:  # the length tells which one
        found = {each for each in found if each.part(group.size, group.index) == length}
        if len(found) != 1:
            sizes = {name: each.part(group.size, group.index) for name, each in heads.items()}
            raise LayoutError(
                f"cross_entropy: {length} logits of a token at rank {group.ranks[group.index]} do not tell which head "
                f"they come from; the heads give {sizes}"
            )
    return next(iter(found), None)


def _vocabulary(head: BoundaryPlan) -> Vocabulary:
    logits = head.outputs[0]
    lies = logits.after.get("tensor", Replicate())
    if lies not in (Replicate(), Shard(logits.dims - 1)):
        raise ContractError(
            f"cross_entropy: {head.module} hands its logits on as {lies} over tensor; the loss takes replicate, or "
            f"shard({logits.dims - 1}), a part of the vocabulary on each rank: write one of them after its output"
        )
    return Vocabulary(logits.size, cut=lies != Replicate())


def whole_cross_entropy(
    backend: Backend, logits: Tensor, targets: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """The framework's own cross entropy of logits `[..., V]` that hold the whole vocabulary.

    Arguments, result and errors are those of `vocabulary_cross_entropy`."""
    check_arguments(backend, logits, targets, reduction, ignore_index)
    check_targets(backend, targets, logits.shape[-1], ignore_index)
    return backend.training.cross_entropy(logits, targets, reduction, ignore_index)


@dataclass(frozen=True)
class _CutLoss:
    """One call, as the engine runs it forward and backward. It keeps tensors of its own only, so that what the caller
    passed may be changed afterwards."""

    backend: Backend
    group: Group
    located: LocatedTargets
    mean: bool

    def forward(self, logits: Tensor) -> tuple[Tensor, list]:
        """The loss, and what backward needs."""
        training, tensors, collectives = self.backend.training, self.backend.tensors, self.backend.collectives
        own = training.largest_logits(logits)
        of_all = tensors.buffer(own, own.shape[0] * self.group.size)
        collectives.all_gather(of_all, own, self.group)
        largest = tensors.reduce_rows(of_all, self.group.size, "max")
        exponentials, terms = training.vocabulary_terms(logits, largest, self.located)
        collectives.all_reduce(terms, self.group)
        kept = [exponentials, terms, tuple(logits.shape), tensors.dtype_name(logits)]
        return training.vocabulary_loss(terms, self.located, self.mean), kept

    def backward(self, gradient: Tensor, kept: list) -> Tensor:
        """The gradient of this rank's logits, made in the memory of what was kept if this is the last time."""
        if not kept:
            raise ConfigError("cross_entropy: backward runs a second time; give the first one retain_graph=True")
        exponentials, terms, shape, dtype = kept
        last = not self.backend.autograd.graph_is_kept()
        if last:  # a loss that is still in a variable must not hold the memory of all logits
            kept.clear()
        rows = self.backend.training.vocabulary_gradient(
            exponentials, terms, self.located, gradient, self.mean, dtype, overwrite=last
        )
        return rows.reshape(shape)


def check_arguments(backend: Backend, logits: Tensor, targets: Tensor, reduction: str, ignore_index: int) -> None:
    """Raise what can be told without looking at a value."""
    tensors = backend.tensors
    if reduction not in REDUCTIONS:
        raise ConfigError(f'cross_entropy: reduction is {reduction!r}; write "mean" or "sum"')
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise ConfigError(f"cross_entropy: ignore_index is {ignore_index!r}; write a whole number, as -100")
    for name, tensor in (("logits", logits), ("targets", targets)):
        if not tensors.is_tensor(tensor):
            raise ConfigError(f"cross_entropy: {name} must be a tensor of {backend.name}, found {type(tensor)}")
    if tensors.dtype_name(logits) not in FLOATING:
        raise ConfigError(
            f"cross_entropy: logits are of {tensors.dtype_name(logits)}; they must be one of {', '.join(FLOATING)}"
        )
    if tensors.dtype_name(targets) not in WHOLE_NUMBERS:
        raise ConfigError(
            f"cross_entropy: targets are of {tensors.dtype_name(targets)}; pass the ids of the right entries as whole "
            "numbers (probabilities of all entries are not offered)"
        )
    if tuple(logits.shape[:-1]) != tuple(targets.shape) or not logits.shape:
        raise LayoutError(
            f"cross_entropy: logits of shape {tuple(logits.shape)} do not fit targets of shape "
            f"{tuple(targets.shape)}: logits have the dims of the targets, and the vocabulary as one more at the end"
        )


def check_targets(backend: Backend, targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise `ConfigError` when a target that counts is no entry of the vocabulary, and say which and where."""
    if not backend.tensors.has_values(targets):
        return
    ids = backend.tensors.to_numpy(targets).astype(np.int64)
    wrong = (ids != ignore_index) & ((ids < 0) | (ids >= vocabulary))
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise ConfigError(
            f"cross_entropy: targets{list(place)} is {ids[place]}, but ids go from 0 to {vocabulary - 1} "
            f"({wrong.sum()} of {ids.size} targets are outside); a token that is not to count has the target "
            f"{ignore_index}, or pass another ignore_index"
        )
