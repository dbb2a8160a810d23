"""`hyper-parallel plan`: in this process, and once as a user starts it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hyper_parallel import ConfigError, DeviceMesh, ModelDescription, PlanError, Replicate, ShardingPlan, plan
from hyper_parallel.cli import main
from hyper_parallel.core.plan.diff import differences
from hyper_parallel.core.topology import Topology
from hyper_parallel.plan_command import load_model, parse_mesh

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "tests" / "data" / "models"
LLAMA = f"json:{MODELS / 'llama.json'}"
MESH = ["--mesh", "shard=4,replicate=2"]


def made():
    return plan(ModelDescription.load(MODELS / "llama.json"), DeviceMesh((2, 4), ("replicate", "shard")))


def test_a_description_is_planned_printed_and_saved(tmp_path, capsys):
    assert main(["plan", "--model", LLAMA, *MESH, "--out", str(tmp_path / "plan.yaml")]) == 0
    assert capsys.readouterr().out == made().table() + "\n"
    assert ShardingPlan.load(tmp_path / "plan.yaml") == made()


def test_supernodes_tell_fast_from_slow_traffic(capsys):
    """Ranks 0 to 3 are a supernode: `shard` stays inside of it, `replicate` crosses."""
    assert main(["plan", "--model", LLAMA, *MESH, "--supernode", "4"]) == 0
    told = capsys.readouterr().out
    assert told == made().table(Topology((0,) * 4 + (1,) * 4, (0,) * 4 + (1,) * 4)) + "\n"
    flows = [line.split() for line in told.splitlines() if line.startswith("  parameters")]
    assert [(kind, tier) for _, kind, _, _, tier, *_ in flows] == [
        ("all_gather", "fast"),
        ("reduce_scatter", "fast"),
        ("all_reduce", "slow"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "--supernode: '0' is no number of ranks; write a whole number from 1 up"),
        ("four", "--supernode: 'four' is no number of ranks; write a whole number from 1 up"),
        (
            "3",
            "--supernode: the 8 ranks of replicate=2xshard=4 don't fill supernodes of 3; write a number that divides 8",
        ),
        (
            "16",
            "--supernode: the 8 ranks of replicate=2xshard=4 don't fill supernodes of 16; write a number that divides "
            "8",
        ),
    ],
)
def test_supernodes_that_can_not_be_say_what_to_write(text, message, capsys):
    assert main(["plan", "--model", LLAMA, *MESH, "--supernode", text]) == 2
    assert capsys.readouterr().err == f"hyper-parallel: {message}\n"


def test_the_command_runs_as_a_process(tmp_path):
    (tmp_path / "described.py").write_text(
        "from hyper_parallel import ModelDescription\n\n"
        "class Makers:\n"
        "    @staticmethod\n"
        "    def llama():\n"
        f"        return ModelDescription.load({str(MODELS / 'llama.json')!r})\n"
    )
    start = "import sys; from hyper_parallel.cli import main; sys.exit(main())"  # what the installed script does
    command = [sys.executable, "-P", "-c", start, "plan", "--model", "described:Makers.llama", "--mesh"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def run(mesh):
        return subprocess.run(
            [*command, mesh], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )

    good, bad = run("replicate=2,shard=4"), run("shard=four")
    assert (good.returncode, good.stdout, good.stderr) == (0, made().table() + "\n", "")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "hyper-parallel: --mesh: shard=four has no size that can be; write a whole number from 1 up\n"


def test_the_reader_of_a_pipe_may_leave_early(tmp_path):
    start = "import sys; from hyper_parallel.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", start, "plan", "--model", LLAMA, *MESH, "--out", str(tmp_path / "plan.yaml")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)
    assert (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("shard=4", DeviceMesh((4,), ("shard",))),
        ("tensor=2, replicate=3 ,shard=4", DeviceMesh((3, 4, 2), ("replicate", "shard", "tensor"))),
        ("shard=1", DeviceMesh((1,), ("shard",))),
    ],
)
def test_a_mesh_is_read_with_its_axes_in_any_order(text, mesh):
    assert parse_mesh(text) == mesh


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--mesh: '' is no AXIS=SIZE; write such as shard=4,tensor=2"),
        ("shard", "--mesh: 'shard' is no AXIS=SIZE"),
        ("shard=2,", "--mesh: '' is no AXIS=SIZE"),
        ("data=4", "there is no axis 'data'; write one of pipeline, replicate, shard, expert, context, tensor"),
        ("shard=2,shard=4", "--mesh: the axis 'shard' stands twice; write it once"),
        ("shard=0", "--mesh: shard=0 has no size that can be; write a whole number from 1 up"),
        ("shard=-2", "--mesh: shard=-2 has no size"),
        ("shard=2.0", "--mesh: shard=2.0 has no size"),
        ("shard=٣", "--mesh: shard=٣ has no size"),
        ("shard=" + "9" * 5000, "has no size that can be"),
        ("shard=1048576,tensor=2", "are 2,097,152 ranks; write at most 1,048,576"),
    ],
)
def test_a_mesh_that_can_not_be_says_what_to_write(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_mesh(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama", "--model: 'llama' names no model; write hf:CONFIG.json, json:DESCRIPTION.json or package.module:fac"),
        ("json:", "--model: 'json:' names no model"),
        ("json:none.json", "the description none.json can't be read: "),
        ("no_such_module:make", "--model: no_such_module:make: No module named 'no_such_module'"),
        ("makers:mak", "--model: makers has no mak; did you mean make?"),
        ("makers:number", "--model: makers:number can't be called; write a function that makes the model"),
        ("makers:fails", "--model: makers:fails() failed: ValueError: on two lines ("),
        ("makers:make", "what makers:make() made is not a model: found builtins.int, expected a torch.nn.Module or"),
        ("broken:make", "--model: importing broken failed: ZeroDivisionError: division by zero ("),
    ],
)
def test_a_model_that_can_not_be_had_is_one_line_on_stderr(text, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "makers.py").write_text(
        "number = 3\ndef make():\n    return number\ndef fails():\n    raise ValueError('on\\ntwo lines')\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "makers", raising=False)
    path = list(sys.path)
    assert main(["plan", "--model", text, *MESH]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("hyper-parallel: ") and message in printed.err
    assert sys.path == path


def test_without_transformers_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", "--model", "hf:config.json", *MESH]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: --model: hf: needs transformers, which is not installed: "
        "run pip install 'hyper-parallel[hf]'\n"
    )


def test_a_configuration_named_as_a_description_is_recognised(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(PlanError, match="config.json: this is a configuration, .* wants hf: before it"):
        load_model(f"json:{tmp_path / 'config.json'}")


def test_a_plan_that_can_not_be_made_or_written_is_status_2(tmp_path, capsys):
    assert main(["plan", "--model", LLAMA, *MESH, "--out", str(tmp_path / "none" / "plan.yaml")]) == 2
    assert "--out: " in capsys.readouterr().err
    assert main(["plan", "--diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]) == 2
    assert "a.yaml can't be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "write --model and --mesh, or --diff with two saved plans"),
        (["--model", LLAMA], "write --model and --mesh"),
        (["--diff", "a.yaml", "b.yaml", "--mesh", "shard=2"], "--diff compares two saved plans; leave out --mesh"),
        (["--diff", "a.yaml", "b.yaml", "--supernode", "2"], "--diff compares two saved plans; leave out --supernode"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_equal_plans_have_no_differences():
    assert differences(made(), made()) == []


def test_every_difference_has_a_line_that_leads_to_it():
    first = made()
    moved, frozen, *rest, last = first.parameters
    moved = replace(moved, placements={"shard": Replicate(), "tensor": Replicate()}, unit="model.layers.0")
    changes = {
        "model_class": "Other",
        "mesh": DeviceMesh((2, 2), ("shard", "tensor")),
        "units": (replace(first.units[0], reshard_after_forward=False), *first.units[2:]),
        "parameters": (moved, replace(frozen, trainable=False, dtype="bfloat16"), *rest, replace(last, name="new")),
        "tied": {"other": "new"},
        "notes": ("a note",),
    }
    name, other = first.parameters[0].name, first.parameters[1].name
    assert differences(first, replace(first, **changes), ("a.yaml", "b.yaml")) == [
        "model: LlamaForCausalLM -> Other",
        "mesh: replicate: only in a.yaml (2)",
        "mesh: shard: 4 -> 2",
        "mesh: tensor: only in b.yaml (2)",
        "units: model.layers.0: reshard_after_forward: true -> false",
        "units: model.layers.1: only in a.yaml",
        f"parameters: {name}: placements: shard: shard(0) -> replicate",
        f"parameters: {name}: placements: tensor: only in b.yaml (replicate)",
        f'parameters: {name}: unit: "" -> model.layers.0',
        f"parameters: {other}: dtype: float32 -> bfloat16",
        f"parameters: {other}: trainable: true -> false",
        f"parameters: {last.name}: only in a.yaml",
        "parameters: new: only in b.yaml",
        "tied: other: only in b.yaml (new)",
        'notes: [] -> ["a note"]',
    ]


def test_another_order_is_a_difference():
    first = made()
    turned = replace(first, parameters=first.parameters[::-1], units=first.units[::-1])
    assert differences(first, turned) == [
        "units: what both have stands in another order",
        "parameters: what both have stands in another order",
    ]


def test_diff_prints_the_lines_and_tells_by_its_status(tmp_path, capsys):
    one, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    made().save(one)
    made().save(other)
    assert main(["plan", "--diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    values = yaml.safe_load(other.read_text())
    values["parameters"]["lm_head.weight"].update(placements={})
    other.write_text(yaml.safe_dump(values, sort_keys=False))
    assert main(["plan", "--diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out == "parameters: lm_head.weight: placements: shard: only in a.yaml (shard(0))\n"
