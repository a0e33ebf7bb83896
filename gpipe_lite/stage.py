"""One stage at work on one step: forward, recompute and backward of a micro-batch, and what it must remember.

A stage cuts autograd's graph at its input. It keeps the *boundary activation* that it received, as a leaf of its
own small graph, and when the gradient of its output comes back it asks autograd for the gradients of that graph
alone::

      value in ──► leaf ──► layers ──► output ──► detached value out
                    │                     │
    gradient out ◄──┘◄──── backward ◄─────┘◄──── gradient in
                              │
                              └─► the parameters' gradients, summed over the micro-batches

With recomputation only the leaf is kept; R runs the layers again, with the same random numbers on the same buffers.
"""

import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_lite.batchnorm import DeferredStatistics, layers_with_statistics, statistics_left_alone
from gpipe_lite.gradients import GradientSums, hooks_set_aside, strangers
from gpipe_lite.microbatch import Spec, flatten, unflatten
from gpipe_lite.randomness import StepSeed, Stream, never_draws
from gpipe_lite.schedule import Phase, Schedule, Task
from gpipe_lite.skip import Kept, Pop, Port, Routes, Skip, Stash, carried, left_over
from gpipe_lite.snapshot import Buffers, Copies, Glimpse, version
from gpipe_lite.trace import PHASE_NAMES

Head = Callable[[int, Any], Any]
"""What the last stage does with a micro-batch's output: computes its loss, given the micro-batch's index."""

Values = Mapping[Port, Any]
"""What comes from other stages, or goes to them: what crosses a boundary, by the neighbour's index, and skips."""

_this_thread = threading.local()


def is_recomputing() -> bool:
    """Whether the layer that asks, or the hook on a layer, runs again for a recomputation.

    A recomputed micro-batch runs through the layers twice, and so through the forward hooks on them, since a hook
    may be part of what a layer computes. One that only watches asks here, and returns.
    """
    return getattr(_this_thread, "recomputing", False)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the stages of a pipeline have in common in one step.

    Attributes:
        schedule: says which micro-batches are recomputed.
        seed: of the step.
        routes: where skips come from and go to.
        defers_batch_norm: whether running statistics follow the mini-batch.
        parameters: of the whole model.
        shared: parts of layers that more than one stage runs.
    """

    schedule: Schedule
    seed: StepSeed
    routes: Routes
    defers_batch_norm: bool
    parameters: Callable[[], Iterable[nn.Parameter]]
    shared: Container[nn.Module]


@dataclass(slots=True)
class Flat:
    """Values taken apart into leaves."""

    leaves: list[Any]
    groups: list[tuple[Port, Spec, int]]  # the port, how its value nests, and how many leaves that has

    @classmethod
    def of(cls, values: Values) -> "Flat":
        """Take values apart."""
        if len(values) == 1:
            ((port, value),) = values.items()
            leaves, spec = flatten(value)
            return cls(leaves, [(port, spec, len(leaves))])
        flat = cls([], [])
        for port, value in values.items():
            leaves, spec = flatten(value)
            flat.leaves += leaves
            flat.groups.append((port, spec, len(leaves)))
        return flat

    def cut(self, leaves: Sequence[Any]) -> dict[Port, Sequence[Any]]:
        """Cut a list of as many leaves into one for each port."""
        if len(self.groups) == 1:
            return {self.groups[0][0]: leaves}
        parts, start = {}, 0
        for port, _, length in self.groups:
            parts[port] = leaves[start : start + length]
            start += length
        return parts

    def values(self, leaves: Sequence[Any]) -> dict[Port, Any]:
        """Put other leaves together in the same way."""
        parts = self.cut(leaves)
        return {port: unflatten(parts[port], spec) for port, spec, _ in self.groups}


@dataclass(slots=True)
class Saved:
    """What a stage remembers of a micro-batch between F and B."""

    inputs: Flat  # its tensors are leaves of this stage's graph
    version: int  # of the inputs, to notice that a layer wrote into them
    buffers: Copies  # as R must find them
    glimpse: Glimpse | None  # of what R must make again
    outputs: Flat | None  # with their graph; None until recomputed


class Stage:
    """One partition at work on one step.

    Args:
        index: k.
        layers: the partition's, with their names.
        first_layer: the index in the whole model of the partition's first layer.
        device: where the partition lives.
        settings: of the step.
        head: applied after the layers, on the last stage of a step with its loss.
        loss: the module that the head calls, if it is one: it has parameters and state as layers have.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[tuple[str, nn.Module]],
        first_layer: int,
        device: torch.device,
        settings: Settings,
        head: Head | None = None,
        loss: nn.Module | None = None,
    ) -> None:
        self.index = index
        self.device = device
        self.retain_graph = False  # whether another backward may follow
        self._layers = layers
        self._first_layer = first_layer
        self._settings = settings
        self._head = head
        self._tops = [layer for _, layer in layers] + ([] if loss is None else [loss])
        self.modules = modules = [module for top in self._tops for module in top.modules()]
        self._stream = None if never_draws(modules) else Stream(settings.seed, device)
        self._stream_of_head = None if head is None else Stream(settings.seed, device)
        self._skips = any(isinstance(module, Stash | Pop) for module in modules)
        self._with_statistics = layers_with_statistics(modules)
        self._deferred = DeferredStatistics(modules) if settings.defers_batch_norm else None
        self._buffers = Buffers(modules, settings.shared)
        # The micro-batches are views of one batch: a write into one would count as one into what others stashed.
        self._copies_input = _writes_into_input(layers[0][1]) or (index == 0 and self._skips)
        self._num_forwards = self._num_backwards = 0
        self._is_reached = False  # whether any gradient came to something that requires grad
        self._is_sound = False  # whether the graph has been looked at
        self._repeated: list[tuple[int, Glimpse, Glimpse]] = []  # of a micro-batch, what F and what R made
        self._saved: dict[int, Saved] = {}
        self.at = ""  # the layer at work, for errors

    @cached_property
    def gradients(self) -> GradientSums:
        """The sums. First asked for when the layers have run once, since these may make or unfreeze a parameter."""
        return GradientSums({id(p): p for top in self._tops for p in top.parameters() if p.requires_grad}.values())

    def run(self, task: Task, received: Values) -> Values:
        """Do one task.

        Args:
            task: one of this stage's.
            received: F: from the stage before the micro-batch, any nesting of tensors on this stage's device. R:
                nothing. B: from whoever was sent a value the list of its leaves' gradients, in order, None for
                those that have none.

        Returns:
            F: for the stage after the output, detached; its tensors require grad where the stage's own output does.
            R: nothing. B: for whoever sent a value the list of its leaves' gradients, likewise.
        """
        match task.phase:
            case Phase.FORWARD:
                return self._forward(task.micro_batch, received)
            case Phase.RECOMPUTE:
                self._recompute(task.micro_batch)
                return {}
            case Phase.BACKWARD:
                return self._backward(task.micro_batch, received)

    def forget(self) -> None:
        """Drop all that is remembered."""
        self._saved.clear()
        self._repeated.clear()
        self.gradients.clear()

    def _forward(self, micro_batch: int, received: Values) -> Values:
        schedule, keep = self._settings.schedule, torch.is_grad_enabled()
        recomputed = keep and schedule.recomputes(self.index, micro_batch)
        inputs = Flat.of(received)
        inputs.leaves = self._new_leaves(inputs)
        before = version(_tensors(inputs.leaves)) if keep else 0
        buffers = self._buffers.copies() if recomputed else {}
        with self._deferred.gathering() if self._deferred else nullcontext():
            outputs = self._run_layers(micro_batch, inputs)
        self._num_forwards += 1
        if self._deferred and self._num_forwards == schedule.num_micro_batches:
            self._deferred.update()
        if recomputed and any(tensor.is_nested for tensor in _tensors(outputs.leaves)):
            raise RuntimeError(
                f"a nested tensor leaves stage {self.index}, which is recomputed, and its recomputation is of another "
                'kind for autograd: pad it at the boundary, or use checkpoint="never"'
            )
        if keep:
            glimpse = Glimpse(outputs.leaves) if recomputed else None
            self._saved[micro_batch] = Saved(inputs, before, buffers, glimpse, None if recomputed else outputs)
        return outputs.values([_cut(leaf) for leaf in outputs.leaves])

    def _recompute(self, micro_batch: int) -> None:
        saved = self._saved[micro_batch]
        if version(_tensors(saved.inputs.leaves)) != saved.version:
            raise RuntimeError(
                f"the input of stage {self.index} was modified in place after micro-batch {micro_batch}'s forward "
                "pass, so it cannot be recomputed: make the stage's first layer write elsewhere (inplace=False), leave "
                'the batch as it is until backward() returns, or use checkpoint="never"'
            )
        saved.inputs.leaves = self._new_leaves(saved.inputs)  # a layer may have put a hook on the first pass's
        _this_thread.recomputing = True
        try:
            with statistics_left_alone(self._with_statistics), self._buffers.as_of(saved.buffers):
                saved.outputs = self._run_layers(micro_batch, saved.inputs)
        finally:
            _this_thread.recomputing = False
        assert saved.glimpse is not None, "F ran before R"
        again = Glimpse(saved.outputs.leaves)
        if not again.has_form_of(saved.glimpse):
            raise self._made_another(micro_batch)
        self._repeated.append((micro_batch, saved.glimpse, again))

    def _backward(self, micro_batch: int, received: Values) -> Values:
        saved = self._saved[micro_batch] if self.retain_graph else self._saved.pop(micro_batch)
        inputs, outputs = saved.inputs, saved.outputs
        assert outputs is not None, "R or F ran before B"
        if self._settings.schedule.recomputes(self.index, micro_batch):
            saved.outputs = None
        gradients = [gradient for port, _, _ in outputs.groups for gradient in received[port]]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs.leaves, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        self._num_backwards += 1
        self._is_reached |= bool(pairs)
        is_last = self._num_backwards % self._settings.schedule.num_micro_batches == 0
        if self._head and not self._is_reached and is_last:
            raise RuntimeError(
                "the loss does not depend on anything that requires grad: unfreeze a parameter, or call step() under "
                "torch.no_grad() to evaluate"
            )
        if pairs and not self._is_sound:
            self._check_graph([output for output, _ in pairs], inputs.leaves)
        sources = [*inputs.leaves, *self.gradients.parameters]
        wanted = [end for end in sources if isinstance(end, Tensor) and end.requires_grad]
        found: list[Tensor | None] = [None] * len(wanted)
        if pairs:
            roots, seeds = zip(*pairs, strict=True)
            if wanted:  # all that the graph reaches may have been frozen since
                with hooks_set_aside(self.gradients.parameters):
                    found = list(torch.autograd.grad(roots, wanted, seeds, self.retain_graph, allow_unused=True))
        of = iter(found)
        each = [next(of) if isinstance(end, Tensor) and end.requires_grad else None for end in sources]
        self.gradients.add(each[len(inputs.leaves) :])
        if is_last:
            self._check_repetitions()
        return inputs.cut(each[: len(inputs.leaves)])

    def _check_graph(self, roots: Sequence[Tensor], inputs: Sequence[Any]) -> None:
        """See where the graph of the step's first backward ends.

        Parameters of other stages, which a layer or a penalty in the loss may use, are taken in. Other tensors from
        outside are refused, since their gradients would be lost.
        """
        own = self.gradients.parameters
        for computed in [parameter for parameter in own if not parameter.is_leaf]:
            for source in strangers([computed], ()):
                if any(source is parameter for parameter in own):
                    raise RuntimeError(
                        f"a weight on stage {self.index}, of shape {tuple(computed.shape)}, is computed from another "
                        f"there, of shape {tuple(source.shape)}, whose gradient would count twice: compute both from "
                        "tensors that are on no stage"
                    )
        for tensor in strangers(roots, [*_tensors(inputs), *own]):
            of_model = next((parameter for parameter in self._settings.parameters() if parameter is tensor), None)
            if of_model is None:
                raise RuntimeError(
                    f"a layer of stage {self.index}, or the loss function, uses a tensor of shape "
                    f"{tuple(tensor.shape)} that requires grad and is not a parameter of the model, so its gradient "
                    "would be lost: make it an nn.Parameter of the layer (of the loss function, if that is an "
                    "nn.Module), pass it along in the batch or from layer to layer, or detach it"
                )
            if of_model.requires_grad:
                self.gradients.cover(of_model)
        self._is_sound = True

    def _check_repetitions(self) -> None:
        """See whether each R made what its F had made. Once, at the end: on a GPU a look waits for all before it."""
        repeated, self._repeated = self._repeated, []
        for micro_batch, first, again in repeated:
            if not first.resembles(again):
                raise self._made_another(micro_batch)

    def _made_another(self, micro_batch: int) -> RuntimeError:
        return RuntimeError(
            f"the recomputation of micro-batch {micro_batch} on stage {self.index} made something else than its "
            "forward pass, so the gradients would be wrong: a layer or the loss function draws random numbers past "
            "torch's functions, keeps what is no buffer, or was changed before backward(); mend that, or use "
            'checkpoint="never"'
        )

    def _new_leaves(self, inputs: Flat) -> list[Any]:
        """New leaves for the graph, which share the memory of the old."""
        leaves = [_cut(leaf) for leaf in inputs.leaves]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                leaf.register_post_accumulate_grad_hook(partial(_refuse_gradient, self.index))  # holds no stage
        return leaves

    def _run_layers(self, micro_batch: int, inputs: Flat) -> Flat:
        leaves = inputs.leaves
        if self._copies_input:
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values = inputs.values(leaves)
        value = values.pop(self.index - 1)
        stream, repeats = self._stream, self._settings.schedule.recomputes(self.index, micro_batch)
        nothing: Kept = {}
        arriving = {port.name: kept for port, kept in values.items() if isinstance(port, Skip)}
        with carried(arriving) if self._skips else nullcontext(nothing) as kept, stream or nullcontext():
            for layer, (name, module) in enumerate(self._layers, self._first_layer):
                self.at = f"layer {name!r} ({type(module).__name__})"
                if stream is not None:
                    stream.at(layer, micro_batch, repeats)
                value = module(value)
            self.at = ""
            leaving = left_over(kept, self._settings.routes.leaving(self.index))
        if self._head is not None:
            assert self._stream_of_head is not None
            self.at = "the loss function"
            self._stream_of_head.at(-1, micro_batch, repeats)
            with self._stream_of_head:
                value = self._head(micro_batch, value)
            self.at = ""
        return Flat.of({self.index + 1: value} | leaving)

    def explain(self, error: BaseException, task: Task, received: Values | None) -> None:
        """Note on an exception where it happened, and what may help."""
        where = f", in {self.at}" if self.at else ""
        leaves = flatten(list((received or {}).values()))[0]
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor))
        error.add_note(
            f"while running {task}: {PHASE_NAMES[task.phase]} of micro-batch {task.micro_batch} on stage {task.stage} "
            f"({self.device}){where}; shapes given to it: {shapes or 'none'}"
        )
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            error.add_note(
                f"stage {task.stage} holds {len(self._layers)} layer(s) and its part of "
                f"{self._settings.schedule.num_micro_batches} micro-batches: what helps is more chunks, "
                'checkpoint="always", fewer layers on this stage (balance), or schedule="1f1b" in step()'
            )
        if "more than 1 value per channel" in str(error):
            error.add_note(
                "a micro-batch has too few samples for BatchNorm in training: take fewer chunks, or larger batches"
            )
        if "backward through the graph a second time" in str(error):
            error.add_note(
                "micro-batches, or stages, share a part of their graphs, such as a weight computed before the forward "
                "pass and cached, or an activation kept by a layer: compute it in the layer, or detach it"
            )
        if "leaf Variable that requires grad" in str(error):
            error.add_note(
                "a stage's input is a leaf of its graph, and a layer writes into it: let it write elsewhere "
                "(inplace=False), or choose a balance that does not put it first on its stage"
            )


def _cut(leaf: Any) -> Any:
    """A tensor without its history, which remembers whether it had one."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _refuse_gradient(stage: int, leaf: Tensor) -> None:
    """The hook on what a stage is given: autograd may come there for the stage alone, which asks it to."""
    leaf.grad = None
    raise RuntimeError(
        f"a gradient came to the input of stage {stage}, of shape {tuple(leaf.shape)}, past the pipeline, which would "
        "not pass it on: something kept an activation, such as a loss on a layer, and backward() ran from there; "
        "return it with the output, or detach it"
    )


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _writes_into_input(first: nn.Module) -> bool:
    """Whether the first layer says that it works in place: it must not write into a leaf, nor into what R needs."""
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    return bool(getattr(first, "inplace", False))
