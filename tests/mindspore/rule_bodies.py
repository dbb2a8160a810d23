"""What `test_rules.py` runs in a process with MindSpore."""

from __future__ import annotations

from random import Random

from hyper_parallel.backends.mindspore.operators import canonical
from hyper_parallel.core.backend import Backend
from hyper_parallel.core.rules.check import Framework, check, combinations
from tests.mindspore.rule_programs import PROGRAMS
from tests.mindspore.rule_tracing import Tracing

MOST = 100  # combinations of one program; MindSpore needs some milliseconds for each


def findings(backend: Backend, room: str) -> list[tuple[str, str, str, str]]:
    """For each program of a room and each combination of states: the program, the states of its arguments, the verdict,
    and what the rules say."""
    framework = Framework(backend, Tracing())
    found = []
    for name, program in PROGRAMS[room].items():
        draws = [program.draw(seed) for seed in range(3)]
        every = combinations(draws[0], 2)
        chosen = [each for each in every if program.packed or all(state.blocks == 1 for state in each)]
        chosen = chosen if len(chosen) <= MOST else [chosen[0], *Random(0).sample(chosen, MOST)]
        try:
            for each in check(framework, program.run, draws, 2, chosen, program.constants):
                told = ", ".join(map(str, each.states))
                found.append((name, told, each.verdict, str(each.refusal or [*map(str, each.results or ())])))
        except Exception as error:
            raise type(error)(f"{name}: {error}") from error
    return found


def canonical_names(backend: Backend) -> None:
    """Operators by name, as an interception hands them over."""
    named = {
        ("AddExt", (1, 2), ("alpha", 3)): ("add", {"input": 1, "other": 2, "alpha": 3}),
        ("Sub", (1, 2)): ("sub", {"input": 1, "other": 2}),
        ("Reshape", (1, 2, -1)): ("reshape", {"input": 1, "shape": (2, -1)}),
        ("Reshape", (1, (2, -1))): ("reshape", {"input": 1, "shape": (2, -1)}),
        ("MatMul", (1, 2, False, True)): (
            "matmul_transposed",
            {"input": 1, "other": 2, "transpose_input": False, "transpose_other": True},
        ),
        ("Cast", (1, 34)): ("truncate", {"input": 1}),
        ("Cast", (1, 43)): ("cast", {"input": 1}),
        ("ToDtype", (1, "int32")): ("cast", {"input": 1, "dtype": "int32"}),
        ("Softmax", (1, (-1,))): ("softmax", {"input": 1, "dim": -1}),
        ("Dropout", (1, 0.75)): ("dropout_pair", {"input": 1, "p": 0.25}),
        ("StridedSlice", (1, (0,), (2,), (1,), 0, 0)): ("getitem", {"input": 1, "index": (slice(0, 2, 1),)}),
        ("Slice", (1, (1, 0), (2, -1))): ("getitem", {"input": 1, "index": (slice(1, 3), slice(0, None))}),
        ("LayerNormExt", (1, (8,), 2, 3, 1e-5)): (
            "layer_norm_from",
            {"begin": -1, "input": 1, "weight": 2, "bias": 3, "argument 4": 1e-5},
        ),
        ("DeprecatedSum", (1,), ("axis", -1), ("keepdims", True)): ("sum", {"input": 1, "dim": -1, "keepdim": True}),
        ("InplaceSiLU", (1,)): ("silu_", {"input": 1}),
        ("NeverHeardOf", (1,)): ("NeverHeardOf", {"argument 0": 1}),
        ("Shape", (1,)): None,
    }
    for (name, args, *kwargs), wanted in named.items():
        assert canonical(name, args, dict(kwargs)) == wanted, name
