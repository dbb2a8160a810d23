"""Transitions on real ranks: a rank's program, replayed on plain local tensors, forward and backward."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, Sequence

from hyper_parallel.core.backend import Backend, Group, Tensor
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.program import Stage
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.transition import Transition, lower


class Redistribution:
    """A transition, ready to run on this rank. Nothing about layouts is worked out when it is called.

    `redistribution(local)` is differentiable: the gradient of the result, which lies as `target.gradient` says, comes
    back as `source.gradient` says. `run` leaves autograd aside and can write into a tensor that is there already. All
    ranks of the mesh call together.
    """

    def __init__(self, backend: Backend, transition: Transition):
        self.transition = transition
        self.program = transition.program(backend.collectives.rank())
        self._backend = backend
        # A ragged shard can hold the same elements in another shape.
        keeps_shape = self.program.source_shape == self.program.target_shape
        self._is_same = not self.program.forward and keeps_shape
        self._forward = _Stages(backend, self.program.forward, keeps_shape)
        self._backward = _Stages(backend, self.program.backward, keeps_shape)

    def __call__(self, local: Tensor, name: str = "") -> Tensor:
        """The local tensor of the target, recorded for backward under a name. `local` itself where nothing has to be
        done.

        Raises:
            LayoutError: `local` is not of the source's local shape, or of a dtype that has no average.
        """
        self._check(local)
        return self.replay(local, name)

    def replay(self, local: Tensor, name: str = "") -> Tensor:
        """The same for a tensor that is known to fit."""
        if self._is_same and not self.program.backward:
            return local
        return self._backend.autograd.differentiable(local, self._run_forward, self._run_backward, name)

    def run(self, local: Tensor, out: Tensor | None = None) -> Tensor:
        """The local tensor of the target, without autograd history.

        Args:
            local: of the source's local shape.
            out: a contiguous tensor to write the result to, of the target's local shape and of `local`'s dtype; it must
                not share memory with `local`. A new tensor when not given, or `local` itself where nothing has to be
                done.

        Raises:
            LayoutError: `local` or `out` does not fit.
        """
        self._check(local)
        if out is not None:
            self._check_out(local, out)
        with self._backend.autograd.no_grad():
            return self._run_forward(local, out)[0]

    def _run_forward(self, local: Tensor, out: Tensor | None = None) -> tuple[Tensor, Any]:
        tensors = self._backend.tensors
        if self._is_same and out is None:
            return local, None
        if self._forward.is_sum and out is None:
            return self._forward.sum(local), None
        result, rows = self._forward.run(tensors.flat(local), None if out is None else tensors.flat(out), None)
        if out is not None:
            return out, rows
        return tensors.alias(result, 0, self.program.target_shape), rows

    def _run_backward(self, gradient: Tensor, rows: Any) -> Tensor:
        if not self._backward.stages and self.program.source_shape == self.program.target_shape:
            return gradient  # as it is: an alias would hide from autograd whose memory it is
        if self._backward.is_sum:
            return self._backward.sum(gradient)
        tensors = self._backend.tensors
        result, _ = self._backward.run(tensors.flat(gradient), None, rows)
        return tensors.alias(result, 0, self.program.source_shape)

    def _check(self, local: Tensor) -> None:
        if tuple(local.shape) != self.program.source_shape:
            raise LayoutError(
                f"rank {self.program.rank} holds a local tensor of shape {self.program.source_shape} by "
                f"{self.transition.source}, found {tuple(local.shape)}"
            )
        if self.program.needs_floating and "float" not in self._backend.tensors.dtype_name(local):
            raise LayoutError(
                f"{self.transition.source}: an average needs a floating-point tensor, found "
                f"{self._backend.tensors.dtype_name(local)}; cast it, or make it a partial sum"
            )

    def _check_out(self, local: Tensor, out: Tensor) -> None:
        dtype_name = self._backend.tensors.dtype_name
        found = (tuple(out.shape), dtype_name(out))
        expected = (self.program.target_shape, dtype_name(local))
        if found != expected or not out.is_contiguous():
            raise LayoutError(
                f"out must be a contiguous tensor of shape {expected[0]} and dtype {expected[1]} at rank "
                f"{self.program.rank} by {self.transition.target}, found shape {found[0]} and dtype {found[1]}"
                f"{'' if out.is_contiguous() else ', not contiguous'}"
            )


class _Stages:
    """One direction of a program with its process groups, which are made at the first run."""

    def __init__(self, backend: Backend, stages: Sequence[Stage], keeps_shape: bool):
        self.stages = stages
        self.is_sum = keeps_shape and [(each.collective, each.divisor) for each in stages] == [("all_reduce", 1)]
        self._backend = backend

    @cached_property
    def _groups(self) -> list[Group | None]:
        groups = self._backend.collectives.groups
        return [groups([stage.group]) if stage.collective else None for stage in self.stages]

    def sum(self, held: Tensor) -> Tensor:
        """What `run` gives where `is_sum`, for tensors as they are: a sum over ranks leaves every element in its
        place, so nothing has to be seen flat."""
        result = self._backend.tensors.duplicate(held)
        self._backend.collectives.all_reduce(result, self._groups[0])
        return result

    def run(self, held: Tensor, out: Tensor | None, rows: Any) -> tuple[Tensor, Any]:
        """The flat result, and what the backward of a maximum or minimum needs: the rows compared and their result.

        `held` is flat and not changed; `out`, flat, receives the result. In backward `rows` is what forward gave."""
        last, owned, kept = len(self.stages) - 1, False, None
        for place, (stage, group) in enumerate(zip(self.stages, self._groups)):
            into = out if place == last else None
            early = stage.divisor != 1 and stage.collective and self._backend.tensors.dtype_name(held) == "float16"
            if early:  # the sum could be more than float16 holds, the average is not
                held = self._own(held, None, owned)
                self._scale(held, 1, stage.divisor)
                owned = True
            if stage.kind == "share":
                held = self._share(stage, group, held, rows)
            elif stage.collective is None:
                held = self._local(stage, held, into, owned)
            elif stage.collective == "all_reduce":
                held = self._all_reduce(stage, group, held, into, owned)
            else:
                held, kept = self._exchange(stage, group, held, into, kept)
            self._scale(held, stage.factor, 1 if early else stage.divisor)
            owned = True
        if not self.stages and out is not None:
            self._backend.tensors.copy_(out, held)
        return held, kept

    def _local(self, stage: Stage, held: Tensor, into: Tensor | None, owned: bool) -> Tensor:
        if stage.kind == "scale":
            return self._own(held, into, owned)
        output = self._output(stage, held, into)
        self._backend.tensors.move_(output, held, stage.keep)
        return output

    def _all_reduce(self, stage: Stage, group: Group, held: Tensor, into: Tensor | None, owned: bool) -> Tensor:
        output = self._own(held, into, owned)
        self._backend.collectives.all_reduce(output, group)
        return output

    def _own(self, held: Tensor, into: Tensor | None, owned: bool) -> Tensor:
        """The input in a buffer that may be changed."""
        if owned and into is None:
            return held
        output = self._backend.tensors.buffer(held, self._numel(held)) if into is None else into
        self._backend.tensors.copy_(output, held)
        return output

    def _scale(self, tensor: Tensor, factor: int, divisor: int) -> None:
        if factor != 1:
            self._backend.tensors.scale_(tensor, factor)
        if divisor != 1:
            self._backend.tensors.divide_(tensor, divisor)

    @staticmethod
    def _numel(flat: Tensor) -> int:
        return flat.shape[0]

    def _exchange(self, stage: Stage, group: Group, held: Tensor, into: Tensor | None, kept: Any) -> tuple[Tensor, Any]:
        tensors = self._backend.tensors
        sent = self._packed(stage, held, stage.sent)
        arrives_in_place = stage.unpack is None and stage.reduction is None
        received = into if arrives_in_place and into is not None else tensors.buffer(held, stage.received)
        self._send(stage, group, received, sent)
        if stage.reduction is not None:
            rows = received
            received = tensors.reduce_rows(rows, *stage.reduction)
            if stage.reduction.op != "sum":
                kept = (rows, stage.reduction.rows, received)
        if stage.unpack is None:
            if into is not None and received is not into:
                tensors.copy_(into, received)
                received = into
            return received, kept
        output = self._output(stage, held, into)
        tensors.move_(output, received, stage.unpack)
        tensors.move_(output, held, stage.keep)
        return output, kept

    def _share(self, stage: Stage, group: Group | None, held: Tensor, rows: Any) -> Tensor:
        """To every rank that took part in a maximum or minimum its share of the gradient; ties share alike."""
        tensors = self._backend.tensors
        compared, count, result = rows
        shares = tensors.tie_shares(compared, count, result)
        sent = tensors.multiply_rows(shares, count, self._packed(stage, held, stage.sent // count))
        if stage.row is not None:
            received = tensors.alias(sent, stage.row * stage.received, (stage.received,))
        else:
            received = tensors.buffer(held, stage.received)
            self._send(stage, group, received, sent)
        if stage.unpack is None:
            return received
        output = tensors.buffer(held, stage.numel)
        tensors.move_(output, received, stage.unpack)
        return output

    def _packed(self, stage: Stage, held: Tensor, numel: int) -> Tensor:
        if stage.pack is None:
            return held
        packed = self._backend.tensors.buffer(held, numel)
        self._backend.tensors.move_(packed, held, stage.pack)
        return packed

    def _send(self, stage: Stage, group: Group, received: Tensor, sent: Tensor) -> None:
        collectives = self._backend.collectives
        if stage.collective == "all_gather":
            collectives.all_gather(received, sent, group)
        elif stage.collective == "reduce_scatter":
            collectives.reduce_scatter(received, sent, group)
        else:
            collectives.all_to_all(received, sent, group, stage.output_splits, stage.input_splits)

    def _output(self, stage: Stage, like: Tensor, into: Tensor | None) -> Tensor:
        if into is None:
            return self._backend.tensors.buffer(like, stage.numel, stage.zero)
        if stage.zero:
            self._backend.tensors.zero_(into)
        return into


def redistribution(
    backend: Backend, source: Layout, target: Layout, topology: Topology | None = None
) -> Redistribution:
    """The transition between two layouts, ready to run on this rank; worked out once and kept.

    Raises:
        LayoutError: the layouts differ in shape or ranks, or this rank is not among them.
    """
    return _compiled(backend, source, target, topology, backend.collectives.world())


@lru_cache(maxsize=4096)
def _compiled(
    backend: Backend, source: Layout, target: Layout, topology: Topology | None, world: Group
) -> Redistribution:
    """`world` is part of the key: another job has other process groups."""
    return Redistribution(backend, lower(source, target, topology))
