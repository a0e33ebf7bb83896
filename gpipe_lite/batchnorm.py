"""BatchNorm in a pipeline: each micro-batch updates the running statistics once, recomputation not again.

In training a BatchNorm layer normalises each micro-batch by that micro-batch's own mean and variance, as in the
paper, and its running statistics, used in evaluation, follow those.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def layers_with_statistics(layers: nn.Module) -> list[_NormBase]:
    """The layers that keep running statistics: BatchNorm, and InstanceNorm if told to."""
    return [layer for layer in layers.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]


@contextmanager
def statistics_left_alone(layers: Sequence[_NormBase]) -> Iterator[None]:
    """Run layers again without updating their running statistics again."""
    updating = [layer for layer in layers if layer.training]
    for layer in updating:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in updating:
            layer.track_running_stats = True
