"""How long the sequence is that a part at hand belongs to, where the part alone does not tell.

Six tokens over two ranks are three and three, five are three and two: the first rank holds three both times. Every
crossing that cuts a sequence sees all of it and notes it here; crossings that meet a part ask here. In the one forward
that is running it is the sequence that this forward has cut. A part may come of another forward too: in backward, where
a checkpoint computes a module again after other sequences have been cut, and where blocks are called one by one. There
the ranks tell each other what they hold, unless what they have cut so far leaves no doubt on any of them. All ranks
have cut the same sequences, so that all of them ask, or none, and all refuse what is still in doubt.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Any, Hashable, NamedTuple

from hyper_parallel.core.backend import Backend, Group
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.peers import group_along
from hyper_parallel.core.regions import chunk_bounds


class Sequences(NamedTuple):
    """A tensor's samples, and the tokens of each."""

    samples: int
    length: int

    def __str__(self) -> str:
        return f"[{self.samples}, {self.length}]"


class Tokens:
    """What has been cut along `tensor`, by all crossings of one model on this rank."""

    def __init__(self, backend: Backend, mesh: DeviceMesh):
        self._backend = backend
        self._mesh = mesh
        self._ranks = mesh.axis_size("tensor")
        self._place = mesh.coordinates(backend.collectives.rank()).get("tensor", 0)
        self._needs_tokens = not backend.autograd.differentiates_empty_tensors()
        self._running: set[Sequences] | None = None
        self._lengths = _Cut(self._ranks)
        self._rows = _Cut(self._ranks)
        self._of_whole_rows: dict[int, set[Sequences]] = defaultdict(set)

    @cached_property
    def _group(self) -> Group:
        return group_along(self._backend.collectives, self._mesh, ["tensor"])

    def begin(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The forward begins in which all sequences are cut and put together: nothing of an earlier one takes part."""
        if not self._in_backward():
            self._running = set()
        return args, kwargs

    def end(self, output: Any) -> Any:
        """It has ended."""
        if not self._in_backward():
            self._running = None
        return output

    def cut(self, sequences: Sequences, where: str) -> None:
        """Whole sequences are here, and are being cut.

        Raises:
            ContractError: they leave nothing for a rank, and the framework can't differentiate that. All ranks raise.
        """
        if self._needs_tokens and self._backend.autograd.grad_enabled():
            self._refuse_nothing(sequences.length, where)
        if self._running is not None and not self._in_backward():
            self._running.add(sequences)
        if sequences in self._rows:
            return
        parts = self._parts(sequences.length)
        self._lengths.add(sequences.length, parts)
        self._rows.add(sequences, [sequences.samples * part for part in parts])
        self._of_whole_rows[sequences.samples * sequences.length].add(sequences)

    def of_part(self, samples: int, part: int, where: str) -> Sequences:
        """What a tensor `[samples, part, features]` is a part of.

        Raises:
            ContractError: what the ranks hold are no parts of one sequence. All of them raise.
        """
        lengths = {each.length for each in self._of_this_forward()}
        if len(lengths) != 1:
            lengths = self._lengths.only(self._place, part) if self._in_backward() else set()
        if not lengths:
            parts = self._told(part)
            lengths = {sum(parts)}
            if parts != self._parts(sum(parts)):
                raise ContractError(
                    f"{where} is a part of a sequence, but the tensor ranks hold {parts} tokens, and "
                    f"{sum(parts)} tokens are cut into {self._parts(sum(parts))}"
                )
        found = Sequences(samples, lengths.pop())
        self.cut(found, where)
        return found

    def of_rows(self, rows: int, is_part: bool, where: str) -> Sequences:
        """What a tensor `[rows, features]`, the tokens of all samples in a row, holds, or is a part of.

        Raises:
            ContractError: nothing tells how many samples there are. All ranks raise.
        """
        found = self._of_this_forward()
        if len(found) != 1:
            found = self._in_question(rows) if is_part else self._of_whole_rows.get(rows, set())
        if len(found) == 1:
            return next(iter(found))
        those = f" of {' or '.join(map(str, sorted(found)))}" if found else ""
        raise ContractError(
            f"{where} has {rows} rows, tokens of all samples in a row, and nothing tells how many samples{those}; pass "
            "it as [samples, tokens, features], run the whole model, or let what a checkpoint computes again have one "
            "shape"
        )

    def _of_this_forward(self) -> set[Sequences]:
        """What the forward that is running has cut; none in a recompute, which may be one of any forward."""
        return set() if self._running is None or self._in_backward() else self._running

    def _in_question(self, rows: int) -> set[Sequences]:
        found = self._rows.only(self._place, rows) if self._in_backward() else set()
        return found or self._rows.all_of(self._told(rows))

    def _refuse_nothing(self, length: int, where: str) -> None:
        parts = self._parts(length)
        if not parts[-1]:
            raise ContractError(
                f"{where}: of {length} tokens the {self._ranks} tensor ranks get {parts}, and in "
                f"{self._backend.name} gradients of what meets a tensor without elements are wrong; pad sequences to a "
                f"multiple of {self._ranks} tokens, or plan with `sequence_parallel: false`"
            )

    def _told(self, size: int) -> list[int]:
        """What each tensor rank tells, in their order."""
        return self._backend.collectives.gather_objects(size, self._group)

    def _parts(self, length: int) -> list[int]:
        bounds = (chunk_bounds(length, self._ranks, rank) for rank in range(self._ranks))
        return [stop - start for start, stop in bounds]

    def _in_backward(self) -> bool:
        return self._backend.autograd.in_backward()


class _Cut:
    """What has been cut so far, by the size of each rank's part."""

    def __init__(self, ranks: int):
        self._by_size: list[dict[int, set]] = [defaultdict(set) for _ in range(ranks)]
        self._sizes: dict[Hashable, list[int]] = {}

    def __contains__(self, whole: Hashable) -> bool:
        return whole in self._sizes

    def add(self, whole: Hashable, sizes: list[int]) -> None:
        """Something is cut into parts of these sizes."""
        if whole not in self._sizes:
            self._sizes[whole] = sizes
            for found, size in zip(self._by_size, sizes):
                found[size].add(whole)

    def only(self, rank: int, size: int) -> set:
        """What a part on one rank comes of, if no rank could take its part of that for one of something else.

        Where one rank is in doubt the others find the same, so all of them get nothing."""
        found = self._by_size[rank].get(size, set())
        if len(found) != 1:
            return set()
        (whole,) = found
        in_doubt = any(len(by[each]) > 1 for by, each in zip(self._by_size, self._sizes[whole]))
        return set() if in_doubt else {whole}

    def all_of(self, sizes: list[int]) -> set:
        """All that is cut into parts of these sizes."""
        return {whole for whole in self._by_size[0].get(sizes[0], ()) if self._sizes[whole] == sizes}
