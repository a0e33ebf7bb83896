"""The explorer shows what the simulator says, in pictures, numbers and words, and stays legible without a kernel."""

import base64
import json
import math
import sys
import xml.etree.ElementTree as ET
from dataclasses import fields
from itertools import pairwise

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_lite import balance, svg
from gpipe_lite.explain import figures, moments, sentence, what_happens, why_idle
from gpipe_lite.explore import CHOICES, SLIDERS, Settings, explore, rehearse
from gpipe_lite.schedule import BY_NAME, Phase, ScheduleError, Task, gpipe, naive, one_f_one_b
from gpipe_lite.simulate import TYPICAL_COSTS, simulate
from gpipe_lite.trace import Event, Trace
from tools import notebooks

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = Trace(
    (
        Event(Task(Phase.FORWARD, 0, 0), 0, 10.0, 10.1),
        Event(Task(Phase.FORWARD, 1, 0), 1, 10.15, 10.3),
        Event(Task(Phase.BACKWARD, 1, 0), 1, 10.4, 10.5),
        Event(Task(Phase.BACKWARD, 0, 0), 0, 10.5, 10.7),
    ),
    2,
    "by hand",
)
SETTINGS = st.builds(
    Settings,
    num_stages=st.integers(1, 5),
    num_micro_batches=st.integers(1, 6),
    schedule=st.sampled_from(sorted(BY_NAME)),
    checkpoint=st.sampled_from(CHOICES["checkpoint"][2]),
    forward=st.sampled_from([0.5, 1.0, 3.0]),
    backward=st.sampled_from([0.5, 2.0]),
    communication=st.sampled_from([0.0, 0.5, 2.0]),
)


def drawn(trace, *arguments, **options):
    return ET.fromstring(svg.timeline(trace, *arguments, **options))


def boxes(picture):
    return list(picture.iter(f"{SVG}rect"))


def texts(picture):
    return [text.text for text in picture.iter(f"{SVG}text")]


# The picture


@given(SETTINGS)
def test_each_task_is_one_box_and_says_on_hovering_what_it_is(settings):
    """With its phase, micro-batch, stage, device and times."""
    trace = settings.trace()
    titles = [box.findtext(f"{SVG}title") for box in boxes(drawn(trace))]
    assert sorted(title.split(":")[0] for title in titles) == sorted(str(event.task) for event in trace.events)


def test_a_box_stands_at_its_time_on_its_device():
    """On an axis from the trace's start to its end, or as far as a longer trace beside it."""
    for until in (None, 1.4):
        found = [[float(box.get(key)) for key in ("x", "width")] for box in boxes(drawn(MEASURED, until=until))]
        zoom = (svg.WIDTH - svg.LEFT - svg.RIGHT) / (until or MEASURED.makespan)
        expected = sorted((svg.LEFT + (e.start - 10) * zoom, (e.end - e.start) * zoom) for e in MEASURED.events)
        assert sorted(found) == [pytest.approx(box, abs=0.01) for box in expected]
    rows = {box.findtext(f"{SVG}title").split(", ")[1]: float(box.get("y")) for box in boxes(drawn(MEASURED))}
    assert rows["device 0"] + 25 < rows["device 1"]
    title = boxes(drawn(MEASURED))[1].findtext(f"{SVG}title")
    assert title == "F(1,0): forward of micro-batch 0 on stage 1, device 1, from 150 to 300 ms"


def test_phases_differ_in_more_than_colour():
    """Okabe and Ito's colours; always outlined, backward hatched, micro-batch numbers inside."""
    picture = drawn(simulate(gpipe(2, 3, "always"), TYPICAL_COSTS))
    groups = [group for group in picture.iter(f"{SVG}g") if group.find(f"{SVG}rect") is not None]
    pattern = picture.find(f"{SVG}defs/{SVG}pattern")
    assert [group.get("fill") for group in groups] == ["#0072B2", "#F0E442", f"url(#{pattern.get('id')}) #D55E00"]
    assert {group.get("stroke") for group in groups} == {"currentColor"}
    colour, line = pattern
    assert (colour.get("fill"), line.get("stroke")) == ("#D55E00", "black")
    assert {"forward", "recompute", "backward", "idle", "0", "1", "2"} <= set(texts(picture))


def test_text_and_outlines_take_the_pages_colour_and_the_background_is_free():
    """So that the picture reads on light pages and on dark ones."""
    picture = drawn(simulate(gpipe(2, 2)))
    assert picture.get("fill") == "currentColor"
    assert "background" not in ET.tostring(picture, "unicode")
    own = {text.get("fill") for text in picture.iter(f"{SVG}text")}
    assert own == {None}  # the page's, or that of the group of numbers on a coloured box
    numbers = [group for group in picture.iter(f"{SVG}g") if group.get("pointer-events")]
    assert [group.get("fill") for group in numbers if len(group)] == ["white", "black"]


@pytest.mark.parametrize("sizes", [(1, 1), (8, 32), (8, 104), (16, 64)], ids=str)
def test_a_number_fits_into_its_box_or_is_left_out(sizes):
    """Digits are 0.62 of their size wide, and never smaller than 8 pixels."""
    picture = drawn(simulate(gpipe(*sizes), TYPICAL_COSTS))
    frames = [(float(box.get("x")), float(box.get("width"))) for box in boxes(picture)]
    for group in picture.iter(f"{SVG}g"):
        for text in group if group.get("pointer-events") else ():
            size = float(text.get("font-size", svg.FONT))
            middle, half = float(text.get("x")), svg.DIGIT * size * len(text.text) / 2
            assert size > 8
            assert any(x + 1 <= middle - half and middle + half <= x + width - 1 for x, width in frames)
    assert all(float(box.get("stroke-width", 1)) < float(box.get("width")) / 3 for box in boxes(picture))


@given(st.text(max_size=60), st.text(min_size=1, max_size=8))
def test_names_and_units_cannot_break_the_picture(name, unit):
    """Whatever characters they hold, it is XML, and the names are there as they were."""
    trace = Trace(simulate(gpipe(2, 2)).events, 2, name, unit)
    picture = drawn(trace, clock=1.0)
    assert len(boxes(picture)) == 8
    if name.isprintable() and unit.isprintable():
        assert picture.get("aria-label") == trace.describe()


def test_markup_in_a_name_stays_text():
    """Nothing is run or shown as an element."""
    picture = drawn(Trace(MEASURED.events, 2, '<script>"&'))
    assert texts(picture)[0] == '<script>"&: 700 ms, bubble 61%'
    assert picture.find(f".//{SVG}script") is None


def test_a_long_title_is_cut_and_the_sentence_is_not():
    """The title never runs into the legend."""
    picture = drawn(Trace(MEASURED.events, 2, "name" * 30))
    assert texts(picture)[0].startswith(("name" * 30)[: svg.TITLE - 1] + "…: ")
    assert "name" * 30 in picture.get("aria-label")


@pytest.mark.parametrize("trace", [Trace((), 2), simulate(naive(2), lambda _: 0.0), Trace((), 0)], ids=str)
def test_what_takes_no_time_can_be_drawn(trace):
    """An empty picture with a true sentence."""
    assert drawn(trace, clock=trace.start).get("aria-label") == trace.describe()
    assert len(moments(trace)) == 1


@pytest.mark.parametrize("end", [0.003, 1.0, 33.0, 155.0, 98765.0])
def test_the_axis_has_a_few_round_ticks(end):
    """Within the axis, evenly spaced, from 0 on."""
    trace = Trace((Event(Task(Phase.FORWARD, 0, 0), 0, 0.0, end),), 1, "", "steps")
    ticks = [float(text) for text in texts(drawn(trace)) if text.replace(".", "").isdigit()][1:]
    assert ticks[0] == 0
    assert 4 <= len(ticks) <= 14
    assert end * 0.7 < ticks[-1] <= end
    assert len({round((b - a) / end, 6) for a, b in pairwise(ticks)}) == 1


def test_the_clock_is_a_line_with_its_time():
    """At the right end its label turns to the left, to stay within the picture."""
    for clock, anchor in ((10.15, "start"), (10.7, "end")):
        label = [t for t in drawn(MEASURED, clock=clock).iter(f"{SVG}text") if (t.text or "").startswith("time ")][-1]
        assert (label.text, label.get("text-anchor")) == (f"time {(clock - 10) * 1e3:.5g} ms", anchor)


# Numbers and words


def test_figures_of_equal_stages_are_those_of_the_formulas():
    """K·M/(M+K−1) times one device, (K−1)/(M+K−1) idle, M live with GPipe and K − stage with 1F1B."""
    trace = simulate(gpipe(4, 8), TYPICAL_COSTS)
    found = figures(trace)
    assert found.speed_up == pytest.approx(4 * 8 / 11)
    assert (found.makespan, found.bubble) == (33.0, pytest.approx(3 / 11))
    assert found.throughput == pytest.approx(8 / 33)
    assert (found.live, found.inputs, found.memory) == ([8] * 4, [8] * 4, [0.25] * 4)
    found = figures(simulate(one_f_one_b(4, 8), TYPICAL_COSTS))
    assert found.live == [4, 3, 2, 1]
    assert found.memory == pytest.approx([4 / 32, 3 / 32, 2 / 32, 1 / 32])


def test_recomputation_keeps_one_micro_batchs_activations_and_the_others_inputs():
    """With GPipe; of a heavy stage, more."""
    trace = simulate(gpipe(2, 8, "always"), TYPICAL_COSTS)
    found = figures(trace, weights=[0.5, 1.5], input_size=0.1)
    assert (found.live, found.inputs) == ([1, 1], [8, 8])
    assert found.memory == pytest.approx([(0.5 + 7 * 0.1) / 16, (1.5 + 7 * 0.1) / 16])
    assert figures(trace).speed_up < figures(simulate(gpipe(2, 8), TYPICAL_COSTS)).speed_up


@given(SETTINGS)
def test_one_device_is_never_beaten_by_more_than_the_number_of_stages(settings):
    """And a stage's memory is at least one micro-batch's, at most its share of the whole mini-batch's."""
    found = figures(settings.trace())
    assert 0 < found.speed_up <= settings.num_stages + 1e-9
    for part in found.memory:
        assert 1 / settings.num_micro_batches - 1e-9 <= part * settings.num_stages <= 1 + 1e-9


def test_figures_of_nothing_are_nothing():
    """No division by zero."""
    found = figures(Trace((), 2))
    assert (found.speed_up, found.throughput, found.live) == (1.0, 0.0, [])
    assert sentence(Trace((), 2), found) == Trace((), 2).describe()


def test_the_sentence_is_the_description_and_the_figures():
    """One number for all stages where they agree, else one for each."""
    trace = simulate(gpipe(4, 8), TYPICAL_COSTS)
    assert sentence(trace, figures(trace)) == (
        f"{trace.describe()} It is 2.91 times as fast as one device without recomputation and does 0.242 "
        "micro-batches per step of the clock. A stage keeps the activations of at most 8 micro-batches, and at most "
        "25% of what one device would."
    )
    trace = simulate(one_f_one_b(2, 8))
    assert "at most 2 and 1 (by stage) micro-batches, and at most 12.5% and 6.25% (by stage)" in sentence(
        trace, figures(trace)
    )
    assert "of at most 1 micro-batch, and" in sentence(MEASURED, figures(MEASURED))
    assert "does 1.43 micro-batches per second" in sentence(MEASURED, figures(MEASURED))


def test_of_a_measured_trace_no_speed_up_is_claimed():
    """Threads that share a core stretch each other's boxes: their sum is not one device's time."""
    both = explore(MEASURED)
    for said in (sentence(MEASURED, figures(MEASURED)), both.sentence):
        assert "times as fast" not in said
        assert (
            "Its forward and backward boxes, put one after the other, would take 0.79 times as long; that is the "
            "speed-up over one device only if each device has hardware of its own."
        ) in said
    assert "F and B boxes ÷ makespan" in both.view.value
    assert "speed-up over one device</th>" not in both.view.value
    assert "speed-up over one device</th>" in explore().view.value


def test_each_kind_of_idling_has_its_words():
    """What it waits for, where that is, and when it comes."""
    plan = gpipe(4, 2)
    trace = simulate(plan)
    assert why_idle(trace, plan, 2, 1) == "device 2 waits at time 1 for F(1,0), which runs on device 1 until 2"
    assert why_idle(trace, plan, 3, 0) == "device 3 waits at time 0 for F(2,0), which device 2 starts at 2"
    assert why_idle(trace, plan, 3, 9) == "device 3 has nothing left to do"
    assert what_happens(trace, plan, 1, 1) == "device 1 runs F(1,0) until 2"
    assert what_happens(trace, plan, 0, 2) == "device 0 waits at time 2 for B(1,1), which device 1 starts at 7"
    late = simulate(gpipe(2, 1), communication=2.0)
    assert why_idle(late, gpipe(2, 1), 1, 1.5) == (
        "device 1 waits at time 1.5 for the result of F(0,0), which left device 0 at 1 and is used from 3"
    )
    assert why_idle(MEASURED, MEASURED.schedule, 1, 10.35) == (
        "device 1 could start B(1,0): all that it needs is there. It starts at 400 ms (between tasks, or no free core)"
    )
    assert why_idle(MEASURED, MEASURED.schedule, 1, 10.12) == (
        "device 1 could start F(1,0): its input left device 0 at 100 ms. It starts at 150 ms "
        "(on its way, or no free core)"
    )
    slow = Trace((*MEASURED.events[:3], Event(Task(Phase.BACKWARD, 0, 0), 0, 10.6, 10.7)), 2)
    assert "its gradient left device 1 at 500 ms. It starts at 600 ms" in why_idle(slow, slow.schedule, 0, 10.55)


def test_times_are_told_to_two_decimals():
    """And three digits of what is shorter."""
    third = simulate(gpipe(2, 1), lambda _: 28 / 3)
    assert what_happens(third, gpipe(2, 1), 0, 0) == "device 0 runs F(0,0) until 9.33"
    assert "time 9.33 steps" in texts(drawn(third, clock=28 / 3))
    brief = simulate(gpipe(2, 1), lambda _: 1 / 3)
    assert what_happens(brief, gpipe(2, 1), 0, 0) == "device 0 runs F(0,0) until 0.333"


@given(SETTINGS)
def test_the_clock_stops_at_different_times(settings):
    """Sums in another order differ in their last bits, and are one moment."""
    trace = simulate(settings.plan(), lambda task: 0.1 + task.stage / 3)
    times = moments(trace)
    assert times[-1] == trace.end
    assert all(b - a > 1e-3 for a, b in pairwise(times))


@given(SETTINGS)
def test_an_idle_device_names_a_true_predecessor_and_a_true_time(settings):
    """At every moment, each device runs a task, waits for one that its next task needs, or is done."""
    plan, trace = settings.plan(), settings.trace()
    ran = {str(event.task): event for event in trace.events}
    for time in moments(trace):
        for device in range(trace.num_devices):
            words = what_happens(trace, plan, device, time)
            following = [event for event in trace.on(device) if event.end > time]
            if "nothing left" in words:
                assert not following
            elif " runs " in words.split(",")[0]:
                event = ran[words.split()[3]]
                assert event.start <= time < event.end
            else:
                named = next(event for name, event in ran.items() if f" {name}," in words)
                assert named.task in plan.predecessors(following[0].task)
                assert (named.end <= time) == ("the result of" in words)


@pytest.mark.parametrize("imbalance", [1.0, 1.7, 3.0])
@pytest.mark.parametrize("stages", [3, 4, 5])
def test_imbalance_is_what_balance_calls_so_and_keeps_the_work(stages, imbalance):
    """The largest stage ÷ the average one."""
    settings = Settings(stages, 4, imbalance=imbalance)
    assert sum(settings.weights) == pytest.approx(stages)
    assert balance.imbalance(settings.weights, [1] * stages) == pytest.approx(imbalance)
    trace = settings.trace()
    busy = [trace.busy(device) for device in range(stages)]
    assert balance.imbalance(busy, [1] * stages) == pytest.approx(imbalance)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_stages": 0}, "stages"),
        ({"num_micro_batches": 0}, "micro-batches"),
        ({"schedule": "custom"}, "schedule must be one of naive, gpipe, 1f1b.*'custom'"),
        ({"checkpoint": "sometimes"}, "sometimes"),
        ({"schedule": ["gpipe"]}, "schedule must be one of"),
        ({"checkpoint": None}, "always, except_last, never, not None"),
        ({"forward": -1.0}, "forward must be 0, or between 0.001 and 1000 steps, not -1"),
        ({"forward": float("nan")}, "forward must be 0.*not nan"),
        ({"backward": 1e-320}, "backward must be 0"),
        ({"communication": float("inf")}, "communication must be 0.*not inf"),
        ({"input_size": float("nan")}, "input_size must be between 0 and 1000, not nan"),
        ({"num_stages": 1, "imbalance": 2}, "imbalance of 1 stage is between 1 and 1, not 2"),
        ({"num_stages": 2, "imbalance": 2.5}, "imbalance of 2 stages is between 1 and 2, not 2.5"),
        ({"num_stages": 65}, "65 stages, 8 micro-batches on 65 devices are too many for a picture: .* at most 64"),
        ({"num_micro_batches": 10**9}, "too many for a picture: .* up to 2048"),
    ],
)
def test_settings_out_of_bounds_are_refused(wrong, words):
    """Before anything is shown."""
    with pytest.raises(ValueError, match=words):
        explore(**wrong)


@pytest.mark.parametrize("bad", ["1", None, True, [1.0], 1j])
@pytest.mark.parametrize("name", [field.name for field in fields(Settings) if field.type is float])
def test_a_setting_that_is_no_number_is_named(name, bad):
    """With an example."""
    with pytest.raises(TypeError, match=rf"{name} is a number, such as \d"):
        explore(**{name: bad})


@pytest.mark.parametrize("name", ["num_stages", "num_micro_batches"])
@pytest.mark.parametrize("bad", ["4", 4.0, None, True])
def test_a_size_that_is_no_whole_number_is_refused(name, bad):
    """The message shows it."""
    with pytest.raises(ValueError, match=f"needs a whole number of .* not {bad!r}"):
        explore(**{name: bad})


def test_an_unknown_setting_is_named_with_those_that_there_are():
    """K is called num_stages."""
    with pytest.raises(TypeError, match="no setting K, M; there are num_stages, num_micro_batches, schedule"):
        explore(K=4, M=8)


@pytest.mark.parametrize("bad", [4, "trace.json", gpipe(2, 2)], ids=["number", "file", "schedule"])
def test_what_is_no_trace_is_refused_with_the_way_out(bad):
    """Settings go by name, a schedule is simulated first."""
    with pytest.raises(TypeError, match=r"explore\(num_stages=4\), or a trace.*explore\(simulate\(schedule\)\)"):
        explore(bad)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([("F", 0, 0, 3, 0, 1)], r"has 2 devices, and F\(0,0\) ran on device 3"),
        ([("F", 0, 0, 0, 0, math.nan)], r"F\(0,0\) ran from 0 to nan, which is no span of time"),
        ([("F", 0, 0, 0, 1, 0)], "from 1 to 0, which is no span"),
        ([("F", 0, 0, 0, 0, 1), ("F", 0, 1, 1, 1, 2)], "stage 0 ran on devices 0 and 1"),
        ([("F", 0, 0, 0, 0, 1), ("F", 0, 0, 0, 1, 2)], r"F\(0,0\) ran more than once: explore .* a single step"),
        ([("F", 10**6, 0, 0, 0, 1)], "too many for a picture"),
        ([("F", 1, 0, 0, 0, 1)], r"F\(1,0\) waits for F\(0,0\), which is not in the schedule"),
    ],
    ids=["device", "nan", "backwards", "two homes", "two steps", "huge", "half"],
)
def test_a_trace_that_cannot_be_drawn_is_refused(events, words):
    """The message names the task, and what is wrong with it."""
    ran = tuple(Event(Task(Phase(phase), stage, m), *rest) for phase, stage, m, *rest in events)
    with pytest.raises(ValueError, match=words):
        explore(Trace(ran, 2))


@pytest.mark.parametrize("costs", [{"forward": 0}, {"backward": 0}, {"forward": 0, "backward": 0}], ids=str)
def test_what_costs_nothing_can_be_explored(costs):
    """Boxes without width, and no division by zero."""
    explorer = explore(**costs)
    assert len(boxes(svgs(explorer)[0])) == 64
    assert explorer.picture().png()


def test_a_rehearsal_runs_the_same_tasks_at_their_median_cost():
    """In the same order on the same devices; it waits for nothing but its predecessors."""
    simulated = rehearse(MEASURED)
    assert simulated.schedule.device_tasks == MEASURED.schedule.device_tasks
    assert simulated.makespan == pytest.approx(0.1 + 0.15 + 0.1 + 0.2)
    assert simulated.unit == "s"
    with pytest.raises(ScheduleError, match="not in the schedule"):
        rehearse(Trace((Event(Task(Phase.BACKWARD, 0, 0), 0, 0.0, 1.0),), 1))


# The widgets


def svgs(explorer):
    return [ET.fromstring(part + "</svg>") for part in explorer.view.value.split("</svg>")[:-1]]


def test_a_slider_move_shows_what_the_simulator_says():
    """Picture, title, tables and sentence."""
    explorer = explore(num_stages=4, num_micro_batches=8)
    explorer.controls["num_micro_batches"].value = 16
    trace = simulate(gpipe(4, 16), TYPICAL_COSTS)
    (picture,) = svgs(explorer)
    assert len(boxes(picture)) == len(trace.events)
    assert explorer.sentence == picture.get("aria-label") == sentence(trace, figures(trace))
    assert f">{explorer.sentence}</p>" in explorer.view.value  # printed too
    assert "57 steps, bubble 16%" in explorer.view.value
    for name, value in {"schedule": "1f1b", "checkpoint": "always", "backward": 3.0, "communication": 0.5}.items():
        explorer.controls[name].value = value
    expected = Settings(4, 16, "1f1b", "always", backward=3.0, communication=0.5)
    assert explorer.settings == expected
    assert explorer.traces == {"simulated": expected.trace()}


def test_every_control_has_a_visible_label_a_number_box_and_a_slider_linked_to_it():
    """The label belongs to the box, so that screen readers read it; moving either moves both."""
    explorer = explore()
    controls, player, _ = explorer.widget.children
    rows = dict(zip(explorer.controls, controls.children, strict=True))
    assert set(rows) == {*SLIDERS, *CHOICES}
    for row in rows.values():
        label = row.children[0].description
        assert label
        assert len(label) <= 16  # 10 em hold it, as the browser test sees
    for row in [*(rows[name] for name in SLIDERS), player.children[0]]:
        box, slider = row.children
        assert (type(box).__name__[-4:], type(slider).__name__[-6:]) == ("Text", "Slider")
        assert box.tooltip == slider.tooltip
        before = slider.value
        slider.value = slider.max
        assert box.value == slider.max
        box.value = before
        assert slider.value == before


def test_what_is_typed_stays_though_the_slider_counts_in_steps():
    """The browser's slider answers a typed 1.13 with 1.1, and 1 with 1.0000000000000002."""
    explorer = explore()
    box, slider = explorer.widget.children[0].children[4].children
    assert box is explorer.controls["forward"]
    box.value = 1.13
    assert slider.value == 1.13
    slider.value = 1.1
    assert box.value == 1.13
    slider.value = 1.2000000000000002  # an arrow key
    assert box.value == explorer.settings.forward == 1.2
    slider.value = 1.0
    slider.value = 1.0000000000000002
    assert box.value == 1.0


def test_imbalance_never_asks_for_more_than_all_the_work():
    """Its bound follows K, and a single stage has none."""
    explorer = explore(num_stages=4, imbalance=4.0)
    imbalance = explorer.controls["imbalance"]
    explorer.controls["num_stages"].value = 2
    assert (imbalance.max, imbalance.value, imbalance.disabled) == (2, 2.0, False)
    explorer.controls["num_stages"].value = 1
    assert (imbalance.value, imbalance.disabled) == (1.0, True)
    assert imbalance.min < imbalance.max
    assert len(boxes(svgs(explorer)[0])) == 16
    explorer.controls["num_stages"].value = 6
    assert (imbalance.max, imbalance.disabled) == (6, False)


def test_a_start_beyond_the_sliders_ends_widens_them():
    """Nothing that was asked for is cut."""
    explorer = explore(num_stages=20, num_micro_batches=2, backward=7.0)
    assert explorer.settings == Settings(20, 2, backward=7.0)
    assert len(boxes(svgs(explorer)[0])) == 80


def test_the_clock_steps_task_by_task_and_says_why_devices_idle():
    """From button to button; a new schedule starts it anew, and it stops at both ends."""
    explorer = explore(num_stages=2, num_micro_batches=2, backward=1.0)
    _, player, view = explorer.widget.children
    _, back, forth, _, play = player.children
    assert "device 1 waits at time 0 for F(0,0), which runs on device 0 until 1" in view.value
    forth.click()
    assert explorer.clock.value == 1
    assert "device 1 runs F(1,0) until 2" in view.value
    assert "time 1 steps" in texts(svgs(explorer)[0])
    back.click()
    back.click()
    assert explorer.clock.value == 0
    explorer.step(100)
    assert explorer.clock.value == explorer.clock.max == play.max == 6
    assert "device 0 has nothing left to do" in view.value
    explorer.controls["num_micro_batches"].value = 3
    assert explorer.clock.value == 0
    assert explorer.clock.max == 8


def test_what_cannot_be_drawn_is_said_in_words(monkeypatch):
    """In the picture's place, and the next setting draws again."""
    explorer = explore()

    def broken(*_):
        raise ScheduleError("<impossible>")

    monkeypatch.setitem(BY_NAME, "1f1b", broken)
    explorer.controls["schedule"].value = "1f1b"
    assert explorer.view.value == '<p role="alert">There is no picture: &lt;impossible&gt;.</p>'
    explorer.controls["schedule"].value = "naive"
    assert len(svgs(explorer)) == 1


def test_a_measured_trace_stands_beside_its_simulation():
    """On one axis of time, with one clock from each start; both have their figures and their sentence."""
    explorer = explore(MEASURED)
    assert explorer.controls == {}
    simulated, measured = svgs(explorer)
    assert (len(boxes(simulated)), len(boxes(measured))) == (4, 4)
    assert [texts(picture)[0].split(":")[0] for picture in (simulated, measured)] == ["simulated", "measured"]
    lines = [picture.findall(f"{SVG}path[@stroke-dasharray]") for picture in (simulated, measured)]
    assert lines[0][0].get("d") == lines[1][0].get("d")
    assert explorer.sentence.startswith("Simulated: Timeline of by hand")
    assert "Measured: Timeline of by hand" in explorer.sentence
    explorer.step(2)
    assert "device 1 runs F(1,0) until 300 ms" in explorer.view.value
    assert explorer._repr_mimebundle_()[0]["text/plain"] == explorer.sentence
    with pytest.raises(TypeError, match="num_stages is one"):
        explore(MEASURED, num_stages=2)


@pytest.mark.parametrize(
    "trace",
    [Trace((), 0), Trace((), 2), Trace(MEASURED.events[:2], 2)],
    ids=["no device", "no task", "forward alone"],
)
def test_a_trace_of_less_than_a_step_is_shown_too(trace):
    """Of an evaluation, say."""
    explorer = explore(trace)
    assert [len(boxes(picture)) for picture in svgs(explorer)] == [len(trace.events)] * 2
    assert explorer.picture().png()


def test_without_a_kernel_a_picture_and_the_same_sentence_stand_in_its_place():
    """In one output: the widget, a PNG with its alternative text, and plain text."""
    explorer = explore()
    explorer.controls["num_micro_batches"].value = 3
    data, metadata = explorer._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.widget.model_id
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"] == explorer.sentence
    assert "3 micro-batches" in explorer.sentence
    assert explorer.picture().figure.get_supxlabel().replace("\n", " ") == explorer.sentence


def test_without_ipywidgets_the_way_out_is_named(monkeypatch):
    """The rest of the room works without it."""
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match="pip install ipywidgets"):
        explore()
    assert Settings().trace().events


@pytest.mark.notebook
def test_an_executed_notebook_keeps_the_widget_and_what_stands_for_it(tmp_path):
    """The widgets' state stands under the key ``state``, which code hosts demand; it lints clean."""
    path = tmp_path / "explorer.ipynb"
    cell = nbformat.v4.new_code_cell("from gpipe_lite.explore import explore\n\nexplore(num_stages=2)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    notebooks.execute(path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    kept = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]
    (output,) = notebook["cells"][0]["outputs"]
    shown = output["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert shown in kept["state"]
    views = [model["state"]["value"] for model in kept["state"].values() if model["model_name"] == "HTMLModel"]
    assert ["<svg" in view for view in views] == [True]
    assert "".join(output["data"]["text/plain"]) == output["metadata"]["image/png"]["alt"]
    assert list(notebooks.lint(path)) == []
