"""The global norm of a model whose parameters are held in every way at once."""

import pytest

BODIES = "tests.equivalence.clip_bodies"


@pytest.mark.parametrize("max_norm", [0.01, float("inf")])
def test_meshes_dtypes_places_and_dims_may_be_mixed(pool, backend_name, max_norm):
    found = pool(backend_name, 2).run(f"{BODIES}:mixed", max_norm)
    assert found[0][0] == found[1][0], "all ranks scale alike"
    for norm, wanted, errors in found:
        assert norm == pytest.approx(wanted, rel=1e-6)  # gradients of float32 and float16
        # Numbers up to 4, rounded before and after they are scaled: two halves of a unit in the last place.
        assert errors.pop("float32") < 4 * 2**-22
        assert errors.pop("float16") < 4 * 2**-10
        assert not errors


@pytest.mark.parametrize("exponent", [80, -400])
def test_norms_are_summed_over_ranks_as_precisely_as_on_one(pool, backend_name, exponent):
    """Squares of such gradients, which float64 holds, are too large and too small for float32."""
    for found, wanted, clipped in pool(backend_name, 2).run(f"{BODIES}:huge", exponent):
        assert found == wanted
        assert clipped == pytest.approx(1.0 if exponent > 0 else 2.0 ** (exponent + 1), rel=1e-6)  # the guard is 1e-6
