"""Find the framework of a model, or one by its name, and say in one line what is missing when it can't be used."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import numpy

from hyper_parallel.core.backend import Backend
from hyper_parallel.core.errors import BackendUnavailable, ConfigError

NAMES = ("mindspore", "torch")

_TITLES = {"mindspore": "MindSpore", "torch": "PyTorch"}
_MODEL_CLASSES = {"mindspore": "Cell", "torch": "Module"}
_TENSOR_CLASSES = {"mindspore": "Tensor", "torch": "Tensor"}

# A framework whose import failed half-way fails differently, and misleadingly, the second time in one process.
_failed_imports: dict[str, str] = {}


def load(name: str) -> Backend:
    """The backend called `name`, "mindspore" or "torch"; imports the framework.

    Raises `ConfigError` for another name, and `BackendUnavailable`, with one line that says what to install or
    set, when the framework is missing or can't be imported.
    """
    if name not in NAMES:
        raise ConfigError(f'unknown backend {name!r}: write "mindspore" or "torch"')
    reason = _obstacle(name)
    if reason is None and sys.modules.get(name) is None:
        reason = _import_framework(name)
    if reason is not None:
        raise BackendUnavailable(reason)
    return importlib.import_module(f"{__name__}.{name}").BACKEND


def of_model(model: Any) -> Backend:
    """The backend of a `torch.nn.Module` or a `mindspore.nn.Cell`, seen from its class alone.

    Raises `ConfigError` for anything else.
    """
    return _of_class(model, _MODEL_CLASSES, "a model", "a torch.nn.Module or a mindspore.nn.Cell")


def of_tensor(tensor: Any) -> Backend:
    """The backend of a `torch.Tensor` or a `mindspore.Tensor`, parameters included, seen from its class alone.

    Raises `ConfigError` for anything else.
    """
    return _of_class(tensor, _TENSOR_CLASSES, "a tensor", "a torch.Tensor or a mindspore.Tensor")


def joined(name: str | None = None) -> Backend:
    """The backend that has joined the ranks of this job, or the one called `name`.

    Raises `ConfigError` when none has joined, or both have and none is named; for a name as `load` does.
    """
    if name is not None:
        return load(name)
    imported = [sys.modules[f"{__name__}.{each}"].BACKEND for each in NAMES if f"{__name__}.{each}" in sys.modules]
    found = [backend for backend in imported if backend.collectives.is_initialized()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError('both backends have joined; say which one: backend="torch" or backend="mindspore"')
    raise ConfigError('no backend has joined: call hyper_parallel.initialize("torch") or ("mindspore") first')


def _of_class(value: Any, classes: dict[str, str], what: str, expected: str) -> Backend:
    for cls in type(value).__mro__:
        root = cls.__module__.partition(".")[0]
        if cls.__name__ == classes.get(root):
            return load(root)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ConfigError(f"not {what}: found {kind}, expected {expected}")


def available() -> dict[str, str | None]:
    """For each backend None, or the one line that says why it can't be used. Imports no framework: a fault that
    only importing shows is reported by `load`, and here once `load` has met it."""
    return {name: _obstacle(name) for name in NAMES}


def _obstacle(name: str) -> str | None:
    """What can be known to stand in the way before the framework is imported."""
    if name in _failed_imports:
        return _failed_imports[name]
    if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
        return f"{_TITLES[name]} is not installed: run pip install 'hyper-parallel[{name}]'"
    if name == "mindspore" and int(numpy.__version__.partition(".")[0]) >= 2:
        # MindSpore's wheel accepts numpy 2 but is compiled against numpy 1: its first operator fails.
        return f"MindSpore does not work with numpy {numpy.__version__}: run pip install 'numpy<2'"
    return None


def _import_framework(name: str) -> str | None:
    """Import it; the reason when that fails."""
    try:
        importlib.import_module(name)
    except Exception as error:  # native libraries fail as ImportError, OSError, RuntimeError, ...
        _failed_imports[name] = _explain(name, error)
        return _failed_imports[name]
    return None


def _explain(name: str, error: BaseException) -> str:
    """One line for a framework that is installed but can't be imported."""
    causes = _chain(error)
    text = " ".join(str(cause) for cause in causes)
    root = causes[-1]
    detail = f"{type(root).__name__}: {' '.join(str(root).split())}"
    if name == "torch" and ("torch_npu" in text or "libhccl" in text):
        return (
            f"PyTorch can't be imported because torch_npu finds no usable CANN ({detail}): source CANN's set_env.sh, "
            "or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to go without the NPU"
        )
    if name == "mindspore" and ("libascend" in text or "libhccl" in text or "CANN" in text):
        return f"MindSpore finds no usable CANN ({detail}): source CANN's set_env.sh"
    if "cannot open shared object file" in text:
        return f"{_TITLES[name]} lacks a system library ({detail}): install the system package that holds it"
    return (
        f"{_TITLES[name]} is installed but can't be imported ({detail}): "
        f"run pip install --force-reinstall 'hyper-parallel[{name}]'"
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes
