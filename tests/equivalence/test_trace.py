"""What a sharded model says of itself, and when a step's schedule did what."""

BODIES = "tests.equivalence.trace_bodies"
MESH = {"replicate": 2, "shard": 2}
UNITS = ["(root)", "layers.0", "layers.1"]
BACKWARD = ["layers.1", "layers.0", "(root)"]

BLOCK = """\
unit layers.0: 3 parameters, 180 bytes when gathered
  gathered over the ranks 0, 1 (fast tier); after forward freed, unless backward begins with it
    scale [3] float32: dim 0 cut in 2, here [2]
    up [7, 3] float32: dim 0 cut in 2, here [4, 3]
    down [3, 7] float32: dim 0 cut in 2, here [2, 7]
  gradient buffer 1: 512 bytes of float32, 400 of them padding; all-reduced over the ranks 0, 2 (slow tier)
    scale at byte 0, 8 bytes
    up at byte 8, 48 bytes
    down at byte 56, 56 bytes
"""

STEP = """\
a step, when the modules run in this order:
  before forward of (root): start gather (root), start gather layers.0, wait for gather (root)
  before forward of layers.0: start gather layers.1, wait for gather layers.0
  after forward of layers.0: retain layers.0
  before forward of layers.1: wait for gather layers.1
  after forward of layers.1: retain layers.1
  gradients of layers.1: start reduce-scatter layers.1
  after backward of layers.1: free layers.1
  gradients of layers.0: wait for reduce-scatter layers.1, start reduce-scatter layers.0, start all-reduce layers.1
  after backward of layers.0: free layers.0
  gradients of (root): wait for reduce-scatter layers.0, start reduce-scatter (root), start all-reduce layers.0
  settlement: wait for reduce-scatter (root), start all-reduce (root), wait for all-reduce layers.1, settle layers.1, \
wait for all-reduce layers.0, settle layers.0, wait for all-reduce (root), settle (root), free (root)
"""


def test_a_model_tells_its_buffers_and_the_order_of_a_step(pool, backend_name):
    before, after = pool(backend_name, 4).run(f"{BODIES}:described", MESH)[0]
    for text in (before, after):
        assert BLOCK in text
        assert STEP in text


def spans(saved, row):
    """`[(name, begin, end)]` on the lines of a row, in microseconds."""
    lines = {
        each["tid"] for each in saved["traceEvents"] if each["name"] == "thread_name" and each["args"]["name"] == row
    }
    events = [each for each in saved["traceEvents"] if each["ph"] == "X" and each["tid"] in lines]
    return [(each["name"], each["ts"], each["ts"] + each["dur"]) for each in events]


def test_the_trace_of_a_step_has_each_event_with_its_begin_and_end(pool, backend_name, tmp_path):
    for rank, (saved, added) in enumerate(
        pool(backend_name, 2).run(f"{BODIES}:traced", {"replicate": 2}, str(tmp_path))
    ):
        assert added == 0
        assert {each["pid"] for each in saved["traceEvents"]} == {rank}
        step, gathers, sums = (spans(saved, row) for row in ("step", "shard", "replicate"))
        assert [name for name, *_ in gathers][:3] == ["gather (root)", "gather layers.0", "gather layers.1"]
        assert sorted(name for name, *_ in sums) == [f"all-reduce {unit}" for unit in UNITS]
        assert [name for name, *_ in step if name.startswith("settle")] == [f"settle {unit}" for unit in BACKWARD]
        begin, end = (min(each[1] for each in step), max(each[2] for each in step))
        for name, start, stop in (*gathers, *sums):
            (issued, *_), (*_, waited) = (
                [each for each in step if each[0] == f"{verb} {name}" and start <= each[2] and each[1] <= stop]
                for verb in ("issue", "wait")
            )
            assert begin <= start <= issued[2] <= waited[1] <= stop <= end + 0.1  # they are rounded


def test_what_is_told_is_what_happens(pool, backend_name):
    for ranks, frozen in ((2, ()), (1, ()), (2, ("layers.0", "layers.1"))):
        told, seen = pool(backend_name, ranks).run(f"{BODIES}:told_and_seen", frozen)[0]
        assert told == seen, (ranks, frozen)
    told, seen = pool(backend_name, 2).run(f"{BODIES}:told_and_seen", (), early_all_reduce=True)[0]
    assert told == seen and told.index("start all-reduce layers.1") == told.index("start reduce-scatter layers.1") + 1


def test_the_profiler_of_pytorch_shows_the_events_by_name_while_it_runs(pool):
    for during, wrapped in pool("torch", 2).run(f"{BODIES}:profiled", {"shard": 2}):
        assert {
            f"{event} {unit}" for event in ("wait gather", "wait reduce-scatter", "settle") for unit in UNITS
        } <= during
        assert wrapped == [False, True, False]
