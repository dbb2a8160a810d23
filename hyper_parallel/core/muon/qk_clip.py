"""QK-clip: attention whose logits have grown too large gets smaller queries and keys, after the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite, prod
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.muon.qk_heads import Attention, attentions_of
from hyper_parallel.core.peers import gathered, group_along
from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.regions import Box, intersection, offset_in, sizes_of

NONE = -np.inf
"""The maximum of a head that nobody has seen: it is left as it is."""


@dataclass(frozen=True)
class QKClip:
    """Bound attention logits, as MuonClip does.

    A head whose largest logit S is above `tau` gets a factor of tau / S: its queries take its power `alpha`, its keys
    the rest, 1 - alpha. Keys that several heads share take that of the largest; rotated queries of a latent attention,
    whose keys all heads share, take all of it.

    Args:
        tau: the largest logit that is left alone, above 0.
        alpha: the queries' share, from 0 to 1.

    Raises:
        ConfigError: other values.
    """

    tau: float = 100.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("tau", self.tau), ("alpha", self.alpha)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                raise ConfigError(f"QKClip: {name} is {value!r}; write a number")
        if self.tau <= 0:
            raise ConfigError(f"QKClip: tau is {self.tau}, and maxima are held against it; write one above 0")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"QKClip: alpha is {self.alpha}; write the queries' share, from 0 to 1")

    def power(self, share: str) -> float:
        """The power of a head's factor that a share takes: "query", "key" or "whole"."""
        return {"query": self.alpha, "key": 1 - self.alpha, "whole": 1.0}[share]


class Scale(NamedTuple):
    """Boxes of this rank's local tensor of a parameter, and the factor of each. They don't overlap."""

    parameter: str
    boxes: list[Box]
    factors: list[float]


@dataclass(frozen=True)
class ClipPlan:
    """What QK-clip does to a model, the same on every rank. `left_alone`: attention that it can't act on, and why."""

    clip: QKClip
    attentions: tuple[Attention, ...]
    left_alone: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that may be scaled, in the model's order."""
        return tuple(dict.fromkeys(each.parameter for attention in self.attentions for each in attention.rows))

    def describe(self) -> str:
        """One line for each attention module."""
        lines = [f"QK-clip above {self.clip.tau:g}, queries take the power {self.clip.alpha:g}"]
        for attention in self.attentions:
            names = dict.fromkeys(each.parameter.removeprefix(attention.path + ".") for each in attention.rows)
            lines.append(f"  {attention.path}: {attention.heads} heads, {', '.join(names)}")
        lines += [f"  {path}: left alone, {reason}" for path, reason in self.left_alone.items()]
        return "\n".join(lines)


def plan(description: ModelDescription, clip: QKClip, roles: RoleResult | None = None) -> ClipPlan:
    """Find the attention of a model and what makes the queries and keys of its heads.

    Raises:
        ConfigError: QK-clip can act on no attention of the model; says why.
    """
    attentions, left_alone = attentions_of(description, roles)
    if not attentions:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in list(left_alone.items())[:3])
        raise ConfigError(
            f"QK-clip can act on no attention of {description.class_name}: "
            f"{reasons or 'the planner knows none in it'}. Leave qk_clip out"
        )
    return ClipPlan(clip, attentions, left_alone)


class ClipOfRank:
    """What one rank does of a `ClipPlan`.

        largest = clip.exchange(backend, maxima)  # before the update: it may refuse, on all ranks alike
        ...
        for parameter, boxes, factors in clip.scales(largest):
            backend.muon.scale_blocks_(local tensor, boxes, factors)  # of the parameter, and of its float32 master

    Args:
        plan: the model's plan.
        layouts: of all of `plan.parameters`.
        rank: this rank.

    Raises:
        ConfigError: the layouts are of several meshes, so that nothing tells who has seen other samples.
    """

    def __init__(self, plan: ClipPlan, layouts: Mapping[str, Layout], rank: int) -> None:
        self.plan = plan
        meshes = {layouts[name].mesh: name for name in plan.parameters}
        if len(meshes) > 1:
            (one, first), (other, second) = list(meshes.items())[:2]
            raise ConfigError(
                f"QK-clip: {first} lies on the mesh {one} and {second} on {other}; maxima are shared along one mesh"
            )
        self.mesh: DeviceMesh = next(iter(meshes))
        self._starts = [0, *accumulate(each.heads for each in plan.attentions)]
        self._own = {each.path: _own_heads(each, layouts, rank) for each in plan.attentions}
        self._boxes = [
            [(each, box) for each in attention.rows for box in local_boxes(layouts[each.parameter], rank, each.box)]
            for attention in plan.attentions
        ]

    def exchange(self, backend: Backend, maxima: Mapping[str, Any]) -> np.ndarray:
        """The largest logit of every head, over all ranks: float32, all heads of all attention one after the other.

        Called by all ranks of the mesh. One all-gather along each axis of several ranks, of four bytes a head.

        Args:
            backend: of this rank.
            maxima: `{attention module: [heads]}`, tensors or sequences, of this rank's own samples since the last step
                (the largest over micro-batches), of all heads or of those that this rank has of a `tensor` axis. What
                is not named here, or on any rank, is left alone.

        Raises:
            ConfigError: on all ranks, when one has named something else, or has NaN or infinity.
        """
        problem = None
        try:
            row = self.pack(on_host(backend, maxima))
        except ConfigError as error:
            problem, row = error, np.full(self._starts[-1], NONE, np.float32)
        row = np.append(row, np.float32(problem is not None))
        for axis, size in zip(self.mesh.names, self.mesh.shape):
            if size > 1 and axis != "pipeline":
                row = gathered(backend, row, group_along(backend.collectives, self.mesh, [axis])).max(0)
        if problem:
            raise problem
        if row[-1]:
            raise ConfigError("QK-clip: the maxima of another rank were refused; its error says why")
        for attention, start in zip(self.plan.attentions, self._starts):
            own = row[start : start + attention.heads]
            for head in np.flatnonzero(np.isnan(own) | (own == np.inf)):
                raise ConfigError(
                    f"QK-clip: the largest logit of head {head} of {attention.path} is {own[head]}; nothing was changed"
                )
        return row[:-1]

    def pack(self, maxima: Mapping[str, Sequence[float] | np.ndarray]) -> np.ndarray:
        """This rank's maxima, every head in its place; `NONE` for heads that it has not seen.

        Raises:
            ConfigError: an attention that the plan does not have, or another number of heads.
        """
        row = np.full(self._starts[-1], NONE, np.float32)
        places = {each.path: (each, start) for each, start in zip(self.plan.attentions, self._starts)}
        for path, values in maxima.items():
            if path not in places:
                raise ConfigError(self._unknown(path))
            attention, start = places[path]
            found, own = np.asarray(values, np.float32), self._own[path]
            if found.shape == (attention.heads,):
                row[start : start + attention.heads] = found
            elif found.shape == own.shape:
                row[start + own] = found
            else:
                few = f", of which this rank has {len(own)}" if len(own) < attention.heads else ""
                raise ConfigError(
                    f"QK-clip: the maxima of {path} have the shape {list(found.shape)}; it has {attention.heads} "
                    f"heads{few}, and each has one"
                )
        return row

    def scales(self, largest: np.ndarray) -> list[Scale]:
        """What to multiply this rank's local tensors with; nothing where no head is above `tau`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            gammas = np.where(largest > self.plan.clip.tau, self.plan.clip.tau / largest.astype(np.float64), 1.0)
        found: dict[str, Scale] = {}
        for start, attention, boxes in zip(self._starts, self.plan.attentions, self._boxes):
            own = gammas[start : start + attention.heads]
            if own.min() == 1.0:
                continue
            for rows, box in boxes:
                factor = own[slice(*rows.heads)].min() ** self.plan.clip.power(rows.share)
                if factor != 1.0:
                    scale = found.setdefault(rows.parameter, Scale(rows.parameter, [], []))
                    scale.boxes.append(box)
                    scale.factors.append(float(factor))
        return list(found.values())

    def _unknown(self, path: str) -> str:
        if path in self.plan.left_alone:
            return f"QK-clip can't act on {path}: {self.plan.left_alone[path]}; leave its maxima out"
        known = [each.path for each in self.plan.attentions]
        more = f" and {len(known) - 3} more" if len(known) > 3 else ""
        return f"QK-clip: the model has no attention {path!r}; it has {', '.join(known[:3])}{more}"


def on_host(backend: Backend, maxima: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The values of tensors; a single wait for the device."""
    tensors = {path: each for path, each in maxima.items() if backend.tensors.is_tensor(each)}
    found = {path: np.asarray(each, np.float32) for path, each in maxima.items() if path not in tensors}
    if tensors:
        with backend.autograd.no_grad():
            cast = [backend.autograd.cast(each, "float32") for each in tensors.values()]
            flat = [backend.tensors.flat(each) for each in cast]
            values = backend.tensors.to_numpy(backend.tensors.concatenate(flat, 0))
        ends = list(accumulate(prod(each.shape) for each in tensors.values()))
        parts = np.split(values, ends[:-1])
        found.update({path: part.reshape(tuple(each.shape)) for (path, each), part in zip(tensors.items(), parts)})
    return found


def _own_heads(attention: Attention, layouts: Mapping[str, Layout], rank: int) -> np.ndarray:
    """The query heads whose logits a rank computes: what the `tensor` axis leaves it of the queries."""
    query = next(each.parameter for each in attention.rows)
    layout = layouts[query]
    kept = {"tensor": layout.placement("tensor")} if "tensor" in layout.mesh.names else {}
    boxes = Layout(layout.mesh, kept, layout.shape).boxes(rank)
    own = [
        each.heads[0]
        for each in attention.rows
        if each.parameter == query
        and each.share == "query"
        and any(intersection(each.box, box) == each.box for box in boxes)
    ]
    return np.unique(np.array(own, dtype=np.int64))


def local_boxes(layout: Layout, rank: int, box: Box) -> list[Box]:
    """Where a rank holds parts of a global box: boxes of its local tensor, whose leading dims may be flattened. Not for
    0-d tensors."""
    shape, found = layout.local_shape(rank), []
    flattened = len(layout.shape) - len(shape) + 1
    width = prod(shape[1:])
    for piece in layout.pieces(rank):
        shared = intersection(piece.box, box)
        if shared is None:
            continue
        sizes = sizes_of(shared)
        starts, run = [offset_in(piece, shared)], sizes[flattened - 1]
        for size, stride in reversed(list(zip(sizes[: flattened - 1], piece.strides))):
            if stride == run * width:
                run *= size
            else:
                starts = [start + index * stride for start in starts for index in range(size)]
        for start in starts:
            place = np.unravel_index(start, shape)
            found.append(tuple(slice(int(low), int(low) + size) for low, size in zip(place, (run, *sizes[flattened:]))))
    return found
