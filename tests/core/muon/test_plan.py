"""Plans of Muon against one device: what every rank gets, what travels, and who does what."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.muon.plan_cases import draw_plan, interpreted, linear, on_one_device, values_of

plans = st.integers(0, 10**9).map(lambda seed: draw_plan(random.Random(seed).randint))


@given(plans)
@settings(max_examples=150, deadline=None)
def test_every_rank_gets_its_slice_of_what_one_device_gets(plan):
    values = values_of(plan)
    outcome = interpreted(plan, values, linear)
    for index, (each, value) in enumerate(zip(plan.parameters, values)):
        expected = on_one_device(each.view, value, linear)
        for rank in each.layout.mesh.ranks:
            np.testing.assert_array_equal(outcome.shards[rank][index], each.layout.shard(expected, rank))
    assert dict(outcome.traffic.bytes) == dict(plan.bytes)
