"""A part of the vocabulary on each rank: tables that know some of the tokens."""

from __future__ import annotations

from hyper_parallel.core.backend import Module, Tensor
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.facts import Facts, is_cut
from hyper_parallel.core.plan.plan import ParameterPlan

REFUSED = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
"""Options of an embedding that look at all rows or all tokens, and their values where they are off."""

ROW_COUNTS = ("num_embeddings", "vocab_size")


class OwnRows:
    """An embedding's part of the table: looks its own tokens up, and gives zeros for others."""

    def __init__(self, start: int, rows: int):
        self._start = start
        self._rows = rows
        self._own: Tensor | None = None

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Tokens as rows of the part; others as row 0."""
        key = None if args else next(iter(kwargs))
        tokens = (args[0] if args else kwargs[key]) - self._start
        self._own = (tokens >= 0) & (tokens < self._rows)
        rows = tokens * self._own
        return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, key: rows})

    def leave(self, output: Tensor) -> Tensor:
        """Zeros where the token is in another part; the sum over ranks is the row."""
        own, self._own = self._own, None
        return output * own[..., None].to(output.dtype)


def find_embeddings(facts: Facts, found: Adaptations) -> None:
    """Let every table that is cut along the vocabulary find its own tokens."""
    for parameter in facts.plan.parameters:
        boundary = facts.boundaries.get(parameter.boundary)
        if parameter.role == "embedding" and is_cut(parameter) and boundary is not None:
            _shift(facts, found, boundary.module, parameter)


def _shift(facts: Facts, found: Adaptations, name: str, parameter: ParameterPlan) -> None:
    layout = facts.along_model(parameter)
    if len(layout.boxes(facts.rank)) > 1:
        found.problems.append(
            f"{parameter.name} is {parameter.placements['tensor']} over tensor, several runs of rows on each rank; a "
            "rank looks tokens up in one run, as shard(0) gives it"
        )
        return
    rows = layout.slices(facts.rank)[parameter.placements["tensor"].dim]
    change = OwnRows(rows.start, rows.stop - rows.start)
    found.arguments.setdefault(name, []).append(change.enter)
    found.results.setdefault(name, []).append(change.leave)
    module: Module = facts.uses[parameter.name][0].owner
    for option, off in REFUSED.items():
        if getattr(module, option, off) not in (off, None):
            found.problems.append(
                f"{name} has {option}={getattr(module, option)!r}, which looks at the whole table, but tensor cuts it; "
                f"switch it off, or keep the table whole: {parameter.name}: {{placements: {{tensor: replicate}}}}"
            )
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        own = rows.start <= padding < rows.stop
        found.show(module, "padding_idx", padding - rows.start if own else None)
    for attribute in ROW_COUNTS:
        if vars(module).get(attribute) == parameter.shape[parameter.placements["tensor"].dim]:
            found.show(module, attribute, rows.stop - rows.start)
