"""Qualified names without what wraps a module: compilers, checkpointing, data parallelism, adapters."""

from __future__ import annotations

from typing import NamedTuple

from hyper_parallel.core.plan.role_rules import ADAPTERS, INSIDE, LEAVES, NAMED_WRAPPERS, WRAPPERS


class Name(NamedTuple):
    """A parameter's name, taken apart.

    `path` are the segments of its module and `leaf` its own name, both as if nothing were wrapped: the weight of
    `layers.0._orig_mod.mlp.up_proj.base_layer` is `("layers", "0", "mlp", "up_proj")`, "weight". `adapter` is "" or the
    part that the parameter has in a low-rank adapter around the module `path`: "in", "out", or what can't be planned.
    `raw` are all segments, and `ends[i]` is the place of `path[i]` among them.
    """

    raw: tuple[str, ...]
    path: tuple[str, ...]
    ends: tuple[int, ...]
    leaf: str
    adapter: str = ""

    def module(self, depth: int) -> str:
        """The qualified name, as the model has it, of the module `path[:depth]`, wrappers around it included."""
        return ".".join(self.raw[: self.ends[depth - 1] + 1]) if depth else ""

    def inner(self, depth: int) -> str:
        """The qualified name of what lies innermost in the wrappers of `path[:depth]`; its class is what counts."""
        if depth < len(self.path):
            return ".".join(self.raw[: self.ends[depth]])
        return self.module(depth) if self.adapter else ".".join(self.raw[:-1])


def acts_in(name: Name) -> tuple[str, ...]:
    """The logical path of the module that a parameter works in with others: that around its linear, or its own where it
    stands bare; not a helper whose parameters act in the module around it."""
    depth = len(name.path) - (name.leaf in ("weight", "bias"))
    while depth > 1 and name.path[depth - 1] in INSIDE:
        depth -= 1
    return name.path[:depth]


def block_of(module: str) -> str:
    """The repeated block that a module is or stands in: the outermost list element on its path, else "". Experts in a
    list, each called for its own tokens and perhaps not at all, are no blocks, nor is what stands in them."""
    segments = module.split(".")
    for index, segment in enumerate(segments):
        if segment == "experts":
            break
        if segment.isdigit():
            return ".".join(segments[: index + 1])
    return ""


def block_around(name: str) -> str:
    """The repeated block that a parameter stands in, else ""."""
    return block_of(name.rpartition(".")[0])


_SPECIAL = WRAPPERS | NAMED_WRAPPERS | ADAPTERS.keys()


def parse(name: str) -> Name:
    """Take a parameter's qualified name apart."""
    raw = tuple(name.split("."))
    if _SPECIAL.isdisjoint(raw):
        return Name(raw, raw[:-1], tuple(range(len(raw) - 1)), LEAVES.get(raw[-1], raw[-1]))
    path: list[str] = []
    ends: list[int] = []
    skip = False
    for index, segment in enumerate(raw):
        if segment in ADAPTERS:
            leaf = "bias" if raw[-1] == "bias" else "weight"
            return Name(raw, tuple(path), tuple(ends), leaf, ADAPTERS[segment])
        if index == len(raw) - 1:
            break
        if skip or segment in WRAPPERS:
            skip = False
        elif segment in NAMED_WRAPPERS:
            skip = True
        else:
            path.append(segment)
            ends.append(index)
    return Name(raw, tuple(path), tuple(ends), LEAVES.get(raw[-1], raw[-1]))
