"""What the table does for every operator: gradients, targets that are written in place, keys, users' own rules."""

import pytest

import hyper_parallel as hp
from hyper_parallel import ConfigError
from hyper_parallel.core.rules import table
from hyper_parallel.core.rules.call import apart
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, State, constant, cut
from hyper_parallel.core.rules.table import RuleError, UnknownOperator, infer, register_rule
from tests.core.rules.calls import T, call, state, states


@pytest.fixture
def own_table(monkeypatch):
    """Rules that a test registers go with it."""
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    yield
    infer.cache_clear()


# Gradients.


def test_what_is_whole_stays_whole_and_what_is_copied_stays_copied():
    assert state("mul", input=T(4), other=T(4)) == WHOLE
    assert state("mul", input=T(4, state=COPIED), other=T(4, state=COPIED)) == COPIED


def test_a_whole_parameter_beside_a_part_would_lose_the_gradient_of_other_ranks():
    with pytest.raises(RuleError) as error:
        state("mul", input=T(2, 4, state=cut(0)), other=T(4))
    assert str(error.value) == (
        "axis 'tensor': other is replicate with the whole gradient on every rank, but input is shard(0): each rank "
        "would compute a part of the gradient of other, and nothing sums it up; legal: other as replicate with a "
        "partial gradient, which somebody reduces"
    )


def test_copies_beside_parts_are_right_since_their_gradient_is_pending():
    assert state("mul", input=T(2, 4, state=cut(0)), other=T(4, state=COPIED)) == cut(0)


def test_whole_and_copied_can_not_be_mixed():
    with pytest.raises(RuleError, match="input is replicate with the whole gradient.*other is replicate, its gradient"):
        state("add", input=T(4), other=T(4, state=COPIED))


def test_what_asks_for_no_gradient_may_be_either():
    table_of_angles = T(4, grad=False)
    assert state("mul", input=T(4, state=COPIED), other=table_of_angles) == COPIED
    assert state("mul", input=T(2, 4, state=cut(0)), other=table_of_angles) == cut(0)
    assert state("mul", input=T(4, grad=False), other=table_of_angles) == WHOLE


def test_nothing_is_pending_where_no_gradient_flows():
    assert state("gt", input=T(4, state=COPIED), other=0) == WHOLE
    assert state("detach", input=T(4, state=COPIED)) == WHOLE
    values, places = states("topk", input=T(4, 8, state=COPIED), k=2, dim=-1)
    assert (values, places) == (COPIED, WHOLE)


def test_a_tensor_that_lends_its_shape_or_dtype_only_keeps_its_gradient():
    assert state("type_as", input=T(2, state=cut(0)), other=T(3)) == cut(0)


def test_a_scaled_sum_gives_its_factor_a_part_of_its_gradient_on_each_rank():
    assert state("mul", input=T(4, state=PARTIAL), other=T(4, state=COPIED)) == PARTIAL
    with pytest.raises(RuleError, match="other is replicate with the whole gradient.*but input is partial"):
        state("mul", input=T(4, state=PARTIAL), other=T(4))


def test_operators_without_a_kernel_on_a_cpu_follow_those_that_are_like_them():
    for dim, allowed in ((0, True), (1, False)):
        for op, arguments in {
            "rms_norm_from": {"weight": T(8, state=COPIED)},
            "slice": {"dim": 1, "start": 2, "stop": 4, "step": 1},
        }.items():
            x = T(4, 8, state=cut(dim))
            if allowed:
                assert set(states(op, input=x, **arguments)) == {cut(0)}
            else:
                with pytest.raises(RuleError, match=r"input.* is shard\(1\)"):
                    states(op, input=x, **arguments)
    assert states("dropout_pair", input=T(4, state=cut(0)), p=0.5) == (cut(0), cut(0))
    assert states("dropout_pair", input=T(4, state=PARTIAL), p=0.5) == (PARTIAL, WHOLE)


# Random numbers.

APART = frozenset({apart("tensor")})


@pytest.mark.parametrize("op", ["dropout", "alpha_dropout", "rand_like", "bernoulli", "uniform_", "gumbel_softmax"])
def test_where_each_rank_draws_for_itself_only_what_is_cut_is_drawn_for(op):
    assert state(op, APART, input=T(4, 2, state=cut(0))) == cut(0)
    assert state(op, input=T(4, 2)) == WHOLE
    with pytest.raises(RuleError, match="input is replicate, the same on every rank, and here each rank draws other"):
        states(op, APART, input=T(4, 2))


def test_a_pending_sum_is_dropped_where_all_ranks_draw_the_same():
    assert state("dropout", input=T(4, state=PARTIAL)) == PARTIAL
    with pytest.raises(RuleError, match="input is partial, a part of one sum on every rank, and here each rank draws"):
        states("dropout", APART, input=T(4, state=PARTIAL))


def test_what_drops_nothing_is_right_anywhere():
    assert state("dropout", APART, input=T(4), p=0.0) == WHOLE
    assert state("dropout", APART, input=T(4, state=PARTIAL), training=False) == PARTIAL


def test_features_are_dropped_by_all_ranks_that_hold_a_part_of_them():
    assert state("dropout1d", input=T(2, 4, 3, state=cut(2))) == cut(2)
    for dim in (0, 1):
        assert state("dropout1d", APART, input=T(2, 4, 3, state=cut(dim))) == cut(dim)
    for shape, dim in (((2, 4, 3), 2), ((4, 3), 1)):
        with pytest.raises(RuleError, match="a feature would be dropped on one rank and kept on another"):
            states("dropout1d", APART, input=T(*shape, state=cut(dim)))


def test_attention_draws_for_its_heads():
    heads = T(2, 4, 6, 8, state=cut(1))
    assert state("attention", APART, query=heads, key=heads, value=heads, dropout=0.1) == cut(1)
    whole = T(2, 4, 6, 8)
    assert state("attention", query=whole, key=whole, value=whole, dropout=0.1) == WHOLE
    with pytest.raises(RuleError, match="query is replicate, the same on every rank, and here each rank draws"):
        states("attention", APART, query=whole, key=whole, value=whole, dropout=0.1)


# In place.


def test_a_target_keeps_its_state():
    assert state("add_", input=T(4, state=PARTIAL), other=T(4, state=PARTIAL)) == PARTIAL
    assert state("add_", input=T(2, state=cut(0)), other=1.0) == cut(0)
    with pytest.raises(RuleError) as error:
        state("mul_", input=T(1, 4, state=COPIED), other=T(1, 4, state=PARTIAL))
    assert str(error.value) == (
        "axis 'tensor': mul_ writes what is partial into input, which is replicate, its gradient partial; legal: a "
        "target that is partial, or a new tensor in its place"
    )


def test_zeros_become_what_is_written_into_them():
    zeros = T(4, 8, state=constant(2, zero=True), grad=False)
    assert state("add_", input=zeros, other=T(4, 8, state=PARTIAL)) == PARTIAL
    assert state("copy_", input=zeros, other=T(4, 8, state=cut(1))) == cut(1)
    index = T(4, dtype="int64")
    assert state("index_add_", input=zeros, dim=0, index=index, source=T(4, 8, state=PARTIAL)) == PARTIAL
    assert state("setitem_", input=zeros, index=(..., 0), value=T(4, state=cut(0))) == cut(0)


def test_ones_become_parts_but_no_sums():
    ones = T(4, state=constant(1), grad=False)
    assert state("mul_", input=ones, other=T(4, state=cut(0))) == cut(0)
    with pytest.raises(RuleError, match="counted once for every rank"):
        state("add_", input=ones, other=T(4, state=PARTIAL))


# The key.


def test_calls_that_differ_in_anything_that_matters_are_two():
    calls = {
        call("sum", input=T(4, 4), dim=0),
        call("sum", input=T(4, 4), dim=1),
        call("sum", input=T(4, 4), dim=1, keepdim=True),
        call("sum", input=T(4, 4), other=1),
        call("sum", input=T(4, 4, state=COPIED), dim=0),
        call("sum", input=T(4, 4, grad=False), dim=0),
        call("sum", input=T(4, 4, dtype="float16"), dim=0),
        call("sum", input=T(4, 2), dim=0),
        call("mean", input=T(4, 4), dim=0),
        call("getitem", input=T(4, 4), index=1),
        call("getitem", input=T(4, 4), index=True),
        call("getitem", input=T(4, 4), index=slice(1)),
        call("getitem", input=T(4, 4), index=[1]),
        call("embedding", frozenset({"vocabulary"}), input=T(4, 4)),
        call("embedding", input=T(4, 4)),
    }
    assert len(calls) == 15


def test_equal_calls_are_looked_up():
    infer.cache_clear()
    for _ in range(3):
        state("softmax", input=T(4, 4), dim=-1)
    assert infer.cache_info().misses == 1 and infer.cache_info().hits == 2


def test_each_axis_is_followed_on_its_own():
    both = call("sum", input=T(4, 4), dim=0)
    argument = both.arguments[0][1]._replace(states=(cut(0), cut(1)))
    two = both._replace(axes=("context", "tensor"), sizes=(2, 2), arguments=(("input", argument), ("dim", 0)))
    assert infer(two) == ((PARTIAL, cut(0)),)


# Users' rules.


def test_an_unknown_operator_is_refused_with_the_line_that_registers_it(own_table):
    with pytest.raises(UnknownOperator) as error:
        state("my_gelu", input=T(2, state=cut(0)))
    assert str(error.value) == (
        "the operator my_gelu has no rule; legal: one that is known, or hyper_parallel.register_rule('my_gelu', "
        'like="pointwise") with what it is like'
    )
    hp.register_rule("my_gelu", like="pointwise")
    assert state("my_gelu", input=T(2, state=cut(0))) == cut(0)
    assert state("my_gelu_", input=T(2, state=cut(0))) == cut(0)


def test_a_call_in_an_unknown_form_is_refused_and_says_why():
    with pytest.raises(UnknownOperator) as error:
        state("reshape", input=T(4), shape=(None,))
    assert str(error.value).startswith(
        "axis 'tensor': reshape is called in a form that its rule does not know (TypeError"
    )
    with pytest.raises(UnknownOperator, match="KeyError: 'other'"):
        state("matmul", input=T(4, 4))


def test_a_registered_rule_may_name_its_arguments_otherwise(own_table):
    register_rule("my_linear", like="linear", arguments="weight input")
    assert table.parameters_of("my_linear") == "weight input"
    assert state("my_linear", weight=T(4, 8, state=cut(1)), input=T(2, 8, state=cut(1))) == PARTIAL


def test_a_rule_may_be_a_function_and_gradients_are_still_seen_to(own_table):
    register_rule("halve", rule=lambda view: view["input"].state if view["input"].state.cut is None else State())
    assert state("halve", input=T(4, state=COPIED)) == COPIED
    register_rule("halve", rule=lambda view: cut(0))
    with pytest.raises(RuleError, match="input is replicate with the whole gradient"):
        state("halve", input=T(4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "register_rule('f'): give either like= or rule=, found None and None"),
        ({"like": "relu", "rule": len}, "give either like= or rule="),
        ({"like": "reluu"}, "register_rule('f'): there is no operator 'reluu'; docs/rules.md lists them"),
    ],
)
def test_a_registration_that_says_too_little_or_too_much_is_refused(given, message, own_table):
    with pytest.raises(ConfigError) as error:
        register_rule("f", **given)
    assert message in str(error.value)
