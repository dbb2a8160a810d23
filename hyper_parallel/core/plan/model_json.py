"""Descriptions of models as JSON: read and checked, so that whatever is read can be planned from or is refused."""

from __future__ import annotations

import difflib
import json
import math
import os
import reprlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.plan.model import ITEM_BYTES, BufferDescription, ModelDescription, ParameterDescription

_KEYS = ("model_class", "config", "parameters", "buffers", "modules", "tied")
_DEEPEST = 32
"""Levels of a configuration; what is nested deeper is no description of anything."""

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80


def load_json(path: str | os.PathLike, what: str) -> Any:
    """The values of a JSON file; `what` names it in errors.

    Raises:
        PlanError: the file can't be read, is no JSON, or has a key twice in one mapping.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except RecursionError:
        raise PlanError(f"{what} {path} can't be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # ValueError: no JSON, no UTF-8, a number of thousands of digits
        raise PlanError(f"{what} {path} can't be read: {error}") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values


def read_description(values: Any) -> ModelDescription:
    """See `ModelDescription.from_dict`."""
    if not isinstance(values, Mapping):
        raise PlanError(f"a description is a mapping with the keys {', '.join(_KEYS)}, found {_short(values)}")
    if "model_type" in values and "parameters" not in values:
        raise PlanError("this is a configuration, not a description; the command line wants hf: before it")
    _check_keys(values, _KEYS, "")
    class_name = _text(values, "model_class", "")
    modules = _modules(_get(values, "modules", Mapping, ""), class_name)
    config = plain_config(_get(values, "config", Mapping, "", {}))
    taken = set(modules)
    parameters = {}
    for number, each in enumerate(_get(values, "parameters", list, "")):
        parameter = _parameter(each, f"parameters[{number}]", modules, taken)
        parameters[parameter.name] = parameter
    buffers = tuple(
        _buffer(each, f"buffers[{number}]", modules, taken)
        for number, each in enumerate(_get(values, "buffers", list, "", []))
    )
    tied = _ties(_get(values, "tied", Mapping, "", {}), parameters, config, modules, taken)
    firsts = tuple(each for name, each in parameters.items() if name not in tied)
    return ModelDescription(class_name, firsts, modules, tied, buffers, config)


def _modules(values: Mapping[str, Any], class_name: str) -> dict[str, str]:
    """Every module's class, the model itself first: the format may leave it out."""
    modules = {"": class_name}
    for name in values:
        found = _text(values, name, "modules")
        if name == "":
            if found != class_name:
                raise PlanError(f"modules: the model itself is a {found!r}, and model_class says {class_name!r}")
            continue
        _check_name(name, "modules")
        parent = name.rpartition(".")[0]
        if parent not in modules:
            raise PlanError(
                f"modules: {name!r} stands below {parent!r}, which is no module listed before it; list parents first"
            )
        modules[name] = found
    return modules


def _parameter(values: Any, where: str, modules: Mapping[str, str], taken: set[str]) -> ParameterDescription:
    name, shape, dtype = _tensor(values, where, ("module", "requires_grad"), modules, taken)
    owner = name.rpartition(".")[0]
    module_class = _text(values, "module", where, modules[owner])
    if module_class != modules[owner]:
        raise PlanError(
            f"{where}.module: {name!r} belongs to a {module_class!r}, and modules says that {owner!r} is a "
            f"{modules[owner]!r}"
        )
    return ParameterDescription(name, shape, dtype, module_class, _get(values, "requires_grad", bool, where, True))


def _buffer(values: Any, where: str, modules: Mapping[str, str], taken: set[str]) -> BufferDescription:
    name, shape, dtype = _tensor(values, where, ("persistent",), modules, taken)
    return BufferDescription(name, shape, dtype, _get(values, "persistent", bool, where, True))


def _tensor(
    values: Any, where: str, further: Iterable[str], modules: Mapping[str, str], taken: set[str]
) -> tuple[str, tuple[int, ...], str]:
    """Name, shape and dtype; the name is taken from now on."""
    if not isinstance(values, Mapping):
        raise PlanError(f"{where} is a mapping with a name, a shape and a dtype, found {_short(values)}")
    _check_keys(values, ("name", "shape", "dtype", *further), f"{where}.")
    name = _text(values, "name", where)
    _check_owner(name, f"{where}.name", modules)
    if name in taken:
        raise PlanError(f"{where}.name: {name!r} is the name of something else already")
    taken.add(name)
    shape = _get(values, "shape", (list, tuple), where)
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**63:
            raise PlanError(f"{where}.shape: {name!r} has a dim of {_short(size)}; write whole numbers from 0 up")
    dtype = _text(values, "dtype", where)
    if dtype not in ITEM_BYTES:
        raise PlanError(
            f"{where}.dtype: {name!r} has the unknown dtype {_short(dtype)}; write one of {', '.join(ITEM_BYTES)}"
        )
    return name, tuple(shape), dtype


def _ties(
    values: Mapping[str, Any],
    parameters: Mapping[str, ParameterDescription],
    config: Mapping[str, Any],
    modules: Mapping[str, str],
    taken: set[str],
) -> dict[str, str]:
    """The real ties, further name to first.

    Files made from a class list what the class *could* tie, and list such a name among the parameters as well: it is
    one with the other only where the configuration says so. A name that is no parameter of its own is nothing but a
    tie; that is how `ModelDescription.save` writes one.
    """
    ties = {}
    says_tied = config.get("tie_word_embeddings") is True
    for name in values:
        _check_owner(name, "tied", modules)
        if name not in parameters and name in taken:
            raise PlanError(f"tied: {name!r} is the name of something else already")
        if name not in parameters or says_tied:
            ties[name] = _text(values, name, "tied")
    for name in values:
        first = _text(values, name, "tied")
        if first not in parameters or first in ties or first == name:
            raise PlanError(f"tied.{name}: {_short(first)} is not the first name of another parameter")
        if name in ties and name in parameters:
            _check_alike(parameters[name], parameters[first])
    return ties


def _check_alike(one: ParameterDescription, first: ParameterDescription) -> None:
    for fact in ("shape", "dtype", "trainable"):
        found, wanted = getattr(one, fact), getattr(first, fact)
        if found != wanted:
            raise PlanError(
                f"tied.{one.name}: it has {fact} {found}, and {first.name!r} has {wanted}; what is tied is one "
                "parameter. Make them alike, or set config.tie_word_embeddings to false"
            )


def _check_owner(name: Any, where: str, modules: Mapping[str, str]) -> None:
    _check_name(name, where)
    owner = name.rpartition(".")[0]
    if owner not in modules:
        raise PlanError(f"{where}: {name!r} stands below {owner!r}, which is not in modules")


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not name.isprintable() or not all(name.split(".")):
        raise PlanError(f"{where}: {_short(name)} is no qualified name; write names joined by dots, as 'layers.0.up'")


def _check_keys(values: Mapping[str, Any], known: Iterable[str], prefix: str) -> None:
    """Other keys are somebody's notes, unless they look like one that was meant to be read."""
    for key in values:
        close = [] if key in known else difflib.get_close_matches(str(key)[:80], list(known), 1, 0.8)
        if close and close[0] not in values:
            raise PlanError(f"{prefix}{key}: there is no such key; did you mean {close[0]}?")


_REQUIRED = object()
_KINDS = {str: "text", bool: "true or false", list: "a list", Mapping: "a mapping", (list, tuple): "a list of sizes"}


def _get(values: Mapping[str, Any], key: str, kind: Any, where: str, default: Any = _REQUIRED) -> Any:
    """The value under a key, of the kind that is asked for."""
    place = f"{where}.{key}" if where else key
    if key not in values and default is not _REQUIRED:
        return default
    if key not in values:
        raise PlanError(f"{place} is missing; write {_KINDS[kind]}")
    value = values[key]
    if not isinstance(value, kind):
        raise PlanError(f"{place} is {_short(value)}; write {_KINDS[kind]}")
    return value


def _text(values: Mapping[str, Any], key: str, where: str, default: Any = _REQUIRED) -> str:
    """Text under a key that can stand in a name: not empty, on one line."""
    text = _get(values, key, str, where, default)
    if not text or not text.isprintable():
        place = f"{where}.{key}" if where else key
        raise PlanError(f"{place} is {_short(text)}; write text on one line that is not empty")
    return text


def _short(value: Any) -> str:
    return _shortened.repr(value)


def config_of(model: Any) -> dict[str, Any]:
    """What a model says of itself: its `config.to_dict()`, or the mapping, the fields of the dataclass or the public
    attributes that `config` has, those of its class too. Empty without `config`."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    if callable(getattr(config, "to_dict", None)) and not isinstance(config, type):
        config = config.to_dict()
    if is_dataclass(config) and not isinstance(config, type):
        config = {each.name: getattr(config, each.name) for each in fields(config)}
    elif not isinstance(config, Mapping):
        classes = config.__mro__ if isinstance(config, type) else (config, *type(config).__mro__)
        held = {name: value for each in reversed(classes) for name, value in getattr(each, "__dict__", {}).items()}
        config = {name: value for name, value in held.items() if not name.startswith("_")}
    return plain_config(config)


def plain_config(config: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries that JSON can hold; an entry of which it can't hold a part (an object, an infinity) is left out."""
    plain = {}
    for key, value in config.items():
        try:
            plain[_plain_key(key)] = _plain(value, ())
        except _NotPlain:
            continue
    return plain


class _NotPlain(Exception):
    pass


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    """The value in lists, dictionaries and scalars; `above` holds the ids of what it is inside of."""
    if value is None or type(value) in (str, bool, int) or type(value) is float and math.isfinite(value):
        return value
    if id(value) in above or len(above) >= _DEEPEST:
        raise _NotPlain
    if isinstance(value, Mapping):
        return {_plain_key(key): _plain(each, (*above, id(value))) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each, (*above, id(value))) for each in value]
    raise _NotPlain


def _plain_key(key: Any) -> str:
    """JSON's keys are text, and those of a table of labels are often numbers."""
    if type(key) not in (str, int):
        raise _NotPlain
    return str(key)
