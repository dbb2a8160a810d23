"""Opaque regions whose code communicates: what is refused, what validation finds, and models that do it right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.errors import ConfigError, ContractError, HyperParallelError, LayoutError
from hyper_parallel.core.execution.apply import apply_plan
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.execution.loss import planned_cross_entropy
from hyper_parallel.core.validation.watch import Track, Watch
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.torch_decoder import Decoder, DecoderLayer, SwiGLU
from tests.equivalence.region_bodies import ULYSSES, bound
from tests.equivalence.ulysses_torch import with_ulysses
from tests.torch.production import assert_gradients_are_the_models, own_samples

CONFIG = DecoderConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    initializer_range=0.3,
)
in_double = pytest.mark.usefixtures("in_double_precision")


def decoder(change=lambda layer: None) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    for layer in model.model.layers:
        change(layer)
    return model


def planned(model, sizes, overrides) -> hp.ShardingPlan:
    return hp.plan(model, hp.DeviceMesh.from_sizes(sizes), overrides)


def hold_against_one_device(model, plan, ids, validate=False) -> None:
    """One step of all ranks, the loss and every gradient against the same model on one device, as nobody changed it."""
    model.zero_grad()
    expected = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    expected.backward()
    models = [copy.deepcopy(model) for _ in plan.mesh.ranks]

    def body(backend):
        rank = backend.collectives.rank()
        own, mine = models[rank], own_samples(plan, rank, ids)
        own.zero_grad()
        apply_plan(backend, own, plan, validate=validate)
        loss = planned_cross_entropy(backend, plan, own(mine), mine)
        loss.backward()
        assert_gradients_are_the_models(model, own, plan, rank)
        return loss.item()

    losses = InProcessWorld(backends.load("torch"), plan.mesh.size, timeout_s=30).run(body)
    assert sum(losses) / len(losses) == pytest.approx(expected.item(), rel=1e-12)


def refused(function, ranks=2, **how) -> str:
    """The error of a function of the collectives of each rank; every rank must have one."""
    told = []

    def body(backend):
        module, found = bound(backend, {"tensor": ranks}, **how)
        try:
            function(found)
        except HyperParallelError as error:
            told.append(error)

    InProcessWorld(backends.load("torch"), ranks, timeout_s=20).run(body)
    assert len(told) == ranks
    return f"{type(told[0]).__name__}: {told[0]}"


# what is refused


X = torch.zeros(2, 3, 4)
REFUSED = {
    "an axis that regions don't know": (
        lambda ranks: ranks.size("shard"),
        "ConfigError: collectives of block: the axis is 'shard'; a region communicates over expert, context, tensor",
    ),
    "a gradient that nobody knows": (
        lambda ranks: ranks.all_reduce(X, "tensor", gradient="sum"),
        'ConfigError: all_reduce in block: gradient is \'sum\'; write "replicate" or "partial", as it comes back',
    ),
    "a size that does not divide": (
        lambda ranks: ranks.reduce_scatter(X, "tensor", 1),
        "LayoutError: reduce_scatter over tensor in block: its dim 1 of 3 does not divide by the 2 ranks of tensor; "
        "write uneven=True to cut it into [2, 1]",
    ),
    "a part that is not this rank's": (
        lambda ranks: ranks.all_gather(X, "tensor", 1, gradient="partial", length=9),
        "LayoutError: all_gather over tensor in block: it has 3 elements along dim 1, and of length=9 this rank's part",
    ),
    "a dim that is not there": (
        lambda ranks: ranks.split(X, "tensor", 3, gradient="partial"),
        "LayoutError: split in block: there is no dim 3 in [2, 3, 4]",
    ),
    "one dim for two": (
        lambda ranks: ranks.all_to_all(X, "tensor", 1, -2),
        "LayoutError: all_to_all in block: it would split and join the same dim 1; name two dims",
    ),
    "counts for other ranks": (
        lambda ranks: ranks.counts([1, 2, 3], "tensor"),
        "LayoutError: counts over tensor in block: sent is [1, 2, 3]; it has a count of at least 0 for each of the 2 "
        "ranks",
    ),
    "rows that are not sent": (
        lambda ranks: ranks.exchange(X, "tensor", [1, 2], [1, 1]),
        "LayoutError: exchange over tensor in block: there are 2 rows, and 3 are to be sent",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_before_anything_is_sent(case):
    function, told = REFUSED[case]
    assert refused(function).startswith(told)


def test_ranks_communicate_in_opaque_regions_only():
    assert refused(lambda ranks: ranks.shift(X, "tensor"), region="transparent") == (
        "ConfigError: shift over tensor in block: the module stands in no opaque region, and ranks may communicate "
        "there only; write below `regions:` block: {kind: opaque}"
    )


def test_a_followed_tensor_shows_that_a_call_comes_from_elsewhere():
    def elsewhere(ranks):
        watch = Watch(backends.load("torch"), ("tensor",), (2,))
        ranks.shift(watch.backend.interception.follow(X.clone(), Track(watch, watch.whole, "", False)), "tensor")

    assert refused(elsewhere) == (
        "ContractError: shift over tensor in block: it is given a tensor that validation follows, so it is not called "
        "by the forward of an opaque region; write the module that calls it below `regions:` with {kind: opaque}"
    )


def test_on_one_device_every_function_gives_back_what_it_gets():
    ranks = hp.collectives(nn.Identity())
    assert (ranks.size("tensor"), ranks.rank("expert"), ranks.part(5, "context")) == (1, 0, (0, 5))
    for found in (
        ranks.all_reduce(X, "tensor", gradient="partial"),
        ranks.sum_gradient(X, "tensor"),
        ranks.all_gather(X, "tensor", 1, gradient="replicate", length=3),
        ranks.reduce_scatter(X, "tensor", 1),
        ranks.split(X, "tensor", 1, gradient="partial"),
        ranks.all_to_all(X, "tensor", 0, 1),
        ranks.shift(X, "tensor"),
        ranks.exchange(X, "expert", ranks.counts([2], "expert"), [2]),
    ):
        assert found is X
    with pytest.raises(LayoutError, match="all_gather over tensor in Identity: it has 3 elements along dim 1, and of"):
        ranks.all_gather(X, "tensor", 1, gradient="replicate", length=4)
    with pytest.raises(ConfigError, match="collectives of Identity: the axis is 'tp'"):
        ranks.all_reduce(X, "tp", gradient="replicate")


def test_collectives_that_were_kept_are_refused_when_the_model_has_changed():
    model, told = with_ulysses(decoder()), "restored since these collectives were asked for"
    attention = model.model.layers[0].self_attn
    plan, before = planned(model, {"tensor": 1}, None), hp.collectives(attention)
    hp.initialize("torch") if not backends.load("torch").collectives.is_initialized() else None
    hp.parallelize(model, plan)
    during = hp.collectives(attention)
    assert hp.collectives(attention) is during
    with pytest.raises(ConfigError, match=told):
        before.shift(X, "tensor")
    with pytest.raises(ConfigError, match="can't be copied"):
        copy.deepcopy(attention)
    hp.restore(model)
    with pytest.raises(ConfigError, match=told):
        during.shift(X, "tensor")
    assert hp.collectives(attention).shift(X, "tensor") is X


# what validation finds


FOUND = {
    "another function": (
        lambda ranks: ranks.shift(X, "tensor", 1 + ranks.rank("tensor")),
        "the ranks of the axis do not call the same: rank 0 calls shift of float32, 1, (2, 3, 4), rank 1 shift of "
        "float32, 0, (2, 3, 4)",
    ),
    "another shape": (
        lambda ranks: ranks.all_gather(X[: 1 + ranks.rank("tensor")], "tensor", 0, gradient="partial"),
        "the ranks of the axis do not call the same: rank 0 calls all_gather of float32, (2, 3, 4)",
    ),
    "a problem of one rank": (
        lambda ranks: ranks.all_gather(X[:, : 3 - ranks.rank("tensor")], "tensor", 1, gradient="partial", length=6),
        "rank 1 of the axis: it has 2 elements along dim 1, and of length=6 this rank's part is 3",
    ),
    "rows that nobody counts on": (
        lambda ranks: ranks.exchange(X, "tensor", [1, 1], [2, 1]),
        "rank 0 of the axis sends 1 rows to rank 0, which counts on 2; `counts` tells how many come",
    ),
    "summands that are said to be the same": (
        lambda ranks: ranks.sum_gradient(X + ranks.rank("tensor"), "tensor"),
        "sum_gradient in block: what it is given: it has to be the same on every rank of tensor",
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_ranks_that_do_not_agree_are_told_so_on_every_rank(case):
    function, told = FOUND[case]
    found = refused(function, validate=True)
    assert found.startswith("ContractError") and told in found


def test_a_gradient_that_comes_back_otherwise_than_said_is_found():
    def wrong(ranks):
        summand = X.clone().requires_grad_()
        total = ranks.all_reduce(summand, "tensor", gradient="replicate")
        (total * (1.0 + ranks.rank("tensor"))).sum().add(total.sum()).backward(X.sum() + 1)

    found = refused(wrong, validate=True)
    assert 'the gradient that comes back, said to be "replicate": it has to be the same on every rank' in found


class OwnSwiGLU(SwiGLU):
    """A cut feed-forward layer that takes whole hidden states and gives them, in backward too."""

    forgets = ""

    def forward(self, hidden):
        ranks = hp.collectives(self)
        if self.forgets != "sum_gradient":
            hidden = ranks.sum_gradient(hidden, "tensor")
        result = super().forward(hidden)
        return result if self.forgets == "all_reduce" else ranks.all_reduce(result, "tensor", gradient="replicate")


WHOLE_ENDS = {
    "sequence_parallel": False,
    "regions": {
        "model.layers.*.mlp": {
            "kind": "opaque",
            "inputs": {"hidden": {"gradient": {"tensor": "replicate"}}},
            "outputs": {"hidden": {"before": {"tensor": "replicate"}}},
        }
    },
}


def with_own_swiglu(forgets="", bias=False):
    def change(layer):
        layer.mlp.__class__, layer.mlp.forgets = OwnSwiGLU, forgets
        if bias:
            layer.mlp.down_proj = nn.Linear(CONFIG.intermediate_size, CONFIG.hidden_size)

    return decoder(change)


IDS = torch.randint(0, 96, (2, 7))


@in_double
@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_region_that_sums_up_by_itself_is_right(bias, validate):
    model = with_own_swiglu(bias=bias)
    hold_against_one_device(model, planned(model, {"tensor": 2}, WHOLE_ENDS), IDS, validate)


FORGOTTEN = {
    "all_reduce": "model.layers.0.mlp: the output 'hidden', before the transition: it has to be the same on every rank",
    "sum_gradient": "model.layers.1.mlp: the gradient of the input 'hidden', after the transition: it has to be the",
}


@in_double
@pytest.mark.parametrize("forgets", FORGOTTEN)
def test_a_sum_that_a_region_forgets_is_found_at_its_contract(forgets):
    model = with_own_swiglu(forgets)
    with pytest.raises(ContractError) as error:
        hold_against_one_device(model, planned(model, {"tensor": 2}, WHOLE_ENDS), IDS, validate=True)
    assert FORGOTTEN[forgets] in str(error.value)


# models


@in_double
@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize(
    "sizes, length",
    [({"tensor": 2}, 7), ({"tensor": 4}, 5), ({"shard": 2, "tensor": 2}, 8)],  # of 5 the last of 4 ranks has none
    ids=str,
)
def test_attention_that_trades_tokens_for_heads_is_exact(sizes, length, validate):
    model = with_ulysses(decoder())
    plan = planned(model, sizes, ULYSSES)
    assert "tensor" in plan["model.layers.0.self_attn.q_proj.weight"].pending
    hold_against_one_device(model, plan, torch.randint(0, 96, (4, length)), validate)


@in_double
def test_a_reduction_that_the_plan_forgets_is_found_by_comparing_gradients():
    forgotten = copy.deepcopy(ULYSSES)
    forgotten["parameters"]["model.layers.*.self_attn.**"]["pending"] = "none"
    plan = planned(with_ulysses(decoder()), {"tensor": 2}, forgotten)
    report = hp.check_gradients(lambda: with_ulysses(decoder()), plan, {"input_ids": IDS})
    wrong = {each.name for each in report.parameters if not each.worst <= report.bound}
    assert wrong == {each.name for each in plan.parameters if ".self_attn." in each.name}


class MixtralExperts(nn.Module):
    """Packed experts, laid out and called as those of Hugging Face; their rows come with the number of the expert."""

    def __init__(self, experts: int, hidden: int, inner: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * 0.3)

    def forward(self, rows, expert):
        result = torch.zeros_like(rows)
        for number, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj)):
            chosen = (expert == number).nonzero()[:, 0]
            gate, up = F.linear(rows[chosen], gate_up).chunk(2, dim=-1)
            result = result.index_add(0, chosen, F.linear(F.silu(gate) * up, down))
        return result


class OwnRouting(nn.Module):
    """Each token goes to its one expert, wherever that is, and back."""

    def __init__(self, experts: int, hidden: int, inner: int):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = MixtralExperts(experts, hidden, inner)

    def forward(self, hidden):
        ranks, tokens = hp.collectives(self), hidden.flatten(0, 1)
        scores, expert = self.gate(tokens).softmax(-1).max(-1)
        order, each = expert.argsort(stable=True), self.gate.out_features // ranks.size("expert")
        sent = (expert // each).bincount(minlength=ranks.size("expert")).tolist()
        received = ranks.counts(sent, "expert")
        rows = ranks.exchange(tokens[order], "expert", sent, received)
        here = ranks.exchange((expert % each)[order], "expert", sent, received)
        back = ranks.exchange(self.experts(rows, here), "expert", received, sent)
        result = torch.zeros_like(tokens).index_copy(0, order, back[: len(order)])
        return (result * scores[:, None]).view_as(hidden)


@in_double
@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("sizes", [{"expert": 2, "tensor": 2}, {"expert": 4}], ids=str)
@pytest.mark.parametrize("length", [6, 1])  # with one token for each rank some get none
def test_a_region_that_sends_tokens_to_their_experts_is_exact(sizes, length, validate):
    model = decoder(lambda layer: setattr(layer, "mlp", OwnRouting(4, CONFIG.hidden_size, 12)))
    plan = planned(model, sizes, {"regions": {"model.layers.*.mlp": {"kind": "opaque"}}})
    hold_against_one_device(model, plan, torch.randint(0, 96, (4, length)), validate)


class ComputedAgain(DecoderLayer):
    """A layer that keeps nothing for backward but what it gets."""

    reentrant = False

    def forward(self, *args):
        return checkpoint(super().forward, *args, use_reentrant=self.reentrant)


@in_double
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_region_sends_is_sent_again_when_it_is_computed_again(reentrant):
    model = with_ulysses(decoder())
    for layer in model.model.layers:
        layer.__class__, layer.reentrant = ComputedAgain, reentrant
    hold_against_one_device(model, planned(model, {"tensor": 2}, ULYSSES), IDS, validate=True)
