"""Pictures show what the trace says, in more than colour."""

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from nbconvert.filters import markdown2html

from gpipe_lite import plot
from gpipe_lite.schedule import Phase, Task, gpipe, naive, one_f_one_b
from gpipe_lite.simulate import TYPICAL_COSTS, simulate
from gpipe_lite.trace import Event, Trace
from images import draw

MEASURED = Trace(
    (
        Event(Task(Phase.FORWARD, 0, 0), 0, 10.0, 10.1),
        Event(Task(Phase.RECOMPUTE, 0, 0), 0, 10.2, 10.3),
        Event(Task(Phase.BACKWARD, 0, 0), 0, 10.3, 10.5),
    ),
    2,
    "by hand",
)


def boxes(picture, axes=0):
    return [patch for container in picture.figure.axes[axes].containers for patch in container]


def test_each_task_is_a_box_at_its_time_on_its_device():
    """In milliseconds from the start when measured."""
    found = [
        (box.get_x(), box.get_width(), box.get_y() + box.get_height() / 2) for box in boxes(plot.timeline(MEASURED))
    ]
    expected = [(0.0, 100.0, 0.0), (200.0, 100.0, 0.0), (300.0, 200.0, 0.0)]
    assert [pytest.approx(box) for box in expected] == found


def test_phases_differ_in_more_than_colour():
    """Okabe and Ito's colours; outlined, backward hatched, micro-batch numbers inside."""
    picture = plot.timeline(MEASURED)
    look = [(to_hex(box.get_facecolor()).upper(), box.get_hatch() or "") for box in boxes(picture)]
    assert look == [("#0072B2", ""), ("#F0E442", ""), ("#D55E00", "///")]
    assert all(to_hex(box.get_edgecolor()) == "#000000" and box.get_linewidth() > 0 for box in boxes(picture))
    assert [text.get_text() for text in picture.figure.axes[0].texts] == ["0", "0", "0"]
    (legend,) = picture.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "recompute", "backward", "idle"]


def test_numbers_are_left_out_of_boxes_too_narrow_for_them():
    """Five hundred micro-batches do not become a smear."""
    texts = plot.timeline(simulate(gpipe(2, 500))).figure.axes[0].texts
    assert not texts
    assert len(plot.timeline(simulate(gpipe(2, 4))).figure.axes[0].texts) == 16


@pytest.mark.parametrize(
    "picture",
    [
        lambda: plot.timeline(simulate(one_f_one_b(8, 16, "except_last"), TYPICAL_COSTS)),
        lambda: plot.timeline(simulate(gpipe(4, 12), lambda task: 0.1 + task.micro_batch)),
        lambda: plot.compare(simulate(gpipe(4, 8), unit="s"), simulate(gpipe(4, 8), lambda _: 6.0, unit="s")),
        draw.schedules,
    ],
    ids=["narrow", "uneven", "compared", "side by side"],
)
def test_a_number_never_leaves_its_box(picture):
    """On axes of any width, also where a longer trace beside it stretches the axis."""
    figure = picture().figure
    FigureCanvasAgg(figure).draw()
    shown = 0
    for ax in figure.axes:
        frames = [patch.get_window_extent() for container in ax.containers for patch in container]
        for text in ax.texts:
            number = text.get_window_extent()
            shown += 1
            assert any(frame.x0 <= number.x0 and number.x1 <= frame.x1 for frame in frames if frame.overlaps(number))
    assert shown


def test_outlines_are_always_there_and_never_hide_the_colour():
    """Eight devices and more than a hundred micro-batches."""
    picture = plot.timeline(simulate(gpipe(8, 104), TYPICAL_COSTS))
    FigureCanvasAgg(picture.figure).draw()
    for box in boxes(picture):
        assert not box.get_clip_on()  # the last one ends with the axes
        points = box.get_window_extent().width * 72 / picture.figure.dpi
        assert 0 < box.get_linewidth() < points / 3


def test_no_box_leaves_axes_that_end_before_its_trace():
    """As in the README's picture of a schedule that goes on."""
    ax = Figure().subplots()
    plot.draw_timeline(ax, simulate(naive(2)), until=2.0)
    assert all(patch.get_clip_on() for container in ax.containers for patch in container)


def test_large_numbers_have_no_exponent():
    """Neither in titles nor in sentences."""
    trace = simulate(gpipe(2, 2), lambda _: 2.5, unit="s")
    assert plot.timeline(trace).figure.axes[0].get_title(loc="left") == "gpipe: 15000 ms, bubble 33%"
    alt = plot.memory(trace, [0, 0], [2**40, 2**30]).alt
    assert alt == "What each stage keeps over time, in MiB; at most stage 0 2097152, stage 1 2048."


def test_a_title_is_left_out_where_there_is_none():
    """No lone colon before the numbers."""
    assert plot.timeline(Trace(MEASURED.events, 2)).figure.axes[0].get_title(loc="left") == "500 ms, bubble 60%"


@pytest.mark.parametrize("trace", [Trace((), 2), simulate(naive(2), lambda _: 0.0)], ids=["no task", "no time"])
def test_what_takes_no_time_can_be_drawn(trace):
    """An empty picture with a true sentence, and no warning."""
    for picture in (plot.timeline(trace), plot.compare(trace, trace), plot.memory(trace), plot.memory(trace, [], [])):
        assert picture.png()
        assert picture.alt.endswith(".")
    assert plot.memory(Trace((), 2)).alt.endswith("at most nothing: no stage ran.")


def test_axes_are_labelled_with_their_units_and_every_device_has_a_row():
    """An idle device too, and device 0 on top."""
    (ax,) = plot.timeline(MEASURED, "title").figure.axes
    assert ax.get_xlabel() == "time, ms"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["device 0", "device 1"]
    assert ax.yaxis_inverted()
    assert ax.get_title(loc="left") == "title: 500 ms, bubble 60%"
    (ax,) = plot.timeline(simulate(gpipe(1, 1))).figure.axes
    assert ax.get_xlabel() == "time, steps"


def test_compared_timelines_share_their_axis_if_they_share_their_unit():
    """Otherwise each has its own; the legend names the phases of both."""
    plan = gpipe(2, 2, "always")
    upper, lower = plot.compare(simulate(plan, TYPICAL_COSTS, unit="s"), MEASURED).figure.axes
    assert upper.get_xlim() == lower.get_xlim()
    picture = plot.compare(simulate(gpipe(2, 2)), MEASURED)
    upper, lower = picture.figure.axes
    assert (upper.get_xlim(), lower.get_xlim()) == ((0, 6), pytest.approx((0, 500)))
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()][1] == "recompute"


def test_memory_curves_add_inputs_and_activations():
    """GPipe with recomputation: M inputs, and one micro-batch's activations between R and B."""
    trace = simulate(gpipe(2, 3, "always"), TYPICAL_COSTS)
    mib = 2**20
    picture = plot.memory(trace, boundary_bytes=[1 * mib, 2 * mib], activation_bytes=[10 * mib, 20 * mib])
    curves = [line.get_ydata() for line in picture.figure.axes[0].lines]
    assert [max(curve) for curve in curves] == [13.0, 26.0]
    assert [curve[-1] for curve in curves] == [0.0, 0.0]
    assert picture.alt == "What each stage keeps over time, in MiB; at most stage 0 13, stage 1 26."
    styles = [line.get_linestyle() for line in picture.figure.axes[0].lines]
    assert len(set(styles)) == 2
    for line in picture.figure.axes[0].lines:
        assert all(a <= b for a, b in pairwise(line.get_xdata()))


def test_memory_without_bytes_counts_micro_batches():
    """Those whose activations are kept."""
    picture = plot.memory(simulate(gpipe(2, 3)))
    assert [max(line.get_ydata()) for line in picture.figure.axes[0].lines] == [3, 3]
    assert picture.figure.axes[0].get_ylabel() == "kept, micro-batches"


def test_curves_differ_in_more_than_colour():
    """Eight stages have eight kinds of dashes, and none is yellow on white."""
    picture = plot.memory(simulate(one_f_one_b(8, 8)))
    lines = picture.figure.axes[0].lines
    assert len({repr(line._dash_pattern) for line in lines}) == 8
    assert "#f0e442" not in {to_hex(line.get_color()) for line in lines}
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()] == [f"stage {k}" for k in range(8)]
    assert len({tuple(plot.curve(number).values()) for number in range(56)}) == 56


SWEEP = {f"{k} stages": {m: simulate(gpipe(k, m)).bubble_fraction for m in (1, 2, 4, 8)} for k in (2, 4)}


def test_a_sweep_draws_a_curve_for_each_name():
    """Through its points in order of the setting, with markers and dashes of its own; both axes are labelled."""
    (ax,) = plot.sweep({"2 stages": dict(reversed(SWEEP["2 stages"].items()))}, "M", "bubble").figure.axes
    assert [tuple(point) for point in ax.lines[0].get_xydata()] == list(SWEEP["2 stages"].items())
    picture = plot.sweep(SWEEP, "micro-batches M", "bubble, share of the device-time")
    (ax,) = picture.figure.axes
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert all(len(set(part)) == 2 for part in zip(*looks, strict=True))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("micro-batches M", "bubble, share of the device-time")
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()] == ["2 stages", "4 stages"]


def test_what_was_measured_stands_beside_its_curve():
    """In the same colour, as hollow markers that no line joins."""
    (ax,) = plot.sweep(SWEEP, "M", "bubble", measured={"4 stages": {1: 0.8, 8: 0.4}}).figure.axes
    two, four, measured = ax.lines
    assert measured.get_color() == four.get_color() != two.get_color()
    assert (measured.get_linestyle(), measured.get_markerfacecolor()) == ("None", "none")
    assert measured.get_label() == "4 stages, measured"


def test_a_sweeps_sentence_says_every_point():
    """With the axes' names; large numbers have no exponent."""
    assert plot.sweep({"a": {2: 0.333333, 1: 12345.0}}, "M", "time, ms").alt == (
        "Time, ms, against M. a: 12345 at 1, 0.333 at 2."
    )


@pytest.mark.parametrize(
    ("settings", "scale", "ticks"),
    [
        ([1, 2, 4, 8], "log", ["1", "2", "4", "8"]),
        ([1, 2, 3], "linear", ["1", "2", "3"]),
        ([0, 8], "linear", ["0", "8"]),
    ],
)
def test_a_sweeps_axis_has_a_tick_at_each_setting(settings, scale, ticks):
    """On a log axis where the settings span a factor of eight."""
    picture = plot.sweep({"a": dict.fromkeys(settings, 1.0)}, "M", "y")
    FigureCanvasAgg(picture.figure).draw()
    (ax,) = picture.figure.axes
    assert ax.get_xscale() == scale
    assert [label.get_text() for label in ax.get_xticklabels()] == ticks


@pytest.mark.parametrize("curves", [{}, {"a": {}}, {"a": {1: 2.0}, "b": {}}], ids=str)
def test_a_sweep_of_nothing_is_refused(curves):
    """The message shows what a curve looks like."""
    with pytest.raises(ValueError, match=r"a point or more of each curve, such as \{'2 stages': \{1: 0.5"):
        plot.sweep(curves, "x", "y")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sweep_without_finite_numbers_is_refused(bad):
    """Neither settings nor figures."""
    for points in ({1: bad}, {bad: 1}):
        with pytest.raises(ValueError, match="finite numbers"):
            plot.sweep({"a": points}, "x", "y")


@pytest.mark.parametrize("points", [{1: 0.0}, {-1: -2.0, 3: 1.0}, dict.fromkeys(range(1, 100), 0.5)], ids=len)
def test_any_finite_sweep_can_be_drawn(points):
    """Zeros, negative figures, many settings; no warning."""
    assert plot.sweep({"a": points}, "x", "y").png()


def test_micro_batches_are_counted_in_whole_numbers():
    """No tick at half a micro-batch, also where one alone is kept."""
    (ax,) = plot.memory(simulate(gpipe(2, 4, "always"))).figure.axes
    assert all(tick == round(tick) for tick in ax.get_yticks())


def test_bytes_that_do_not_fit_the_stages_are_refused():
    """Both numbers are shown."""
    with pytest.raises(ValueError, match="activation_bytes has 1 number, the trace has 2 stages"):
        plot.memory(simulate(gpipe(2, 3)), [1, 1], [1])


def test_a_picture_shows_itself_with_its_sentence(monkeypatch):
    """As an image with an alternative text, and as a caption that every reader sees."""
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options)))
    plot.show(Figure(), "a sentence")._ipython_display_()
    (image, options), (caption, _) = shown
    assert image["image/png"].startswith(b"\x89PNG")
    assert options["metadata"] == {"image/png": {"alt": "a sentence"}}
    assert caption["text/plain"] == "a sentence"


def test_the_caption_says_the_sentence_in_markdown_too(monkeypatch):
    """Whatever characters a name holds."""
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    sentence = "Timeline of my_own_schedule * 2 [sic] <b> `x` for $5 \\* or $6: 97 % idle."
    plot.show(Figure(), sentence)._ipython_display_()
    page = BeautifulSoup(markdown2html(shown[1]["text/markdown"]), "html.parser")
    assert page.em is not None
    assert page.text.strip() == sentence


def test_no_figure_stays_open():
    """Nothing is left to matplotlib's global state, however many pictures are drawn."""
    for _ in range(25):
        plot.timeline(MEASURED)
    assert not Gcf.figs


def test_a_picture_is_opaque_so_that_it_reads_on_dark_pages(tmp_path):
    """White, whatever is behind it."""
    from PIL import Image

    picture = plot.timeline(MEASURED)
    picture.save(tmp_path / "picture.png")
    for image in (Image.open(tmp_path / "picture.png"), Image.open(io.BytesIO(picture.png()))):
        assert image.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_the_readmes_pictures_carry_the_sentences_of_their_data():
    """``make images`` wrote both; the README repeats the sentence as the alternative text."""
    images = Path(__file__).parent.parent / "images"
    alts = json.loads((images / "alt.json").read_text(encoding="utf-8"))
    assert alts["hero.png"] == Trace.load(images / "hero_trace.json").describe()
    readme = (images.parent / "README.md").read_text(encoding="utf-8")
    for name, alt in alts.items():
        assert f"![{alt}](images/{name})" in readme


def test_drawing_the_readmes_pictures_again_says_the_same():
    """From the kept trace, with each word about idle time where its device is idle."""
    images = Path(__file__).parent.parent / "images"
    trace = Trace.load(images / "hero_trace.json")
    hero = draw.hero(trace)
    alts = json.loads((images / "alt.json").read_text(encoding="utf-8"))
    assert alts == {"hero.png": hero.alt, "schedules.png": draw.schedules().alt}
    words = [text for text in hero.figure.axes[0].texts if text.get_text().isalpha()]
    assert [text.get_text() for text in words] == ["fill", "drain", "bubble"]
    for text in words:
        middle, device = text.get_position()
        time = trace.start + middle / 1e3
        assert all(time < event.start or event.end < time for event in trace.on(device))
