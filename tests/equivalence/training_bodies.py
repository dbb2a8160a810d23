"""What every rank does in test_training.py."""

import importlib

import numpy as np

import hyper_parallel


def make_parameters(backend, values):
    """Parameters of the framework that hold copies of `values`, name -> array."""
    framework = importlib.import_module(backend.name)
    if backend.name == "torch":
        return [framework.nn.Parameter(backend.tensors.from_numpy(value)) for value in values.values()]
    return [framework.Parameter(backend.tensors.from_numpy(value), name=name) for name, value in values.items()]


def as_tensors(backend, arrays):
    return [None if array is None else backend.tensors.from_numpy(array) for array in arrays]


def train(backend, values, decays, steps, betas, eps):
    """The values after each of `steps`, a list of (learning rate, gradients by name or None).

    The parameters are grouped by `decays`, name -> weight decay, in reverse order of names, and their gradients are
    handed over in the order of `values`."""
    names = list(values)
    parameters = make_parameters(backend, values)
    groups = {}
    for name in reversed(names):
        groups.setdefault(decays[name], []).append(parameters[names.index(name)])
    optimizer = backend.training.adamw([(group, decay) for decay, group in groups.items()], 1.0, betas, eps)
    history = []
    for learning_rate, gradients in steps:
        backend.training.set_learning_rate(optimizer, learning_rate)
        backend.training.apply_gradients(optimizer, parameters, as_tensors(backend, [gradients[n] for n in names]))
        history.append({n: backend.tensors.to_numpy(p) for n, p in zip(names, parameters)})
    return history


def train_with_muon(backend, values, steps, options):
    """The values after each of `steps`, a list of (rate of Muon, rate of AdamW, gradients by name or None). Matrices go
    to Muon, vectors to AdamW; gradients are handed over in the order of `values`, which is another than that of groups.
    """
    named = dict(zip(values, make_parameters(backend, values)))
    matrices = [(name, each) for name, each in named.items() if len(each.shape) > 1]
    vectors = [(name, each) for name, each in named.items() if len(each.shape) < 2]
    groups = [{"params": vectors, "algorithm": "adamw"}, {"params": matrices, "algorithm": "muon"}]
    optimizer = hyper_parallel.Muon(groups, ns_dtype="float32", **options)
    history = []
    for rate, adamw_rate, gradients in steps:
        backend.training.set_learning_rate(optimizer, rate)
        backend.training.set_learning_rate(optimizer, adamw_rate, algorithm="adamw")
        given = as_tensors(backend, [gradients[name] for name in values])
        backend.training.apply_gradients(optimizer, list(named.values()), given)
        history.append({name: backend.tensors.to_numpy(each) for name, each in named.items()})
    return history


def step_on_a_shard(backend):
    """One step, against the gradient's sign, on rows 2 to 4 of a norm's six ones; returns the shard's memory."""
    norm = importlib.import_module(f"hyper_parallel.models.{backend.name}_decoder").RMSNorm(6, 1e-6)
    [use] = backend.modules.parameter_uses(norm)
    _, shard, _ = backend.tensors.chunk_rows(use.parameter, 0, [2, 3, 1])
    parameter = backend.modules.replace_parameter([use], shard)
    optimizer = backend.training.adamw([([parameter], 0.0)], 0.5, (0.9, 0.999), 1e-8)
    backend.training.apply_gradients(optimizer, [parameter], as_tensors(backend, [np.float32([1, -1, 1])]))
    return backend.tensors.to_numpy(backend.tensors.flat(shard)), backend.tensors.to_numpy(norm.weight)


def cross_entropies(backend, cases):
    """(sum, gradient of the logits, dtype of the sum) for each (logits, logits' dtype, targets, ignore_index)."""
    return [_cross_entropy(backend, *case) for case in cases]


def _cross_entropy(backend, logits, dtype, targets, ignore_index):
    [parameter] = make_parameters(backend, {"logits": logits})
    parameter.data = backend.tensors.from_numpy(logits, dtype)
    target = backend.tensors.from_numpy(targets)

    def loss():
        return backend.training.cross_entropy(parameter * 1.0, target, "sum", ignore_index)

    value, [gradient] = backend.autograd.value_and_grad(loss, [parameter])()
    return backend.tensors.to_numpy(value), backend.tensors.to_numpy(gradient), backend.tensors.dtype_name(value)
