"""`hyper_parallel.Muon` as a `torch.optim.Optimizer`: what PyTorch's users do with one."""

import copy

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.errors import CheckpointError, ConfigError, GradientError, LayoutError
from tests.torch import muon_bodies as bodies

SIZES = {"first": (24, 16), "second": (16, 24), "square": (16, 16)}
HALF_BOUND = 3e-2  # bfloat16 Newton-Schulz in two implementations, relative to the norm of all updates


def matrices(dtype=torch.float32):
    return {
        name: torch.nn.Parameter(torch.randn(size, generator=seeded(number)).to(dtype))
        for number, (name, size) in enumerate(SIZES.items())
    }


def seeded(number):
    return torch.Generator().manual_seed(number)


def give_gradients(parameters, step):
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=seeded(1000 * step + number)).to(parameter.dtype)


def train(optimizer, parameters, steps=3, first=1):
    for step in range(first, first + steps):
        give_gradients(parameters, step)
        optimizer.step()


class Model(torch.nn.Module):
    """An embedding, a block with a fused projection and a norm, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, 16)
        self.up = torch.nn.Linear(16, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.down = torch.nn.Linear(24, 16, bias=False)
        self.lm_head = torch.nn.Linear(16, 32, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.lm_head(hidden + self.down(self.norm(self.up(hidden)).relu()))


def loss_of(model, seed=0):
    tokens = torch.randint(0, 32, (4, 8), generator=seeded(seed))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(("scale", "theirs"), [("original", "original"), ("match_rms", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_twenty_steps_are_pytorchs_muon(scale, theirs, nesterov):
    ours, others = matrices(), matrices()
    start = {name: each.detach().clone() for name, each in ours.items()}
    mine = hp.Muon(list(ours.values()), lr=0.02, scale=scale, nesterov=nesterov)
    reference = torch.optim.Muon(others.values(), lr=0.02, adjust_lr_fn=theirs, nesterov=nesterov)
    train(mine, ours.values(), 20)
    train(reference, others.values(), 20)
    for name in SIZES:
        difference, moved = ours[name] - others[name], others[name] - start[name]
        assert difference.norm() < HALF_BOUND * moved.norm(), name
        momentum = mine.state[ours[name]]["momentum_buffer"]
        torch.testing.assert_close(momentum, reference.state[others[name]]["momentum_buffer"], rtol=0, atol=0)


def test_a_model_is_routed_by_what_its_parameters_do():
    model = Model()
    optimizer = hp.Muon(model, lr=0.02, adamw_lr=0.001, weight_decay=0.1)
    groups = [
        (each["algorithm"], each["lr"], each["weight_decay"], each["param_names"]) for each in optimizer.param_groups
    ]
    assert groups == [
        ("muon", 0.02, 0.1, ["up.weight", "down.weight"]),
        ("adamw", 0.001, 0.1, ["embed.weight", "lm_head.weight"]),
        ("adamw", 0.001, 0.0, ["up.bias", "norm.weight", "norm.bias"]),
    ]
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_adamw_is_pytorchs_bit_for_bit_and_its_state_is_seen():
    ours, theirs = Model(), Model()
    mine = hp.Muon(ours, lr=0.02, adamw_lr=0.001, routes={"**": "adamw"})
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    others = [p for p in theirs.parameters() if p.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.001, betas=(0.9, 0.95))
    for step in range(3):
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(one, other)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(mine.state[one][name], reference.state[other][name])


def test_a_learning_rate_scheduler_sets_the_rates_of_both_parts():
    model = Model()
    optimizer = hp.Muon(model, lr=0.02, adamw_lr=0.001)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 1 else 1.0)
    loss_of(model).backward()
    optimizer.step()
    scheduler.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] * 3
    assert all(torch.equal(p, held) for p, held in zip(model.parameters(), before)), "a rate of zero moves nothing"
    scheduler.step()
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.001, 0.001]
    assert not any(torch.equal(p, held) for p, held in zip(model.parameters(), before))


def test_a_closure_is_called_once_with_gradients_and_its_loss_comes_back():
    model = Model()
    optimizer = hp.Muon(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_is_saved_and_loaded():
    one, other = Model(), Model()
    first = hp.Muon(one, second_moment=hp.NorMuon())
    for step in range(3):
        train_step(one, first, step)
    other.load_state_dict(one.state_dict())
    second = hp.Muon(other, second_moment=hp.NorMuon(), lr=1.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.param_groups[0]["lr"] == 1e-3
    for step in range(3, 6):
        train_step(one, first, step)
        train_step(other, second, step)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))


def train_step(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def test_state_of_another_plan_is_refused_with_what_to_call():
    state = hp.Muon(Model()).state_dict()
    with pytest.raises(CheckpointError, match="load_full_state"):
        hp.Muon(Model(), steps=6).load_state_dict(state)
    with pytest.raises(CheckpointError, match="no 'second_moments'"):
        hp.Muon(Model()).load_state_dict(torch.optim.AdamW(Model().parameters()).state_dict())


def test_state_of_other_matrices_is_refused():
    first = matrices()["first"]
    one, other = (
        hp.Muon([("first", first)], matrices={"first": hp.split_rows((24, 16), parts)}, second_moment=hp.NorMuon())
        for parts in ([12, 12], [8, 8, 8])
    )
    with pytest.raises(CheckpointError, match="load_full_state"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_copy_keeps_what_half_precision_would_lose(dtype):
    """Updates of a thousandth of a unit in the last place, a thousand of them: only a copy sees them add up."""
    parameters = {name: torch.nn.Parameter(torch.full(size, 256.0).to(dtype)) for name, size in SIZES.items()}
    vector = torch.nn.Parameter(torch.full((8,), 256.0).to(dtype))
    groups = [{"params": list(parameters.values())}, {"params": [vector], "algorithm": "adamw"}]
    optimizer = hp.Muon(groups, lr=0.05, weight_decay=0.0, scale="spectral", master_dtype="float32", ns_dtype="float32")
    reference = [torch.nn.Parameter(p.detach().float()) for p in (*parameters.values(), vector)]
    groups = [{"params": reference[:-1]}, {"params": [reference[-1]], "algorithm": "adamw"}]
    exact = hp.Muon(groups, lr=0.05, weight_decay=0.0, scale="spectral", ns_dtype="float32")
    for step in range(1, 21):
        give_gradients([*parameters.values(), vector], step)
        for half, full in zip([*parameters.values(), vector], reference):
            full.grad = half.grad.float()
        optimizer.step()
        exact.step()
    for half, full in zip([*parameters.values(), vector], reference):
        assert torch.equal(half, full.to(dtype))
    assert optimizer.state[parameters["first"]]["momentum_buffer"].dtype == torch.float32


def test_lists_of_tensors_and_tensors_one_by_one_are_the_same_bit_for_bit():
    found = []
    for foreach in (None, False):
        model = Model()
        optimizer = hp.Muon(model, foreach=foreach)
        for step in range(3):
            train_step(model, optimizer, step)
        found.append(list(model.parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*found))


def test_a_parameter_whose_elements_do_not_lie_in_order_is_updated():
    plain = torch.nn.Parameter(torch.randn(12, 8, generator=seeded(0)))
    turned = torch.nn.Parameter(plain.detach().t().contiguous().t())
    for parameter in (plain, turned):
        train(hp.Muon([parameter], ns_dtype="float32"), [parameter])
    torch.testing.assert_close(plain, turned, rtol=0, atol=1e-6)
    assert not turned.is_contiguous()


def test_what_has_no_gradient_stays_as_it_is():
    model = Model()
    optimizer = hp.Muon(model, second_moment=hp.NorMuon())
    train_step(model, optimizer, 0)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    momentum = optimizer.state[model.up.weight]["momentum_buffer"].clone()
    loss_of(model, 1).backward()
    model.up.weight.grad = model.embed.weight.grad = None
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in ("up.weight", "embed.weight")), name
    assert torch.equal(optimizer.state[model.up.weight]["momentum_buffer"], momentum)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_small_gradients_of_wide_parameters_are_as_good_as_large_ones(dtype):
    """Orthogonalizing forgets the size; what travels must not."""
    moved = []
    for size in (1.0, 1e-9):
        parameter = torch.nn.Parameter(torch.zeros(24, 16, dtype=torch.float64))
        parameter.grad = size * torch.randn(24, 16, generator=seeded(0), dtype=torch.float64)
        hp.Muon([parameter], ns_dtype=dtype, eps=1e-20).step()
        moved.append(parameter.detach())
    assert (moved[0] - moved[1]).norm() < HALF_BOUND * moved[0].norm() and moved[0].norm() > 0


def test_a_group_without_anything_to_update_is_kept():
    empty, frozen = torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    square = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = hp.Muon([{"params": [empty]}, {"params": [frozen]}, {"params": [square]}])
    train(optimizer, [empty, square], 1)
    optimizer.load_full_state(optimizer.full_state())
    optimizer.load_state_dict(optimizer.state_dict())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0, 1]
    assert not torch.equal(square, frozen)


def test_what_is_frozen_is_left_out():
    model = Model()
    model.up.weight.requires_grad_(False)
    optimizer = hp.Muon(model)
    assert optimizer.param_groups[0]["param_names"] == ["down.weight"]
    train_step(model, optimizer, 0)


BAD = {
    "a vector": (lambda m: [m.up.bias], {}, "up|shape \\[24\\]"),
    "a vector by route": (lambda m: m, {"routes": {"up.bias": "muon"}}, "up.bias"),
    "two groups": (lambda m: [{"params": [m.up.weight]}, {"params": [m.up.weight]}], {}, "groups 0 and 1"),
    "twice": (lambda m: [("a", m.up.weight), ("a", m.up.weight)], {}, "group 0 twice"),
    "two names alike": (lambda m: [("a", m.up.weight), ("a", m.down.weight)], {}, "'a'"),
    "an option": (lambda m: [{"params": [m.up.weight], "momentom": 0.9}], {}, "did you mean 'momentum'"),
    "a value": (lambda m: m, {"momentum": 1.0}, "from 0 to below 1"),
    "a scale": (lambda m: m, {"scale": "rms"}, '"match_rms"'),
    "a step": (lambda m: m, {"steps": 0}, "steps"),
    "an algorithm": (lambda m: [{"params": [m.up.weight], "algorithm": "sgd"}], {}, '"muon" or "adamw"'),
    "an AdamW option": (lambda m: [{"params": [m.up.bias], "algorithm": "adamw", "steps": 3}], {}, "no option 'steps'"),
    "nothing": (lambda m: [], {}, "no parameters"),
    "no parameter": (lambda m: [torch.ones(2, 2)], {}, "asks for a gradient"),
    "a dtype": (lambda m: [torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], {}, "complex64"),
    "a pattern": (lambda m: m, {"routes": {"layers.*": "muon"}}, "layers"),
    "ranks": (lambda m: m, {"mesh": hp.DeviceMesh((2,), ("replicate",))}, "2 ranks, which have not been joined"),
    "a master": (lambda m: m, {"master_dtype": "float64"}, '"float32"'),
    "clip without a model": (lambda m: [m.up.weight], {"qk_clip": hp.QKClip()}, "give the model"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_told(case):
    given, options, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        hp.Muon(given(Model()), **options)


def test_a_bad_gradient_changes_nothing():
    model = Model()
    optimizer = hp.Muon(model)
    train_step(model, optimizer, 0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for spoil, error, words in (
        (lambda p: p.grad.view(-1)[3:4].fill_(float("nan")), GradientError, "down.weight on rank 0 is not finite"),
        (lambda p: p.grad.view(-1)[3:4].fill_(float("inf")), GradientError, "down.weight on rank 0 is not finite"),
        (lambda p: setattr(p, "data", p.data[:4]), LayoutError, "down.weight has changed"),
    ):
        loss_of(model, 1).backward()
        spoil(model.down.weight)
        with pytest.raises(error, match=words):
            optimizer.step()
        optimizer.zero_grad()
    model.down.weight.data = before[0]["down.weight"]
    same = lambda one, other: np.all([torch.equal(one[key], other[key]) for key in other])  # noqa: E731
    assert same(model.state_dict(), before[0])
    for number, state in before[1]["state"].items():
        assert same(optimizer.state_dict()["state"][number], state)


def test_what_is_planned_can_not_be_changed_later():
    model = Model()
    optimizer = hp.Muon(model)
    with pytest.raises(ConfigError, match="new optimizer"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
    with pytest.raises(ConfigError, match="full_state"):
        copy.deepcopy(optimizer)
    optimizer.param_groups[0]["steps"] = 7
    loss_of(model).backward()
    with pytest.raises(ConfigError, match="steps=5"):
        optimizer.step()


EDITS = {
    "a scale": (lambda group: group.update(scale="large"), "group 0: scale is 'large'"),
    "momentum": (lambda group: group.update(momentum=1.5), "group 0: momentum is 1.5"),
    "a rate": (lambda group: group.update(lr=float("nan")), "group 0: lr is nan"),
    "an option taken out": (lambda group: group.pop("nesterov"), "group 0 has no nesterov"),
    "a parameter taken out": (lambda group: group["params"].pop(), "parameters of param_groups are not those"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_a_group_can_not_be_is_told_before_anything_changes(edit):
    change, words = EDITS[edit]
    held = matrices() | {"vector": torch.nn.Parameter(torch.ones(4))}
    pairs = list(held.items())
    optimizer = hp.Muon([{"params": pairs[:3]}, {"params": pairs[3:], "algorithm": "adamw"}], lr=0.02)
    train(optimizer, held.values(), steps=1)
    before = [each.detach().clone() for each in held.values()]
    momentum = [optimizer.state[held[name]]["momentum_buffer"].clone() for name in SIZES]
    change(optimizer.param_groups[0])
    with pytest.raises(ConfigError, match=words):
        train(optimizer, held.values(), steps=1, first=2)
    assert all(torch.equal(one, other) for one, other in zip(before, held.values()))
    assert all(torch.equal(one, optimizer.state[held[name]]["momentum_buffer"]) for one, name in zip(momentum, SIZES))


def test_generators_and_pairs_are_taken():
    model = Model()
    assert hp.Muon(p for p in model.parameters() if p.ndim == 2).param_groups[0]["param_names"][0] == "parameter.0"
    pairs = ((name, p) for name, p in model.named_parameters() if p.ndim == 2)
    assert hp.Muon([{"params": pairs, "lr": 0.1}]).param_groups[0]["param_names"][1] == "up.weight"


BODIES = "tests.torch.muon_bodies"


@pytest.mark.parametrize("how", ["shards", "replicas", "over tensor"])
def test_models_of_fsdp2_train_as_on_one_device_and_their_state_fits_others(pool, how):
    options = dict(lr=0.02, adamw_lr=0.001, ns_dtype="float32", second_moment=hp.NorMuon())
    alone, _ = bodies.train(None, "alone", options, steps=6)
    results = pool("torch", 4).run(f"{BODIES}:train", how, options, steps=3)
    start, state = results[0]
    for values, _ in results:
        for name, value in values.items():
            np.testing.assert_array_equal(value, start[name], err_msg=name)
    # What four ranks have kept goes on in one process, and what one process has kept on four ranks.
    going_on, again = bodies.train(None, "alone", options, first=4, steps=3, start=start, state=state)
    first, held = bodies.train(None, "alone", options, steps=3)
    others = pool("torch", 4).run(f"{BODIES}:train", how, options, first=4, steps=3, start=first, state=held)
    for name, value in alone.items():
        np.testing.assert_allclose(going_on[name], value, rtol=0, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(others[0][0][name], value, rtol=0, atol=1e-5, err_msg=name)
    assert others[0][1]["parameters"].keys() == again["parameters"].keys()


@pytest.mark.parametrize("how", ["replicas", "over tensor"])
def test_a_loop_over_fsdp2_is_written_as_with_any_optimizer(pool, how):
    for losses, same in pool("torch", 4).run(f"{BODIES}:as_users_write", how):
        assert losses[0] > losses[1] > losses[2] and losses[3] == losses[4] and same


def test_a_gradient_that_is_a_pending_sum_is_summed_up_first(pool):
    """Of a replicated DTensor whose inputs are cut PyTorch leaves each rank its own part of the gradient."""
    for kind, found, expected in pool("torch", 2).run(f"{BODIES}:pending_gradients"):
        assert kind == "(Partial(sum),)"
        # The sum over sixteen rows in two halves, through float32 Newton-Schulz, at a rate of 0.1.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
