"""Every trap of MindSpore on a CPU that the backend meets is still there, and is handled.

The bodies are in `trap_bodies.py`. One that fails because a trap is "mended" is good news: the handling may go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.pool import REPOSITORY, Pool

BODIES = "tests.mindspore.trap_bodies"


@pytest.mark.parametrize(
    "body",
    [
        "arithmetic_in_place_changes_nothing",
        "a_copy_into_a_view_behind_the_start_is_lost",
        "a_copy_from_or_into_a_part_of_a_storage_fails",
        "numpy_sees_a_copy_of_a_view",
        "an_alias_remembers_the_size_of_a_released_storage",
        "memory_that_numpy_owns_is_never_released",
        "a_numpy_view_from_before_a_release_shows_other_tensors",
        "autograd_saves_copies_of_views",
        "a_full_tensor_takes_its_dtype_from_nowhere",
        "bfloat16_has_no_arithmetic_to_speak_of",
        "products_in_half_precision_have_no_kernels",
        "memory_statistics_are_zero",
        "a_failing_operator_raises_at_once_and_spoils_nothing",
        "what_meets_an_empty_tensor_gets_any_gradient",
        "an_exception_in_forward_spoils_indexing",
    ],
)
def test_tensors(pool, body):
    pool("mindspore", 1).run(f"{BODIES}:{body}")


@pytest.mark.parametrize(
    "body",
    [
        "collectives_into_views_are_lost",
        "most_collectives_have_no_kernel",
        "some_dtypes_are_refused",
        "messages_look_for_their_group_under_a_wrong_name",
        "a_message_is_not_taken_for_a_part_of_a_later_collective",
        "two_ranks_that_receive_before_they_send_do_not_block",
    ],
)
def test_collectives(pool, body):
    pool("mindspore", 2).run(f"{BODIES}:{body}")


def test_groups_are_made_by_their_members_only(pool):
    pool("mindspore", 3).run(f"{BODIES}:groups_are_made_by_their_members_only")


@pytest.fixture
def spent(request):
    """A pool of so many ranks that is not used again: the test leaves messages on its wires."""
    pool = Pool("mindspore", request.param)
    yield pool
    pool.close()


@pytest.mark.parametrize("spent", [2], indirect=True)
def test_messages_have_no_tags(spent):
    assert any(spent.run(f"{BODIES}:an_untagged_message_is_mistaken")), "mended: a message waits for its receiver"


@pytest.mark.parametrize("spent", [3], indirect=True)
def test_a_rank_outside_a_group_can_not_take_part_in_making_it(spent):
    assert spent.run(f"{BODIES}:a_group_made_by_a_rank_outside") == [None, None, ""], "mended: any rank may call"


CRASH = """
import numpy as np
from mindspore.common.np_dtype import bfloat16
target, source = np.zeros(2, bfloat16), np.zeros(2, bfloat16)
target[:0][...] = source[:0]
"""

NO_CRASH = """
from hyper_parallel.backends.mindspore import tensors
halves = [tensors.zeros((2,), "bfloat16") for _ in range(2)]
nothing = [tensors.alias(half, 1, (0,)) for half in halves]
tensors.copy_(*nothing)
tensors.add_(*nothing)
tensors.scale_(nothing[0], 2.0)
print(tensors.squared_norm(halves + nothing))
"""


def test_numpy_crashes_on_an_empty_slice_of_bfloat16():
    assert python(CRASH).returncode < 0, "mended: numpy assigns an empty slice of bfloat16"
    assert python(NO_CRASH).stdout == "0.0\n"


WHERE_IT_FAILS = """
import mindspore as ms
{first}
try:
    result = ms.mint.nn.functional.layer_norm(ms.Tensor([1.0, 2.0]), (2,))
except Exception:
    print("at the operator")
else:
    try:
        result.asnumpy()
    except Exception:
        print("later")
"""


@pytest.mark.parametrize(
    "first, where",
    [("", "later\n"), ("import hyper_parallel.backends.mindspore.tensors", "at the operator\n")],
    ids=["MindSpore alone", "with the backend"],
)
def test_importing_the_backend_makes_operators_fail_where_they_stand(first, where):
    assert python(WHERE_IT_FAILS.format(first=first)).stdout == where


AFTER_OPERATORS = """
import time
from glob import glob
import mindspore as ms
{first}
for _ in range(20):
    ms.mint.zeros((2,)).asnumpy()
    time.sleep(0.05)
threads = [open(path).read() for path in glob("/proc/self/task/*/stat")]
print(sum(sum(map(int, each.rpartition(")")[2].split()[11:13])) for each in threads if "(ActorThread" in each))
"""

JOINED = """
from hyper_parallel.backends.mindspore import collectives
from hyper_parallel.core.backend import Launch
collectives.initialize(Launch())
"""


def test_a_thread_that_has_nothing_to_do_works_on_until_the_backend_has_joined():
    alone, joined = (int(python(AFTER_OPERATORS.format(first=first)).stdout) for first in ("", JOINED))
    assert 4 * joined < alone, "mended where both are 0: a thread without work sleeps"


def python(script: str) -> subprocess.CompletedProcess:
    """Run a script in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, "GLOG_v": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
