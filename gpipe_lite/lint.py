"""What in a model keeps a pipeline from computing what the model computes: each layer is run by itself, on a copy."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_lite.compare import called, device_of, gap, scale, state_of, tensors_in, tolerance_for, undisturbed
from gpipe_lite.gpipe import GPipe
from gpipe_lite.gradients import strangers
from gpipe_lite.microbatch import batch_size, flatten, map_tensors, merge, split
from gpipe_lite.partition import check_model, partition, shared_parameters
from gpipe_lite.randomness import CannotRepeatError, StepSeed, Stream


@dataclass(frozen=True)
class Finding:
    """Something in a model that a pipeline would trip over.

    Attributes:
        rule: one of :func:`lint`'s.
        layer: the layer's name in the model, or "" for the model itself.
        message: what is where, and the way out.
    """

    rule: str
    layer: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def lint(
    model: nn.Module, sample: Any, *, num_stages: int | None = None, deferred_batch_norm: bool = False
) -> list[Finding]:
    """Report what in a model keeps a pipeline from computing what the model computes.

    ==================== ==============================================================================
    ``chain``            the model is not one that can be cut between layers; the other rules wait
    ``stage-count``      it has fewer layers than there are stages
    ``shared-parameter`` stages share a parameter
    ``batch-norm``       running statistics, of what is in training mode, would follow micro-batches
    ``in-place``         a layer that may be first in its stage writes into what the stage receives
    ``randomness``       in training mode, a layer draws numbers that a recomputation would not draw again
    ``outside-tensor``   a layer uses a tensor that requires grad and is neither its parameter nor its input
    ``state-in-forward`` in training mode, a layer other than BatchNorm changes parameters or buffers
    ``batch-size``       in evaluation mode, what a layer makes of a sample depends on the other samples,
                         or the last does not return a batch of as many samples along the first axis
    ==================== ==============================================================================

    The model, its gradients, the sample and all random generators stay as they are.

    Args:
        model: an ``nn.Sequential``, whose every layer may be first in a stage; or a :class:`GPipe`, which knows.
        sample: a batch, as the first layer takes it.
        num_stages: how many there will be, if it is no GPipe yet.
        deferred_batch_norm: whether it will be used, if it is no GPipe yet.

    Returns:
        The findings, rule by rule; an empty list is good news.

    Raises:
        ValueError: if the batch has fewer than 2 samples, which tell nothing of its size.
        Exception: a layer's own, with a note, if it cannot run on the batch.
    """
    if (num_samples := batch_size(sample)) < 2:
        raise ValueError(f"to see what depends on the batch size takes 2 samples or more: pass them, not {num_samples}")
    if isinstance(model, GPipe):
        stages, deferred_batch_norm = model.partitions, model.deferred_batch_norm
    else:
        try:
            check_model(model)
        except (TypeError, ValueError) as error:
            return [Finding("chain", "", str(error))]
        assert isinstance(model, nn.Sequential)
        stages = partition(model, [1] * len(model))
    layers = OrderedDict(named for stage in stages for named in stage.named_children())
    with undisturbed(), torch.no_grad():
        trials = _try_layers(copy.deepcopy(nn.Sequential(layers)), sample)
    no_matter = {
        "in-place": layers.keys() - {next(stage.named_children())[0] for stage in stages},
        "batch-norm": layers.keys() if deferred_batch_norm else (),
    }
    findings = [*_too_few(len(layers), num_stages or 0), *_shared(stages)]
    for rule, check in _CHECKS.items():
        for (name, layer), trial in zip(layers.items(), trials, strict=True):
            if name not in no_matter.get(rule, ()) and (problem := check(layer, trial)):
                findings.append(Finding(rule, name, f"{called(name, layer)} {problem}"))
    return findings


def _too_few(num_layers: int, num_stages: int) -> Iterator[Finding]:
    if num_layers < num_stages:
        problem = f"{num_stages} stages need 1 layer each or more, and the model has {num_layers}"
        yield Finding("stage-count", "", f"{problem}: take {num_layers} stages, or make two layers of one")


def _shared(stages: Sequence[nn.Sequential]) -> Iterator[Finding]:
    for names, _ in shared_parameters(stages):
        problem = f"{' and '.join(map(repr, names))} are one parameter"
        yield Finding("shared-parameter", names[0].split(".")[0], f"{problem}: give the stages that use it one device")


class _Ran(NamedTuple):
    """What a layer did with an input."""

    output: Any
    wrote: bool = False  # into the input
    changed: Sequence[str] = ()  # of its own parameters and buffers, BatchNorm's statistics aside
    outside: Sequence[Tensor] = ()  # what it used that requires grad, beside its parameters and the input
    refused: str = ""  # why it cannot be repeated


class _Trial(NamedTuple):
    """A layer's runs on what the layers before it make of the sample in evaluation mode."""

    trained: _Ran  # in training mode, under a stream of random numbers as in a pipeline
    again: _Ran  # likewise, under the same stream
    whole: _Ran  # in evaluation mode
    reseeded: _Ran  # likewise, from another seed
    parts: Sequence[Any] | None  # the outputs for 1 sample and for the others, or exceptions; None if it gets no batch
    is_last: bool


def _try_layers(model: nn.Sequential, sample: Any) -> list[_Trial]:
    """Run each layer in all ways. Each way goes through all layers, since what one stashes another pops."""
    num_samples, inputs = batch_size(sample), []
    for name, layer in model.to(device_of(sample)).eval().named_children():
        inputs.append(sample)
        with _named_in_errors(name, layer):
            sample = layer(_with_grad(sample))
    model.train()
    trained, again = (_run_all(model, inputs, seed, Stream(StepSeed(0), device_of(inputs[0]))) for seed in (0, 1))
    model.eval()
    whole, reseeded = _run_all(model, inputs, seed=0), _run_all(model, inputs, seed=1)
    cuts = [_cut(value, num_samples) for value in inputs]
    halves = [[cut and _attempt(layer, cut[i]) for layer, cut in zip(model, cuts, strict=True)] for i in range(2)]
    parts = [half if cut else None for cut, *half in zip(cuts, *halves, strict=True)]
    is_last = [False] * (len(model) - 1) + [True]
    return [_Trial(*runs) for runs in zip(trained, again, whole, reseeded, parts, is_last, strict=True)]


def _run_all(model: nn.Sequential, inputs: Sequence[Any], seed: int, stream: Stream | None = None) -> list[_Ran]:
    ran, known = [], list[Tensor](model.parameters())
    for (name, layer), value in zip(model.named_children(), inputs, strict=True):
        with _named_in_errors(name, layer):
            ran.append(_run(layer, value, known, seed, stream))
    return ran


def _run(layer: nn.Module, value: Any, known: list[Tensor], seed: int = 0, stream: Stream | None = None) -> _Ran:
    """Run a layer, and leave it as it was. To what is known to require grad in a pass comes what the layer is given."""
    roots = _with_grad(value)
    known += [leaf for leaf in flatten(roots)[0] if isinstance(leaf, Tensor)]
    torch.manual_seed(seed)
    with _restored(layer) as changed, stream or nullcontext(), torch.enable_grad():
        if stream is not None:
            stream.at(0, 0, repeats=True)
        value = map_tensors(Tensor.clone, roots)  # it may write into a clone, but not into a leaf
        given = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in given]
        try:
            output = layer(value)
        except CannotRepeatError as error:
            return _Ran((), refused=str(error))
    wrote = [tensor._version for tensor in given] != versions
    return _Ran(map_tensors(Tensor.detach, output), wrote, changed, strangers(tensors_in(output), known))


def _with_grad(value: Any) -> Any:
    """A copy; its tensors require grad where they can, as they would within a model."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.is_floating_point()), value)


@contextmanager
def _restored(layer: nn.Module) -> Iterator[list[str]]:
    """Give a layer its state back in the end, and yield a list of what had changed but for BatchNorm's statistics."""
    changed: list[str] = []
    own = state_of(layer)
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    try:
        yield changed
    finally:
        after = state_of(layer)
        for name, tensor in before.items():
            if not gap(tensor, after.get(name, ())):
                continue
            where, _, attribute = name.rpartition(".")
            module = layer.get_submodule(where)
            if not isinstance(module, _BatchNorm):
                changed.append(name)
            setattr(module, attribute, own[name].copy_(tensor))


def _attempt(layer: nn.Module, value: Any) -> Any:
    try:
        return _run(layer, value, list(layer.parameters())).output
    except Exception as error:
        return error


def _cut(value: Any, num_samples: int) -> tuple[Any, Any] | None:
    """The first sample and the others; None if the value is no batch of so many samples."""
    try:
        one, *others = split(value, num_samples)
        return (one, merge(others)) if batch_size(value) == num_samples else None
    except (TypeError, ValueError):
        return None


@contextmanager
def _named_in_errors(name: str, layer: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"while lint ran {called(name, layer)} on what the layers before it make of the sample")
        raise


def _batch_norm(layer: nn.Module, _: _Trial) -> str:
    parts = [part for part in layer.modules() if isinstance(part, _BatchNorm)]
    if not any(part.track_running_stats and part.training for part in parts):
        return ""
    return (
        "has BatchNorm, whose running statistics would follow the micro-batches: pass deferred_batch_norm=True to have "
        "them follow the mini-batch, or put it in evaluation mode"
    )


def _in_place(_: nn.Module, trial: _Trial) -> str:
    if not trial.trained.wrote:
        return ""
    return (
        "writes into its input, which is needed again if it is the first layer of its stage: let it write elsewhere "
        "(inplace=False), or choose a balance that puts another layer first"
    )


def _outside_tensor(_: nn.Module, trial: _Trial) -> str:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in trial.trained.outside)
    if not shapes:
        return ""
    return (
        f"uses tensors from outside that require grad, of shape {shapes}, whose gradients would be lost: make them "
        "nn.Parameters of the layer, pass them along from layer to layer, or detach them"
    )


def _randomness(_: nn.Module, trial: _Trial) -> str:
    if trial.trained.refused:
        return f"cannot be recomputed: {trial.trained.refused}"
    if not gap(trial.trained.output, trial.again.output):
        return ""
    return (
        "makes something else of one input each time, and a recomputation would too: draw random numbers by torch's "
        "functions from its default generator, and keep what it remembers in buffers"
    )


def _state_in_forward(_: nn.Module, trial: _Trial) -> str:
    if not trial.trained.changed:
        return ""
    return f"changes {', '.join(trial.trained.changed)} in forward, once a micro-batch: change it between steps"


def _batch_size(layer: nn.Module, trial: _Trial) -> str:
    if trial.parts is None or _randomness(layer, trial) or gap(trial.whole.output, trial.reseeded.output):
        return ""  # there is nothing to compare
    whole, way_out = tensors_in(trial.whole.output), "compute each sample by itself, and leave means to the loss"
    for part, samples in zip(trial.parts, ("1 sample", "the other samples"), strict=True):
        if isinstance(part, Exception):
            return f"runs on the whole sample, and on {samples} of it fails ({part}): {way_out}"
    try:
        joined = tensors_in(merge(trial.parts)) if trial.is_last else _joined(whole, *map(tensors_in, trial.parts))
    except (ValueError, RuntimeError) as error:
        return f"returns what cannot be joined to a batch again ({error}): {way_out}"
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (whole, joined)]
    if shapes[0] != shapes[1]:
        return f"returns shapes {shapes[0]} for the whole sample, and {shapes[1]} for its parts together: {way_out}"
    apart, allowed = gap(whole, joined), tolerance_for(whole) * scale(whole)
    return f"makes of a sample what depends on the others, by {apart:.2g}: {way_out}" if apart > allowed else ""


def _joined(whole: Sequence[Tensor], one: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Join what two layers pass to each other, such as the state of a recurrent one, whose samples are axis 1."""
    joined = []
    for of_all, *parts in zip(whole, one, others, strict=True):
        axes = (axis for axis, (n, m) in enumerate(zip(of_all.shape, parts[0].shape, strict=False)) if n != m)
        joined.append(torch.cat(parts, next(axes, 0)) if of_all.dim() else parts[0])
    return joined


_CHECKS: dict[str, Callable[[nn.Module, _Trial], str]] = {
    "batch-norm": _batch_norm,
    "in-place": _in_place,
    "randomness": _randomness,
    "outside-tensor": _outside_tensor,
    "state-in-forward": _state_in_forward,
    "batch-size": _batch_size,
}
