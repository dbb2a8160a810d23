"""What the rank does in test_muon.py."""

import copy

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel.core.errors import HyperParallelError

RATES = dict(lr=0.5, adamw_lr=0.25)


def model(dtype="float32"):
    made = nn.SequentialCell(nn.Dense(6, 8), nn.LayerNorm((8,)), nn.Dense(8, 6, has_bias=False))
    for number, parameter in enumerate(made.trainable_params()):
        value = np.random.default_rng(number).standard_normal(parameter.shape).astype(np.float32)
        parameter.set_data(ms.Tensor(value).astype(getattr(ms, dtype)))
        parameter.set_dtype(getattr(ms, dtype))
    return made


def gradients(optimizer, seed):
    drawn = [np.random.default_rng([seed, n]).standard_normal(p.shape) for n, p in enumerate(optimizer.parameters)]
    return [ms.Tensor(each, ms.float32).astype(p.dtype) for each, p in zip(drawn, optimizer.parameters)]


def values(made):
    return [parameter.astype(ms.float32).asnumpy().copy() for parameter in made.trainable_params()]


def scheduled(backend):
    """Whether it is an optimizer of MindSpore; the rates of both parts in three steps; whether all has moved."""
    made = model()
    optimizer = hp.Muon(made, **RATES)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.0 if step == 1 else 1.0] * 2)
    rates, moved = [], []
    for step in range(3):
        before = values(made)
        optimizer(gradients(optimizer, step))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        moved.append(not any(np.array_equal(a, b) for a, b in zip(before, values(made))))
        scheduler.step()
    return isinstance(optimizer, optim.Optimizer), rates, moved


def beside_adamw(backend):
    """Whether AdamW's part is MindSpore's, bit for bit, and what a missing gradient leaves."""
    ours, theirs = model(), model()
    optimizer = hp.Muon(ours, **RATES)
    chosen = [optimizer.param_groups[1]["param_names"], optimizer.param_groups[1]["params"]]
    names = {id(p): name for name, p in hp.trainable_parameters(ours)}
    others = dict(hp.trainable_parameters(theirs))
    reference = optim.AdamW([others[names[id(p)]] for p in chosen[1]], 0.25, (0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        given = gradients(optimizer, step)
        optimizer(given)
        by_id = {id(p): g for p, g in zip(optimizer.parameters, given)}
        reference(tuple(by_id[id(p)] for p in chosen[1]))
    found = {"adamw": all(np.array_equal(p.asnumpy(), others[names[id(p)]].asnumpy()) for p in chosen[1])}
    given, matrix, vector = gradients(optimizer, 4), optimizer.parameters[0], chosen[1][0]
    momentum = optimizer.state[id(matrix)]["momentum_buffer"].asnumpy().copy()
    moment = optimizer.state[id(vector)]["exp_avg"].asnumpy().copy()
    held = [matrix.asnumpy().copy(), vector.asnumpy().copy()]
    optimizer([None if p is matrix or p is vector else g for p, g in zip(optimizer.parameters, given)])
    found["kept value"] = all(np.array_equal(a, b.asnumpy()) for a, b in zip(held, (matrix, vector)))
    found["kept moment"] = np.array_equal(moment, optimizer.state[id(vector)]["exp_avg"].asnumpy())
    found["kept momentum"] = np.array_equal(momentum, optimizer.state[id(matrix)]["momentum_buffer"].asnumpy())
    return found


def saved(backend):
    """Whether another optimizer goes on as the first one, in half precision with float32 copies."""
    options = dict(master_dtype="float32", ns_dtype="float32", second_moment=hp.NorMuon())
    one, other = model("float16"), model("float16")
    first, second = hp.Muon(one, **RATES, **options), hp.Muon(other, lr=0.1, **options)
    for step in range(2):
        first(gradients(first, step))
    for mine, theirs in zip(other.trainable_params(), one.trainable_params()):
        mine.set_data(theirs.copy())
    second.load_state_dict(first.state_dict())
    for step in range(2, 4):
        first(gradients(first, step))
        second(gradients(second, step))
    masters = [s["master"].dtype == ms.float32 for s in second.state_dict()["state"].values()]
    return {
        "values": all(np.array_equal(a, b) for a, b in zip(values(one), values(other))),
        "rate": float(second.param_groups[0]["lr"]),
        "masters": all(masters) and len(masters) == len(values(one)),
    }


def refusals(backend):
    """The messages of mistakes."""
    made, told = model(), {}
    optimizer = hp.Muon(made)
    wrong = gradients(optimizer, 0)
    wrong[1] = wrong[1] * float("nan")
    first, second = made.trainable_params()[0], made.trainable_params()[1]
    calls = {
        "foreach": lambda: hp.Muon(model(), foreach=True),
        "too few": lambda: optimizer(gradients(optimizer, 0)[:-1]),
        "not finite": lambda: optimizer(wrong),
        "a copy": lambda: copy.deepcopy(optimizer),
        "a group": lambda: optimizer.add_param_group({"params": [first]}),
        "two groups": lambda: hp.Muon([{"params": [first]}, {"params": [first]}]),
        "a vector": lambda: hp.Muon([second]),
    }
    before = values(made)
    for name, call in calls.items():
        try:
            call()
        except HyperParallelError as error:
            told[name] = str(error)
    assert all(np.array_equal(a, b) for a, b in zip(before, values(made)))
    return told
