"""How a unit computes, reduces and keeps its parameters: dtypes, and where shards live."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hyper_parallel.core.errors import ConfigError

FLOATING = ("bfloat16", "float16", "float32", "float64")

Dtype = Any
"""A name such as "bfloat16", or the dtype of a framework that is called so: `torch.bfloat16`, `mindspore.bfloat16`."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit, as PyTorch's FSDP2 names them. Shards, and so optimizers, keep the dtype of the parameter.

    Args:
        param_dtype: what full parameters are gathered in, and computed with; by default that of the parameter.
            Parameters that are not floating keep theirs.
        reduce_dtype: what gradients are reduced in, and kept in while they accumulate; by default that of the full
            parameter. They are handed over in the dtype of the parameter.
        output_dtype: what the floating tensors that a unit's module returns are cast to; by default they stay.
        cast_forward_inputs: cast the floating tensors that the module is given to `param_dtype`.

    Dtypes are names, such as "bfloat16", or those of either framework; kept as names.

    Raises:
        ConfigError: what is no floating dtype.
    """

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for each in fields(self)[:3]:
            object.__setattr__(self, each.name, _dtype_name(each.name, getattr(self, each.name)))
        if not isinstance(self.cast_forward_inputs, bool):
            raise ConfigError(
                f"MixedPrecisionPolicy: cast_forward_inputs is {self.cast_forward_inputs!r}; write True or False"
            )

    def full_dtype(self, dtype: str) -> str:
        """The dtype of the full parameter, where the shard has `dtype`."""
        return self.param_dtype if self.param_dtype and dtype in FLOATING else dtype

    def reduced_dtype(self, dtype: str) -> str:
        """The dtype in which its gradient is reduced."""
        return self.reduce_dtype if self.reduce_dtype and dtype in FLOATING else self.full_dtype(dtype)

    @property
    def input_dtype(self) -> str | None:
        """What is made of floating inputs; None where they stay."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards and their gradients live on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and their gradients live on the host, where the optimizer runs: shards are copied to the device for each
    gather, and gradients back when they are reduced.

    Args:
        pin_memory: keep them in memory that the device can reach by itself, where there is one.
    """

    pin_memory: bool = True


def precision_of(value: Any) -> MixedPrecisionPolicy:
    """A policy as a user has given it: None, one of ours, or another that has the same fields, as PyTorch's.

    Raises:
        ConfigError: it is none.
    """
    if value is None or isinstance(value, MixedPrecisionPolicy):
        return value or MixedPrecisionPolicy()
    names = [each.name for each in fields(MixedPrecisionPolicy)]
    if not all(hasattr(value, name) for name in names):
        raise ConfigError(f"mp_policy is {value!r}; write a hyper_parallel.MixedPrecisionPolicy")
    return MixedPrecisionPolicy(**{name: getattr(value, name) for name in names})


def offload_of(value: Any) -> OffloadPolicy:
    """Likewise, a policy that tells where shards live."""
    if value is None or isinstance(value, OffloadPolicy):
        return value or OffloadPolicy()
    if hasattr(value, "pin_memory"):
        return CPUOffloadPolicy(value.pin_memory)
    if type(value).__name__ != "OffloadPolicy":
        raise ConfigError(f"offload_policy is {value!r}; write a hyper_parallel.CPUOffloadPolicy")
    return OffloadPolicy()


def _dtype_name(field: str, value: Dtype | None) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        name = value
    elif isinstance(value, (np.dtype, type)):
        name = np.dtype(value).name
    else:
        name = str(value).rpartition(".")[2].lower()  # "torch.bfloat16", "BFloat16"
    if name not in FLOATING:
        raise ConfigError(f"MixedPrecisionPolicy: {field} is {value!r}; write one of {', '.join(FLOATING)}")
    return name
