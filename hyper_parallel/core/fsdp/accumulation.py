"""Gradients that a unit keeps while it accumulates, until a later backward reduces them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.backend import Tensor, Tensors

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.parameter import ShardedParameter


class Kept:
    """Sums over earlier backwards: full gradients of this rank's own samples, and shards summed over the fast tier."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._full: dict[ShardedParameter, Tensor] = {}
        self._pieces: dict[ShardedParameter, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._full or self._pieces)

    def __contains__(self, parameter: ShardedParameter) -> bool:
        return parameter in self._full or parameter in self._pieces

    def add_full(self, parameter: ShardedParameter, gradient: Tensor | None) -> None:
        """Add what autograd has given for a parameter, in the dtype that it is reduced in: copied at first, since it
        may belong to others as well."""
        if gradient is None:
            return
        flat = self._tensors.flat(gradient)
        if parameter in self._full:
            self._tensors.add_(self._full[parameter], flat)
        else:
            self._full[parameter] = self._tensors.empty((parameter.spec.numel,), parameter.reduced_dtype)
            self._tensors.copy_(self._full[parameter], flat)

    def take_full(self, parameter: ShardedParameter, gradient: Tensor | None) -> Tensor | None:
        """The sum of what is kept and `gradient`, of the full shape; nothing is kept of it then."""
        kept = self._full.pop(parameter, None)
        if kept is None:
            return gradient
        if gradient is not None:
            self._tensors.add_(kept, self._tensors.flat(gradient))
        return self._tensors.alias(kept, 0, parameter.spec.shape)

    def add_piece(self, parameter: ShardedParameter, piece: Tensor) -> None:
        """Add a flat piece, which belongs to this object from now on."""
        if parameter in self._pieces:
            self._tensors.add_(self._pieces[parameter], piece)
        else:
            self._pieces[parameter] = piece

    def take_piece(self, parameter: ShardedParameter) -> Tensor | None:
        """The flat piece that is kept, if any; nothing is kept of it then."""
        return self._pieces.pop(parameter, None)

    def forget(self) -> None:
        """Drop everything."""
        self._full.clear()
        self._pieces.clear()
