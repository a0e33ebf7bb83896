"""The same laws on CUDA devices: stages on one GPU, and on several."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe, Pop, Stash
from gpipe_lite.schedule import BY_NAME, Phase

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]  # a deadlock of autograd's device threads becomes a failure

ONE_GPU = [["cuda:0"] * 4, ["cpu", "cuda:0", "cpu", "cuda:0"], ["cuda:0", "cuda:0", "cpu", "cpu"]]
SEVERAL = [["cuda:0", "cuda:1", "cuda:0", "cuda:1"], ["cuda:1", "cpu", "cuda:0", "cuda:1"]]
PLACES = [
    *[pytest.param(devices, id="-".join(devices)) for devices in ONE_GPU],
    *[
        pytest.param(
            devices,
            id="-".join(devices),
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
        )
        for devices in SEVERAL
    ],
]


def model(dropout=0.0):
    return nn.Sequential(
        nn.Linear(6, 32),
        nn.Dropout(dropout),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.Dropout(dropout),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Linear(32, 4),
    )


def same_on_cpu(a, b):
    torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_backward_equals_the_unsplit_models_and_does_not_deadlock(devices, checkpoint):
    """Autograd has one thread a CUDA device: waiting there for stages on the same device would never end."""
    torch.manual_seed(0)
    plain = model().double()
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 2, 2], devices=devices, chunks=4, checkpoint=checkpoint)
    x = torch.randn(10, 6).double().requires_grad_()
    for _ in range(3):
        plain.zero_grad()
        pipe.zero_grad()
        x.grad = None
        plain(x).pow(2).mean().backward()
        expected, x.grad = x.grad, None
        output = pipe(x)
        assert output.device == torch.device(devices[-1])
        output.pow(2).mean().backward()
        same_on_cpu(x.grad, expected)
        for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
            same_on_cpu(a.grad, b.grad)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("schedule", BY_NAME)
def test_a_step_equals_the_unsplit_models(devices, schedule):
    """With the loss inside, by every schedule, from a batch on the CPU and from one on the device."""
    torch.manual_seed(0)
    plain = model().double()
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 2, 2], devices=devices, chunks=4, schedule=schedule)
    x, y = torch.randn(10, 6).double(), torch.randn(10, 4).double()
    expected = functional.mse_loss(plain(x), y)
    expected.backward()
    for place in ("cpu", "cuda:0"):
        pipe.zero_grad()
        result = pipe.step(x.to(place), y.to(place), functional.mse_loss)
        same_on_cpu(result.loss, expected.detach())
        for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
            same_on_cpu(a.grad, b.grad)


@pytest.mark.parametrize("devices", PLACES)
def test_dropout_gives_the_same_bits_in_every_checkpoint_mode(devices):
    """The generators of the devices are governed like the CPU's."""
    torch.manual_seed(0)
    plain = model(dropout=0.5)
    x, y = torch.randn(32, 6), torch.randn(32, 4)
    found = []
    for checkpoint in ("always", "except_last", "never"):
        pipe = GPipe(copy.deepcopy(plain), [2, 2, 2, 2], devices=devices, chunks=4, checkpoint=checkpoint)
        torch.manual_seed(1)
        loss = pipe.step(x, y, functional.mse_loss).loss
        found.append([loss.cpu(), *[p.grad.cpu() for p in pipe.parameters()]])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_copies_wait_for_the_data_on_the_callers_stream():
    """A batch still being computed on a stream of the caller's, and large enough that copies take a while."""
    plain = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1, 1], devices=["cuda:0", "cpu", "cuda:0", "cuda:0"], chunks=4)
    plain.to("cuda:0")
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(64, 2048, device="cuda:0")
            for _ in range(20):
                x = torch.tanh(x @ plain[0].weight) + x
            output = pipe(x)
            torch.testing.assert_close(output, plain(x), rtol=1e-2, atol=1e-2)


def test_a_trace_on_cuda_is_measured_by_the_devices_clock():
    """Its tasks take the time of the kernels, not that of launching them, and keep the schedule's order."""
    pipe = GPipe(nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]), [2, 2], devices=["cuda:0"] * 2, chunks=4)
    x = torch.randn(4096, 4096, device="cuda:0")
    trace = pipe.step(x, x, functional.mse_loss).trace
    assert trace.schedule == pipe.schedule_for(4)
    forward = [event.end - event.start for event in trace.events if event.task.phase is Phase.FORWARD]
    assert min(forward) > 0


def test_memory_is_given_back_after_a_step():
    """No activation outlives its step."""
    pipe = GPipe(model(), [4, 4], devices=["cuda:0"] * 2, chunks=4)
    x, y = torch.randn(64, 6, device="cuda:0"), torch.randn(64, 4, device="cuda:0")
    allocated = []
    for _ in range(4):
        pipe.step(x, y, functional.mse_loss)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[1:])) == 1


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_skips_and_deferred_statistics_cross_devices(devices, checkpoint):
    """A tensor is stashed on the first device and popped on the last; BatchNorm follows the mini-batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), Stash("a"), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 8),
                          nn.Tanh(), Pop("a", torch.add), nn.Linear(8, 4)).double()  # fmt: skip
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 2, 2], devices=devices, chunks=4, checkpoint=checkpoint,
                 deferred_batch_norm=True)  # fmt: skip
    x, y = torch.randn(10, 6).double(), torch.randn(10, 4).double()
    plain[2](plain[0](x))  # its statistics follow the mini-batch
    statistics = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    for part, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (functional.mse_loss(plain(part), target) * (len(part) / 10)).backward()
    pipe.step(x, y, functional.mse_loss)
    for a, b in zip(pipe.parameters(), plain.parameters(), strict=True):
        same_on_cpu(a.grad, b.grad)
    for name, buffer in pipe.named_buffers():
        same_on_cpu(buffer, statistics[name])


@pytest.mark.parametrize("devices", PLACES)
def test_gradients_reach_autograd_once_from_every_device(devices):
    """Hooks on parameters fire once, and ``torch.autograd.grad`` adds nothing to ``.grad``."""
    pipe = GPipe(model().double(), [2, 2, 2, 2], devices=devices, chunks=4, checkpoint="always")
    x = torch.randn(10, 6).double().requires_grad_()
    fired = []
    for parameter in pipe.parameters():
        parameter.register_hook(lambda gradient: fired.append(gradient.device))
    loss = pipe(x).pow(2).mean()
    torch.autograd.grad(loss, [x], retain_graph=True)
    assert fired == []
    loss.backward()
    assert sorted(map(str, fired)) == sorted(str(parameter.device) for parameter in pipe.parameters())
