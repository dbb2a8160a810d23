"""A training step of our decoder with tensor parallelism on ranks of this machine, against peers.

    plain       the decoder as it is: every rank computes everything
    megatron    tensor parallelism written into the decoder by hand (megatron_decoder.py)
    production  the decoder under `hyper_parallel.parallelize`
    validate    the same in validation
    dtensor     the decoder under PyTorch's `parallelize_module`

Every mode computes the gradients of one device: that is checked first, in float64. Then a step is forward, loss and
backward, in float32, with gradients that are complete at its end. The modes take turns in rounds; the median of the
rounds counts, and ratios are medians of the ratios within rounds, so that a busy machine slows all of them. "wall" is
the time until the slowest rank is done, "busy" what the ranks computed, all threads together. Milliseconds.

    python benchmarks/tensor_parallel.py --sequence-parallel
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
from abc import ABC, abstractmethod
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, ContextManager

import torch
from megatron_decoder import CrossEntropy, MegatronDecoder, part_of
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import hyper_parallel
from hyper_parallel import DeviceMesh, backends
from hyper_parallel.core.backend import Launch
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.torch_decoder import Decoder

EXACT = 1e-10
"""How far a gradient in float64 may be from that of one device, over the largest one of its parameter."""


class Mode(ABC):
    """One way to train the decoder: made from a whole one, which it may change."""

    def __init__(self, decoder: Decoder, sequence_parallel: bool) -> None:
        self.model: nn.Module = decoder

    @abstractmethod
    def loss(self, logits: Any, targets: Tensor) -> Tensor:
        """The mean cross entropy."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One step; returns the loss. The gradients are on the parameters."""
        with self.around_step():
            loss = self.loss(self.model(tokens), targets)
            loss.backward()
        self.finish()
        return loss

    def around_step(self) -> ContextManager[None]:
        """What a step runs in."""
        return nullcontext()

    def finish(self) -> None:  # noqa: B027 (most modes have nothing to do)
        """What is left to do after backward."""

    def expected(self, name: str, whole: Tensor) -> Tensor:
        """What `found` must give, from the whole gradient of a parameter."""
        return whole

    def found(self, gradient: Any) -> Tensor:
        """The gradient of a parameter as a tensor."""
        return gradient


class Plain(Mode):
    """The decoder as it is."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Megatron(Mode):
    """Written by hand."""

    def __init__(self, decoder: Decoder, sequence_parallel: bool) -> None:
        self.model = MegatronDecoder(decoder.config, sequence_parallel).to(decoder.lm_head.weight.dtype)
        self.model.load_whole(decoder.state_dict())

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return CrossEntropy.apply(logits.flatten(0, 1), targets.flatten())

    def finish(self) -> None:
        self.model.finish_gradients()

    def expected(self, name: str, whole: Tensor) -> Tensor:
        return part_of(name, whole)


class Production(Mode):
    """Under a plan of ours."""

    how = "production"

    def __init__(self, decoder: Decoder, sequence_parallel: bool) -> None:
        mesh = DeviceMesh((torch.distributed.get_world_size(),), ("tensor",))
        plan = hyper_parallel.plan(decoder, mesh, {"sequence_parallel": sequence_parallel})
        self.model = hyper_parallel.parallelize(decoder, plan, mode=self.how)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return hyper_parallel.cross_entropy(logits, targets, self.model)

    def expected(self, name: str, whole: Tensor) -> Tensor:
        layout = hyper_parallel.layout_of(self.model.get_parameter(name))
        return torch.from_numpy(layout.shard(whole.numpy(), torch.distributed.get_rank()))


class Validation(Production):
    """The same, with tensors that are followed."""

    how = "validate"


class PyTorchDTensor(Mode):
    """Under `parallelize_module`, with a loss that keeps the vocabulary cut."""

    def __init__(self, decoder: Decoder, sequence_parallel: bool) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self.model = parallelize_module(decoder, mesh, styles_of(decoder.config.num_layers, sequence_parallel))

    def loss(self, logits: DTensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def around_step(self) -> ContextManager[None]:
        return loss_parallel()

    def found(self, gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def styles_of(layers: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """What `parallelize_module` does to each module. Attention and SwiGLU take their input in themselves, so that one
    collective does for all linears that read it; norms of heads are those of a sequence of heads."""
    whole, stream = Replicate(), Shard(1) if sequence_parallel else Replicate()
    in_layer = {
        "self_attn": PrepareModuleInput(input_layouts=(stream, None, None), desired_input_layouts=(whole, None, None)),
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        in_layer[name] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        in_layer[name] = RowwiseParallel(output_layouts=stream)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        in_layer[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=stream),
        "lm_head": ColwiseParallel(input_layouts=stream, use_local_output=False),
    }
    if sequence_parallel:
        in_layer |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        outside["model.norm"] = SequenceParallel()
    return outside | {
        f"model.layers.{index}.{name}": style for index in range(layers) for name, style in in_layer.items()
    }


MODES: dict[str, type[Mode]] = {
    "plain": Plain,
    "megatron": Megatron,
    "production": Production,
    "validate": Validation,
    "dtensor": PyTorchDTensor,
}


def check(name: str, mode: Mode, reference: Plain, tokens: Tensor, targets: Tensor) -> float:
    """The largest error of a gradient, over the largest of its parameter; ends the program when it is not of
    rounding."""
    expected, found = reference.step(tokens, targets).detach(), mode.found(mode.step(tokens, targets).detach())
    errors = {"loss": float(abs(found - expected) / expected)}
    wholes = dict(reference.model.named_parameters())
    for parameter_name, parameter in mode.model.named_parameters():
        whole = wholes[parameter_name].grad
        difference = mode.found(parameter.grad) - mode.expected(parameter_name, whole)
        errors[parameter_name] = float(difference.abs().max() / whole.abs().max())
    worst = max(errors, key=errors.get)
    if not errors[worst] <= EXACT:
        raise SystemExit(f"{name}: {worst} is {errors[worst]:.1e} away from one device")
    for each in (mode, reference):
        each.model.zero_grad(set_to_none=True)
    return errors[worst]


def measure(
    modes: dict[str, Mode], tokens: Tensor, targets: Tensor, rounds: int, steps: int
) -> dict[str, list[dict[str, float]]]:
    """Milliseconds a step on this rank, by mode and round. The order changes from round to round."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
    names = list(modes)
    for turn in range(rounds + 1):  # the first round warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            torch.distributed.barrier()
            wall, busy = perf_counter(), process_time()
            for _ in range(steps):
                modes[name].step(tokens, targets)
                modes[name].model.zero_grad(set_to_none=True)
            spent = {"wall": perf_counter() - wall, "busy": process_time() - busy}
            if turn:
                times[name].append({clock: seconds / steps * 1e3 for clock, seconds in spent.items()})
    return times


def rank_main(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """One rank: checks and measures; rank 0 puts what all ranks found into `results`."""
    torch.set_num_threads(1)
    backend = backends.load("torch")
    backend.collectives.initialize(Launch(rank, options.ranks, rank, "127.0.0.1", port, "local"))
    torch.manual_seed(0)
    whole = Decoder(config_of(options))
    tokens, targets = torch.randint(0, options.vocabulary, (2, options.batch, options.length))
    doubled, errors, modes = copy.deepcopy(whole).double(), {}, {}
    for name in options.modes:
        made = MODES[name](copy.deepcopy(doubled), options.sequence_parallel)
        errors[name] = check(name, made, Plain(doubled, False), tokens, targets)
        modes[name] = MODES[name](copy.deepcopy(whole), options.sequence_parallel)
    times = measure(modes, tokens, targets, options.rounds, options.steps)
    of_all = backend.collectives.gather_objects((errors, times))
    if rank == 0:
        results.put(of_all)
    backend.collectives.barrier()
    backend.collectives.shutdown()


def config_of(options: argparse.Namespace) -> DecoderConfig:
    """The decoder's sizes, from the few that can be chosen."""
    return DecoderConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_layers=options.layers,
        num_heads=options.hidden // 32,
        num_kv_heads=options.hidden // 64,
        head_dim=32,
        max_position_embeddings=options.length,
    )


def run(options: argparse.Namespace) -> dict[str, dict]:
    """What the ranks found: for each mode its largest error, and for each clock the time of every round."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(rank_main, (port, options, results), nprocs=options.ranks)
    of_all = results.get()
    found = {}
    for name in options.modes:
        rounds = list(zip(*(times[name] for _, times in of_all)))
        found[name] = {
            "error": max(errors[name] for errors, _ in of_all),
            "wall": [max(each["wall"] for each in ranks) for ranks in rounds],
            "busy": [sum(each["busy"] for each in ranks) for ranks in rounds],
        }
    return found


def print_table(found: dict[str, dict]) -> None:
    """One row for each mode."""
    peer = "megatron" if "megatron" in found else next(iter(found))
    columns = ("wall", "busy")
    print(f"{'mode':<12} " + " ".join(f"{clock:>8} {'/ ' + peer:>10}" for clock in columns) + f" {'error':>9}")
    for name, row in found.items():
        cells = " ".join(f"{median(row[clock]):>8.1f} {ratio(row, found[peer], clock):>10.3f}" for clock in columns)
        print(f"{name:<12} {cells} {row['error']:>9.1e}")


def ratio(row: dict, peer: dict, clock: str) -> float:
    """The median over rounds of the time of a mode over that of its peer."""
    return median(own / other for own, other in zip(row[clock], peer[clock]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, action="append", dest="modes", help="again for more (default: all)")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the sequence between blocks")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--hidden", type=int, default=256, help="width of hidden states, a multiple of 64 * ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096, help="a multiple of the number of ranks")
    parser.add_argument("--batch", type=int, default=4, help="samples")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=21, help="the median of so many counts (default 21)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a round (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    options = parser.parse_args()
    options.modes = options.modes or list(MODES)

    os.environ["OMP_NUM_THREADS"] = "1"  # read by the ranks when they import torch
    load = os.getloadavg()[0]
    found = run(options)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f} at the start, {options.ranks} ranks, "
        f"{options.layers} layers of {options.hidden}, {options.batch} x {options.length} tokens, "
        f"sequence parallelism {'on' if options.sequence_parallel else 'off'}"
    )
    print_table(found)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "settings": settings, "modes": found}, indent=1)
        )


if __name__ == "__main__":
    main()
