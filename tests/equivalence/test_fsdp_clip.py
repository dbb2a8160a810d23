"""The global norm of a model whose parameters are held in every way at once."""

import pytest

BODIES = "tests.equivalence.clip_bodies"


@pytest.mark.parametrize("max_norm", [0.01, float("inf")])
def test_meshes_dtypes_places_and_dims_may_be_mixed(pool, backend_name, max_norm):
    found = pool(backend_name, 2).run(f"{BODIES}:mixed", max_norm)
    assert found[0][0] == found[1][0], "all ranks scale alike"
    for norm, wanted, errors in found:
        assert norm == pytest.approx(wanted, rel=1e-6)  # sums of squares travel in float32
        # Numbers up to 4, rounded before and after they are scaled: two halves of a unit in the last place.
        assert errors.pop("float32") < 4 * 2**-22
        assert errors.pop("float16") < 4 * 2**-10
        assert not errors
