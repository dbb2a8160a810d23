"""The arrows of the design: cli -> train -> api -> backends -> core, and core knows no framework."""

import ast
import sys
from pathlib import Path

import pytest

from tests.work import imported

PACKAGE = Path(__file__).parents[2] / "hyper_parallel"
FRAMEWORKS = {"torch", "torch_npu", "mindspore"}
CORE_MAY_IMPORT = set(sys.stdlib_module_names) | {"numpy", "yaml", "hyper_parallel"}


def imports(path):
    """Every module that a file imports, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(*rooms):
    return [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]


def test_core_imports_the_standard_library_numpy_yaml_and_itself_only():
    for path in files("core"):
        for module in imports(path):
            assert module.split(".")[0] in CORE_MAY_IMPORT, f"{path} imports {module}"
            if module.startswith("hyper_parallel."):
                assert module.startswith("hyper_parallel.core"), f"{path} imports {module}"


@pytest.mark.parametrize(("one", "other"), [("torch", "mindspore"), ("mindspore", "torch")])
def test_backends_import_core_and_themselves_only(one, other):
    for path in files(f"backends/{one}"):
        for module in imports(path):
            assert module.split(".")[0] != other, f"{path} imports {module}"
            if module.startswith("hyper_parallel."):
                assert module.startswith(("hyper_parallel.core", f"hyper_parallel.backends.{one}")), f"{path}: {module}"


def test_nothing_below_imports_what_stands_above():
    over_backends = ("api", "tensor", "seeds", "train", "cli", "arguments", "models")
    for room, above in (("backends", over_backends), ("train", ("cli", "arguments"))):
        for path in files(room):
            for module in imports(path):
                assert module.split(".")[:2] not in [["hyper_parallel", name] for name in above], f"{path}: {module}"


def test_only_backends_and_the_decoders_import_a_framework():
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room != "backends" and path.name not in ("torch_decoder.py", "mindspore_decoder.py"):
            found = {module.split(".")[0] for module in imports(path)} & FRAMEWORKS
            assert not found or path.name == "torch_agent.py", f"{path} imports {found}"


def protocols():
    """`{room: {function: [parameter names]}}` as core/backend.py asks for."""
    rooms = {"Tensors": "tensors", "Collectives": "collectives", "Autograd": "autograd", "Modules": "modules"}
    rooms |= {
        "Training": "training",
        "Interception": "interception",
        "Orthogonalizing": "muon",
        "Optimizing": "optimizer",
    }
    for node in ast.parse((PACKAGE / "core/backend.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in rooms:
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield rooms[node.name], {each.name: parameters(each)[1:] for each in functions}


def parameters(function):
    return [each.arg for each in function.args.args]


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_a_backend_has_every_function_of_the_protocols_with_the_same_parameters(backend):
    rooms = dict(protocols())
    assert {path.name for path in files("backends/torch")} == {path.name for path in files("backends/mindspore")}
    for room, wanted in rooms.items():
        tree = ast.parse((PACKAGE / f"backends/{backend}/{room}.py").read_text())
        found = {each.name: parameters(each) for each in tree.body if isinstance(each, ast.FunctionDef)}
        assert {name: found.get(name) for name in wanted} == wanted, f"{backend}/{room}.py"


def test_importing_the_package_imports_nothing_else():
    assert imported("import hyper_parallel") == ({"hyper_parallel"}, set())
