"""What `fully_shard` costs where there is one rank: nothing has to be sent, and whatever time it takes is overhead.

For a stack of transformer layers on this process's device (an accelerator if there is one): the time of `unshard()` and
`reshard()` of one layer, and of a step (forward and backward), as they are, under ours and under PyTorch's FSDP2; in
float32, and with parameters that are cast to bfloat16. The three take turns in rounds, medians count. Microseconds.

    python benchmarks/unshard.py
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import perf_counter
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import hyper_parallel
from hyper_parallel.backends.torch.tensors import device

EXACT = {"float32": 1e-5, "bfloat16": 2e-2}
"""How far a gradient may be from the model as it is, over the largest of its parameter: kernels may add otherwise, and
bfloat16 has 8 bits."""


def stack(options: argparse.Namespace) -> nn.Sequential:
    """The same layers each time."""
    torch.manual_seed(0)
    width = options.width
    layers = [
        nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(options.layers)
    ]
    return nn.Sequential(*layers).to(device())


def plain(model: nn.Sequential, dtype: str) -> nn.Sequential:
    """As it is; what the others cast, this has from the start."""
    return model.to(getattr(torch, dtype))


def ours(model: nn.Sequential, dtype: str) -> nn.Sequential:
    """Under `hyper_parallel.fully_shard`."""
    policy = hyper_parallel.MixedPrecisionPolicy(None if dtype == "float32" else dtype)
    for layer in model:
        hyper_parallel.fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    return hyper_parallel.fully_shard(model, mp_policy=policy)


def fsdp2(model: nn.Sequential, dtype: str) -> nn.Sequential:
    """Under PyTorch's `fully_shard`."""
    mesh = init_device_mesh(device().type, (1,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(None if dtype == "float32" else getattr(torch, dtype))
    for layer in model:
        fsdp2_fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return fsdp2_fully_shard(model, mesh=mesh, mp_policy=policy)


WAYS: dict[str, Callable[[nn.Sequential, str], nn.Sequential]] = {"plain": plain, "ours": ours, "fsdp2": fsdp2}


def step(model: nn.Sequential, input: Tensor) -> None:
    """Forward and backward; the gradients are on the parameters."""
    model.zero_grad()
    model(input).float().square().mean().backward()


def there_and_back(model: nn.Sequential) -> None:
    """The parameters of a layer made full, and sharded again."""
    model[0].unshard()
    model[0].reshard()


def check(models: dict[str, nn.Sequential], input: Tensor, dtype: str) -> None:
    """Raise unless all give the gradients of the model as it is."""
    gradients: dict[str, list[Tensor]] = {}
    for name, model in models.items():
        step(model, input)
        found = [each.grad for each in model.parameters()]
        gradients[name] = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
    for name, found in gradients.items():
        for one, other in zip(found, gradients["plain"]):
            error = float((one.float() - other.float()).abs().max() / other.float().abs().max())
            if not error <= EXACT[dtype]:
                raise SystemExit(f"{name}, {dtype}: a gradient is {error:.1e} away from the model as it is")


def seconds(function: Callable[..., Any], *args: Any, times: int) -> float:
    """How long a call takes, the device's work included."""
    wait()
    start = perf_counter()
    for _ in range(times):
        function(*args)
    wait()
    return (perf_counter() - start) / times


def wait() -> None:
    """Let the device finish."""
    if device().type != "cpu":
        torch.accelerator.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=11, help="the median of so many counts")
    parser.add_argument("--times", type=int, default=10, help="calls in a round")
    options = parser.parse_args()

    kind = dist.get_default_backend_for_device(device())
    dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    hyper_parallel.initialize("torch")
    name = torch.get_device_module().get_device_name() if device().type == "cuda" else device().type
    print(f"torch {torch.__version__}, {name}, load {os.getloadavg()[0]:.1f}, {vars(options)}")
    print(f"{'dtype':<10} {'way':<7} {'unshard+reshard us':>19} {'step us':>10} {'over plain':>11}")
    for dtype in EXACT:
        models = {way: make(stack(options), dtype) for way, make in WAYS.items()}
        input = torch.randn(1, options.tokens, options.width, device=device(), dtype=getattr(torch, dtype))
        check(models, input, dtype)
        moves: dict[str, list[float]] = {way: [] for way in WAYS}
        steps: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, model in models.items():
                moves[way].append(0.0 if way == "plain" else seconds(there_and_back, model, times=options.times))
                steps[way].append(seconds(step, model, input, times=options.times))
        for way in WAYS:
            ratio = median(own / other for own, other in zip(steps[way], steps["plain"]))
            move, time = median(moves[way]) * 1e6, median(steps[way]) * 1e6
            print(f"{dtype:<10} {way:<7} {move:>19.1f} {time:>10.0f} {ratio:>11.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
