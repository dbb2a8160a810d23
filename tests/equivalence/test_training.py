"""The frameworks' own AdamW and cross entropy, behind `core.backend.Training`, against plain numpy."""

import numpy as np
import pytest

from tests.equivalence import training_bodies as bodies

BETAS, EPS = (0.9, 0.95), 1e-8
SHAPES = {"matrix": (5, 7), "no rows": (0, 4), "vector": (3,), "one": (1, 1), "cube": (2, 3, 5), "unused": (2, 2)}
DECAYS = {"matrix": 0.1, "no rows": 0.1, "vector": 0.0, "one": 0.0, "cube": 0.1, "unused": 0.1}


def adamw(values, decays, steps, betas=BETAS, eps=EPS):
    """AdamW as its paper has it, in float64; a gradient of None leaves its parameter alone."""
    values = {name: value.astype(np.float64) for name, value in values.items()}
    first = {name: np.zeros_like(value) for name, value in values.items()}
    second = {name: np.zeros_like(value) for name, value in values.items()}
    history = []
    for count, (rate, gradients) in enumerate(steps, start=1):
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            first[name] = betas[0] * first[name] + (1 - betas[0]) * gradient
            second[name] = betas[1] * second[name] + (1 - betas[1]) * gradient.astype(np.float64) ** 2
            mean, square = first[name] / (1 - betas[0] ** count), second[name] / (1 - betas[1] ** count)
            values[name] = values[name] * (1 - rate * decays[name]) - rate * mean / (np.sqrt(square) + eps)
        history.append(dict(values))
    return history


@pytest.fixture
def run():
    """Start values of odd shapes and 20 steps of random gradients, one parameter without any, at changing rates."""
    random = np.random.default_rng(5)
    values = {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    rates = 1e-2 * (1 + np.arange(20)) / 20

    def gradients():
        drawn = {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
        return drawn | {"unused": None}

    return values, [(float(rate), gradients()) for rate in rates]


def test_twenty_steps_are_those_of_the_paper(pool, backend_name, run):
    values, steps = run
    [history] = pool(backend_name, 1).run(bodies.train, values, DECAYS, steps, BETAS, EPS)
    for found, expected in zip(history, adamw(values, DECAYS, steps), strict=True):
        for name in SHAPES:
            # float32: each step rounds a value of about 1 once or twice (6e-8); twenty steps add up to 2.4e-6 at most.
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2.4e-6, err_msg=name)


def test_every_parameter_with_a_gradient_moves_at_every_step_by_about_the_rate(pool, backend_name, run):
    """The oracle above would notice as well; this one needs no oracle. Some optimizers of MindSpore change nothing."""
    values, steps = run
    no_decay = dict.fromkeys(SHAPES, 0.0)
    same_sign = [
        (rate, {name: None if drawn is None else np.abs(drawn) + 1 for name, drawn in gradients.items()})
        for rate, gradients in steps
    ]
    [history] = pool(backend_name, 1).run(bodies.train, values, no_decay, same_sign, BETAS, EPS)
    for before, after, (rate, gradients) in zip([values, *history], history, same_sign):
        for name, gradient in gradients.items():
            if gradient is not None:
                moved = (before[name] - after[name]) / rate
                assert ((moved > 0.3) & (moved < 3)).all(), name


def muon(values, decay, momentum, steps):
    """Muon with Nesterov, five steps of the quintic and the scale that matches AdamW, in float64."""
    buffers, history = {name: np.zeros(value.shape) for name, value in values.items()}, []
    for rate, _, gradients in steps:
        for name in values:
            gradient = gradients[name]
            if gradient is None:
                continue
            buffers[name] = momentum * buffers[name] + (1 - momentum) * gradient
            x = momentum * buffers[name] + (1 - momentum) * gradient
            x /= np.linalg.norm(x)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            scaled = 0.2 * max(x.shape) ** 0.5 * x
            values = {**values, name: values[name] * (1 - rate * decay) - rate * scaled}
        history.append(values)
    return history


def test_muon_and_its_adamw_take_rates_of_their_own_and_leave_what_has_no_gradient(pool, backend_name):
    random = np.random.default_rng(11)
    shapes = {"vector": (3,), "matrix": (5, 7), "sometimes": (4, 4), "bias": (2,)}
    values = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    steps = []
    for number in range(6):
        gradients = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        if number % 2:
            gradients["sometimes"] = None
        steps.append((0.01 * (number + 1), 0.03 * (number + 1), gradients))
    options = {"weight_decay": 0.2, "momentum": 0.9, "adamw_betas": BETAS, "adamw_eps": EPS}
    [history] = pool(backend_name, 1).run(bodies.train_with_muon, values, steps, options)
    matrices = {name: values[name] for name in ("matrix", "sometimes")}
    vectors = {name: values[name] for name in ("vector", "bias")}
    of_adamw = [(rate, {name: gradients[name] for name in vectors}) for _, rate, gradients in steps]
    alike = zip(history, muon(matrices, 0.2, 0.9, steps), adamw(vectors, dict.fromkeys(vectors, 0.2), of_adamw))
    for found, expected, expected_vectors in alike:
        for name, value in {**expected, **expected_vectors}.items():
            # Newton-Schulz turns a rounding of 1e-7 into 1e-6 of an update, which is 0.03 at most; the rest as above.
            np.testing.assert_allclose(found[name], value, rtol=0, atol=2.4e-6, err_msg=name)


def test_a_missing_gradient_leaves_value_and_state(pool, backend_name):
    values = {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.float32)}
    gradient = {"a": np.full((2, 3), 0.5, np.float32), "b": np.full(2, 0.25, np.float32)}
    steps = [(0.1, gradient), (0.1, gradient | {"a": None}), (0.0, gradient)]
    [(first, second, third)] = pool(backend_name, 1).run(bodies.train, values, {"a": 0.1, "b": 0.1}, steps, BETAS, EPS)
    np.testing.assert_array_equal(first["a"], second["a"])
    assert (first["b"] != second["b"]).all()
    np.testing.assert_array_equal(second["b"], third["b"], err_msg="a rate of zero moves nothing")


def test_a_rank_that_holds_no_element_can_take_a_step(pool, backend_name):
    values = {"empty": np.zeros((0, 3), np.float32)}
    [[after]] = pool(backend_name, 1).run(bodies.train, values, {"empty": 0.1}, [(0.1, values)], BETAS, EPS)
    assert after["empty"].shape == (0, 3)


def test_a_step_changes_the_memory_that_a_shard_was_made_of(pool, backend_name):
    [(memory, seen)] = pool(backend_name, 1).run(bodies.step_on_a_shard)
    # The first step of Adam is the rate times the gradient's sign; eps and float32 take 1e-6 of it.
    np.testing.assert_allclose(memory, [0.5, 1.5, 0.5], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(seen, memory)


def cross_entropy(logits, targets, ignore_index):
    """Sum and gradient, in float64."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    counted = (targets != ignore_index)[..., None]
    one_hot = np.eye(logits.shape[-1])[np.where(counted[..., 0], targets, 0)] * counted
    return -(log_probability * one_hot).sum(), np.exp(log_probability) * counted - one_hot


def cross_entropy_cases():
    """(logits, dtype, targets, ignore_index)."""
    random = np.random.default_rng(7)
    logits = random.standard_normal((3, 5, 11)).astype(np.float32)
    targets = random.integers(0, 11, (3, 5))
    some, none = targets.copy(), np.full_like(targets, -100)
    some[:, ::2] = -100
    return {
        "every token": (logits, "float32", targets, -100),
        "some ignored": (logits, "float32", some, -100),
        "all ignored": (logits, "float32", none, -100),
        "class 3 ignored": (logits, "float32", targets, 3),
        "int32 targets": (logits, "float32", targets.astype(np.int32), -100),
        "large logits": (logits * 1e4, "float32", some, -100),
        "one row": (logits[0], "float32", targets[0], -100),
        "half": (logits.astype(np.float16).astype(np.float32), "float16", some, -100),
    }


@pytest.mark.parametrize("name", cross_entropy_cases())
def test_cross_entropy_is_the_sum_over_counted_tokens(pool, backend_name, name):
    logits, dtype, targets, ignore_index = cross_entropy_cases()[name]
    case = (logits, dtype, targets, ignore_index)
    [[(value, gradient, value_dtype)]] = pool(backend_name, 1).run(bodies.cross_entropies, [case])
    expected, expected_gradient = cross_entropy(logits, targets, ignore_index)
    assert value.shape == () and value_dtype == "float32"
    # float32 sums of 15 terms; the gradient of half logits is half itself: 2 ** -11 relative.
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=5e-4 if dtype == "float16" else 1e-6)
    assert (gradient[targets == ignore_index] == 0).all(), "an ignored token sends nothing back"
