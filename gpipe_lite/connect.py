"""How ``loss.backward()`` reaches the schedule's other half.

The pipeline's output hangs on two small autograd nodes::

    [1] x ── Drain ── token ── Outputs ── output ── loss
    [2]      Drain ◄─ token ◄─ Outputs ◄─ gradient ◄─ loss.backward()

``Outputs`` keeps the gradient where it is and hands a CPU token on. ``Drain``, whose gradient is that token, thus
runs in the thread that called ``backward()``, and may wait there for the stages. In a CUDA device's own autograd
thread it must not: the stages need that thread for their backward passes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpipe_lite.microbatch import flatten, unflatten
from gpipe_lite.schedule import Phase, Schedule, Task
from gpipe_lite.threads import Run


class BackwardHalf:
    """The half of a run that waits for the output's gradients.

    Args:
        run: whose forward half has been executed.
        part: the other half of its schedule.
        sizes: samples of each micro-batch.
    """

    def __init__(self, run: Run, part: Schedule, sizes: Sequence[int]) -> None:
        self._run: Run | None = run
        self._part = part
        self._sizes = list(sizes)

    def execute(self, gradients: Sequence[Tensor | None], inputs: Sequence[Any]) -> list[Tensor | None]:
        """Run it.

        Args:
            gradients: of the output's leaves in order, first axis N; None for those that have none.
            inputs: the batch's leaves.

        Returns:
            The gradients of the inputs that require grad, in order.

        Raises:
            RuntimeError: if it ran before.
        """
        if self._run is None:
            raise RuntimeError(
                "backward ran through this output of the pipeline already, and the stages have freed their "
                "activations: call the pipe again before the next backward()"
            )
        run, self._run = self._run, None
        pieces = [None if gradient is None else gradient.split(self._sizes) for gradient in gradients]
        last = run.schedule.num_stages - 1
        given = {
            Task(Phase.BACKWARD, last, m): [None if piece is None else piece[m] for piece in pieces]
            for m in range(len(self._sizes))
        }
        return input_gradients(run.execute(self._part, given), inputs, self._sizes)


def connect(batch: Any, output: Any, needs_grad: Sequence[bool], half: BackwardHalf) -> Any:
    """Give the output a history, whose backward runs the schedule's other half.

    Args:
        batch: what went in.
        output: what came out, without history.
        needs_grad: whether the output's leaves, in order, depend on something that requires grad.
        half: what to run.

    Returns:
        The output with its history.
    """
    inputs = flatten(batch)[0]
    leaves, spec = flatten(output)
    anchor = torch.empty((), requires_grad=True)  # so that autograd comes by even if no input requires grad
    gradients: list[Tensor | None] = [None] * len(leaves)
    token = _Drain.apply(half, gradients, inputs, anchor, *that_require_grad(inputs))  # type: ignore[no-untyped-call]  # torch has no types for it
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    constant = [i for i in tensors if not needs_grad[i]]
    connected = _Outputs.apply(leaves, tensors, constant, gradients, token)  # type: ignore[no-untyped-call]  # likewise
    for i, tensor in zip(tensors, connected, strict=True):
        leaves[i] = tensor
    return unflatten(leaves, spec)


class _Drain(torch.autograd.Function):
    """Hands a token to ``_Outputs``; runs the backward half when it comes back."""

    @staticmethod
    def forward(
        ctx: Any,
        half: BackwardHalf,
        gradients: list[Tensor | None],
        inputs: list[Any],
        _anchor: Tensor,
        *_that_require_grad: Tensor,
    ) -> Tensor:
        ctx.half, ctx.gradients, ctx.inputs = half, gradients, inputs
        return torch.zeros((), device="cpu")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients[:]
        ctx.gradients[:] = [None] * len(gradients)
        return None, None, None, None, *ctx.half.execute(gradients, ctx.inputs)


class _Outputs(torch.autograd.Function):
    """Lends the outputs a history; leaves their gradients for ``_Drain``."""

    @staticmethod
    def forward(
        ctx: Any,
        leaves: list[Any],
        tensors: list[int],
        constant: list[int],
        gradients: list[Tensor | None],
        _token: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tensors, ctx.gradients = tensors, gradients
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(leaves[i] for i in constant))
        return tuple(leaves[i] for i in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None, Tensor]:
        for i, gradient in zip(ctx.tensors, gradients, strict=True):
            ctx.gradients[i] = gradient
        return None, None, None, None, torch.zeros((), device="cpu")


def that_require_grad(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors that gradients are asked for."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def input_gradients(results: Mapping[Task, Any], leaves: Sequence[Any], sizes: Sequence[int]) -> list[Tensor | None]:
    """Join what the first stage returned for the micro-batches; in the order of :func:`that_require_grad`."""
    rows = [results[Task(Phase.BACKWARD, 0, m)] for m in range(len(sizes))]
    joined: list[Tensor | None] = []
    for i, leaf in enumerate(leaves):
        if not (isinstance(leaf, Tensor) and leaf.requires_grad):
            continue
        parts = [row[i] for row in rows]
        if all(part is None for part in parts):
            joined.append(None)
            continue
        pieces = leaf.detach().split(list(sizes))
        filled = [torch.zeros_like(x) if g is None else g.to(x.device) for x, g in zip(pieces, parts, strict=True)]
        joined.append(torch.cat(filled))
    return joined
