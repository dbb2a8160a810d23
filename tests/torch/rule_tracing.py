"""How the numerical check of the rules sees what PyTorch calls."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode

from hyper_parallel.backends.torch.operators import canonical


class Tracing:
    """`core.rules.check.Tracing` by a mode that sees every function, and by the identity of tensors."""

    canonical = staticmethod(canonical)

    def __init__(self) -> None:
        self._facts: dict[int, tuple[torch.Tensor, Any]] = {}  # with the tensor, so that its id stays its own

    def intercepting(self, handler: Callable) -> TorchFunctionMode:
        self._facts.clear()
        return _Mode(handler)

    def run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        return function(*args, **kwargs)

    def follow(self, tensor: torch.Tensor, fact: Any) -> torch.Tensor:
        self._facts[id(tensor)] = (tensor, fact)
        return tensor

    def fact(self, tensor: torch.Tensor) -> Any:
        return self._facts.get(id(tensor), (None, None))[1]


class _Mode(TorchFunctionMode):
    def __init__(self, handler: Callable) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self._handler(function, args, kwargs or {})
