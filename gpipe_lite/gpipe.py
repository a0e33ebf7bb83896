"""GPipe: the ``nn.Module`` that a user sees.

The way of a mini-batch: split into micro-batches → through the stages, as the schedule says → outputs → loss →
gradients backwards through the same stages → ``.grad`` of the user's own parameters → a trace.

Called like the model, ``pipe(x)`` runs the schedule's forward half at once, and ``backward()`` on what follows runs
the other half (:mod:`gpipe_lite.connect`). ``pipe.step(x, y, loss_fn)`` runs the whole with the loss inside.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import index
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from gpipe_lite import microbatch
from gpipe_lite.balance import balance as best_balance
from gpipe_lite.batchnorm import warn_of_statistics
from gpipe_lite.connect import BackwardHalf, check_differentiation, connect, deliver, input_gradients, that_require_grad
from gpipe_lite.loss import LossFn, LossHead, Weight, micro_batch_weights, seeds, total
from gpipe_lite.partition import check_model, partition, shared_parameters
from gpipe_lite.plan import Plan, ScheduleLike, check_options, make
from gpipe_lite.profiling import parameter_counts
from gpipe_lite.randomness import StepSeed
from gpipe_lite.runtime import StepResult, Timeline
from gpipe_lite.schedule import Checkpoint, Phase, Schedule, Task, counted
from gpipe_lite.skip import routes
from gpipe_lite.stage import Head, Settings, Stage
from gpipe_lite.threads import Run, Workers
from gpipe_lite.trace import Trace


class GPipe(nn.Module):
    """A sequential model on a pipeline of devices.

    >>> from torch import nn, randn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipe = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
    >>> pipe(randn(16, 4)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([8, 4])

    It is the model: its parameters are the model's own, under the same names. What hangs on the layers works as
    there: forward and backward hooks on them fire once a micro-batch, and forward hooks again when it is recomputed
    (:func:`gpipe_lite.is_recomputing` tells); hooks on parameters fire once a backward. Only gradients of gradients
    cannot pass. Several threads may call one pipe, unless its parameters have hooks.

    Args:
        module: the model; each layer takes what the one before returns, any nesting of tensors.
        balance: layers per partition; None splits so that the largest partition has as few parameters as possible.
        devices: one a partition; None takes the CUDA devices there are, else CPU stages, as many as ``balance``
            has entries, or as torch has threads. The parameters are moved there.
        chunks: M, into how many micro-batches a mini-batch is cut; one that is smaller is cut into single samples.
        checkpoint: which micro-batches keep only the boundary activations and recompute the rest: "always" all,
            "except_last" all but the last, "never" none.
        schedule: "gpipe", "1f1b" or "naive"; or a function of (K, M), or a :class:`Schedule`, that then says itself
            what is recomputed.
        deferred_batch_norm: let the running statistics of BatchNorm follow the mini-batch, as the unsplit model's do
            and the paper's did. In training BatchNorm normalises by the micro-batch's own statistics either way.

    Raises:
        TypeError: if the module is not an ``nn.Sequential``, or an argument has the wrong type.
        ValueError: if the numbers do not fit together; the message shows them.
        IndexError: if there are fewer devices than partitions.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[str | int | torch.device] | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        schedule: ScheduleLike = "gpipe",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        check_options(chunks, checkpoint, schedule)
        if not (devices is None or isinstance(devices, Iterable)) or isinstance(devices, str):
            raise TypeError(f"devices names one device a partition: write [{devices!r}] * K, not {devices!r}")
        self.chunks = index(chunks)
        self.checkpoint: Checkpoint = checkpoint
        self.deferred_batch_norm = deferred_batch_norm
        self._schedule = schedule

        wanted = None if devices is None else [_actual(device) for device in devices]
        if balance is None:
            check_model(module)
            available = len(wanted if wanted is not None else _cuda_devices() or range(torch.get_num_threads()))
            balance = best_balance(parameter_counts(module), min(available, len(module)))
        partitions = partition(module, balance)
        self.balance = [len(layers) for layers in partitions]
        self._routes = routes(partitions)
        self._warned = False
        self.devices = _place(partitions, wanted)
        self.training = module.training
        self._workers: Workers | None = None
        self._timeline: Timeline | None = None
        self._plans: dict[tuple[int, Checkpoint], Plan] = {}
        for name, layer in module.named_children():
            if hasattr(GPipe, name) or name in vars(self):
                raise ValueError(f"layer {name!r} has the name of an attribute of GPipe: rename the layer")
            self.add_module(name, layer)

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._modules)

    def __getitem__(self, index: int | slice) -> nn.Module:
        """A layer of the model; of a slice, an ``nn.Sequential``."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self.named_children())[index]))
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers of the model."""
        return iter(cast(Iterable[nn.Module], self._modules.values()))

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The layers of each stage."""
        return [nn.Sequential(OrderedDict(layers)) for layers in self._layers_of_stages()]

    @property
    def trace(self) -> Trace:
        """What ran when in the last run, measured, in seconds.

        Raises:
            RuntimeError: if nothing ran yet.
        """
        if self._timeline is None:
            raise RuntimeError("nothing ran yet: call the pipe, or step(), then look at its trace")
        return self._timeline.trace()

    def forward(self, batch: Any) -> Any:
        """Run a mini-batch through the pipeline, like the model itself.

        Args:
            batch: any nesting of tensors that agree on the size of their first axis, N; other values are
                handed to every micro-batch.

        Returns:
            What the model returns, its tensors' first axis N again, on the last device.

        Raises:
            ValueError: if the batch is empty, holds no tensor or scalar ones, or its sizes disagree.
        """
        if torch.compiler.is_compiling():  # a compiler has nothing to see here, but it may have compiled the layers
            return torch.compiler.disable(self.forward)(batch)
        check_differentiation(batch)
        grad = torch.is_grad_enabled()
        micro_batches = microbatch.split(batch, self.chunks)
        plan = self._plan_for(len(micro_batches))
        if grad and not plan.flushes:
            raise ValueError(
                f"schedule {plan.whole.name!r} starts backward passes before the last forward pass, so it needs the "
                "loss inside: call pipe.step(x, y, loss_fn), or use schedule='gpipe' with loss.backward()"
            )
        run = self._new_run(plan)
        results = run.execute(plan.forward, {Task(Phase.FORWARD, 0, m): mb for m, mb in enumerate(micro_batches)})
        if grad and plan.recomputes:
            run.remember_layers()
        outputs = [results[Task(Phase.FORWARD, len(self.balance) - 1, m)] for m in range(len(micro_batches))]
        sizes = microbatch.sizes(microbatch.batch_size(batch), len(micro_batches))
        with torch.no_grad():
            merged = microbatch.merge(outputs, sizes)
        columns = list(zip(*(microbatch.flatten(output)[0] for output in outputs), strict=True))
        needs_grad = [any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in column) for column in columns]
        if not (grad and any(needs_grad)):
            return merged
        return connect(batch, merged, needs_grad, BackwardHalf(run, plan.backward, sizes))

    def step(
        self,
        x: Any,
        y: Any,
        loss_fn: LossFn,
        *,
        weight: Weight | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        keep_outputs: bool = False,
    ) -> StepResult:
        """Run the whole schedule with the loss inside: outputs, loss and, with grad enabled, gradients.

        The loss and the gradients equal those of the whole mini-batch to rounding. Gradients are added to the
        parameters' ``.grad``, as ``backward()`` does, and go on from ``x`` to what it was computed from. Any
        schedule can run so, and the last stage need not keep the outputs of all micro-batches.

        Args:
            x: the mini-batch, as for :meth:`forward`.
            y: the target, any nesting of tensors with the same first axis.
            loss_fn: of one micro-batch's output and target; a tensor of shape ``()``.
            weight: what ``loss_fn`` averages over, given a target, if it is not samples and ``loss_fn`` does not
                tell; see :func:`gpipe_lite.loss.micro_batch_weights`.
            scale: multiplies what the gradients are computed from, and not the loss that is returned; such as
                ``torch.amp.GradScaler().scale``.
            keep_outputs: return the outputs too.

        Raises:
            ValueError: if x and y disagree on the batch size, or the loss is not one number.
        """
        check_differentiation(x)
        num_samples = microbatch.batch_size(x)
        if (num_targets := microbatch.batch_size(y, "target")) != num_samples:
            raise ValueError(
                f"x has {counted(num_samples, 'sample')} and y {num_targets}: each sample needs one target"
            )
        if torch.is_grad_enabled() and that_require_grad(microbatch.flatten(y)[0]):
            raise ValueError("the target requires grad, and gradients of targets cannot be computed: detach() it")
        micro_batches = microbatch.split(x, self.chunks)
        targets = microbatch.split(y, self.chunks)
        sizes = microbatch.sizes(num_samples, len(micro_batches))
        weights = micro_batch_weights(loss_fn, targets, sizes, weight)
        last, device = len(self.balance) - 1, self.devices[-1]
        head = LossHead(loss_fn, targets, device, {} if keep_outputs else None)
        plan = self._plan_for(len(micro_batches))
        run = self._new_run(plan, head, loss_fn if isinstance(loss_fn, nn.Module) else None)
        given: dict[Task, Any] = {Task(Phase.FORWARD, 0, m): mb for m, mb in enumerate(micro_batches)}
        if torch.is_grad_enabled():
            for m, seed in enumerate(seeds(weights, device, scale)):
                given[Task(Phase.BACKWARD, last, m)] = [seed]
        results = run.execute(plan.whole if torch.is_grad_enabled() else plan.forward, given)
        if torch.is_grad_enabled():
            inputs = microbatch.flatten(x)[0]
            parameters = run.parameters
            gradients = input_gradients(results, inputs, sizes) + run.take_gradients(parameters)
            deliver([*that_require_grad(inputs), *parameters], gradients)
        with torch.no_grad():
            loss = total([results[Task(Phase.FORWARD, last, m)] for m in range(len(weights))], weights)
            kept = head.kept
            outputs = None if kept is None else microbatch.merge([kept[m] for m in range(len(weights))], sizes)
        return StepResult(loss, outputs, run.timeline)

    def schedule_for(self, num_micro_batches: int) -> Schedule:
        """The schedule by which so many micro-batches are run.

        Raises:
            ValueError: if the user's own schedule is for other numbers of stages or micro-batches.
            ScheduleError: if it cannot be run.
        """
        return self._plan_for(num_micro_batches).whole

    def _plan_for(self, num_micro_batches: int) -> Plan:
        key = (num_micro_batches, self.checkpoint)
        if key not in self._plans:
            self._plans[key] = make(self._schedule, len(self.balance), num_micro_batches, self.checkpoint)
        return self._plans[key]

    def _new_run(self, plan: Plan, head: Head | None = None, loss: nn.Module | None = None) -> Run:
        self._warn_of_batch_norm(plan.whole.num_micro_batches)
        settings = Settings(
            plan.whole, StepSeed(), self._routes, self.deferred_batch_norm, self.parameters, self._shared_modules()
        )
        stages, first_layer = [], 0
        for k, (layers, device) in enumerate(zip(self._layers_of_stages(), self.devices, strict=True)):
            at_end = (head, loss) if k + 1 == len(self.balance) else ()
            stages.append(Stage(k, layers, first_layer, device, settings, *at_end))
            first_layer += len(layers)
        run = Run(plan.whole, self._routes, stages, self.devices, self._get_workers())
        self._timeline = run.timeline
        return run

    def _layers_of_stages(self) -> list[list[tuple[str, nn.Module]]]:
        """The layers as they are now: one may have been replaced, such as by one with an adapter."""
        if len(self._modules) != sum(self.balance):
            raise RuntimeError(
                f"the pipeline has {len(self._modules)} layers, and its balance {self.balance} is for "
                f"{sum(self.balance)}: change the model before you build the pipe"
            )
        layers = cast(Iterator[tuple[str, nn.Module]], iter(self._modules.items()))
        return [list(islice(layers, n)) for n in self.balance]

    def _shared_modules(self) -> frozenset[nn.Module]:
        """The parts of layers that more than one stage runs."""
        seen, shared = set[nn.Module](), set[nn.Module]()
        for layers in self._layers_of_stages():
            here = {part for _, layer in layers for part in layer.modules()}
            shared |= here & seen
            seen |= here
        return frozenset(shared)

    def _warn_of_batch_norm(self, num_micro_batches: int) -> None:
        if not (self._warned or self.deferred_batch_norm or num_micro_batches == 1 or not self.training):
            self._warned = True
            warn_of_statistics(self, num_micro_batches, stacklevel=5)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let ``to()``, ``half()`` and the like change anything but where the partitions are."""
        for k, device in enumerate(self.devices):
            if (moved := fn(torch.empty(0, device=device)).device) != device:
                raise TypeError(
                    f"stage {k} of the pipeline lives on {device}, and this would move it to {moved}: name other "
                    "devices when you build the pipe, GPipe(module, ..., devices=[...])"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def _get_workers(self) -> Workers | None:
        if len(self.devices) == 1:
            return None
        if self._workers is None or self._workers.pid != os.getpid():  # threads do not survive a fork
            self._workers = Workers(self.devices)
        return self._workers

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: not the threads, nor the last run."""
        return {**self.__dict__, "_workers": None, "_timeline": None}


def _place(partitions: Sequence[nn.Sequential], devices: Sequence[torch.device] | None) -> list[torch.device]:
    """Move each partition to its device; choose the devices if they are not given."""
    if devices is None:
        devices = _cuda_devices() or [torch.device("cpu")] * len(partitions)
    if len(devices) < len(partitions):
        raise IndexError(  # as torchgpipe and fairscale do
            f"{len(partitions)} partitions need as many devices, not {len(devices)}: give more devices (one may stand "
            f'several times, as in ["cpu"] * {len(partitions)}), or a balance with {len(devices)} entries'
        )
    placed = list(devices[: len(partitions)])
    for name, stages in shared_parameters(partitions):
        if len({placed[stage] for stage in stages}) > 1:
            raise ValueError(
                f"parameter {name!r} is shared by stages {stages} on different devices: choose a balance that puts its "
                "layers on one device"
            )
    for layers, device in zip(partitions, placed, strict=True):
        layers.to(device)
    return placed


def _cuda_devices() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _actual(device: str | int | torch.device) -> torch.device:
    """The device as its tensors name it: "cuda" is "cuda:0"."""
    if device is None:
        raise ValueError("None is no device: name one, such as 'cpu' or 'cuda:0', for each partition")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA asserts
        raise ValueError(f"device {str(device)!r} cannot be used here: {error}") from error
