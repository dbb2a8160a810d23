"""What the command line can be asked for. Imports nothing else, so that `--help` and slips are answered at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

TOKENS, FEW_TOKENS = "1,4096", "2,12"
"""What a step of `validate` has where nothing is said: a real one's on shapes, and enough to compare numbers."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What a command line asks for; an impossible one ends the process with a message."""
    about = "Plan how a model is sharded, and train a language model by one plan with MindSpore or PyTorch."
    parser = argparse.ArgumentParser(prog="hyper-parallel", description=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train with one backend")
    train.add_argument("--backend", choices=("mindspore", "torch"), help="wins over the configuration's `backend`")
    compare = commands.add_parser("compare", help="train with MindSpore, then PyTorch, and compare them")
    for command in (train, compare):
        _training(command)
    plan = commands.add_parser("plan", help="plan a model on a mesh, or compare two plans")
    _planning(plan)
    validate = commands.add_parser("validate", help="hold a plan against a model's code, without devices")
    _validation(validate)
    options = parser.parse_args(arguments)
    if options.command == "plan":
        _check_planning(options, plan)
    if options.command == "validate":
        _check_validation(options, validate)
    return options


def _training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", help="the settings; docs/training.md lists them all")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the results go; by default below runs/")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting, such as train.steps=20"
    )


def _planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="hf:CONFIG.json (Hugging Face), json:DESCRIPTION.json, or package.module:factory"
    )
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...", help="such as replicate=2,shard=4,tensor=2")
    parser.add_argument("--overrides", type=Path, metavar="FILE.yaml", help="what to decide otherwise")
    parser.add_argument("--supernode", metavar="RANKS", help="ranks in each supernode: tells fast from slow traffic")
    parser.add_argument("--out", type=Path, metavar="FILE.yaml", help="save the plan")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A.yaml", "B.yaml"), help="compare two saved plans")


def _check_planning(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    given = [name for name in ("model", "mesh", "overrides", "supernode", "out") if getattr(options, name) is not None]
    if options.diff and given:
        parser.error(f"--diff compares two saved plans; leave out --{given[0]}")
    if not options.diff and (options.model is None or options.mesh is None):
        parser.error("write --model and --mesh, or --diff with two saved plans")


def _validation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="hf:CONFIG.json (Hugging Face), or package.module:factory")
    parser.add_argument("--mesh", required=True, metavar="AXIS=SIZE,...", help="such as replicate=2,shard=4,tensor=2")
    parser.add_argument("--overrides", type=Path, metavar="FILE.yaml", help="what to decide otherwise")
    parser.add_argument(
        "--tokens",
        metavar="B,S",
        help=f"sequences on each rank, and tokens of each (default: {TOKENS}; with --gradients {FEW_TOKENS})",
    )
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="run one step of a small version of the model in this process, and compare loss and gradients with those "
        "of one device",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="with --gradients: layers of the small version (default: 2)"
    )


def _check_validation(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.layers is not None and not options.gradients:
        parser.error("--layers is for --gradients, which runs a small version of the model; add it, or leave --layers")
    if options.layers is not None and not options.model.startswith("hf:"):
        parser.error("--layers is for hf:CONFIG.json; a factory makes the model as it is, so write a small one")
    if options.layers is not None and options.layers < 1:
        parser.error(f"--layers is {options.layers}; write a whole number from 1 up")
