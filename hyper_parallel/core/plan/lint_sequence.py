"""Rules of lint on sequence parallelism: of every module it must be known whether it sees all tokens or a part of them.

What is called between blocks without standing in one, what mixes tokens in a way that nobody knows, what is no function
from hidden states to hidden states: with a part of the tokens on each rank these would be wrong without a word. Each
finding is mended by `sequence_parallel: false`, with which every rank has all tokens everywhere.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Iterator, Mapping

from hyper_parallel.core.plan.blocks import same_blocks
from hyper_parallel.core.plan.forms import matches
from hyper_parallel.core.plan.names import block_of
from hyper_parallel.core.plan.placing import BY_TOKEN
from hyper_parallel.core.plan.role_rules import LIST_CLASSES, OTHER_ATTENTION, OTHER_ATTENTION_CLASSES, PRELUDES
from hyper_parallel.core.plan.violations import Finding
from hyper_parallel.core.plan.whole import Place, above

if TYPE_CHECKING:
    from hyper_parallel.core.plan.derive import Draft

_IN_BLOCKS = ("attention", "mlp", "up", "down", "moe", "experts", "mixer", "router")
"""Types of boundaries that work inside of blocks."""


def lint_sequence(draft: Draft, places: Mapping[str, Place]) -> Iterator[Finding]:
    """One finding of each kind. `places` are those of whole parameters, and of unknown ones that may become so."""
    if not draft.blocks.first:
        return
    for rule in (_lists, _containers, _twice, _outside, _norms_outside):
        yield from rule(draft)
    yield from _whole(draft, places)


def _told(where: str, message: str) -> Finding:
    return Finding("sequence", where, message, "sequence_parallel", "false", "")


def _lists(draft: Draft) -> Iterator[Finding]:
    lists = draft.blocks.lists
    if len(lists) > 1:
        message = f"blocks stand in {len(lists)} lists, {' and '.join(lists)}, and nothing tells which comes first"
        yield _told(lists[1], message)


def _containers(draft: Draft) -> Iterator[Finding]:
    """A container is never called, so nothing can be done when it is."""
    for block in dict.fromkeys((draft.blocks.first, draft.blocks.last)):
        kind = draft.model.modules.get(block, "")
        if kind in LIST_CLASSES:
            yield _told(block, f"is a {kind}, which is never called, and the sequence is to be cut when it is")
            return


def _twice(draft: Draft) -> Iterator[Finding]:
    """A module that stands in its list twice does the same in both places."""
    edges = (draft.blocks.first, draft.blocks.last)
    for block, other in same_blocks(draft.model).items():
        here, there = ([each == edge for edge in edges] for each in (block, other))
        if here != there:
            message = f"is one module with {other}, as both hold the same parameters, and one of them only is the {{}}"
            yield _told(block, message.format("first block" if here[0] != there[0] else "last block"))
            return


def _outside(draft: Draft) -> Iterator[Finding]:
    for each in draft.groups:
        if draft.kinds[each.module] in _IN_BLOCKS and not draft.blocks.contain(each.module):
            message = (
                f"is {draft.kinds[each.module]} outside of the blocks in {draft.blocks.lists[0]}, and nothing tells "
                "whether it is called between them"
            )
            yield _told(each.module, message)
            return


def _norms_outside(draft: Draft) -> Iterator[Finding]:
    """One norm stands behind the blocks, others where embeddings are made."""
    norms = [
        each.module
        for each in draft.groups
        if draft.kinds[each.module] == "norm"
        and not draft.blocks.contain(each.module)
        and PRELUDES.isdisjoint(each.module.split("."))
    ]
    if len(norms) > 1:
        yield _told(norms[0], f"and {norms[1]} are norms outside of the blocks, and nothing tells which stands behind")


def _whole(draft: Draft, places: Mapping[str, Place]) -> Iterator[Finding]:
    told: set[str] = set()
    for name, place in places.items():
        message = _why_not(draft, name, place)
        if message and message not in told:
            told.add(message)
            yield _told(name, message)


def _why_not(draft: Draft, name: str, place: Place) -> str:
    """Why a parameter that is kept whole may not go with parts of the sequence; "" where it may."""
    if not draft.blocks.contain(name):
        if _vocabularies(draft) & set(draft.shapes[name]):
            return ""  # a table or a head
        return "is whole outside of the blocks, and nothing tells whether they use it, each rank on its tokens"
    modules = draft.model.modules
    for module in above(name):
        if module.rpartition(".")[2] in OTHER_ATTENTION or matches(modules.get(module, ""), OTHER_ATTENTION_CLASSES):
            return "stands in attention to other tokens, which nothing tells to be cut or whole"
    if place.module == block_of(name):
        return ""
    if (place.inside or place.module) and _may_be_handed_out(draft, name, place):
        size = draft.blocks.streams.hidden
        return (
            f"has the hidden size {size} in dim {draft.shapes[name].index(size)} and stands bare in a module that has "
            "all tokens, and nothing tells whether that hands it to what has a part of them; `pending: none` says that "
            "it does not, and `pending: [tensor]` that it does"
        )
    if place.inside:
        return ""
    if not place.module:
        many = sum(size > 1 for size in draft.shapes[name]) > 1
        return "stands bare in a block, and may have one row for each of all tokens" if many else ""
    if _is_leaf(draft, place.module) and len(draft.shapes[name]) > 1:
        return "is computed with alone in a block, and nothing tells whether tokens are mixed behind it"
    return ""


def _may_be_handed_out(draft: Draft, name: str, place: Place) -> bool:
    """Tell whether a module that gathers the tokens may give a parameter itself to what is around it, as those do that
    leave the adding of a bias to others: not what linears and other modules without parts hold for their own use."""
    owner, _, leaf = name.rpartition(".")
    hidden, shape = draft.blocks.streams.hidden, draft.shapes[name]
    if hidden not in shape or prod(shape) != hidden or draft.overrides.pending(name) is not None:
        return False
    if draft.kinds.get(place.inside) in BY_TOKEN:
        return False
    if not _is_leaf(draft, owner):
        return True
    return owner == place.module and leaf not in ("weight", "bias")


def _vocabularies(draft: Draft) -> set[int]:
    """The sizes of the vocabularies of tables and heads."""
    known = draft.roles.assignments.items()
    return {draft.shapes[name][each.vocab_dim] for name, each in known if each.vocab_dim is not None}


def _is_leaf(draft: Draft, module: str) -> bool:
    return not any(each.startswith(f"{module}.") for each in draft.model.modules)
