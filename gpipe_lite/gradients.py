"""The parameters' gradients, summed over the micro-batches.

Autograd hands out a gradient for each micro-batch, and may hand the same tensor to two parameters. So the first is kept
as it is, the second makes a new tensor, and the following are added to that in place.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


_aside: dict[int, tuple[Any, int]] = {}
"""Hooks, and how many stages have set them aside at the moment, by their parameters' ids."""

_setting_aside = threading.Lock()


@contextmanager
def hooks_set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Keep the hooks on parameters from firing in a stage: they fire once, when the whole gradient is there."""
    with _setting_aside:
        mine = [parameter for parameter in parameters if parameter._backward_hooks or id(parameter) in _aside]
        for parameter in mine:
            hooks, users = _aside.get(id(parameter), (parameter._backward_hooks, 0))
            _aside[id(parameter)] = hooks, users + 1
            parameter._backward_hooks = None
    try:
        yield
    finally:
        with _setting_aside:
            for parameter in mine:
                hooks, users = _aside.pop(id(parameter))
                if users > 1:
                    _aside[id(parameter)] = hooks, users - 1
                else:
                    parameter._backward_hooks = hooks


def strangers(roots: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """The tensors at which a graph ends, all that require grad and were not computed, but for the known ones.

    Args:
        roots: what the graph computed.
        known: where it may end; of those that were computed themselves, the graph before them does not count.
    """
    known = list(known)
    ids, seen = set(map(id, known)), {None, *(tensor.grad_fn for tensor in known)}
    found, nodes = [], []
    for root in roots:
        if root.grad_fn is None and root.requires_grad and id(root) not in ids:
            found.append(root)
        elif root.grad_fn not in seen:
            seen.add(root.grad_fn)
            nodes.append(root.grad_fn)
    while nodes:
        node = nodes.pop()
        assert node is not None
        tensor = getattr(node, "variable", None)  # of AccumulateGrad; other nodes are the user's, and may have one
        if isinstance(tensor, Tensor) and not node.next_functions and id(tensor) not in ids:
            found.append(tensor)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def _is_whole(gradient: Tensor) -> bool:
    """Whether a gradient is not a part of a larger tensor, such as one micro-batch's rows of the output's gradient."""
    return gradient.layout != torch.strided or gradient.untyped_storage().nbytes() == gradient.nbytes


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """The sum, as a new tensor; embeddings may have sparse gradients."""
    return other + one if one.is_sparse and not other.is_sparse else one + other
