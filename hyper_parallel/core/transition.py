"""Transitions: from one layout of a tensor to another, as steps that are worked out once and replayed unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.lowering import cheapest_path, on_mesh_of, plain
from hyper_parallel.core.placement import Partial, Replicate
from hyper_parallel.core.program import Program, compile_program
from hyper_parallel.core.topology import FAST, SLOW, Topology
from hyper_parallel.core.traffic import elements
from hyper_parallel.core.wire import Step


@dataclass(frozen=True)
class Transition:
    """The steps that bring a tensor from `source` to `target`, and those that bring its gradient back.

    The gradient arrives in `target.gradient` and leaves in `source.gradient`. Both directions keep the value of the
    tensor they move; only of an average, a maximum or a minimum that is carried out does every rank get a share.
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    topology: Topology | None = None

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}"]
        lines += [f"  {step}" for step in self.steps] or ["  nothing to do"]
        return "\n".join(lines)

    @property
    def extremum(self) -> Step | None:
        """The step that takes a maximum or a minimum, if there is one; it is the first."""
        return self.steps[0] if self.steps and self.steps[0].op in ("max", "min") else None

    @cached_property
    def gradient_steps(self) -> tuple[Step, ...]:
        """The steps of the conjugate, which the gradient takes in backward."""
        if self.extremum is not None:
            return self._gradient_steps_of_extremum(self.extremum)
        aligned = on_mesh_of(self.source, self.target)
        divided = {
            axis: size
            for axis, size, before in zip(self.source.mesh.names, self.source.mesh.shape, self.source.placements)
            if before == Partial("avg") and size > 1 and (aligned is None or aligned.placement(axis) != before)
        }
        gradient = self.source.gradient
        whole = gradient.with_placements(
            [Replicate() if axis in divided else each for axis, each in zip(gradient.mesh.names, gradient.placements)]
        )
        steps = lower(self.target.gradient, whole, self.topology).steps
        if divided:
            steps += (Step("scale", (), plain(whole), plain(gradient), divisor=prod(divided.values())),)
        return steps

    def _gradient_steps_of_extremum(self, step: Step) -> tuple[Step, ...]:
        """Through the steps after the extremum, then each rank's share of the gradient to those that held it."""
        gradient = plain(self.source.gradient)
        middle = gradient.with_placements(
            [
                reduced if axis in step.axes else each
                for axis, reduced, each in zip(gradient.mesh.names, step.after.placements, gradient.placements)
            ]
        )
        share = Step("share", step.axes, middle, gradient, op=step.op)
        return (*lower(self.target.gradient, middle, self.topology).steps, share)

    @cached_property
    def conjugate(self) -> Transition:
        """The transition of the gradient, from `target.gradient` to `source.gradient`."""
        return Transition(self.target.gradient, self.source.gradient, self.gradient_steps, self.topology)

    def bytes(self, itemsize: int, topology: Topology | None = None) -> dict[str, int]:
        """Bytes that cross between ranks on each tier, `{"fast": ..., "slow": ...}`, over all ranks.

        Without a topology all ranks share a supernode. An all-reduce counts as a reduce-scatter and an all-gather.
        """
        topology = topology or self.topology
        counts = [elements(step, topology) for step in self.steps]
        return {tier: itemsize * sum(count[tier] for count in counts) for tier in (FAST, SLOW)}

    def program(self, rank: int) -> Program:
        """What one rank does, as offsets and sizes."""
        return compile_program(self.steps, self.gradient_steps, self.source, self.target, rank)


@lru_cache(maxsize=4096)
def lower(source: Layout, target: Layout, topology: Topology | None = None) -> Transition:
    """The transition from one layout to another of the same tensor.

    Among the paths considered the cheapest is taken, where an element on the slow tier costs ten on the fast one; never
    more than gathering everything. Results are kept, so the same question costs a lookup.

    Args:
        source: how the tensor lies.
        target: how it shall lie; on the same mesh, or on another one over the same ranks.
        topology: where ranks sit; without it all links are alike.

    Raises:
        LayoutError: the two differ in shape or in their ranks.
    """
    if source.shape != target.shape:
        raise LayoutError(
            f"a transition keeps the shape: found {list(source.shape)} in the source and {list(target.shape)} in "
            "the target"
        )
    if sorted(source.mesh.ranks) != sorted(target.mesh.ranks):
        raise LayoutError(
            f"a transition stays among the same ranks: the source mesh {source.mesh} has {sorted(source.mesh.ranks)}, "
            f"the target mesh {target.mesh} has {sorted(target.mesh.ranks)}"
        )
    return Transition(source, target, cheapest_path(source, target, topology), topology)
