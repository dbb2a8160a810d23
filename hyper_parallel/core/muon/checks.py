"""What all ranks agree on before a step changes anything: gradients that are there, finite and of the right shape."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Group, Tensor
from hyper_parallel.core.errors import ConfigError, GradientError, HyperParallelError, LayoutError
from hyper_parallel.core.muon.storage import Stored, change_since, local_gradient

SHOWN = 6


class Found(NamedTuple):
    """What one rank has against a step: an error of its own, and numbers of parameters."""

    error: HyperParallelError | None
    present: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    not_finite: tuple[int, ...] = ()


class Agreement:
    """The ranks that hold parts of one copy of the parameters, or that send each other parameters.

    Copies get equal gradients, so each copy finds alike. Counts are summed up over its ranks in one small all-reduce;
    names are told only where something is wrong.
    """

    def __init__(self, backend: Backend, members: Sequence[Stored], others: Sequence[Group], check_finite: bool):
        self._backend = backend
        self._members = members
        self._check_finite = check_finite
        rank = backend.collectives.rank()
        self._shapes = [each.layout.local_shape(rank) for each in members]
        self._filled = [number for number, each in enumerate(members) if each.layout.local_numel(rank)]
        ranks = sorted({rank for each in members for rank in each.layout.mesh.ranks})
        self._group = _connected(backend, ranks, [*_along_cuts(backend, members), *others])

    def gradients(
        self, gradients: Sequence[Tensor | None], error: HyperParallelError | None
    ) -> tuple[list[Tensor | None], set[int]]:
        """This rank's parts of the gradients, and the numbers of the parameters that have none on any rank. `error` is
        what this rank has found before.

        Raises:
            LayoutError: a parameter lies otherwise than when the optimizer was made.
            GradientError: a gradient is not finite, is missing on some ranks only, or has another shape.
        """
        local, found = (list(gradients), Found(error)) if error is not None else self._look(gradients)
        rows = np.zeros((len(self._members), 3), np.int32)
        for column, numbers in enumerate((found.present, found.missing, found.not_finite)):
            rows[list(numbers), column] = 1
        counts = self._summed(np.append(rows.reshape(-1), np.int32(found.error is not None)))
        present, missing, not_finite = counts[:-1].reshape(-1, 3).T
        if counts[-1] or not_finite.any() or (present.astype(bool) & missing.astype(bool)).any():
            self._refuse(found)
        nowhere = {number for number, count in enumerate(present) if not count}
        return [self._settled(n, gradients[n], each) for n, each in enumerate(local)], nowhere

    def _settled(self, number: int, gradient: Tensor | None, local: Tensor | None) -> Tensor | None:
        """This rank's part of a gradient that all ranks have, as the parameter lies."""
        backend, parameter = self._backend, self._members[number].parameter
        if gradient is None or backend.optimizer.lies_alike(gradient, parameter):
            return local
        return backend.optimizer.local(backend.optimizer.laid_alike(gradient, parameter))

    def _look(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Found]:
        """What this rank finds by itself."""
        backend, members = self._backend, self._members
        if len(gradients) != len(members):
            error = GradientError(f"Muon: {len(gradients)} gradients for {len(members)} parameters; give one for each")
            return [None] * len(members), Found(error)
        local = [local_gradient(backend, each) for each in gradients]
        for each, wanted, whole, gradient in zip(members, self._shapes, gradients, local):
            change = change_since(backend, each)
            if change:
                return local, Found(
                    LayoutError(f"Muon: {each.name} has changed since the optimizer was made: {change}. Make a new one")
                )
            if (
                gradient is not None
                and tuple(gradient.shape) != wanted
                and backend.optimizer.lies_alike(whole, each.parameter)
            ):
                return local, Found(
                    GradientError(
                        f"Muon: the gradient of {each.name} has the shape {list(gradient.shape)} on rank "
                        f"{backend.collectives.rank()}, and the parameter {list(wanted)}"
                    )
                )
        present = tuple(n for n in self._filled if local[n] is not None)
        missing = tuple(n for n in self._filled if local[n] is None)
        return local, Found(None, present, missing, self._not_finite({n: local[n] for n in present}))

    def _not_finite(self, gradients: dict[int, Tensor]) -> tuple[int, ...]:
        if not self._check_finite:
            return ()
        flags = self._backend.muon.all_finite(list(gradients.values()))
        return tuple(number for number, finite in zip(gradients, flags) if not finite)

    def _summed(self, counts: np.ndarray) -> np.ndarray:
        if self._group is None:
            return counts
        backend = self._backend
        with backend.autograd.no_grad():
            tensor = backend.tensors.from_numpy(counts)
            backend.collectives.all_reduce(tensor, self._group)
            return backend.tensors.to_numpy(tensor)

    def _refuse(self, found: Found) -> None:
        """Tell each other what there is, and raise the same on every rank."""
        collectives = self._backend.collectives
        known = {collectives.rank(): found}
        if self._group is not None:
            known = dict(zip(self._group.ranks, collectives.gather_objects(found, self._group)))
        if found.error is not None:
            raise found.error
        errors = {rank: each.error for rank, each in sorted(known.items()) if each.error is not None}
        for rank, error in errors.items():
            raise type(error)(f"rank {rank}: {error}")
        bad = {rank: each.not_finite for rank, each in sorted(known.items()) if each.not_finite}
        if bad:
            raise GradientError(
                f"Muon: {self._told(bad)} not finite; nothing has been changed. Skip this step, or look for what "
                "makes them so (a loss scale, a rate that is too high)"
            )
        have = {number for each in known.values() for number in each.present}
        some = {rank: tuple(n for n in each.missing if n in have) for rank, each in sorted(known.items())}
        raise GradientError(
            f"Muon: {self._told(some)} missing, but other ranks have them; nothing has been changed. A parameter has a "
            "gradient on all ranks that hold parts of it, or on none: give zeros"
        )

    def _told(self, numbers: dict[int, tuple[int, ...]]) -> str:
        """Which parameters, on which ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, each in numbers.items():
            for number in each:
                ranks.setdefault(self._members[number].name, []).append(rank)
        texts = [f"{name} on rank{'s' if len(on) > 1 else ''} {_listed(on)}" for name, on in ranks.items()]
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        what = "the gradient of" if len(texts) == 1 else "the gradients of"
        return f"{what} {', '.join(texts[:SHOWN])}{more} {'is' if len(texts) == 1 else 'are'}"


def agree_on(backend: Backend, ranks: Sequence[int], error: HyperParallelError | None, fingerprint: str) -> None:
    """Let ranks that are to exchange parameters find out whether all have made the same plan, or none.

    Raises:
        ConfigError: another rank has found something wrong, or has made another plan. The own error, if there is one.
    """
    if len(ranks) > 1:
        group = backend.collectives.groups([sorted(ranks)])
        told = backend.collectives.gather_objects((None if error is None else str(error), fingerprint), group)
        if error is None:
            for rank, (other, _) in zip(group.ranks, told):
                if other is not None:
                    raise ConfigError(f"rank {rank}: {other}")
            strange = [rank for rank, (_, theirs) in zip(group.ranks, told) if theirs != fingerprint]
            if strange:
                raise ConfigError(
                    f"Muon: rank {backend.collectives.rank()} and rank {strange[0]} have made different plans; give "
                    "all ranks the same parameters, names, groups and options"
                )
    if error is not None:
        raise error


def _along_cuts(backend: Backend, members: Sequence[Stored]) -> list[Group]:
    """For each mesh the ranks that hold parts of what this rank holds parts of."""
    axes: dict = {}
    for each in members:
        axes.setdefault(each.layout.mesh, set()).update(each.layout.cut_axes)
    groups = []
    for mesh, cut in axes.items():
        ranks = sorted(mesh.group_of(backend.collectives.rank(), [name for name in mesh.names if name in cut]))
        groups.append(backend.collectives.groups([ranks]))
    return groups


def _connected(backend: Backend, ranks: Sequence[int], groups: Sequence[Group]) -> Group | None:
    """The ranks that hear of this one through groups, over however many of them; None where it is alone.

    A rank may have fewer groups than a neighbour (a replica without elements has nobody to send to), so no rank can
    tell from its own ones how far they reach. `ranks` are all that make this optimizer.
    """
    if len(ranks) < 2:
        return None
    own = [group.ranks for group in groups if group.size > 1]
    told = backend.collectives.gather_objects(own, backend.collectives.groups([list(ranks)]))
    sets = {each for theirs in told for each in theirs}
    found, reached = set(), {backend.collectives.rank()}
    while reached != found:
        found = reached
        reached = found.union(*(each for each in sets if found & set(each)))
    return backend.collectives.groups([sorted(found)]) if len(found) > 1 else None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
