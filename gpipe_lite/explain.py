"""What follows from a trace, in numbers and in words: its figures, and why a device idles.

>>> from gpipe_lite.schedule import gpipe
>>> from gpipe_lite.simulate import simulate
>>> why_idle(simulate(gpipe(4, 2)), gpipe(4, 2), device=2, time=1)
'device 2 waits at time 1 for F(1,0), which runs on device 1 until 2'
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from gpipe_lite.plot import clock, plain, time_unit
from gpipe_lite.schedule import Phase, Schedule
from gpipe_lite.trace import Trace


@dataclass(frozen=True)
class Figures:
    """A trace in numbers.

    Attributes:
        makespan: in the trace's unit.
        bubble: idle device-time ÷ all device-time.
        speed_up: over one device, which runs all forward and backward tasks without a pause or recomputation. Of a
            measured trace, that is the forward and backward boxes, put one after the other, ÷ the makespan: threads
            that share a core stretch each other's boxes, and one device would not take so long.
        throughput: micro-batches per unit of time.
        live: for each stage, of how many micro-batches it keeps all activations at most.
        inputs: for each stage, of how many micro-batches it keeps at least the input at most.
        memory: for each stage, what it keeps at most ÷ what one device would keep of the whole mini-batch without
            recomputation. A micro-batch counts with the stage's activations or, as long as it waits to be
            recomputed, with the stage's input.
    """

    makespan: float
    bubble: float
    speed_up: float
    throughput: float
    live: list[int]
    inputs: list[int]
    memory: list[float]


def figures(trace: Trace, weights: list[float] | None = None, input_size: float = 0.1) -> Figures:
    """Read a trace's figures.

    Args:
        trace: measured or simulated.
        weights: each stage's activations, in those of an average stage; all the same unless given.
        input_size: see :class:`Settings`.
    """
    stages, micro_batches = trace.num_stages, trace.num_micro_batches
    makespan = trace.makespan
    repeated = [event.end - event.start for event in trace.events if event.task.phase is Phase.RECOMPUTE]
    recomputes = len(repeated) > 0
    work = sum(map(trace.busy, range(trace.num_devices))) - sum(repeated)
    live, inputs, memory = [], [], []
    for stage in range(stages):
        activations = trace.live_activations(stage)
        boundaries = trace.live_boundaries(stage) if recomputes else activations
        weight = weights[stage] if weights else 1.0
        live.append(max(count for _, count in activations))
        inputs.append(max(count for _, count in boundaries) if recomputes else live[-1])
        peak = _peak(boundaries, activations, input_size, weight) if recomputes else live[-1] * weight
        memory.append(peak / (stages * micro_batches))
    return Figures(
        makespan=makespan,
        bubble=trace.bubble_fraction,
        speed_up=work / makespan if makespan else 1.0,
        throughput=micro_batches / makespan if makespan else 0.0,
        live=live,
        inputs=inputs,
        memory=memory,
    )


def _peak(
    inputs: list[tuple[float, int]], activations: list[tuple[float, int]], input_size: float, weight: float
) -> float:
    """The most that is kept at one time: activations, or the input alone of those without them."""
    changes = [(time, 0, count) for time, count in inputs] + [(time, 1, count) for time, count in activations]
    most, now = 0.0, [0, 0]
    for (time, which, count), (following, *_) in pairwise([*sorted(changes), (math.inf, 0, 0)]):
        now[which] = count
        if following > time:
            most = max(most, now[1] * weight + (now[0] - now[1]) * input_size)
    return most


def sentence(trace: Trace, found: Figures) -> str:
    """The trace and its figures in words: the text alternative of the whole picture."""
    if not trace.events:
        return trace.describe()
    done = f"{plain(found.throughput, 3)} micro-batches per {per(trace)}"
    if trace.unit == "s":  # of a real clock
        speed = (
            f"Its forward and backward boxes, put one after the other, would take {found.speed_up:.2f} times as long; "
            f"that is the speed-up over one device only if each device has hardware of its own. It does {done}."
        )
    else:
        speed = f"It is {found.speed_up:.2f} times as fast as one device without recomputation and does {done}."
    live = _by_stage([str(count) for count in found.live])
    return (
        f"{trace.describe()} {speed} A stage keeps the activations of at most {live} "
        f"micro-batch{'' if live == '1' else 'es'}, and at most {_by_stage([percent(part) for part in found.memory])} "
        f"of what one device would."
    )


def per(trace: Trace) -> str:
    """The unit of time by which a throughput counts: a simulated step is one of the clock, not one of training."""
    return {"s": "second", "steps": "step of the clock"}.get(trace.unit, trace.unit)


def percent(part: float) -> str:
    """A part of a whole to three digits: 25%, 3.12%."""
    return f"{plain(part * 100, 3)}%"


def _by_stage(values: list[str]) -> str:
    """One value if all stages agree, else one for each."""
    if len(set(values)) == 1:
        return values[0]
    return f"{', '.join(values[:-1])} and {values[-1]} (by stage)"


def moments(trace: Trace) -> list[float]:
    """The times at which a task starts or ends, in order: where the clock stops.

    Of times that differ by rounding alone, it stops at the last.
    """
    times = sorted({time for event in trace.events for time in (event.start, event.end)}) or [trace.start]
    return [time for time, following in pairwise([*times, math.inf]) if following - time > 1e-9 * trace.makespan]


def why_idle(trace: Trace, schedule: Schedule, device: int, time: float) -> str:
    """Say in a sentence why a device idles: which task it waits for, and where that is.

    Args:
        trace: measured or simulated.
        schedule: what it ran; it knows what each task waits for.
        device: one that runs nothing at the time.
        time: on the trace's clock; the sentence counts from the trace's start.
    """
    who = f"device {device}"
    after = [event for event in trace.on(device) if event.start >= time and event.end > time]
    if not after:
        return f"{who} has nothing left to do"
    task = after[0].task
    before = [event for event in map(trace.event_of, schedule.predecessors(task)) if event is not None]
    pending = [event for event in before if event.end > time]
    last = max(pending or [event for event in before if event.device != device], key=lambda e: e.end, default=None)
    starts = _at(trace, after[0].start)
    if last is None:
        why = "between tasks, or no free core"
        return f"{who} could start {task}: all that it needs is there. It starts at {starts} ({why})"
    what, where = last.task, f"device {last.device}"
    if not pending and trace.unit == "s":  # a real clock does not tell the wire from the wait for a core
        needed = "its gradient" if task.phase is Phase.BACKWARD else "its input"
        left, why = _at(trace, last.end), "on its way, or no free core"
        return f"{who} could start {task}: {needed} left {where} at {left}. It starts at {starts} ({why})"
    who += f" waits at time {_at(trace, time)} for"
    if not pending:
        return f"{who} the result of {what}, which left {where} at {_at(trace, last.end)} and is used from {starts}"
    if last.start <= time:
        return f"{who} {what}, which runs on {where} until {_at(trace, last.end)}"
    return f"{who} {what}, which {where} starts at {_at(trace, last.start)}"


def what_happens(trace: Trace, schedule: Schedule, device: int, time: float) -> str:
    """Say what a device does at a time, or why it does nothing; the arguments are those of :func:`why_idle`."""
    now = next((event for event in trace.on(device) if event.start <= time < event.end), None)
    if now is None:
        return why_idle(trace, schedule, device, time)
    return f"device {device} runs {now.task} until {_at(trace, now.end)}"


def _at(trace: Trace, time: float) -> str:
    """A time, from the trace's start; simulated steps go without saying."""
    scale, unit = time_unit(trace)
    return clock((time - trace.start) * scale) + ("" if unit == "steps" else f" {unit}")
