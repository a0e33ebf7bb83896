"""Buffers that a layer's forward pass writes, such as spectral normalisation's vectors: recomputation must not.

A recomputation has to compute what the forward pass computed, and leave behind what it left. So it runs on the
buffers as they were before the forward pass of its micro-batch, and afterwards the layer has its own back::

    buffer     u0 ─F(m=0)─► u1 ─F(m=1)─► u2 ─ R(m=1) on u1 ─ R(m=0) on u0 ─► u2

BatchNorm's running statistics do not enter what it computes in training, so they need no copies: see
:mod:`gpipe_lite.batchnorm`. Other layers of torch write no buffers.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""

Snapshot = Mapping[Place, Tensor]
"""Copies of buffers."""


class Buffers:
    """The buffers of layers that may write them, and how they were before each micro-batch.

    Args:
        modules: the layers with all their parts.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [
            (module, name)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and not _leaves_buffers_alone(module)
        ]
        self._copies: dict[Place, tuple[Tensor, int, Tensor]] = {}

    def snapshot(self) -> Snapshot:
        """Copy the buffers as they are. What was not written since the last time is not copied again."""
        for place in self._places:
            buffer = place[0]._buffers[place[1]]
            if buffer is None:
                self._copies.pop(place, None)
                continue
            last = self._copies.get(place)
            if last is None or last[0] is not buffer or last[1] != _version(buffer):
                self._copies[place] = buffer, _version(buffer), buffer.detach().clone()
        return {place: copy for place, (_, _, copy) in self._copies.items()}

    @contextmanager
    def as_of(self, snapshot: Snapshot) -> Iterator[None]:
        """Run layers on copies of the buffers as they were then."""
        now = {place: place[0]._buffers[place[1]] for place in snapshot}
        for (module, name), copy in snapshot.items():
            module._buffers[name] = copy.clone()
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _leaves_buffers_alone(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, and no hook on it does other things."""
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module).__module__.startswith("torch.nn.modules.") and not has_hooks
