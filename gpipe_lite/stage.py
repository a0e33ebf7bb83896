"""One stage at work on one step: forward, recompute and backward of a micro-batch, and what it must remember.

A stage cuts autograd's graph at its input. It keeps the *boundary activation* that it received, as a leaf of its
own small graph, and when the gradient of its output comes back it runs ``torch.autograd.backward`` on that graph
alone::

      value in ──► leaf ──► layers ──► output ──► detached value out
                    │                     │
    gradient out ◄──┘◄──── backward ◄─────┘◄──── gradient in          (parameters' .grad fills on the way)

With recomputation only the leaf is kept; R runs the layers again, with the same random numbers.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_lite.batchnorm import layers_with_statistics, statistics_left_alone
from gpipe_lite.microbatch import flatten, unflatten
from gpipe_lite.randomness import StepSeed, Stream, never_draws
from gpipe_lite.schedule import Phase, Schedule, Task
from gpipe_lite.trace import PHASE_NAMES

Head = Callable[[int, Any], Any]
"""What the last stage does with a micro-batch's output: computes its loss, given the micro-batch's index."""


@dataclass(slots=True)
class Saved:
    """What a stage remembers of a micro-batch between F and B."""

    inputs: list[Any]  # leaves of this stage's graph, and what is not a tensor
    spec: Any  # how the inputs nest
    version: int  # of the inputs, to notice that a layer wrote into them
    outputs: list[Any] | None  # with their graph; None until recomputed


class Stage:
    """One partition at work on one step.

    Args:
        index: k.
        layers: the partition.
        first_layer: the index in the whole model of the partition's first layer.
        device: where the partition lives.
        schedule: says which micro-batches are recomputed.
        seed: of the step.
        head: applied after the layers, on the last stage of a step with its loss.
    """

    def __init__(
        self,
        index: int,
        layers: nn.Sequential,
        first_layer: int,
        device: torch.device,
        schedule: Schedule,
        seed: StepSeed,
        head: Head | None = None,
    ) -> None:
        self.index = index
        self.device = device
        self._layers = list(layers.named_children())
        self._first_layer = first_layer
        self._schedule = schedule
        self._head = head
        quiet = head is None and never_draws(layers)
        self._stream = None if quiet else Stream(seed, device)
        self._with_statistics = layers_with_statistics(layers)
        self._copies_input = _writes_into_input(layers)
        self._saved: dict[int, Saved] = {}
        self.at = ""  # the layer at work, for errors

    def run(self, task: Task, value: Any) -> Any:
        """Do one task.

        Args:
            task: one of this stage's.
            value: F: the micro-batch, any nesting of tensors on this stage's device. R: nothing. B: the
                gradients of the output's tensors in order, None for those that have none.

        Returns:
            F: the output, detached; its tensors require grad where the stage's own output does. R: nothing.
            B: the gradients of the input's leaves in order, None for those that need none.
        """
        match task.phase:
            case Phase.FORWARD:
                return self._forward(task.micro_batch, value)
            case Phase.RECOMPUTE:
                return self._recompute(task.micro_batch)
            case Phase.BACKWARD:
                return self._backward(task.micro_batch, value)

    def forget(self) -> None:
        """Drop all that is remembered."""
        self._saved.clear()

    def _forward(self, micro_batch: int, value: Any) -> Any:
        leaves, spec = flatten(value)
        leaves = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        keep = torch.is_grad_enabled()
        version = _version(leaves) if keep else 0
        outputs, out_spec = flatten(self._run_layers(micro_batch, leaves, spec))
        if keep:
            recomputed = self._schedule.recomputes(self.index, micro_batch)
            self._saved[micro_batch] = Saved(leaves, spec, version, None if recomputed else outputs)
        return unflatten([_cut(leaf) for leaf in outputs], out_spec)

    def _recompute(self, micro_batch: int) -> None:
        saved = self._saved[micro_batch]
        if _version(saved.inputs) != saved.version:
            raise RuntimeError(
                f"the input of stage {self.index} was modified in place after micro-batch {micro_batch}'s forward "
                "pass, so it cannot be recomputed: make the stage's first layer write elsewhere (inplace=False), leave "
                'the batch as it is until backward() returns, or use checkpoint="never"'
            )
        with statistics_left_alone(self._with_statistics):
            saved.outputs, _ = flatten(self._run_layers(micro_batch, saved.inputs, saved.spec))

    def _backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        saved = self._saved.pop(micro_batch)
        assert saved.outputs is not None, "R or F ran before B"
        pairs = [
            (output, gradient)
            for output, gradient in zip(saved.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if self._head is not None and not pairs:
            raise RuntimeError(
                "the loss does not depend on anything that requires grad: unfreeze a parameter, or call step() under "
                "torch.no_grad() to evaluate"
            )
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return [leaf.grad if isinstance(leaf, Tensor) else None for leaf in saved.inputs]

    def _run_layers(self, micro_batch: int, leaves: list[Any], spec: Any) -> Any:
        if self._copies_input and torch.is_grad_enabled():
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        value = unflatten(leaves, spec)
        stream = self._stream
        with stream or nullcontext():
            for layer, (name, module) in enumerate(self._layers, self._first_layer):
                self.at = f"layer {name!r} ({type(module).__name__})"
                if stream is not None:
                    stream.at(layer, micro_batch)
                value = module(value)
            if self._head is not None:
                self.at = "the loss function"
                if stream is not None:
                    stream.at(-1, micro_batch)
                value = self._head(micro_batch, value)
        self.at = ""
        return value

    def explain(self, error: BaseException, task: Task, value: Any) -> None:
        """Note on an exception where it happened: stage, layer, micro-batch, phase and input shapes."""
        where = f", in {self.at}" if self.at else ""
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in flatten(value)[0] if isinstance(leaf, Tensor))
        error.add_note(
            f"while running {task}: {PHASE_NAMES[task.phase]} of micro-batch {task.micro_batch} on stage {task.stage} "
            f"({self.device}){where}; shapes given to it: {shapes or 'none'}"
        )


def _cut(leaf: Any) -> Any:
    """A tensor without its history, which remembers whether it had one."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _version(leaves: Sequence[Any]) -> int:
    """Changes whenever one of the tensors is written to."""
    return sum(leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())


def _writes_into_input(layers: nn.Module) -> bool:
    """Whether the first layer says that it works in place: it must not write into a leaf, nor into what R needs."""
    first = layers
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    return bool(getattr(first, "inplace", False))
