"""The state that one rank keeps, for the same ranks and the same plan. `full_state.py` has what fits any."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from hyper_parallel.core.errors import CheckpointError
from hyper_parallel.core.muon.options import OPTIONS

if TYPE_CHECKING:
    from hyper_parallel.core.muon.optimizer import MuonEngine

MOMENTUM, SECOND, MASTER = "momentum_buffer", "second_moment", "master"
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")

Groups = Sequence[Mapping[str, Any]]
"""The groups of the framework's optimizer, as they are now."""


def state_dict(engine: MuonEngine, groups: Groups) -> dict[str, Any]:
    """What this rank keeps, in the form of PyTorch's: tensors, not copied, by a parameter's number, and the options of
    all groups. "plan" names the plan and the rank, "second_moments" are those of the rank's batches in order."""
    numbers, described = iter(range(len(engine.members))), []
    for group in groups:
        own = [next(numbers) for _ in group["params"]]
        described.append({**{key: plain(value) for key, value in group.items() if key != "params"}, "params": own})
    states = {number: dict(state) for number, state in enumerate(engine.states())}
    for number in engine.elementwise.members if engine.started else ():
        master = engine.elementwise.master(number)
        states[number].update({} if master is None else {MASTER: master})
    return {
        "state": {number: state for number, state in states.items() if state},
        "param_groups": described,
        "second_moments": [run.values for run in engine.second_moments()],
        "plan": _mark(engine),
    }


def load_state_dict(engine: MuonEngine, saved: Mapping[str, Any], groups: Groups) -> None:
    """Go on from what `state_dict` gave; everything is checked before anything is changed.

    Raises:
        CheckpointError: it is no such state, or of another plan or rank.
    """
    lacking = [key for key in ("state", "param_groups", "second_moments", "plan") if key not in saved]
    if lacking:
        raise CheckpointError(f"Muon: the state has no {lacking[0]!r}; load_state_dict takes what state_dict() gave")
    if saved["plan"] != _mark(engine):
        raise CheckpointError(
            f"Muon: the state is that of {_told(saved['plan'])}, and this is {_told(_mark(engine))}; for another mesh, "
            "other groups or other options, give what full_state() of the old optimizer returns to load_full_state()"
        )
    _check(engine, saved)
    tensors, states = engine.backend.tensors, saved["state"]
    for part in engine.parts():
        found = states[part.member]
        tensors.copy_(part.momentum, found[MOMENTUM])
        part.keep_master(tensors.duplicate(found[MASTER]) if MASTER in found else None)
    for number in engine.elementwise.members:
        found = {name: engine.local(value) for name, value in states.get(number, {}).items()}
        engine.elementwise.load_master(number, found.pop(MASTER, None))
        engine.elementwise.load(number, found)
    for run, values in zip(engine.second_moments(), saved["second_moments"]):
        tensors.copy_(run.values, values)
    take_options(engine, groups, saved["param_groups"])
    engine.resume(any(MASTER in each for each in states.values()))


def plain(value: Any) -> Any:
    """An option as numbers, text, lists and mappings, which any file can hold."""
    if is_dataclass(value):
        return asdict(value)
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "shape") and not value.shape:
        return float(value)
    return value


def free_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the plan does not fix, and what learning-rate schedulers have put beside them."""
    kept = {"params", "param_names", "names", "algorithm"}
    kept |= {name for name, option in OPTIONS[options["algorithm"]].items() if option.planned}
    return {name: value for name, value in options.items() if name not in kept}


def take_options(engine: MuonEngine, groups: Groups, saved: Groups) -> None:
    """Take over what is not fixed by the plan."""
    for ours, theirs in zip(groups, saved, strict=True):
        for name, value in free_options(theirs).items():
            if name == "lr":
                engine.backend.optimizer.set_learning_rate(ours, float(value))
            else:
                ours[name] = value


def _mark(engine: MuonEngine) -> dict[str, Any]:
    return {"fingerprint": engine.fingerprint, "rank": engine.backend.collectives.rank()}


def _told(mark: Any) -> str:
    if not isinstance(mark, Mapping):
        return repr(mark)
    return f"rank {mark.get('rank')} of the plan {str(mark.get('fingerprint'))[:12]}"


def _check(engine: MuonEngine, saved: Mapping[str, Any]) -> None:
    """The shapes of what is kept; the fingerprint has told that all else is alike."""
    wanted = {part.member: part.kept.local_shape for part in engine.parts()}
    for member, shape in wanted.items():
        found = saved["state"].get(member, {}).get(MOMENTUM)
        if found is None or tuple(found.shape) != shape:
            has = "none" if found is None else f"one of shape {list(found.shape)}"
            raise CheckpointError(
                f"Muon: {engine.members[member].name} needs a momentum of shape {list(shape)} here, the state has {has}"
            )
