"""How a tensor crosses from one device to another, so that copies and computation overlap.

CPU stages share memory: nothing is copied. A CUDA device computes on its current stream and copies on a stream of
its own::

    device 0   compute ──F0──●──F1──►            ● event: F0's output is ready
               copy          └─▶ copy ─┐         the copy waits for the event, not for F1
    device 1   copy                    └─●       device 1 computes when its copy stream got there
               compute                   └──F0──►

``record_stream`` tells the allocator that a second stream still uses a tensor, so that its memory is not handed
out while the copy runs.
"""

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:  # pragma: no cover - needs CUDA
    return torch.cuda.Stream(device)


Ready = Mapping[torch.device, torch.cuda.Event]
"""For each CUDA device, the point in its work after which a value may be read. Empty on the CPU."""


def mark(devices: Iterable[torch.device]) -> Ready:
    """Mark the points in the devices' work at which what they computed so far is ready."""
    events = {}
    for device in devices:
        if device.type == "cuda":  # pragma: no cover - needs CUDA
            events[device] = torch.cuda.Event()
            events[device].record(torch.cuda.current_stream(device))
    return events


def receive(tensor: Tensor, ready: Ready, device: torch.device) -> Tensor:
    """Bring a tensor to ``device`` and make the device's current stream wait until it is there.

    Args:
        tensor: without gradient history; on any device.
        ready: from :func:`mark`; after its events ``tensor`` may be read.
        device: where it is needed.

    Returns:
        The tensor itself if it is there already, else a copy.
    """
    source = tensor.device
    if "cuda" not in (source.type, device.type):
        return tensor.to(device)  # the tensor itself, if it is there
    return _through_streams(tensor, ready, device)


def _through_streams(tensor: Tensor, ready: Ready, device: torch.device) -> Tensor:  # pragma: no cover - needs CUDA
    source = tensor.device
    if source == device:
        here = torch.cuda.current_stream(device)
        if source in ready:
            here.wait_event(ready[source])
        tensor.record_stream(here)
        return tensor
    if source.type == "cuda":
        leaving = _copy_stream(source)
        if source in ready:
            leaving.wait_event(ready[source])
        tensor.record_stream(leaving)
        with torch.cuda.stream(leaving):
            if device.type != "cuda":
                return tensor.to(device)  # blocks until the data is there: the host is about to read it
            with torch.cuda.stream(_copy_stream(device)):
                copy = tensor.to(device, non_blocking=True)
    else:
        with torch.cuda.stream(_copy_stream(device)):
            copy = tensor.to(device, non_blocking=True)
    here = torch.cuda.current_stream(device)
    here.wait_stream(_copy_stream(device))
    copy.record_stream(here)
    return copy
