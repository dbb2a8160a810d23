"""What a mixed precision policy casts of the things that modules are given and return."""

from collections import namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.fsdp.casting import cast_all

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "kept"


@dataclass(slots=True)
class Slots:
    x: torch.Tensor


def cast(tree):
    return cast_all(backends.load("torch"), tree, "bfloat16")


WHOLE = torch.arange(3)
NESTS = {
    "tuple": lambda x: (x, [x, None], "text"),
    "named tuple": lambda x: Pair(x, WHOLE),
    "dict": lambda x: {"a": x, "b": {"c": x}},
    "read-only mapping": lambda x: MappingProxyType({"a": x}),
    "frozen dataclass": lambda x: Frozen(x, "own"),
    "slots": lambda x: Slots(x),
    "model output": lambda x: CausalLMOutput(loss=x, logits=x),
}


def tensors(tree):
    """The tensors of a nest, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (Frozen, Slots)):
        return [tree.x]
    items = tree.values() if hasattr(tree, "values") else tree if isinstance(tree, (tuple, list)) else ()
    return [each for item in items for each in tensors(item)]


@pytest.mark.parametrize("kind", NESTS)
def test_floating_tensors_are_cast_wherever_they_are(kind):
    x = torch.ones(2, requires_grad=True)
    given = NESTS[kind](x)
    made = cast(given)
    assert type(made) is type(given)
    found = tensors(made)
    assert len(found) == len(tensors(given))
    assert {each.dtype for each in found} - {torch.int64} == {torch.bfloat16}
    sum(each.sum() for each in found).backward()
    assert x.grad is not None and x.grad.dtype == torch.float32, "recorded"
    assert {each.dtype for each in tensors(given)} - {torch.int64} == {torch.float32}, "the given one stays"


@pytest.mark.parametrize("kind", NESTS)
def test_what_needs_no_cast_is_handed_on_itself(kind):
    given = NESTS[kind](torch.ones(2, dtype=torch.bfloat16))
    assert cast(given) is given


def test_attributes_follow_in_outputs_that_are_mappings_too():
    made = cast(CausalLMOutput(logits=torch.ones(2)))
    assert made.logits.dtype == made["logits"].dtype == torch.bfloat16


def test_policies_of_pytorch_are_taken_as_they_are():
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from hyper_parallel.core.fsdp.policy import offload_of, precision_of

    theirs = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    assert precision_of(theirs) == hp.MixedPrecisionPolicy("bfloat16", "float32", cast_forward_inputs=False)
    assert offload_of(CPUOffloadPolicy(pin_memory=False)) == hp.CPUOffloadPolicy(pin_memory=False)
    assert type(offload_of(OffloadPolicy())) is hp.OffloadPolicy
