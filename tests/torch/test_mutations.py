"""Correct plans broken in hundreds of ways: what changes a number is stopped, and the error names the module."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Iterator, NamedTuple

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core import errors
from hyper_parallel.core.equivalence.batch import Batch
from hyper_parallel.core.equivalence.harness import against, highest_reference
from hyper_parallel.core.equivalence.report import GradientReport
from hyper_parallel.core.equivalence.steps import Reference, Setting
from tests.torch.all_ranks import double_precision
from tests.torch.mutations import Breaker, Mutation
from tests.torch.test_hugging_face import FAMILIES, build

BROKEN = ("llama", "qwen3", "mixtral", "gpt2", "phi3", "deepseek_v3")
TENSOR = {"tensor": 2}
BOTH = {"shard": 2, "tensor": 2}
EXPERTS = {"expert": 2, "tensor": 2}
EXPERT_MODELS = ("mixtral", "deepseek_v3")

EACH = 2
"""Mutations of each kind, for each family and axis. Along `shard`, where little can be wrong, it is one."""


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


class Correct(NamedTuple):
    """A correct plan of a family, what a step needs, and the numbers of one device."""

    family: str
    plan: hp.ShardingPlan
    setting: Setting
    reference: Reference
    modules: tuple[str, ...]

    def broken(self, axis: str, other: str) -> list[tuple[Correct, Mutation]]:
        return [(self, each) for each in Breaker(self.plan, self.modules, axis, other).mutations()]


@pytest.fixture(scope="module")
def correct() -> dict[str, list[Correct]]:
    """By family: over tensor with sequence parallelism and without, with shard, and with expert where it has any."""
    return {family: [*plans_of(family)] for family in BROKEN}


def plans_of(family: str) -> Iterator[Correct]:
    backend, model = backends.load("torch"), build(*FAMILIES[family])
    tokens = np.random.default_rng(0).integers(1, 96, (2, 6))
    setting = Setting(lambda: copy.deepcopy(model), Batch(backend, {"input_ids": tokens, "use_cache": False}))
    modules = tuple(name for name, _ in model.named_modules())
    meshes = [(TENSOR, True), (TENSOR, False), (BOTH, True), *([(EXPERTS, True)] if family in EXPERT_MODELS else [])]
    for sizes, sequence_parallel in meshes:
        plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})
        yield Correct(family, plan, setting, highest_reference(backend, setting, plan), modules)


@pytest.fixture(scope="module")
def outcomes(correct) -> list[Outcome]:
    """As many of each kind from every family and axis, drawn at random."""
    draw = random.Random(0)
    drawn = []
    for first, second, on_both, *with_experts in correct.values():
        exchanged = [(each, one) for each, one in on_both.broken("tensor", "shard") if one.kind == "another axis"]
        over_tensor = [*first.broken("tensor", "shard"), *second.broken("tensor", "shard"), *exchanged]
        drawn += sample(draw, over_tensor, EACH) + sample(draw, on_both.broken("shard", "tensor"), EACH // 2)
        for each in with_experts:
            drawn += sample(draw, each.broken("expert", "tensor"), EACH)
    return [outcome(each, mutation) for each, mutation in drawn]


def sample(draw: random.Random, broken: list[tuple[Correct, Mutation]], count: int) -> list[tuple[Correct, Mutation]]:
    """`count` of each kind, or all where there are fewer."""
    kinds = defaultdict(list)
    for each, mutation in broken:
        kinds[mutation.kind].append((each, mutation))
    return [one for kind in sorted(kinds) for one in draw.sample(kinds[kind], min(count, len(kinds[kind])))]


def outcome(each: Correct, mutation: Mutation) -> Outcome:
    report = against(backends.load("torch"), each.setting, mutation.plan, each.reference)
    try:
        hp.ShardingPlan.from_dict(mutation.plan.to_dict())
    except hp.HyperParallelError as error:
        return Outcome(each.family, mutation, f"{type(error).__name__}: {error}", report)
    return Outcome(each.family, mutation, report.refused, report)


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
    for each in (each for plans in correct.values() for each in plans):
        assert hp.ShardingPlan.from_dict(each.plan.to_dict()) == each.plan
        report = against(backends.load("torch"), each.setting, each.plan, each.reference)
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
