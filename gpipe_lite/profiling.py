"""What each layer of a model costs: parameters, time, memory. ``balance`` cuts by these numbers.

Measuring leaves no trace: layers run as copies, on a copy of the sample, with torch's random generators put back
afterwards, so that weights, gradients, buffers and the next random number are what they were. Layers run in the mode
they are in, training or evaluation, and under the caller's autocast; hooks on them run too.
"""

import copy
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
        by: "parameters", their number; "time", seconds forward and backward; "memory", bytes saved for backward.
        sample: a micro-batch, as the first layer takes it; needed unless by parameters.

    Raises:
        ValueError: if ``by`` is another word, or the sample is missing or cannot be timed.
    """
    if by not in get_args(By):
        raise ValueError(f"layers are measured by one of {', '.join(get_args(By))}, not {by!r}")
    if by == "parameters":
        return [float(count) for count in parameter_counts(layers)]
    if sample is None:
        raise ValueError(
            f"to measure layers by {by} they must run: pass sample=, a batch for the first layer"
        )
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
        sample: a micro-batch, as the first layer takes it. A stage's time is far from linear in a batch's size
            when it is small, so use one as large as the pipeline's micro-batches.
        repeats: how often each layer is timed, after one run to warm up; the medians count.

    Returns:
        Seconds. Backward computes the gradients of the parameters and of the input, if that needs one; it is 0
        where nothing does.

    Raises:
        ValueError: if ``repeats`` is below 1, or there is nothing to time because tensors are on the meta device.
    """
    if repeats < 1:
        raise ValueError(f"a layer is timed 1 time or more, not {repeats}")
    layers = _checked(layers)
    devices = _devices(layers, sample)
    if torch.device("meta") in devices:
        raise ValueError(
            "on the meta device nothing is computed, so it takes no time: use a real model and sample"
        )
    times = []
    with _undisturbed(devices):
        for layer in layers:
            layer = copy.deepcopy(layer)
            runs = [_time(layer, sample, devices) for _ in range(1 + repeats)]
            sample = runs[0][0]
            times.append(
                LayerTime(*(statistics.median(column) for column in list(zip(*runs[1:], strict=True))[1:]))
            )
    return times


def activation_bytes(layers: Iterable[nn.Module], sample: Any) -> list[int]:
    """How much memory each layer's forward pass leaves for its backward pass.

    Every storage that autograd saves counts whole and once, at the layer that saves it first, parameters and buffers
    left out. What a layer's own autograd function keeps elsewhere is not seen. Works on the meta device, where it
    needs no memory; the bytes are linear in the batch, so a small sample tells those of a large one.

    Args:
        layers: an ``nn.Sequential``, or its layers.
        sample: a batch, as the first layer takes it.

    Returns:
        Bytes.
    """
    return _saved_by_each(_checked(layers), (sample,))


def saved_bytes(module: nn.Module, *inputs: Any) -> int:
    """How much memory ``module(*inputs)`` leaves for its backward pass, in bytes; see :func:`activation_bytes`."""
    return _saved_by_each(_checked([module]), inputs)[0]


def _saved_by_each(layers: list[nn.Module], inputs: tuple[Any, ...]) -> list[int]:
    copies = copy.deepcopy(layers)  # in one, so that shared parameters stay shared
    seen = {t.untyped_storage() for layer in copies for t in (*layer.parameters(), *layer.buffers())}
    total = 0

    def record(tensor: Tensor) -> None:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage not in seen:
            seen.add(storage)  # and so kept: no later storage can take its place
            total += storage.nbytes()

    totals = [0]
    with _undisturbed(_devices(layers, inputs)), saved_tensors_hooks(record, lambda nothing: nothing):
        inputs, _ = _fresh(inputs)
        for layer in copies:
            inputs = (layer(*inputs),)
            totals.append(total)
    return [after - before for before, after in zip(totals, totals[1:], strict=False)]


def _checked(layers: Iterable[nn.Module]) -> list[nn.Module]:
    if not isinstance(layers, Iterable):
        raise TypeError(f"pass an nn.Sequential or a list of layers, not a {type(layers).__name__}")
    layers = list(layers)
    for i, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {i} of {len(layers)} is a {type(layer).__name__}: pass nn.Modules")
        if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
            raise ValueError(
                f"layer {i} of {len(layers)}, a {type(layer).__name__}, has parameters of no shape yet: "
                "run one batch through the model first"
            )
    return layers


def _devices(layers: Iterable[nn.Module], sample: Any) -> set[torch.device]:
    tensors = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    return {leaf.device for leaf in (*tensors, *flatten(sample)[0]) if isinstance(leaf, Tensor)}


@contextmanager
def _undisturbed(devices: set[torch.device]) -> Iterator[None]:
    """Compute gradients whatever the caller's mode, and put the devices' random generators back afterwards."""
    forked = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(forked), torch.inference_mode(False), torch.enable_grad():
        yield


def _fresh(value: Any) -> tuple[Any, list[Tensor]]:
    """Copy a layer's input so that it may be changed in place, and say for which tensors backward has a gradient."""
    leaves, spec = flatten(value)
    roots = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    copies = [root.clone() if isinstance(root, Tensor) else root for root in roots]
    return unflatten(copies, spec), _that_need_gradients(roots)


def _that_need_gradients(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _time(layer: nn.Module, value: Any, devices: set[torch.device]) -> tuple[Any, float, float]:
    """Run a layer once; return its output and the seconds forward and backward."""
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
    return output, forward, _now(devices) - start


def _now(devices: set[torch.device]) -> float:
    """The time, in seconds, at which the devices have done all that was asked of them."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()
