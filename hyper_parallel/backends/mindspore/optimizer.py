"""`hyper_parallel.Muon` as a `mindspore.experimental.optim.Optimizer`, and MindSpore's AdamW inside of it.

Three traps shape this file. The AdamW of `mindspore.mint` changes nothing on a CPU, or has no kernel. That of
`mindspore.experimental` compiles its step: of a learning rate it looks at the tensor again that it was compiled with,
and at no other. It can make no state for a shard without elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, NoReturn, Sequence

import mindspore as ms
from mindspore import ops
from mindspore.experimental import optim

from hyper_parallel.backends.mindspore.tensors import copy_, zero_
from hyper_parallel.core.backend import Parameter, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.muon.face import Planned, refuse_copy

if TYPE_CHECKING:
    from hyper_parallel.core.muon.optimizer import MuonEngine


def own_layout(parameter: Parameter) -> Layout | None:
    """See `core.backend.Optimizing`. MindSpore's tensors do not say of what they are a part."""
    return None


def lies_alike(gradient: Tensor, parameter: Parameter) -> bool:
    """See `core.backend.Optimizing`. MindSpore's gradients lie as their parameters."""
    return True


def laid_alike(gradient: Tensor, parameter: Parameter) -> Tensor:
    """See `core.backend.Optimizing`."""
    return gradient


def local(tensor: Tensor) -> Tensor:
    """See `core.backend.Optimizing`."""
    return tensor


def set_learning_rate(group: dict[str, Any], value: float) -> None:
    """See `core.backend.Optimizing`. A rate that is a tensor stays the one that schedulers know."""
    if isinstance(group["lr"], ms.Tensor):
        ops.assign(group["lr"], ms.Tensor(value, ms.float32))
    else:
        group["lr"] = value


def step_with_none(optimizer: optim.AdamW, gradients: Sequence[Tensor | None]) -> None:
    """One step of MindSpore's AdamW, which takes a gradient for each of its parameters: what is without one gets zeros,
    and then back what it had."""
    kept = [
        (tensor, tensor.copy())
        for number, gradient in enumerate(gradients)
        if gradient is None
        for tensor in (optimizer.parameters[number], optimizer.exp_avg[number], optimizer.exp_avg_sq[number])
    ]
    filled = [
        ops.zeros_like(p) if gradient is None else gradient for gradient, p in zip(gradients, optimizer.parameters)
    ]
    # `mutable`, or the compiled step warns that it takes the gradients for constants.
    optimizer(tuple(map(ms.mutable, filled)))
    for tensor, value in kept:
        ops.assign(tensor, value)


class AdamW:
    """See `core.backend.ElementWise`: `mindspore.experimental.optim.AdamW`. It counts steps for all alike."""

    counts_together = True

    def __init__(self, groups: Sequence[tuple[Sequence[Parameter], Mapping[str, Any]]], foreach: bool | None):
        if foreach:
            raise ConfigError("Muon: foreach=True, but MindSpore has no operators for lists of tensors; leave it out")
        self._numbers: list[int | None] = []  # the place in MindSpore's optimizer; None where there are no elements
        self._groups: list[int] = []
        described, held = [], 0
        for number, (parameters, options) in enumerate(groups):
            filled = [each for each in parameters if each.size]
            for each in parameters:
                self._numbers.append(held if each.size else None)
                held += bool(each.size)
            if filled:
                self._groups.append(number)
                described.append({"params": filled, **options})
        self._optimizer = optim.AdamW(described) if described else None

    def step(self, gradients: Sequence[Tensor | None], options: Sequence[Mapping[str, Any]]) -> None:
        """See `core.backend.ElementWise`."""
        inner = self._optimizer
        if inner is None:
            return
        for place, number in enumerate(self._groups):
            said = dict(options[number])
            ops.assign(inner.lrs[place], ms.Tensor(float(said.pop("lr")), ms.float32))
            inner.param_groups[place].update({**said, "betas": tuple(said["betas"])})
        given = [gradient for gradient, number in zip(gradients, self._numbers, strict=True) if number is not None]
        step_with_none(inner, given)

    def state(self, number: int) -> dict[str, Any]:
        """See `core.backend.ElementWise`."""
        inner, place = self._optimizer, self._numbers[number]
        if place is None:
            return {}
        return {"step": inner.state_step, "exp_avg": inner.exp_avg[place], "exp_avg_sq": inner.exp_avg_sq[place]}

    def load(self, number: int, values: Mapping[str, Any]) -> None:
        """See `core.backend.ElementWise`."""
        state = self.state(number)
        for name in state:
            if name == "step":
                ops.assign(state[name], ms.Tensor(int(values.get(name, 0)), ms.int32))
            elif name in values:
                copy_(state[name], values[name])
            else:
                zero_(state[name])


class Muon(Planned, optim.Optimizer):
    """Muon on matrices and AdamW on all else; made by `hyper_parallel.Muon`, which tells what it does.

    Called with the gradients of its `parameters`, in their order, None where there is none. `param_groups` and
    learning-rate schedulers are MindSpore's.
    """

    def __init__(self, engine: MuonEngine):
        self._engine: MuonEngine | None = None
        super().__init__(engine.groups, {"lr": engine.groups[0]["lr"]})
        self._engine = engine
        self.state.update(zip(map(id, engine.parameters), engine.states()))

    def construct(self, gradients: Sequence[Tensor | None]) -> bool:
        """One step; called by all ranks that share parameters.

        Raises:
            GradientError, LayoutError, ConfigError: as `hyper_parallel.Muon` tells; nothing is changed then.
        """
        self._engine.step(list(gradients), self.param_groups)
        return True

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's state, for the same ranks, groups and plan; MindSpore's arguments for cells have no meaning."""
        if args or kwargs:
            raise ConfigError("Muon: state_dict() takes no arguments; it is the state of an optimizer, not of a cell")
        return self._engine.state_dict(self.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from what `state_dict` gave on this rank, under the same plan.

        Raises:
            CheckpointError: it is of another plan or rank; load `full_state()` with `load_full_state` instead.
        """
        if strict is not True:
            raise ConfigError("Muon: state is loaded whole or not at all; leave out strict=False")
        self._engine.load_state_dict(state_dict, self.param_groups)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        refuse_copy()

    def __reduce__(self) -> NoReturn:
        refuse_copy()


def muon(engine: MuonEngine) -> Muon:
    """See `core.backend.Optimizing`."""
    return Muon(engine)
