"""Finding a framework: every obstacle is one line that says what to install. Each case runs in its own process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hyper_parallel import backends
from hyper_parallel.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def python(code, *extra_paths):
    """What `code` prints in a fresh process that sees HyperParallel and, before everything else, `extra_paths`."""
    path = os.pathsep.join([*map(str, extra_paths), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def reason(name, before="", *extra_paths):
    """The message with which `load(name)` refuses, after the statement `before`."""
    code = f"""
        import sys
        {before}
        from hyper_parallel import backends
        from hyper_parallel.core.errors import BackendUnavailable
        for attempt in range(2):
            try:
                backends.load({name!r})
            except BackendUnavailable as error:
                print(error)
        print(backends.available()[{name!r}])
    """
    first, second, listed = python(code, *extra_paths).splitlines()
    assert first == second == listed, "one line, the same at every attempt and in available()"
    return first


def package(folder, name, code):
    """A package that does `code` when imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(textwrap.dedent(code))
    return folder


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_a_missing_framework_names_the_extra_to_install(name):
    assert f"pip install 'hyper-parallel[{name}]'" in reason(name, f"sys.modules[{name!r}] = None")


def test_numpy_2_beside_mindspore_is_refused_before_mindspore_is_imported(tmp_path):
    package(tmp_path, "mindspore", "raise SystemExit('imported')")
    message = reason("mindspore", "import numpy; numpy.__version__ = '2.4.6'", tmp_path)
    assert "numpy 2.4.6" in message and "pip install 'numpy<2'" in message


def test_torch_npu_without_cann_names_set_env_and_the_variable(tmp_path):
    failing_extension = """
        try:
            raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
        except ImportError as error:
            raise RuntimeError("Failed to load the backend extension: torch_npu.") from error
    """
    message = reason("torch", "", package(tmp_path, "torch", failing_extension))
    assert "libhccl.so" in message and "set_env.sh" in message and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in message


def test_mindspore_without_cann_names_set_env(tmp_path):
    failing = 'raise ImportError("libascendcl.so: cannot open shared object file")'
    message = reason("mindspore", "", package(tmp_path, "mindspore", failing))
    assert "libascendcl.so" in message and "set_env.sh" in message


def test_a_missing_system_library_is_named(tmp_path):
    failing = 'raise ImportError("libgomp.so.1: cannot open shared object file: No such file or directory")'
    message = reason("mindspore", "", package(tmp_path, "mindspore", failing))
    assert "libgomp.so.1" in message and "install the system package" in message


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_a_broken_installation_shows_its_cause_on_one_line(name, tmp_path):
    message = reason(name, "", package(tmp_path, name, 'raise OSError("libgomp.so.1:\\n  wrong ELF class")'))
    assert "OSError: libgomp.so.1: wrong ELF class" in message and f"hyper-parallel[{name}]" in message


def test_an_unknown_backend_names_the_two():
    with pytest.raises(ConfigError, match=r"'jax'.*\"mindspore\" or \"torch\""):
        backends.load("jax")


def test_what_is_not_a_model_is_named():
    with pytest.raises(ConfigError, match=r"builtins\.dict.*torch\.nn\.Module or a mindspore\.nn\.Cell"):
        backends.of_model({})


@pytest.mark.parametrize("name, base", [("torch", "Module"), ("mindspore", "Cell")])
def test_a_model_is_recognised_by_its_class_and_only_its_framework_is_loaded(name, base, monkeypatch):
    ancestor = type(base, (), {"__module__": f"{name}.nn"})
    model = type("Network", (type("Block", (ancestor,), {}),), {})()
    monkeypatch.setattr(backends, "load", lambda found: found)
    assert backends.of_model(model) == name


def test_asking_what_is_available_imports_no_framework():
    code = """
        import sys
        from hyper_parallel.backends import available
        available()
        print({"torch", "mindspore"} & set(sys.modules))
    """
    assert python(code) == "set()"
