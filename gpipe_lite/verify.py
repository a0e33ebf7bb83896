"""For assignments and for doubt: does a pipeline, anyone's, compute what the plain model computes?

One step of each is run on copies, and compared in the order in which things are computed, so that the first one that
differs is the one to look at::

    outputs of layers 0, 1, 2 ─► the loss ─► gradients of layers 2, 1, 0 ─► parameters and buffers afterwards

Whether a model can be cut at all, :func:`lint` tells.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_lite.compare import (
    Difference,
    Equivalence,
    called,
    copied,
    device_of,
    gap,
    runs_like,
    scale,
    state_of,
    tensors_in,
    tolerance_for,
    undisturbed,
)
from gpipe_lite.lint import Finding, lint
from gpipe_lite.loss import LossFn
from gpipe_lite.microbatch import batch_size, flatten, map_tensors, merge
from gpipe_lite.partition import check_model

__all__ = ["Difference", "Equivalence", "Finding", "lint", "verify_equivalence"]


def verify_equivalence(
    model: nn.Sequential,
    pipe: Any,
    x: Any,
    y: Any,
    loss_fn: LossFn,
    *,
    tolerance: float | None = None,
    **options: Any,
) -> Equivalence:
    """Compare one step of a pipeline with the plain model's on the whole mini-batch.

    Compared are the outputs of each layer, the loss, all gradients, and the parameters, buffers and modes afterwards,
    also those of a loss that is an ``nn.Module``. Some layers cannot do on micro-batches what they do on the whole:
    BatchNorm in training, active dropout, and what changes buffers in its forward pass. With one of them the plain
    layers run over the same micro-batches instead, and the loss is that of their outputs together. Running statistics
    must then have followed the micro-batches, or the mini-batch if ``pipe.deferred_batch_norm``. Dropout drops in the
    plain model what it dropped in the pipe's forward pass, so a recomputation that drops other units shows. Models that
    draw other random numbers are refused.

    The model, the pipe, the batch and all random generators stay as they are.

    Args:
        model: the plain model.
        pipe: a :class:`GPipe`, or an engine of your own: something with ``step(x, y, loss_fn)``, which adds to the
            parameters' ``.grad``, where something stands already, and returns the loss, or a result whose ``loss`` it
            is. It holds the model's own
            layers, or is an ``nn.Module`` whose children have their names and weights.
        x: the mini-batch. What requires grad in it must get its gradient, too.
        y: the target.
        loss_fn: of output and target; a tensor of shape ``()``.
        tolerance: how much may differ, as a share of the largest value that the plain model has: in the layer's
            output, the loss, all gradients, or the parameter or buffer. None is eps^(2/3) of the dtype: 4e-11 in
            float64, where the smallest mistake shows, and 2e-5 in float32, which hides what is lost of a parameter
            whose gradient is smaller than that beside the largest.
        options: handed to ``step``, such as GPipe's ``weight``.

    Raises:
        TypeError: if the model is no chain of layers.
        ValueError: if nothing can be compared: the pipe lacks a layer, starts from other weights or in another mode,
            or the model draws random numbers.
        Exception: the pipe's own, if it cannot be copied or its step fails.
    """
    check_model(model)
    with undisturbed(), torch.enable_grad():
        pipe_copy, layers = _copy_pipe(pipe, model)
        _check_start(model, layers)
        rehearsals = [_run_plain(model, x, y, loss_fn) for _ in range(2)]
        _check_repeats(model, *rehearsals)
        masks = _record_masks(layers)
        found = _observe(layers, x, loss_fn, lambda x, loss: pipe_copy.step(x, y, loss, **options), rehearsals[0])
        defers = bool(getattr(pipe, "deferred_batch_norm", False))
        runs = _micro_batches(x, found.received) if _depends_on_micro_batches(model, rehearsals[0]) else None
        expected = _run_plain(model, x, y, loss_fn, runs, masks, defers)
    return Equivalence(tuple(_compare(model, expected, found, tolerance)))


Call = Sequence[Tensor]
"""The tensors that a layer was given, or returned, in one call."""

Masks = dict[str, list[tuple[Tensor, Tensor]]]
"""Of each dropout, by name: the input of each call, and what it was multiplied by."""

Place = tuple[str, str]
"""A layer's name, and that of a parameter or buffer in it."""

_LOSS = "the loss"
"""The name of a loss that is a module, where a layer's would stand."""


@dataclass(frozen=True)
class _Step:
    """What a step computed."""

    received: list[Call]  # by the first layer
    outputs: dict[str, list[Call]]  # by layer
    loss: Call
    gradients: dict[Place, Tensor]
    state: dict[Place, Tensor]
    stood: dict[Place, Tensor]  # in .grad when the step started


def _copy_pipe(pipe: Any, model: nn.Sequential) -> tuple[Any, dict[str, nn.Module]]:
    """A copy of the pipe, and the copy's layers by their names in the model."""
    copies: dict[int, Any] = {}
    try:
        pipe_copy = copy.deepcopy(pipe, copies)
    except Exception as error:
        error.add_note("the pipe is verified on a deep copy: let it make threads, locks and queues in step()")
        raise
    children = dict(pipe_copy.named_children()) if isinstance(pipe_copy, nn.Module) else {}
    layers: dict[str, nn.Module] = {}
    for name, layer in model.named_children():
        if (its_copy := copies.get(id(layer), children.get(name))) is None:
            raise ValueError(
                f"the pipe has no {called(name, layer)}: build it from the model's own layers, or, as an nn.Module, "
                "give its children the model's names"
            )
        layers[name] = its_copy
    return pipe_copy, layers


def _check_start(model: nn.Sequential, layers: Mapping[str, nn.Module]) -> None:
    for name, layer in model.named_children():
        other = state_of(layers[name])
        for key, tensor in state_of(layer).items():
            if apart := gap(tensor, other.get(key, ())):
                raise ValueError(
                    f"before the step, {name}.{key} of the pipe is off by {apart:.2g}: start from the model's weights, "
                    "pipe.load_state_dict(model.state_dict())"
                )
        if [part.training for part in layer.modules()] != [part.training for part in layers[name].modules()]:
            raise ValueError(
                f"{called(name, layer)} trains in one of model and pipe only: call train() or eval() on both"
            )


def _check_repeats(model: nn.Sequential, one: _Step, other: _Step) -> None:
    for name, layer in model.named_children():
        if gap(one.outputs[name], other.outputs[name]):
            raise ValueError(
                f"{called(name, layer)} makes something else of one batch each time, so there is nothing to compare "
                "with: put it in evaluation mode, or set its p to 0"
            )


def _depends_on_micro_batches(model: nn.Sequential, rehearsal: _Step) -> bool:
    """Whether layers rightly compute something else on micro-batches than on the whole."""
    layers = dict(model.named_children())
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    return (
        any(norm.training or norm.running_mean is None for norm in norms)
        or any(True for _ in _dropouts(layers))
        or any(gap(tensor, rehearsal.state[place]) for place, tensor in _by_place(layers, state_of).items())
    )


def _micro_batches(x: Any, received: Sequence[Call]) -> list[range]:
    """The samples of each call of the pipe's first layer, from the first to the last; what it left out joins the last.

    A call is looked up by its values. Equal samples may be any of several, so each call is used once.
    """
    whole, num_samples = tensors_in(x), batch_size(x)
    calls = []  # of each, where it may start, and where it stops then
    for part in received:
        runs = [
            (run if total > 1 else range(num_samples)) for run, total, apart in runs_like(whole, part, 0.0) if not apart
        ]
        calls.append({run.start: run.stop for run in runs if run})
    cuts = [0]
    while stops := next((stops for stops in calls if cuts[-1] in stops), None):
        calls.remove(stops)
        cuts.append(stops[cuts[-1]])
    return [range(start, stop) for start, stop in pairwise([0, *cuts[1:-1], num_samples])]


def _run_plain(
    model: nn.Sequential,
    x: Any,
    y: Any,
    loss_fn: LossFn,
    runs: Sequence[range] | None = None,
    masks: Masks | None = None,
    defers: bool = False,
) -> _Step:
    """A step of a copy of the plain model, over these micro-batches, which drops by the masks, or not at all."""
    model = copy.deepcopy(model).to(device_of(x))
    layers = dict(model.named_children())
    _drop_by(masks or {}, layers)

    def step(x: Any, loss_fn: LossFn) -> Tensor:
        pieces = [x] if runs is None else [map_tensors(itemgetter(slice(run.start, run.stop)), x) for run in runs]
        with _deferring(model, len(pieces)) if defers else nullcontext():
            loss = loss_fn(merge([model(piece) for piece in pieces]), y)
            loss.backward()
        return loss

    return _observe(layers, x, loss_fn, step)


def _observe(
    layers: Mapping[str, nn.Module],
    x: Any,
    loss_fn: LossFn,
    step: Callable[[Any, LossFn], Any],
    before: _Step | None = None,
) -> _Step:
    """Run a step on copies of the batch and the loss.

    With another step given, something of the size of its gradients stands in ``.grad`` when the step starts, and is
    subtracted afterwards, so that a step which does not add to it shows.
    """
    received, outputs = list[list[Call]](), dict[str, list[Call]]()
    for name, layer in layers.items():
        given, outputs[name] = _watch(layer)
        received.append(given)
    loss_fn = copy.deepcopy(loss_fn)
    parts = {**layers, _LOSS: loss_fn} if isinstance(loss_fn, nn.Module) else layers
    parameters = _by_place(parts, lambda part: dict(part.named_parameters()))
    stood = {}
    for place, parameter in parameters.items():
        parameter.grad = None
        if before and parameter.requires_grad and (largest := scale([before.gradients[place]])):
            stood[place] = torch.full_like(parameter, 2.0 ** math.frexp(largest)[1])  # a power of two rounds least
            parameter.grad = stood[place].clone()
    roots = copied(x)
    result = step(map_tensors(Tensor.clone, roots), loss_fn)  # a layer may write into a clone, but not into a leaf
    wanted = [leaf for leaf in flatten(roots)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients = {("", f"x, tensor {i}"): _gradient(leaf) for i, leaf in enumerate(wanted)}
    gradients |= {place: _gradient(parameter) - stood.get(place, 0) for place, parameter in parameters.items()}
    loss = tensors_in(getattr(result, "loss", result))
    return _Step(received[0], outputs, loss, gradients, _by_place(parts, _state_and_modes), stood)


def _state_and_modes(part: nn.Module) -> dict[str, Tensor]:
    return {**state_of(part), "training": torch.tensor([float(module.training) for module in part.modules()])}


def _by_place(
    layers: Mapping[str, nn.Module], tensors_of: Callable[[nn.Module], Mapping[str, Tensor]]
) -> dict[Place, Tensor]:
    return {(name, key): tensor for name, layer in layers.items() for key, tensor in tensors_of(layer).items()}


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _watch(layer: nn.Module) -> tuple[list[Call], list[Call]]:
    """Record what a layer is given and returns. Not by hooks: where they are, an engine may go another way."""
    given: list[Call] = []
    returned: list[Call] = []
    forward = layer.forward

    def watched(*args: Any) -> Any:
        given.append([tensor.detach().clone() for tensor in tensors_in(args)])
        output = forward(*args)
        returned.append([tensor.detach().clone() for tensor in tensors_in(output)])
        return output

    vars(layer)["forward"] = watched
    return given, returned


_Dropout = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d


def _dropouts(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in layers.items():
        for path, part in layer.named_modules(prefix=name):
            if isinstance(part, _Dropout) and part.training and part.p:
                yield path, part


def _record_masks(layers: Mapping[str, nn.Module]) -> Masks:
    """Let each dropout multiply by a mask, drawn as it would draw anyway, and record it."""
    masks: Masks = {}

    def drop(dropout: nn.Module, calls: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        mask: Tensor = type(dropout).forward(dropout, torch.ones_like(x))
        calls.append((x.detach().clone(), mask))
        return x * mask

    for path, dropout in _dropouts(layers):
        vars(dropout)["forward"] = partial(drop, dropout, masks.setdefault(path, []))
    return masks


def _drop_by(masks: Masks, layers: Mapping[str, nn.Module]) -> None:
    """Let each dropout multiply by the mask of the call, the first if there are more, whose input was nearest."""

    def drop(calls: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        like_it = [i for i, (seen, _) in enumerate(calls) if seen.shape == x.shape]
        if not like_it:
            return x
        _, mask = calls.pop(min(like_it, key=lambda i: gap(x, calls[i][0])))
        return x * mask.to(x.device)

    for path, dropout in _dropouts(layers):
        vars(dropout)["forward"] = partial(drop, list(masks.get(path, ())))


@contextmanager
def _deferring(model: nn.Module, num_micro_batches: int) -> Iterator[None]:
    """Let BatchNorm's running statistics follow the micro-batches' inputs taken together, not one by one."""
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm) and part.training]
    before = {buffer: buffer.clone() for norm in norms for buffer in norm.buffers()}
    inputs: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    handles = [norm.register_forward_pre_hook(lambda norm, x: inputs[norm].append(x[0].detach())) for norm in norms]
    yield
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for buffer, old in before.items():
            buffer.copy_(old)
        for norm, seen in inputs.items():
            calls = len(seen) // num_micro_batches  # in one pass through the model
            for call in range(calls):
                type(norm).forward(norm, torch.cat(seen[call::calls]))


def _compare(model: nn.Sequential, expected: _Step, found: _Step, tolerance: float | None) -> Iterator[Difference]:
    if tolerance is None:
        tolerance = tolerance_for([*expected.loss, *tensors_in(expected.outputs)])
    for name, layer in model.named_children():
        allowed = tolerance * scale(tensors_in(expected.outputs[name]))
        apart = _outputs_gap(expected.outputs[name], found.outputs[name], allowed)
        yield Difference("output", name, f"output of {called(name, layer)}", apart, allowed)
    yield Difference("loss", "", "the loss", gap(expected.loss, found.loss), tolerance * scale(expected.loss))
    allowed = tolerance * scale(expected.gradients.values())
    for (name, key), gradient in reversed(expected.gradients.items()):
        what = f"gradient of {name}.{key}" if name else f"gradient of {key}"
        its, stood = found.gradients[name, key], found.stood.get((name, key), 0)
        apart = gap(gradient, its)
        if apart > allowed and gap(gradient, its + stood) <= allowed:
            what += ", which replaced what stood in .grad and should be added to it"
        yield Difference("gradient", name, what, apart, allowed)
    for (name, key), tensor in expected.state.items():
        apart = gap(tensor, found.state[name, key])
        yield Difference("state", name, f"{name}.{key} after the step", apart, tolerance * scale([tensor]))


def _outputs_gap(expected: Sequence[Call], found: Sequence[Call], allowed: float) -> float:
    """How far the pipe's calls of a layer are from the samples of the plain calls; infinite if it left samples out.

    In which order micro-batches come, and how often, is the pipe's affair.
    """
    worst, unmet = 0.0, dict[int, set[int]]()
    for part in found:
        nearest = math.inf
        for i, whole in enumerate(expected):
            for samples, num_samples, apart in runs_like(whole, part, allowed):
                nearest = min(nearest, apart)
                if apart <= allowed:
                    unmet.setdefault(i, set(range(num_samples))).difference_update(samples)
        worst = max(worst, nearest)
    is_complete = len(unmet) == len(expected) and not any(unmet.values())
    return worst if is_complete or worst > allowed else math.inf
