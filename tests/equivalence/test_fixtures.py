"""Sharded models against numbers of Hugging Face's models on one device: the loss, and every gradient.

tests/data has token ids, weights p:NAME, the loss and gradients g:NAME, made in PyTorch in float32.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.equivalence import fixture_bodies, production_bodies
from tests.equivalence.test_decoder import SIZES
from tests.torch.all_ranks import on_all_ranks
from tests.torch.production import planned

FAMILIES = ["llama", "qwen3", "mixtral", "qwen3_moe"]
WITH_EXPERTS = ["mixtral", "qwen3_moe"]
THEIR_OWN = {"mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6}}
"""Where a family's defaults are others than our decoder's."""

MESHES = [{"tensor": 2}, {"tensor": 4}, {"shard": 2, "tensor": 2}]


def fixture(family):
    """Weights, token ids, the loss and the gradients."""
    arrays = np.load(Path(__file__).parents[1] / "data" / f"{family}_tiny.npz")
    weights, gradients = ({name[2:]: arrays[name] for name in arrays if name[:2] == kind} for kind in ("p:", "g:"))
    return weights, arrays["__ids"], float(arrays["__loss"]), gradients


def assert_reproduced(results, loss, gradients):
    """The ranks' losses have the mean `loss`, and every rank has its part of every gradient.

    float32 sums of a few hundred terms in another order differ by a few units of 6e-8; the bounds leave them ten times
    that, of the largest element of each gradient.
    """
    assert np.mean([found for found, *_ in results]) == pytest.approx(loss, rel=1e-6)
    for rank, (_, found, layouts, *_) in enumerate(results):
        assert found.keys() == gradients.keys()
        for name, whole in gradients.items():
            part = whole if layouts[name] is None else layouts[name].shard(whole, rank)
            assert found[name].shape == part.shape, name
            error = np.abs(found[name] - part).max(initial=0) / np.abs(whole).max()
            assert error < 5e-6, f"rank {rank}, gradient of {name}: {error}"


def in_one_process(family, sizes, sequence_parallel):
    """All ranks as threads, with Hugging Face's own classes."""
    weights, ids, loss, gradients = fixture(family)
    # On four ranks a row of Qwen3-MoE's experts has 6 elements, 24 bytes; PyTorch's grouped product wants 16 or 32.
    model = fixture_bodies.build(family, weights, grouped=(family, sizes) != ("qwen3_moe", {"tensor": 4}))
    plan = planned(model, sizes, sequence_parallel)
    results = on_all_ranks(model, plan, lambda backend, own: fixture_bodies.step(backend, own, plan, ids))
    assert_reproduced(results, loss, gradients)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_faces_classes_reproduce_their_numbers(family, sizes, sequence_parallel):
    in_one_process(family, sizes, sequence_parallel)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_so_they_do_with_experts_dealt_out(family):
    in_one_process(family, {"expert": 2, "tensor": 2}, sequence_parallel=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_so_they_do_on_real_ranks(pool, family):
    weights, ids, loss, gradients = fixture(family)
    results = pool("torch", 2).run(fixture_bodies.one_step, family, weights, ids, {"tensor": 2}, True)
    assert_reproduced(results, loss, gradients)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])  # Qwen3 is in test_production.py
def test_our_decoder_in_their_form_reproduces_them_on_both_backends(pool, backend_name, family, sequence_parallel):
    weights, ids, loss, gradients = fixture(family)
    body, config = production_bodies.one_step, SIZES | THEIR_OWN.get(family, {})
    results = pool(backend_name, 2).run(body, config, weights, ids, {"tensor": 2}, sequence_parallel)
    assert_reproduced(results, loss, gradients)
