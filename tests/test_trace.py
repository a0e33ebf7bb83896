"""A trace is what ran when; all figures follow from its events."""

import json

import pytest

from gpipe_lite.schedule import Phase, Task, gpipe, one_f_one_b
from gpipe_lite.simulate import TYPICAL_COSTS, simulate
from gpipe_lite.trace import Event, Trace, as_text

F, R, B = Phase


def test_figures_of_a_trace_worked_by_hand():
    """Two devices, 10 s long, busy for 6 s and 3 s."""
    trace = Trace((Event(Task(F, 0, 0), 0, 5.0, 11.0), Event(Task(F, 1, 0), 1, 12.0, 15.0)), 2, "by hand")
    assert (trace.start, trace.end, trace.makespan) == (5.0, 15.0, 10.0)
    assert (trace.busy(0), trace.busy(1)) == (6.0, 3.0)
    assert (trace.utilisation(0), trace.utilisation(1)) == (0.6, 0.3)
    assert trace.bubble_fraction == pytest.approx(0.55)
    assert (trace.num_stages, trace.num_micro_batches) == (2, 1)


def test_an_idle_device_counts():
    """The bubble is over all devices that take part."""
    trace = Trace((Event(Task(F, 0, 0), 0, 0.0, 1.0),), 4)
    assert trace.bubble_fraction == 0.75


def test_an_empty_trace_has_no_bubble():
    """Nothing ran, so nothing idled."""
    trace = Trace((), 2)
    assert (trace.makespan, trace.bubble_fraction, trace.utilisation(0), as_text(trace)) == (
        0.0,
        0.0,
        0.0,
        "\n",
    )


def test_gpipe_keeps_m_inputs_and_1f1b_k_minus_stage():
    """Live boundary activations, from F's start to B's end."""

    def peak(schedule, stage):
        return max(count for _, count in simulate(schedule).live_boundaries(stage))

    assert [peak(gpipe(3, 8), stage) for stage in range(3)] == [8, 8, 8]
    assert [peak(one_f_one_b(3, 8), stage) for stage in range(3)] == [3, 2, 1]


def test_recomputation_keeps_one_micro_batchs_activations():
    """Without it all M are kept; with it only those between R and B."""
    for stage in range(3):
        kept = simulate(gpipe(3, 4, "always"), TYPICAL_COSTS).live_activations(stage)
        assert max(count for _, count in kept) == 1
        kept = simulate(gpipe(3, 4, "never"), TYPICAL_COSTS).live_activations(stage)
        assert max(count for _, count in kept) == 4


def test_a_forward_pass_alone_keeps_nothing():
    """Evaluation frees each micro-batch when its forward task ends."""
    trace = simulate(gpipe(2, 3).only(F))
    assert trace.live_boundaries(1)[-1] == (4.0, 0)
    assert max(count for _, count in trace.live_boundaries(1)) == 1


def test_everything_is_freed_at_the_end():
    """Each curve starts from the trace's start and ends at zero."""
    trace = simulate(gpipe(2, 3, "except_last"), TYPICAL_COSTS)
    for stage in range(2):
        for curve in (trace.live_boundaries(stage), trace.live_activations(stage)):
            assert curve[0][0] == 0.0
            assert curve[-1][1] == 0


def test_chrome_traces_round_trip(tmp_path):
    """What Perfetto opens holds the exact numbers too."""
    trace = simulate(gpipe(2, 2, "always"), lambda task: 0.1 + task.micro_batch / 3)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace


def test_chrome_rows_are_complete_events_in_microseconds():
    """The trace-event format: ph X, ts and dur in microseconds, a named thread a device."""
    trace = Trace((Event(Task(B, 0, 3), 1, 2.0, 2.5),), 2, "t")
    chrome = json.loads(json.dumps(trace.to_chrome()))
    (row,) = [row for row in chrome["traceEvents"] if row["ph"] == "X"]
    assert (row["name"], row["cat"], row["tid"], row["ts"], row["dur"]) == (
        "B3",
        "backward",
        1,
        0.0,
        500000.0,
    )
    names = [row["args"]["name"] for row in chrome["traceEvents"] if row["name"] == "thread_name"]
    assert names == ["device 0", "device 1"]


@pytest.mark.parametrize("foreign", [{}, {"traceEvents": [{"ph": "X"}]}, {"traceEvents": [], "otherData": {}}])
def test_a_foreign_trace_is_refused(foreign):
    """The message says what to use."""
    with pytest.raises(ValueError, match=r"not a trace that gpipe_lite wrote.*Trace\.save"):
        Trace.from_chrome(foreign)


def test_text_of_a_measured_trace_fills_the_slots_that_a_task_spans():
    """A column is one slot; a task that spans several stands in each."""
    trace = Trace((Event(Task(F, 0, 0), 0, 1.0, 1.98), Event(Task(B, 0, 0), 0, 3.01, 5.0)), 1)
    assert as_text(trace, slot=1.0) == "F0  · B0 B0"
    assert as_text(trace) == "F0  · B0 B0"


def test_the_sentence_of_a_trace_states_its_figures():
    """A text alternative for its picture."""
    assert simulate(gpipe(2, 2)).describe() == (
        "Timeline of gpipe: 2 stages on 2 devices, 2 micro-batches, 8 tasks in 6 steps, 33% of the device-time idle."
    )
    measured = Trace((Event(Task(F, 0, 0), 0, 0.0, 0.0123),), 1)
    assert measured.describe() == (
        "Timeline: 1 stage on 1 device, 1 micro-batch, 1 task in 12.3 ms, 0% of the device-time idle."
    )


@pytest.mark.parametrize(("k", "m"), [(4, 27), (2, 9), (3, 18), (7, 54)])
def test_a_bubble_of_whole_steps_is_rounded_once(k, m):
    """So that a tenth is a tenth, not a little less."""
    assert simulate(gpipe(k, m)).bubble_fraction == 0.1


@pytest.mark.parametrize("events", [(), (Event(Task(F, 0, 0), 0, 2.0, 2.0),)])
def test_a_trace_that_takes_no_time_has_no_bubble(events):
    """Neither an empty one nor one whose tasks the clock could not tell apart."""
    assert Trace(events, 1).bubble_fraction == 0


@pytest.mark.parametrize(
    ("place", "value"),
    [("num_devices", -1), ("num_devices", float("inf")), ("tid", 99), ("end", float("nan")), ("start", 1e9)],
)
def test_a_trace_with_impossible_numbers_is_refused(place, value):
    """No event is dropped, and none ends before it starts."""
    chrome = simulate(gpipe(2, 2)).to_chrome()
    (row, *_) = [row for row in chrome["traceEvents"] if row["ph"] == "X"]
    {"num_devices": chrome["otherData"], "tid": row}.get(place, row["args"])[place] = value
    with pytest.raises(ValueError, match="not a trace that gpipe_lite wrote"):
        Trace.from_chrome(chrome)


def test_a_file_that_is_no_trace_is_named(tmp_path):
    """Text that is no JSON, and bytes that are no text."""
    for content in (b"{", b"\xff\xfe", b"[]"):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.json: "):
            Trace.load(tmp_path / "t.json")
