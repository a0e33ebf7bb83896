"""Stages in processes of their own compute what stages in threads compute, bit for bit, and fail in words."""

import copy
import os
import re
import signal
import time
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe, Pop, Stash
from gpipe_lite.distributed import AHEAD, DistributedGPipe
from gpipe_lite.launcher import LaunchError, launch
from gpipe_lite.plan import check_order
from gpipe_lite.schedule import BY_NAME, Schedule, ScheduleError
from gpipe_lite.skip import Routes, Skip
from gpipe_lite.watch import RankFailedError

pytestmark = pytest.mark.distributed
CHECKPOINTS = ["always", "except_last", "never"]


@dataclass
class Case:
    """A model, how it is run, and a batch that does not divide."""

    layers: list[nn.Module]
    balance: list[int]
    options: dict
    x: object
    y: object
    loss_fn: object = functional.mse_loss
    steps: int = 3
    last: int = 2  # samples of the last step
    weight: object = None

    def model(self):
        return copy.deepcopy(nn.Sequential(*self.layers))


def train(pipe, case, optimizer):
    """Some steps, the last on fewer samples; what came of them."""
    losses = []
    for step in range(case.steps):
        optimizer.zero_grad()
        samples = case.last if step == case.steps - 1 else None
        x, y = case.x[:samples], case.y[:samples]
        losses.append(pipe.step(x, y, case.loss_fn, weight=case.weight).loss)
        optimizer.step()
    return torch.stack(losses)


def sgd(pipe):
    """Of a stage that may have no parameters."""
    return torch.optim.SGD([*pipe.parameters()] or [nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def on_rank(case, seed):
    torch.manual_seed(0)
    pipe = DistributedGPipe(case.model(), case.balance, timeout=20, **case.options)
    torch.manual_seed(seed)
    optimizer = sgd(pipe)
    losses = train(pipe, case, optimizer)
    with torch.no_grad():
        output = pipe.eval()(case.x)
    return losses, pipe.state_dict(), output, torch.get_rng_state(), {n: p.grad for n, p in pipe.named_parameters()}


def assert_as_with_threads(case, seed=1):
    found = launch(on_rank, len(case.balance), case, seed, timeout=100)
    pipe = GPipe(case.model(), case.balance, devices=["cpu"] * len(case.balance), **case.options)
    torch.manual_seed(seed)
    optimizer = sgd(pipe)
    losses = train(pipe, case, optimizer)
    state = torch.get_rng_state()
    with torch.no_grad():
        output = pipe.eval()(case.x)
    for rank, (its_losses, _, its_output, its_state, _) in enumerate(found):
        assert torch.equal(its_losses, losses), f"losses on rank {rank}"
        assert torch.equal(its_state, state), f"random state on rank {rank}"
        assert (its_output is None) == (rank + 1 < len(found))
    torch.testing.assert_close(found[-1][2], output, rtol=0, atol=0)
    merged = {name: tensor for _, state_dict, *_ in found for name, tensor in state_dict.items()}
    assert merged.keys() == pipe.state_dict().keys()
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(merged[name], tensor), name
    gradients = {name: gradient for *_, its in found for name, gradient in its.items()}
    assert all(torch.equal(gradients[name], p.grad) for name, p in pipe.named_parameters())


def mlp():
    torch.manual_seed(0)
    layers = [
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 2),
    ]
    return [layer.double() for layer in layers]


@pytest.mark.parametrize("schedule", BY_NAME)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_schedule_and_mode_gives_the_bits_of_threads(schedule, checkpoint):
    """Losses, gradients, weights, statistics and random numbers, on uneven micro-batches, with dropout."""
    options = {"chunks": 3, "schedule": schedule, "checkpoint": checkpoint, "deferred_batch_norm": True}
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    assert_as_with_threads(Case(mlp(), [2, 2, 3], options, x, y, last=6))


class Split(nn.Module):
    """Makes many things of a tensor: a view, an integer, a mask, None, a number, an empty tensor."""

    def forward(self, x):
        return {"x": x.mT, "most": x.argmax(1), "mask": x > 0, "none": None, "rest": (3, x[:, :0], x.detach())}


class Join(nn.Module):
    def forward(self, parts):
        assert parts["none"] is None
        number, empty, kept = parts["rest"]
        assert empty.shape[1] == 0
        assert not kept.requires_grad
        x = parts["x"].mT
        return (x * parts["mask"] + number * x + parts["most"][:, None] + kept)[:, :2]


def test_any_nesting_of_anything_crosses_between_processes():
    """Integers, masks, None, numbers, empty tensors, views; and what needs no gradient gets none."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4).double(), Split(), nn.Identity(), Join(), nn.Linear(2, 2).double()]
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    assert_as_with_threads(Case(layers, [2, 1, 2], {"chunks": 3, "checkpoint": "always"}, x, y))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_skips_go_straight_to_the_rank_that_pops_them(schedule):
    """Over two ranks that do not see them, and their gradients back."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), Stash("a"), nn.Linear(3, 3), nn.Tanh(), Stash("b"), nn.Linear(3, 3), Pop("b", torch.add),
              Pop("a", torch.add), nn.Linear(3, 2)]  # fmt: skip
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    options = {"chunks": 4, "schedule": schedule}
    assert_as_with_threads(Case([layer.double() for layer in layers], [2, 2, 2, 3], options, x, y))


def test_lengths_may_change_from_batch_to_batch_and_masked_losses_are_right():
    """Shapes travel when they change; a loss that ignores padding is weighted by what it counts."""
    torch.manual_seed(0)

    class Turn(nn.Module):
        def forward(self, x):
            return x.mT

    layers = [nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 9), Turn()]
    x = torch.randint(9, (6, 5))
    y = torch.where(torch.rand(6, 5) < 0.5, -100, torch.randint(9, (6, 5)))
    y[0, 0] = y[1, 0] = 3
    assert_as_with_threads(Case(layers, [1, 2, 2], {"chunks": 3}, x, y, functional.cross_entropy))


def test_one_process_is_a_pipeline_too():
    """Of one stage."""
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    assert_as_with_threads(Case(mlp(), [7], {"chunks": 3, "deferred_batch_norm": True}, x, y, last=6))


def test_layers_may_be_made_where_they_are_needed():
    """From functions, with the random numbers of the whole model; or from the meta device, without them."""
    makers = [lambda i=i: nn.Linear(3 + i, 4 + i) for i in range(4)]

    def work():
        torch.manual_seed(5)
        lazily = DistributedGPipe(makers, [1, 3])
        with torch.device("meta"):
            empty = nn.Sequential(OrderedDict((f"layer{i}", make()) for i, make in enumerate(makers)))
        on_meta = DistributedGPipe(empty, [2, 2])
        values = [p.isfinite().all() and p.device.type == "cpu" and p.abs().sum() > 0 for p in on_meta.parameters()]
        return lazily.state_dict(), sorted(on_meta.state_dict()), all(values)

    found = launch(work, 2)
    torch.manual_seed(5)
    whole = nn.Sequential(*[make() for make in makers]).state_dict()
    merged = {name: tensor for state, _, _ in found for name, tensor in state.items()}
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())
    assert found[0][1] == ["layer0.bias", "layer0.weight", "layer1.bias", "layer1.weight"]
    assert all(ok for *_, ok in found)


def test_the_traces_of_all_ranks_are_put_on_one_clock():
    """Each task once, in an order that the schedule allows; every rank has the same trace."""

    def work():
        pipe = DistributedGPipe(nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)]), chunks=4)
        for _ in range(2):
            pipe.step(torch.randn(8, 3), torch.randn(8, 3), functional.mse_loss)
        return pipe.gather_trace(), pipe.clock_offsets

    found = launch(work, 3)
    trace, offsets = found[0]
    assert all(other.events == trace.events for other, _ in found)
    assert [(trace.num_devices, trace.num_stages, trace.num_micro_batches)] == [(3, 3, 4)]
    trace.schedule.check()
    assert len(offsets) == 3
    slack = sum(offset.uncertainty for offset in offsets)
    for event in trace.events:
        for before in trace.schedule.predecessors(event.task):
            assert trace.event_of(before).end <= event.start + slack


def test_gradients_are_clipped_by_the_norm_of_all_stages():
    """As the whole model's; a small norm is left as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 3).double()

    def work(limit):
        pipe = DistributedGPipe(model, [1, 1], chunks=2)
        pipe.step(x, y, functional.mse_loss)
        return pipe.clip_grad_norm_(limit), [p.grad for p in pipe.parameters()]

    for limit in (0.01, 100.0):
        plain = copy.deepcopy(model)
        functional.mse_loss(plain(x), y).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), limit)
        found = launch(work, 2, limit)
        assert [norm_of for norm_of, _ in found] == [pytest.approx(float(norm))] * 2
        for a, b in zip(plain.parameters(), [g for _, gradients in found for g in gradients], strict=True):
            torch.testing.assert_close(a.grad, b, rtol=0, atol=1e-10)


def test_the_gradient_of_the_input_comes_to_rank_0():
    """And goes on to what it was computed from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 3).double()

    def work():
        pipe, leaf = DistributedGPipe(model, [1, 1], chunks=2), x.clone().requires_grad_()
        pipe.step(leaf * 2, y, functional.mse_loss)
        return leaf.grad

    leaf = x.clone().requires_grad_()
    functional.mse_loss(copy.deepcopy(model)(leaf * 2), y).backward()
    first, second = launch(work, 2)
    torch.testing.assert_close(first, leaf.grad, rtol=0, atol=1e-10)
    assert second is None


# When something goes wrong


class Trouble(nn.Module):
    """Fails on rank 1 in its eighth pass."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.calls = nn.Linear(3, 3), how, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 8 and dist.get_rank() == 1:
            match self.how:
                case "raises":
                    raise ValueError("as ordered")
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stands still":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "is slow":
                    time.sleep(20)
        return self.linear(x)


def steps_with(how, record):
    pipe = DistributedGPipe(nn.Sequential(*[Trouble(how) for _ in range(3)]), chunks=3, checkpoint="never", timeout=3)
    x = torch.randn(6, 3)
    try:
        for _ in range(5):
            pipe.step(x, x, functional.mse_loss)
    except (RankFailedError, ValueError) as error:
        for _ in range(2):  # it stays so
            with pytest.raises(RankFailedError):
                pipe.step(x, x, functional.mse_loss)
        (record / f"{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", r"rank 1 \(stage 1\) on .* failed: ValueError: as ordered; while running F\(1,1\): forward of "
                   r"micro-batch 1 on stage 1 \(cpu\), in layer '1' \(Trouble\); shapes given to it: \(2, 3\)"),
        ("is killed", "the connection to rank 1 broke: its process ended, or was killed"),
        ("stands still", r"rank 1 on .* has not been heard of for \d s, and was .* last: its process stands still"),
        ("is slow", r"rank 1 on .* has been running F\(1,1\) for \d s, .* raise timeout"),
    ],
)  # fmt: skip
def test_all_ranks_stop_and_name_the_one_that_failed_first(how, words, tmp_path):
    """In about the timeout, with one error; nobody waits for ever."""
    start = time.monotonic()
    with pytest.raises(LaunchError):
        launch(steps_with, 3, how, tmp_path, timeout=20)
    for rank in (0, 2):
        said = (tmp_path / str(rank)).read_text()
        assert said.startswith("RankFailedError: ")
        assert re.search(words, said), said
    if how == "raises":
        assert (tmp_path / "1").read_text() == "ValueError: as ordered"
    assert time.monotonic() - start < 25


def test_a_wrong_batch_on_rank_0_is_told_to_all():
    """They wait for it, and get its words."""

    def work():
        pipe = DistributedGPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), chunks=2)
        try:
            pipe.step(torch.ones(0, 3), torch.ones(0, 3), functional.mse_loss)
        except (RankFailedError, ValueError) as error:
            return type(error).__name__, str(error)

    (first, _), (second, said) = launch(work, 2)
    assert (first, second) == ("ValueError", "RankFailedError")
    assert "rank 0 (stage 0)" in said
    assert "0 samples" in said


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (lambda pipe, x: pipe.step(x, x[:2], functional.mse_loss), "x has 4 samples and y 2"),
        (lambda pipe, x: pipe.step(x, x), "step() needs a loss function on the last rank, and got None"),
        (lambda pipe, x: pipe(x), "call step(x, y, loss_fn) on every rank, or run the pipeline under torch.no_grad()"),
        (
            lambda pipe, x: pipe.step(x, x, functional.mse_loss) if pipe.rank else torch.no_grad()(pipe)(x),
            "rank 0 called forward() without gradients, and rank 1 step() with gradients",
        ),
    ],
)
def test_wrong_calls_are_refused_on_all_ranks(calls, words):
    """With the same words, whoever found out."""

    def work():
        pipe = DistributedGPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), chunks=2)
        try:
            calls(pipe, torch.ones(4, 3))
        except (RuntimeError, ValueError, TypeError) as error:
            return str(error)

    assert all(words in said for said in launch(work, 2))


def test_wrong_arguments_are_refused_with_both_numbers():
    """Before anything is sent."""
    shared = nn.Linear(3, 3)
    tied = nn.Sequential(shared, nn.Linear(3, 3))
    tied[1].weight = shared.weight
    linear = lambda: nn.Linear(3, 3)  # noqa: E731 - a maker of layers
    with torch.device("meta"):
        no_reset = nn.Sequential(nn.Linear(3, 3), Bare())

    def work():
        said = []
        for arguments, options in (
            ((nn.Sequential(linear(), linear()), [1, 1, 1]), {}),
            ((nn.Sequential(linear(), linear()), [2]), {}),
            ((tied, [1, 1]), {}),
            (([linear, linear],), {}),
            (([linear, linear], [1, 2]), {}),
            ((linear(),), {}),
            ((nn.Sequential(linear(), linear()),), {"timeout": 0}),
            ((nn.Sequential(linear(), linear()),), {"chunks": 0}),
            ((no_reset, [1, 1]), {}),
        ):
            try:
                DistributedGPipe(*arguments, **options)
                said.append("")
            except (TypeError, ValueError, RankFailedError) as error:
                said.append(str(error))
        return said

    _, said = launch(work, 2)
    for found, words in zip(
        said,
        [
            "balance [1, 1, 1] has 3 stages, and there are 2 processes",
            "balance [2] has 1 stages, and there are 2 processes",
            "parameter ('0.weight', '1.weight') is shared by stages (0, 1), which are processes of their own",
            "a list of 2 functions needs a balance",
            "balance [1, 2] covers 3 layers, the model has 2",
            "the model is an nn.Sequential, or a list of functions that make its layers, not Linear",
            "timeout is in seconds, above 0, not 0",
            "chunks must be 1 or more, not 0",
            "layer '1' (Bare) is on the meta device and has no reset_parameters()",
        ],
        strict=True,
    ):
        assert words in found


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def test_without_processes_the_way_to_start_them_is_told():
    """In a plain program."""
    with pytest.raises(RuntimeError, match="there is no process group: start one process a stage, such as by torchrun"):
        DistributedGPipe(nn.Sequential(nn.Linear(3, 3)))


# The order of messages


@pytest.mark.parametrize("schedule", BY_NAME)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 5), (4, 9), (8, 32)])
def test_the_schedules_of_the_package_exchange_values_in_one_order(schedule, stages, micro_batches):
    """With skips over all stages, and the room that there is."""
    skips = [Skip("a", 0, stages - 1), Skip("b", 0, min(2, stages - 1))]
    routes = Routes([skip for skip in skips if skip.stashed_on != skip.popped_on])
    check_order(BY_NAME[schedule](stages, micro_batches, "always"), routes, room=AHEAD * (1 + len(routes.skips)))


def test_an_order_in_which_processes_would_wait_for_each_other_is_refused():
    """Threads can run it, since they put values aside."""
    crossed = Schedule.from_text("F0 F1 B0 B1\nF1 F0 B0 B1").check()
    with pytest.raises(
        ScheduleError, match=r"device 1 needs what is for F\(1,1\) first, and device 0 sends what is for"
    ):
        check_order(crossed, Routes(), room=4)
    late = Schedule.from_text("F0 F1 F2 F3 B3 B2 B1 B0\nF0 B0 F1 B1 F2 B2 F3 B3").check()
    with pytest.raises(ScheduleError, match="device 0 needs what is for"):
        check_order(late, Routes(), room=4)
