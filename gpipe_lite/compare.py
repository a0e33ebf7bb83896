"""How far results are apart, and how to get them unnoticed: what :mod:`gpipe_lite.lint` and ``verify`` share."""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from gpipe_lite.microbatch import flatten, map_tensors

Quantity = Literal["output", "loss", "gradient", "state"]


@dataclass(frozen=True)
class Difference:
    """How far a pipeline is from the plain model in one thing.

    Attributes:
        quantity: what kind of thing it is.
        layer: the name of the layer that it belongs to, or "".
        what: the thing, in words.
        largest: the largest absolute difference; infinite if something is missing or has another shape.
        allowed: how large it may be.
    """

    quantity: Quantity
    layer: str
    what: str
    largest: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether it is no larger than allowed."""
        return self.largest <= self.allowed

    def __str__(self) -> str:
        if self.largest == math.inf:
            return f"{self.what}: missing, not a number, or of another shape"
        return f"{self.what}: off by {self.largest:.2g}, and {self.allowed:.1g} is allowed"


@dataclass(frozen=True)
class Equivalence:
    """What :func:`gpipe_lite.verify.verify_equivalence` found.

    Attributes:
        differences: all that was compared, in the order in which it is computed.
    """

    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether all is as in the plain model."""
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first thing that differs; what comes after it may differ because of it."""
        return next((difference for difference in self.differences if not difference.ok), None)

    @property
    def largest(self) -> dict[Quantity, float]:
        """The largest difference of each kind."""
        found: dict[Quantity, float] = {}
        for difference in self.differences:
            found[difference.quantity] = max(difference.largest, found.get(difference.quantity, 0.0))
        return found

    def __str__(self) -> str:
        wrong = [str(difference) for difference in self.differences if not difference.ok]
        summary = "largest differences: " + ", ".join(f"{kind} {size:.2g}" for kind, size in self.largest.items())
        if not wrong:
            return f"equal to the plain model in all {len(self.differences)} things compared; {summary}"
        return f"{len(wrong)} of {len(self.differences)} things differ, first\n  " + "\n  ".join([*wrong, summary])


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run something, then put the random generators of torch, NumPy and Python back."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), torch.inference_mode(False):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def copied(batch: Any) -> Any:
    """A copy of a batch; its tensors require grad where the batch's do, and have no history."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), batch)


def device_of(batch: Any) -> torch.device:
    """The device of a batch's first tensor."""
    return next(leaf.device for leaf in flatten(batch)[0] if isinstance(leaf, Tensor))


def state_of(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's parameters and buffers, by name; a buffer that is not saved, too."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def called(name: str, layer: nn.Module) -> str:
    """How reports call a layer."""
    return f"layer {name!r} ({type(layer).__name__})"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nesting, and its numbers as such."""
    leaves = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor | int | float)]
    return [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64) for leaf in leaves]


def gap(one: Any, other: Any) -> float:
    """The largest absolute difference between two nestings' tensors; infinite if their shapes differ."""
    pair = tensors_in(one), tensors_in(other)
    if [tensor.shape for tensor in pair[0]] != [tensor.shape for tensor in pair[1]]:
        return math.inf
    return max((_gap(a, b) for a, b in zip(*pair, strict=True)), default=0.0)


def _gap(one: Tensor, other: Tensor) -> float:
    a, b = _exact(one), _exact(other)
    alike = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(alike, 0).nan_to_num(math.inf, math.inf).max()) if a.numel() else 0.0


def scale(tensors: Iterable[Tensor]) -> float:
    """The largest finite absolute value in some tensors."""
    sizes = (_exact(tensor).abs().nan_to_num(0, 0, 0).max() for tensor in tensors if tensor.numel())
    return max(map(float, sizes), default=0.0)


def tolerance_for(tensors: Iterable[Tensor]) -> float:
    """What rounding may do, as a share of the largest value: eps^(2/3) of the coarsest dtype."""
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return float(max((torch.finfo(dtype).eps for dtype in floats), default=0.0) ** (2 / 3))


def _exact(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, dense, in double precision, without history."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.to("cpu", torch.complex128 if dense.is_complex() else torch.float64)


def runs_like(whole: Sequence[Tensor], part: Sequence[Tensor], allowed: float) -> Iterator[tuple[range, int, float]]:
    """Find the runs of samples in a whole that a part of it may be.

    Args:
        whole: the tensors of a batch.
        part: those of some of its samples, in a row.
        allowed: how far the part's first sample may be from a run's; only the nearest run is found if all are further.

    Yields:
        A run, the number of samples that there are, and how far the part is from the run. If all shapes are equal, the
        whole counts as one sample.
    """
    if len(whole) != len(part):
        return
    pairs = [_samples_first(one, other) for one, other in zip(whole, part, strict=True)]
    samples, some = next((pair for pair in pairs if len(pair[0]) != len(pair[1])), (torch.ones(1), torch.ones(1)))
    for start in _likely_starts(samples, some, allowed):
        run = range(start, start + len(some))
        window = [one if len(one) == len(other) else one[run.start : run.stop] for one, other in pairs]
        yield run, len(samples), gap(window, [other for _, other in pairs])


def _samples_first(whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Samples lie along the first axis in which the shapes differ: inside a model it need not be axis 0."""
    whole, part = torch.atleast_1d(whole), torch.atleast_1d(part)
    sizes = zip(whole.shape, part.shape, strict=False)
    axis = next((axis for axis, (n, m) in enumerate(sizes) if n != m), 0)
    return whole.movedim(axis, 0), part.movedim(axis, 0)


def _likely_starts(whole: Tensor, part: Tensor, allowed: float) -> Sequence[int]:
    """Where a part of a whole may start, judged by its first sample; the likeliest place if it is near none."""
    num_starts = len(whole) - len(part) + 1
    if num_starts < 2 or whole.shape[1:] != part.shape[1:] or not part.numel():
        return range(num_starts)
    apart = (_exact(whole)[:num_starts] - _exact(part)[0]).nan_to_num().abs().reshape(num_starts, -1).amax(1)
    return (apart <= allowed).nonzero().flatten().tolist() or [int(apart.argmin())]
