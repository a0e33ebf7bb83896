"""One process a stage, on torch.distributed: the same loop and the same schedule as with threads.

Every process runs the same program. Each builds and keeps its own stage, and does its own row of the schedule::

    rank 0   order ─┐  F0 F1 F2            B2 B1 B0 ─┐ report          the *order* of rank 0 says what the step is:
    rank 1          ├─►   F0 F1 F2     B2 B1 B0      ├─────►  result   so many samples, this seed;
    rank 2          └─►      F0 F1 F2 B2 B1 B0       ┘                 its *result* has the loss, and ends the step

What crosses a boundary goes over a :class:`gpipe_lite.wire.Wire`; who fails is found by a
:class:`gpipe_lite.watch.Watch`.
"""

import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from math import inf
from operator import index
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not marked as such
from torch.distributed.distributed_c10d import _get_default_store  # the processes' own; it has no public name

from gpipe_lite import microbatch
from gpipe_lite.balance import balance as best_balance
from gpipe_lite.batchnorm import warn_of_statistics
from gpipe_lite.connect import check_differentiation, deliver, input_gradients, that_require_grad
from gpipe_lite.loss import LossFn, LossHead, Weight, micro_batch_weights, seeds, total
from gpipe_lite.partition import check_model, partition, shared_parameters
from gpipe_lite.plan import Plan, ScheduleLike, check_options, check_order, make
from gpipe_lite.profiling import parameter_counts
from gpipe_lite.randomness import StepSeed, draw_seed
from gpipe_lite.runtime import Log, StepResult, Timeline, run_tasks
from gpipe_lite.schedule import Checkpoint, Phase, Task
from gpipe_lite.skip import Port, Routes, routes, sender_of
from gpipe_lite.stage import Head, Settings, Stage, Values
from gpipe_lite.trace import Event, Trace
from gpipe_lite.watch import RankFailedError, Watch
from gpipe_lite.wire import Key, Wire

Layers = nn.Sequential | Sequence[Callable[[], nn.Module]]
"""A model, or what makes its layers one by one."""

_PHASES = tuple(Phase)
_ORDER, _EXCHANGE, _CLOCK = range(len(_PHASES), len(_PHASES) + 3)  # kinds of messages, beside those between tasks
_PINGS = 8
AHEAD = 4
"""How many micro-batches each side of a connection may run ahead of those who use them."""

_number = count()


@dataclass(frozen=True)
class Order:
    """What rank 0 says of a mini-batch before it starts.

    Attributes:
        method: which one of the pipe's it was asked for.
        num_samples: N.
        seed: of the random numbers.
        grad: whether gradients are wanted.
    """

    method: str
    num_samples: int
    seed: int
    grad: bool


class Offset(NamedTuple):
    """How far a rank's clock is ahead of rank 0's, in seconds, and how far off that may be."""

    seconds: float
    uncertainty: float


class DistributedGPipe(nn.Module):
    """One stage of a sequential model on a pipeline of processes.

    Start one process a stage, with ``torchrun --nproc-per-node 4`` or :func:`gpipe_lite.launch`, call
    ``torch.distributed.init_process_group("gloo")``, and build it in each with the same arguments. It holds the
    layers of its own stage, under their names in the model; an optimiser of its parameters updates those.

    Args:
        module: the model. An ``nn.Sequential``, which may be on the ``meta`` device: then each process makes its own
            stage's tensors, by ``reset_parameters()`` of its layers. Or functions that make the layers one by one:
            all are called, so that random numbers fall as for the whole model, and the layers of other stages are
            dropped at once.
        balance: layers per partition, as many as there are processes; None splits so that the largest partition has
            as few parameters as possible.
        chunks: M, into how many micro-batches a mini-batch is cut.
        checkpoint: which micro-batches are recomputed: "always", "except_last" or "never".
        schedule: "gpipe", "1f1b" or "naive", a function of (K, M), or a :class:`Schedule`.
        deferred_batch_norm: let the running statistics of BatchNorm follow the mini-batch.
        device: of this process's stage; None takes CUDA device number LOCAL_RANK, if there are any, else the CPU.
        timeout: seconds after which a rank that is waited for, or not heard of, counts as failed.

    Raises:
        RuntimeError: if there is no process group.
        TypeError: if an argument has the wrong type.
        ValueError: if the numbers do not fit together, or stages share a parameter.
    """

    def __init__(
        self,
        module: Layers,
        balance: Iterable[int] | None = None,
        *,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        schedule: ScheduleLike = "gpipe",
        deferred_batch_norm: bool = False,
        device: str | torch.device | None = None,
        timeout: float = 30.0,
    ) -> None:
        super().__init__()
        check_options(chunks, checkpoint, schedule)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "there is no process group: start one process a stage, such as by torchrun --nproc-per-node 4, and "
                'call torch.distributed.init_process_group("gloo") in each'
            )
        if not 0 < timeout < inf:
            raise ValueError(f"timeout is in seconds, above 0, not {timeout!r}")
        self.rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.chunks = index(chunks)
        self.checkpoint: Checkpoint = checkpoint
        self.deferred_batch_norm = deferred_batch_norm
        self.device = _device(device)
        self._schedule = schedule
        self._plans: dict[tuple[int, Checkpoint], Plan] = {}
        self._timeline: Timeline | None = None
        self._warned = False
        self.clock_offsets: list[Offset] = []
        store = PrefixStore(f"gpipe_lite {next(_number)}", _get_default_store())
        self._watch = Watch(store, self.rank, range(num_ranks), timeout)
        with self.telling():
            partitions = _cut(module, balance, self.rank, num_ranks)
            self.balance = [len(layers) for layers in partitions]
            self._routes = routes(partitions)
            self._room = AHEAD * (1 + len(self._routes.skips))
            self._take(partitions)
            self._watch.wait_for_all()  # or who failed would keep the others waiting for a group
            group = dist.new_group(backend="gloo", timeout=timedelta(days=30))  # how long to wait is the watch's affair
            nccl = [dist.new_group(backend="nccl") for _ in range(2)] if self.device.type == "cuda" else [None, None]
        assert isinstance(group, dist.ProcessGroup)
        peers = _peers(self.rank, num_ranks, self._routes)
        self._wire = Wire(group, peers, self.device, self._watch, self._room, *nccl)
        self._close = weakref.finalize(self, _close, self._wire, self._watch)
        _open.add(self)

    def _take(self, partitions: Sequence[nn.Sequential]) -> None:
        """Take this rank's layers."""
        if shared := shared_parameters(partitions):
            name, stages = shared[0]
            raise ValueError(
                f"parameter {name!r} is shared by stages {stages}, which are processes of their own: choose a balance "
                "that puts its layers on one stage"
            )
        own = _materialised(partitions[self.rank], self.device)
        self.training = own.training
        for key, layer in own.named_children():
            if hasattr(DistributedGPipe, key) or key in vars(self):
                raise ValueError(f"layer {key!r} has the name of an attribute of DistributedGPipe: rename the layer")
            self.add_module(key, layer)

    def forward(self, batch: Any = None) -> Any:
        """Run a mini-batch through the pipeline, without gradients; every rank calls it.

        Args:
            batch: on rank 0, the mini-batch; elsewhere it is not looked at.

        Returns:
            On the last rank, what the model returns; elsewhere None.

        Raises:
            RuntimeError: if gradients are enabled: they need the loss, so call :meth:`step`.
            RankFailedError: if another rank failed.
        """
        with self.telling():
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "the loss is on the last rank, and gradients need it: call step(x, y, loss_fn) on every rank, or "
                    "run the pipeline under torch.no_grad()"
                )
            run = self._new_run(self._order("forward()", batch))
            run.execute(batch)
            self._end(run)
            if not self._is_last:
                return None
            return microbatch.merge([run.results[task] for task in run.last_forwards], run.sizes)

    def step(
        self,
        x: Any = None,
        y: Any = None,
        loss_fn: LossFn | None = None,
        *,
        weight: Weight | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        keep_outputs: bool = False,
    ) -> StepResult:
        """Run the whole schedule with the loss inside; every rank calls it.

        Loss and gradients equal those of :meth:`gpipe_lite.GPipe.step`. Each rank's gradients are added to its own
        parameters' ``.grad``.

        Args:
            x: on rank 0, the mini-batch; elsewhere it is not looked at.
            y: on the last rank, the target; elsewhere it is not looked at. Likewise the other arguments.
            loss_fn: as for :meth:`gpipe_lite.GPipe.step`.
            weight: likewise.
            scale: likewise.
            keep_outputs: return the outputs too, on the last rank.

        Returns:
            The loss, on every rank. The trace is of this rank's own tasks: see :meth:`gather_trace`.

        Raises:
            ValueError: if x and y disagree on the batch size, or the loss is not one number.
            RankFailedError: if another rank failed, or was not heard of.
        """
        with self.telling():
            order = self._order("step()", x)
            if not self._is_last:
                run = self._new_run(order)
                run.execute(x)
                loss, outputs = self._end(run), None
            else:
                if loss_fn is None:
                    raise TypeError("step() needs a loss function on the last rank, and got None")
                if (num_targets := microbatch.batch_size(y, "target")) != order.num_samples:
                    raise ValueError(
                        f"x has {order.num_samples} samples and y {num_targets}: each sample needs one target"
                    )
                targets = microbatch.split(y, self.chunks)
                sizes = microbatch.sizes(order.num_samples, len(targets))
                weights = micro_batch_weights(loss_fn, targets, sizes, weight)
                head = LossHead(loss_fn, targets, self.device, {} if keep_outputs else None)
                run = self._new_run(order, head, loss_fn if isinstance(loss_fn, nn.Module) else None)
                run.execute(x, seeds(weights, self.device, scale) if order.grad else ())
                loss = self._end(run, total([run.results[task] for task in run.last_forwards], weights))
                kept = head.kept
                outputs = None if kept is None else microbatch.merge([kept[m] for m in range(len(sizes))], sizes)
            if order.grad:
                run.deliver(x)
            return StepResult(loss, outputs, run.timeline)

    def gather_trace(self) -> Trace:
        """What ran when on all ranks in the last run, on the clock of rank 0; every rank calls it.

        The clocks are compared by messages to and fro, of which the fastest counts. :attr:`clock_offsets` then says
        for each rank how far its clock is ahead, and how far off that may be.

        Raises:
            RuntimeError: if nothing ran yet.
        """
        if self._timeline is None:
            raise RuntimeError("nothing ran yet: call step() on every rank, then gather_trace()")
        with self.telling():
            others = range(1, len(self.balance))
            if self.rank:
                self._answer_pings()
            offsets = [Offset(0.0, 0.0), *map(self._ping, others)] if self.rank == 0 else []
            rows = self.exchange([(event.task, event.start, event.end) for event in self._timeline.trace().events])
            self.clock_offsets = self.exchange(offsets)[0]
            events = [
                Event(task, device, start - offset.seconds, end - offset.seconds)
                for device, (row, offset) in enumerate(zip(rows, self.clock_offsets, strict=True))
                for task, start, end in row
            ]
            return Trace(tuple(events), len(self.balance), self._timeline.name)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm is at most so large; every rank calls it.

        ``torch.nn.utils.clip_grad_norm_`` would see the gradients of one stage alone.

        Returns:
            The norm before, over all stages.
        """
        with self.telling():
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            squares = self.exchange(sum(float(gradient.double().norm()) ** 2 for gradient in gradients))
            norm = float(sum(squares) ** 0.5)
            for gradient in gradients:
                gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
            return norm

    def close(self) -> None:
        """Say goodbye to the other ranks. Also done when the pipe is collected, and when the process ends."""
        self._close()

    @property
    def _is_last(self) -> bool:
        return self.rank == len(self.balance) - 1

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of what goes wrong in a ``with`` block, so that they do not wait for this one."""
        self._watch.check()
        try:
            yield
        except RankFailedError:
            raise
        except BaseException as error:
            said = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            self._watch.fail(f"rank {self.rank} (stage {self.rank}) on {socket.gethostname()} failed: {said}")
            raise
        finally:
            self._watch.doing("outside the pipeline")

    def _order(self, method: str, batch: Any) -> Order:
        """Agree on what is done: rank 0 knows."""
        own = Order(method, 0, 0, torch.is_grad_enabled())
        if self.rank == 0:
            check_differentiation(batch)
            state = torch.get_rng_state()
            own = Order(method, microbatch.batch_size(batch), draw_seed(), own.grad)
            torch.set_rng_state(state)  # drawn for good when a stage needed it
            for rank in range(1, len(self.balance)):
                self._wire.send(rank, (_ORDER, 0, 0, 0), own)
            return own
        self._watch.doing(f"waiting for rank 0 to call {method}")
        order: Order = self._wire.recv(0, (_ORDER, 0, 0, 0))
        if (order.method, order.grad) != (method, own.grad):
            modes = ["without gradients", "with gradients"]
            raise RuntimeError(
                f"rank 0 called {order.method} {modes[order.grad]}, and rank {self.rank} {method} {modes[own.grad]}: "
                "all ranks must call the same"
            )
        return order

    def _new_run(self, order: Order, head: Head | None = None, loss: nn.Module | None = None) -> "_Run":
        num = min(self.chunks, order.num_samples)
        if not (self._warned or self.deferred_batch_norm or num == 1 or not self.training):
            self._warned = True
            warn_of_statistics(self, num, stacklevel=4)
        key = (num, self.checkpoint)
        if key not in self._plans:
            plan = make(self._schedule, len(self.balance), num, self.checkpoint)
            check_order(plan.whole, self._routes, self._room)
            self._plans[key] = plan
        plan = self._plans[key]
        seed = StepSeed(order.seed)
        settings = Settings(plan.whole, seed, self._routes, self.deferred_batch_norm, self.parameters, ())
        layers, first_layer = list(self.named_children()), sum(self.balance[: self.rank])
        stage = Stage(self.rank, layers, first_layer, self.device, settings, head, loss)
        run = _Run(plan, stage, order, seed, self._routes, self._wire, self._watch)
        self._timeline = run.timeline
        return run

    def _end(self, run: "_Run", loss: Tensor | None = None) -> Any:
        """Wait until all ranks are done; the loss of the last one, if it has any."""
        reports = self.exchange((loss, run.seed.is_used))
        if any(is_used for _, is_used in reports):
            draw_seed()  # so that the next one is another, as if all stages were here
        found = reports[-1][0]
        return found if found is None else found.to(self.device)

    def exchange(self, own: Any) -> list[Any]:
        """What each rank has, for all; every rank calls it.

        Args:
            own: any nesting of tensors and plain values.

        Returns:
            One a rank.
        """
        self._watch.doing("waiting for all to end")
        limit, ranks = self._watch.timeout, range(1, len(self.balance))
        if self.rank:
            self._wire.send(0, (_EXCHANGE, 0, 0, 0), own)
            everything: list[Any] = self._wire.recv(0, (_EXCHANGE, 1, 0, 0), limit)
            return everything
        everything = [own, *(self._wire.recv(rank, (_EXCHANGE, 0, 0, 0), limit) for rank in ranks)]
        for rank in ranks:
            self._wire.send(rank, (_EXCHANGE, 1, 0, 0), everything)
        return everything

    def _ping(self, rank: int) -> Offset:
        """Compare this rank's clock with another's."""
        rounds = []
        for _ in range(_PINGS):
            start = perf_counter()
            self._wire.send(rank, (_CLOCK, 0, 0, 0), None)
            there = self._wire.recv(rank, (_CLOCK, 1, 0, 0), self._watch.timeout)
            end = perf_counter()
            rounds.append(Offset(there - (start + end) / 2, (end - start) / 2))
        return min(rounds, key=lambda found: found.uncertainty)

    def _answer_pings(self) -> None:
        for _ in range(_PINGS):
            self._wire.recv(0, (_CLOCK, 0, 0, 0), self._watch.timeout)
            self._wire.send(0, (_CLOCK, 1, 0, 0), perf_counter())

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: a copy would have no processes."""
        raise TypeError(
            "a DistributedGPipe is one stage of running processes and cannot be copied: copy its state_dict()"
        )


class _Run:
    """One rank's part in one mini-batch; the :class:`gpipe_lite.runtime.Channel` of its tasks."""

    def __init__(
        self, plan: Plan, stage: Stage, order: Order, seed: StepSeed, routes: Routes, wire: Wire, watch: Watch
    ) -> None:
        num = plan.whole.num_micro_batches
        self.seed = seed
        self.sizes = microbatch.sizes(order.num_samples, num)
        self.results: dict[Task, Any] = {}
        self.timeline = Timeline(plan.whole.name, (Log(stage.device),))
        self.last_forwards = [Task(Phase.FORWARD, plan.whole.num_stages - 1, m) for m in range(num)]
        self._part = plan.whole if order.grad else plan.forward
        self._stage, self._routes, self._wire, self._watch = stage, routes, wire, watch
        self._given: dict[Task, Any] = {}
        self._last = plan.whole.num_stages - 1

    def execute(self, batch: Any, seeds: Sequence[Tensor | None] = ()) -> None:
        """Do this rank's tasks.

        Args:
            batch: on rank 0, the mini-batch.
            seeds: on the last rank, what the gradients of its losses start from.
        """
        if self._stage.index == 0:
            pieces = microbatch.split(batch, len(self.sizes))
            device = self._stage.device
            for m, piece in enumerate(pieces):
                self._given[Task(Phase.FORWARD, 0, m)] = microbatch.map_tensors(lambda tensor: tensor.to(device), piece)
        for m, seed in enumerate(seeds):
            self._given[Task(Phase.BACKWARD, self._last, m)] = [seed]
        stage = self._stage
        row = self._part.device_tasks[stage.index]
        try:
            run_tasks(0, row, {stage.index: stage}, self, self.timeline.logs[0])
        except BaseException:
            stage.forget()
            raise

    def deliver(self, batch: Any) -> None:
        """Add the gradients to the parameters' ``.grad``; on rank 0 they go on from the batch, too."""
        inputs = [] if self._stage.index else microbatch.flatten(batch)[0]
        parameters, sums = self._stage.gradients.parameters, self._stage.gradients.take()
        gradients = [] if self._stage.index else input_gradients(self.results, inputs, self.sizes)
        deliver([*that_require_grad(inputs), *parameters], [*gradients, *(sums.get(id(p)) for p in parameters)])

    def recv(self, task: Task) -> Values:
        """Wait for what ``task`` needs."""
        values = {}
        for source in self._routes.sources(task):
            if (peer := sender_of(task, source)) in (-1, self._last + 1):
                values[source] = self._given.pop(task)
            else:
                self._watch.doing(f"waiting for what {task} needs from rank {peer}")
                values[source] = self._wire.recv(peer, self._key(task, source), self._watch.timeout)
        self._watch.check()
        self._watch.doing(f"running {task}")
        return values

    def send(self, task: Task, values: Values) -> None:
        """Send on what ``task`` made."""
        for port, value in values.items():
            consumer, source = self._routes.destination(task, port)
            if 0 <= consumer.stage <= self._last:
                self._wire.send(consumer.stage, self._key(consumer, source), value)
            else:
                self.results[task] = value

    def close(self, error: BaseException) -> None:
        """Others are told when the error has its notes."""

    def _key(self, task: Task, source: Port) -> Key:
        """Of what a task receives from a port."""
        port = source if isinstance(source, int) else self._last + 1 + self._routes.skips.index(source)
        return _PHASES.index(task.phase), port, task.stage, task.micro_batch


def _peers(rank: int, num_ranks: int, routes: Routes) -> set[int]:
    """The ranks with which a rank exchanges anything: its neighbours, those at the other ends of skips, and rank 0."""
    skips = {
        end for skip in (*routes.arriving(rank), *routes.leaving(rank)) for end in (skip.stashed_on, skip.popped_on)
    }
    near = {rank - 1, rank + 1, 0, *skips} if rank else set(range(num_ranks))
    return near & set(range(num_ranks))


def _cut(module: Layers, balance: Iterable[int] | None, rank: int, num_ranks: int) -> list[nn.Sequential]:
    """The partitions; those of other ranks may be empty shells."""
    if isinstance(module, nn.Sequential):
        check_model(module)
        numbers = best_balance(parameter_counts(module), num_ranks) if balance is None else list(balance)
        _check_ranks(numbers, num_ranks)
        return partition(module, numbers)
    if isinstance(module, nn.Module) or not all(callable(make) for make in module):
        raise TypeError(
            f"the model is an nn.Sequential, or a list of functions that make its layers, not {type(module).__name__}"
        )
    if balance is None:
        raise ValueError(f"a list of {len(module)} functions needs a balance: say how many layers go to each stage")
    numbers = list(balance)
    _check_ranks(numbers, num_ranks)
    if sum(numbers) != len(module):
        raise ValueError(f"balance {numbers} covers {sum(numbers)} layers, the model has {len(module)}")
    first, model = sum(numbers[:rank]), nn.Sequential()
    for i, make_layer in enumerate(module):
        layer = make_layer()
        model.append(layer if first <= i < first + numbers[rank] else layer.to("meta"))
    check_model(model)
    return partition(model, numbers)


def _check_ranks(balance: Sequence[int], num_ranks: int) -> None:
    if len(balance) != num_ranks:
        raise ValueError(
            f"balance {list(balance)} has {len(balance)} stages, and there are {num_ranks} processes: "
            "each runs one stage"
        )


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return torch.empty(0, device=device).device


def _materialised(layers: nn.Sequential, device: torch.device) -> nn.Sequential:
    """A stage's layers on its device; what is on the meta device gets memory, and values as its layers set them."""
    for name, module in layers.named_modules():
        own = [*module.parameters(False), *module.buffers(False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        if not callable(reset := getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(), which "
                "would give it values: write one, or make the model of functions that make its layers"
            )
        module.to_empty(device=device, recurse=False)
        reset()
    return layers.to(device)


def _close(wire: Wire, watch: Watch) -> None:
    wire.close()
    watch.end()


_open: "weakref.WeakSet[DistributedGPipe]" = weakref.WeakSet()


def close_all() -> None:
    """Close all pipes of this process, such as before its process group goes."""
    for pipe in list(_open):
        pipe.close()
