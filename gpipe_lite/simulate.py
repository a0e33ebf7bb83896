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
_WRONG = "must be a finite time, 0 or more"


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
        ValueError: if a cost is negative, infinite or not a number.
    """
    cost = costs if callable(costs) else lambda task: costs[task.phase]
    travel = communication if callable(communication) else lambda _sender, _receiver: communication
    ends: dict[Task, float] = {}
    free = [0.0] * schedule.num_devices
    events, device_of = [], schedule.device_of
    for task in schedule.in_order():
        device = device_of[task.stage]
        start = free[device]
        for before in schedule.predecessors(task):
            arrival = ends[before]
            if device_of[before.stage] != device:
                delay = travel(before, task)
                if not 0 <= delay < math.inf:
                    raise ValueError(f"communication from {before} to {task} {_WRONG}, not {delay!r}")
                arrival += float(delay)
            if arrival > start:
                start = arrival
        duration = cost(task)
        if not 0 <= duration < math.inf:
            raise ValueError(f"the cost of {task} {_WRONG}, not {duration!r}")
        end = start + float(duration)
        ends[task] = free[device] = end
        events.append(Event(task, device, start, end))
    return Trace(tuple(events), schedule.num_devices, schedule.name, unit)
