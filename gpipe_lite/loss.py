"""The loss of a micro-batch, and what it weighs in the mini-batch's.

A loss that averages averages over something: samples, or the tokens that are not masked. The mean of the
micro-batches' means is the mini-batch's mean only if each is weighted by what it averaged over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_lite.microbatch import map_tensors

LossFn = Callable[[Any, Any], Tensor]
Weight = Callable[[Any], float | Tensor]


@dataclass(frozen=True)
class LossHead:
    """What the last stage does with a micro-batch's output: compute its loss.

    Args:
        loss_fn: of an output and a target.
        targets: one a micro-batch.
        device: where the outputs are, and the targets are brought.
        kept: where outputs are kept, detached, by micro-batch; None to keep none.
    """

    loss_fn: LossFn
    targets: Sequence[Any]
    device: torch.device
    kept: dict[int, Any] | None = None

    def __call__(self, micro_batch: int, output: Any) -> Tensor:
        """The loss of a micro-batch.

        Raises:
            ValueError: if it is not one number.
        """
        if self.kept is not None:
            self.kept[micro_batch] = map_tensors(Tensor.detach, output)
        loss = self.loss_fn(output, map_tensors(lambda tensor: tensor.to(self.device), self.targets[micro_batch]))
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            what = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss function returned {what}; step() needs a floating-point tensor of shape ()")
        return loss


def micro_batch_weights(
    loss_fn: LossFn, targets: Sequence[Any], sizes: Sequence[int], weight: Weight | None = None
) -> list[float]:
    """Weights with which the micro-batches' losses add up to the mini-batch's.

    Args:
        loss_fn: its ``reduction`` attribute tells a sum from a mean; torch's cross-entropy and negative
            log-likelihood, as modules, functions or partials, tell which targets they ignore and how they weigh
            classes. Any other function is taken to average over samples.
        targets: one a micro-batch.
        sizes: samples of each micro-batch.
        weight: what the loss of a micro-batch averages over, given its target, where ``loss_fn`` cannot tell; such
            as ``lambda target: (target != pad).sum()``.

    Returns:
        M numbers: all 1 for a sum, else fractions that add up to 1; nan if there is nothing to average over,
        as for the whole mini-batch.

    Raises:
        TypeError: if one of the two is no function.
        ValueError: if ``loss_fn`` does not reduce to one number, or ``weight`` is none, negative, infinite, or given
            for a sum.
    """
    for name, given in (("loss_fn", loss_fn), ("weight", weight)):
        if not (callable(given) or (name == "weight" and given is None)):
            raise TypeError(f"{name} must be a function, not {given!r}")
    function, options = _options(loss_fn)
    reduction = _reduction(options)
    if reduction == "none":
        raise ValueError("the loss function has reduction='none'; step() needs one number, so use 'mean' or 'sum'")
    if reduction == "sum" and weight is not None:
        raise ValueError(
            "the loss function has reduction='sum', and weight is for one that averages: give one of the two"
        )
    if reduction == "sum":
        return [1.0] * len(sizes)
    counts = [
        _averages_over(function, options, target, size) if weight is None else _said(weight, target, m)
        for m, (target, size) in enumerate(zip(targets, sizes, strict=True))
    ]
    total = sum(counts)
    return [count / total if total else float("nan") for count in counts]


def seeds(
    weights: Sequence[float], device: torch.device, scale: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor | None]:
    """What the gradients of the micro-batches' losses start from.

    Args:
        weights: one a micro-batch.
        device: of the losses.
        scale: multiplies them.

    Returns:
        One a micro-batch, shape (). Where nothing counts, a loss is 0/0 and its gradient not a number: None.
    """
    plain = (torch.tensor(share, dtype=torch.float64, device=device) if share else None for share in weights)
    return [seed if seed is None or scale is None else scale(seed) for seed in plain]


def total(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mini-batch's loss, detached, without the micro-batches of which nothing counts."""
    parts = [loss.detach() * share for loss, share in zip(losses, weights, strict=True) if share]
    return torch.stack(parts).sum()


def _options(loss_fn: LossFn) -> tuple[Any, dict[str, Any]]:
    """The function or module type under partials and torch.compile, and the options that it was given."""
    options: dict[str, Any] = {}
    while True:
        if isinstance(loss_fn, partial):
            options = {**loss_fn.keywords, **options}
            loss_fn = loss_fn.func
        elif isinstance(loss_fn, FunctionType) and loss_fn.__globals__.get("__name__", "").startswith("torch._dynamo."):
            loss_fn = vars(loss_fn)["__wrapped__"]  # torch.compile wraps it, once or twice
        else:
            break
    if isinstance(loss_fn, FunctionType | BuiltinFunctionType):
        return loss_fn, options
    if isinstance(loss_fn, nn.Module):
        loss_fn = getattr(loss_fn, "_orig_mod", loss_fn)
    names = ("reduction", "ignore_index", "weight")
    options = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)} | options
    if _does_itself(loss_fn) and options.get("reduction") != "sum":
        options.pop("reduction", None)  # it may reduce what its base left as it was
    return type(loss_fn), options


def _does_itself(loss_fn: Any) -> bool:
    """Whether a loss is not one of torch's, or goes another way than its base."""
    forward = type(loss_fn).forward if isinstance(loss_fn, nn.Module) else None
    return getattr(forward, "__module__", "") != "torch.nn.modules.loss"


def _reduction(options: Mapping[str, Any]) -> str:
    """Its name; torch's functions still take two older options before it."""
    if options.get("reduce") is False:
        return "none"
    if options.get("size_average") is False:
        return "sum"
    return str(options.get("reduction", "mean"))


def _said(weight: Weight, target: Any, micro_batch: int) -> float:
    """What the user's function says."""
    count = weight(target)
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(f"weight returned a tensor of shape {tuple(count.shape)}, one number is needed: sum() it")
    if not 0 <= float(count) < math.inf:
        raise ValueError(f"weight is {float(count)} for micro-batch {micro_batch}: it counts something, so 0 or more")
    return float(count)


def _averages_over(function: Any, options: dict[str, Any], target: Any, size: int) -> float:
    modules = nn.CrossEntropyLoss, nn.NLLLoss, nn.LinearCrossEntropyLoss
    functions = functional.cross_entropy, functional.nll_loss, functional.linear_cross_entropy
    if isinstance(function, type):
        is_known = issubclass(function, modules) and any(function.forward is module.forward for module in modules)
    else:
        is_known = function in functions
    if not is_known or not isinstance(target, Tensor) or target.is_floating_point():
        return float(size)
    ignored = options.get("ignore_index")
    kept = target != (-100 if ignored is None else ignored)
    class_weights = options.get("weight")
    if class_weights is None:
        return float(kept.sum())
    return float(class_weights.to(target.device)[torch.where(kept, target, 0)][kept].sum())
