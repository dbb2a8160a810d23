"""For tests of overrides and lint: drafts, what is wrong with them, and the lines that mend them put into the file."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import yaml

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import Draft, make_draft
from hyper_parallel.core.plan.lint import Violation, lint
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.overrides import Overrides
from tests.core.plan.by_hand import stored

Asked = Mapping[str, Any]


def drafted(model: ModelDescription | str, sizes: Mapping[str, int], overrides: Asked | None = None) -> Draft:
    """The draft of a model, or of a stored one by its name."""
    model, mesh = stored(model) if isinstance(model, str) else model, DeviceMesh.from_sizes(sizes)
    return make_draft(model, mesh, Overrides.read(overrides, model, mesh))


def wrong(model: ModelDescription | str, sizes: Mapping[str, int], overrides: Asked | None = None) -> list[Violation]:
    """What lint says of it."""
    return lint(drafted(model, sizes, overrides))


def pasted(overrides: Asked | None, violations: Sequence[Violation]) -> dict[str, Any]:
    """The overrides with the lines of all violations behind them."""
    merged: dict[str, Any] = dict(overrides or {})
    for each in violations:
        if not each.section:
            merged |= yaml.safe_load(each.line)
    for section in ("parameters", "boundaries", "regions"):
        entries = merged.get(section, [])
        if isinstance(entries, Mapping):
            entries = [{"match": pattern, **entry} for pattern, entry in entries.items()]
        lines = [line for each in violations if each.section == section for line in each.line.split("\n") if line]
        added = [{"match": match, **entry} for line in lines for match, entry in yaml.safe_load(line).items()]
        if entries or added:
            merged[section] = [*entries, *added]
    return merged


def mended(model: ModelDescription | str, sizes: Mapping[str, int], overrides: Asked | None = None) -> list[Violation]:
    """The violations, after checking that their lines leave none."""
    found = wrong(model, sizes, overrides)
    assert found and all(each.line for each in found)
    assert wrong(model, sizes, pasted(overrides, found)) == []
    return found
