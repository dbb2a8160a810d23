"""What stands in the place of a parameter that is not to be computed with."""

from __future__ import annotations

import copy
from typing import Any, Callable, NoReturn

from mindspore import Parameter, Tensor


def _refused(name: str) -> Callable[..., NoReturn]:
    """A method that MindSpore's interception does not see."""
    return lambda self, *args, **kwargs: vars(self)["_refuse"](name)


class StandIn(Tensor):
    """What it is asked for is told of the parameter; operators, indexing and the reading of values are refused.

    A method of another tensor that is given one is refused by MindSpore itself, which asks the object of a method only.
    """

    has_init = False
    stands_for: Parameter
    _refuse: Callable[[str], NoReturn]

    def __fallback__(self, operator: Any, args: tuple = (), kwargs: dict | None = None) -> NoReturn:
        vars(self)["_refuse"](operator.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)

    def __repr__(self) -> str:
        return f"in the place of {self.stands_for!r}"

    __str__ = __repr__

    def __deepcopy__(self, memo: dict) -> Parameter:
        return copy.deepcopy(self.stands_for, memo)

    __getitem__, __setitem__ = _refused("getitem"), _refused("setitem")
    __bool__, __int__, __float__, __index__ = (_refused(name) for name in ("bool", "int", "float", "index"))
    # With a plain tensor on the left Python asks here first.
    __radd__, __rsub__, __rmul__ = _refused("add"), _refused("sub"), _refused("mul")
    __rtruediv__, __rmatmul__, __rpow__ = _refused("div"), _refused("matmul"), _refused("pow")
    item, tolist, asnumpy, value = (_refused(name) for name in ("item", "tolist", "asnumpy", "value"))
    data = property(_refused("data"))


def stand_in(parameter: Parameter, refuse: Callable[[str], NoReturn]) -> Tensor:
    """See `core.backend.Modules`."""
    made = Tensor._make_subclass(StandIn, parameter)
    vars(made).update(stands_for=parameter, _refuse=refuse)
    return made
