"""Recomputation must find the layers as the forward pass found them, and leave them as they are.

Between the two, other micro-batches pass, and the user may do something. So that R computes what F computed

- it runs on the buffers as they were before the F of its micro-batch, for layers that write them in forward, such as
  spectral normalisation::

      buffer     u0 ─F(m=0)─► u1 ─F(m=1)─► u2 ─ R(m=1) on u1 ─ R(m=0) on u0 ─► u2

- it runs on the layers' attributes as the forward pass left them: their modes, training or evaluation, parameters,
  parts and hooks;
- parameters that were written to in between cannot be had back: that is refused;
- what else a layer may keep, such as the state of Python's random numbers, nobody can know. So a few values of what F
  made are kept, and R must make the same (:class:`Glimpse`).

BatchNorm's running statistics do not enter what it computes in training, so they need no copies: see
:mod:`gpipe_lite.batchnorm`. Other layers of torch write no buffers, but InstanceNorm that tracks statistics.
"""

import copy
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from gpipe_lite.randomness import is_plain

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""

_SMALL = 1 << 16  # elements

Copies = Mapping[Place, Tensor | None]
"""Of buffers."""


class Buffers:
    """The buffers of layers that may write them, and how they were before each micro-batch.

    Args:
        modules: the layers with all their parts.
        shared: parts that other stages run at the same time, so that their buffers may not be exchanged.
    """

    def __init__(self, modules: Iterable[nn.Module], shared: Container[nn.Module] = ()) -> None:
        writers = [module for module in modules if not _leaves_buffers_alone(module)]
        self._shared = [buffer for module in writers if module in shared for buffer in module.buffers(False)]
        self._shared_version = version(self._shared)
        writers = [module for module in writers if module not in shared]
        self._places = [(module, name) for module in writers for name, _ in module.named_buffers(recurse=False)]
        self._places += [(module, name) for module in writers for name in _empty_buffers(module)]
        self._last: dict[int, tuple[Tensor, int, Tensor]] = {}

    def copies(self) -> Copies:
        """Copy the buffers as they are. Large ones that were not written since the last time are not copied again.

        A write is told by the tensor's version, which some of torch's operators and ``.data`` pass by: so small ones
        are copied anyway. Two places that hold one tensor get one copy.

        Raises:
            RuntimeError: if a scripted layer has buffers.
        """
        copies: dict[Place, Tensor | None] = {}
        new: set[int] = set()
        for module, name in self._places:
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"a scripted layer has a buffer, {name!r}, which a recomputation could not give back to it: use "
                    'checkpoint="never", or the layer before it was scripted'
                )
            buffer = module._buffers.get(name)
            if buffer is None or is_lazy(buffer):
                copies[module, name] = None
                continue
            key, now = id(buffer), version([buffer])
            if not (key in new or (buffer.numel() > _SMALL and key in self._last and self._last[key][1] == now)):
                self._last[key] = buffer, now, buffer.detach().clone()
                new.add(key)
            copies[module, name] = self._last[key][2]
        return copies

    @contextmanager
    def as_of(self, copies: Copies) -> Iterator[None]:
        """Run layers on the buffers as they were then.

        Raises:
            RuntimeError: if layers write into a part that stages share.
        """
        if version(self._shared) != self._shared_version:
            raise RuntimeError(
                "a part of layers that several stages share writes into its buffers in forward, and a recomputation "
                'would write again: give each stage a part of its own, or use checkpoint="never"'
            )
        now = {place: place[0]._buffers.get(place[1]) for place in copies}
        clones = {id(buffer): buffer.clone() for buffer in copies.values() if buffer is not None}
        for (module, name), buffer in copies.items():
            module._buffers[name] = None if buffer is None else clones[id(buffer)]
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


class Layers:
    """The attributes of layers, as they are now.

    Args:
        modules: the layers with all their parts.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._were = [(module, _attributes(module), module.training) for module in modules]
        self._parameters = [p for module in modules if not _renormalises(module) for p in module.parameters(False)]
        self._version = version(self._parameters)

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Give the layers their attributes back for a while.

        Raises:
            RuntimeError: if a parameter was written to.
        """
        if version(self._parameters) != self._version:
            raise RuntimeError(
                "a parameter was modified in place between forward and backward, so that nothing can be recomputed: "
                'let optimizer.step() follow backward(), or use checkpoint="never"'
            )
        changed = [(m, vars(m), were) for m, were, _ in self._were if not _is_same(vars(m), were)]
        for module, _, were in changed:
            object.__setattr__(module, "__dict__", were)
        switched = [(m, m.training, mode) for m, _, mode in self._were if m.training != mode]  # scripted modules
        for module, _, mode in switched:
            module.training = mode
        try:
            yield
        finally:
            for module, mode, _ in switched:
                module.training = mode
            for module, now, _ in changed:
                object.__setattr__(module, "__dict__", now)


class Glimpse:
    """A few values of each tensor that a forward pass made, to see whether its recomputation made the same.

    Args:
        leaves: what it made.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        dense = [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_nested]
        self._forms = len(tensors), [(tensor.shape, tensor.dtype) for tensor in dense]
        self._values = list(map(_some, dense))

    def has_form_of(self, other: "Glimpse") -> bool:
        """Whether both are of as many tensors, of the same shapes and dtypes."""
        return self._forms == other._forms

    def resembles(self, other: "Glimpse") -> bool:
        """Whether both are of the same tensors, to within what sums in another order may differ."""
        if not self.has_form_of(other):
            return False
        return all(_is_near(one, another) for one, another in zip(self._values, other._values, strict=True))


def _some(tensor: Tensor) -> Tensor:
    """Some 256 values from everywhere in a tensor; an odd step passes through all columns of a matrix."""
    step = tensor.numel() // 256 | 1
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)  # torch compares no others
    return tensor.detach().reshape(-1)[::step].clone()


def _is_near(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    tolerance = torch.finfo(one.dtype).eps ** 0.5 * float(one.abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module is made of now; its parameters, parts and hooks are in dicts of their own."""
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}


def _is_same(now: Mapping[str, Any], were: Mapping[str, Any]) -> bool:
    """Whether both hold the same objects, also in what they hold by dicts."""
    return now.keys() == were.keys() and all(
        value is now[name] or (isinstance(value, dict) and isinstance(now[name], dict) and _is_same(now[name], value))
        for name, value in were.items()
    )


def version(tensors: Iterable[Tensor]) -> int:
    """Changes whenever one of the tensors is written to."""
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def _empty_buffers(module: nn.Module) -> list[str]:
    """The names of buffers that are None so far."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    return [name for name, buffer in module._buffers.items() if buffer is None]


def _renormalises(module: nn.Module) -> bool:
    """Whether a module writes into its own weight in each forward pass, and finds it written in the next."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


def _leaves_buffers_alone(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that writes no buffers that enter what it computes."""
    return is_plain(module) and not isinstance(module, _InstanceNorm)
