"""`hyper-parallel validate`: hold a plan against the code of a model that is named on the command line, on shapes."""

from __future__ import annotations

import argparse
import re
from typing import Any

import hyper_parallel
from hyper_parallel import gradients_command
from hyper_parallel.arguments import FEW_TOKENS, TOKENS
from hyper_parallel.core.errors import ConfigError, ContractError
from hyper_parallel.plan_command import load_code, parse_mesh


def run(options: argparse.Namespace) -> int:
    """Carry the command out. Returns 0 when the plan holds, else 1.

    Raises:
        ConfigError, PlanError: there is nothing to validate; the message has a line for each thing to put right.
    """
    usual = FEW_TOKENS if options.gradients else TOKENS
    tokens, mesh = parse_tokens(usual if options.tokens is None else options.tokens), parse_mesh(options.mesh)
    if options.gradients:
        return gradients_command.run(options, mesh, tokens)
    model = load_code(options.model)
    if options.model.startswith("hf:"):
        _prepare(model)
    asked = {} if options.overrides is None else {"overrides": options.overrides}
    plan = hyper_parallel.plan(model, mesh, **asked)
    try:
        print(hyper_parallel.validate(model, plan, tokens))
    except ContractError as error:
        print(f"the plan does not hold: {error}")
        return 1
    return 0


def _prepare(model: Any) -> None:
    """Let a model of Hugging Face's run on shapes: as it is trained, and with experts as batched products, since a loop
    over experts asks which of them have tokens."""
    model.train()
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        model.set_experts_implementation("batched_mm")


def parse_tokens(text: str) -> tuple[int, int]:
    """The two numbers of `1,4096`.

    Raises:
        ConfigError: they are none.
    """
    found = re.fullmatch(r"\s*([1-9][0-9]{0,8})\s*,\s*([1-9][0-9]{0,8})\s*", text, re.ASCII)
    if found is None:
        raise ConfigError(f"--tokens: {text!r} is no B,S; write sequences and tokens of each, such as 1,4096")
    return int(found[1]), int(found[2])
