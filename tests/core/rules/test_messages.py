"""What is wrong and what would be legal: the whole message of each kind of refusal."""

import pytest

from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, cut
from hyper_parallel.core.rules.table import RuleError
from tests.core.rules.calls import T, state

IDS = T(4, dtype="int64")


def part(*shape, dim, **more):
    return T(*shape, state=cut(dim), **more)


def pending(*shape):
    return T(*shape, state=PARTIAL)


def copied(*shape):
    return T(*shape, state=COPIED)


REFUSED = {
    "a bias added to a pending sum": (
        dict(op="linear", input=part(4, 8, dim=1), weight=part(6, 8, dim=1), bias=copied(6)),
        "linear: the product is partial, since the dim that it sums over is cut, so bias, which is replicate, its "
        "gradient partial, would be added once on every rank",
        "no bias here: add it once, after the sum over the ranks",
    ),
    "a number added to a pending sum": (
        dict(op="add", input=pending(4), other=2.0),
        "add: input is partial, so the number 2.0 would be counted once for every rank",
        "input as replicate or shard: reduce it first; or partial on both sides",
    ),
    "a nonlinear function of a pending sum": (
        dict(op="gelu", input=pending(4)),
        "input is partial, and gelu of a sum can't be worked out from its parts",
        "input as replicate or shard: reduce it before gelu",
    ),
    "a product of pending sums": (
        dict(op="mul", input=pending(4), other=pending(4)),
        "input and other are both partial, and a product of sums is no sum of products",
        "one of them as replicate: reduce it before the product",
    ),
    "a softmax along a cut dim": (
        dict(op="softmax", input=part(4, 8, dim=1), dim=-1),
        "input is shard(1) and softmax needs all elements along that dim",
        "input as replicate or shard(0)",
    ),
    "a mean along a cut dim": (
        dict(op="mean", input=part(4, 8, dim=1), dim=-1),
        "input is shard(1), and the mean along that dim would be that of this rank's part",
        "input as replicate; or the sum, which is then partial, divided by the whole length",
    ),
    "a product with one side cut": (
        dict(op="matmul", input=part(4, 8, dim=1), other=copied(16, 6)),
        "matmul: input is shard(1) and other [16, 6] is whole along the dim that meets it (0)",
        "other as shard(0), or input as replicate",
    ),
    "rows and columns cut by one axis": (
        dict(op="matmul", input=part(4, 8, dim=0), other=part(8, 6, dim=1)),
        "matmul: input is shard(0) and other is shard(1): each rank would have one block of the result, which is cut "
        "in two dims by one axis",
        "one of input and other as replicate",
    ),
    "what is whole beside a part": (
        dict(op="add", input=part(4, 8, dim=1), other=copied(8)),
        "add: other [8] is whole along dim 0, where input [4, 8] holds only this rank's part",
        "other as shard(0), of size 1 there, or the same all along it",
    ),
    "parts of two kinds": (
        dict(op="add", input=part(4, 4, dim=0), other=part(4, 4, dim=1)),
        "add: input is shard(0) and other is shard(1), which are different parts",
        "both cut alike, or one of input and other as replicate",
    ),
    "a split of a packed dim that is cut as one": (
        dict(op="chunk", input=part(4, 8, dim=1), chunks=2, dim=-1),
        "chunk: input [4, 8] is shard(1), and elements [0, 4) of that dim would be taken from each rank's part",
        "input as replicate, or as strided_shard(1, BLOCKS) where these are its blocks",
    ),
    "a split beside the blocks": (
        dict(op="split", input=T(4, 8, state=cut(1, 2)), size=[2, 6], dim=1),
        "split: input [4, 8] is strided_shard(1, 2), and elements [0, 2) of that dim would be taken from each rank's "
        "part",
        "input as replicate, or parts of 4 elements, which are its blocks",
    ),
    "a vocabulary that nobody vouches for": (
        dict(op="embedding", input=IDS, weight=part(8, 4, dim=0)),
        "weight is shard(0): this rank holds a part of what input counts in",
        "weight as replicate or cut along another dim; of a vocabulary, a boundary of type embedding, which shifts "
        "tokens and zeroes the rows of other ranks",
    ),
    "a loss of cut classes": (
        dict(op="cross_entropy", input=part(4, 8, dim=1), target=IDS),
        "input is shard(1): each rank holds a part of the classes, but their probabilities need all of them",
        "hyper_parallel.cross_entropy, which keeps them cut; or input as replicate",
    ),
    "the best of a cut dim": (
        dict(op="topk", input=part(4, 8, dim=1), k=2, dim=-1),
        "input is shard(1) and topk takes all elements of that dim into account",
        "input as replicate or shard(0)",
    ),
    "a shape of whole sizes": (
        dict(op="reshape", input=part(2, 4, 8, dim=2), shape=(2, 4, 4, 4)),
        "input [2, 4, 8] can't become [2, 4, 4, 4]: this rank holds 64 elements",
        "a shape of local sizes; what the model's code keeps as a number, such as that of heads, has to be local",
    ),
    "a shape that spreads a part over other dims": (
        dict(op="reshape", input=part(3, 4, dim=1), shape=(2, 6)),
        "input [3, 4] is shard(1), and in the shape [2, 6] no dim holds this rank's part: it would be spread over "
        "several dims, among the parts of others",
        "a shape that keeps the cut dim, splits it, or merges it with its neighbours",
    ),
    "a number of heads that is not local": (
        dict(op="reshape", input=T(2, 4, 16, state=cut(2, unit=8)), shape=(2, 4, 4, -1)),
        "input [2, 4, 16] is shard(2) in units of 8, and the shape [2, 4, 4, 4] splits it into parts of 4",
        "the cut dim as (-1, 8); a number of heads in the model's code has to be local",
    ),
    "an element of a cut dim": (
        dict(op="getitem", input=part(4, 8, dim=0), index=(0,)),
        "input is shard(0) and getitem takes single elements of that dim, which another rank may hold",
        "input as replicate or shard(1)",
    ),
    "the first elements of the whole, which are not here": (
        dict(op="getitem", input=part(4, 8, dim=1), index=(slice(None), slice(10))),
        "getitem: input [4, 8] is shard(1), and the bound 10 lies past this rank's part",
        "input as replicate, or bounds taken from the local shape",
    ),
    "a value of a part read by the program": (
        dict(op="read", input=part(4, dim=0)),
        "input is shard(0) and read hands the program elements that differ among ranks",
        "input as replicate",
    ),
    "keys of other ranks' queries": (
        dict(
            op="attention",
            query=part(2, 2, 4, 8, dim=1),
            key=copied(2, 2, 4, 8),
            value=copied(2, 2, 4, 8),
            grouped=True,
        ),
        "attention: query is shard(1) and key is replicate, its gradient partial, so that a rank's queries would find "
        "the keys of other ranks' queries",
        "key as shard(1), or only the heads that this rank's queries use",
    ),
    "a causal mask counted from a part's first query": (
        dict(
            op="attention", query=part(2, 2, 4, 8, dim=2), key=copied(2, 2, 8, 8), value=copied(2, 2, 8, 8), causal=True
        ),
        "query is shard(2) and attention counts a causal mask from the first query of the rank's part",
        "query as replicate or shard(0) or shard(1) or shard(3)",
    ),
    "summands put into what is counted on every rank": (
        dict(op="index_add", input=copied(4, 8), dim=0, index=IDS, source=pending(4, 8)),
        "index_add: input is replicate, its gradient partial and source is partial: what is not partial would be "
        "counted once on every rank",
        "both partial, or zeros",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_is_wrong_and_what_would_be_legal(name):
    arguments, reason, legal = REFUSED[name]
    with pytest.raises(RuleError) as error:
        state(**arguments)
    assert (error.value.axis, error.value.reason, error.value.legal) == ("tensor", reason, legal)
    assert str(error.value) == f"axis 'tensor': {reason}; legal: {legal}"


def test_a_vocabulary_that_a_boundary_vouches_for_gives_a_pending_sum():
    vouched = frozenset({"vocabulary"})
    assert state("embedding", vouched, input=IDS, weight=part(8, 4, dim=0)) == PARTIAL
    assert state("take_rows", vouched, input=part(8, 4, dim=0), index=IDS, dim=0) == PARTIAL
    assert state("embedding", input=IDS, weight=part(8, 4, dim=1)) == cut(1)
    assert state("embedding", input=IDS, weight=T(8, 4)) == WHOLE
