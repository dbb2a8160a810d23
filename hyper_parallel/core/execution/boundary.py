"""What happens around a module's forward: its arguments are brought in, its output is handed on."""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator, Mapping, Protocol, Sequence

from hyper_parallel.core.backend import Backend, Module, Tensor, Tensors
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.hooks import Handles

Change = Callable[[Tensor], Tensor]
"""One tensor for another."""

ChangeArguments = Callable[[tuple, dict], tuple[tuple, dict]]
"""Positional and named arguments for others."""


class Region(Protocol):
    """What a module's computation spreads over ranks by itself: it communicates between its two ends."""

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of the module's own code on this rank, from those of its call."""

    def leave(self, output: Tensor) -> Tensor:
        """The result of the call, from what the module's own code has made on this rank."""


class Boundary:
    """The changes around one module, in order; `attach` hooks them. Inside, only the module's own code runs.

    `arguments` change all arguments; then `inputs` change the tensors that the module takes in, each with its name and
    its number among them, those that nothing changes counted; `outputs` change the tensor that it gives. A `region`
    stands closest to the module.
    """

    def __init__(self, backend: Backend, name: str, module: Module):
        self.name = name
        self.module = module
        self.arguments: list[ChangeArguments] = []
        self.inputs: list[tuple[int, str, Change]] = []
        self.outputs: list[Change] = []
        self.region: Region | None = None
        self._backend = backend
        self._found: dict[int, int | str] = {}

    def attach(self) -> Handles:
        """Hook the module, if there is anything to do around it."""
        if not (self.arguments or self.inputs or self.outputs or self.region):
            return Handles()
        return Handles(self._backend.modules.around_forward(self.module, self.enter, self.leave))

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments as the module's code wants them.

        Raises:
            ContractError: there is no tensor for a contract.
        """
        args, kwargs = self.bring_in(args, kwargs)
        return (args, kwargs) if self.region is None else self.region.enter(args, kwargs)

    def bring_in(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments as the module's region wants them, or its code where it has none."""
        for change in self.arguments:
            args, kwargs = change(args, kwargs)
        for number, name, change in self.inputs:
            place = self._place(number, name, args, kwargs)
            if isinstance(place, int):
                args = (*args[:place], change(args[place]), *args[place + 1 :])
            else:
                kwargs = {**kwargs, place: change(kwargs[place])}
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """The output as what follows wants it.

        Raises:
            ContractError: there is no tensor in it.
        """
        changes = self.outputs if self.region is None else (self.region.leave, *self.outputs)
        return with_first_tensor(self._backend.tensors, output, changes, f"the output of {self.name}")

    def _place(self, number: int, name: str, args: tuple, kwargs: dict) -> int | str:
        """Where the tensor of a contract is among the arguments: where it was last time, if one is there."""
        place = self._found.get(number)
        is_tensor = self._backend.tensors.is_tensor
        if isinstance(place, int) and place < len(args) and is_tensor(args[place]):
            return place
        if isinstance(place, str) and is_tensor(kwargs.get(place)):
            return place
        self._found[number] = place = self._find(number, name, args, kwargs)
        return place

    def _find(self, number: int, name: str, args: tuple, kwargs: dict) -> int | str:
        """An argument of the contract's name; else, counted by contracts, what holds numbers and no indices."""
        if self._holds_numbers(kwargs.get(name)):
            return name
        places = [place for place, value in enumerate(args) if self._holds_numbers(value)]
        places += [key for key in _HIDDEN if self._holds_numbers(kwargs.get(key))]
        places += [key for key, value in kwargs.items() if key not in _HIDDEN and self._holds_numbers(value)]
        if number < len(places):
            return places[number]
        raise ContractError(
            f"{self.name} was called without a floating-point tensor for {name!r}, found "
            f"{[type(value).__name__ for value in args]} and {sorted(kwargs)}"
        )

    def _holds_numbers(self, value: Any) -> bool:
        tensors = self._backend.tensors
        return tensors.is_tensor(value) and "float" in tensors.dtype_name(value)


_HIDDEN = ("hidden_states", "x", "input", "inputs")
"""What hidden states are called when they are passed by name."""


def with_first_tensor(tensors: Tensors, output: Any, changes: Sequence[Change], where: str) -> Any:
    """`output` with its first tensor changed, whatever tuple, list or mapping holds it; nothing else is touched."""
    if not changes:
        return output
    if tensors.is_tensor(output):
        for change in changes:
            output = change(output)
        return output
    for key, value in _items(output):
        if tensors.is_tensor(value):
            for change in changes:
                value = change(value)
            return _replaced(output, key, value)
    raise ContractError(f"{where} is {type(output).__name__} and holds no tensor that the plan could speak of")


def _items(output: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, (tuple, list)):
        yield from enumerate(output)


def _replaced(output: Any, key: Any, value: Tensor) -> Any:
    if isinstance(output, Mapping):
        output = copy.copy(output)
        output[key] = value
        return output
    items = [*output[:key], value, *output[key + 1 :]]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
