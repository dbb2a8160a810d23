"""The rules held against numbers on PyTorch, and its functions by canonical names."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.backends.torch.operators import canonical
from hyper_parallel.core.rules import table
from hyper_parallel.core.rules.check import Finding, Framework, check, combinations
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, cut
from hyper_parallel.core.rules.table import infer, parameters_of
from tests.torch.rule_programs import PROGRAMS, Program, of, real
from tests.torch.rule_tracing import Tracing

TORCH = Framework(backends.load("torch"), Tracing())
MATRIX = (np.random.default_rng(0).standard_normal((4, 4)),)
EACH = [(room, name) for room, programs in PROGRAMS.items() for name in programs]
TRACES = Path(__file__).parents[1] / "data/traces"

FINITE = "finite parts make a finite sum, except where it overflows"
OF_PENDING = "nobody has needed it of a pending sum"
TARGET = "a target that is overwritten keeps its state, for others may hold the same memory"
MADE_LIKE_A_PART = "zeros made like a part are taken for that part"
ROUNDED = "a number of elements or chunks that was rounded for a part is not that of the whole"
NOT_YET: dict[str, tuple[str, set[str]]] = {
    "nan_to_num": ("it is the identity where all numbers are finite", {"partial"}),
    "isfinite": (FINITE, {"partial"}),
    "isinf": (FINITE, {"partial"}),
    "isnan": (FINITE, {"partial"}),
    "xlogy": (OF_PENDING, {"partial, replicate, its gradient partial"}),
    "addcmul": (
        OF_PENDING,
        {
            "partial, partial, replicate, its gradient partial",
            "partial, replicate, its gradient partial, partial",
        },
    ),
    "addcdiv": (
        OF_PENDING,
        {
            "partial, partial, replicate, its gradient partial",
        },
    ),
    "in place multiply": (TARGET, {"replicate, its gradient partial, partial"}),
    "layer_norm": (OF_PENDING, {"replicate, its gradient partial, partial, partial"}),
    "rms_norm": (OF_PENDING, {"replicate, its gradient partial, partial"}),
    "nll_loss": (OF_PENDING, {"partial, replicate"}),
    "scatter, multiplied": (OF_PENDING, {"partial, replicate, replicate"}),
    "chunk in three": (ROUNDED, {"strided_shard(0, 2)"}),
    "cat with nothing": (ROUNDED, {"shard(1)", "strided_shard(1, 2)"}),
    "zeros[..., :2] = y": (MADE_LIKE_A_PART, {"shard(0), strided_shard(0, 2)", "strided_shard(0, 2), shard(0)"}),
    "scatter_ into zeros": (MADE_LIKE_A_PART, {"shard(0), strided_shard(0, 2)", "strided_shard(0, 2), shard(0)"}),
    "index_add_ into zeros": (
        MADE_LIKE_A_PART,
        {"shard(1), replicate, strided_shard(1, 2)", "strided_shard(1, 2), replicate, shard(1)"},
    ),
    "fill_": (TARGET, {"partial"}),
    "copy_": (
        TARGET,
        {
            "replicate, partial",
            "replicate, its gradient partial, partial",
            "partial, replicate",
            "partial, replicate, its gradient partial",
            "shard(1), strided_shard(0, 2)",
            "strided_shard(1, 2), shard(0)",
        },
    ),
}
"""What is refused although it would be right: why, and for which states of the arguments."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def findings(program: Program, ranks: int, most: int = 200) -> Iterator[Finding]:
    """What the check finds for every combination of states; for a sample of them where there are very many."""
    draws = [program.draw(seed) for seed in range(3)]
    every = combinations(draws[0], ranks)
    chosen = [each for each in every if program.packed or all(state.blocks == 1 for state in each)]
    if len(chosen) > most:
        chosen = Random(0).sample(chosen, most)
    return check(TORCH, program.run, draws, ranks, chosen, program.constants)


def told(states: tuple) -> str:
    return ", ".join(map(str, states))


@pytest.mark.parametrize(("room", "name"), EACH)
def test_what_ranks_hold_makes_the_whole_as_the_rules_say(room, name):
    found = list(findings(PROGRAMS[room][name], ranks=2))
    assert not [(told(each.states), told(each.results)) for each in found if each.verdict == "wrong"]
    too_strict = {told(each.states) for each in found if each.verdict == "too strict"}
    assert too_strict <= NOT_YET.get(name, ("", set()))[1]
    assert any(each.results for each in found)


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_yet_followed_would_be_right(name):
    program = next(programs[name] for programs in PROGRAMS.values() if name in programs)
    found = findings(program, ranks=2, most=1000)
    assert {told(each.states) for each in found if each.verdict == "too strict"} == NOT_YET[name][1]


ELSEWHERE = {
    "by tests/mindspore/test_rules.py": "bias_add layer_norm_from matmul_transposed std_mean take_rows",
    "by tests/core/rules/test_table.py, for they have no kernel on a CPU": "dropout_pair rms_norm_from slice",
    "below, for they draw numbers": "alpha_dropout dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout "
    "bernoulli bernoulli_ exponential_ gumbel_softmax multinomial "
    "normal_ rand_like randint_like randn_like random_ uniform_",
    "by tests/core/rules/test_messages.py, for it returns no tensor": "read",
    "as what others are like": "pointwise reduction",
}
"""Operators that no program above calls: where they are held."""


def test_every_rule_is_held_against_numbers():
    tracing, called = Tracing(), set()

    def note(function, args, kwargs):
        named = canonical(function, args, kwargs)
        called.update([] if named is None else [named[0], named[0].removesuffix("_")])
        return function(*args, **kwargs)

    for program in (each for programs in PROGRAMS.values() for each in programs.values()):
        with tracing.intercepting(note):
            program.run(*map(torch.from_numpy, program.draw(0)))
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    assert set(table.operators()) - called == elsewhere


DRAWS = {
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.detach().clone().bernoulli_(),
    "exponential_": lambda x: x.detach().clone().exponential_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "normal_": lambda x: x.detach().clone().normal_(),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randn_like": torch.randn_like,
    "random_": lambda x: x.detach().clone().random_(),
    "uniform_": lambda x: x.detach().clone().uniform_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_draw_what_they_like_and_pending_sums_do_not_draw(name):
    rows, same, pending = (
        next(check(TORCH, DRAWS[name], [MATRIX], 2, [(state,)])) for state in (cut(0), WHOLE, PARTIAL)
    )
    assert rows.results == (cut(0),)
    assert same.results == (WHOLE,)
    assert "a sum can't be worked out from its parts" in pending.refusal.reason


ON_THREE_RANKS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "rows": lambda x, w, b: (x.reshape(-1, x.shape[-1]) @ w.mT).view(*x.shape[:-1], -1) + b,
    "heads": lambda x, w, b: F.linear(x, w, b).view(*x.shape[:-1], -1, 2).transpose(1, 2).softmax(-1),
}


@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_three_ranks_do_as_well(name):
    program = Program(ON_THREE_RANKS[name], (real(2, 3, 6), real(12, 6), real(12)))
    assert all(each.verdict == "right" for each in findings(program, ranks=3))


UNEVEN = {
    "x + row": (lambda x: x + x[:1].detach(), 1),
    "relu": (torch.relu, 1),
    "sum": (lambda x: x.sum(1), 1),
    "tokens merged": (lambda x: x.reshape(-1, x.shape[-1]), 1),
    "tokens merged and split": (lambda x: (x.reshape(-1, x.shape[-1]) * 2).view(*x.shape), 1),
    "norm": (lambda x: F.rms_norm(x, (4,)), 1),
    "attention": (lambda x: x @ x.detach()[:, :1].mT, 1),
    "transpose": (lambda x: x.transpose(1, 2), 1),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_a_dim_that_the_ranks_do_not_divide(name):
    run, dim = UNEVEN[name]
    states = [(state,) for state in (cut(dim), WHOLE, COPIED)]
    found = list(check(TORCH, run, [of(run, real(2, 5, 4)).draw(0)], 2, states))
    assert all(each.verdict == "right" for each in found)
    assert name in ("x + row", "attention") or found[0].results


@pytest.mark.parametrize("state", [cut(0), cut(1), WHOLE, PARTIAL], ids=str)
def test_dropout_keeps_what_it_is_given(state):
    (found,) = check(TORCH, lambda x: F.dropout(x, 0.5), [MATRIX], 2, [(state,)])
    assert found.results == (state,)


FEATURES = {
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.5)[..., 0],
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.5)[..., 0, 0],
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
}


@pytest.mark.parametrize("name", FEATURES)
def test_what_drops_whole_features_keeps_what_it_is_given(name):
    drawn = [of(FEATURES[name], real(2, 4, 6)).draw(0)]
    for state in (cut(0), cut(1), cut(2), WHOLE):
        (found,) = check(TORCH, FEATURES[name], drawn, 2, [(state,)])
        assert found.results == (state,)
    (pending,) = check(TORCH, FEATURES[name], drawn, 2, [(PARTIAL,)])
    assert (pending.results == (PARTIAL,)) is (name != "feature_alpha_dropout")


def test_an_embedding_cut_along_the_vocabulary_needs_a_boundary_that_vouches_for_it():
    (found,) = check(TORCH, F.embedding, [(np.array([1, 6]), np.ones((8, 4)))], 2, [(WHOLE, cut(0))])
    assert (
        "a part of what input counts in" in found.refusal.reason and "boundary of type embedding" in found.refusal.legal
    )


# Canonical names.


def functions_of_traces() -> set[str]:
    events = (json.loads(path.read_text())["events"] for path in sorted(TRACES.glob("*.json")))
    return {event["fn"] for each in events for event in each if any("shape" in arg for arg in tensors_of(event))}


def tensors_of(event: dict) -> Iterator[dict]:
    for each in (*event["args"], *event["kw"].values()):
        yield from (arg for arg in (each if isinstance(each, list) else [each]) if isinstance(arg, dict))


@pytest.mark.parametrize("name", sorted(functions_of_traces()))
def test_every_function_that_the_traced_models_call_has_a_rule(name):
    for home in (torch.Tensor, torch, F, torch._C._nn, torch._C):
        function = getattr(home, name.rpartition(".")[2], None)
        if function is not None and not isinstance(function, torch.dtype):
            break
    named = canonical(function, (torch.ones(2, 2), torch.ones(2, 2)), {})
    assert named is None or parameters_of(named[0]) is not None


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "named"),
    [
        (torch.Tensor.add, (1, 2), {"alpha": 3}, ("add", {"input": 1, "other": 2, "alpha": 3})),
        (torch.Tensor.add_, (1, 2), {}, ("add_", {"input": 1, "other": 2})),
        (torch.Tensor.__rsub__, (1, 2), {}, ("rsub", {"input": 1, "other": 2})),
        (torch.Tensor.__rmatmul__, (1, 2), {}, ("matmul", {"other": 1, "input": 2})),
        (torch.Tensor.view, (1, 2, -1), {}, ("reshape", {"input": 1, "shape": (2, -1)})),
        (torch.reshape, (1, [2, -1]), {}, ("reshape", {"input": 1, "shape": (2, -1)})),
        (torch.Tensor.T.__get__, (1,), {}, ("transpose_all", {"input": 1})),
        (F.softmax, (1,), {"dim": -1, "_stacklevel": 3}, ("softmax", {"input": 1, "dim": -1, "_stacklevel": 3})),
        (torch.Tensor.sum, (1,), {"axis": 0}, ("sum", {"input": 1, "dim": 0})),
        (torch.split, (1, 2, -1), {}, ("split", {"input": 1, "size": 2, "dim": -1})),
        (torch.max, (1, 0), {}, ("max", {"input": 1, "dim": 0})),
        (torch.where, (1,), {}, ("nonzero_tuple", {"input": 1})),
        (torch.Tensor.__bool__, (1,), {}, ("read", {"input": 1})),
        (torch.Tensor.size, (1,), {}, None),
        (torch.Tensor.shape.__get__, (1,), {}, None),
        (torch.Tensor.is_floating_point, (1,), {}, None),
    ],
)
def test_functions_go_by_canonical_names(function, args, kwargs, named):
    assert canonical(function, args, kwargs) == named


def test_max_of_two_tensors_is_no_reduction():
    x = torch.ones(2)
    assert canonical(torch.max, (x, x), {})[0] == "maximum"
    assert canonical(torch.Tensor.max, (x,), {"dim": 0})[0] == "max"


def test_a_function_that_nothing_is_known_of_is_refused_until_one_line_registers_it(monkeypatch):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    draws, states = [MATRIX * 2], [(cut(0), cut(0))]
    (found,) = check(TORCH, torch.hypot, draws, 2, states)
    assert "torch.hypot has no rule" in found.refusal.reason
    assert "hyper_parallel.register_rule('torch.hypot', like=\"pointwise\")" in found.refusal.legal
    hp.register_rule("torch.hypot", like="pointwise")
    (found,) = check(TORCH, torch.hypot, draws, 2, states)
    assert found.verdict == "right" and found.results == (cut(0),)
    infer.cache_clear()


def test_a_rule_can_be_a_function(monkeypatch):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    hp.register_rule(torch.hypot, rule=lambda view: view["x"].state, arguments="x y")
    (found,) = check(TORCH, torch.hypot, [MATRIX * 2], 2, [(cut(0), cut(0))])
    assert found.verdict == "right" and found.results == (cut(0),)
    infer.cache_clear()


@torch.library.custom_op("hyper_parallel_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_autograd(lambda context, gradient: gradient / 2)


@pytest.mark.parametrize("operator", [torch.ops.hyper_parallel_tests.halved, "hyper_parallel_tests.halved"], ids=str)
def test_an_operator_of_a_library_is_registered_for_all_that_calls_it(monkeypatch, operator):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    hp.register_rule(operator, like="pointwise")
    for function in (halved, torch.ops.hyper_parallel_tests.halved, torch.ops.hyper_parallel_tests.halved.default):
        (found,) = check(TORCH, function, [MATRIX], 2, [(cut(0),)])
        assert found.verdict == "right" and found.results == (cut(0),)
    infer.cache_clear()
