"""Correct plans broken in hundreds of ways: what changes a number is stopped, and the error names the module."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core import errors
from hyper_parallel.core.equivalence.batch import Batch
from hyper_parallel.core.equivalence.harness import against, highest_reference
from hyper_parallel.core.equivalence.report import GradientReport
from hyper_parallel.core.equivalence.steps import Setting
from tests.torch.all_ranks import double_precision
from tests.torch.mutations import Mutation, mutations
from tests.torch.test_hugging_face import FAMILIES, build

BROKEN = ("llama", "qwen3", "mixtral", "gpt2", "phi3", "deepseek_v3")
PLANS = (({"tensor": 2}, True), ({"tensor": 2}, False), ({"shard": 2, "tensor": 2}, True))
EACH = 3
"""Mutations of each kind and family."""


@dataclass(frozen=True)
class Outcome:
    """What became of a broken plan. `stopped` is the error of loading it or of validation, "" where there was none."""

    family: str
    mutation: Mutation
    stopped: str
    report: GradientReport

    @property
    def changes(self) -> bool:
        """Production gives another loss or another gradient than one device, or can't run."""
        losses, bound = self.report.losses, self.report.bound
        if self.report.failed or abs(losses["production"] - losses["one device"]) > bound * losses["one device"]:
            return True
        return any(not each.production.relative <= bound for each in self.report.parameters)

    @property
    def is_named(self) -> bool:
        """The error is one of this library's, and names the module that was broken."""
        kind = getattr(errors, self.stopped.partition(":")[0], None)
        named = rf"(?<![\w.])({re.escape(self.mutation.where)}(?!\w)"
        named += rf"|{re.escape(self.mutation.to)}(?![\w.]))" if self.mutation.to else ")"
        return kind is not None and re.search(named, self.stopped) is not None

    def __str__(self) -> str:
        return f"{self.family}, {self.mutation}\n  stopped by {self.stopped or 'nobody'}\n  {self.report}"


@pytest.fixture(scope="module", autouse=True)
def in_double_precision():
    """Whatever is off by more than 1e-10 has been changed, and is no rounding."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with double_precision():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def correct() -> dict[tuple, tuple]:
    """By family and number of its plan: the plan, what a step needs, the numbers of one device, all mutations."""
    found, torch_backend = {}, backends.load("torch")
    for family in BROKEN:
        model = build(*FAMILIES[family])
        names = [name for name, _ in model.named_modules()]
        tokens = np.random.default_rng(0).integers(1, 96, (2, 6))
        batch = Batch(torch_backend, {"input_ids": tokens, "use_cache": False})
        setting = Setting(lambda model=model: copy.deepcopy(model), batch)
        for number, (sizes, sequence_parallel) in enumerate(PLANS):
            overrides = {"sequence_parallel": sequence_parallel}
            plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes), overrides)
            reference = highest_reference(torch_backend, setting, plan)
            found[family, number] = plan, setting, reference, list(mutations(plan, names))
    return found


@pytest.fixture(scope="module")
def outcomes(correct) -> list[Outcome]:
    """As many of each kind from every family, drawn from all of its plans."""
    draw, found = random.Random(0), []
    for family in BROKEN:
        kinds = defaultdict(list)
        for number in range(len(PLANS)):
            for each in correct[family, number][-1]:
                if number < 2 or each.kind == "another axis":
                    kinds[each.kind].append((number, each))
        for kind in sorted(kinds):
            for number, mutation in draw.sample(kinds[kind], min(EACH, len(kinds[kind]))):
                found.append(outcome(family, mutation, *correct[family, number][1:3]))
    return found


def outcome(family: str, mutation: Mutation, setting: Setting, reference) -> Outcome:
    report = against(backends.load("torch"), setting, mutation.plan, reference)
    try:
        hp.ShardingPlan.from_dict(mutation.plan.to_dict())
    except hp.HyperParallelError as error:
        return Outcome(family, mutation, f"{type(error).__name__}: {error}", report)
    return Outcome(family, mutation, report.refused, report)


def table(outcomes: list[Outcome]) -> str:
    rows = defaultdict(Counter)
    for each in outcomes:
        row = rows[each.mutation.kind]
        row["broken"] += 1
        row["change"] += each.changes
        row["stopped"] += each.changes and bool(each.stopped)
        row["named"] += each.changes and each.is_named
    columns = ("broken", "change", "stopped", "named")
    lines = [f"{'kind':<28}" + "".join(f"{name:>9}" for name in columns)]
    rows["all"] = sum(rows.values(), Counter())
    return "\n".join([*lines, *(f"{k:<28}" + "".join(f"{row[c]:>9}" for c in columns) for k, row in rows.items())])


def test_no_correct_plan_is_refused(correct):
    for plan, setting, reference, _ in correct.values():
        assert hp.ShardingPlan.from_dict(plan.to_dict()) == plan
        report = against(backends.load("torch"), setting, plan, reference)
        assert report.ok, str(report)


def test_what_changes_a_number_is_stopped_and_the_right_module_named(outcomes):
    print(f"\n{table(outcomes)}")
    changed = [each for each in outcomes if each.changes]
    assert len(changed) >= 200
    assert len({each.mutation.kind for each in changed}) == 16
    missed = [each for each in changed if not each.is_named]
    assert len(missed) <= len(changed) / 100, "\n".join(map(str, missed))


def test_the_harness_catches_all_of_it(outcomes):
    assert [str(each) for each in outcomes if each.changes and each.report.ok] == []
