"""`hyper-parallel plan`: plan a model that is named on the command line, or compare two saved plans."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, Iterator

import hyper_parallel
from hyper_parallel import backends
from hyper_parallel.core.errors import BackendUnavailable, ConfigError, HyperParallelError, PlanError
from hyper_parallel.core.mesh import AXES, DeviceMesh
from hyper_parallel.core.plan.diff import differences
from hyper_parallel.core.plan.model import ModelDescription, describe
from hyper_parallel.core.plan.model_json import load_json
from hyper_parallel.core.plan.plan import ShardingPlan
from hyper_parallel.core.topology import Topology

MOST_RANKS = 2**20
"""A mesh of more ranks than this is a slip of the finger."""


def run(options: argparse.Namespace) -> int:
    """Carry the command out. Returns 0, or 1 when two compared plans differ.

    Raises:
        ConfigError, PlanError: the message has a line for each thing to put right.
    """
    if options.diff:
        return _diff(*options.diff)
    mesh = parse_mesh(options.mesh)
    topology = None if options.supernode is None else parse_supernode(options.supernode, mesh)
    asked = {} if options.overrides is None else {"overrides": options.overrides}
    plan = hyper_parallel.plan(load_model(options.model), mesh, **asked)
    if options.out is not None:
        try:
            plan.save(options.out)
        except OSError as error:
            raise ConfigError(f"--out: {options.out} can't be written: {error}") from error
    _print(plan.table(topology))
    return 0


def _diff(first: Path, second: Path) -> int:
    names = (str(first), str(second)) if first.name == second.name else (first.name, second.name)
    found = differences(ShardingPlan.load(first), ShardingPlan.load(second), names)
    _print("\n".join(found) if found else "the plans are equal")
    return 1 if found else 0


def _print(text: str) -> None:
    """Print all of it, or as much as the reader of a pipe wants to have."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_mesh(text: str) -> DeviceMesh:
    """The mesh of `replicate=2,shard=4`, its axes in any order.

    Raises:
        ConfigError: names the part that is wrong and what to write.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (each.strip() for each in part.partition("="))
        if not equals:
            raise ConfigError(f"--mesh: {part!r} is no AXIS=SIZE; write such as shard=4,tensor=2")
        if axis not in AXES:
            raise ConfigError(f"--mesh: there is no axis {axis!r}; write one of {', '.join(AXES)}")
        if axis in sizes:
            raise ConfigError(f"--mesh: the axis {axis!r} stands twice; write it once")
        if not re.fullmatch("0*[1-9][0-9]{0,9}", size, re.ASCII):
            raise ConfigError(f"--mesh: {axis}={size} has no size that can be; write a whole number from 1 up")
        sizes[axis] = int(size)
    if prod(sizes.values()) > MOST_RANKS:
        raise ConfigError(f"--mesh: {text} are {prod(sizes.values()):,} ranks; write at most {MOST_RANKS:,}")
    return DeviceMesh.from_sizes(sizes)


def parse_supernode(text: str, mesh: DeviceMesh) -> Topology:
    """Supernodes of so many consecutive ranks.

    Raises:
        ConfigError: they do not divide the ranks of the mesh; says what to write.
    """
    if not re.fullmatch("0*[1-9][0-9]{0,9}", text, re.ASCII):
        raise ConfigError(f"--supernode: {text!r} is no number of ranks; write a whole number from 1 up")
    if mesh.size % int(text):
        raise ConfigError(
            f"--supernode: the {mesh.size:,} ranks of {mesh} don't fill supernodes of {int(text):,}; write a number "
            f"that divides {mesh.size:,}"
        )
    return Topology.regular(mesh.size, ranks_per_machine=int(text))


def load_model(text: str) -> Any:
    """The model, or the description of one, that `--model` names.

    Raises:
        ConfigError, PlanError: it can't be read or made; the message is one line.
    """
    kind, _, rest = text.partition(":")
    if not rest:
        raise ConfigError(
            f"--model: {text!r} names no model; write hf:CONFIG.json, json:DESCRIPTION.json or package.module:factory"
        )
    if kind == "json":
        return ModelDescription.load(rest)
    return describe_hugging_face(rest) if kind == "hf" else _call_factory(kind, rest)


def load_code(text: str) -> Any:
    """The model that `--model` names, made without values, so that its code can be run on shapes.

    Raises:
        ConfigError, PlanError: it can't be made, or it is a description, which has no code; the message is one line.
    """
    kind, _, rest = text.partition(":")
    if kind == "json":
        raise ConfigError(
            f"--model: {text} is the description of a model, which has no code to run; write hf:CONFIG.json or "
            "package.module:factory"
        )
    if not rest:
        return load_model(text)  # which says what to write
    model = make_hugging_face(rest) if kind == "hf" else _call_factory(kind, rest, without_values=True)
    if isinstance(model, ModelDescription):
        raise ConfigError(f"--model: {text} makes the description of a model, which has no code to run")
    return model


def describe_hugging_face(path: str) -> ModelDescription:
    """Describe the causal language model of a Hugging Face configuration. Nothing is fetched, no weight is made.

    Errors are those of `make_hugging_face`.
    """
    return describe(make_hugging_face(path), backends.load("torch"))


def make_hugging_face(path: str) -> Any:
    """The causal language model of a Hugging Face configuration, without values. Nothing is fetched.

    Raises:
        BackendUnavailable: transformers or PyTorch is missing.
        ConfigError: the file is no configuration of such a model.
    """
    return make_of_configuration(read_configuration(path), path)


def read_configuration(path: str) -> Any:
    """A Hugging Face configuration of a causal language model, from its file.

    Errors are those of `make_hugging_face`.
    """
    auto = _transformers()
    try:
        values = load_json(path, "the configuration")
    except PlanError as error:
        raise ConfigError(f"--model: {error}") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in auto.CONFIG_MAPPING:
        close = difflib.get_close_matches(str(kind), list(auto.CONFIG_MAPPING.keys()), 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"--model: the model_type of {path} is {kind!r}, which transformers does not know{hint}")
    # `auto_map` names code to be fetched. Shapes don't depend on how attention is computed; "eager" needs no extras.
    values = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
    try:
        config = auto.CONFIG_MAPPING[kind].from_dict(values)
        if type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(f"--model: {path} describes a {kind}, which is no causal language model")
        return config
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--model: transformers makes no model of {path}: {_one_line(error)}") from error


def make_of_configuration(config: Any, path: str, with_values: bool = False) -> Any:
    """The model of a configuration, without values unless asked for; `path` is named in errors.

    Raises:
        ConfigError: transformers makes no model of it.
    """
    auto, backend = _transformers(), backends.load("torch")
    try:
        with contextlib.nullcontext() if with_values else backend.modules.without_values():
            return auto.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # a configuration fails wherever the model's code first stumbles over it
        raise ConfigError(f"--model: transformers makes no model of {path}: {_one_line(error)}") from error


def _transformers() -> Any:
    """The package."""
    if importlib.util.find_spec("transformers") is None:
        raise BackendUnavailable(
            "--model: hf: needs transformers, which is not installed: run pip install 'hyper-parallel[hf]'"
        )
    try:
        return importlib.import_module("transformers")
    except Exception as error:
        raise BackendUnavailable(f"--model: transformers can't be imported: {_one_line(error)}") from error


def _call_factory(module_name: str, path: str, without_values: bool = False) -> Any:
    """What `path` in a module makes; modules in the working directory are found as well."""
    with _working_directory_on_path():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"--model: {module_name}:{path}: {error}") from error
        except Exception as error:
            raise ConfigError(f"--model: importing {module_name} failed: {_one_line(error)}") from error
        try:
            factory = attrgetter(path)(module)
        except AttributeError:
            close = difflib.get_close_matches(path, vars(module), 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"--model: {module_name} has no {path}{hint}") from None
        if not callable(factory):
            raise ConfigError(f"--model: {module_name}:{path} can't be called; write a function that makes the model")
        try:
            with _without_values() if without_values else contextlib.nullcontext():
                model = factory()
        except HyperParallelError:
            raise
        except Exception as error:
            raise ConfigError(f"--model: {module_name}:{path}() failed: {_one_line(error)}") from error
    if not isinstance(model, ModelDescription):
        try:
            backends.of_model(model)
        except BackendUnavailable:
            raise
        except ConfigError as error:
            raise ConfigError(f"--model: what {module_name}:{path}() made is {error}, or a ModelDescription") from error
    return model


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Models made inside have no values, in whichever framework. One that only the factory imports is PyTorch."""
    names = [name for name in backends.NAMES if name in sys.modules] or ["torch"]
    with contextlib.ExitStack() as contexts:
        for name in names:
            if backends.available()[name] is None:
                contexts.enter_context(backends.load(name).modules.without_values())
        yield


@contextlib.contextmanager
def _working_directory_on_path() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _one_line(error: BaseException) -> str:
    """The error and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
