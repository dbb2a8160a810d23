"""Settings: what is read, what wins, and that every mistake is told at once, in words that help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.train.config import Config, OptimizerConfig, load_config
from hyper_parallel.train.learning_rate import learning_rate
from hyper_parallel.train.options import fill, read_file, to_yaml
from hyper_parallel.train.run_folder import choose_run_dir

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "examples" / "demo.yaml"


def messages(*overrides: str, path: Path = DEMO, backend: str | None = None) -> list[str]:
    """The lines of the one error that loading must raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, backend)
    return str(caught.value).splitlines()


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


def test_the_demo_is_read():
    config = load_config(DEMO)
    assert (config.backend, config.ranks, config.mesh.replicate, config.mesh.shard) == ("mindspore", 4, 2, 2)
    assert config.sequences_per_rank == config.micro_batch_size == 4
    assert config.data.held_out_fraction == 0.05, "a key that is left out has its default"


def test_an_override_wins_over_the_file_the_later_over_the_earlier_and_the_flag_over_all():
    config = load_config(DEMO, ["train.steps=7", "train.steps=8", "backend=mindspore"], backend="torch")
    assert (config.train.steps, config.backend) == (8, "torch")


def test_a_section_can_be_overridden_in_one_piece():
    config = load_config(DEMO, ["mesh={replicate: 4, shard: 1}"])
    assert (config.mesh.replicate, config.mesh.shard) == (4, 1)


def test_values_of_overrides_are_yaml():
    config = load_config(DEMO, ["optimizer.betas=[0.8, 0.99]", "optimizer.max_grad_norm=null", "optimizer.eps=1e-5"])
    assert config.optimizer.betas == (0.8, 0.99)
    assert config.optimizer.max_grad_norm is None
    assert config.optimizer.eps == 1e-5, "YAML itself reads 1e-5 as a text"


def test_the_resolved_settings_can_be_read_back(tmp_path: Path):
    config = load_config(DEMO, ["data.path=[examples, docs]"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert fill(Config, read_file(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stpes=3", "--set: train.stpes: there is no such key; did you mean train.steps?"),
        ("learning_rate=1", "--set: learning_rate: there is no such key; did you mean optimizer.learning_rate?"),
        ("model.steps=3", "--set: model.steps: there is no such key; did you mean train.steps?"),
        ("train.steps=many", "--set: train.steps: wants a whole number, found 'many'"),
        ("train.steps=true", "--set: train.steps: wants a whole number, found True"),
        ("train.steps=0", "--set: train.steps: wants a number at least 1, found 0"),
        ("optimizer.learning_rate=.nan", "--set: optimizer.learning_rate: wants a number more than 0, found nan"),
        ("optimizer.betas=[0.9]", "--set: optimizer.betas: wants a list [a number, a number], found [0.9]"),
        ("optimizer.name=sgd", "--set: optimizer.name: wants 'adamw' or 'muon', found 'sgd'"),
        (
            "optimizer.momentum=0.9",
            "--set: optimizer.momentum: there is no such key; did you mean optimizer.muon.momentum?",
        ),
        (
            "optimizer.muon.routes=[[head, sgd]]",
            "--set: optimizer.muon.routes: wants a list, each item a list [a text, 'muon' or 'adamw'], "
            "found [['head', 'sgd']]",
        ),
        ("train.evaluate_every=no", "--set: train.evaluate_every: wants a whole number or null, found False"),
        ("data.extensions=.py", "--set: data.extensions: wants a list, each item a text, found '.py'"),
        ("backend=jax", "--set: backend: wants 'mindspore' or 'torch', found 'jax'"),
        ("model.num_kv_heads=3", "--set: model.num_heads must be"),
    ],
)
def test_a_mistake_names_its_key_what_was_found_and_what_is_wanted(override: str, expected: str):
    if override.startswith("model.num_kv_heads"):
        # The complaint is about two keys; it stands where the first of them was written.
        assert only(messages(override)).startswith("demo.yaml:14: model.num_heads must be a multiple of num_kv_heads")
    else:
        assert only(messages(override)) == expected


def test_a_section_is_no_value():
    line = only(messages("mesh=4"))
    assert "mesh: this is a section, not a value (found 4); it holds mesh.replicate, mesh.shard" in line


def test_every_mistake_is_told_at_once_with_its_file_and_line(tmp_path: Path):
    path = tmp_path / "wrong.yaml"
    path.write_text("backend: torch\nranks: four\nmodel:\n  hidden: 3\n")
    lines = messages(path=path)
    assert "wrong.yaml:2: ranks: wants a whole number, found 'four'" in lines
    assert "wrong.yaml:4: model.hidden: there is no such key; did you mean model.hidden_size?" in lines
    assert "train.steps: this key is missing; it wants a whole number" in lines
    assert "model.vocab_size: this key is missing; it wants a whole number" in lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "wrong.yaml:2: a is written twice, first at wrong.yaml:1; keep one"),
        ("a: [1\nb: 2", "wrong.yaml:2: this is not YAML"),
        ("- 1\n", "expected `key: value` lines, found [1]"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, expected: str):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert expected in only(messages(path=path))


def test_a_missing_file_is_named(tmp_path: Path):
    assert only(messages(path=tmp_path / "no.yaml")).endswith("no.yaml: No such file or directory")


def test_an_override_without_a_value_shows_how_to_write_one():
    assert only(messages("train.steps")) == "--set train.steps: write --set key=value, for example --set train.steps=20"


def test_three_ranks_can_not_form_a_mesh_of_two_by_two():
    line = only(messages("ranks=3"))
    assert "3 ranks can't form a mesh of 2 x 2" in line and "write ranks: 4" in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.global_batch_size=10", "10 sequences can't be shared evenly among 4 ranks; write 8 or 12"),
        ("train.micro_batch_size=3", "can't be split into micro-batches of 3; write one of 1, 2, 4, or null"),
        ("data.sequence_length=129", "129 is longer than model.max_position_embeddings, 128"),
        ("model.vocab_size=255", "tokens are bytes, so it must be at least 256, found 255"),
        ("optimizer.min_learning_rate=1", "1.0 exceeds optimizer.learning_rate, 0.006"),
        ("data.path=/no/such/place", "data.path: there is no file or directory /no/such/place"),
    ],
)
def test_a_combination_that_can_not_be_is_refused(override: str, expected: str):
    assert expected in only(messages(override))


def test_what_muon_alone_has_is_refused_beside_adamw():
    line = only(messages("optimizer.name=adamw", "optimizer.muon={nesterov: false, ns_dtype: bfloat16}"))
    assert line == (
        "demo.yaml: optimizer.muon.nesterov: adamw has no such setting; leave it out, or write optimizer.name: muon"
    )


def test_settings_of_muon_are_read_and_can_be_read_back(tmp_path: Path):
    said = {
        "coefficients": "[[3.4, -4.7, 2.0], [2, -1.5, 0.5]]",
        "scale": "0.5",
        "routes": "[['*.o_proj.weight', adamw]]",
    }
    config = load_config(
        DEMO, ["optimizer.name=muon", *(f"optimizer.muon.{key}={value}" for key, value in said.items())]
    )
    muon = config.optimizer.muon
    assert muon.coefficients == ((3.4, -4.7, 2.0), (2.0, -1.5, 0.5)) and muon.scale == 0.5
    assert muon.routes == (("*.o_proj.weight", "adamw"),)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert fill(Config, read_file(tmp_path / "config.yaml")) == config


def test_a_path_counts_from_the_file_that_it_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "run.yaml").write_text(DEMO.read_text().replace("path: null", "path: text"))
    monkeypatch.chdir(tmp_path.parent)
    assert load_config(tmp_path / "run.yaml").data.path == str(tmp_path / "text")
    (tmp_path.parent / "elsewhere").mkdir(exist_ok=True)
    assert load_config(tmp_path / "run.yaml", ["data.path=elsewhere"]).data.path == str(tmp_path.parent / "elsewhere")


@given(warmup=st.integers(0, 30), steps=st.integers(1, 100))
def test_the_learning_rate_warms_up_and_then_only_falls(warmup: int, steps: int):
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.25, warmup_steps=warmup)
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert all(0 < rate <= 1.0 for rate in rates)
    if steps > warmup:
        assert falling[0] == 1.0
    if steps > warmup + 1:
        assert falling[-1] == pytest.approx(0.25)


def test_the_learning_rate_of_a_small_example():
    config = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=2)
    assert [learning_rate(config, step, 7) for step in range(7)] == pytest.approx(
        [0.5, 1.0, 1.0, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0.0]
    )


def test_a_run_takes_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert choose_run_dir(None, "demo") == Path("runs/demo")
    Path("runs/demo").mkdir(parents=True)
    assert choose_run_dir(None, "demo") == Path("runs/demo-2")
    assert choose_run_dir(Path("runs/demo"), "demo") == Path("runs/demo"), "an empty one may be named"
    Path("runs/demo/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="runs/demo exists and is not an empty directory"):
        choose_run_dir(Path("runs/demo"), "demo")


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    """Run the command line; site packages beside the frameworks stay visible."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "hyper_parallel", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", DEMO, "--set", "train.stpes=3"], "did you mean train.steps?"),
        (["train", "no.yaml"], "no.yaml: No such file or directory"),
        (["train", DEMO, "--set", "ranks=3"], "3 ranks can't form a mesh of 2 x 2"),
        (["compare", DEMO, "--set", "ranks=3"], "3 ranks can't form a mesh of 2 x 2"),
        (["train", DEMO, "--run-dir", "full"], "full exists and is not an empty directory"),
    ],
)
def test_a_users_mistake_gives_one_message_and_leaves_nothing_behind(
    tmp_path: Path, arguments: list[object], expected: str
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("hyper-parallel: ") and ended.stderr.count("\n") == 1
    assert expected in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_missing_framework_gives_the_line_that_says_what_to_install(tmp_path: Path):
    # A finder in front of all others says that there is no such package.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "import importlib.util\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find_spec(name, *rest)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, "-m", "hyper_parallel", "train", str(DEMO), "--backend", "torch"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == "hyper-parallel: PyTorch is not installed: run pip install 'hyper-parallel[torch]'\n"
