"""Rules of lint on how a model's code uses what is cut, where no module tells: tables as heads, slices of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator

from hyper_parallel.core.plan.architectures import SLICED_WEIGHTS
from hyper_parallel.core.plan.forms import matches
from hyper_parallel.core.plan.names import block_of
from hyper_parallel.core.plan.role_rules import BASE_MODELS, EMBEDDING_CLASSES, LANGUAGE_MODELS, LOGITS
from hyper_parallel.core.plan.violations import Finding

if TYPE_CHECKING:
    from hyper_parallel.core.plan.derive import Draft

_LOGITS = frozenset(LOGITS.split("|"))


def lint_uses(draft: Draft) -> Iterator[Finding]:
    """Every rule on the use of what is cut."""
    if not _has_no_head_by_its_class(draft):
        yield from _tables(draft)
    yield from _slices(draft)


def notes_on_tables(draft: Draft) -> Iterator[str]:
    """What to know of a table that is cut in a model that ends with hidden states."""
    if _has_no_head_by_its_class(draft):
        yield from (
            f"{name} is cut over the vocabulary, and {draft.model.class_name} has no head: who uses the table as one, "
            "outside of its modules, keeps it whole with placements: none"
            for name in _cut_without_head(draft)
        )


def _tables(draft: Draft) -> Iterator[Finding]:
    for name in _cut_without_head(draft):
        size = draft.shapes[name][0]
        message = (
            f"tensor cuts its {size} tokens, and no module of {draft.model.class_name} gives logits; code that "
            "multiplies hidden states by this table would give a part of them, and nobody would sum up their gradient"
        )
        yield Finding("head", name, message, name, "{placements: none}", because=draft.roles.assignments[name].rule)


def _cut_without_head(draft: Draft) -> list[str]:
    """Tables of tokens that `tensor` cuts, where nothing in the model has a row for each token to give logits with."""
    tables = [name for name, each in draft.members.items() if each.assignment.role == "embedding" and each.is_cut]
    sizes = {draft.shapes[name][0] for name in tables}
    owners = {each.name: each.module_class for each in draft.model.parameters}
    for name in (*draft.members, *draft.roles.unknown):
        is_table = name in tables or matches(owners.get(name, ""), EMBEDDING_CLASSES)
        if not is_table and (sizes & set(draft.shapes[name]) or _is_a_head_by_name(name)):
            return []
    return tables


def _is_a_head_by_name(name: str) -> bool:
    return not block_of(name) and not _LOGITS.isdisjoint(name.split("."))


def _has_no_head_by_its_class(draft: Draft) -> bool:
    """Tell whether the model is one of Hugging Face's without logits: these give them by modules only."""
    name = draft.model.class_name
    return "model_type" in draft.model.config and matches(name, BASE_MODELS) and not matches(name, LANGUAGE_MODELS)


def _slices(draft: Draft) -> Iterator[Finding]:
    """Code that takes a weight apart itself needs all of it, and does not call the linear that a boundary is around."""
    config = draft.model.config
    for each in SLICED_WEIGHTS:
        if not all(config.get(key) for key in each.keys) or config[each.keys[0]] == 1:
            continue
        for group in (group for group in draft.groups if group.class_name in each.classes):
            told = " and ".join(f"{key}={str(config[key]).lower()}" for key in each.keys)
            message = (
                f"the configuration has {told}, with which {group.class_name} slices the weight of its last linear"
            )
            if any(draft.members[name].is_cut for name in group.parameters):
                line = f"{group.module}.**", "{placements: {tensor: replicate}}"
                yield Finding("configuration", group.module, f"{message}, which tensor cuts", *line)
            if draft.blocks.first:
                wanted = f"{message}, and so no module is called behind which tokens could be dealt out"
                yield Finding("configuration", group.module, wanted, "sequence_parallel", "false", "")
