"""All state, whole and by name: for any mesh, any number of ranks, either framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Group, Tensor
from hyper_parallel.core.errors import CheckpointError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.muon.options import MUON
from hyper_parallel.core.muon.state import (
    ADAMW_MOMENTS,
    MASTER,
    MOMENTUM,
    SECOND,
    Groups,
    free_options,
    plain,
    take_options,
)
from hyper_parallel.core.peers import group_along
from hyper_parallel.core.replay import redistribution

if TYPE_CHECKING:
    from hyper_parallel.core.muon.lane import Lane
    from hyper_parallel.core.muon.optimizer import MuonEngine

FORMAT = 1
SHOWN = 8


def full_state(engine: MuonEngine, groups: Groups) -> dict[str, Any]:
    """ "parameters": numpy arrays of global shapes by name, and "groups" with their options, on every rank.

    Of Muon "momentum_buffer", "second_moment" ([planes, rows of all logical matrices]) and "master"; of AdamW
    "exp_avg", "exp_avg_sq", "step" and "master". Called by all ranks of the plan; one tensor at a time is whole.
    """
    parameters: dict[str, dict[str, Any]] = {each.name: {} for each in engine.members}
    with engine.backend.autograd.no_grad():
        for lane in engine.lanes:
            for index, member in enumerate(lane.member_of):
                parameters[engine.members[member].name] = _of_muon(lane, index, member)
        for member in engine.elementwise.members:
            parameters[engine.members[member].name] = _of_adamw(engine, member)
    described = [
        {
            "names": list(group["param_names"]),
            **{key: plain(value) for key, value in group.items() if key not in ("params", "param_names")},
        }
        for group in groups
    ]
    return {"format": FORMAT, "parameters": parameters, "groups": described}


def load_full_state(engine: MuonEngine, values: Mapping[str, Any], groups: Groups) -> None:
    """Go on from what `full_state` gave; each rank takes its part, and nothing is sent.

    Momentum of the other form is converted: heavy ball's is 1 / (1 - momentum) times as large. Options that no plan
    fixes are taken over.

    Raises:
        CheckpointError: lists what is missing, unknown, of another shape or algorithm; then nothing is changed.
    """
    if not isinstance(values, Mapping) or values.get("format") != FORMAT:
        raise CheckpointError("Muon: this is no full state; load_full_state takes what full_state() gave")
    found = values["parameters"]
    origins = {name: group for group in values["groups"] for name in group["names"]}
    problems = _problems(engine, found, origins, groups)
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise CheckpointError("\n  ".join(["Muon: the state does not fit this optimizer", *problems[:SHOWN], *more]))
    with engine.backend.autograd.no_grad():
        for lane in engine.lanes:
            for index, member in enumerate(lane.member_of):
                name = engine.members[member].name
                _load_muon(lane, index, found[name], _conversion(origins[name], engine.options(groups, member)))
        for member in engine.elementwise.members:
            _load_adamw(engine, member, found[engine.members[member].name])
        take_options(
            engine, groups, [origins[group["param_names"][0]] if group["params"] else group for group in groups]
        )
        engine.resume(any(MASTER in each for each in found.values()))


def _of_muon(lane: Lane, index: int, member: int) -> dict[str, Any]:
    tensors, parts = lane.backend.tensors, [part for part in lane.parts if part.kept.index == index]
    values = {MOMENTUM: _put_together(lane, index, [(part, part.momentum) for part in parts])}
    if lane.engine.keeps_master(member) and lane.engine.started:
        values[MASTER] = _put_together(lane, index, [(part, part.master) for part in parts])
    if lane.rule_of(index) is not None:
        own, layout = tensors.from_numpy(lane.second_moments.full(index)), lane.plan.parameters[index].layout
        _sum(lane, own, group_along(lane.backend.collectives, layout.mesh, layout.cut_axes))
        _sum(lane, own, lane.replicas.get(index))
        values[SECOND] = tensors.to_numpy(own)
    return values


def _put_together(lane: Lane, index: int, parts: Sequence[tuple[Any, Tensor]]) -> np.ndarray:
    """A tensor of which owners among replicas keep parts, whole. What others add is zeros."""
    tensors, layout = lane.backend.tensors, lane.plan.parameters[index].layout
    dtype = lane.engine.state_dtype(lane.member_of[index])
    local = tensors.zeros(layout.local_shape(lane.replay.program.rank), dtype)
    for part, values in parts:
        tensors.copy_(part.of(lane.backend, local), values)
    _sum(lane, local, lane.replicas.get(index))
    return _whole(lane.backend, local, layout)


def _of_adamw(engine: MuonEngine, member: int) -> dict[str, Any]:
    """A rank without elements may have no state of its own, and takes part all the same."""
    layout, part = engine.members[member].layout, engine.elementwise
    names = list(ADAMW_MOMENTS) if part.steps(member) else []
    held = {name: engine.local(value) for name, value in part.state(member).items() if name in names}
    if engine.keeps_master(member) and engine.started:
        names.append(MASTER)
        held[MASTER] = part.master(member)
    shape, dtype = layout.local_shape(engine.backend.collectives.rank()), engine.state_dtype(member)
    values: dict[str, Any] = {}
    for name in names:
        local = held[name] if name in held else engine.backend.tensors.zeros(shape, dtype)
        values[name] = _whole(engine.backend, local, layout)
    return values | ({"step": part.steps(member)} if part.steps(member) else {})


def _sum(lane: Lane, tensor: Tensor, group: Group | None) -> None:
    if group is not None and group.size > 1:
        lane.backend.collectives.all_reduce(tensor, group)


def _whole(backend: Backend, local: Tensor, layout: Layout) -> np.ndarray:
    local = local if local.is_contiguous() else backend.tensors.duplicate(local)
    return backend.tensors.to_numpy(redistribution(backend, layout, layout.with_placements({})).run(local))


def _problems(engine: MuonEngine, found: Mapping[str, Any], origins: Mapping[str, Any], groups: Groups) -> list[str]:
    """What a full state has that does not fit, in words."""
    names = {each.name for each in engine.members}
    problems = [f"{name}: unknown here" for name in found if name not in names]
    for member, each in enumerate(engine.members):
        if each.name not in found or each.name not in origins:
            problems.append(f"{each.name}: missing")
            continue
        theirs, ours = origins[each.name], engine.options(groups, member)
        if theirs["algorithm"] != ours["algorithm"]:
            problems.append(f"{each.name}: was updated by {theirs['algorithm']}, and is by {ours['algorithm']} here")
            continue
        problems += _wrong_shapes(engine, member, found[each.name])
    counts = sorted({found[name]["step"] for name in names if "step" in found.get(name, {})})
    if engine.elementwise.counts_together and len(counts) > 1:
        problems.append(f"AdamW has taken {counts} steps on its parameters; this framework's counts them alike")
    for number, group in enumerate(groups):
        options = [free_options(origins[name]) for name in group["param_names"] if name in origins]
        if any(each != options[0] for each in options):
            problems.append(f"group {number}: its parameters were in groups of other options; make the groups alike")
    return problems


def _wrong_shapes(engine: MuonEngine, member: int, values: Mapping[str, Any]) -> list[str]:
    each, problems = engine.members[member], []
    for name, shape in engine.shapes_of(member, values).items():
        if name not in values:
            problems.append(f"{each.name}: has no {name}")
        elif tuple(np.shape(values[name])) != shape:
            problems.append(f"{each.name}: {name} is {list(np.shape(values[name]))}, wanted {list(shape)}")
    return problems


def _conversion(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> float:
    """What a saved momentum is multiplied with."""
    if ours["algorithm"] != MUON or theirs["momentum_form"] == ours["momentum_form"]:
        return 1.0
    size = 1 - theirs["momentum"]
    return size if ours["momentum_form"] == "ema" else 1 / size


def _load_muon(lane: Lane, index: int, values: Mapping[str, Any], factor: float) -> None:
    backend, layout, rank = lane.backend, lane.plan.parameters[index].layout, lane.replay.program.rank
    tensors, engine = backend.tensors, lane.engine
    for part in (each for each in lane.parts if each.kept.index == index):
        shard = tensors.from_numpy(layout.shard(values[MOMENTUM], rank))
        tensors.copy_(part.momentum, part.of(backend, shard), factor)
        master = None
        if MASTER in values and engine.keeps_master(part.member):
            shard = tensors.from_numpy(layout.shard(values[MASTER], rank), engine.state_dtype(part.member))
            master = tensors.duplicate(part.of(backend, shard))
        part.keep_master(master)
    for slot, row in lane.second_moments.rows():
        if slot.index == index:
            whole = values[SECOND][slot.plane, lane.second_moments.place(slot)]
            tensors.copy_(row, tensors.from_numpy(np.ascontiguousarray(whole)))


def _load_adamw(engine: MuonEngine, member: int, values: Mapping[str, Any]) -> None:
    tensors, layout = engine.backend.tensors, engine.members[member].layout
    rank = engine.backend.collectives.rank()
    local = {
        name: tensors.from_numpy(layout.shard(values[name], rank))
        for name in (*ADAMW_MOMENTS, MASTER)
        if name in values
    }
    engine.elementwise.load_master(member, local.pop(MASTER, None) if engine.keeps_master(member) else None)
    local.pop(MASTER, None)
    engine.elementwise.load(member, local | ({"step": values["step"]} if "step" in values else {}))
