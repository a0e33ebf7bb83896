"""Schedules as plain data: who computes which micro-batch, in which order.

A schedule holds each device's tasks in order and no clock. Everything else reads it: the simulator predicts
from it, threads and processes execute it, the plots draw it, the tests check it.

What a task waits for is written once, in :meth:`Schedule.predecessors`::

    stage 0   F(0,0) ──► B(0,0)          F(k,m) waits for F(k-1,m)
                 │          ▲            R(k,m) waits for F(k,m)
                 ▼          │            B(k,m) waits for B(k+1,m), and for R(k,m) if it stands in the
    stage 1   F(1,0) ──► B(1,0)                 schedule, else for F(k,m)

Source: Huang et al., *GPipe*, arXiv 1811.06965, section 2.3; Narayanan et al., *PipeDream-Flush*,
arXiv 2006.09503, for 1F1B with a flush.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Literal, get_args

Checkpoint = Literal["always", "except_last", "never"]


class Phase(StrEnum):
    """What is done with a micro-batch."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Task:
    """One phase of one micro-batch on one stage; prints as ``F(stage, micro_batch)``."""

    phase: Phase
    stage: int
    micro_batch: int

    @property
    def label(self) -> str:
        """What a picture writes into the task's box: ``F0`` is the forward pass of micro-batch 0."""
        return f"{self.phase}{self.micro_batch}"

    def __str__(self) -> str:
        return f"{self.phase}({self.stage},{self.micro_batch})"


@lru_cache(maxsize=1 << 16)
def _task(phase: Phase, stage: int, micro_batch: int) -> Task:
    """The task, made once: an explorer's slider asks for the same thousands again and again."""
    return Task(phase, stage, micro_batch)


@lru_cache(maxsize=1 << 16)  # everyone who reads a schedule asks for them, and an explorer's sliders again and again
def _predecessors(task: Task, recomputed: bool, goes_on: bool) -> tuple[Task, ...]:
    stage, micro_batch = task.stage, task.micro_batch
    match task.phase:
        case Phase.FORWARD:
            return (_task(Phase.FORWARD, stage - 1, micro_batch),) if stage > 0 else ()
        case Phase.RECOMPUTE:
            return (_task(Phase.FORWARD, stage, micro_batch),)
        case Phase.BACKWARD:
            own = _task(Phase.RECOMPUTE if recomputed else Phase.FORWARD, stage, micro_batch)
            return (own, _task(Phase.BACKWARD, stage + 1, micro_batch)) if goes_on else (own,)


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message names the tasks and what they wait for."""


@dataclass(frozen=True)
class Schedule:
    """Each device's tasks, in the order in which it runs them.

    Args:
        name: for titles and errors.
        device_tasks: one tuple of tasks a device. Usually device d runs stage d; a device may run several
            stages, a stage runs on one device.
    """

    name: str
    device_tasks: tuple[tuple[Task, ...], ...]

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> "Schedule":
        """Read a schedule from text: a line a device, tasks as ``F0``, or ``2F0`` with an explicit stage.

        >>> Schedule.from_text('''F0 F1  B1 B0
        ...                       F0 F1  B1 B0''') == gpipe(2, 2, name="custom")
        True

        Raises:
            TypeError: if it is no text.
            ScheduleError: if a word is not a task.
        """
        if not isinstance(text, str):
            raise TypeError(f"a schedule is read from text, a line a device, such as 'F0 F1 B1 B0', not {text!r}")
        rows = []
        for device, line in enumerate(text.strip().splitlines()):
            row = []
            for word in line.replace("·", " ").split():
                match = re.fullmatch(r"(\d*)([FRB])(\d+)", word)
                if match is None:
                    raise ScheduleError(
                        f"line {device + 1}: {word!r} is not a task; write F0, R0 or B0, or 2F0 for stage 2"
                    )
                stage, phase, micro_batch = match.groups()
                row.append(Task(Phase(phase), int(stage or device), int(micro_batch)))
            rows.append(tuple(row))
        return cls(name, tuple(rows))

    def __str__(self) -> str:
        def word(task: Task, device: int) -> str:
            return task.label if task.stage == device else f"{task.stage}{task.label}"

        rows = (" ".join(word(task, device) for task in row) for device, row in enumerate(self.device_tasks))
        return "\n".join(rows)

    @property
    def num_devices(self) -> int:
        """How many devices run the schedule."""
        return len(self.device_tasks)

    @cached_property
    def device_of(self) -> dict[int, int]:
        """Which device runs each stage."""
        return {task.stage: device for device, row in enumerate(self.device_tasks) for task in row}

    @cached_property
    def num_stages(self) -> int:
        """K."""
        return 1 + max(self.device_of, default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        """M."""
        return 1 + max((task.micro_batch for task in self.tasks()), default=-1)

    def tasks(self) -> Iterator[Task]:
        """All tasks, device by device."""
        for row in self.device_tasks:
            yield from row

    @cached_property
    def _recomputed(self) -> frozenset[tuple[int, int]]:
        return frozenset((t.stage, t.micro_batch) for t in self.tasks() if t.phase is Phase.RECOMPUTE)

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Whether this stage forgets this micro-batch's activations and computes them again."""
        return (stage, micro_batch) in self._recomputed

    def predecessors(self, task: Task) -> tuple[Task, ...]:
        """The tasks that must have ended before ``task`` may start. The only place that says so."""
        return _predecessors(task, (task.stage, task.micro_batch) in self._recomputed, task.stage + 1 < self.num_stages)

    def in_order(self) -> Iterator[Task]:
        """All tasks in an order that respects the devices' order and every dependency.

        Raises:
            ScheduleError: when no device can go on, naming each device's next task and what it waits for.
        """
        return (task for task, _ in self.steps())

    def steps(self) -> Iterator[tuple[Task, tuple[Task, ...]]]:
        """As :meth:`in_order`, each task with its predecessors."""
        done: set[Task] = set()
        position = [0] * self.num_devices
        waiting: dict[Task, int] = {}  # a task not yet done -> the device whose next task needs it
        ready = list(range(self.num_devices))[::-1]
        while ready:
            device = ready.pop()
            row = self.device_tasks[device]
            while position[device] < len(row):
                task = row[position[device]]
                if not done.issuperset(before := self.predecessors(task)):
                    waiting[next(p for p in before if p not in done)] = device
                    break
                done.add(task)
                position[device] += 1
                yield task, before
                if (woken := waiting.pop(task, None)) is not None:
                    ready.append(woken)
        if any(at < len(row) for at, row in zip(position, self.device_tasks, strict=True)):
            raise ScheduleError(self._why_stuck(position, done))

    def _why_stuck(self, position: list[int], done: set[Task]) -> str:
        """Tell what each stuck device waits for, and where that stands."""
        lines = [f"schedule {self.name!r} cannot go on:"]
        for device, (at, row) in enumerate(zip(position, self.device_tasks, strict=True)):
            if at == len(row):
                continue
            missing = next(p for p in self.predecessors(row[at]) if p not in done)
            home = self.device_of.get(missing.stage)
            if home is None or missing not in self.device_tasks[home]:
                where = "which is not in the schedule"
            elif home == device:
                where = "which stands after it on the same device"
            elif (blocked := self.device_tasks[home][position[home]]) == missing:
                where = f"which device {home} cannot start"
            else:
                where = f"which stands after {blocked} on device {home}"
            lines.append(f"  device {device}: {row[at]} waits for {missing}, {where}")
        return "\n".join(lines)

    def check(self) -> "Schedule":
        """Check that the schedule is complete and possible, and return it.

        Every stage runs on one device and does F and B once for each micro-batch, R at most once; and the
        tasks can be run to the end.

        Raises:
            ScheduleError: naming the violated rule, the tasks and the devices.
        """
        stages, micro_batches = range(self.num_stages), range(self.num_micro_batches)
        if not self.num_micro_batches:
            raise ScheduleError(f"schedule {self.name!r} has no tasks")
        for device, row in enumerate(self.device_tasks):
            for task in row:
                if self.device_of[task.stage] != device:
                    raise ScheduleError(
                        f"schedule {self.name!r}: stage {task.stage} stands on devices {device} and "
                        f"{self.device_of[task.stage]}; a stage runs on one device"
                    )
        counts = Counter(self.tasks())
        for phase in Phase:
            for stage in stages:
                for micro_batch in micro_batches:
                    task = Task(phase, stage, micro_batch)
                    if counts[task] > 1:
                        raise ScheduleError(f"schedule {self.name!r}: {task} stands {counts[task]} times, not once")
                    if counts[task] == 0 and phase is not Phase.RECOMPUTE:
                        raise ScheduleError(
                            f"schedule {self.name!r}: {task} is missing; {counted(len(stages), 'stage')} and "
                            f"{counted(len(micro_batches), 'micro-batch')} need each F and B once"
                        )
        for _ in self.in_order():
            pass
        return self

    def only(self, *phases: Phase) -> "Schedule":
        """The same schedule with the tasks of these phases alone, such as its forward half."""
        rows = (tuple(task for task in row if task.phase in phases) for row in self.device_tasks)
        return Schedule(self.name, tuple(rows))


def counted(number: int, one: str) -> str:
    """A number and its noun: 1 stage, 2 stages, 8 micro-batches."""
    many = f"{one}es" if one.endswith("ch") else f"{one}s"
    return f"{number} {one if number == 1 else many}"


def check_sizes(num_stages: int, num_micro_batches: int, checkpoint: str = "never") -> None:
    """Refuse sizes below one, and unknown checkpoint modes, with a ValueError that shows them."""
    for value, what in ((num_stages, "stages (K)"), (num_micro_batches, "micro-batches (M)")):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"a schedule needs a whole number of {what}, 1 or more, not {value!r}")
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(f"checkpoint must be one of {', '.join(get_args(Checkpoint))}, not {checkpoint!r}")


def _backward(stage: int, micro_batch: int, num_micro_batches: int, checkpoint: Checkpoint) -> list[Task]:
    """B of a micro-batch, after its R where the checkpoint mode asks for one."""
    is_last = micro_batch == num_micro_batches - 1
    recompute = checkpoint == "always" or (checkpoint == "except_last" and not is_last)
    phases = (Phase.RECOMPUTE, Phase.BACKWARD) if recompute else (Phase.BACKWARD,)
    return [_task(phase, stage, micro_batch) for phase in phases]


def naive(num_stages: int, num_micro_batches: int = 1, checkpoint: Checkpoint = "never") -> Schedule:
    """One micro-batch at a time, forward and backward, so that one device works and the others wait."""
    return one_f_one_b(num_stages, num_micro_batches, checkpoint, warm_up=lambda _: 1, name="naive")


def gpipe(
    num_stages: int, num_micro_batches: int, checkpoint: Checkpoint = "never", *, name: str = "gpipe"
) -> Schedule:
    """Fill and drain: all micro-batches forward, then all backward, the last one first.

    >>> print(gpipe(2, 3))
    F0 F1 F2 B2 B1 B0
    F0 F1 F2 B2 B1 B0

    Args:
        num_stages: K, a device each.
        num_micro_batches: M.
        checkpoint: which micro-batches are recomputed before their backward pass.
        name: the schedule's name.
    """
    check_sizes(num_stages, num_micro_batches, checkpoint)
    rows = []
    for stage in range(num_stages):
        row = [_task(Phase.FORWARD, stage, m) for m in range(num_micro_batches)]
        for m in reversed(range(num_micro_batches)):
            row += _backward(stage, m, num_micro_batches, checkpoint)
        rows.append(tuple(row))
    return Schedule(name, tuple(rows))


def one_f_one_b(
    num_stages: int,
    num_micro_batches: int,
    checkpoint: Checkpoint = "never",
    *,
    warm_up: Callable[[int], int] | None = None,
    name: str = "1f1b",
) -> Schedule:
    """Warm up, then one forward and one backward in turn, then cool down: at most K micro-batches live.

    >>> print(one_f_one_b(2, 3))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2

    Args:
        num_stages: K, a device each.
        num_micro_batches: M.
        checkpoint: which micro-batches are recomputed before their backward pass.
        warm_up: how many forward tasks a stage runs before its first backward one; K − stage unless given.
        name: the schedule's name.
    """
    check_sizes(num_stages, num_micro_batches, checkpoint)
    rows = []
    for stage in range(num_stages):
        ahead = min(num_micro_batches, warm_up(stage) if warm_up else num_stages - stage)
        forwards = iter([_task(Phase.FORWARD, stage, m) for m in range(num_micro_batches)])
        row = [next(forwards) for _ in range(ahead)]
        for m in range(num_micro_batches):
            row += _backward(stage, m, num_micro_batches, checkpoint)
            row += [task for task in (next(forwards, None),) if task is not None]
        rows.append(tuple(row))
    return Schedule(name, tuple(rows))


Maker = Callable[[int, int, Checkpoint], Schedule]
BY_NAME: dict[str, Maker] = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
