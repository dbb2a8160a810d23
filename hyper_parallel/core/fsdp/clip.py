"""Clipping by the global norm, every element counted once."""

from __future__ import annotations

from math import sqrt
from typing import Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Group, Module, Parameter, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.peers import gathered


def clip_grad_norm_(
    backend: Backend,
    model: Module,
    parameters: Sequence[Parameter],
    gradients: Sequence[Tensor | None],
    max_norm: float,
) -> float:
    """Scale `gradients` in place so that their global 2-norm is at most `max_norm`; returns the norm before.

    See `hyper_parallel.clip_grad_norm_`.
    """
    if len(parameters) != len(gradients):
        raise ConfigError(f"clip_grad_norm_: {len(gradients)} gradients for {len(parameters)} trainable parameters")
    if not max_norm >= 0:
        raise ConfigError(f"clip_grad_norm_: max_norm is {max_norm}; it must be zero or more")
    split_over = {
        id(each.parameter): backend.collectives.groups(each.layout.mesh.groups(each.layout.cut_axes))
        for unit in units_of(backend, model)
        for each in unit.parameters
        if each.layout.cut_axes
    }
    by_group: dict[tuple[int, ...], tuple[Group, list[Tensor]]] = {}
    whole: list[Tensor] = []
    for parameter, gradient in zip(parameters, gradients):
        group = split_over.get(id(parameter))
        if group is not None:
            by_group.setdefault(group.ranks, (group, []))
        if gradient is not None:
            (whole if group is None else by_group[group.ranks][1]).append(gradient)
    total = backend.tensors.squared_norm(whole)
    for group, pieces in by_group.values():
        total += _sum(backend, backend.tensors.squared_norm(pieces), group)
    norm = sqrt(total)
    factor = max_norm / (norm + 1e-6)  # the guard of the frameworks' own clipping
    if not factor >= 1.0:  # also when the norm is not a number: then so are the gradients
        for gradient in gradients:
            if gradient is not None:
                backend.tensors.scale_(gradient, factor)
    return norm


def _sum(backend: Backend, value: float, group: Group) -> float:
    """The sum over a group, in rank order. A square of what float32 holds need not be one that it holds, and not every
    device adds up float64: so its bytes travel."""
    bits = np.array([value], dtype=np.float64).view(np.int64)
    return float(gathered(backend, bits, group).view(np.float64).sum())
