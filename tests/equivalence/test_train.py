"""The trainer from the command line to the run folder: real frameworks, real ranks, a very small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from hyper_parallel.core.plan.plan import ShardingPlan
from tests.equivalence import training_runs as runs

# Sums are taken in another order; after six steps of Muon and AdamW that has grown to no more than this.
LOSS_TOLERANCE = 1e-5

VARIANTS = {
    "torch, one rank": ["--backend=torch", *runs.sizes(1, 1)],
    "torch, four ranks": ["--backend=torch"],
    "torch, micro-batches": ["--backend=torch", *runs.sizes(1, 2), "--set", "train.micro_batch_size=1"],
    "mindspore, one rank": ["--backend=mindspore", *runs.sizes(1, 1)],
    "mindspore, four ranks, micro-batches": ["--backend=mindspore", "--set", "train.micro_batch_size=1"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a variant, trained once."""
    project = runs.write_project(tmp_path_factory.mktemp("trained"))
    done: dict[str, Path] = {}

    def train(variant: str) -> Path:
        if variant not in done:
            folder = project.parent / variant.replace(", ", "-").replace(" ", "-")
            ended = runs.run("train", project, "--run-dir", folder, *VARIANTS[variant], cwd=project.parent)
            assert ended.returncode == 0, ended.stderr
            done[variant] = folder
        return done[variant]

    return train


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "torch, one rank"])
def test_every_way_to_split_the_work_gives_the_same_losses(trained: Callable[[str], Path], variant: str) -> None:
    expected, found = runs.metrics(trained("torch, one rank")), runs.metrics(trained(variant))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[key] for m in found], [m[key] for m in expected], rtol=LOSS_TOLERANCE)
    held_out = [[m["held_out_loss"] for m in run if "held_out_loss" in m] for run in (found, expected)]
    np.testing.assert_allclose(*held_out, rtol=LOSS_TOLERANCE)
    assert [m["tokens"] for m in found] == [m["tokens"] for m in expected]


def test_the_text_has_windows_that_are_not_full(trained: Callable[[str], Path]) -> None:
    tokens = [m["tokens"] for m in runs.metrics(trained("torch, one rank"))]
    assert min(tokens) < 8 * 16, "otherwise the mean over valid tokens is not put to the test"


@pytest.mark.parametrize("variant", ["torch, four ranks", "mindspore, four ranks, micro-batches"])
def test_the_run_folder_is_complete(trained: Callable[[str], Path], variant: str) -> None:
    folder = trained(variant)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["ranks"] == 4 and config["optimizer"]["learning_rate"] == 3e-3

    steps = runs.metrics(folder)
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6]
    assert [m["step"] for m in steps if "held_out_loss" in m] == [3, 6]
    for m in steps:
        assert m["tokens_per_s"] > 0 and m["memory_bytes"] > 2**20 and m["grad_norm"] > 0

    plan = ShardingPlan.load(folder / "plan.yaml")
    parameters = load_file(folder / "model.safetensors")
    assert {p.name: p.shape for p in plan.parameters} == {name: value.shape for name, value in parameters.items()}

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out_loss"] == steps[-1]["held_out_loss"]
    assert summary["parameters"] == sum(value.size for value in parameters.values())

    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert _scalars(folder / "tensorboard")["train/loss"] == pytest.approx([m["loss"] for m in steps])
    assert not list(folder.glob(".*")), "no half-written file stays"


def _scalars(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_comparison_finds_that_both_backends_agree(tmp_path: Path) -> None:
    project = runs.write_project(tmp_path)
    ended = runs.run("compare", project, *runs.sizes(1, 2), *runs.ADAMW, "--set", "train.steps=3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "losses of the first 3 steps agree" in ended.stdout
    assert "parameters at the end agree" in ended.stdout
    found = json.loads((tmp_path / "runs" / "config" / "compare.json").read_text())
    assert found["agree"] and found["loss_difference"] < LOSS_TOLERANCE
    assert (tmp_path / "runs" / "config" / "loss.png").exists()


def test_shards_stay_inside_the_supernodes_that_a_file_tells_of(tmp_path: Path) -> None:
    project = runs.write_project(tmp_path)
    (tmp_path / "pods.yaml").write_text("{'0': first, '1': second}")
    options = "--backend=torch", *runs.sizes(1, 2), "--set", "train.steps=1", "--set", "topology=pods.yaml"
    ended = runs.run("train", project, *options, cwd=tmp_path)
    assert ended.returncode == 2
    assert "mesh.shard: the axis 'shard' of the mesh" in ended.stderr and "crosses supernodes" in ended.stderr
    assert "Write mesh.replicate: 2 and mesh.shard: 1, which shards inside supernodes" in ended.stderr
    ended = runs.run("train", project, *options, "--set", "mesh.allow_shard_across_supernodes=true", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "torch, 2 ranks on 2 machines in 2 supernodes" in ended.stdout


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path, backend_name: str) -> None:
    with runs.Training(backend_name, runs.write_project(tmp_path)) as training:
        assert sorted(training.ranks) == [0, 1, 2, 3]
        os.kill(training.ranks[2], signal.SIGKILL)
        status, errors = training.end(seconds=60)
        assert status == 1
        assert "rank 2 was killed by signal 9 (SIGKILL" in errors
        assert "Traceback" not in errors, "what the others met is a consequence"
        assert not any(map(runs.alive, training.ranks.values()))
        assert len(runs.metrics(training.folder)) >= 10
        assert not (training.folder / "model.safetensors").exists()


def test_a_killed_rank_below_msrun_ends_the_run_and_is_named(tmp_path: Path) -> None:
    training = runs.Training("mindspore", runs.write_project(tmp_path), *runs.sizes(1, 2)).as_on_ascend()
    with training:
        assert sorted(training.ranks) == [0, 1]
        os.kill(training.ranks[1], signal.SIGKILL)
        status, errors = training.end(seconds=60)
        assert status == 1 and "rank 1 ended without a message" in errors
        assert not any(map(runs.alive, training.ranks.values()))


def test_ctrl_c_ends_every_rank(tmp_path: Path, backend_name: str) -> None:
    with runs.Training(backend_name, runs.write_project(tmp_path), *runs.sizes(1, 2)) as training:
        training.process.send_signal(signal.SIGINT)
        status, errors = training.end(seconds=60)
        assert status == 130
        assert errors == "hyper-parallel: interrupted; every rank has ended\n"
        assert not any(map(runs.alive, training.ranks.values()))


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path, backend_name: str) -> None:
    with runs.Training(backend_name, runs.write_project(tmp_path), *runs.sizes(1, 2)) as training:
        training.process.kill()
        runs.wait_until(lambda: not any(map(runs.alive, training.ranks.values())), 60, "the end of every rank")


def test_ranks_that_torchrun_has_started_train_together(tmp_path: Path) -> None:
    project = runs.write_project(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["-m", "hyper_parallel", "train", str(project), "--run-dir", "run", *runs.sizes(2, 1)]
    _launched(launcher + options, tmp_path)
    assert len(runs.metrics(tmp_path / "run")) == 6


def test_ranks_that_msrun_has_started_train_together(tmp_path: Path) -> None:
    from hyper_parallel.train.launch import free_port

    project = runs.write_project(tmp_path)
    launcher = [sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2", "--local_worker_num=2"]
    launcher += [f"--master_port={free_port()}", "--join=True", "--log_dir=logs", "python", "-m", "hyper_parallel"]
    options = ["train", str(project), "--backend=mindspore", "--run-dir", "run", *runs.sizes(2, 1)]
    _launched(launcher + options, tmp_path)
    assert len(runs.metrics(tmp_path / "run")) == 6


def _launched(command: list[str], cwd: Path) -> None:
    """Run a launcher to its end, which must be a good one. When it is not, all that its ranks have printed is shown."""
    process = subprocess.Popen(
        command, cwd=cwd, env=runs.environment(cwd), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        # A rank waits 120 s for another, and msrun's scheduler misses a rank after 30 s: time enough to tell the cause.
        printed, late = process.communicate(timeout=300)[0], False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # both launchers then end what they have started
        printed, late = process.communicate(timeout=60)[0], True
    logs = [f"--- {log.name}\n{log.read_text()}" for log in sorted(cwd.glob("logs/*.log"))]
    assert not late and process.returncode == 0, "\n".join(["it was late" if late else "it failed", printed, *logs])
