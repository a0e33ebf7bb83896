"""BatchNorm in a pipeline: what its running statistics are statistics of.

In training a BatchNorm layer normalises each micro-batch by that micro-batch's own mean and variance, as in the
paper. Its running statistics, used in evaluation, can follow

- the micro-batches: each updates them once, recomputation not again;
- the mini-batch, as in the paper, *deferred*: the micro-batches' moments are gathered and update them once, when the
  last micro-batch has passed, to what the unsplit layer would have.

Source: Huang et al., *GPipe*, arXiv 1811.06965, section 2.2.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def layers_with_statistics(modules: Iterable[nn.Module]) -> list[_BatchNorm]:
    """The BatchNorm layers that keep running statistics."""
    return [module for module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]


def warn_of_statistics(model: nn.Module, num_micro_batches: int, stacklevel: int) -> None:
    """Warn of the first BatchNorm layer whose running statistics follow the micro-batches."""
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats:
            warnings.warn(
                f"layer {name!r} is a BatchNorm, and its running statistics follow the micro-batches, "
                f"{num_micro_batches} updates a mini-batch: pass deferred_batch_norm=True for those of the mini-batch, "
                "as the unsplit model has them",
                stacklevel=stacklevel,
            )
            return


@contextmanager
def statistics_left_alone(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """Run layers without updating their running statistics."""
    updating = [layer for layer in layers if layer.training]
    for layer in updating:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in updating:
            layer.track_running_stats = True


@dataclass(frozen=True)
class Moments:
    """Of some values, for each channel.

    Attributes:
        count: how many values a channel has.
        mean: their mean, shape (C,).
        squares: the sum of their squared distances from it, shape (C,).
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> "Moments":
        """Of a batch, shape (N, C, ...), computed in ``dtype``."""
        count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x.detach().to(dtype), [0, *range(2, x.dim())], correction=0)
        return cls(count, mean, variance * count)

    def __add__(self, other: "Moments") -> "Moments":
        """Of both sets of values together (Chan, Golub, LeVeque 1979: no difference of large numbers)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + apart.square() * (self.count * other.count / count)
        return Moments(count, mean, squares)


class DeferredStatistics:
    """Gathers the moments of a mini-batch's micro-batches on one stage, then updates the running statistics.

    Args:
        modules: the stage's layers with all their parts.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = layers_with_statistics(modules)
        self._moments: dict[_BatchNorm, list[Moments]] = {}  # of its first call in a pass, its second, ...

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Run the layers on a micro-batch, and gather."""
        training = [layer for layer in self._layers if layer.training]
        calls: dict[_BatchNorm, int] = {}
        hook = partial(self._gather, calls)
        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in training]
        try:
            with statistics_left_alone(training):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _gather(
        self, calls: dict[_BatchNorm, int], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        assert isinstance(layer, _BatchNorm)
        x = args[0] if args else kwargs["input"]
        assert layer.running_mean is not None
        dtype = torch.promote_types(layer.running_mean.dtype, torch.float32)  # squares overflow half precision
        moments, so_far = Moments.of(x, dtype), self._moments.setdefault(layer, [])
        call = calls[layer] = calls.get(layer, -1) + 1
        if call < len(so_far):
            so_far[call] += moments
        else:
            so_far.append(moments)

    @torch.no_grad()
    def update(self) -> None:
        """Update the running statistics as the unsplit layers would for the whole mini-batch."""
        for layer, calls in self._moments.items():
            mean, variance, tracked = layer.running_mean, layer.running_var, layer.num_batches_tracked
            assert mean is not None
            assert variance is not None
            for moments in calls:
                if tracked is not None:
                    tracked += 1
                momentum = layer.momentum
                if momentum is None:
                    assert tracked is not None
                    momentum = 1 / float(tracked)
                for statistic, of_batch in ((mean, moments.mean), (variance, moments.squares / (moments.count - 1))):
                    statistic.copy_(statistic.to(of_batch.dtype).lerp(of_batch, momentum))
        self._moments.clear()
