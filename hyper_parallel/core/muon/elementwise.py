"""The framework's AdamW on what Muon does not have, with float32 copies of half-precision parameters if asked for."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from hyper_parallel.core.backend import Backend, Parameter, Tensor
from hyper_parallel.core.muon.groups import Request
from hyper_parallel.core.muon.options import ADAMW, OPTIONS

HALF = ("bfloat16", "float16")


class ElementWisePart:
    """AdamW over the groups that ask for it. Where it works on a float32 copy the parameter gets what that is."""

    def __init__(self, backend: Backend, request: Request, master_dtype: str | None, foreach: bool | None):
        self._backend = backend
        self._groups = [number for number, each in enumerate(request.groups) if each.algorithm == ADAMW]
        self.members: list[int] = []
        """The number of each of its parameters among all."""
        self._parameters: list[Parameter] = []
        self._masters: list[Parameter | None] = []
        described, counted = [], 0
        for group in request.groups:
            numbers = range(counted, counted + len(group.members))
            counted += len(group.members)
            if group.algorithm != ADAMW:
                continue
            held = [each.parameter for each in group.members]
            masters = [self._master(each, master_dtype) for each in held]
            self.members += numbers
            self._parameters += held
            self._masters += masters
            worked_on = [each if master is None else master for each, master in zip(held, masters)]
            described.append((worked_on, _options(group.options)))
        self._place = {member: place for place, member in enumerate(self.members)}
        self._steps = [0] * len(self.members)
        self._taken = [False] * len(self.members)
        filled = any(parameters for parameters, _ in described)
        self._adamw = backend.optimizer.AdamW(described, foreach) if filled else None

    @property
    def counts_together(self) -> bool:
        """Tell whether the framework counts the steps of all parameters alike."""
        return self._backend.optimizer.AdamW.counts_together

    def start(self) -> None:
        """Take the copies that are not there yet."""
        for place, (parameter, master) in enumerate(zip(self._parameters, self._masters)):
            if master is not None and not self._taken[place]:
                self._copy(master, parameter)
                self._taken[place] = True

    def step(self, gradients: Sequence[Tensor | None], groups: Sequence[Mapping[str, Any]]) -> None:
        """One step with the gradients of all parameters, Muon's too, and the options that all groups have now."""
        if self._adamw is None:
            return
        own = [self._fitting(gradients[member], master) for member, master in zip(self.members, self._masters)]
        self._adamw.step(own, [_options(groups[number]) for number in self._groups])
        together = self.counts_together
        for place, (parameter, master) in enumerate(zip(self._parameters, self._masters)):
            self._steps[place] += together or own[place] is not None
            if master is not None:
                self._copy(parameter, master)

    def state(self, member: int) -> dict[str, Any]:
        """What AdamW keeps of a parameter: "step", "exp_avg" and "exp_avg_sq"; empty where there is nothing yet."""
        return self._adamw.state(self._place[member])

    def steps(self, member: int) -> int:
        """How many steps AdamW has taken on a parameter."""
        return self._steps[self._place[member]]

    def load(self, member: int, values: Mapping[str, Any]) -> None:
        """Overwrite what AdamW keeps, from tensors of the local shape and "step"; what is not there is as before a
        step."""
        self._adamw.load(self._place[member], values)
        self._steps[self._place[member]] = int(values.get("step", 0))

    def master(self, member: int) -> Tensor | None:
        """This rank's part of the float32 copy of a parameter, if there is one."""
        master = self._masters[self._place[member]]
        return None if master is None else self._backend.optimizer.local(master)

    def load_master(self, member: int, values: Tensor | None) -> None:
        """Overwrite it, or have it taken from the parameter anew."""
        master, self._taken[self._place[member]] = self.master(member), values is not None
        if master is not None and values is not None:
            self._backend.tensors.copy_(master, values)

    def _fitting(self, gradient: Tensor | None, master: Parameter | None) -> Tensor | None:
        """A gradient in the dtype of what is worked on."""
        if gradient is None or master is None:
            return gradient
        return self._backend.autograd.cast(gradient, self._backend.tensors.dtype_name(master))

    def _master(self, parameter: Parameter, dtype: str | None) -> Parameter | None:
        tensors, autograd = self._backend.tensors, self._backend.autograd
        if dtype is None or tensors.dtype_name(parameter) not in HALF:
            return None
        with autograd.no_grad():
            return autograd.as_leaf(autograd.cast(parameter, dtype), parameter)

    def _copy(self, target: Parameter, source: Parameter) -> None:
        local = self._backend.optimizer.local
        self._backend.tensors.copy_(local(target), local(source))


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in OPTIONS[ADAMW]}
