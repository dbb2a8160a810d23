"""What a user reads when a plan does not hold: where, what was found, what would be right, which line of the plan."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh
from hyper_parallel.core.rules.state import State
from hyper_parallel.core.rules.table import RuleError

PARAMETER = "parameter "
"""How the line of a parameter begins."""


class Found(NamedTuple):
    """A tensor: its name among the arguments, its local shape, how it lies along each axis, and the line of the plan
    that it comes from."""

    name: str
    shape: tuple[int, ...]
    states: Mapping[str, str]
    origin: str

    def __str__(self) -> str:
        lies = ", ".join(f"{axis}: {state}" for axis, state in self.states.items())
        return f"{self.name} {list(self.shape)}".strip() + f" is {lies}"


def place(module: str) -> str:
    """Where it happened."""
    return module or "outside of the model's modules"


def operator_error(
    module: str, op: str, error: RuleError, found: Sequence[Found], within: str = "", instead: str = ""
) -> ContractError:
    """An operator that would be wrong on what it was given, or that has no rule. `within` names the backward of the
    model's code in which it runs, and `instead` is what to write where that can't be followed."""
    along = f" over {error.axis}" if error.axis else ""
    where = f"{place(module)}, in {within}" if within else place(module)
    return _error(f"{where}: {op}{along}: {error.reason}", found, "; or ".join(filter(None, [error.legal, instead])))


def own_backward_error(module: str, which: str, problem: str, found: Found, origin: str, instead: str) -> ContractError:
    """A backward of the model's code, `which`, gives a gradient that lies otherwise than its argument asks for."""
    legal = "; or ".join(filter(None, ["a plan that sums up what is a part on each rank", instead]))
    return _error(f"{place(module)}: {which}: {problem}", [found], legal, *filter(None, [origin]))


def vouching(around: str, way_to_rule: str) -> str:
    """What to write for code that can't be followed: the boundary at `around` vouches for it, or a rule does."""
    opaque = f"regions: [{{match: {around}, kind: opaque}}] among the overrides, which is trusted" if around else ""
    return "; or ".join(filter(None, [opaque, way_to_rule])) or "operators that are followed in its place"


def framework_error(module: str, op: str, error: Exception, found: Sequence[Found]) -> ContractError:
    """An operator that the framework refuses: the local tensors don't have the shapes that the code counts on."""
    return _error(
        f"{place(module)}: {op}: the framework refuses it on this rank's tensors: {type(error).__name__}: {error}",
        found,
        "tensors that lie as the module's code counts on",
    )


def untracked_error(
    module: str, op: str, shape: Sequence[int], name: str | None, function: str = "", instead: str = ""
) -> ContractError:
    """A tensor takes part in autograd, and nothing is known of how it lies. `name` says that it is a parameter;
    `function` that a function with a backward of its own has made it, where `instead` is what to write."""
    what = f"the parameter {name}" if name else f"a tensor of shape {list(shape)} that asks for a gradient"
    if function:
        return ContractError(
            f"{place(module)}: {op}: it uses what {function} returns, a function with a backward of its own, that "
            f"nobody has followed\n  legal: {instead}"
        )
    return ContractError(
        f"{place(module)}: {op}: it uses {what}, which the plan does not follow, so nobody knows whether its gradient "
        "is a part on each rank\n"
        "  legal: parameters of the plan and what is computed of them, read through their module's attribute; or a "
        "tensor that asks for no gradient"
    )


def start_error(module: str, found: Found, axis: str) -> ContractError:
    """Backward would start from a gradient that is not that of the tensor."""
    return _error(
        f"{place(module)}: backward over {axis}: every rank would start from the same gradient, which is not the "
        "gradient of this tensor",
        [found],
        f"a loss that is replicate over {axis}, with the whole gradient on every rank, or a partial sum; "
        "hyper_parallel.cross_entropy gives one",
    )


def loss_error(module: str, found: Found, axis: str, expected: State) -> ContractError:
    """What the loss is computed of lies otherwise than the plan's head hands it on."""
    return _error(
        f"{place(module)}: cross_entropy over {axis}: {found.name} must be {expected}, or the loss is not that of the "
        "whole model",
        [found],
        f"{found.name} that are {expected} over {axis}, as the output head returns them",
    )


def boundary_error(module: str, side: str, problem: str, found: Found, legal: str, line: str) -> ContractError:
    """A tensor reached a boundary otherwise than its contract says."""
    return _error(f"{place(module)}: the {side}: {problem}", [found], legal, line)


def values_error(module: str, what: str, problem: str, line: str) -> ContractError:
    """Values, or those of a gradient, are otherwise than a contract says."""
    return ContractError(f"{place(module)}: the {what}: {problem}\n  plan: {line}")


def other_start_error(told: Sequence[str]) -> ContractError:
    """Ranks have made different models. `told` names parameters and buffers, and the ranks that hold others."""
    return ContractError(
        "parallelize: ranks start with different values, so no rank changes its model. Others than rank 0 hold: "
        f"{', '.join(told)}\n"
        "  legal: the same values on every rank, which keeps its part of them: give the framework the same seed on "
        "every rank before the model is made, or load the same checkpoint into each model before this call"
    )


def alone_error(module: str, parameter: str, unit: str) -> ContractError:
    """A module is called by itself, and its parameter is right while a unit around it runs only."""
    around = unit or "the model itself"
    return ContractError(
        f"{place(module)}: it is called by itself, but {parameter} belongs to the unit of {around}, which gathers it "
        "and sums up its gradient in its own forward only: here the code would read this rank's shard, or its gradient "
        f"would stay that of this rank\n  legal: call {module} in the forward of {around}; what the code around the "
        "model does with its modules can be the forward of a model that is planned in its place"
    )


def outside_error(where: str, what: str, problem: str, axis: str, mesh: DeviceMesh, legal: str = "") -> ContractError:
    """Ranks that compute one model were given different things, by a data loader where `legal` says nothing else."""
    dealt = " and ".join(name for name in BATCH_AXES if mesh.axis_size(name) > 1)
    picks = f"picks samples by a rank's place along {dealt} (mesh.coordinates(rank)) and " if dealt else ""
    legal = legal or (
        f"the same values on all ranks of a {axis} group, which compute one model together: a data loader {picks}reads "
        "the same samples on these ranks"
    )
    return ContractError(
        f"{where}: {what}: it has to be the same on every rank of {axis}, but {problem}\n  legal: {legal}"
    )


def layout_error(module: str, found: Found, axis: str, said: str) -> ContractError:
    """A tensor lies otherwise than the layout says that the model's code gives with it."""
    return _error(
        f"{place(module)}: dropout over {axis}: the layout that is given says that {found.name} is {said}",
        [found],
        f"a layout that says of {found.name} over {axis} what is found",
    )


def generators_error(module: str, op: str, axis: str, one: int, other: int) -> ContractError:
    """Ranks would draw other numbers for what is the same on all of them."""
    return ContractError(
        f"{place(module)}: {op} over {axis}: it draws for what is the same on every rank, or a part of one sum, but "
        f"ranks {one} and {other} of the axis would draw other numbers: their random generators stand otherwise\n"
        f"  legal: generators that are seeded alike along {axis}, and draw as often: "
        "hyper_parallel.manual_seed(seed, model) on every rank"
    )


def _error(headline: str, found: Sequence[Found], legal: str, *lines: str) -> ContractError:
    shown = [f"  found: {each}" for each in found]
    planned = dict.fromkeys([*lines, *(each.origin for each in found if each.origin)])
    return ContractError("\n".join([headline, *shown, f"  legal: {legal}", *(f"  plan: {line}" for line in planned)]))
