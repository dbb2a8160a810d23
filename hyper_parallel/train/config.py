"""The settings of a training run, and the checks that need no framework and no other process.

Precedence, weakest first: the defaults below, the YAML file, `--set key=value` from left to right, `--backend`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, Sequence

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.train.data import VOCABULARY
from hyper_parallel.train.options import Entry, fill, read_file, read_overrides

_POSITIVE = {"at_least": 1}
_AT_LEAST_0 = {"at_least": 0}


@dataclass(frozen=True)
class MeshConfig:
    """How the ranks are arranged: `replicate` copies of the model, each over `shard` ranks, which share a supernode
    unless `allow_shard_across_supernodes`."""

    replicate: int = field(default=1, metadata=_POSITIVE)
    shard: int = field(default=1, metadata=_POSITIVE)
    allow_shard_across_supernodes: bool = False


@dataclass(frozen=True)
class DataConfig:
    """The text to learn from, as bytes.

    `path` is a file, a directory, or a list of both; null is the source of the running Python's standard library.
    Directories are searched for files with one of `extensions`; a file that is named itself is always taken.
    `held_out_fraction` of all windows of `sequence_length` bytes is never trained on.
    """

    sequence_length: int = field(metadata=_POSITIVE)
    path: str | tuple[str, ...] | None = None
    extensions: tuple[str, ...] = (".py", ".txt", ".md")
    held_out_fraction: float = field(default=0.05, metadata={"more_than": 0, "less_than": 1})


@dataclass(frozen=True)
class MuonConfig:
    """What `hyper_parallel.Muon` does with the matrices inside of the model, where `optimizer.name` is muon.

    `adamw_learning_rate` is the highest rate of what AdamW updates; null: `optimizer.learning_rate`, which the scale
    "match_rms" makes fit both. `routes` are pairs of a pattern over parameter names and "muon" or "adamw".
    """

    momentum: float = field(default=0.95, metadata={"at_least": 0, "less_than": 1})
    nesterov: bool = True
    coefficients: Literal["legacy", "asym5", "polar_express"] | tuple[tuple[float, float, float], ...] = "legacy"
    ns_steps: int = field(default=5, metadata=_POSITIVE)
    ns_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    scale: Literal["match_rms", "original", "spectral", "unit_rms"] | float = field(
        default="match_rms", metadata={"more_than": 0}
    )
    second_moment: Literal["normuon"] | None = None
    adamw_learning_rate: float | None = field(default=None, metadata={"more_than": 0})
    routes: tuple[tuple[str, Literal["muon", "adamw"]], ...] = ()


@dataclass(frozen=True)
class OptimizerConfig:
    """The framework's own AdamW, alone or for what Muon leaves it, with warm-up and a cosine down to
    `min_learning_rate`.

    Matrices decay by `weight_decay`, vectors never. Gradients with a norm above `max_grad_norm` are scaled down to
    it; null only measures the norm.
    """

    learning_rate: float = field(metadata={"more_than": 0})
    name: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata={"at_least": 0, "less_than": 1})
    eps: float = field(default=1e-8, metadata={"more_than": 0})
    weight_decay: float = field(default=0.1, metadata=_AT_LEAST_0)
    warmup_steps: int = field(default=0, metadata=_AT_LEAST_0)
    min_learning_rate: float = field(default=0.0, metadata=_AT_LEAST_0)
    max_grad_norm: float | None = field(default=1.0, metadata={"more_than": 0})
    muon: MuonConfig = MuonConfig()


@dataclass(frozen=True)
class TrainConfig:
    """How long and in which portions.

    A step sees `global_batch_size` sequences over all ranks, at most `micro_batch_size` at a time on each rank
    (null: the rank's whole part at once). The held-out loss is taken over `evaluation_batches` global batches at
    the end, and every `evaluate_every` steps unless that is null.
    """

    steps: int = field(metadata=_POSITIVE)
    global_batch_size: int = field(metadata=_POSITIVE)
    micro_batch_size: int | None = field(default=None, metadata=_POSITIVE)
    seed: int = field(default=0, metadata=_AT_LEAST_0)
    evaluate_every: int | None = field(default=None, metadata=_POSITIVE)
    evaluation_batches: int = field(default=4, metadata=_POSITIVE)


@dataclass(frozen=True)
class Config:
    """Everything that decides a training run.

    `topology` is a file that says where ranks sit, as `hyper_parallel.initialize` takes it; null asks the environment.
    """

    backend: Literal["mindspore", "torch"]
    ranks: int = field(metadata=_POSITIVE)
    mesh: MeshConfig
    model: DecoderConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    topology: str | None = None

    @property
    def sequences_per_rank(self) -> int:
        """Sequences of a global batch that fall to one rank."""
        return self.train.global_batch_size // self.ranks

    @property
    def micro_batch_size(self) -> int:
        """Sequences that a rank handles at a time."""
        return self.train.micro_batch_size or self.sequences_per_rank


def load_config(path: str | Path, overrides: Sequence[str] = (), backend: str | None = None) -> Config:
    """The settings of the YAML file `path`, changed by `key=value` overrides and then by `backend`.

    A relative `data.path` or `topology` counts from the file that it stands in, or, in an override, from the working
    directory.
    Raises one `ConfigError` that names every mistake: unknown keys with the nearest valid one, wrong types and
    bounds, missing keys, and combinations that can't be.
    """
    path = Path(path)
    entries = _anchored(read_file(path), path.parent)
    entries.update(_anchored(read_overrides(overrides), Path()))
    if backend is not None:
        entries["backend"] = Entry(backend, "--backend")
    config = fill(Config, entries)
    problems = _combination_problems(config)
    if problems:
        raise ConfigError("\n".join(f"{path.name}: {problem}" for problem in problems))
    return config


def _anchored(entries: dict[str, Entry], base: Path) -> dict[str, Entry]:
    def absolute(value: object) -> object:
        if isinstance(value, list):
            return [absolute(item) for item in value]
        return os.path.abspath(base / os.path.expanduser(value)) if isinstance(value, str) else value

    paths = {key: entries[key] for key in ("data.path", "topology") if key in entries}
    return entries | {key: Entry(absolute(each.value), each.origin) for key, each in paths.items()}


def data_paths(config: DataConfig) -> list[Path]:
    """The files and directories to read; empty for the standard library."""
    paths = (config.path,) if isinstance(config.path, str) else config.path or ()
    return [Path(path) for path in paths]


def _combination_problems(config: Config) -> list[str]:
    return [
        *_rank_problems(config),
        *_size_problems(config),
        *_optimizer_problems(config.optimizer),
        *_data_problems(config),
    ]


def _rank_problems(config: Config) -> list[str]:
    mesh, ranks = config.mesh, config.ranks
    needed = mesh.replicate * mesh.shard
    if ranks != needed:
        return [
            f"ranks: {ranks} ranks can't form a mesh of {mesh.replicate} x {mesh.shard} (mesh.replicate x mesh.shard), "
            f"which takes {needed}; write ranks: {needed}, or sizes whose product is {ranks}, "
            f"such as mesh.replicate: 1 and mesh.shard: {ranks}"
        ]
    return _batch_problems(config)


def _batch_problems(config: Config) -> list[str]:
    batch, ranks, micro = config.train.global_batch_size, config.ranks, config.train.micro_batch_size
    if batch % ranks:
        lower, upper = batch // ranks * ranks, (batch // ranks + 1) * ranks
        choices = f"{lower} or {upper}" if lower else str(upper)
        return [
            f"train.global_batch_size: {batch} sequences can't be shared evenly among {ranks} ranks; write {choices}"
        ]
    if micro and config.sequences_per_rank % micro:
        share = config.sequences_per_rank
        divisors = [str(size) for size in range(1, share + 1) if share % size == 0]
        return [
            f"train.micro_batch_size: a rank's {share} sequences a step can't be split into micro-batches of {micro}; "
            f"write one of {', '.join(divisors)}, or null"
        ]
    return []


def _size_problems(config: Config) -> list[str]:
    problems = []
    if config.model.vocab_size < VOCABULARY:
        problems.append(
            f"model.vocab_size: tokens are bytes, so it must be at least {VOCABULARY}, found {config.model.vocab_size}"
        )
    longest, length = config.model.max_position_embeddings, config.data.sequence_length
    if length > longest:
        problems.append(
            f"data.sequence_length: {length} is longer than model.max_position_embeddings, {longest}; "
            f"write at most {longest}, or raise model.max_position_embeddings"
        )
    return problems


def _optimizer_problems(optimizer: OptimizerConfig) -> list[str]:
    problems = []
    if optimizer.min_learning_rate > optimizer.learning_rate:
        problems.append(
            f"optimizer.min_learning_rate: {optimizer.min_learning_rate} exceeds optimizer.learning_rate, "
            f"{optimizer.learning_rate}"
        )
    muon, usual = optimizer.muon, MuonConfig()
    try:
        NewtonSchulz(muon.coefficients, muon.ns_steps, muon.ns_dtype)
    except ConfigError as error:
        problems.append(f"optimizer.muon: {error}")
    if optimizer.name != "muon":
        said = [each.name for each in fields(MuonConfig) if getattr(muon, each.name) != getattr(usual, each.name)]
        problems += [
            f"optimizer.muon.{name}: {optimizer.name} has no such setting; leave it out, or write optimizer.name: muon"
            for name in said
        ]
    return problems


def _data_problems(config: Config) -> list[str]:
    missing = [path for path in data_paths(config.data) if not path.exists()]
    problems = [f"data.path: there is no file or directory {path}" for path in missing]
    if config.topology is not None and not os.path.isfile(config.topology):
        problems.append(f"topology: there is no file {config.topology}")
    return problems
