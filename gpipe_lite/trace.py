"""What ran when: one type for the measured and the simulated, read by every plot and every test.

A trace is a set of events, each a task with its device, start and end. What follows from them (makespan, bubble
fraction, utilisation, live micro-batches) is computed here and nowhere else.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from gpipe_lite.schedule import Phase, Schedule, Task, counted

PHASE_NAMES = {Phase.FORWARD: "forward", Phase.RECOMPUTE: "recompute", Phase.BACKWARD: "backward"}


@dataclass(frozen=True, slots=True)
class Event:
    """One task that ran on one device from ``start`` to ``end``, in the trace's unit of time."""

    task: Task
    device: int
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What ran when on each device.

    Args:
        events: in any order; a device runs one task at a time.
        num_devices: devices that took part, the idle ones included.
        name: for titles.
        unit: of all times; "s" when measured, a bare number of "steps" when simulated.
    """

    events: tuple[Event, ...]
    num_devices: int
    name: str = ""
    unit: str = "s"

    @cached_property
    def start(self) -> float:
        """When the first task starts."""
        return min((event.start for event in self.events), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last task ends."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """From the start of the first task to the end of the last."""
        return self.end - self.start

    @property
    def num_stages(self) -> int:
        """K, of the stages that ran."""
        return 1 + max((event.task.stage for event in self.events), default=-1)

    @property
    def num_micro_batches(self) -> int:
        """M, of the micro-batches that ran."""
        return 1 + max((event.task.micro_batch for event in self.events), default=-1)

    def on(self, device: int) -> tuple[Event, ...]:
        """The device's events in the order in which they ran."""
        return self._on.get(device, ())

    @cached_property
    def _on(self) -> dict[int, tuple[Event, ...]]:
        found: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.device].append(event)
        return {device: tuple(sorted(ran, key=attrgetter("start", "end"))) for device, ran in found.items()}

    def busy(self, device: int) -> float:
        """Time in which the device computed."""
        return sum(event.end - event.start for event in self.on(device))

    def utilisation(self, device: int) -> float:
        """Busy time ÷ makespan, 0 to 1."""
        return self.busy(device) / self.makespan if self.makespan else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Idle device-time ÷ (devices × makespan), 0 to 1."""
        total = self.num_devices * self.makespan
        return (total - sum(map(self.busy, range(self.num_devices)))) / total if total else 0.0

    @property
    def schedule(self) -> Schedule:
        """The order in which each device ran its tasks, as a schedule."""
        rows = (tuple(event.task for event in self.on(device)) for device in range(self.num_devices))
        return Schedule(self.name, tuple(rows))

    @cached_property
    def _ran(self) -> dict[int, dict[int, dict[Phase, Event]]]:
        """The events by stage, micro-batch and phase."""
        found: dict[int, dict[int, dict[Phase, Event]]] = {}
        for event in self.events:
            task = event.task
            found.setdefault(task.stage, {}).setdefault(task.micro_batch, {})[task.phase] = event
        return found

    def event_of(self, task: Task) -> Event | None:
        """When and where a task ran; None if it did not."""
        return self._ran.get(task.stage, {}).get(task.micro_batch, {}).get(task.phase)

    def live_boundaries(self, stage: int) -> list[tuple[float, int]]:
        """How many micro-batches the stage keeps its input of: ``(time, count)`` from each time on.

        An input is kept from the start of F to the end of B, or to the end of F where no B follows.
        """
        return self._live(stage, Phase.FORWARD)

    def live_activations(self, stage: int) -> list[tuple[float, int]]:
        """How many micro-batches the stage keeps all activations of: ``(time, count)`` from each time on.

        They are kept from the start of R, or of F where nothing is recomputed, to the end of B. A pass that
        will be recomputed forgets them as it goes, so it does not count.
        """
        return self._live(stage, Phase.RECOMPUTE)

    def _live(self, stage: int, kept_from: Phase) -> list[tuple[float, int]]:
        steps: list[tuple[float, int]] = []
        forward, backward = Phase.FORWARD, Phase.BACKWARD
        for ran in self._ran.get(stage, {}).values():
            if (first := ran.get(kept_from) or ran.get(forward)) is not None:
                steps += [(first.start, 1), (ran.get(backward, first).end, -1)]
        live, curve = 0, [(self.start, 0)]
        for time, change in sorted(steps):  # at the same time, what ends (−1) comes before what starts (+1)
            live += change
            if curve[-1][0] == time:
                curve.pop()
            curve.append((time, live))
        return curve

    def to_chrome(self) -> dict[str, Any]:
        """The trace in Chrome's trace-event format, which Perfetto (ui.perfetto.dev) opens.

        A device is a thread row. Times are microseconds, so one simulated step shows as one second; ``args``
        keep the exact numbers for :meth:`from_chrome`.
        """
        rows: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": self.name or "pipeline"}}
        ]
        for device in range(self.num_devices):
            name = {"name": f"device {device}"}
            rows.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": device, "args": name})
        for event in self.events:
            task = event.task
            rows.append(
                {
                    "name": task.label,
                    "cat": PHASE_NAMES[task.phase],
                    "ph": "X",
                    "pid": 0,
                    "tid": event.device,
                    "ts": (event.start - self.start) * 1e6,
                    "dur": (event.end - event.start) * 1e6,
                    "args": {
                        "phase": str(task.phase),
                        "stage": task.stage,
                        "micro_batch": task.micro_batch,
                        "start": event.start,
                        "end": event.end,
                    },
                }
            )
        other = {"name": self.name, "unit": self.unit, "num_devices": self.num_devices}
        return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": other}

    @classmethod
    def from_chrome(cls, chrome: Mapping[str, Any]) -> "Trace":
        """Read back what :meth:`to_chrome` wrote.

        Raises:
            ValueError: if it is some other program's trace.
        """
        try:
            events = tuple(
                Event(
                    Task(
                        Phase(row["args"]["phase"]),
                        int(row["args"]["stage"]),
                        int(row["args"]["micro_batch"]),
                    ),
                    int(row["tid"]),
                    float(row["args"]["start"]),
                    float(row["args"]["end"]),
                )
                for row in chrome["traceEvents"]
                if row["ph"] == "X"
            )
            other = chrome["otherData"]
            num_devices = int(other["num_devices"])
            for event in events:
                if not (0 <= event.device < num_devices and -math.inf < event.start <= event.end < math.inf):
                    raise ValueError(f"{event} does not fit on {counted(num_devices, 'device')}")
            return cls(events, num_devices, str(other["name"]), str(other["unit"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a trace that gpipe_lite wrote: {error!r}; use Trace.save to write one") from error

    def save(self, path: str | Path) -> None:
        """Write the trace as a Chrome trace file; open it at ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.to_chrome()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: if the file is something else.
        """
        try:
            return cls.from_chrome(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def describe(self) -> str:
        """The trace in one sentence, the text alternative of its picture."""
        span = f"{self.makespan * 1e3:.1f} ms" if self.unit == "s" else f"{self.makespan:g} {self.unit}"
        return (
            f"Timeline{f' of {self.name}' if self.name else ''}: {counted(self.num_stages, 'stage')} on "
            f"{counted(self.num_devices, 'device')}, "
            f"{counted(self.num_micro_batches, 'micro-batch')}, "
            f"{counted(len(self.events), 'task')} in {span}, "
            f"{self.bubble_fraction:.0%} of the device-time idle."
        )


def as_text(trace: Trace, slot: float | None = None) -> str:
    """Draw a trace with letters: a line a device, a column a time slot, a dot where the device is idle.

    >>> from gpipe_lite.schedule import gpipe
    >>> from gpipe_lite.simulate import simulate
    >>> print(as_text(simulate(gpipe(2, 2))))
    F0 F1  ·  · B1 B0
     · F0 F1 B1 B0  ·

    Args:
        trace: measured or simulated.
        slot: width of a column in the trace's unit; the shortest task's length unless given. A task that
            spans several columns stands in each.
    """
    if not trace.events:
        return "\n".join([""] * trace.num_devices)
    slot = slot or min(event.end - event.start for event in trace.events) or trace.makespan / 80 or 1.0
    columns = max(1, round(trace.makespan / slot))
    width = max(len(event.task.label) for event in trace.events)
    lines = []
    for device in range(trace.num_devices):
        cells = ["·"] * columns
        for event in trace.on(device):
            first = min(columns - 1, round((event.start - trace.start) / slot))
            last = max(first + 1, round((event.end - trace.start) / slot))
            cells[first:last] = [event.task.label] * (min(last, columns) - first)
        lines.append(" ".join(cell.rjust(width) for cell in cells))
    return "\n".join(lines)
