"""Recomputation must find the layers as the forward pass found them, and leave them as they are.

Between the two, other micro-batches pass, and the user may do something. So that R computes what F computed

- it runs on the buffers as they were before the F of its micro-batch, for layers that write them in forward, such as
  spectral normalisation::

      buffer     u0 ─F(m=0)─► u1 ─F(m=1)─► u2 ─ R(m=1) on u1 ─ R(m=0) on u0 ─► u2

- it runs in the layers' modes, training or evaluation, and on the parameters, that they had in the forward pass;
- parameters that were written to in between cannot be had back: that is refused.

BatchNorm's running statistics do not enter what it computes in training, so they need no copies: see
:mod:`gpipe_lite.batchnorm`. Other layers of torch write no buffers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers or parameters."""

Copies = Mapping[Place, Tensor]
"""Of buffers."""


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
        self._last: dict[Place, tuple[Tensor, int, Tensor]] = {}

    def copies(self) -> Copies:
        """Copy the buffers as they are. What was not written since the last time is not copied again."""
        copies = {}
        for place in self._places:
            buffer = place[0]._buffers[place[1]]
            if buffer is None:
                continue
            last = self._last.get(place)
            if last is None or last[0] is not buffer or last[1] != version([buffer]):
                last = self._last[place] = buffer, version([buffer]), buffer.detach().clone()
            copies[place] = last[2]
        return copies

    @contextmanager
    def as_of(self, copies: Copies) -> Iterator[None]:
        """Run layers on the buffers as they were then."""
        now = {place: place[0]._buffers[place[1]] for place in copies}
        for (module, name), copy in copies.items():
            module._buffers[name] = copy.clone()
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


class Layers:
    """Parameters and modes of layers, as they are now.

    Args:
        modules: the layers with all their parts.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules]
        self._parameters = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._version = self._written()

    def _written(self) -> int:
        return version(parameter for _, _, parameter in self._parameters)

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Give the layers their modes and parameters back for a while.

        Raises:
            RuntimeError: if a parameter was written to.
        """
        if self._written() != self._version:
            raise RuntimeError(
                "a parameter was modified in place between forward and backward, so that nothing can be recomputed: "
                'let optimizer.step() follow backward(), or use checkpoint="never"'
            )
        modes = [(module, module.training, mode) for module, mode in self._modes if module.training != mode]
        parameters = [
            (module, name, module._parameters.get(name), parameter)
            for module, name, parameter in self._parameters
            if module._parameters.get(name) is not parameter
        ]
        for module, _, mode in modes:
            module.training = mode
        for module, name, _, parameter in parameters:
            module._parameters[name] = parameter
        try:
            yield
        finally:
            for module, mode, _ in modes:
                module.training = mode
            for module, name, now, _ in parameters:
                module._parameters[name] = now


def version(tensors: Iterable[Tensor]) -> int:
    """Changes whenever one of the tensors is written to."""
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def _leaves_buffers_alone(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, and no hook on it does other things."""
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module).__module__.startswith("torch.nn.modules.") and not has_hooks
