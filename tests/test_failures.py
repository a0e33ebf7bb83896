"""What goes wrong says where, at once, and leaves the pipe as good as before."""

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref
from contextvars import ContextVar
from dataclasses import FrozenInstanceError, dataclass
from types import SimpleNamespace

import pytest
import torch
from jupyter_client.manager import start_new_kernel
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe
from gpipe_lite.schedule import Phase, Task, gpipe
from gpipe_lite.threads import Mailboxes

K, M = 4, 6


class Failure(Exception):  # noqa: N818 - nobody's error: it is ordered
    """Not an error of torch's or ours."""


class Tripwire(torch.autograd.Function):
    """Passes a tensor on; its backward tells the layer."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.count(Phase.BACKWARD)
        return gradient, None


class Fragile(nn.Module):
    """A layer that fails at the n-th time that it does a phase."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.wire = SimpleNamespace(error=None)  # an object, since backward restores the layer's own attributes

    def arm(self, phase, nth, error):
        vars(self.wire).update(phase=phase, left=nth, error=error)

    def count(self, phase):
        if self.wire.error is not None and phase is self.wire.phase:
            self.wire.left -= 1
            if not self.wire.left:
                raise self.wire.error

    def forward(self, x):
        self.count(Phase.FORWARD)
        return Tripwire.apply(self.linear(x), self)


def fragile_pipe(checkpoint="always"):
    return GPipe(nn.Sequential(*[Fragile() for _ in range(K)]), [1] * K, devices=["cpu"] * K, chunks=M,
                 checkpoint=checkpoint)  # fmt: skip


CASES = [
    (checkpoint, task) for checkpoint in ("always", "except_last", "never") for task in gpipe(K, M, checkpoint).tasks()
]


@pytest.mark.parametrize(("checkpoint", "task"), CASES, ids=[f"{c}-{t}" for c, t in CASES])
def test_a_failure_at_any_task_names_its_place_and_the_pipe_works_again(checkpoint, task):
    """At every (phase, stage, micro-batch): the original error, its traceback, its place; then a right step."""
    torch.manual_seed(0)
    pipe = fragile_pipe(checkpoint)
    x, y = torch.randn(M, 3), torch.randn(M, 3)
    layer = pipe[task.stage]
    own = [t for t in pipe.schedule_for(M).device_tasks[task.stage] if t.phase is not Phase.BACKWARD]
    if task.phase is Phase.BACKWARD:
        backwards = [t for t in pipe.schedule_for(M).device_tasks[task.stage] if t.phase is Phase.BACKWARD]
        layer.arm(Phase.BACKWARD, 1 + backwards.index(task), Failure("as ordered"))
    else:
        layer.arm(Phase.FORWARD, 1 + own.index(task), Failure("as ordered"))
    error = layer.wire.error
    with pytest.raises(Failure, match="as ordered") as raised:
        pipe.step(x, y, functional.mse_loss)
    assert raised.value is error
    (note,) = error.__notes__
    assert note.startswith(f"while running {task}: ")
    words = {"F": "forward", "R": "recompute", "B": "backward"}[task.phase]
    assert f"{words} of micro-batch {task.micro_batch} on stage {task.stage} (cpu)" in note
    given = {"F": "(1, 3)", "R": "none", "B": "(1, 3)" if task.stage < K - 1 else "()"}[task.phase]
    assert note.endswith(f"shapes given to it: {given}")
    if task.phase is not Phase.BACKWARD:
        assert f"in layer '{task.stage}' (Fragile)" in note
    assert "raise self.wire.error" in "".join(traceback.format_tb(error.__traceback__))

    layer.arm(None, 0, None)
    pipe.zero_grad()
    loss = pipe.step(x, y, functional.mse_loss).loss
    plain = nn.Sequential(*pipe)
    expected = functional.mse_loss(plain(x), y)
    torch.testing.assert_close(loss, expected.detach())
    found = [p.grad.clone() for p in pipe.parameters()]
    pipe.zero_grad()
    expected.backward()
    torch.testing.assert_close(found, [p.grad for p in pipe.parameters()])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, MemoryError])
def test_whatever_a_stage_raises_reaches_the_caller(kind):
    """Also what is no Exception; through forward and backward too."""
    pipe = fragile_pipe()
    pipe[2].arm(Phase.FORWARD, 3, kind("stop"))
    with pytest.raises(kind, match="stop"):
        pipe(torch.randn(M, 3))
    pipe[2].arm(None, 0, None)
    loss = pipe(torch.randn(M, 3)).sum()
    pipe[1].arm(Phase.BACKWARD, 3, kind("stop"))
    with pytest.raises(kind, match="stop"):
        loss.backward()


def test_a_loss_function_that_raises_is_named():
    """It runs on the last stage, after its layers."""

    def loss_fn(output, target):
        raise Failure("no loss today")

    with pytest.raises(Failure) as raised:
        fragile_pipe().step(torch.randn(M, 3), torch.randn(M, 3), loss_fn)
    assert "while running F(3,0)" in raised.value.__notes__[0]
    assert "in the loss function" in raised.value.__notes__[0]


@dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818 - nobody's error: it is ordered
    """Takes no notes, nor a traceback from Python code."""

    code: int


@dataclass
class Box:
    """Not registered with torch, so no one may look for tensors in it."""

    content: object = None


def test_an_exception_that_takes_no_notes_still_wakes_everyone():
    """And one of which nothing can be told, since the batch was broken on the way."""

    class Raises(nn.Module):
        def forward(self, pair):
            pair[1].content = pair[0]
            raise ERRORS[0]

    for error, kind in ((Frozen(3), (Frozen, FrozenInstanceError)), (Failure("broken"), Failure)):
        ERRORS[0] = error
        pipe = GPipe(nn.Sequential(nn.Identity(), Raises(), nn.Identity()), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
        with pytest.raises(kind):
            pipe((torch.randn(4, 2), Box()))


ERRORS: list[Exception] = [Failure()]


@pytest.mark.parametrize("balance", [[1, 1], [2]])
def test_a_pipe_that_calls_itself_is_told_so(balance):
    """Its workers would wait for themselves; another pipe may be called from a stage."""
    inner = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2)
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), balance, devices=["cpu"] * len(balance), chunks=2)
    x = torch.randn(4, 3)
    assert torch.isfinite(pipe.step(x, x, lambda o, t: (o - inner(t).detach()).pow(2).mean()).loss)
    if len(balance) == 1:  # no workers, no waiting
        assert torch.isfinite(pipe.step(x, x, lambda o, t: (o - pipe(t).detach()).pow(2).mean()).loss)
        return
    with pytest.raises(RuntimeError, match="called the pipeline that it is running in"):
        pipe.step(x, x, lambda o, t: (o - pipe(t)).pow(2).mean())
    pipe(x).sum().backward()


def test_pipes_that_call_each_other_are_told_so():
    """However long the ring, each would wait for the others; the error comes instead, and all can go on."""
    pipes = []

    class Calls(nn.Module):
        def __init__(self, index):
            super().__init__()
            self.index = index

        def forward(self, x):
            if RING[0] is None:
                return x
            return RING[0][(self.index + 1) % len(RING[0])](x)

    for length in (1, 2, 3):
        pipes = [GPipe(nn.Sequential(nn.Identity(), Calls(i)), [1, 1], devices=["cpu"] * 2, chunks=2)
                 for i in range(length)]  # fmt: skip
        x = torch.randn(4, 3)
        try:
            RING[0] = pipes
            with torch.no_grad(), pytest.raises(RuntimeError, match="called the pipeline that it is running in"):
                pipes[0](x)
        finally:
            RING[0] = None
        assert all(torch.equal(pipe(x), x) for pipe in pipes)


RING: list[list[GPipe] | None] = [None]


def test_a_failure_stops_the_others_before_their_next_task():
    """Though their inputs have arrived already."""
    started, first_failed, ran = threading.Event(), threading.Event(), []

    class Slow(nn.Module):
        def forward(self, x):
            ran.append(1)
            started.set()
            assert first_failed.wait(30)
            return x

    class FailsAtLast(nn.Module):
        def forward(self, x):
            if x[0, 0] == M - 1:
                assert started.wait(30)
                raise Failure("after all others have left")
            return x

    pipe = GPipe(nn.Sequential(FailsAtLast(), Slow()), [1, 1], devices=["cpu"] * 2, chunks=M)
    x = torch.arange(M, dtype=torch.float32)[:, None].expand(M, 3)
    original = Mailboxes.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailboxes, "close", lambda mail: (original(mail), first_failed.set()))
        with pytest.raises(Failure):
            pipe(x)
    assert ran == [1]


@pytest.mark.parametrize("phase", ["forward", "backward", "parameter"])
def test_a_hook_that_raises_reaches_the_caller(phase):
    """Whatever it hangs on."""

    def hook(*_):
        raise Failure("in a hook")

    pipe = fragile_pipe()
    if phase == "forward":
        pipe[1].register_forward_hook(hook)
    elif phase == "backward":
        pipe[1].register_full_backward_hook(hook)
    else:
        pipe[1].linear.weight.register_hook(hook)
    with pytest.raises(Failure, match="in a hook"):
        pipe(torch.randn(M, 3)).sum().backward()
    with pytest.raises(Failure, match="in a hook"):
        pipe.step(torch.randn(M, 3), torch.randn(M, 3), functional.mse_loss)
    assert pipe[1].linear.weight._backward_hooks or phase != "parameter"


def test_out_of_memory_says_which_stage_and_what_helps():
    """Torch's own error, with a note."""
    pipe = fragile_pipe()
    pipe[2].arm(Phase.FORWARD, 1, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        pipe(torch.randn(M, 3))
    place, help_ = raised.value.__notes__
    assert "stage 2" in place
    assert (
        'stage 2 holds 1 layer(s) and its part of 6 micro-batches: what helps is more chunks, checkpoint="always"'
        in help_
    )


def test_what_is_not_a_number_is_not_hidden():
    """A loss, an output and a gradient that are NaN arrive as they are."""
    pipe = fragile_pipe()
    x = torch.randn(M, 3)
    x[2, 1] = torch.nan
    result = pipe.step(x, torch.zeros(M, 3), functional.mse_loss, keep_outputs=True)
    assert result.loss.isnan()
    assert result.outputs.isnan().any(1).tolist() == [False, False, True, False, False, False]
    assert pipe[0].linear.weight.grad.isnan().any()


def test_a_failed_step_frees_its_activations():
    """Though the traceback holds the frames, the stages forget."""
    pipe = fragile_pipe("never")
    seen = []
    pipe[0].register_forward_hook(lambda layer, inputs, output: seen.append(weakref.ref(output)))
    pipe[3].arm(Phase.FORWARD, M, Failure("late"))
    with pytest.raises(Failure) as raised:
        pipe.step(torch.randn(M, 3), torch.randn(M, 3), functional.mse_loss)
    assert raised.value.__traceback__ is not None
    gc.collect()
    assert len(seen) == M
    assert [ref() for ref in seen] == [None] * M


def test_a_forward_pass_without_a_backward_frees_its_activations():
    """Dropping the output drops all that was kept for it, though the pipe keeps the trace."""
    pipe = fragile_pipe("never")
    seen = []
    pipe[1].register_forward_hook(lambda layer, inputs, output: seen.append(weakref.ref(output)))
    output = pipe(torch.randn(M, 3))
    gc.collect()
    assert any(ref() is not None for ref in seen)
    del output
    gc.collect()
    assert [ref() for ref in seen] == [None] * M


def test_threads_are_started_once_and_end_with_their_pipe():
    """A thread a device, the same from step to step; none is left when the pipe is gone."""
    before = set(threading.enumerate())
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2, chunks=2)
    assert not set(threading.enumerate()) - before
    pipe(torch.randn(4, 3)).sum().backward()
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    assert all(thread.daemon for thread in mine)
    for _ in range(5):
        pipe(torch.randn(4, 3)).sum().backward()
    assert set(threading.enumerate()) - before == mine
    del pipe
    gc.collect()
    for thread in mine:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_one_stage_needs_no_thread():
    """It works in the caller's."""
    before = set(threading.enumerate())
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [2], devices=["cpu"], chunks=2)
    pipe(torch.randn(4, 3)).sum().backward()
    assert not set(threading.enumerate()) - before


def test_stages_share_the_callers_intra_op_threads_and_leave_its_setting():
    """Each of two workers gets half; the caller, and threads that start later, keep theirs."""
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return x + 0

    pipe = GPipe(nn.Sequential(Spy(), Spy()), [1, 1], devices=["cpu"] * 2)
    before = torch.get_num_threads()
    try:
        for threads in (4, 2, 1):
            torch.set_num_threads(threads)
            pipe(torch.randn(2, 2))
            assert torch.get_num_threads() == threads
            later = []
            thread = threading.Thread(target=lambda later=later: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert later == [threads]
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2, 1, 1, 1, 1]


def test_the_callers_context_variables_reach_every_stage():
    """Such as those that logging and tracing keep; what a stage sets stays with it."""
    variable, seen = ContextVar("variable", default="nothing"), []

    class Reads(nn.Module):
        def forward(self, x):
            seen.append(variable.get())
            variable.set("a layer's")
            return x

    for balance in ([1, 1], [2]):
        pipe = GPipe(nn.Sequential(Reads(), nn.Linear(3, 3)), balance, devices=["cpu"] * len(balance), chunks=1)
        for value in ("one", "two"):
            token = variable.set(value)
            with torch.no_grad():
                pipe(torch.randn(2, 3))
            assert seen.pop() == value
            if len(balance) > 1:
                assert variable.get() == value
            variable.reset(token)


def test_the_callers_modes_reach_every_stage_and_every_recomputation():
    """Grad, inference and autocast modes belong to threads; the workers get the caller's."""
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            out = self.linear(x)
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), out.dtype))
            return out

    for balance in ([1, 1], [2]):
        pipe = GPipe(nn.Sequential(Spy(), Spy()), balance, devices=["cpu"] * len(balance), checkpoint="always")
        x = torch.randn(2, 4)
        with torch.no_grad():
            pipe(x)
        assert set(seen) == {(False, False, torch.float32)}
        seen.clear()
        with torch.inference_mode():
            pipe(x)
        assert set(seen) == {(False, True, torch.float32)}
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = pipe(x)
        output.float().sum().backward()
        assert seen == [(True, False, torch.bfloat16)] * 4
        seen.clear()
        output = pipe(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output.sum().backward()
        assert seen == [(True, False, torch.float32)] * 4
        seen.clear()


def test_an_input_that_changed_before_it_is_recomputed_is_refused():
    """A layer, or the user, wrote into what R needs: an error, never a silently wrong gradient."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2, checkpoint="always")
    x = torch.randn(2, 3)
    output = pipe(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified in place") as raised:
        output.sum().backward()
    assert "R(0,0)" in raised.value.__notes__[0]


def run_script(code, *, interrupt=False):
    """Run a Python script in a process of its own; once it prints "ready", interrupt it if asked to."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if interrupt:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def test_ctrl_c_stops_a_step_and_the_pipe_works_again():
    """SIGINT arrives in the caller, which waits: the stages stop, and the next step is right."""
    code, out, err = run_script(
        """
        import threading, torch
        from torch import nn
        from gpipe_lite import GPipe
        started, release = threading.Event(), threading.Event()
        class Slow(nn.Module):
            def forward(self, x):
                if threading.current_thread() is threading.main_thread() or started.is_set():
                    return x + 0
                started.set()
                print("ready", flush=True)
                release.wait(20)
                return x + 0
        pipe = GPipe(nn.Sequential(nn.Identity(), Slow(), nn.Identity()), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
        import signal
        def handler(*_):
            release.set()
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, handler)
        try:
            pipe(torch.ones(4, 2))
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        print(pipe(torch.ones(4, 2)).sum().item())
        """,
        interrupt=True,
    )
    assert (code, out) == (0, "interrupted\n8.0\n"), err


@pytest.mark.notebook
def test_interrupting_a_notebook_cell_stops_the_stages_and_the_next_cell_works():
    """A real kernel, interrupted as the stop button does."""
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        setup = """
            import threading, torch
            from torch import nn
            from gpipe_lite import GPipe
            class Slow(nn.Module):
                slow = True
                def forward(self, x):
                    if self.slow:
                        print("working", flush=True)
                        threading.Event().wait(0.5)
                    return x * 2
            pipe = GPipe(nn.Sequential(Slow(), Slow()), [1, 1], devices=["cpu"] * 2, chunks=100)
            x = torch.ones(100, 1)
        """

        def execute(code, interrupt=False):
            """Run a cell; return what became of it, and its text."""
            text = []

            def note(message):
                if message["msg_type"] == "stream":
                    text.append(message["content"]["text"])
                    if interrupt and len(text) == 1:
                        manager.interrupt_kernel()

            reply = client.execute_interactive(textwrap.dedent(code), timeout=100, output_hook=note)["content"]
            return reply.get("ename", reply["status"]), "".join(text)

        assert execute(setup) == ("ok", "")
        assert execute("pipe(x)", interrupt=True)[0] == "KeyboardInterrupt"
        assert execute("Slow.slow = False; print(float(pipe(x).sum()))") == ("ok", "400.0\n")
        workers = "print(sum(thread.name.startswith('gpipe-') for thread in threading.enumerate()))"
        assert execute(workers) == ("ok", "2\n")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_idle_threads_do_not_keep_the_interpreter_alive():
    """A script that ends with a pipe alive ends; also one that ends by an error in a stage."""
    code, out, err = run_script(
        """
        import torch
        from torch import nn
        from gpipe_lite import GPipe
        pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu"] * 2)
        pipe(torch.ones(4, 2)).sum().backward()
        print("done")
        pipe(torch.ones(4, 3))
        """
    )
    assert (code, out) == (1, "done\n")
    assert "RuntimeError" in err
    assert "while running F(0,0)" in err


BAD_ARGUMENTS = {
    "chunks=0": (dict(chunks=0), ValueError, "chunks must be 1 or more, not 0"),
    "chunks=1.5": (dict(chunks=1.5), TypeError, "chunks must be a whole number, not 1.5"),
    "chunks=True": (dict(chunks=True), TypeError, "whole number, not True"),
    "checkpoint": (dict(checkpoint="sometimes"), ValueError, "always, except_last, never, not 'sometimes'"),
    "schedule": (dict(schedule="gpipes"), ValueError, "naive, gpipe, 1f1b.*not 'gpipes'"),
    "schedule=3": (dict(schedule=3), TypeError, "a name, a Schedule or a function.*not 3"),
    "devices=str": (dict(devices="cpu"), TypeError, r"\['cpu'\] \* K"),
    "balance sum": (dict(balance=[1, 1]), ValueError, r"\[1, 1\] covers 2 layers.*has 3"),
    "empty stage": (dict(balance=[3, 0]), ValueError, "0"),
    "too few devices": (dict(balance=[1, 1, 1], devices=["cpu"]), IndexError, "3 partitions need.*not 1"),
    "unknown device": (dict(balance=[3], devices=["gpu"]), ValueError, "gpu"),
    "devices=3.5": (dict(devices=3.5), TypeError, r"names one device a partition: write \[3.5\] \* K"),
    "device=1.5": (dict(devices=[1.5, "cpu"]), ValueError, "device '1.5' cannot be used here"),
    "device=None": (dict(devices=[None, None]), ValueError, "None is no device"),
    "no such device": (dict(balance=[3], devices=["cuda:99"]), ValueError, "cuda:99"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_wrong_arguments_are_refused_with_both_numbers(arguments, kind, message):
    """When the pipe is built, not when it runs."""
    with pytest.raises(kind, match=message):
        GPipe(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            **{"devices": ["cpu"] * 2, **arguments},
        )


BAD_BATCHES = {
    "empty": (torch.randn(0, 3), ValueError, "0 samples"),
    "scalar": (torch.tensor(1.0), ValueError, "0 axes"),
    "no tensor": ("text", TypeError, "at least 1 tensor"),
    "disagreeing": ((torch.randn(2, 3), torch.randn(4, 3)), ValueError, "has 2 samples.*has 4"),
}


@pytest.mark.parametrize(("batch", "kind", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_wrong_batches_are_refused(batch, kind, message):
    """Never a silent cut."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=["cpu"], chunks=2)
    with pytest.raises(kind, match=message):
        pipe(batch)


def test_targets_that_do_not_fit_the_batch_are_refused():
    """Both sizes are shown; so is a loss that is not one number."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=["cpu"], chunks=2)
    with pytest.raises(ValueError, match="x has 4 samples and y 3"):
        pipe.step(torch.randn(4, 3), torch.randn(3, 3), functional.mse_loss)
    with pytest.raises(ValueError, match=r"returned torch.float32 of shape \(2, 3\); step\(\) needs"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3), lambda output, target: output - target)
    with pytest.raises(ValueError, match="reduction='none'"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3), nn.MSELoss(reduction="none"))
    for target, kind, message in [
        (None, TypeError, "the target needs at least 1"),
        (torch.ones(()), ValueError, "target is"),
    ]:
        with pytest.raises(kind, match=message):
            pipe.step(torch.randn(4, 3), target, functional.mse_loss)
    with pytest.raises(ValueError, match=r"the target requires grad.*detach\(\) it"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3, requires_grad=True), functional.mse_loss)
    with pytest.raises(ValueError, match="returned float; step"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3), lambda output, target: 1.0)
    with pytest.raises(ValueError, match=r"returned torch.int64 of shape \(\)"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 3), lambda output, target: output.argmax())


def test_a_layer_named_like_an_attribute_of_gpipe_is_refused():
    """Its parameters could not keep their names."""
    module = nn.Sequential()
    module.add_module("step", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layer 'step' has the name of an attribute"):
        GPipe(module, [1], devices=["cpu"])


def test_the_first_failing_device_is_the_one_that_is_reported():
    """Those that stop because of it are not."""
    pipe = fragile_pipe()
    pipe[0].arm(Phase.FORWARD, 2, Failure("first"))
    with pytest.raises(Failure, match="first") as raised:
        pipe(torch.randn(M, 3))
    assert raised.value.__notes__[0].startswith(f"while running {Task(Phase.FORWARD, 0, 1)}")
