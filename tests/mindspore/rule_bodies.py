"""What `test_rules.py` runs in a process with MindSpore."""

from __future__ import annotations

from random import Random

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
