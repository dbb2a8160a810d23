"""Every block of code in the README and in docs/ runs, and every setting is described."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Iterable, Iterator

import pytest
import yaml

from hyper_parallel.cli import parse
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import parse_placement
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.transition import lower
from hyper_parallel.core.wire import Step
from hyper_parallel.plan_command import parse_mesh
from hyper_parallel.train.config import Config, load_config
from hyper_parallel.train.options import defaults_of, keys_of

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "README.zh.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(language: str) -> list[pytest.param]:
    """Every block of that language, with its page as the name of the test."""
    found = []
    for page in PAGES:
        codes = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
        for number, code in enumerate(codes, start=1):
            found.append(pytest.param(code, id=f"{page.relative_to(REPOSITORY)}-{number}"))
    return found


def execute(command: list[str], cwd: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen]:
    """What runs scripts without importing the frameworks for each anew."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.script_runner"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes) as runner:
        yield runner
        runner.kill()


@pytest.mark.parametrize("code", blocks("python"))
def test_a_block_of_python_runs(code: str, tmp_path: Path, runner: subprocess.Popen):
    (tmp_path / "block.py").write_text(code)
    print(tmp_path, file=runner.stdin, flush=True)
    assert runner.stdout.readline() == "0\n", (tmp_path / "said.txt").read_text()


def test_the_example_of_the_readme_runs_on_two_ranks(tmp_path: Path):
    (code, *_) = [block.values[0] for block in blocks("python") if block.id.startswith("README.md")]
    (tmp_path / "block.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    execute([*torchrun, "block.py"], tmp_path)


@pytest.mark.parametrize("code", blocks("sh"))
def test_a_block_of_shell_names_commands_settings_and_targets_that_exist(code: str):
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets
        elif "hyper_parallel" in words:
            check_command(words[words.index("hyper_parallel") + 1 :])
        elif words[0] == "hyper-parallel":
            check_command(words[1:])
        else:
            raise AssertionError(f"no test knows the command {line}")


def check_command(words: list[str]) -> None:
    """The command line is accepted, and so are the settings, or the mesh of a plan."""
    options = parse(words)
    if options.command in ("plan", "validate"):
        if options.mesh:
            parse_mesh(options.mesh)
        return
    load_config(REPOSITORY / options.config, options.set, getattr(options, "backend", None))


def rows_after(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a line of a page."""
    text = (REPOSITORY / "docs" / page).read_text()
    (table,) = re.findall(rf"^{re.escape(heading)}[^\n]*\n\n\|[^\n]*\n\|[-|]*\n(.*?)\n\n", text, re.M | re.S)
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in table.splitlines()]


def kinds(steps: Iterable[Step]) -> str:
    return ", ".join(step.kind for step in steps)


@pytest.mark.parametrize("row", rows_after("layouts.md", "On one axis of `k` ranks"), ids=" -> ".join)
def test_a_lowering_on_one_axis_is_as_described(row: list[str]):
    source, target, steps, received, back = row
    mesh, shape = DeviceMesh((4,), ("tensor",)), (64, 32)
    found = lower(*(Layout(mesh, [parse_placement(each)], shape) for each in (source, target)))
    assert (kinds(found.steps), kinds(found.gradient_steps)) == (steps, back.strip())
    assert found.bytes(1) == {"fast": eval(received, {"k": 4, "n": 64 * 32}), "slow": 0}


@pytest.mark.parametrize("row", rows_after("layouts.md", "On two axes, `replicate` over two"), ids=" -> ".join)
def test_a_lowering_on_two_tiers_is_as_described(row: list[str]):
    source, target, steps, fast, slow = row
    mesh, shape, topology = DeviceMesh((2, 4), ("replicate", "shard")), (64, 32), Topology.regular(8, 4)
    layouts = [
        Layout(mesh, [parse_placement(each) for each in re.split(r", (?![^(]*\))", side)], shape)
        for side in (source, target)
    ]
    found = lower(*layouts, topology)
    assert kinds(found.steps) == steps
    assert found.bytes(1, topology) == {
        tier: eval(text, {"n": 64 * 32}) for tier, text in (("fast", fast), ("slow", slow))
    }


def test_every_setting_is_described_with_its_default():
    (section,) = re.findall(r"^## Settings\n(.*?)^## ", (REPOSITORY / "docs" / "training.md").read_text(), re.M | re.S)
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.*?)\s?\| ", section, re.M)
    # An empty cell stands for a setting that must be written.
    described = {key: yaml.safe_load(default.strip("`")) if default else "required" for key, default in rows}
    defaults = defaults_of(Config)
    assert described == {key: defaults.get(key, "required") for key in keys_of(Config)}


def test_every_test_that_a_page_names_exists():
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named and not {name for name in named if f"def {name}(" not in tests}


def test_both_readmes_show_the_same_code():
    english, chinese = (re.findall(r"^```.*?^```", page.read_text(), re.M | re.S) for page in PAGES[:2])
    without_comments = [[re.sub(r"\s*#.*", "", block) for block in blocks] for blocks in (english, chinese)]
    assert without_comments[0] == without_comments[1]
