"""All stages in one process, a thread for each device.

The threads are started once and reused from step to step. They are daemons that wait without using time, and they
end with their pool, so they never keep the interpreter alive.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_lite import transfer
from gpipe_lite.gradients import merged
from gpipe_lite.microbatch import flatten, unflatten
from gpipe_lite.runtime import Cancelled, Log, Timeline, run_tasks
from gpipe_lite.schedule import Schedule, Task
from gpipe_lite.skip import Port, Routes
from gpipe_lite.snapshot import Layers
from gpipe_lite.stage import Stage, Values

Job = Callable[[], None]


@dataclass(frozen=True)
class Ambient:
    """What is kept for each thread and the caller expects everywhere: context variables, torch's settings and streams.

    Modes in the sense of ``TorchFunctionMode`` and ``TorchDispatchMode`` stay behind: an object that notes what one
    thread does cannot be shared by several.
    """

    variables: Context
    grad: bool
    inference: bool
    autocasts: Mapping[str, torch.dtype | None]  # None: no autocast
    autocast_cache: bool
    saved_tensors_hooks: "Hooks | None"
    default_device: torch.device
    streams: Mapping[torch.device, torch.cuda.Stream]

    @classmethod
    def of_caller(cls, devices: Iterable[torch.device]) -> "Ambient":
        """Read the calling thread's."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            copy_context(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds},
            torch.is_autocast_cache_enabled(),
            _saved_tensors_hooks(),
            torch.get_default_device(),
            {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"},
        )

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Give the current thread these modes, and the device's stream, for a while."""
        with ExitStack() as stack:
            if device in self.streams:  # pragma: no cover - needs CUDA
                stack.enter_context(torch.cuda.stream(self.streams[device]))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(_without_saved_tensors_hooks())
            if self.saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks))
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            for kind, dtype in self.autocasts.items():
                if dtype is not None or torch.is_autocast_enabled(kind):
                    on, cache = dtype is not None, self.autocast_cache
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cache))
            yield


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def _saved_tensors_hooks() -> Hooks | None:
    """The hooks on what autograd saves, but torch's own checkpointing of the whole pipe: the stages recompute."""
    hooks = _top_hooks()
    return None if hooks and hooks[0].__module__ == "torch.utils.checkpoint" else hooks


def _top_hooks() -> Hooks | None:
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks  # type: ignore[no-any-return]  # torch annotates that there are always some


@contextmanager
def _without_saved_tensors_hooks() -> Iterator[None]:
    aside: list[Hooks] = []
    while hooks := _top_hooks():
        torch._C._autograd._pop_saved_tensors_default_hooks()
        aside.append(hooks)
    try:
        yield
    finally:
        for pack, unpack in reversed(aside):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


Letter = tuple[Task | None, Port, Any, transfer.Ready]
"""The task that needs a value, where that comes from, the value, and when it may be read. No task: a failure."""


class Mailboxes:
    """The values on their way between the devices of one run, and those that leave it.

    Args:
        schedule: says on which device each stage is.
        routes: say where a stage's values come from.
        devices: where the values are needed.
    """

    def __init__(self, schedule: Schedule, routes: Routes, devices: Sequence[torch.device]) -> None:
        self._device_of = schedule.device_of
        self._devices = devices
        self._queues: list[SimpleQueue[Letter]] = [SimpleQueue() for _ in devices]
        self.routes = routes
        self.last_stage = schedule.num_stages - 1
        self.results: dict[Task, Any] = {}
        self.closed = False

    def put(self, consumer: Task, source: Port, value: Any, ready: transfer.Ready) -> None:
        """Leave a value for the task that needs it."""
        self._queues[self._device_of[consumer.stage]].put((consumer, source, value, ready))

    def close(self) -> None:
        """Wake whoever waits, and stop the others before their next task."""
        self.closed = True
        for queue in self._queues:
            queue.put((None, 0, None, {}))

    def of(self, device: int) -> "ThreadChannel":
        """The channel of one device."""
        return ThreadChannel(self, self._devices[device], self._queues[device])


class ThreadChannel:
    """One device's connection to the others; a :class:`gpipe_lite.runtime.Channel`."""

    def __init__(self, mail: Mailboxes, device: torch.device, queue: SimpleQueue[Letter]) -> None:
        self._mail = mail
        self._device = device
        self._queue = queue
        self._arrived: dict[Task, dict[Port, tuple[Any, transfer.Ready]]] = {}

    def recv(self, task: Task) -> Values:
        """Wait for what ``task`` needs; values for later tasks are put aside."""
        if self._mail.closed:
            raise Cancelled
        sources = self._mail.routes.sources(task)
        while len(self._arrived.get(task, ())) < len(sources):
            consumer, source, value, ready = self._queue.get()
            if consumer is None:
                raise Cancelled
            self._arrived.setdefault(consumer, {})[source] = value, ready
        arrived = self._arrived.pop(task, {})
        return {source: _bring(*arrived[source], self._device) for source in sources}

    def send(self, task: Task, values: Values) -> None:
        """Hand values to other stages, or to the caller at either end."""
        for port, value in values.items():
            consumer, source = self._mail.routes.destination(task, port)
            if 0 <= consumer.stage <= self._mail.last_stage:
                self._mail.put(consumer, source, value, transfer.mark([self._device]))
            else:
                self._mail.results[task] = value

    def close(self, error: BaseException) -> None:
        """Wake everyone: this device has failed."""
        self._mail.close()


def _bring(value: Any, ready: transfer.Ready, device: torch.device) -> Any:
    """Bring a nesting of tensors to a device; whether they require grad comes along."""
    leaves, spec = flatten(value)
    if not ready and all(leaf.device == device for leaf in leaves if isinstance(leaf, Tensor)):
        return value

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return transfer.receive(leaf.detach(), ready, device).requires_grad_(leaf.requires_grad)

    return unflatten([one(leaf) for leaf in leaves], spec)


_waiting: ContextVar[tuple["weakref.ref[Workers]", ...]] = ContextVar("_waiting", default=())
"""Whose jobs the current code is part of: they wait for it, so it cannot wait for them."""


class Workers:
    """A thread for each device, started once, given one job a run.

    Args:
        devices: the devices; those on CPU share the caller's intra-op threads evenly.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._num_cpu = sum(device.type == "cpu" for device in devices)
        self._submitting = threading.Lock()
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in devices]
        self.pid = os.getpid()
        self.stop = weakref.finalize(self, _stop, self._queues)
        self._threads = [
            threading.Thread(target=_work, args=(device, queue), name=f"gpipe-{index}", daemon=True)
            for index, (device, queue) in enumerate(zip(devices, self._queues, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def run(self, jobs: Sequence[Job], ambient: Ambient, cancel: Job) -> None:
        """Run a job on each worker and wait until all have ended.

        Args:
            jobs: one a worker.
            ambient: the modes to run under.
            cancel: wakes jobs that wait for each other; called when the caller is interrupted.

        Raises:
            BaseException: what the first failing job raised, or what interrupted the caller.
            RuntimeError: if a job of theirs asks, or another pipeline that it called: they would wait for themselves.
        """
        if weakref.ref(self) in _waiting.get():
            raise RuntimeError(
                "a layer, a hook or the loss function called the pipeline that it is running in, which is busy: let it "
                "use layers of its own, or another pipeline"
            )
        threads = torch.get_num_threads()
        share = max(1, threads // max(1, self._num_cpu))
        outcomes: list[BaseException | None] = []  # counted, because an interrupt may swallow what get() returned
        wake: SimpleQueue[None] = SimpleQueue()
        interrupts: list[BaseException] = []
        submitted = 0
        try:
            with self._submitting:  # so that all workers see concurrent runs in the same order
                for queue, device, job in zip(self._queues, self._devices, jobs, strict=True):
                    within = ambient.variables.copy()  # one for each, since a thread at a time can be in it
                    within.run(_waiting.set, (*_waiting.get(), weakref.ref(self)))
                    queue.put(partial(within.run, _run_job, job, ambient, device, share, outcomes, wake))
                    submitted += 1
        except BaseException as interrupt:
            cancel()
            interrupts.append(interrupt)
        while True:
            try:
                while len(outcomes) < submitted:
                    with suppress(Empty):  # a signal that arrives just before get() blocks is seen at the next turn
                        wake.get(timeout=0.2)
                break
            except BaseException as interrupt:  # Ctrl-C: stop the stages, wait for them, then pass it on
                cancel()
                interrupts.append(interrupt)
        torch.set_num_threads(threads)  # a worker's setting becomes the default of threads yet to start
        errors = interrupts + [outcome for outcome in outcomes if outcome is not None]
        if errors:
            try:
                raise next((error for error in errors if not isinstance(error, Cancelled)), errors[0])
            finally:  # the traceback holds this frame: do not hold the traceback
                errors.clear()
                outcomes.clear()
                interrupts.clear()


def _run_job(
    job: Job,
    ambient: Ambient,
    device: torch.device,
    share: int,
    outcomes: list[BaseException | None],
    wake: SimpleQueue[None],
) -> None:
    outcome = None
    try:
        if torch.get_num_threads() != share:
            torch.set_num_threads(share)
        with ambient.entered(device):
            job()
    except BaseException as error:
        outcome = error
    outcomes.append(outcome)
    wake.put(None)


def _work(device: torch.device, queue: SimpleQueue[Job | None]) -> None:
    if device.type == "cuda":  # pragma: no cover - needs CUDA
        torch.cuda.set_device(device)
    while (job := queue.get()) is not None:
        job()
        del job  # it holds the run, and with it the activations


def _stop(queues: Sequence[SimpleQueue[Job | None]]) -> None:
    for queue in queues:
        queue.put(None)


class Run:
    """One mini-batch on its way through the stages: may be executed in parts, such as forward and backward.

    Args:
        schedule: of the whole way.
        routes: say where values come from.
        stages: by index.
        devices: by the schedule's rows.
        workers: one a device; None to work in the calling thread, on the only device.
    """

    def __init__(
        self,
        schedule: Schedule,
        routes: Routes,
        stages: Sequence[Stage],
        devices: Sequence[torch.device],
        workers: Workers | None,
    ) -> None:
        self.schedule = schedule
        self.timeline = Timeline(schedule.name, tuple(Log(device) for device in devices))
        self._routes = routes
        self._stages = stages
        self._devices = devices
        self._workers = workers
        self._ambient = Ambient.of_caller(devices)  # of forward: in backward() autograd has grad mode off
        self._as_in_forward: list[Layers] = []

    def remember_layers(self) -> None:
        """Note the layers' modes and parameters, for recomputations in a later part."""
        self._as_in_forward = [Layers(stage.modules) for stage in self._stages]

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Let recomputations find the layers as they were when they were remembered, whatever happened since."""
        with ExitStack() as stack:
            for layers in self._as_in_forward:
                stack.enter_context(layers.as_they_were())
            yield

    def execute(self, part: Schedule, inputs: Mapping[Task, Any], *, retain_graph: bool = False) -> dict[Task, Any]:
        """Run a part of the schedule.

        Args:
            part: some of the schedule's tasks, in its order.
            inputs: the values that come from the caller, by the task that needs them.
            retain_graph: keep what the backward tasks need, so that they can run again.

        Returns:
            What leaves the pipeline: outputs by the F of the last stage, gradients by the B of the first.

        Raises:
            BaseException: what a stage raised; all that the stages remember is dropped.
        """
        mail = Mailboxes(self.schedule, self._routes, self._devices)
        for task, value in inputs.items():
            tensors = (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))
            caller = self._routes.sources(task)[0]
            mail.put(task, caller, value, transfer.mark({tensor.device for tensor in tensors}))
        stages = {stage.index: stage for stage in self._stages}
        for stage in self._stages:
            stage.retain_graph = retain_graph
        jobs = [
            partial(run_tasks, device, row, stages, mail.of(device), log)
            for device, (row, log) in enumerate(zip(part.device_tasks, self.timeline.logs, strict=True))
        ]
        try:
            if self._workers is None:
                with self._ambient.entered(self._devices[0]):
                    jobs[0]()
            else:
                self._workers.run(jobs, self._ambient, cancel=mail.close)
        except BaseException:
            for stage in self._stages:
                stage.forget()
            raise
        return mail.results

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that get a gradient; known when the forward tasks have run, which may make or unfreeze some."""
        return list({id(p): p for stage in self._stages for p in stage.gradients.parameters}.values())

    def take_gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """Hand over the gradients of parameters. Those that stages share are summed in the stages' order."""
        return merged((stage.gradients for stage in self._stages), parameters)
