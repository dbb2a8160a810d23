"""The training loop of one rank."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from hyper_parallel import (
    DeviceMesh,
    Muon,
    NorMuon,
    clip_grad_norm_,
    full_parameters,
    initialize,
    parallelize,
    plan,
    trainable_parameters,
)
from hyper_parallel.backends import load
from hyper_parallel.core.backend import Backend, Launch, Parameter, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.plan.plan import ShardingPlan
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.topology_sources import crossing_of
from hyper_parallel.models.weights import initial_weights
from hyper_parallel.train.config import Config, OptimizerConfig, data_paths
from hyper_parallel.train.data import Batch, Corpus, Sampler, Windows, read_corpus
from hyper_parallel.train.learning_rate import learning_rate
from hyper_parallel.train.metrics import StepMetrics
from hyper_parallel.train.run_folder import RunFolder
from hyper_parallel.train.screen import Screen


def train(config: Config, launch: Launch, run_dir: Path | None, screen: Screen) -> None:
    """Join the ranks, train as `config` says, leave the results in `run_dir`, which rank 0 alone needs to know.

    The run folder appears when the model has been sharded and the text read, so that a mistake leaves none behind.
    """
    topology = initialize(config.backend, launch, config.topology)
    _check_mesh(config, topology)
    backend = load(config.backend)
    corpus = _read_text(config, backend)
    trainer = Trainer(config, backend, corpus)
    folder = RunFolder.create(run_dir, config, trainer.plan) if backend.collectives.rank() == 0 else None
    _introduce(screen, topology, trainer, corpus, folder)
    screen.begin(config.train.steps)
    try:
        for step in range(config.train.steps):
            metrics = trainer.step(step)
            if folder is not None:
                folder.add(metrics)
            screen.step(metrics)
    finally:
        screen.end()
    parameters = full_parameters(trainer.model)
    if folder is not None:
        for line in folder.finish(parameters, corpus):
            screen.say(line)
    backend.collectives.barrier()
    backend.collectives.shutdown()


def _read_text(config: Config, backend: Backend) -> Corpus:
    corpus = read_corpus(data_paths(config.data), config.data.extensions)
    digests = backend.collectives.gather_objects(corpus.digest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ConfigError(f"data.path: ranks {odd} read other text than rank 0; give every machine the same files")
    return corpus


def _introduce(screen: Screen, topology: Topology, trainer: Trainer, corpus: Corpus, folder: RunFolder | None) -> None:
    backend, sampler = trainer.backend, trainer.sampler
    screen.say(f"{backend.name}, {topology}")
    screen.say(trainer.plan.summary())
    unreadable = f", {len(corpus.unreadable)} unreadable left out" if corpus.unreadable else ""
    screen.say(
        f"text: {len(corpus.texts):,} files{unreadable}, {corpus.total_bytes:,} bytes, "
        f"{sampler.training_windows:,} windows to train on and {sampler.held_out_windows:,} held out"
    )
    if folder is not None and not folder.keeps_events:
        screen.say("tensorboard is not installed, no events are kept: run pip install 'hyper-parallel[train]'")


class Trainer:
    """A model, its optimizer and its data on one rank, and what one step does to them."""

    def __init__(self, config: Config, backend: Backend, corpus: Corpus):
        self.config, self.backend = config, backend
        self.sampler = Sampler(
            Windows(corpus, config.data.sequence_length),
            config.data.held_out_fraction,
            config.train.global_batch_size,
            config.train.seed,
        )
        self.model, self.plan = _sharded_model(config, backend)
        self._parameters = [parameter for _, parameter in trainable_parameters(self.model)]
        self._optimizer = _optimizer(config, backend, self.model, self._parameters)
        self._loss_and_gradients = backend.autograd.value_and_grad(self._loss, self._parameters)

    def step(self, step: int) -> StepMetrics:
        """Train on the global batch of `step`, counted from 0; evaluate afterwards when it is due."""
        start = time.perf_counter()
        optimizer = self.config.optimizer
        batch = self.sampler.training_batch(step)
        loss, gradients = self._accumulate(batch)
        limit = float("inf") if optimizer.max_grad_norm is None else optimizer.max_grad_norm
        norm = clip_grad_norm_(self.model, gradients, limit)
        rate = learning_rate(optimizer, step, self.config.train.steps)
        self._set_learning_rate(rate)
        self.backend.training.apply_gradients(self._optimizer, self._parameters, gradients)
        loss, memory = self._over_ranks(loss)
        seconds = time.perf_counter() - start
        return StepMetrics(
            step=step + 1,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=batch.valid_tokens,
            seconds=seconds,
            tokens_per_s=batch.valid_tokens / seconds,
            memory_bytes=memory,
            held_out_loss=self.held_out_loss() if self._evaluation_due(step) else None,
        )

    def held_out_loss(self) -> float:
        """The mean loss over all valid tokens of the fixed held-out batches."""
        total, tokens = 0.0, 0
        with self.backend.autograd.no_grad():
            for batch in self.sampler.held_out_batches(self.config.train.evaluation_batches):
                tokens += batch.valid_tokens
                for micro in self._own_micro_batches(batch):
                    total += self._number(self._loss(*self._tensors(micro), 1.0))
        return self._over_ranks(total / tokens)[0]

    def _accumulate(self, batch: Batch) -> tuple[float, list[Tensor | None]]:
        """This rank's part of the mean loss of the global batch, and the gradients of the whole mean."""
        ranks = self.backend.collectives.world_size()
        # The sum over a rank's tokens, over the valid tokens of all ranks: the mean over all tokens, however they
        # are split. Times the number of ranks, since sharded gradients are the mean over ranks.
        factor = ranks / batch.valid_tokens
        total, gradients = 0.0, None
        for micro in self._own_micro_batches(batch):
            value, new = self._loss_and_gradients(*self._tensors(micro), factor)
            total += self._number(value) / ranks
            gradients = new if gradients is None else self._add(gradients, new)
        return total, gradients

    def _add(self, gradients: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> list[Tensor | None]:
        for gradient, other in zip(gradients, new, strict=True):
            if gradient is not None and other is not None:
                self.backend.tensors.add_(gradient, other)
        return [other if gradient is None else gradient for gradient, other in zip(gradients, new, strict=True)]

    def _set_learning_rate(self, rate: float) -> None:
        """Set it for every parameter; what AdamW updates beside Muon may have a rate of its own, in proportion."""
        optimizer, training = self.config.optimizer, self.backend.training
        training.set_learning_rate(self._optimizer, rate)
        if optimizer.name == "muon" and optimizer.muon.adamw_learning_rate is not None:
            share = optimizer.muon.adamw_learning_rate / optimizer.learning_rate
            training.set_learning_rate(self._optimizer, rate * share, algorithm="adamw")

    def _loss(self, inputs: Tensor, targets: Tensor, factor: float) -> Tensor:
        return self.backend.training.cross_entropy(self.model(inputs), targets, "sum") * factor

    def _own_micro_batches(self, batch: Batch):
        collectives = self.backend.collectives
        part = batch.part(collectives.rank(), collectives.world_size())
        return part.split(self.config.micro_batch_size)

    def _tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        tensors = self.backend.tensors
        return tensors.from_numpy(batch.inputs), tensors.from_numpy(batch.targets)

    def _number(self, scalar: Tensor) -> float:
        return float(self.backend.tensors.to_numpy(scalar))

    def _over_ranks(self, value: float) -> tuple[float, int]:
        """The sum of a number over all ranks, and the highest peak of memory among them, in one small message."""
        collectives, tensors = self.backend.collectives, self.backend.tensors
        figures = np.zeros(1 + collectives.world_size(), np.float32)
        figures[0], figures[1 + collectives.rank()] = value, tensors.memory_bytes()
        tensor = tensors.from_numpy(figures)
        collectives.all_reduce(tensor, collectives.world())
        figures = tensors.to_numpy(tensor)
        return float(figures[0]), int(figures[1:].max())

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.train.evaluate_every
        return step + 1 == self.config.train.steps or (every is not None and (step + 1) % every == 0)


def _sharded_model(config: Config, backend: Backend) -> tuple[Any, ShardingPlan]:
    """The decoder with its initial weights, sharded over the mesh."""
    decoder = importlib.import_module(f"hyper_parallel.models.{backend.name}_decoder").Decoder(config.model)
    backend.modules.load_parameters(decoder, initial_weights(config.model, config.train.seed))
    sharding = plan(decoder, _mesh(config))
    allowed = config.mesh.allow_shard_across_supernodes
    return parallelize(decoder, sharding, allow_shard_across_supernodes=allowed), sharding


def _mesh(config: Config) -> DeviceMesh:
    return DeviceMesh((config.mesh.replicate, config.mesh.shard), ("replicate", "shard"))


def _check_mesh(config: Config, topology: Topology) -> None:
    """Refuse what `parallelize` would, in the words of the settings, before the text is read."""
    crossing = None if config.mesh.allow_shard_across_supernodes else crossing_of(topology, _mesh(config))
    if crossing is None:
        return
    sizes, inside = "", crossing.inside
    if inside is not None:
        replicate, shard = inside.axis_size("replicate"), inside.axis_size("shard")
        sizes = f"mesh.replicate: {replicate} and mesh.shard: {shard}, which shards inside supernodes, or "
    raise ConfigError(
        f"mesh.shard: {crossing.words}. Write {sizes}mesh.allow_shard_across_supernodes: true if the model needs the "
        "memory of them all; if those links are fast, tell so in a file that topology: names"
    )


def _optimizer(config: Config, backend: Backend, model: Any, parameters: Sequence[Parameter]) -> Any:
    """What `optimizer.name` asks for: Muon, or the framework's AdamW. Matrices decay, vectors do not."""
    optimizer = config.optimizer
    if optimizer.name == "muon":
        return _muon(optimizer, model, config.mesh.allow_shard_across_supernodes)
    matrices = [parameter for parameter in parameters if len(parameter.shape) > 1]
    vectors = [parameter for parameter in parameters if len(parameter.shape) <= 1]
    groups = [(matrices, optimizer.weight_decay), (vectors, 0.0)]
    return backend.training.adamw(groups, optimizer.learning_rate, optimizer.betas, optimizer.eps)


def _muon(optimizer: OptimizerConfig, model: Any, across_supernodes: bool) -> Any:
    muon = optimizer.muon
    return Muon(
        model,
        lr=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        momentum=muon.momentum,
        nesterov=muon.nesterov,
        coefficients=muon.coefficients,
        steps=muon.ns_steps,
        ns_dtype=muon.ns_dtype,
        scale=muon.scale,
        second_moment=None if muon.second_moment is None else NorMuon(),
        adamw_lr=muon.adamw_learning_rate,
        adamw_betas=optimizer.betas,
        adamw_eps=optimizer.eps,
        routes=dict(muon.routes),
        slow_shard="hierarchical" if across_supernodes else "refuse",
    )
