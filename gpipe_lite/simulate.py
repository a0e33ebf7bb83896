"""What a schedule would take: from costs to a trace, without running anything.

>>> from gpipe_lite.schedule import gpipe
>>> simulate(gpipe(4, 4)).makespan  # 2 · (M + K − 1) steps of one forward or backward task
14.0
"""

import math
from collections.abc import Callable, Mapping

from gpipe_lite.schedule import Phase, Schedule, Task
from gpipe_lite.trace import Event, Trace

Costs = Callable[[Task], float] | Mapping[Phase, float]
Communication = Callable[[Task, Task], float] | float

UNIT_COSTS: Mapping[Phase, float] = dict.fromkeys(Phase, 1.0)
TYPICAL_COSTS: Mapping[Phase, float] = {Phase.FORWARD: 1.0, Phase.RECOMPUTE: 1.0, Phase.BACKWARD: 2.0}
"""A backward pass computes two gradients, of inputs and of weights: about twice the work of a forward pass."""
_EXAMPLE = "such as {Phase.FORWARD: 1, Phase.RECOMPUTE: 1, Phase.BACKWARD: 2}"


def simulate(
    schedule: Schedule, costs: Costs = UNIT_COSTS, communication: Communication = 0.0, *, unit: str = "steps"
) -> Trace:
    """Run a schedule on paper: each task starts when its device is free and what it waits for has arrived.

    Args:
        schedule: each device's tasks in order.
        costs: how long a task takes: a function of the task, or a number for each phase.
        communication: how long a value travels from one device to another: a number, or a function of the
            task that sends and the task that receives. Travel occupies neither device.
        unit: of the costs, for titles.

    Returns:
        A trace whose first task starts at 0.

    Raises:
        ScheduleError: if the schedule cannot be run to the end; it names what waits for what.
        TypeError: if it is no schedule, or a cost or the communication is no number.
        ValueError: if a cost is missing, negative or infinite, or all add up to more than a float holds.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"only a Schedule can be simulated, such as gpipe(4, 8) or Schedule.from_text(…): {schedule!r}")
    cost = _cost_of(schedule, costs)
    travel = communication if callable(communication) else lambda _sender, _receiver: communication
    ends: dict[Task, float] = {}
    free = [0.0] * schedule.num_devices
    events, device_of = [], schedule.device_of
    for task, predecessors in schedule.steps():
        device = device_of[task.stage]
        start = free[device]
        for before in predecessors:
            arrival = ends[before]
            if device_of[before.stage] != device:
                delay = travel(before, task)
                if not _is_time(delay):
                    raise _error(f"communication from {before} to {task}", delay)
                arrival += float(delay)
            if arrival > start:
                start = arrival
        duration = cost(task)
        if not _is_time(duration):
            raise _error(f"the cost of {task}", duration)
        end = start + float(duration)
        ends[task] = free[device] = end
        events.append(Event(task, device, start, end))
    if math.inf in free:
        raise ValueError("the times add up to more than a float can hold: count in a larger unit")
    return Trace(tuple(events), schedule.num_devices, schedule.name, unit)


def _cost_of(schedule: Schedule, costs: Costs) -> Callable[[Task], float]:
    """The costs as a function of the task."""
    if callable(costs):
        return costs
    if not isinstance(costs, Mapping):
        raise TypeError(f"costs are a function of the task or a number for each phase, {_EXAMPLE}, not {costs!r}")
    ran = {task.phase for task in schedule.tasks()}
    if missing := [phase for phase in Phase if phase in ran and phase not in costs]:
        names = ", ".join(f"Phase.{phase.name}" for phase in missing)
        raise ValueError(f"costs has no {names}, which the schedule runs: give a number for each phase, {_EXAMPLE}")
    return lambda task: costs[task.phase]


def _is_time(value: object) -> bool:
    """Whether it is a finite number that is not negative; a tensor or an array of one number will do."""
    try:
        return bool(0 <= value < math.inf)  # type: ignore[operator]
    except (TypeError, ValueError, RuntimeError):
        return False


def _error(what: str, value: object) -> Exception:
    """What to raise for a time that is none."""
    kind = ValueError if isinstance(value, int | float) else TypeError
    return kind(f"{what} must be a finite time, 0 or more, not {value!r}")
