"""What pass 1 says of each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping


@dataclass(frozen=True)
class Assignment:
    """The role of one parameter, and what its dims mean.

    Attributes:
        name: the parameter, or a further name of a tied one.
        role: a key of `ROLES`.
        rule: which rule or refinement decided, and on what evidence, in words.
        output_dim: the dim over output features, heads or the vocabulary of a head. None for norms over the hidden
            states and for the tables of embeddings.
        input_dim: the dim over input features. None for biases, norms and embeddings.
        vocab_dim: the dim over the vocabulary, of an embedding and of a head.
        expert_dim: the dim over experts of a tensor that packs them.
        expert: the index of the one expert that the parameter belongs to, where experts are modules in a list.
        packing: sizes of the blocks that lie end to end along `output_dim`: (queries, keys, values) or (gate, up).
            Empty: one block.
        interleaved: so many kinds of output features alternate one by one along `output_dim`.
        heads: heads along `output_dim`, or along `input_dim` for an attention output: query heads, for keys and values
            key/value heads, for a grouped fused projection the groups that can be cut apart. None where there are none
            or nothing tells how many: then it must not be cut.
        packed_heads: heads in each block of a fused projection that is packed end to end.
        sliced: its module's code needs all of the blocks, and takes them apart where the configuration says.
    """

    name: str
    role: str
    rule: str
    output_dim: int | None = None
    input_dim: int | None = None
    vocab_dim: int | None = None
    expert_dim: int | None = None
    expert: int | None = None
    packing: tuple[int, ...] = ()
    interleaved: int = 1
    heads: int | None = None
    packed_heads: tuple[int, ...] = ()
    sliced: bool = False


@dataclass(frozen=True)
class RoleResult:
    """Pass 1 of a model. Every name of every parameter, tied ones included, is in exactly one of the first two.

    `unknown` maps a name to what was tried, a sentence each. `hidden` is the width of hidden states that shapes were
    held against, 0 where nothing tells it.
    """

    assignments: Mapping[str, Assignment]
    unknown: Mapping[str, list[str]]
    hidden: int = 0
