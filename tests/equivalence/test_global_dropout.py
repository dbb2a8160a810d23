"""`hyper_parallel.dropout` in a model's own code: the numbers of one device on any mesh, in both modes and backends."""

import pytest

from tests.equivalence import global_dropout_bodies as bodies
from tests.equivalence.test_decoder import random_case


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"shard": 2, "tensor": 2}], ids=str)
def test_a_model_that_drops_by_global_indices_is_that_of_one_device(pool, backend_name, sizes, sequence_parallel):
    ranks = 2 * sizes.get("shard", 1)
    case = random_case(batch=4, tie_word_embeddings=False)
    for error, same in pool(backend_name, ranks).run(bodies.both, *case, sizes, sequence_parallel):
        assert error < 1e-12  # float64's rounding in sums of a few hundred terms
        assert same


def test_a_layout_that_is_not_the_tensors_is_refused(pool, backend_name):
    for told in pool(backend_name, 2).run(bodies.refused, *random_case(batch=2)):
        for name in ("shape", "shape, followed"):
            assert told[name].startswith("LayoutError: dropout: this rank's tensor has the shape [2, 11, ")
        assert told["whole"].startswith(
            "ContractError: model.layers.0.self_attn.o_proj: dropout over tensor: the layout that is given says that x "
            "is replicate\n  found: x [2, 11, "
        )
