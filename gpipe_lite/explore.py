"""The schedule explorer: a timeline and its figures, with sliders for what makes it and a clock that steps through it.

    >>> explore()  # doctest: +SKIP

:class:`Settings` makes a trace from what the sliders say; :mod:`gpipe_lite.svg` draws it, and
:mod:`gpipe_lite.explain` puts it into numbers and words. Here all that is wired to
`ipywidgets <https://ipywidgets.readthedocs.io>`_, which only :class:`Explorer` needs.

Where no kernel answers (a code host, a page of the book, a notebook that is not trusted), a picture stands in its
place: the output carries a PNG and the sentence too.
"""

import math
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from html import escape
from numbers import Real
from statistics import median
from textwrap import fill
from typing import Any, get_args

from gpipe_lite import plot, svg
from gpipe_lite.explain import Figures, figures, moments, per, percent, sentence, what_happens
from gpipe_lite.plot import plain, time_unit
from gpipe_lite.schedule import BY_NAME, Checkpoint, Phase, Schedule, check_sizes, counted
from gpipe_lite.simulate import simulate
from gpipe_lite.trace import Trace


@dataclass(frozen=True)
class Settings:
    """What the sliders say.

    Args:
        num_stages: K, a device each.
        num_micro_batches: M.
        schedule: a name among :data:`gpipe_lite.schedule.BY_NAME`.
        checkpoint: which micro-batches are recomputed.
        forward: cost of a forward pass of one micro-batch on an average stage, in steps; recomputing costs the same.
        backward: cost of a backward pass.
        imbalance: how many times longer the largest stage takes than the average one, 1 to K, as
            :func:`gpipe_lite.balance.imbalance` has it. The largest is the middle one; the others share the rest.
        communication: how long a value travels between two devices, in steps.
        input_size: memory of a micro-batch's input to a stage, as a part of what an average stage keeps of it.
    """

    num_stages: int = 4
    num_micro_batches: int = 8
    schedule: str = "gpipe"
    checkpoint: Checkpoint = "never"
    forward: float = 1.0
    backward: float = 2.0
    imbalance: float = 1.0
    communication: float = 0.0
    input_size: float = 0.1

    def check(self) -> "Settings":
        """Check that a trace can be made of the settings, and drawn, and return them.

        Raises:
            TypeError: if a number is none.
            ValueError: if a setting is out of bounds.
        """
        check_sizes(self.num_stages, self.num_micro_batches, self.checkpoint)
        if self.schedule not in tuple(BY_NAME):
            raise ValueError(f"schedule must be one of {', '.join(BY_NAME)}, not {self.schedule!r:.60}")
        for name in ("forward", "backward", "imbalance", "communication", "input_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} is a number, such as {getattr(Settings, name)}, not {value!r:.60}")
        for name in ("forward", "backward", "communication"):
            if not ((value := getattr(self, name)) == 0 or 1 / LONGEST <= value <= LONGEST):
                raise ValueError(f"{name} must be 0, or between {1 / LONGEST:g} and {LONGEST} steps, not {value!r}")
        if not 0 <= self.input_size <= LONGEST:
            raise ValueError(f"input_size must be between 0 and {LONGEST}, not {self.input_size!r}")
        stages = self.num_stages
        if not 1 <= self.imbalance <= stages:
            of = counted(stages, "stage")
            raise ValueError(f"the imbalance of {of} is between 1 and {stages}, not {self.imbalance:g}")
        _check_extent(stages, stages, self.num_micro_batches)
        return self

    @property
    def weights(self) -> list[float]:
        """Each stage's work and activations, in those of an average stage; they add up to K."""
        stages = self.num_stages
        weights = [(stages - self.imbalance) / max(1, stages - 1)] * stages
        weights[stages // 2] = self.imbalance
        return weights

    def plan(self) -> Schedule:
        """The schedule.

        Raises:
            TypeError: if a number is none.
            ValueError: if a setting is out of bounds.
        """
        self.check()
        return BY_NAME[self.schedule](self.num_stages, self.num_micro_batches, self.checkpoint)

    def trace(self) -> Trace:
        """The schedule, simulated.

        Raises:
            TypeError: if a number is none.
            ValueError: if a setting is out of bounds.
        """
        plan, weights = self.plan(), self.weights
        costs = {Phase.FORWARD: self.forward, Phase.RECOMPUTE: self.forward, Phase.BACKWARD: self.backward}
        scaled = {phase: [cost * weight for weight in weights] for phase, cost in costs.items()}
        return simulate(plan, lambda task: scaled[task.phase][task.stage], self.communication)


def _check_extent(num_devices: int, num_stages: int, num_micro_batches: int) -> None:
    """Refuse what no screen shows and no reader reads."""
    size = f"{counted(num_stages, 'stage')}, {counted(num_micro_batches, 'micro-batch')}"
    if max(num_devices, num_stages) > MOST_STAGES or num_stages * num_micro_batches > MOST_BOXES:
        raise ValueError(
            f"{size} on {counted(num_devices, 'device')} are too many for a picture: explore at most {MOST_STAGES} "
            f"stages and devices, and stages × micro-batches up to {MOST_BOXES}"
        )


def _check_trace(trace: Trace) -> None:
    """Refuse a trace that cannot be drawn."""
    _check_extent(trace.num_devices, trace.num_stages, trace.num_micro_batches)
    stages: dict[int, int] = {}
    for event in trace.events:
        if not 0 <= event.device < trace.num_devices:
            devices = counted(trace.num_devices, "device")
            raise ValueError(f"the trace has {devices}, and {event.task} ran on device {event.device}")
        if not -math.inf < event.start <= event.end < math.inf:
            raise ValueError(f"{event.task} ran from {event.start!r} to {event.end!r}, which is no span of time")
        if stages.setdefault(event.task.stage, event.device) != event.device:
            both = f"devices {stages[event.task.stage]} and {event.device}"
            raise ValueError(f"stage {event.task.stage} ran on {both}: explore a trace in which each has one device")
    if repeated := [task for task, count in Counter(event.task for event in trace.events).items() if count > 1]:
        raise ValueError(f"{repeated[0]} ran more than once: explore the trace of a single step")


def rehearse(trace: Trace) -> Trace:
    """Simulate a measured trace: the same tasks in the same order, each at the median cost of its phase and stage.

    So it would look if nothing came in between: no other program, no wire, no slow first time. But threads that share a
    core stretch the median box, too, and then the simulation can even be the longer one.

    Raises:
        ScheduleError: if tasks ran whose predecessors are not in the trace.
    """
    times: dict[tuple[Phase, int], list[float]] = defaultdict(list)
    for event in trace.events:
        times[event.task.phase, event.task.stage].append(event.end - event.start)
    medians = {key: median(found) for key, found in times.items()}
    return simulate(trace.schedule, lambda task: medians[task.phase, task.stage], unit=trace.unit)


def explore(trace: Trace | None = None, **settings: Any) -> "Explorer":
    """Show a schedule, and what changes it.

    >>> explore(num_stages=8, num_micro_batches=32, schedule="1f1b")  # doctest: +SKIP
    >>> explore(pipe.trace)  # doctest: +SKIP

    Args:
        trace: a measured one, to be shown beside its simulation; without it, sliders make a simulated one. A trace
            does not know sizes: memory is that of equal stages.
        settings: where the sliders stand at first, see :class:`Settings`.

    Returns:
        An explorer, which shows itself as the last line of a notebook cell.

    Raises:
        ImportError: if ipywidgets is not installed.
        TypeError: if there is no such setting, if one that is a number is none, or if there are settings for a trace.
        ValueError: if a setting is out of bounds, or the trace is not of one step, or too large to be drawn.
    """
    if trace is None:
        if unknown := settings.keys() - {field.name for field in fields(Settings)}:
            known = ", ".join(field.name for field in fields(Settings))
            raise TypeError(f"there is no setting {', '.join(sorted(unknown))}; there are {known}")
        return Explorer(Settings(**settings))
    if not isinstance(trace, Trace):
        raise TypeError(
            f"explore() takes settings by name, as in explore(num_stages=4), or a trace, as in explore(result.trace) "
            f"after a step or explore(simulate(schedule)), not {trace!r:.60}"
        )
    if settings:
        raise TypeError(
            f"a measured trace has no settings, and {', '.join(settings)} is one: leave it or the trace out"
        )
    return Explorer(trace)


@dataclass(frozen=True)
class _Slider:
    """A number to be set: its label, what it means, and its bounds."""

    label: str
    help: str
    lowest: float
    highest: float
    step: float = 0.1


SLIDERS = {
    "num_stages": _Slider("stages, K", "how many stages, a device each", 1, 16, 1),
    "num_micro_batches": _Slider("micro-batches, M", "how many micro-batches, all of one size", 1, 64, 1),
    "forward": _Slider(
        "forward cost", "steps of the clock for a forward task, or for recomputing it, on an average stage", 0.1, 5
    ),
    "backward": _Slider("backward cost", "steps of the clock for a backward task on an average stage", 0.1, 5),
    "imbalance": _Slider("imbalance", "how many times longer the middle stage takes than the average one", 1, 4),
    "communication": _Slider("communication", "steps of the clock for which a value travels between two devices", 0, 5),
    "input_size": _Slider("input size", "memory of a stage's input, as a part of all that it keeps", 0, 1, 0.05),
}
CHOICES = {  # JupyterLab takes arrows and letters for itself while a list is closed, and leaves it Space
    "schedule": ("schedule", "who runs which task, in which order; Space opens the list", tuple(BY_NAME)),
    "checkpoint": (
        "recomputation",
        "which micro-batches keep only their inputs until backward; Space opens the list",
        get_args(Checkpoint),
    ),
}
CLOCK = _Slider("clock, moment", "a moment is when a task starts or ends", 0, 1, 1)
LABEL, ROW = "10em", "27em"  # the first is wide enough for every label above
MOST_STAGES, MOST_BOXES = 64, 2048  # a picture's devices; its stages × micro-batches, two or three boxes each
LONGEST = 1000  # steps of a task or a transfer
_NOTATION = '<p style="line-height:1.4;margin:0">F(k,m), R(k,m) and B(k,m) are the forward pass, the recomputation and \
the backward pass of micro-batch m on stage k. At the clock’s time</p>'
_WRAPPED = {"display": "flex", "flex_flow": "row wrap"}


class Explorer:
    """The widgets around a picture; :func:`explore` makes one.

    Args:
        shown: settings to start from, or a measured trace.

    Attributes:
        widget: all of it, an ``ipywidgets`` box.
        controls: the number box or list of each setting, by the setting's name; none for a measured trace.
        clock: the number box of the clock, which counts the moments at which a task starts or ends.
        view: the ``ipywidgets.HTML`` with the picture and the words.
        sentence: what the picture shows, in words.
        traces: what is shown, by name.
    """

    def __init__(self, shown: Settings | Trace) -> None:
        self._ui = ui = _ipywidgets()
        self.controls: dict[str, Any] = {}
        self.view = ui.HTML()
        rows = []
        if isinstance(shown, Settings):
            self.settings = shown
            self.traces = {"simulated": shown.trace()}  # refuses what does not fit before anything is shown
            rows = [self._control(field.name, getattr(shown, field.name)) for field in fields(Settings)]
        else:
            _check_trace(shown)
            self.settings = Settings(max(1, shown.num_stages), max(1, shown.num_micro_batches))
            self.traces = {"simulated": rehearse(shown), "measured": shown}
        self.clock, clock_row = self._number(CLOCK, 0)
        self._play = ui.Play(min=0, interval=800, layout={"display": "none"})  # its own buttons carry no words
        ui.jslink((self._play, "value"), (clock_row.children[1], "value"))
        back = ui.Button(description="Back", tooltip="the clock, one moment back", layout={"width": "5em"})
        forth = ui.Button(description="Step", tooltip="the clock, one moment on", layout={"width": "5em"})
        play = ui.ToggleButton(description="Play", tooltip="the clock steps by itself", layout={"width": "5em"})
        ui.jslink((play, "value"), (self._play, "playing"))
        back.on_click(lambda _: self.step(-1))
        forth.on_click(lambda _: self.step(1))
        player = ui.Box([clock_row, back, forth, play, self._play], layout=_WRAPPED)
        self.widget = ui.VBox([ui.Box(rows, layout=_WRAPPED), player, self.view])
        self._bound_imbalance()
        self._show()
        for control in self.controls.values():
            control.observe(self._set, "value")
        self.clock.observe(lambda _: self._draw(), "value")

    def step(self, moments: int = 1) -> None:
        """Move the clock by so many moments; it stops at both ends."""
        self.clock.value += moments

    def _control(self, name: str, value: Any) -> Any:
        """A row for a setting."""
        if name in SLIDERS:
            self.controls[name], row = self._number(SLIDERS[name], value)
            return row
        label, tooltip, options = CHOICES[name]
        look = {"style": {"description_width": LABEL}, "layout": {"width": "25em"}}
        box = self._ui.Dropdown(options=options, value=value, description=label, tooltip=tooltip, **look)
        self.controls[name] = box
        return self._ui.HBox([box], layout={"width": ROW})

    def _number(self, slider: _Slider, value: float) -> tuple[Any, Any]:
        """A number box with its label, which screen readers read too, and a slider linked to it: the box, the row."""
        ui, whole = self._ui, isinstance(slider.step, int)
        limits: dict[str, Any] = {
            "min": min(slider.lowest, value),
            "max": max(slider.highest, value),
            "step": slider.step,
        }
        limits |= {"value": value, "tooltip": slider.help}
        box = (ui.BoundedIntText if whole else ui.BoundedFloatText)(
            **limits, description=slider.label, style={"description_width": LABEL}, layout={"width": "15em"}
        )
        handle = (ui.IntSlider if whole else ui.FloatSlider)(**limits, readout=False, layout={"width": "10em"})
        for trait in ("max", "disabled"):
            ui.link((box, trait), (handle, trait))

        def follow(change: Any) -> None:
            """A browser's slider answers with the step nearest to what was typed, which then stays as it was typed."""
            nearest = box.min + round((box.value - box.min) / box.step) * box.step
            if abs(change.new - nearest) > box.step / 10:
                box.value = round(change.new, 6)

        handle.observe(follow, "value")
        box.observe(lambda change: setattr(handle, "value", change.new), "value")
        return box, ui.HBox([box, handle], layout={"width": ROW})

    def _bound_imbalance(self) -> None:
        """No stage does more than all the work: the imbalance is at most K."""
        if box := self.controls.get("imbalance"):
            stages = self.controls["num_stages"].value
            if stages == 1:
                box.value = 1
            box.max, box.disabled = max(2, stages), stages == 1  # a slider needs two ends

    def _set(self, _change: object) -> None:
        """A control was moved: make the trace anew, and set its clock to the start."""
        self._bound_imbalance()
        self.settings = Settings(**{name: box.value for name, box in self.controls.items()})
        try:
            self.traces = {"simulated": self.settings.trace()}
        except ValueError as error:
            self.sentence = f"There is no picture: {error}."
            self.view.value = f'<p role="alert">{escape(self.sentence)}</p>'
            return
        self._show()

    def _show(self) -> None:
        """Show new traces."""
        self._stopped = list(self.traces.values())[-1]  # the measured one, if there are two
        self._schedule = self._stopped.schedule
        self._moments = moments(self._stopped)
        found = {
            name: figures(trace, self.settings.weights, self.settings.input_size) for name, trace in self.traces.items()
        }
        sentences = {name: sentence(trace, found[name]) for name, trace in self.traces.items()}
        alone = len(sentences) == 1
        self.sentence = " ".join(said if alone else f"{name.capitalize()}: {said}" for name, said in sentences.items())
        self._alts = sentences
        self._figures = _figures_table(self.traces, found)
        if self.clock.value:
            self.clock.value = 0  # draws
        else:
            self._draw()
        self.clock.max = self._play.max = max(1, len(self._moments) - 1)

    def _draw(self) -> None:
        """Show the traces at the clock's time."""
        clock = self._moments[min(self.clock.value, len(self._moments) - 1)]
        measured = len(self.traces) > 1
        until = max(trace.makespan for trace in self.traces.values())
        pictures = (
            svg.timeline(
                trace,
                name if measured else "",
                alt=self._alts[name],
                until=until,
                clock=clock - self._stopped.start + trace.start,
            )
            for name, trace in self.traces.items()
        )
        devices = range(self._stopped.num_devices)
        words = (escape(what_happens(self._stopped, self._schedule, device, clock)) for device in devices)
        list_of = "".join(f"<li>{line}</li>" for line in words)
        said = f'{_NOTATION}<ul style="line-height:1.4;margin:0 0 .8em">{list_of}</ul>'
        self.view.value = (
            f"{''.join(pictures)}{said}{self._figures}<p style='line-height:1.4'>{escape(self.sentence)}</p>"
        )

    def picture(self) -> plot.Picture:
        """The picture without a kernel: the traces, and the sentence below."""
        if len(self.traces) > 1:
            figure = plot.compare(self.traces["simulated"], self.traces["measured"]).figure
        else:
            figure = plot.timeline(self.traces["simulated"]).figure
        said = fill(self.sentence, 135)
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.16 * (said.count("\n") + 2))
        figure.supxlabel(said, x=0.01, ha="left", fontsize=8.5, parse_math=False)
        return plot.Picture(figure, self.sentence)

    def _repr_mimebundle_(self, **_only: object) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget, and for where it cannot live the picture and the sentence."""
        data = dict(self.widget._repr_mimebundle_())
        data["text/plain"] = self.sentence
        data["image/png"] = b64encode(self.picture().png()).decode()
        return data, {"image/png": {"alt": self.sentence}}


def _ipywidgets() -> Any:
    """The optional library.

    Raises:
        ImportError: with the way out.
    """
    try:
        import ipywidgets
    except ImportError as error:
        raise ImportError("explore() needs ipywidgets, which is not installed: pip install ipywidgets") from error
    return ipywidgets


def _figures_table(traces: Mapping[str, Trace], found: Mapping[str, Figures]) -> str:
    """The figures as two tables: of the whole, and by stage; a row a trace."""
    trace = next(iter(traces.values()))
    scale, unit = time_unit(trace)
    speed = "F and B boxes ÷ makespan" if trace.unit == "s" else "speed-up over one device"
    whole = [["", f"makespan, {unit}", "bubble", speed, f"micro-batches per {per(trace)}"]]
    staged = [["by stage", *map(str, range(max(len(each.live) for each in found.values())))]]
    for name, each in found.items():
        of = f", {name}" if len(found) > 1 else ""
        times = [plain(each.makespan * scale, 4), f"{each.bubble:.0%}"]
        whole.append([name, *times, f"{each.speed_up:.2f}", plain(each.throughput, 3)])
        staged.append([f"most micro-batches live{of}", *map(str, each.live)])
        staged.append([f"most inputs kept{of}", *map(str, each.inputs)])
        staged.append([f"memory, of one device’s{of}", *(percent(part) for part in each.memory)])
    return _table(whole) + _table(staged)


def _table(rows: list[list[str]]) -> str:
    """An HTML table with a heading row and a heading column."""

    def cell(text: str, scope: str = "") -> str:
        tag, of = ("th", f' scope="{scope}"') if scope else ("td", "")
        align = "left" if scope == "row" else "right"
        return f'<{tag}{of} style="text-align:{align};padding:0 1.2em 0 0">{escape(text)}</{tag}>'

    head, *body = rows
    lines = ["".join(cell(text, "col") for text in head)]
    lines += ["".join([cell(first, "row"), *map(cell, rest)]) for first, *rest in body]
    return (
        '<table style="font-size:inherit;line-height:1.5;margin:0 0 .6em">'
        + "".join(f"<tr>{line}</tr>" for line in lines)
        + "</table>"
    )
