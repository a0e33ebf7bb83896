"""What each layer of a model costs: parameters, time, memory. ``balance`` cuts by these numbers.

Measuring leaves no trace: layers run as copies, on a copy of the sample, and torch's random generators are
put back, so weights, gradients, buffers and the next random number are what they were. Layers run in the mode
that they are in, training or evaluation, and under the caller's autocast; hooks on them run too.
"""

import copy
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from gpipe_lite.microbatch import flatten, unflatten

By = Literal["parameters", "time", "memory"]


class LayerTime(NamedTuple):
    """Seconds that a layer takes for one batch."""

    forward: float
    backward: float


def layer_costs(layers: Iterable[nn.Module], by: By = "parameters", sample: Any = None) -> list[float]:
    """What each layer costs, to be balanced.

    Args:
        layers: an ``nn.Sequential``, or its layers.
        by: "parameters", their number; "time", seconds forward and backward; "memory", bytes kept between.
        sample: a micro-batch, as the first layer takes it; needed unless by parameters.

    Raises:
        ValueError: if ``by`` is another word, or the sample is missing or cannot be timed.
    """
    if by not in get_args(By):
        raise ValueError(f"layers are measured by one of {', '.join(get_args(By))}, not {by!r}")
    if by == "parameters":
        return [float(count) for count in parameter_counts(layers)]
    if sample is None:
        raise ValueError(f"to measure layers by {by} they must run: pass sample=, a batch for the first layer")
    if by == "time":
        return [forward + backward for forward, backward in layer_times(layers, sample)]
    return [float(size) for size in activation_bytes(layers, sample)]


def parameter_counts(layers: Iterable[nn.Module]) -> list[int]:
    """How many numbers each layer's parameters hold; what layers share counts at the first."""
    counted: set[nn.Parameter] = set()
    counts = []
    for layer in _checked(layers):
        new = set(layer.parameters()) - counted
        counted |= new
        counts.append(sum(parameter.numel() for parameter in new))
    return counts


def layer_times(layers: Iterable[nn.Module], sample: Any, *, repeats: int = 5) -> list[LayerTime]:
    """How long each layer takes on this machine, forward and backward.

    Args:
        layers: an ``nn.Sequential``, or its layers.
        sample: a micro-batch, as the first layer takes it. Small batches take more time a sample, so let it
            be as large as the pipeline's micro-batches.
        repeats: how often each layer is timed, after one run to warm up; the medians count.

    Returns:
        Seconds. Backward computes the gradients of the parameters, and of the input if that needs one; where
        nothing does, it takes no time to speak of.

    Raises:
        ValueError: if ``repeats`` is below 1, or a tensor is on the meta device, where nothing takes time.
    """
    if repeats < 1:
        raise ValueError(f"a layer is timed 1 time or more, not {repeats}")
    layers = _checked(layers)
    devices = _devices(layers, sample)
    if torch.device("meta") in devices:
        raise ValueError("on the meta device nothing is computed, so it takes no time: use a real model and sample")
    times = []
    with _undisturbed(devices):
        for layer in layers:
            layer = copy.deepcopy(layer)
            output, _ = _time(layer, sample, devices)
            runs = [_time(layer, sample, devices)[1] for _ in range(repeats)]
            times.append(LayerTime(*map(statistics.median, zip(*runs, strict=True))))
            sample = output
    return times


def activation_bytes(layers: Iterable[nn.Module], sample: Any) -> list[int]:
    """How much memory each layer's forward pass leaves for its backward pass.

    Every storage that autograd saves counts whole and once, at the layer that saves it first; parameters and
    buffers do not count. What an autograd function keeps by other means than saving is not seen. It works on
    the meta device, where it takes no memory. The bytes of most layers are linear in the batch, so a small
    one can be measured and scaled; batch normalisation adds a few for each channel.

    Args:
        layers: an ``nn.Sequential``, or its layers.
        sample: a batch, as the first layer takes it.

    Returns:
        Bytes.
    """
    return _saved_by_each(_checked(layers), (sample,))


def saved_bytes(module: nn.Module, *inputs: Any) -> int:
    """How many bytes ``module(*inputs)`` leaves for its backward pass, as :func:`activation_bytes` counts."""
    return _saved_by_each(_checked([module]), inputs)[0]


def _saved_by_each(layers: list[nn.Module], inputs: tuple[Any, ...]) -> list[int]:
    seen: set[torch.UntypedStorage] = set()
    total = 0

    def record(tensor: Tensor) -> None:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage not in seen:
            seen.add(storage)  # and so kept: no later storage can take its place
            total += storage.nbytes()

    totals = [0]
    with _undisturbed(_devices(layers, inputs)), saved_tensors_hooks(record, lambda nothing: nothing):
        layers = copy.deepcopy(layers)  # in one, so that shared parameters stay shared
        seen.update(tensor.untyped_storage() for tensor in _own_tensors(layers))
        inputs, _ = _fresh(inputs)
        for layer in layers:
            inputs = (layer(*inputs),)
            totals.append(total)
    return [after - before for before, after in pairwise(totals)]


def _checked(layers: Iterable[nn.Module]) -> list[nn.Module]:
    if not isinstance(layers, Iterable):
        raise TypeError(f"pass an nn.Sequential or a list of layers, not a {type(layers).__name__}")
    layers = list(layers)
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {i} of {len(layers)} is a {type(layer).__name__}: pass nn.Modules")
        if any(map(is_lazy, _own_tensors([layer]))):
            raise ValueError(
                f"layer {i} of {len(layers)}, a {type(layer).__name__}, has parameters of no shape yet: "
                "run one batch through the model first"
            )
    return layers


def _own_tensors(layers: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers."""
    for layer in layers:
        yield from layer.parameters()
        yield from layer.buffers()


def _devices(layers: Iterable[nn.Module], sample: Any) -> set[torch.device]:
    leaves = [*_own_tensors(layers), *flatten(sample)[0]]
    return {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}


@contextmanager
def _undisturbed(devices: set[torch.device]) -> Iterator[None]:
    """Record gradients whatever the caller's mode is, and put the random generators back afterwards."""
    forked = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(forked), torch.inference_mode(False), torch.enable_grad():
        yield


def _fresh(value: Any) -> tuple[Any, list[Tensor]]:
    """Copy a layer's input, so that the layer may write into it; list the tensors that need a gradient."""
    leaves, spec = flatten(value)
    roots = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    copies = [root.clone() if isinstance(root, Tensor) else root for root in roots]
    return unflatten(copies, spec), _that_need_gradients(roots)


def _that_need_gradients(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _time(layer: nn.Module, value: Any, devices: set[torch.device]) -> tuple[Any, LayerTime]:
    """Run a layer once, forward and backward; return its output and the seconds."""
    value, inputs = _fresh(value)
    start = _now(devices)
    output = layer(value)
    forward = _now(devices) - start
    outputs = _that_need_gradients(flatten(output)[0])
    sources = inputs + _that_need_gradients(layer.parameters())
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    start = _now(devices)
    if outputs and sources:
        torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
    return output, LayerTime(forward, _now(devices) - start)


def _now(devices: set[torch.device]) -> float:
    """The time, in seconds, at which the devices have done all that was asked of them."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()
