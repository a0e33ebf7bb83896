"""Pictures of traces: timelines, comparisons, memory curves and sweeps, each with its text alternative.

Colours are Okabe and Ito's, which the colour-blind can tell apart, and never stand alone: backward boxes are
hatched, recomputed ones stand out in lightness, and a box that is wide enough says its micro-batch; curves differ in
their dashes too.

Every function returns a :class:`Picture`. As the last line of a notebook cell it shows itself and, below, the sentence
that describes it, for those who cannot see it. That sentence must stand on the page: JupyterLab (4.6) and nbconvert's
default template (7.17) drop an image's own alternative text. Figures are white, so that they read on dark pages too,
and are made without pyplot: nothing global changes, and none stays open.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from gpipe_lite.schedule import Phase, counted
from gpipe_lite.trace import PHASE_NAMES, Trace

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""Okabe and Ito's eight, for bars; https://jfly.uni-koeln.de/color/. Curves take the first seven: yellow is pale."""

FILL = {Phase.FORWARD: "#0072B2", Phase.RECOMPUTE: "#F0E442", Phase.BACKWARD: "#D55E00"}
HATCH = {Phase.FORWARD: "", Phase.RECOMPUTE: "", Phase.BACKWARD: "///"}
INK = {Phase.FORWARD: "white", Phase.RECOMPUTE: "black", Phase.BACKWARD: "black"}
MARKERS = "osD^vPX"
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 2)), (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1)), (0, (2, 1)))
WIDTH = 9.0  # inches
FONT = 9.0  # points: the micro-batch numbers
DIGIT = 0.64  # the width of a digit in matplotlib's font, of its size


@dataclass(frozen=True)
class Picture:
    """A figure and the sentence that says what it shows.

    Attributes:
        figure: matplotlib's.
        alt: the text alternative.
    """

    figure: Figure
    alt: str

    def png(self, dpi: int = 110) -> bytes:
        """The picture as a PNG file."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
        return buffer.getvalue()

    def save(self, path: str | Path, dpi: int = 200) -> None:
        """Write the picture as a PNG file."""
        Path(path).write_bytes(self.png(dpi))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data = {"image/png": self.png(), "text/plain": "<Picture>"}
        display(data, metadata={"image/png": {"alt": self.alt}}, raw=True)  # type: ignore[no-untyped-call]  # IPython
        caption = re.sub(r"([\\`*_$<\[])", r"\\\1", self.alt)  # plain words in Markdown, whatever a trace is called
        display({"text/markdown": f"*{caption}*", "text/plain": self.alt}, raw=True)  # type: ignore[no-untyped-call]


def show(figure: Figure, alt: str) -> Picture:
    """Give a figure of your own its text alternative."""
    return Picture(figure, alt)


def timeline(trace: Trace, title: str = "") -> Picture:
    """Draw what ran when: a row a device, a box a task, idle time blank.

    Args:
        trace: measured or simulated.
        title: stands before the makespan and the bubble; the trace's name unless given.
    """
    figure = Figure(figsize=(WIDTH, 1.1 + 0.45 * trace.num_devices), layout="constrained")
    draw_timeline(figure.subplots(), trace, title or trace.name)
    draw_legend(figure, trace)
    return Picture(figure, trace.describe())


def compare(simulated: Trace, measured: Trace) -> Picture:
    """Draw a simulated timeline above the measured one, on one axis of time if their units agree."""
    rows = simulated.num_devices + measured.num_devices
    figure = Figure(figsize=(WIDTH, 1.9 + 0.45 * rows), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    until = max(simulated.makespan, measured.makespan) if simulated.unit == measured.unit else None
    draw_timeline(upper, simulated, "simulated", until)
    draw_timeline(lower, measured, "measured", until)
    draw_legend(figure, simulated, measured)
    return Picture(figure, f"Simulated: {simulated.describe()} Measured: {measured.describe()}")


def memory(trace: Trace, boundary_bytes: Sequence[float] = (), activation_bytes: Sequence[float] = ()) -> Picture:
    """Draw what each stage keeps, over time: a step curve a stage.

    Args:
        trace: measured or simulated.
        boundary_bytes: for each stage, bytes of one micro-batch's input.
        activation_bytes: for each stage, bytes of one micro-batch's activations. Without both, the curves count
            the micro-batches whose activations are kept.

    Raises:
        ValueError: if there is not one number for each stage.
    """
    stages = range(trace.num_stages)
    in_bytes = len(boundary_bytes) + len(activation_bytes) > 0
    for name, given in (("boundary_bytes", boundary_bytes), ("activation_bytes", activation_bytes)):
        if in_bytes and len(given) != len(stages):
            raise ValueError(
                f"{name} has {counted(len(given), 'number')}, the trace has {counted(len(stages), 'stage')}: one each"
            )
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    ax = figure.subplots()
    scale, unit = time_unit(trace)
    peaks = []
    for stage in stages:
        steps: list[tuple[float, float]] = [*trace.live_activations(stage)]
        if in_bytes:
            inputs = [(time, count * boundary_bytes[stage] / 2**20) for time, count in trace.live_boundaries(stage)]
            steps = _sum([inputs, [(time, count * activation_bytes[stage] / 2**20) for time, count in steps]])
        times = [(time - trace.start) * scale for time, _ in steps]
        values = [value for _, value in steps]
        peaks.append(max(values))
        ax.step(times, values, where="post", label=f"stage {stage}", **curve(stage))
    what = "MiB" if in_bytes else "micro-batches"
    if not in_bytes:
        ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.set(xlabel=f"time, {unit}", ylabel=f"kept, {what}", xlim=(0, trace.makespan * scale or 1), ylim=(0, None))
    if stages:
        figure.legend(loc="outside upper right", ncols=4, frameon=False, handlelength=3.2)
    ax.spines[["top", "right"]].set_visible(False)
    most = ", ".join(f"stage {stage} {plain(peak, 3)}" for stage, peak in enumerate(peaks))
    return Picture(figure, f"What each stage keeps over time, in {what}; at most {most or 'nothing: no stage ran'}.")


def sweep(
    curves: Mapping[str, Mapping[float, float]],
    x: str,
    y: str,
    *,
    measured: Mapping[str, Mapping[float, float]] | None = None,
) -> Picture:
    """Draw how a figure depends on a setting: a curve for each name, and what was measured as markers beside it.

    >>> bubbles = {f"{k} stages": {m: simulate(gpipe(k, m)).bubble_fraction for m in (1, 2, 4, 8)} for k in (2, 4)}
    >>> sweep(bubbles, "micro-batches M", "bubble, share of the device-time").alt  # doctest: +SKIP

    Args:
        curves: for each name, the figure at each setting.
        x: what the setting is, with its unit.
        y: what the figure is, with its unit.
        measured: likewise, from a run; drawn in the look of the curve with the same name, but not joined.

    Raises:
        ValueError: if there is nothing to draw, or a number is none.
    """
    drawn = [(name, points, False) for name, points in curves.items()]
    drawn += [(name, points, True) for name, points in (measured or {}).items()]
    values = [number for _, points, _ in drawn for point in points.items() for number in point]
    if not values or not all(points for _, points, _ in drawn):
        raise ValueError("a sweep needs a point or more of each curve, such as {'2 stages': {1: 0.5, 2: 0.33}}")
    if not all(map(math.isfinite, values)):
        raise ValueError("a sweep needs finite numbers: leave out the points that have none")
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    ax = figure.subplots()
    looks = {name: number for number, name in enumerate(dict.fromkeys(name for name, _, _ in drawn))}
    settings = sorted({setting for _, points, _ in drawn for setting in points})
    said = []
    for name, points, alone in drawn:
        number, found = looks[name], dict(sorted(points.items()))
        look = {**curve(number), "marker": MARKERS[number % len(MARKERS)], "markersize": 6.0}
        if alone:
            look |= {"linestyle": "", "markersize": 9.0, "markerfacecolor": "none", "markeredgewidth": 1.6}
        label = f"{name}, measured" if alone else name
        ax.plot(list(found), list(found.values()), label=label, clip_on=False, zorder=3, **look)
        said.append(f"{label}: " + ", ".join(f"{plain(value, 3)} at {setting:g}" for setting, value in found.items()))
    if settings[0] > 0 and settings[-1] >= 8 * settings[0]:
        ax.set_xscale("log")
        ax.minorticks_off()
    if len(settings) <= 12:
        ax.set_xticks(settings, [f"{setting:g}" for setting in settings])
    figures = [value for _, points, _ in drawn for value in points.values()]
    ax.set(xlabel=x, ylabel=y)
    if min(figures) >= 0:
        ax.set_ylim(0, 1.05 * max(figures) or 1)
    ax.grid(axis="y", color="0.9", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=4, frameon=False, handlelength=3.2)
    return Picture(figure, f"{y[:1].upper()}{y[1:]}, against {x}. {'; '.join(said)}.")


def curve(number: int) -> dict[str, Any]:
    """The look of one of several curves, for ``ax.plot(x, y, **curve(0))``: a colour and dashes, 56 in all."""
    return {"color": COLOURS[number % 7], "linestyle": LINES[number % 8], "linewidth": 1.6}


def _sum(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Add step curves."""
    changes: list[tuple[float, float]] = []
    for curve in curves:
        before = 0.0
        for time, value in curve:
            changes.append((time, value - before))
            before = value
    total, found = 0.0, dict[float, float]()
    for time, change in sorted(changes):
        total += change
        found[time] = total
    return list(found.items())


def time_unit(trace: Trace) -> tuple[float, str]:
    """By what to multiply a trace's times, and what they are then."""
    return (1e3, "ms") if trace.unit == "s" else (1.0, trace.unit)


def plain(value: float, digits: int) -> str:
    """A number to so many digits, never with an exponent for being large."""
    return f"{value:.{digits}g}" if value < 10**digits - 0.5 else f"{value:.0f}"


def clock(value: float) -> str:
    """A time to read off: two decimals, and three digits of what is shorter."""
    return plain(round(value, 2), 12) if abs(value) >= 1 else plain(value, 3)


def draw_timeline(ax: Axes, trace: Trace, title: str = "", until: float | None = None) -> None:
    """Draw a timeline into axes of a figure of your own.

    Args:
        ax: what it is drawn into, at the size that it has now: that decides which boxes take a number.
        trace: measured or simulated.
        title: stands before the makespan and the bubble.
        until: the end of the axis of time, counted from the trace's start in its unit; its makespan unless given.
    """
    scale, unit = time_unit(trace)
    until = until or trace.makespan or 1 / scale
    points = ax.get_window_extent().width * 72 / ax.figure.dpi / until
    for phase in Phase:
        events = [event for event in trace.events if event.task.phase is phase]
        widths = [event.end - event.start for event in events]
        lefts = [(event.start - trace.start) * scale for event in events]
        ax.barh(
            [event.device for event in events],
            [width * scale for width in widths],
            0.86,
            lefts,
            color=FILL[phase],
            hatch=HATCH[phase],
            hatch_linewidth=0.6,
            edgecolor="black",
            linewidth=[min(0.6, 0.1 + 0.1 * width * points) for width in widths],  # an outline, not the box's colour
            clip_on=trace.makespan > until * (1 + 1e-9),  # axes that end with the last box would cut its outline
        )
        halo = [withStroke(linewidth=2.8, foreground="white")] if HATCH[phase] else []  # keeps the hatching off
        for event, width, left in zip(events, widths, lefts, strict=True):
            label = str(event.task.micro_batch)
            size = min(FONT, (width * points - (3.5 if halo else 1.5)) / (DIGIT * len(label)))
            if size >= 0.64 * FONT:
                place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "clip_on": True}
                x = left + width * scale / 2
                ax.text(x, event.device, label, fontsize=size, color=INK[phase], path_effects=halo, **place)
    figures = f"{plain(trace.makespan * scale, 4)} {unit}, bubble {trace.bubble_fraction:.0%}"
    ax.set_title(f"{title}: {figures}" if title else figures, loc="left", fontsize=10)
    ax.set(xlabel=f"time, {unit}", xlim=(0, until * scale), ylim=(max(1, trace.num_devices) - 0.5, -0.5))
    ax.set_yticks(range(trace.num_devices), [f"device {device}" for device in range(trace.num_devices)])
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def draw_legend(figure: Figure, *traces: Trace) -> None:
    """Say above a figure of your own what the boxes of its timelines mean."""
    ran = {event.task.phase for trace in traces for event in trace.events}
    phases = [phase for phase in Phase if phase in ran]
    look: dict[str, Any] = {"edgecolor": "black", "lw": 0.6, "hatch_linewidth": 0.6}
    boxes = [Patch(facecolor=FILL[p], hatch=HATCH[p], label=PHASE_NAMES[p], **look) for p in phases]
    idle = Patch(facecolor="white", edgecolor="0.6", lw=0.6, label="idle")
    figure.legend(handles=[*boxes, idle], loc="outside upper right", ncols=4, fontsize=9, frameon=False)
