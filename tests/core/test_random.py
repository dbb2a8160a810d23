"""Random numbers by global index, with a Philox of whole numbers and numpy slices as oracles."""

import hashlib
import os
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from hyper_parallel import ConfigError, DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard
from hyper_parallel.core import philox, random
from hyper_parallel.core.philox import bits32, bits64
from hyper_parallel.core.placement import RaggedShard, StridedShard
from hyper_parallel.core.random import Generator, bernoulli, dropout_mask, normal, uniform

AXES = ("pipeline", "replicate", "shard", "expert")
HALVES = ("float16", "bfloat16")
DTYPES = (*HALVES, "float32", "float64")
MASK = 2**64 - 1


def reference_word(seed, draw, width, place):
    """Word `place` of the stream of a draw: Philox 4x64-10 in whole numbers."""
    block, word = divmod(place * width, 256)
    counter = [block + 1, 0, 0, width]
    keys = [seed, draw]
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (second >> 64) ^ counter[1] ^ keys[0],
            second & MASK,
            (first >> 64) ^ counter[3] ^ keys[1],
            first & MASK,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & MASK, (keys[1] + 0xBB67AE8584CAA73B) & MASK]
    return counter[word // 64] >> word % 64 & 2**width - 1


def one_device(shape):
    return Layout(DeviceMesh((1,), ("shard",)), [Replicate()], shape)


def whole_box(shape):
    return tuple(slice(0, size) for size in shape)


def draw_all(function, layout, generator, **options):
    """One draw, on every rank; each has a generator of its own, as ranks do."""
    locals_ = []
    for rank in layout.mesh.ranks:
        own = Generator()
        own.load_state_dict(generator.state_dict())
        locals_.append(function(layout, rank, own, **options))
    generator.take()
    return locals_


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: np.prod(sizes) <= 24))
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    mesh = DeviceMesh(sizes, AXES[: len(sizes)])
    placements = []
    for size in sizes:
        choices = [st.just(Replicate())]
        if shape:
            dims = st.integers(0, len(shape) - 1)
            units = st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any)
            choices += [dims.map(Shard), st.builds(StridedShard, dims, st.integers(1, 4))]
            choices += [st.builds(lambda last, units: RaggedShard(range(last + 1), units), dims, units)]
        placements.append(draw(st.one_of(*choices)))
    try:
        return Layout(mesh, placements, shape)
    except LayoutError:  # a combination without a meaning
        reject()


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    return shape, tuple(slice(*sorted(draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in shape)


class TestBits:
    @pytest.mark.parametrize("seed, draw", [(0, 0), (1, 2), (2**64 - 1, 2**64 - 1), (0x9E3779B9, 2**32)])
    @pytest.mark.parametrize("bits, width", [(bits32, 32), (bits64, 64)])
    def test_a_word_is_philox_of_the_seed_the_draw_and_the_global_index(self, bits, width, seed, draw):
        expected = np.array([reference_word(seed, draw, width, place) for place in range(30)], np.uint64)
        np.testing.assert_array_equal(bits(seed, draw, (5, 6), whole_box((5, 6))), expected.reshape(5, 6))

    @pytest.mark.parametrize("bits, width", [(bits32, 32), (bits64, 64)])
    def test_a_far_corner_of_a_huge_tensor_costs_nothing(self, bits, width):
        shape, last = (2**30, 2**30), 2**30 - 1
        found = bits(3, 4, shape, (slice(last, 2**30), slice(last - 2, 2**30)))
        expected = [reference_word(3, 4, width, last * 2**30 + column) for column in range(last - 2, 2**30)]
        np.testing.assert_array_equal(found, np.array([expected], np.uint64))

    @given(boxes(), st.sampled_from([bits32, bits64]))
    def test_a_box_is_a_slice_of_the_whole(self, case, bits):
        shape, box = case
        assert_same_bits(bits(5, 6, shape, box), bits(5, 6, shape, whole_box(shape))[box].copy())

    @pytest.mark.parametrize("block", [1, 3, 64])
    @pytest.mark.parametrize("gap", [0, 12, 10**6])
    @pytest.mark.parametrize("shape", [(4, 3, 5, 6), (3, 2, 4, 16)])
    def test_the_sizes_that_make_it_fast_change_no_bit(self, monkeypatch, block, gap, shape):
        monkeypatch.setattr(philox, "_BLOCK", block)
        monkeypatch.setattr(philox, "_CHEAP_GAP_BYTES", gap)
        words = [reference_word(5, 6, 32, place) for place in range(np.prod(shape))]
        stream = np.array(words, np.uint32).reshape(shape)
        numbers = np.random.default_rng(0)
        for _ in range(100):
            box = tuple(slice(*sorted(numbers.integers(0, size + 1, 2))) for size in shape)
            assert_same_bits(bits32(5, 6, shape, box), stream[box].copy())

    @pytest.mark.parametrize("shape", [(100_001,), (7, 20_003), (1999, 64), (20, 30, 200)])
    def test_boxes_of_many_blocks_are_slices_too(self, shape):
        whole = bits32(7, 8, shape, whole_box(shape))
        for part in ((1, 2), (0, 3), (2, 3)):
            box = tuple(slice(size * part[0] // 4, size * part[1] // 3) for size in shape)
            assert_same_bits(bits32(7, 8, shape, box), whole[box].copy())

    def test_no_word_of_two_draws_two_seeds_or_two_widths_is_the_same(self):
        """Among so few 64-bit words a repetition has a chance of 2**-35."""
        words = [
            bits(seed, draw, (1024,), whole_box((1024,))).view(np.uint64)
            for seed in (0, 1, 2**32, 2**64 - 1)
            for draw in (0, 1, 2**32)
            for bits in (bits32, bits64)
        ]
        every = np.concatenate(words)
        assert len(np.unique(every)) == len(every)

    @pytest.mark.parametrize("box", [(), (slice(0, 3),) * 2, (slice(0, 6), slice(0, 2)), (slice(2, 1), slice(0, 2))])
    def test_what_is_no_box_is_refused(self, box):
        with pytest.raises(LayoutError, match=r"a box of a tensor of shape \[5, 2\]"):
            bits32(0, 0, (5, 2), box)

    def test_numbers_out_of_range_are_refused(self):
        with pytest.raises(ConfigError, match=r"a seed is a whole number from 0 to 2\*\*64 - 1, found -1"):
            bits32(-1, 0, (), ())
        with pytest.raises(ConfigError, match="a draw number is .* found 1.5"):
            bits64(0, 1.5, (), ())


class TestLayouts:
    @given(layouts(), st.integers(0, MASK), st.sampled_from(DTYPES))
    def test_shards_of_any_layout_assemble_to_the_tensor_of_one_device(self, layout, seed, dtype):
        for function in (uniform, normal, bernoulli, dropout_mask):
            expected = function(one_device(layout.shape), 0, Generator(seed), dtype=dtype)
            locals_ = draw_all(function, layout, Generator(seed), dtype=dtype)
            for rank, local in zip(layout.mesh.ranks, locals_):
                assert_same_bits(local, layout.shard(expected, rank))
            assert_same_bits(layout.assemble(locals_), expected)

    @given(layouts(), st.data())
    def test_resharding_between_draws_changes_nothing(self, first, data):
        second = data.draw(layouts())
        one, many = Generator(11), Generator(11)
        for layout in (first, second, first):
            expected = uniform(one_device(layout.shape), 0, one)
            assert_same_bits(layout.assemble(draw_all(uniform, layout, many)), expected)

    def test_a_rank_that_holds_nothing_takes_part_in_the_draw(self):
        layout, generator = Layout(DeviceMesh((4,), ("shard",)), [Shard(0)], (5, 2)), Generator(1)
        assert uniform(layout, 3, generator, dtype="float64").shape == (0, 2)
        assert generator.draw == 1

    def test_partial_values_are_refused_and_take_no_draw(self):
        layout, generator = Layout(DeviceMesh((2,), ("tensor",)), [Partial("avg")], (4,)), Generator()
        for function in (uniform, normal, bernoulli, dropout_mask):
            with pytest.raises(LayoutError, match=r"axis 'tensor'.*partial\(avg\).*draw with replicate or shard"):
                function(layout, 0, generator)
        assert generator.draw == 0

    def test_a_rank_that_the_mesh_lacks_is_refused_and_takes_no_draw(self):
        generator = Generator()
        with pytest.raises(LayoutError, match="rank 3"):
            uniform(one_device((4,)), 3, generator)
        assert generator.draw == 0

    def test_a_partial_axis_of_one_rank_is_no_axis(self):
        layout = Layout(DeviceMesh((1,), ("tensor",)), [Partial()], (4,))
        assert_same_bits(uniform(layout, 0, Generator()), uniform(one_device((4,)), 0, Generator()))


class TestGenerator:
    def test_state_saved_on_the_way_goes_on_alike(self):
        layout, generator = one_device((3, 4)), Generator(2**64 - 1)
        uniform(layout, 0, generator)
        state = generator.state_dict()
        assert state == {"seed": 2**64 - 1, "draw": 1}
        expected = [normal(layout, 0, generator), uniform(layout, 0, generator)]
        restored = Generator()
        restored.load_state_dict(state)
        for function, values in zip((normal, uniform), expected):
            assert_same_bits(function(layout, 0, restored), values)

    def test_the_default_generator_starts_again_with_a_seed(self):
        layout, before = one_device((5,)), random.default_generator.state_dict()
        try:
            assert random.manual_seed(9) is random.default_generator
            first = [uniform(layout, 0), uniform(layout, 0)]
            expected = Generator(9)
            for values in first:
                assert_same_bits(values, uniform(layout, 0, expected))
        finally:
            random.default_generator.load_state_dict(before)

    @pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True])
    def test_other_seeds_are_refused(self, seed):
        with pytest.raises(ConfigError, match="a seed is a whole number"):
            Generator(seed)

    def test_numpy_integers_are_seeds_and_the_state_is_plain(self):
        state = Generator(np.uint64(2**63)).state_dict()
        assert state == {"seed": 2**63, "draw": 0} and {type(value) for value in state.values()} == {int}

    @pytest.mark.parametrize("state", [{}, {"seed": 1}, {"seed": 1, "draw": -1}, {"seed": 1, "draw": 0, "x": 0}, [1]])
    def test_a_wrong_state_is_refused_and_changes_nothing(self, state):
        generator = Generator(4)
        with pytest.raises(ConfigError):
            generator.load_state_dict(state)
        assert generator.state_dict() == {"seed": 4, "draw": 0}

    def test_after_the_last_draw_there_is_none(self):
        generator = Generator(4)
        generator.load_state_dict({"seed": 4, "draw": 2**64 - 1})
        generator.take()
        with pytest.raises(ConfigError, match="last draw"):
            generator.take()


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return ((counts - expected) ** 2 / expected).sum()


# A sum of squares over n cells is about n - 1 with deviation sqrt(2 n); bounds in this file are five deviations away.
# Seeds are fixed, so that no run differs from another.
CELLS, DRAWN = 256, 2**18
CHI_BOUND = CELLS + 5 * (2 * CELLS) ** 0.5


class TestUniform:
    @pytest.mark.parametrize("dtype, kept", list(zip(DTYPES, (11, 8, 24, 53))))
    def test_values_are_the_highest_bits_of_the_word(self, dtype, kept):
        shape = (2000,)
        bits, width = (bits64, 64) if dtype == "float64" else (bits32, 32)
        steps = bits(3, 0, shape, whole_box(shape)) >> (width - kept)
        np.testing.assert_array_equal(uniform(one_device(shape), 0, Generator(3), dtype), steps * 2.0**-kept)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_values_are_spread_evenly(self, dtype):
        values = uniform(one_device((DRAWN,)), 0, Generator(5), dtype).astype(np.float64)
        assert chi_square(np.bincount((values * CELLS).astype(int), minlength=CELLS)) < CHI_BOUND

    @pytest.mark.parametrize("seed, draw", [(5, 1), (6, 0), (4, 0), (5 + 2**32, 0), (5, 2**32)])
    def test_other_draws_and_seeds_are_independent(self, seed, draw):
        generator, other = Generator(5), Generator(5)
        other.load_state_dict({"seed": seed, "draw": draw})
        pair = [uniform(one_device((DRAWN,)), 0, each) for each in (generator, other)]
        assert abs(np.corrcoef(pair)[0, 1]) < 5 / DRAWN**0.5
        cells = (pair[0] * 16).astype(int) * 16 + (pair[1] * 16).astype(int)
        assert chi_square(np.bincount(cells, minlength=CELLS)) < CHI_BOUND

    def test_neighbours_are_independent(self):
        values = uniform(one_device((DRAWN,)), 0, Generator(8))
        for lag in (1, 2, 4, 8):
            assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / (DRAWN - lag) ** 0.5

    @given(st.sampled_from(DTYPES), st.floats(-100, 100), st.floats(0.02, 100), st.integers(0, 99))
    def test_values_stay_in_their_range(self, dtype, low, width, seed):
        # The narrowest range has a width of 0.02: near 100 numbers of float16 are 1/16 apart, those of bfloat16 1/2.
        try:
            values = uniform(one_device((64,)), 0, Generator(seed), dtype, low, low + width).astype(np.float64)
        except ConfigError as error:
            assert dtype in HALVES and f"no {dtype} number lies there" in str(error)
        else:
            assert values.min() >= low and values.max() < low + width

    @pytest.mark.parametrize("dtype, last", [("float16", 2 - 2**-10), ("bfloat16", 2 - 2**-7)])
    def test_high_is_not_reached_by_rounding(self, dtype, last):
        # Numbers from 1 to 2 are twice as far apart as the steps of u, so the last step rounds to 2.
        values = uniform(one_device((2**15,)), 0, Generator(1), dtype, 1.0, 2.0)
        assert values.max() == last and values.min() == 1

    def test_a_range_below_the_normal_numbers_of_float16_keeps_its_end(self):
        values = uniform(one_device((999,)), 0, Generator(1), "float16", 0.0, 1.75 * 2**-24)
        assert set(values.astype(np.float64)) == {0.0, 2.0**-24}  # the next number is 2 * 2**-24

    def test_a_range_of_one_number_gives_it(self):
        assert set(uniform(one_device((9,)), 0, Generator(), "bfloat16", 0.5, 0.5)) == {0.5}

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"dtype": "int32"}, "float16, bfloat16, float32, float64, found 'int32'"),
            ({"dtype": np.float32}, "random numbers come as"),
            ({"low": 1.0, "high": 0.0}, "low is above high"),
            ({"low": float("nan")}, "low is a finite number, found nan"),
            ({"high": "big"}, "high is a number, found 'big'"),
            ({"dtype": "float16", "high": 1e5}, "beyond the largest float16"),
            ({"low": -3e38, "high": 3e38}, "beyond the largest float32"),
            ({"dtype": "bfloat16", "low": 1.001, "high": 1.002}, "no bfloat16 number lies there"),
            ({"low": 0.1, "high": 0.1}, "no float32 number lies there"),
        ],
    )
    def test_other_arguments_are_refused_and_take_no_draw(self, options, message):
        generator = Generator()
        with pytest.raises(ConfigError, match=message):
            uniform(one_device((4,)), 0, generator, **options)
        assert generator.draw == 0


class TestNormal:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_values_are_normal(self, dtype):
        values = normal(one_device((DRAWN,)), 0, Generator(2), dtype).astype(np.float64)
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs((values**power).mean() - moment) < 5 * (variance / DRAWN) ** 0.5
        if dtype not in HALVES:  # numbers of half precision fall on the edges of cells
            edges = [NormalDist().inv_cdf(cell / CELLS) for cell in range(1, CELLS)]
            assert chi_square(np.bincount(np.searchsorted(edges, values), minlength=CELLS)) < CHI_BOUND

    def test_values_are_those_of_box_and_muller(self):
        shape = (20_000,)
        words = bits64(6, 0, shape, whole_box(shape))
        radius = np.sqrt(-2 * np.log(((words >> np.uint64(32)).astype(np.float64) + 1) / 2**32))
        signed = words.astype(np.uint32).view(np.int32).astype(np.float64)
        expected = radius * np.sin(np.pi * (signed + 0.5) / 2**32)
        exact = normal(one_device(shape), 0, Generator(6), "float64")
        # A few roundings of numbers below 7, on both sides.
        np.testing.assert_allclose(exact, expected, rtol=0, atol=4 * 7 * 2**-52)
        single = normal(one_device(shape), 0, Generator(6), "float32")
        # float32 holds 24 bits of u; an error d of u near 1 is sqrt(2 d) in the radius, and d / radius elsewhere.
        np.testing.assert_allclose(single, expected, rtol=0, atol=2**-11)
        far = radius > 0.1
        np.testing.assert_allclose(single[far], expected[far], rtol=0, atol=4 * 7 * 2**-23)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_length_offset_and_stride_change_no_bit(self, dtype):
        whole = normal(one_device((80,)), 0, Generator(3), dtype)
        for start in range(10):
            for length in range(1, 71):
                units = RaggedShard(0, (start, length, 80 - start - length))
                part = normal(Layout(DeviceMesh((3,), ("shard",)), [units], (80,)), 1, Generator(3), dtype)
                assert_same_bits(part, whole[start : start + length])
        columns = Layout(DeviceMesh((5,), ("tensor",)), [Shard(1)], (4, 20))
        for rank in range(5):
            expected = whole.reshape(4, 20)[:, 4 * rank : 4 * rank + 4].copy()
            assert_same_bits(normal(columns, rank, Generator(3), dtype), expected)

    @pytest.mark.parametrize(
        "dtype, digest",
        [
            ("float16", "82ca8a1c11d61a8a"),
            ("bfloat16", "a5eae878c5988be5"),
            ("float32", "0e7d75e2497d662b"),
            ("float64", "0dcc8437376418d5"),
        ],
    )
    @pytest.mark.parametrize("without", ["", "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL"])
    def test_values_do_not_depend_on_what_the_processor_can_do(self, dtype, digest, without):
        code = (
            "import sys, numpy; from hyper_parallel import DeviceMesh, Layout, Replicate\n"
            "from hyper_parallel.core.random import Generator, normal\n"
            "layout = Layout(DeviceMesh((1,), ('shard',)), [Replicate()], (10_000,))\n"
            "sys.stdout.buffer.write(normal(layout, 0, Generator(1), sys.argv[1], 0.5, 2.0).tobytes())"
        )
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": without}
        values = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, dtype], env=environment, capture_output=True, check=True
        )
        assert hashlib.sha256(values.stdout).hexdigest()[:16] == digest

    def test_extreme_words_give_finite_numbers(self):
        words = np.array([0, 2**64 - 1, 2**32 - 1, 2**63, 2**31, 2**31 - 1, MASK - 2**32 + 1], np.uint64)
        for dtype in DTYPES:
            kind = random._KINDS[dtype]
            out = np.empty(len(words), kind.store)
            random._normal(kind, 0.0, 1.0)(words, out)
            assert np.isfinite(out).all() and np.abs(out).max() < 6.69  # 6.661, rounded to 8 bits at the worst

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_mean_and_std_are_applied_in_the_dtype(self, dtype):
        layout = one_device((500,))
        compute = np.float64 if dtype == "float64" else np.float32
        plain = normal(layout, 0, Generator(4), compute.__name__)
        expected = plain * compute(0.02) + compute(3)
        found = normal(layout, 0, Generator(4), dtype, 3.0, 0.02)
        if dtype == "bfloat16":
            np.testing.assert_array_equal(found.view(np.uint32) & 0xFFFF, 0)
            assert np.abs(found - expected).max() <= 2**-7  # half of the distance of its numbers between 2 and 4
        else:
            np.testing.assert_array_equal(found, expected.astype(dtype))

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"std": -1.0}, r"standard deviation is -1.0; it is not negative"),
            ({"mean": float("inf")}, "the mean is a finite number, found inf"),
            ({"dtype": "bool"}, "found 'bool'"),
            ({"dtype": "float16", "std": 1e4}, "beyond the largest float16"),
        ],
    )
    def test_other_arguments_are_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            normal(one_device((4,)), 0, Generator(), **options)


class TestDropout:
    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_ones_are_as_frequent_as_asked(self, p):
        values = bernoulli(one_device((DRAWN,)), 0, Generator(7), p)
        assert values.dtype == bool
        assert abs(values.mean() - p) < 5 * (p * (1 - p) / DRAWN) ** 0.5

    @pytest.mark.parametrize("dtype", ["bool", *DTYPES])
    def test_zero_and_one_are_certain(self, dtype):
        layout = one_device((100,))
        assert not bernoulli(layout, 0, Generator(), 0.0, dtype).any()
        assert (bernoulli(layout, 0, Generator(), 1.0, dtype) == 1).all()

    def test_a_one_is_a_word_below_the_probability(self):
        words = bits32(1, 0, (1000,), (slice(0, 1000),))
        np.testing.assert_array_equal(bernoulli(one_device((1000,)), 0, Generator(1), 0.25), words < 2**30)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("p", [0.0, 0.1, 0.75])
    def test_the_mask_drops_what_bernoulli_hits(self, dtype, p):
        layout = one_device((4, 50))
        mask = dropout_mask(layout, 0, Generator(7), p, dtype)
        dropped = bernoulli(layout, 0, Generator(7), p)
        assert (mask[dropped] == 0).all() and len(np.unique(mask[~dropped])) == 1
        # Rounded to nearest, so off by at most half a unit in the last place: 2**-8 relative for the coarsest dtype.
        precision = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}[dtype]
        assert mask.max() == pytest.approx(1 / (1 - p), rel=precision, abs=0)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("p", [1.0, 1 - 2**-40])
    def test_dropping_all_gives_zeros(self, dtype, p):
        assert_same_bits(dropout_mask(one_device((3, 5)), 0, Generator(), p, dtype), np.zeros((3, 5), kept_as(dtype)))

    @pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), "half"])
    def test_other_probabilities_are_refused(self, p):
        for function in (bernoulli, dropout_mask):
            with pytest.raises(ConfigError, match="the probability p"):
                function(one_device((4,)), 0, Generator(), p)

    def test_a_scale_that_the_dtype_lacks_is_refused(self):
        with pytest.raises(ConfigError, match="beyond the largest float16"):
            dropout_mask(one_device((4,)), 0, Generator(), 1 - 2**-20, "float16")


def kept_as(dtype):
    """The numpy dtype in which a dtype comes."""
    return np.float32 if dtype == "bfloat16" else np.dtype(dtype)


def test_dtypes_are_as_asked():
    for dtype in DTYPES:
        for function in (uniform, normal, bernoulli, dropout_mask):
            assert function(one_device((2, 3)), 0, Generator(), dtype=dtype).dtype == kept_as(dtype)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_scalars_and_empty_tensors_work(shape):
    for function in (uniform, normal, bernoulli, dropout_mask):
        assert function(one_device(shape), 0, Generator()).shape == shape
