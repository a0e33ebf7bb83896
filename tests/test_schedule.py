"""Schedules are plain data; each generator gives the schedule that its picture shows."""

from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_lite.schedule import BY_NAME, Phase, Schedule, ScheduleError, Task, counted, gpipe, naive, one_f_one_b

sizes = st.integers(1, 6)
makers = st.sampled_from(list(BY_NAME.values()))
checkpoints = st.sampled_from(["always", "except_last", "never"])


def picture(text: str) -> str:
    return dedent(text).strip()


def test_gpipe_fills_and_drains():
    """All forward tasks, then all backward ones, the last micro-batch first."""
    assert str(gpipe(2, 3)) == picture("""
        F0 F1 F2 B2 B1 B0
        F0 F1 F2 B2 B1 B0
    """)


def test_except_last_recomputes_all_but_the_last_micro_batch():
    """The last micro-batch's activations are still there when its backward pass comes first."""
    assert str(gpipe(2, 3, "except_last")) == picture("""
        F0 F1 F2 B2 R1 B1 R0 B0
        F0 F1 F2 B2 R1 B1 R0 B0
    """)


def test_one_f_one_b_warms_up_alternates_and_cools_down():
    """Stage k runs K − k forward tasks ahead, then one forward and one backward in turn."""
    assert str(one_f_one_b(3, 4)) == picture("""
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3
    """)


def test_naive_finishes_a_micro_batch_before_the_next():
    """One device works at a time."""
    assert str(naive(2, 2, "always")) == picture("""
        F0 R0 B0 F1 R1 B1
        F0 R0 B0 F1 R1 B1
    """)


@given(makers, sizes, sizes, checkpoints)
def test_every_generated_schedule_is_complete_and_possible(make, num_stages, num_micro_batches, checkpoint):
    """Each F and B once, R as the checkpoint mode says, and no task that waits for ever."""
    schedule = make(num_stages, num_micro_batches, checkpoint).check()
    assert (schedule.num_stages, schedule.num_micro_batches) == (num_stages, num_micro_batches)
    recomputed = {"always": num_micro_batches, "except_last": num_micro_batches - 1, "never": 0}[checkpoint]
    assert sum(task.phase is Phase.RECOMPUTE for task in schedule.tasks()) == num_stages * recomputed


@given(makers, sizes, sizes, checkpoints)
def test_in_order_starts_nothing_before_what_it_waits_for(make, num_stages, num_micro_batches, checkpoint):
    """Happens-before: predecessors and earlier tasks of the same device come first."""
    schedule = make(num_stages, num_micro_batches, checkpoint)
    at = {task: i for i, task in enumerate(schedule.in_order())}
    assert [(task, schedule.predecessors(task)) for task in at] == list(schedule.steps())
    assert len(at) == sum(map(len, schedule.device_tasks))
    assert all(at[before] < at[task] for task in at for before in schedule.predecessors(task))
    assert all(at[a] < at[b] for row in schedule.device_tasks for a, b in pairwise(row))


@given(sizes, sizes)
def test_one_f_one_b_keeps_at_most_k_micro_batches_live(num_stages, num_micro_batches):
    """Its reason to exist: GPipe keeps M."""
    for row in one_f_one_b(num_stages, num_micro_batches).device_tasks:
        live = peak = 0
        for task in row:
            live += 1 if task.phase is Phase.FORWARD else -1
            peak = max(peak, live)
        assert peak <= min(num_stages, num_micro_batches)


@given(makers, sizes, sizes, checkpoints)
def test_text_round_trips(make, num_stages, num_micro_batches, checkpoint):
    """What a schedule prints can be read back."""
    schedule = make(num_stages, num_micro_batches, checkpoint)
    assert Schedule.from_text(str(schedule), schedule.name) == schedule


def test_several_stages_on_a_device_are_written_with_their_stage():
    """A word without a number stands for the stage of its line."""
    text = "F0 2F0 2B0 B0\nF0 B0"
    schedule = Schedule.from_text(text).check()
    assert schedule.device_of == {0: 0, 1: 1, 2: 0}
    assert str(schedule) == text


def test_predecessors_are_what_the_picture_says():
    """F waits for F of the stage before; R for F; B for B of the stage after and for the activations."""
    schedule = gpipe(3, 2, "except_last")
    f, r, b = (lambda s, m, p=p: Task(p, s, m) for p in Phase)
    assert schedule.predecessors(f(0, 0)) == ()
    assert schedule.predecessors(f(2, 1)) == (f(1, 1),)
    assert schedule.predecessors(r(1, 0)) == (f(1, 0),)
    assert schedule.predecessors(b(1, 0)) == (r(1, 0), b(2, 0))
    assert schedule.predecessors(b(1, 1)) == (f(1, 1), b(2, 1))
    assert schedule.predecessors(b(2, 0)) == (r(2, 0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "F0 F1 B0 B1\nB0 F0 F1 B1",
            r"B\(1,0\) waits for F\(1,0\), which stands after it on the same device",
        ),
        ("F0 F1 B0 B1\nF0 F1 B1", r"B\(1,0\) is missing; 2 stages and 2 micro-batches"),
        ("F0 B0 F1", r"B\(0,1\) is missing; 1 stage and 2 micro-batches"),
        ("F0 F0 B0\nF0 B0", r"F\(0,0\) stands 2 times"),
        ("F0 B0 1F0\nB0", r"stage 1 stands on devices 0 and 1"),
        ("F0 B0\nF0 R0 B0 R0", r"R\(1,0\) stands 2 times"),
        ("", "has no tasks"),
        ("F0 X1", "'X1' is not a task"),
    ],
)
def test_a_wrong_schedule_is_named(text, message):
    """The error says which rule is violated, by which tasks, on which devices."""
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text).check()


@pytest.mark.parametrize("bad", [None, ["F0 B0"], b"F0 B0", 3])
def test_only_text_is_read_as_a_schedule(bad):
    """The message shows how a schedule is written."""
    with pytest.raises(TypeError, match="a line a device, such as 'F0 F1 B1 B0', not "):
        Schedule.from_text(bad)


def test_a_number_and_its_noun_agree():
    """One stage, two stages; a micro-batch takes an e."""
    assert [counted(n, "stage") for n in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]


def test_a_deadlock_names_what_each_device_waits_for():
    """Two devices that wait for each other are both named."""
    schedule = Schedule.from_text("F0 B0 F1 B1\nF1 B1 F0 B0")
    with pytest.raises(ScheduleError) as raised:
        schedule.check()
    assert str(raised.value) == picture("""
        schedule 'custom' cannot go on:
          device 0: B(0,0) waits for B(1,0), which stands after F(1,1) on device 1
          device 1: F(1,1) waits for F(0,1), which stands after B(0,0) on device 0
    """)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("make", BY_NAME.values())
def test_sizes_below_one_are_refused(make, bad):
    """The message shows the number."""
    with pytest.raises(ValueError, match=f"stages.*{bad}"):
        make(bad, 1)
    with pytest.raises(ValueError, match=f"micro-batches.*{bad}"):
        make(1, bad)


def test_an_unknown_checkpoint_mode_is_refused():
    """The message lists the known ones."""
    with pytest.raises(ValueError, match="always, except_last, never, not 'sometimes'"):
        gpipe(1, 1, "sometimes")


def test_only_keeps_the_order_of_the_phases_asked_for():
    """A forward half is the schedule without its other tasks."""
    assert str(gpipe(2, 2, "always").only(Phase.FORWARD)) == "F0 F1\nF0 F1"
