"""The only loop that interprets a schedule, and what it needs of a transport.

    for each of my tasks:  receive what it waits for → run it on its stage → send on what it made

Threads (:mod:`gpipe_lite.threads`) and processes run this same loop; they differ in their :class:`Channel` alone.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from gpipe_lite.schedule import Task
from gpipe_lite.stage import Stage, Values
from gpipe_lite.trace import Event, Trace


class Channel(Protocol):
    """How values reach a device and leave it."""

    def recv(self, task: Task) -> Values:
        """Wait for what ``task`` needs, and return it by where it comes from, the neighbour first.

        Raises:
            Cancelled: if another device failed.
        """

    def send(self, task: Task, values: Values) -> None:
        """Hand what ``task`` made to the tasks that need it."""

    def close(self, error: BaseException) -> None:
        """Wake everyone who waits, or will wait: this device has failed."""


class Cancelled(Exception):  # noqa: N818 - it is no error of its own, it follows another device's
    """Another device failed, so this one stops."""


def run_tasks(device: int, tasks: Iterable[Task], stages: Mapping[int, Stage], channel: Channel, log: "Log") -> None:
    """Run one device's tasks in order.

    Args:
        device: the row of the schedule that this is.
        tasks: the row.
        stages: the stages that live on the device.
        channel: its connection to the others.
        log: where to write down when each task ran.

    Raises:
        BaseException: whatever a task raised, with notes on where; all others are woken first.
    """
    for task in tasks:
        received = None
        stage = stages[task.stage]
        try:
            received = channel.recv(task)
            start = log.now()
            made = stage.run(task, received)
            log.add(task, device, start, log.now())
            channel.send(task, made)
        except BaseException as error:
            channel.close(error)  # first, so that nothing can keep the others waiting
            if not isinstance(error, Cancelled):
                with suppress(Exception):  # an exception may take no notes, and what it came from may be broken
                    stage.explain(error, task, received)
            raise


class Log:
    """When each task of one device ran, by the computer's clock or, on a CUDA device, by the device's.

    A CUDA device works on after Python has gone on, so its times are events in its stream, read when asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = _CudaClock(device) if device.type == "cuda" else _Clock()
        self._rows: list[tuple[Task, int, Any, Any]] = []

    def now(self) -> Any:
        """A point in the device's time."""
        return self._clock.now()

    def add(self, task: Task, device: int, start: Any, end: Any) -> None:
        """Write down that a task ran from ``start`` to ``end``, both from :meth:`now`."""
        self._rows.append((task, device, start, end))

    def events(self) -> list[Event]:
        """What ran, in seconds of ``perf_counter``; waits for a CUDA device to finish."""
        seconds = self._clock.seconds
        return [Event(task, device, seconds(start), seconds(end)) for task, device, start, end in self._rows]


class _Clock:
    now = staticmethod(perf_counter)

    def seconds(self, point: float) -> float:
        return point


class _CudaClock:  # pragma: no cover - needs CUDA
    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._zero, self._zero_seconds = self.now(), perf_counter()

    def now(self) -> torch.cuda.Event:
        point = torch.cuda.Event(enable_timing=True)
        point.record(torch.cuda.current_stream(self._device))
        return point

    def seconds(self, point: torch.cuda.Event) -> float:
        point.synchronize()
        return self._zero_seconds + float(self._zero.elapsed_time(point)) / 1e3


@dataclass(frozen=True)
class Timeline:
    """The logs of a run's devices. It outlives the run, whose activations it does not hold."""

    name: str
    logs: tuple[Log, ...]

    def trace(self) -> Trace:
        """What ran when so far, in seconds of ``perf_counter``."""
        return Trace(tuple(event for log in self.logs for event in log.events()), len(self.logs), self.name)


@dataclass(frozen=True)
class StepResult:
    """What came out of a step.

    Attributes:
        loss: of the whole mini-batch, shape ``()``, detached.
        outputs: the model's outputs for the mini-batch, detached, if they were asked for.
    """

    loss: Tensor
    outputs: Any
    _timeline: Timeline

    @property
    def trace(self) -> Trace:
        """What ran when, measured, in seconds."""
        return self._timeline.trace()
