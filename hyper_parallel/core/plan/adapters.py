"""Low-rank adapters around a linear: their factors follow the linear's role."""

from __future__ import annotations

from typing import Mapping

from hyper_parallel.core.plan.assignment import Assignment
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.plan.names import Name
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.sizes import Contradiction, Path

Linear = tuple[ParameterDescription, "Assignment | None"]


def assign_adapter(
    name: Name, parameter: ParameterDescription, linear: Linear | None, inner: Mapping[Path, tuple[int, ...]]
) -> Assignment:
    """The role of one part of an adapter around `linear`; `inner` holds the shapes of the factors that read inputs.

    A linear cut along its outputs cuts the factor that writes, and one cut along its inputs the factor that reads; the
    other factor is whole (`adapter`). Around a linear that is whole, so are both, in its role. Raises `Contradiction`
    where that can't be said.
    """
    around = ".".join(name.path) or "the model"
    if name.adapter not in ("in", "out", "magnitude") or name.leaf == "bias":
        what = "a bias" if name.leaf == "bias" else name.adapter
        raise Contradiction(f"{what} around '{around}': only low-rank factors of a linear are planned")
    if linear is None:
        raise Contradiction(f"an adapter around '{around}', where no weight of a linear is known")
    base, role = linear
    if role is None or role.output_dim is None or role.input_dim is None or len(base.shape) != 2:
        raise Contradiction(f"an adapter around {base.name}, which is no linear with a known role")
    out, into = base.shape[role.output_dim], base.shape[role.input_dim]
    if name.adapter == "magnitude":
        return _magnitude(parameter, role, out)
    rank = _rank(name, inner, into)
    words = f"adapter of rank {rank} around {base.name} ({role.role})"
    how = ROLES[role.role].tensor
    if name.adapter == "in":
        ranks, features = _dims(parameter, rank, into)
        if how in ("input", "whole"):
            return Assignment(parameter.name, role.role, words, ranks, features, expert=role.expert, heads=role.heads)
        return Assignment(parameter.name, "adapter", words, ranks, features, expert=role.expert)
    ranks, features = _dims(parameter, rank, out)
    if how == "input":
        return Assignment(parameter.name, "adapter", words, features, ranks, expert=role.expert)
    return Assignment(
        parameter.name,
        role.role,
        words,
        features,
        ranks,
        vocab_dim=None if role.vocab_dim is None else features,
        expert=role.expert,
        packing=role.packing,
        interleaved=role.interleaved,
        heads=role.heads,
        packed_heads=role.packed_heads,
        sliced=role.sliced,
    )


def _magnitude(parameter: ParameterDescription, role: Assignment, out: int) -> Assignment:
    """Sizes of the rows of the adapted weight, one for each output feature."""
    if ROLES[role.role].tensor == "input":
        raise Contradiction(
            f"{parameter.name} scales whole rows of a weight that is cut along its inputs: no rank knows their length"
        )
    if parameter.shape != (out,):
        raise Contradiction(f"{parameter.name} has the shape {list(parameter.shape)}, expected [{out}], one a row")
    words = f"magnitudes of the rows of a {role.role}"
    return Assignment(
        parameter.name,
        role.role,
        words,
        0,
        vocab_dim=None if role.vocab_dim is None else 0,
        expert=role.expert,
        packing=role.packing,
        interleaved=role.interleaved,
        heads=role.heads,
        packed_heads=role.packed_heads,
        sliced=role.sliced,
    )


def _rank(name: Name, inner: Mapping[Path, tuple[int, ...]], into: int) -> int:
    shape = inner.get(name.path, ())
    if len(shape) != 2 or into not in shape:
        raise Contradiction(
            f"the factor of the adapter around '{'.'.join(name.path)}' that reads inputs has the shape {list(shape)}; "
            f"expected [rank, {into}]"
        )
    return shape[0] if shape[1] == into else shape[1]


def _dims(parameter: ParameterDescription, rank: int, features: int) -> tuple[int, int]:
    """The dims over ranks and over features. A square factor tells nothing."""
    if parameter.shape not in ((rank, features), (features, rank)) or rank == features:
        raise Contradiction(
            f"{parameter.name} has the shape {list(parameter.shape)}, expected a rank of {rank} beside {features} "
            "features, and two different sizes to tell them apart"
        )
    return (0, 1) if parameter.shape == (rank, features) else (1, 0)
