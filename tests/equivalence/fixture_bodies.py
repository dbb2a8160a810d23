"""Hugging Face's models in PyTorch with the values of a fixture, and a step of one rank, for test_fixtures.py."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from tests.torch.production import own_samples, planned
from tests.torch.test_hugging_face import EXPERTS, HEAD, SIZES


def build(family, weights, grouped=True):
    """The model that the fixture was made with; experts one by one unless `grouped`."""
    config = AutoConfig.for_model(family, **SIZES | HEAD | (EXPERTS if "moe" in family or family == "mixtral" else {}))
    model = AutoModelForCausalLM.from_config(config, experts_implementation=None if grouped else "eager")
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model


def step(backend, model, plan, ids):
    """A step of a model that is parallel: the loss that the model computes itself, the gradients, and
    how each lies."""
    own = own_samples(plan, backend.collectives.rank(), torch.from_numpy(ids))
    loss = model(input_ids=own, labels=own, use_cache=False).loss
    loss.backward()
    gradients = {name: each.grad.numpy() for name, each in model.named_parameters()}
    layouts = {name: hp.layout_of(each) for name, each in model.named_parameters()}
    return loss.item(), gradients, layouts


def one_step(backend, family, weights, ids, sizes, sequence_parallel):
    """The same where ranks are processes."""
    model = build(family, weights)
    plan = planned(model, sizes, sequence_parallel)
    return step(backend, hp.parallelize(model, plan), plan, ids)
