"""The schedule by which a pipeline runs so many micro-batches, from what the user named."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import SupportsIndex, get_args

from gpipe_lite.schedule import BY_NAME, Checkpoint, Phase, Schedule, ScheduleError, Task, counted
from gpipe_lite.skip import Port, Routes, sender_of

ScheduleLike = str | Schedule | Callable[[int, int], Schedule]


def check_options(chunks: int, checkpoint: str, schedule: ScheduleLike) -> None:
    """Check what a pipeline is told about its micro-batches.

    Args:
        chunks: how many there are.
        checkpoint: which of them are recomputed.
        schedule: a schedule, a function that makes one, or a name.

    Raises:
        TypeError: if one of them is of another kind.
        ValueError: if there are fewer than one, or nobody knows the name.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, SupportsIndex):
        raise TypeError(f"chunks must be a whole number, not {chunks!r}")
    if chunks < 1:
        raise ValueError(f"chunks must be 1 or more, not {chunks}: it is the number of micro-batches")
    if checkpoint not in get_args(Checkpoint):
        raise ValueError(f"checkpoint must be one of {', '.join(get_args(Checkpoint))}, not {checkpoint!r}")
    if isinstance(schedule, str) and schedule not in BY_NAME:
        raise ValueError(f"schedule must be one of {', '.join(BY_NAME)}, a Schedule or a function, not {schedule!r}")
    if not (isinstance(schedule, str | Schedule) or callable(schedule)):
        raise TypeError(f"schedule must be a name, a Schedule or a function of (K, M), not {schedule!r}")


def check_order(schedule: Schedule, routes: Routes, room: int) -> None:
    """Check that devices which send each other values in order, and run ahead by so many, never wait in a ring.

    Threads put values aside until they are needed. Between processes a value waits in line, behind those that were
    sent before it, and who finds the line full waits.

    Args:
        schedule: one that is possible.
        routes: say where values go.
        room: how many values a line holds.

    Raises:
        ScheduleError: if two devices send and receive in different orders, or a ring of full lines forms.
    """
    waiting = [deque(_messages(schedule, routes, row)) for row in schedule.device_tasks]
    lines: dict[tuple[int, int], deque[tuple[Task, Port]]] = {}
    moved = True
    while moved:
        moved = False
        for device, todo in enumerate(waiting):
            while todo:
                is_sent, other, message = todo[0]
                line = lines.setdefault((device, other) if is_sent else (other, device), deque())
                if is_sent and len(line) < room:
                    line.append(message)
                elif not is_sent and line:
                    if line[0] != message:
                        raise ScheduleError(
                            f"schedule {schedule.name!r}: device {device} needs what is for {message[0]} first, and "
                            f"device {other} sends what is for {line[0][0]} first; processes exchange values in one "
                            "order, so let both devices have it"
                        )
                    line.popleft()
                else:
                    break
                todo.popleft()
                moved = True
    if any(waiting):
        each = "; ".join(
            f"device {device} to {'send' if todo[0][0] else 'receive'} what is for {todo[0][2][0]}"
            for device, todo in enumerate(waiting)
            if todo
        )
        raise ScheduleError(f"schedule {schedule.name!r}: with room for {room} values in a line, all wait: {each}")


def _messages(schedule: Schedule, routes: Routes, row: Iterable[Task]) -> Iterator[tuple[bool, int, tuple[Task, Port]]]:
    """What a device receives and sends, in order: whether it sends, the other device, for which task and port."""
    last = schedule.num_stages - 1
    for task in row:
        for source in routes.sources(task):
            there = sender_of(task, source)
            if 0 <= there <= last:
                yield False, schedule.device_of[there], (task, source)
        for port in routes.made_for(task):
            consumer, source = routes.destination(task, port)
            if 0 <= consumer.stage <= last:
                yield True, schedule.device_of[consumer.stage], (consumer, source)


class Plan:
    """A schedule and its halves.

    Attributes:
        whole: the schedule.
        forward: its forward tasks.
        backward: its other tasks.
        flushes: whether on each device all forward tasks come first, so that the halves can run one after the other.
        recomputes: whether it has R tasks.
    """

    def __init__(self, whole: Schedule) -> None:
        self.whole = whole
        self.forward = whole.only(Phase.FORWARD)
        self.backward = whole.only(Phase.RECOMPUTE, Phase.BACKWARD)
        rows = zip(whole.device_tasks, self.forward.device_tasks, strict=True)
        self.recomputes = any(task.phase is Phase.RECOMPUTE for task in whole.tasks())
        self.flushes = all(row[: len(forward)] == forward for row, forward in rows)


def make(schedule: ScheduleLike, num_stages: int, num_micro_batches: int, checkpoint: Checkpoint) -> Plan:
    """Build a schedule from what the user named, and check that it fits.

    Args:
        schedule: a name, a schedule, or a function of (K, M) that returns one.
        num_stages: K of the pipeline, a device each.
        num_micro_batches: M.
        checkpoint: what schedules that are named recompute.

    Raises:
        TypeError: if the function returns something else.
        ValueError: if the schedule is for other numbers of stages, micro-batches or devices.
        ScheduleError: if it cannot be run.
    """
    if isinstance(schedule, Schedule):
        found = schedule
    elif isinstance(schedule, str):
        found = BY_NAME[schedule](num_stages, num_micro_batches, checkpoint)
    else:
        found = schedule(num_stages, num_micro_batches)
        if not isinstance(found, Schedule):
            raise TypeError(f"schedule(K={num_stages}, M={num_micro_batches}) returned {found!r}, not a Schedule")
    found.check()
    sizes = found.num_stages, found.num_micro_batches, found.num_devices
    wanted = num_stages, num_micro_batches, num_stages
    if sizes != wanted:
        raise ValueError(
            f"schedule {found.name!r} has {counted(sizes[0], 'stage')}, {counted(sizes[1], 'micro-batch')} and "
            f"{counted(sizes[2], 'device')}; the pipeline has {wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
    return Plan(found)
