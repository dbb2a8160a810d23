"""What stands in the place of a parameter that is not to be computed with."""

from __future__ import annotations

import copy
from typing import Any, Callable, NoReturn

import torch
from torch.utils._pytree import tree_leaves

_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "nbytes")
    + ("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize")
    + ("retains_grad", "_version", "_backward_hooks", "_post_accumulate_grad_hooks")
} | {
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__")
    + ("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "__hash__")
}
_FACTS |= {torch.numel, torch.is_floating_point, torch.is_complex}
_FACTS |= {  # new tensors of its dtype, on its device
    getattr(torch.Tensor, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
}
_CONVERSIONS = {torch.Tensor.type_as, torch.Tensor.to}  # of a tensor to what another one is


class StandIn(torch.Tensor):
    """It has no memory. What it is asked for is told of the parameter; operators are refused."""

    _is_param = True  # for isinstance(..., torch.nn.Parameter)
    stands_for: torch.Tensor
    _refuse: Callable[[str], NoReturn]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        asked = isinstance(args[0], StandIn)
        if func in _FACTS and asked:
            return func(args[0].stands_for, *args[1:], **(kwargs or {}))
        if func in _CONVERSIONS and not asked:
            return func(args[0], *(_stood_for(each) for each in args[1:]), **(kwargs or {}))
        return _refuse(getattr(func, "__name__", str(func)), args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _refuse(str(func), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.stands_for, memo)

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.stands_for.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"in the place of {self.stands_for!r}"


def stand_in(parameter: torch.Tensor, refuse: Callable[[str], NoReturn]) -> torch.Tensor:
    """See `core.backend.Modules`."""
    made = torch.Tensor._make_wrapper_subclass(
        StandIn, parameter.shape, dtype=parameter.dtype, device=parameter.device, requires_grad=parameter.requires_grad
    )
    vars(made).update(stands_for=parameter, _refuse=refuse)
    return made


def _stood_for(given: Any) -> Any:
    return given.stands_for if isinstance(given, StandIn) else given


def _refuse(operator: str, args: tuple, kwargs: dict | None) -> NoReturn:
    given = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, StandIn))
    vars(given)["_refuse"](operator)
    raise AssertionError("refuse has returned")
