"""The simulator: closed formulas and pictures."""

import math
from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_lite.schedule import BY_NAME, Phase, Schedule, ScheduleError, gpipe, naive, one_f_one_b
from gpipe_lite.simulate import TYPICAL_COSTS, simulate
from gpipe_lite.trace import as_text

sizes = st.integers(1, 8)
makers = st.sampled_from(list(BY_NAME.values()))


@given(sizes, sizes, st.integers(1, 5), st.integers(1, 5))
def test_equal_stages_are_exactly_k_m_over_m_plus_k_minus_1_faster(num_stages, num_micro_batches, forward, backward):
    """GPipe's speed-up over one device that does the same work."""
    costs = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    one_device = num_stages * num_micro_batches * (forward + backward)
    makespan = simulate(gpipe(num_stages, num_micro_batches), costs).makespan
    assert one_device * (num_micro_batches + num_stages - 1) == makespan * num_stages * num_micro_batches


@given(sizes, sizes)
def test_the_bubble_is_k_minus_1_over_m_plus_k_minus_1(num_stages, num_micro_batches):
    """The paper's formula, section 2.3; 1F1B has the same bubble."""
    expected = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    for make in (gpipe, one_f_one_b):
        assert simulate(make(num_stages, num_micro_batches)).bubble_fraction == pytest.approx(expected, abs=1e-12)


@given(sizes, sizes)
def test_naive_is_as_slow_as_one_device(num_stages, num_micro_batches):
    """Somebody always waits for somebody."""
    assert simulate(naive(num_stages, num_micro_batches)).makespan == 2 * num_stages * num_micro_batches


def test_four_by_four_is_the_textbooks_picture():
    """Figure 2c of the paper, with backward as long as forward."""
    assert as_text(simulate(gpipe(4, 4))) == dedent("""\
        F0 F1 F2 F3  ·  ·  ·  ·  ·  · B3 B2 B1 B0
         · F0 F1 F2 F3  ·  ·  ·  · B3 B2 B1 B0  ·
         ·  · F0 F1 F2 F3  ·  · B3 B2 B1 B0  ·  ·
         ·  ·  · F0 F1 F2 F3 B3 B2 B1 B0  ·  ·  ·""")


def test_recomputation_runs_while_the_gradient_is_on_its_way():
    """R(0,0) needs no gradient, so it fills idle time before B(0,0)."""
    trace = simulate(gpipe(2, 1, "always"), TYPICAL_COSTS)
    assert as_text(trace) == dedent("""\
        F0 R0  ·  ·  · B0 B0
         · F0 R0 B0 B0  ·  ·""")


@given(makers, sizes, sizes, st.randoms(use_true_random=False), st.floats(0, 3))
def test_no_task_starts_before_what_it_waits_for_has_arrived(make, num_stages, num_micro_batches, random, travel):
    """For any costs and any travel time; and a device runs one task at a time."""
    schedule = make(num_stages, num_micro_batches, "except_last")
    trace = simulate(schedule, lambda _: random.uniform(0, 2), travel)
    at = {event.task: event for event in trace.events}
    for task, event in at.items():
        for before in schedule.predecessors(task):
            distance = travel if at[before].device != event.device else 0
            assert event.start >= at[before].end + distance
    for device in range(trace.num_devices):
        row = trace.on(device)
        assert all(a.end <= b.start for a, b in pairwise(row))
    assert trace.schedule == schedule


@given(makers, sizes, sizes, st.randoms(use_true_random=False))
def test_no_device_idles_without_a_reason(make, num_stages, num_micro_batches, random):
    """Each task starts at the moment when its device is free and its last predecessor has ended."""
    schedule = make(num_stages, num_micro_batches, "always")
    trace = simulate(schedule, lambda _: random.randint(0, 3))
    at = {event.task: event for event in trace.events}
    for device, row in enumerate(schedule.device_tasks):
        free = 0.0
        for task in row:
            assert at[task].device == device
            assert at[task].start == max([free, *(at[before].end for before in schedule.predecessors(task))])
            free = at[task].end


def test_communication_costs_only_between_devices():
    """Stages 0 and 2 share device 0 with the schedule below, so only 0→1→2 and back travel."""
    schedule = Schedule.from_text("F0 2F0 2B0 B0\nF0 B0")
    assert simulate(schedule).makespan == 6
    assert simulate(schedule, communication=10).makespan == 46
    assert simulate(schedule, communication=lambda sender, receiver: receiver.stage).makespan == 6 + 1 + 2 + 1 + 0


def test_an_impossible_schedule_is_named_not_simulated():
    """The simulator says what waits for what."""
    with pytest.raises(ScheduleError, match=r"B\(0,0\) waits for F\(0,0\)"):
        simulate(Schedule.from_text("B0 F0"))


def test_a_phase_without_a_cost_is_named():
    """And one that the schedule does not run needs none."""
    assert simulate(gpipe(1, 1), {Phase.FORWARD: 1, Phase.BACKWARD: 2}).makespan == 3
    with pytest.raises(ValueError, match=r"costs has no Phase.FORWARD, Phase.BACKWARD, .* such as \{Phase.FORWARD: 1"):
        simulate(gpipe(1, 1), {})
    with pytest.raises(ValueError, match=r"costs has no Phase.RECOMPUTE, which the schedule runs"):
        simulate(gpipe(1, 1, "always"), {Phase.FORWARD: 1, Phase.BACKWARD: 2})


@pytest.mark.parametrize("bad", [None, 3, "F", [1, 2]])
def test_costs_that_are_neither_a_function_nor_a_mapping_are_refused(bad):
    """The message shows what they look like."""
    with pytest.raises(TypeError, match=r"a number for each phase, such as \{Phase"):
        simulate(gpipe(1, 1), bad)


def test_what_is_no_schedule_is_not_simulated():
    """A schedule's text is read first."""
    with pytest.raises(TypeError, match=r"Schedule.from_text.*'F0 B0'"):
        simulate("F0 B0")


@pytest.mark.parametrize("bad", [None, "1", [1]])
def test_a_time_that_is_no_number_is_refused(bad):
    """The message names the task."""
    with pytest.raises(TypeError, match=r"cost of F\(0,0\) must be a finite time"):
        simulate(gpipe(1, 1), lambda _: bad)
    with pytest.raises(TypeError, match=r"communication from F\(0,0\) to F\(1,0\) must be a finite time"):
        simulate(gpipe(2, 1), communication=bad)


def test_times_beyond_a_floats_range_are_refused():
    """Each fits, their sum does not."""
    with pytest.raises(ValueError, match="add up to more than a float can hold: count in a larger unit"):
        simulate(gpipe(1, 1), lambda _: 1e308)


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan])
def test_times_that_are_none_are_refused(bad):
    """The message names the task."""
    with pytest.raises(ValueError, match=r"cost of F\(0,0\)"):
        simulate(gpipe(1, 1), lambda _: bad)
    with pytest.raises(ValueError, match=r"communication from F\(0,0\) to F\(1,0\)"):
        simulate(gpipe(2, 1), communication=bad)
