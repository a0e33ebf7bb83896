"""How ``loss.backward()`` reaches the schedule's other half.

The pipeline's output hangs on two small autograd nodes::

    [1] x, parameters ── Drain ── token ── Outputs ── output ── loss
    [2] x, parameters ◄─ Drain ◄─ token ◄─ Outputs ◄─ gradient ◄─ loss.backward()

For autograd the parameters' gradients come from ``Drain``, once, summed over the micro-batches. So hooks on
parameters, ``torch.autograd.grad`` and whatever else hangs on autograd's graph work as with the unsplit model.

``Outputs`` keeps the gradient where it is and hands a CPU token on. ``Drain``, whose gradient is that token, thus
runs in the thread that called ``backward()``, and may wait there for the stages. In a CUDA device's own autograd
thread it must not: the stages need that thread for their backward passes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gpipe_lite.microbatch import flatten, unflatten
from gpipe_lite.schedule import Phase, Schedule, Task
from gpipe_lite.threads import Run


def check_differentiation(batch: Any) -> None:
    """Refuse what the stages, which cut the graph, would lose.

    Raises:
        RuntimeError: inside a transform of ``torch.func``, or if a tensor carries a forward-mode tangent.
    """
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    if transform is not None:
        raise RuntimeError(
            f"torch.func's {transform.key().name.lower()} cannot look into a pipeline, whose stages cut the graph: use "
            "loss.backward() or torch.autograd.grad, or transform the unsplit model"
        )
    if forward_ad._current_level < 0:
        return
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            raise RuntimeError(
                "forward-mode tangents cannot pass through a pipeline, whose stages cut the graph: use "
                "loss.backward() or torch.autograd.grad, or the unsplit model"
            )


class BackwardHalf:
    """The half of a run that waits for the output's gradients.

    Args:
        run: whose forward half has been executed.
        part: the other half of its schedule.
        sizes: samples of each micro-batch.
    """

    def __init__(self, run: Run, part: Schedule, sizes: Sequence[int]) -> None:
        self.parameters = run.parameters
        self._run: Run | None = run
        self._part = part
        self._sizes = list(sizes)

    def execute(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Any], *, retain_graph: bool
    ) -> list[Tensor | None]:
        """Run it.

        Args:
            gradients: of the output's leaves in order, first axis N; None for those that have none.
            inputs: the batch's leaves.
            retain_graph: whether it may run again.

        Returns:
            The gradients of the inputs that require grad, in order, then of the parameters.

        Raises:
            RuntimeError: if it ran before, and was not to be retained.
        """
        if self._run is None:
            raise RuntimeError(
                "backward ran through this output of the pipeline already, and the stages have freed their "
                "activations: pass retain_graph=True to the first backward(), or call the pipe again before the next"
            )
        run = self._run
        if not retain_graph:
            self._run = None
        pieces = [None if gradient is None else self._cut(gradient) for gradient in gradients]
        last = run.schedule.num_stages - 1
        given = {
            Task(Phase.BACKWARD, last, m): [None if piece is None else piece[m] for piece in pieces]
            for m in range(len(self._sizes))
        }
        try:
            with run.as_in_forward():
                results = run.execute(self._part, given, retain_graph=retain_graph)
        except BaseException:
            self._run = None  # the stages have dropped everything
            raise
        return input_gradients(results, inputs, self._sizes) + run.take_gradients(self.parameters)

    def _cut(self, gradient: Tensor) -> Sequence[Tensor]:
        """For each micro-batch its samples' rows; for the only one the tensor itself, which may have no axis."""
        if len(self._sizes) == 1:
            return [gradient]
        rows = len(gradient) // sum(self._sizes)
        pieces: tuple[Tensor, ...] = gradient.split([size * rows for size in self._sizes])
        return pieces


def connect(batch: Any, output: Any, needs_grad: Sequence[bool], half: BackwardHalf) -> Any:
    """Give the output a history, whose backward runs the schedule's other half.

    Args:
        batch: what went in.
        output: what came out, without history.
        needs_grad: whether the output's leaves, in order, depend on something that requires grad.
        half: what to run.

    Returns:
        The output with its history.

    Raises:
        RuntimeError: if that something is neither a parameter nor in the batch.
    """
    inputs = flatten(batch)[0]
    leaves, spec = flatten(output)
    gradients: list[Tensor | None] = [None] * len(leaves)
    wanted = [*that_require_grad(inputs), *half.parameters]
    if not wanted:
        raise RuntimeError(
            "the output requires grad, and neither a parameter of the model nor the batch does: a layer uses a tensor "
            "from elsewhere, whose gradient would be lost; make it an nn.Parameter of the layer, pass it along in the "
            "batch, or detach it"
        )
    token = _Drain.apply(half, gradients, inputs, *wanted)  # type: ignore[no-untyped-call]  # torch has no types for it
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
        *_inputs_and_parameters: Tensor,
    ) -> Tensor:
        ctx.half, ctx.gradients, ctx.inputs = half, gradients, inputs
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward ran with create_graph=True, and gradients of gradients cannot pass through a pipeline, whose "
                "stages cut the graph: take them of the unsplit model, or of the layers that need them"
            )
        if any(gradient is not None and _is_batched(gradient) for gradient in ctx.gradients):
            raise RuntimeError(
                "backward ran for many gradients at once (vectorize=True, or is_grads_batched=True), and a pipeline "
                "takes one at a time: leave that out, which takes as many backward passes"
            )
        gradients = ctx.gradients[:]
        ctx.gradients[:] = [None] * len(gradients)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, None, *ctx.half.execute(gradients, ctx.inputs, retain_graph=keep)


def _is_batched(gradient: Tensor) -> bool:
    functorch: Any = torch._C._functorch
    return bool(functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient))


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
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None, Tensor]:
        for i, gradient in zip(ctx.tensors, gradients, strict=True):
            ctx.gradients[i] = gradient
        return None, None, None, None, torch.zeros((), device="cpu")


class _Deliver(torch.autograd.Function):
    """Gives tensors gradients that were computed before."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *_tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()  # so that they are nobody else's, and become a parameter's .grad uncopied
        return None, *gradients


def deliver(tensors: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
    """Do what ``backward()`` does once gradients are known: run hooks, add to ``.grad``, go on along the graph.

    Args:
        tensors: that require grad.
        gradients: one each, None for those that have none; empty afterwards.
    """
    if tensors:
        _Deliver.apply(gradients, *tensors).backward()  # type: ignore[no-untyped-call]  # torch has no types for it


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
