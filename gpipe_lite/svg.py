"""A timeline as SVG text: small, crisp at any size, and made in a millisecond or two.

The looks are those of :mod:`gpipe_lite.plot`: Okabe and Ito's colours, which never stand alone, since every box is
outlined, backward boxes are hatched, and a box that is wide enough says its micro-batch. Text and outlines take the
page's own colour and the background is left free, so that the picture reads on light pages and on dark ones. The
whole carries a sentence for those who cannot see it; hovering over a box says what it is.
"""

import math
from collections.abc import Iterator
from html import escape
from zlib import crc32

from gpipe_lite.plot import FILL, HATCH, INK, plain, time_unit
from gpipe_lite.plot import clock as shown
from gpipe_lite.schedule import Phase
from gpipe_lite.trace import PHASE_NAMES, Event, Trace

WIDTH, WIDEST = 840, 960  # of the view box, in whose units all lengths are; of the picture on a wide page, in pixels
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 50, 44
FONT = 12.5  # the micro-batch numbers; they shrink to 0.7 of it before they are left out
TITLE = 36  # characters of a name, so that it never runs into the legend
DIGIT = 0.62  # the width of a digit, of its size, in the usual sans-serif fonts


def timeline(
    trace: Trace, title: str = "", *, alt: str = "", until: float | None = None, clock: float | None = None
) -> str:
    """Draw what ran when: a row a device, a box a task, idle time blank.

    Args:
        trace: measured or simulated.
        title: stands before the makespan and the bubble; the trace's name unless given.
        alt: the sentence that says what the picture shows; the trace's description unless given.
        until: the end of the axis of time, counted from the trace's start in its unit; its makespan unless given.
        clock: where a line marks the time, on the trace's own clock.

    Returns:
        An ``<svg>`` element, which is XML and stands in a page of HTML as well.
    """
    scale, unit = time_unit(trace)
    until = until or trace.makespan or 1 / scale
    row = min(32.0, max(15.0, 256 / max(1, trace.num_devices)))
    bottom = TOP + row * trace.num_devices
    zoom = (WIDTH - LEFT - RIGHT) / until
    alt = _clean(alt or trace.describe())
    hatch = f"hatch-{crc32(alt.encode()):08x}"  # an id of its own: another picture's may be hidden with its cell
    unit = escape(_clean(unit))
    figures = f"{plain(trace.makespan * scale, 4)} {unit}, bubble {trace.bubble_fraction:.0%}"
    name = _clean(title or trace.name)
    name = name if len(name) <= TITLE else name[: TITLE - 1] + "…"
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM:g}" role="img" '
            f'aria-label="{escape(alt)}" font-family="sans-serif" font-size="{FONT:g}" fill="currentColor" '
            f'style="display:block;width:100%;max-width:{WIDEST}px;height:auto">',
            f'<defs><pattern id="{hatch}" width="7" height="7" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><path d="M0 0h7v7h-7z" fill="{FILL[Phase.BACKWARD]}"/>'
            '<path d="M0 0v7" stroke="black" stroke-width="1"/></pattern></defs>',
            f'<text x="{LEFT}" y="18" font-size="14">{f"{escape(name)}: {figures}" if name else figures}</text>',
            *_legend(trace, hatch),
            *_boxes(trace, hatch, scale, unit, zoom, row),
            *_axis(trace.num_devices, until * scale, unit, row, bottom),
            *(() if clock is None else _clock(clock - trace.start, scale, unit, zoom, bottom)),
            "</svg>",
        ]
    )


def _clean(text: str) -> str:
    """Text without the control characters that XML forbids."""
    return "".join(character if character.isprintable() else " " for character in text)


def _fill(phase: Phase, hatch: str) -> str:
    """A phase's colour, hatched or not; a viewer that does not know the hatching shows the colour."""
    return f"url(#{hatch}) {FILL[phase]}" if HATCH[phase] else FILL[phase]


def _legend(trace: Trace, hatch: str) -> Iterator[str]:
    """What the boxes mean, on the title's line."""
    ran = {event.task.phase for event in trace.events}
    entries = [(PHASE_NAMES[phase], _fill(phase, hatch)) for phase in Phase if phase in ran] + [("idle", "none")]
    widths = [22 + 0.55 * FONT * len(name) for name, _ in entries]
    x = WIDTH - RIGHT - sum(widths) - 14 * (len(entries) - 1)
    for (name, fill), width in zip(entries, widths, strict=True):
        yield f'<path d="M{x:g} 8h16v12h-16z" fill="{fill}" stroke="currentColor"/>'
        yield f'<text x="{x + 22:g}" y="18">{name}</text>'
        x += width + 14


def _boxes(trace: Trace, hatch: str, scale: float, unit: str, zoom: float, row: float) -> Iterator[str]:
    """A rectangle for each task, and the numbers on top of them."""
    height = f'height="{row * 0.86:.4g}"'
    tops = [f"{TOP + row * (device + 0.07):.6g}" for device in range(trace.num_devices)]
    middles = [f"{TOP + row * (device + 0.5) + 0.36 * FONT:.6g}" for device in range(trace.num_devices)]
    digits = [len(str(micro_batch)) for micro_batch in range(trace.num_micro_batches)]
    start = trace.start
    times = {time for event in trace.events for time in (event.start, event.end)}  # a task often ends when others start
    said = {time: shown((time - start) * scale) for time in times}
    by_phase: dict[Phase, list[Event]] = {phase: [] for phase in Phase}
    for event in trace.events:
        by_phase[event.task.phase].append(event)
    for phase, events in by_phase.items():
        letter, name = str(phase), PHASE_NAMES[phase]
        halo = ' stroke="white" stroke-width="3" stroke-linejoin="round" paint-order="stroke"' if HATCH[phase] else ""
        margin = 5 if halo else 3
        narrow = margin + 0.7 * FONT * DIGIT
        boxes, numbers = [], []
        for event in events:
            stage, micro_batch, device = event.task.stage, event.task.micro_batch, event.device
            begin, end = event.start, event.end
            x, width = LEFT + (begin - start) * zoom, (end - begin) * zoom
            thin = f' stroke-width="{0.1 + 0.15 * width:.2f}"' if width < 6 else ""  # an outline, not the box's colour
            boxes.append(
                f'<rect x="{x:.2f}" y="{tops[device]}" width="{width:.2f}" {height}{thin}><title>'
                f"{letter}({stage},{micro_batch}): {name} of micro-batch {micro_batch} on stage {stage}, "
                f"device {device}, from {said[begin]} to {said[end]} {unit}</title></rect>"
            )
            if width >= narrow:
                size = (width - margin) / (DIGIT * digits[micro_batch])
                if size >= 0.7 * FONT:
                    small = f' font-size="{size:.3g}"' if size < FONT else ""
                    numbers.append(f'<text x="{x + width / 2:.2f}" y="{middles[device]}"{small}>{micro_batch}</text>')
        yield f'<g fill="{_fill(phase, hatch)}" stroke="currentColor">'
        yield from boxes
        yield f'</g><g text-anchor="middle" fill="{INK[phase]}" pointer-events="none"{halo}>'
        yield from numbers
        yield "</g>"


def _axis(num_devices: int, until: float, unit: str, row: float, bottom: float) -> Iterator[str]:
    """The devices' names, and round times below."""
    for device in range(num_devices):
        yield (
            f'<text x="{LEFT - 8}" y="{TOP + row * (device + 0.5) + 0.36 * FONT:.6g}" text-anchor="end">'
            f"device {device}</text>"
        )
    yield f'<path d="M{LEFT} {bottom + 4:g}H{WIDTH - RIGHT}" stroke="currentColor"/><g text-anchor="middle">'
    step = 10.0 ** math.floor(math.log10(until / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if until / (step * factor) <= 12)
    for tick in range(math.floor(until / step * (1 + 1e-9)) + 1):
        x = LEFT + (WIDTH - LEFT - RIGHT) * tick * step / until
        yield (
            f'<path d="M{x:.2f} {bottom + 4:g}v4" stroke="currentColor"/>'
            f'<text x="{x:.2f}" y="{bottom + 20:g}">{plain(tick * step, 6)}</text>'
        )
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{bottom + 38:g}">time, {unit}</text></g>'


def _clock(time: float, scale: float, unit: str, zoom: float, bottom: float) -> Iterator[str]:
    """A line through all devices at the time, with the time above."""
    x = LEFT + time * zoom
    anchor = "end" if x > WIDTH - 120 else "start"
    text = f"time {shown(time * scale)} {unit}"
    yield (
        f'<path d="M{x:.2f} {TOP - 2}V{bottom + 4:g}" stroke="currentColor" stroke-width="2" stroke-dasharray="5 3"/>'
        f'<path d="M{x:.2f} {TOP - 2}l-5 -8h10z"/>'
        f'<text x="{x + (8 if anchor == "start" else -8):.2f}" y="{TOP - 6}" text-anchor="{anchor}">{text}</text>'
    )
