"""All tensor ranks of a plan in one process: a thread for each, meeting where boundaries say so.

Every thread runs the model's own, unmodified forward on its local parameters; hooks at the boundaries' modules do
what contracts say, forward and backward, by putting whole tensors together and cutting them up again. What a contract
calls a copy is checked to be one.
"""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager
from typing import Callable, Iterator

import torch
from torch import nn

from hyper_parallel import ShardingPlan
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.core.plan.contracts import Contract
from hyper_parallel.core.plan.role_rules import ROLES

HEADS = {
    "num_heads",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_kv_heads",
    "num_key_value_heads",
    "num_key_heads",
}
WIDTHS = {"split_size", "embed_dim", "hidden_size", "inner_dim", "attn_hidden_size"}
"""Attributes from which an attention reads the number of heads, or the features of all heads together."""


class CopiesDiffer(AssertionError):
    """Ranks that should hold the same do not."""


class Meeting:
    """Where the ranks' threads hand tensors to each other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._values: list[torch.Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=60)

    def exchange(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        """The values of all ranks."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, body: Callable[[int], object]) -> list:
        """What `body` gives on each rank; raises the first error."""
        results, errors = [None] * self.ranks, []

        def one(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
        return results


def whole(values: list[torch.Tensor], placement: Placement, where: str) -> torch.Tensor:
    """One tensor out of what the ranks hold."""
    if isinstance(placement, Shard):
        return torch.cat(values, placement.dim)
    if isinstance(placement, Partial):
        return sum(values)
    for other in values[1:]:
        if not torch.allclose(values[0], other, rtol=1e-6, atol=1e-9):
            raise CopiesDiffer(f"{where}: ranks hold {values[0].flatten()[:3]} and {other.flatten()[:3]}")
    return values[0]


def part(tensor: torch.Tensor, placement: Placement, rank: int, ranks: int) -> torch.Tensor:
    """What a rank holds of it."""
    if isinstance(placement, Shard):
        size = -(-tensor.shape[placement.dim] // ranks)
        start = min(rank * size, tensor.shape[placement.dim])
        return tensor.narrow(placement.dim, start, min(size, tensor.shape[placement.dim] - start)).clone()
    return tensor.clone() if placement == Replicate() or rank == 0 else torch.zeros_like(tensor)


class Cross(torch.autograd.Function):
    """A tensor crosses a boundary, and its gradient comes back."""

    @staticmethod
    def forward(ctx, tensor, meeting, rank, sides, where):
        ctx.rest = meeting, rank, sides, where
        before, after, _, _ = sides
        return part(whole(meeting.exchange(rank, tensor.detach()), before, where), after, rank, meeting.ranks)

    @staticmethod
    def backward(ctx, gradient):
        meeting, rank, (_, _, source, target), where = ctx.rest
        values = meeting.exchange(rank, gradient)
        return part(whole(values, target, f"gradient at {where}"), source, rank, meeting.ranks), None, None, None, None


class RankModel:
    """The model of one rank: a copy with local parameters and hooks."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, meeting: Meeting, rank: int, batch: int) -> None:
        self.batch = batch
        self.model, self.plan, self.meeting, self.rank = copy.deepcopy(model), plan, meeting, rank
        self.modules = dict(self.model.named_modules())
        self.whole = {name: each.detach() for name, each in model.named_parameters()}
        self._make_local()
        self._count_heads()
        self._shift_tokens()
        boundaries = sorted(
            plan.boundaries, key=lambda each: -each.module.count(".")
        )  # inner ones act first on outputs
        for each in boundaries:
            self._hook(each.module, each.inputs, each.outputs)
        self._add_biases()

    def _make_local(self) -> None:
        made = {}
        for name, first in [(each.name, each.name) for each in self.plan.parameters] + list(self.plan.tied.items()):
            if first not in made:
                local = self.plan.layout(first).shard(self.whole[first].numpy(), self.rank)
                made[first] = nn.Parameter(torch.from_numpy(local))
            owner, _, leaf = name.rpartition(".")
            self.modules[owner]._parameters[leaf] = made[first]
            if hasattr(self.modules[owner], "nf"):  # a transposed linear keeps the number of its outputs
                self.modules[owner].nf = self.modules[owner].weight.shape[1]
        self.local = made

    def _count_heads(self) -> None:
        """Attention that reads sizes from attributes is told those of its own heads."""
        ranks = self.meeting.ranks
        gathered = {
            each.module.rpartition(".")[0]
            for each in self.plan.boundaries
            if each.kind == "projection" and each.outputs[0].name == "features"
        }
        kept = {p.boundary for p in self.plan.parameters if p.role in ("key", "value") and not p.placements}
        for each in self.plan.boundaries:
            if each.kind != "attention" or any(name == each.module for name in gathered):
                continue
            self.modules[each.module].register_forward_pre_hook(self._own_slopes, with_kwargs=True)
            below = [m for name, m in self.modules.items() if f"{name}.".startswith(f"{each.module}.")]
            below = [module for module in below if not self._is_whole(module)]  # such as what only chooses keys
            for module in below:
                for name, value in list(vars(module).items()):
                    if name in HEADS | WIDTHS and isinstance(value, int) and value > 1:
                        setattr(module, name, value // ranks or 1)
                if each.module in kept and isinstance(getattr(module, "num_key_value_groups", None), int):
                    module.num_key_value_groups = 1
        for each in self.plan.parameters:
            if each.role in ("key", "value") and not each.placements and each.name.endswith("weight"):
                norm = each.name.replace("k_proj", "k_norm")  # over all heads, so the choice comes after it
                wide = norm != each.name and self._role(norm) == "wide_norm"
                self._pick_head(each.shape[0], norm if wide else each.name)

    def _is_whole(self, module: nn.Module) -> bool:
        """It has parameters, and none of them is cut."""
        cut = {id(self.local[each.name]) for each in self.plan.parameters if "tensor" in each.placements}
        own = {id(each) for each in module.parameters()}
        return bool(own) and not own & cut

    def _own_slopes(self, _, args, kwargs):
        """A bias for each head that the model makes outside of attention, [heads, ..] or [batch * heads, ..]."""
        for key in ("alibi", "position_bias"):
            if torch.is_tensor(kwargs.get(key)):
                heads = self.model.config.num_attention_heads
                by_head = kwargs[key].unflatten(0, (-1, heads))
                kwargs[key] = part(by_head, Shard(1), self.rank, self.meeting.ranks).flatten(0, 1)
        return args, kwargs

    def _role(self, name: str) -> str:
        return next((each.role for each in self.plan.parameters if each.name == name), "")

    def _pick_head(self, features: int, name: str) -> None:
        """Key/value heads that are kept whole: a rank goes on with the one that its query heads use."""
        module = self.modules[name.rpartition(".")[0]]
        heads = self.model.config.num_key_value_heads
        size, index = features // heads, self.rank * heads // self.meeting.ranks
        module.register_forward_hook(lambda _, args, output: output.narrow(-1, index * size, size))

    def _shift_tokens(self) -> None:
        """A part of a table finds its own tokens, and gives zeros for others."""
        for each in self.plan.boundaries:
            module = self.modules[each.module]
            weight = getattr(module, "weight", None)
            if each.kind != "embedding" or each.outputs[0].before.get("tensor") != Partial():
                continue
            start = self.rank * -(-self._rows(each.module) // self.meeting.ranks)
            module.padding_idx = None
            self._mask(module, start, weight.shape[0])

    def _mask(self, module: nn.Module, start: int, rows: int) -> None:
        kept = []

        def before(_, args):
            tokens = args[0] - start
            kept.append((tokens >= 0) & (tokens < rows))
            return (tokens.clamp(0, rows - 1), *args[1:])

        def after(_, args, output):
            return output * kept.pop().unsqueeze(-1)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _rows(self, module: str) -> int:
        name = f"{module}.weight"
        return self.plan[name].shape[0]

    def _hook(self, name: str, inputs: tuple[Contract, ...], outputs: tuple[Contract, ...]) -> None:
        module = self.modules[name]

        def before(_, args, kwargs):
            if args and torch.is_tensor(args[0]):
                return (self._cross(args[0], inputs[0], f"the input of {name}"), *args[1:]), kwargs
            key = next(key for key in ("hidden_states", "x", "input") if key in kwargs)
            return args, kwargs | {key: self._cross(kwargs[key], inputs[0], f"the input of {name}")}

        def after(_, args, output):
            if torch.is_tensor(output):
                return self._cross(output, outputs[0], f"the output of {name}")
            first = self._cross(output[0], outputs[0], f"the output of {name}")
            return type(output)((first, *output[1:]))

        if inputs:
            module.register_forward_pre_hook(before, with_kwargs=True)
        if outputs:
            module.register_forward_hook(after)

    def _cross(self, tensor: torch.Tensor, contract: Contract, where: str) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        sides = tuple(
            each.get("tensor", Replicate())
            for each in (contract.before, contract.after, contract.source_gradient, contract.gradient)
        )
        if sides[0] == sides[1] and sides[2] == sides[3]:
            return tensor
        if tensor.dim() < contract.dims:  # [tokens, features]: contracts tell samples and tokens apart
            tensor = tensor.unflatten(0, (self.batch, -1))
            return Cross.apply(tensor, self.meeting, self.rank, sides, where).flatten(0, 1)
        return Cross.apply(tensor, self.meeting, self.rank, sides, where)

    def _add_biases(self) -> None:
        """A bias behind a reduction is added once; where it can't be taken out of a sum, each rank adds its share."""
        for each in self.plan.parameters:
            if "tensor" in each.placements or ROLES[each.role].tensor != "input" or len(each.shape) > 2:
                continue
            owner, _, leaf = each.name.rpartition(".")
            if leaf != "bias":
                parameter = self.local[each.name]
                self._share(self.modules[owner], leaf, parameter)
                continue
            bias = self.local[each.name]
            self.modules[owner]._parameters["bias"] = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
            self._after(each.boundary, bias)

    def _after(self, boundary: str, bias: nn.Parameter) -> None:
        def add(_, args, output):
            return output + bias if torch.is_tensor(output) else type(output)((output[0] + bias, *output[1:]))

        self.modules[boundary].register_forward_hook(add)

    def _share(self, module: nn.Module, leaf: str, parameter: nn.Parameter) -> None:
        del module._parameters[leaf]
        module.register_forward_pre_hook(lambda *_: setattr(module, leaf, parameter / self.meeting.ranks))


@contextmanager
def double_precision() -> Iterator[None]:
    """New tensors are of float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gradients_of_all_ranks(model, plan, inputs, weights, ranks):
    """Logits, and each parameter's gradient as it comes out of the ranks: a list of local gradients by name, reduced
    over `tensor` where the plan says that they are pending."""
    meeting = Meeting(ranks)
    rank_models = [RankModel(model, plan, meeting, rank, len(weights)) for rank in range(ranks)]

    def body(rank: int):
        own = rank_models[rank]
        logits = own.model(**inputs).logits
        head = next(each for each in plan.boundaries if each.kind == "head").outputs[0].after.get("tensor", Replicate())
        sides = (head, Replicate(), head, Replicate())
        logits = Cross.apply(logits, meeting, rank, sides, "the logits")
        (logits * weights).sum().backward()
        gradients = {}
        for each in plan.parameters:
            gradient = own.local[each.name].grad
            gradient = torch.zeros_like(own.local[each.name]) if gradient is None else gradient
            if "tensor" in each.pending:
                gradient = sum(meeting.exchange(rank, gradient))
            gradients[each.name] = gradient
        return logits.detach(), gradients

    return meeting.run(body)
