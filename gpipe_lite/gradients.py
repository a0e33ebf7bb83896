"""The parameters' gradients, summed over the micro-batches.

Autograd hands out a gradient for each micro-batch, and may hand the same tensor to two parameters. So the first is kept
as it is, the second makes a new tensor, and the following are added to that in place.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class GradientSums:
    """The sums of one stage.

    Args:
        parameters: whose gradients; those that require grad.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.clear()

    def cover(self, parameter: nn.Parameter) -> None:
        """Take a further parameter in, before anything is added."""
        if all(parameter is not known for known in self.parameters):
            self.parameters.append(parameter)
            self.clear()

    def clear(self) -> None:
        """Start anew."""
        self._sums: list[Tensor | None] = [None] * len(self.parameters)
        self._own = [False] * len(self.parameters)  # whether a sum is a tensor that nobody else has

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add a micro-batch's gradients, one a parameter, None for those that have none."""
        totals, addends = [], []
        for i, gradient in enumerate(gradients):
            total = self._sums[i]
            if gradient is None:
                continue
            if total is None:
                self._sums[i] = gradient
            elif self._own[i] and not total.is_sparse:
                totals.append(total)
                addends.append(gradient)
            else:
                self._sums[i], self._own[i] = _sum(total, gradient), True
        if totals:
            torch._foreach_add_(totals, addends)

    def take(self) -> dict[int, Tensor]:
        """Hand over the sums, by the parameters' ids, and start anew."""
        sums = {
            id(p): total if own or _is_whole(total) else total.clone()
            for p, total, own in zip(self.parameters, self._sums, self._own, strict=True)
            if total is not None
        }
        self.clear()
        return sums


def merged(stages: Iterable[GradientSums], parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Take the stages' sums. Those of a parameter that stages share are added in the stages' order.

    Args:
        stages: their sums, taken.
        parameters: in which order the result is.
    """
    totals: dict[int, Tensor] = {}
    for sums in stages:
        for key, gradient in sums.take().items():
            totals[key] = _sum(totals[key], gradient) if key in totals else gradient
    return [totals.get(id(parameter)) for parameter in parameters]


@contextmanager
def hooks_set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep the hooks on parameters from firing in the stages: they fire once, when the whole gradient is there."""
    hooks = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooks:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, its in hooks:
            parameter._backward_hooks = its


def ends(roots: Iterable[Tensor]) -> list[Tensor]:
    """The tensors at which a graph ends: all that require grad and were not computed."""
    found, nodes = [], []
    for root in roots:
        if root.grad_fn is not None:
            nodes.append(root.grad_fn)
        elif root.requires_grad:
            found.append(root)
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (tensor := getattr(node, "variable", None)) is not None:
            found.append(tensor)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def _is_whole(gradient: Tensor) -> bool:
    """Whether a gradient is not a part of a larger tensor, such as one micro-batch's rows of the output's gradient."""
    return gradient.layout != torch.strided or gradient.untyped_storage().nbytes() == gradient.nbytes


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """The sum, as a new tensor; embeddings may have sparse gradients."""
    return other + one if one.is_sparse and not other.is_sparse else one + other
