"""What every rank does in test_seeds.py."""

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.execution.randomness import Randomness
from tests.equivalence import toy


def seeded(backend, sizes):
    """The seed that the framework's generators have after `manual_seed`, and what the next draws give; a second time
    they give the same."""
    mesh = hp.DeviceMesh.from_sizes(sizes)
    seen = []
    for _ in range(2):
        assert hp.manual_seed(11, mesh).state_dict() == {"seed": 11, "draw": 0}
        seen.append((backend.randomness.last_seed(), [backend.randomness.draw() for _ in range(3)]))
    assert seen[0] == seen[1]
    return seen[0]


def dropped(backend, sizes, draw_mask):
    """Masks of a step of two layers, as the modules of a plan switch the generators around them: outside of a module,
    inside, behind its last linear, and in a part of the sequence. Seeds are read off again, states set back."""
    mesh = hp.DeviceMesh.from_sizes(sizes)
    hp.manual_seed(3, mesh)
    randomness = Randomness(backend, mesh, backend.collectives.rank())
    masks, apart = [], []

    def note():
        masks.append(draw_mask())
        apart.append(randomness.apart())

    for layer in ("layers.0", "layers.1"):
        note()
        randomness.enter(f"{layer}.attn", ("tensor",))
        note()
        randomness.go_on(f"{layer}.attn.o_proj", ())
        note()
        randomness.leave(f"{layer}.attn")
        randomness.enter(layer, ("tensor",))
        note()
        randomness.enter(f"{layer}.mlp", ("tensor",))
        note()
        randomness.go_on(f"{layer}.mlp.down_proj", ())
        note()
        randomness.leave(f"{layer}.mlp")
        note()
        randomness.leave(layer)
    assert apart == 2 * [(), ("tensor",), (), ("tensor",), ("tensor",), (), ("tensor",)]
    return np.array(masks)


def torch_masks(backend, sizes):
    import torch

    return dropped(backend, sizes, lambda: torch.nn.functional.dropout(torch.ones(64), 0.5).numpy())


def mindspore_masks(backend, sizes):
    import mindspore as ms
    from mindspore import ops

    theirs = np.random.get_state()[1].copy()
    masks = dropped(backend, sizes, lambda: ops.dropout(ms.Tensor(np.ones(64, np.float32)), p=0.5).asnumpy())
    assert np.array_equal(theirs, np.random.get_state()[1])
    return masks


def refused(backend):
    """What is said of a model that has no mesh yet, on several ranks."""
    model, _ = toy.build(backend, toy.ToyConfig())
    try:
        hp.manual_seed(1, model)
    except hp.ConfigError as error:
        return str(error)
