"""How the numerical check of the rules sees what MindSpore calls."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

from mindspore import Tensor
from mindspore._c_expression import NoFallbackGuard

from hyper_parallel.backends.mindspore.operators import canonical


class Followed(Tensor):
    """A tensor of which something is remembered. Operators on it are handed to `handler`, and indexing, which MindSpore
    tells nobody of, as well."""

    has_init = False
    handler: Callable | None = None

    def __new__(cls, tensor: Tensor, fact: Any) -> Followed:
        return Tensor._make_subclass(cls, tensor)

    def __init__(self, tensor: Tensor, fact: Any) -> None:
        self.plain, self.fact = tensor, fact

    def __fallback__(self, operator: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return Followed.handler(operator, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return Followed.handler("getitem", (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        Followed.handler("setitem_", (self, index, value), {})

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __bool__(self) -> bool:
        return bool(Followed.handler("read", (self,), {}))


INDEXING = {
    "getitem": lambda tensor, index: tensor[index],
    "setitem_": lambda tensor, index, value: tensor.__setitem__(index, value),
    "read": lambda tensor: tensor,
}


class Tracing:
    """`core.rules.check.Tracing` by a class of tensors."""

    canonical = staticmethod(canonical)

    @contextmanager
    def intercepting(self, handler: Callable) -> Iterator[None]:
        Followed.handler = staticmethod(handler)
        yield

    def run(self, operator: Any, args: tuple, kwargs: dict) -> Any:
        with NoFallbackGuard():
            return INDEXING.get(operator, operator)(*map(plain, args), **kwargs)

    def follow(self, tensor: Tensor, fact: Any) -> Tensor:
        if isinstance(tensor, Followed):  # written in place: everybody who holds it is told
            tensor.fact = fact
            return tensor
        return Followed(tensor, fact)

    def fact(self, tensor: Tensor) -> Any:
        return tensor.fact if isinstance(tensor, Followed) else None


def plain(value: Any) -> Any:
    """The value without what is remembered of the tensors in it."""
    if isinstance(value, Followed):
        return value.plain
    return type(value)(plain(each) for each in value) if type(value) in (tuple, list) else value
