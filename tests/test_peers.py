"""What users of torchgpipe and of fairscale's Pipe rely on: constructor, attributes, kinds of errors, modes.

The behaviours are those of torchgpipe 0.0.7's public tests that do not need a GPU, stated anew. Where we differ on
purpose, a test says so.
"""

import threading
import time

import pytest
import torch
from torch import nn

from gpipe_lite import GPipe
from gpipe_lite.schedule import Phase

CHECKPOINTS = ["always", "except_last", "never"]
CPU = ["cpu"]


def phases(pipe):
    return [event.task.phase for event in pipe.trace.events]


def test_the_constructor_takes_the_same_arguments():
    """Balance by position, any iterable; the rest by name."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    GPipe(model, [1, 1], devices=CPU * 2, chunks=8, checkpoint="always", deferred_batch_norm=True)
    GPipe(model, balance=iter((1, 1)), devices=iter(CPU * 2))
    GPipe(model, torch.tensor([1, 1]), devices=[torch.device("cpu")] * 3, chunks=torch.tensor(2))
    with pytest.raises(TypeError, match="positional"):
        GPipe(model, [1, 1], CPU * 2)


def test_attributes_read_back_as_plain_types():
    """``balance``, ``devices``, ``chunks``, ``checkpoint``, ``partitions``."""
    pipe = GPipe(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), (1, 1), devices=("cpu", "cpu"), chunks=42)
    assert (pipe.balance, type(pipe.balance[0])) == ([1, 1], int)
    assert pipe.devices == [torch.device("cpu")] * 2
    assert (pipe.chunks, type(pipe.chunks)) == (42, int)
    assert pipe.checkpoint == "except_last"
    assert pipe.deferred_batch_norm is False
    assert [type(partition) for partition in pipe.partitions] == [nn.Sequential] * 2
    assert pipe.partitions[0][0] is pipe[0]


def test_it_is_a_list_of_layers():
    """Length, index, negative index, iteration, membership; the layers' names."""
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    pipe = GPipe(nn.Sequential(a, b), [1, 1], devices=CPU * 2)
    assert len(pipe) == 2
    assert (pipe[0], pipe[1], pipe[-1], pipe[-2]) == (a, b, b, a)
    assert list(pipe) == [a, b]
    assert [name for name, _ in pipe.named_children()] == ["0", "1"]
    with pytest.raises(IndexError):
        pipe[2]


def test_keys_do_not_tell_of_partitions():
    """torchgpipe's would be ``partitions.0.0.weight``, and load into the same balance only."""
    assert list(GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=CPU).state_dict()) == ["0.weight", "0.bias"]


ERRORS = {
    "not sequential": (lambda: GPipe(nn.Module(), [1], devices=CPU), TypeError, "nn.Sequential"),
    "not a module": (lambda: GPipe([nn.ReLU()], [1], devices=CPU), TypeError, "nn.Sequential"),
    "no layers": (lambda: GPipe(nn.Sequential(), [], devices=[]), ValueError, "0 layers"),
    "too few chunks": (lambda: GPipe(two(), [1, 1], devices=CPU * 2, chunks=0), ValueError, "1 or more, not 0"),
    "negative chunks": (lambda: GPipe(two(), [1, 1], devices=CPU * 2, chunks=-1), ValueError, "1 or more, not -1"),
    "balance too small": (lambda: GPipe(two(), [1], devices=CPU), ValueError, "1 layer,.*has 2"),
    "balance too large": (lambda: GPipe(two(), [1, 2], devices=CPU * 2), ValueError, "3 layers.*has 2"),
    "balance of zero": (lambda: GPipe(two(), [0, 2], devices=CPU * 2), ValueError, "0"),
    "negative balance": (lambda: GPipe(two(), [3, -1], devices=CPU * 2), ValueError, "-1"),
    "too few devices": (lambda: GPipe(two(), [1, 1], devices=CPU), IndexError, "2 partitions.*not 1"),
    "checkpoint": (lambda: GPipe(two(), [2], devices=CPU, checkpoint="INVALID"), ValueError, "INVALID"),
    "one layer twice": (
        lambda: GPipe(nn.Sequential(*[nn.ReLU()] * 2), [1, 1], devices=CPU * 2),
        ValueError,
        "one ReLU",
    ),
    "several inputs": (lambda: GPipe(two(), [2], devices=CPU)(torch.ones(1, 1), torch.ones(1, 1)), TypeError, "3"),
    "no tensor": (lambda: GPipe(two(), [2], devices=CPU)("hello"), TypeError, "at least 1 tensor"),
    "to a device": (lambda: GPipe(two(), [2], devices=CPU).to("meta"), TypeError, "name other devices"),
}


def two():
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_are_of_the_same_kind(call, kind, message):
    """TypeError, ValueError or IndexError, as there; the words are ours."""
    with pytest.raises(kind, match=message):
        call()


def test_a_missing_balance_is_found_by_itself():
    """torchgpipe refuses and recommends a function; fairscale too."""
    assert GPipe(two(), devices=CPU * 2).balance == [1, 1]


def test_shared_parameters_on_one_device_are_fine():
    """On distinct devices they are refused, with the parameter's names."""
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    b.weight = a.weight
    GPipe(nn.Sequential(a, b), [1, 1], devices=CPU * 2)
    with pytest.raises(ValueError, match=r"0\.weight.*1\.weight.*different devices"):
        GPipe(nn.Sequential(a, b), [1, 1], devices=["cpu", "meta"])


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("chunks", [1, 2, 4, 9])
def test_a_batch_need_not_divide(size, chunks):
    """Nor be as large as ``chunks``; no warning."""
    pipe = GPipe(two(), [1, 1], devices=CPU * 2, chunks=chunks)
    x = torch.rand(size, 1)
    torch.testing.assert_close(pipe(x), pipe[1](pipe[0](x)))
    pipe(x).mean().backward()
    assert all(p.grad is not None for p in pipe.parameters())


@pytest.mark.parametrize(
    ("checkpoint", "chunks", "recomputed"),
    [
        ("always", 2, 2),
        ("except_last", 2, 1),
        ("never", 2, 0),
        ("always", 1, 1),
        ("except_last", 1, 0),
        ("never", 1, 0),
    ],
)
def test_checkpoint_modes_recompute_that_many_micro_batches(checkpoint, chunks, recomputed):
    """Decided by the actual number of micro-batches, not by ``chunks``; in evaluation mode too, if grad is enabled."""
    pipe = GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=CPU, chunks=8, checkpoint=checkpoint)
    pipe(torch.rand(chunks, 1)).sum().backward()
    assert phases(pipe).count(Phase.RECOMPUTE) == recomputed
    with torch.no_grad():
        pipe(torch.rand(chunks, 1))
    assert phases(pipe) == [Phase.FORWARD] * chunks


def test_inputs_without_gradients_can_be_recomputed():
    """Integers, and a pair of which one is."""

    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.linear = nn.Embedding(5, 2), nn.Linear(2, 2)

        def forward(self, pair):
            ids, x = pair
            return self.linear(self.embedding(ids) + x)

    pipe = GPipe(nn.Sequential(nn.Identity(), Embed()), [1, 1], devices=CPU * 2, chunks=2, checkpoint="always")
    x = torch.rand(4, 2, requires_grad=True)
    pipe((torch.randint(5, (4,)), x)).sum().backward()
    assert x.grad is not None
    assert pipe[1].embedding.weight.grad is not None


@pytest.mark.parametrize("nesting", [lambda x: x, lambda x: (x,), lambda x: (x, x), lambda x: [x, {"key": x}]])
def test_inputs_and_outputs_keep_their_nesting(nesting):
    """A tuple of one stays a tuple."""
    pipe = GPipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=CPU * 2, chunks=2)
    x = nesting(torch.rand(4, 1, requires_grad=True))
    out = pipe(x)
    torch.testing.assert_close(out, x)
    assert type(out) is type(x)


def test_a_failure_in_an_early_stage_is_raised_at_once():
    """A slow later stage finishes what it has begun, and begins nothing else."""
    counter = []

    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.01)
            counter.append(1)
            return x

    class Raises(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    pipe = GPipe(nn.Sequential(nn.Identity(), Slow(), Raises()), [1, 1, 1], devices=CPU * 3, chunks=50)
    with pytest.raises(ZeroDivisionError):
        pipe(torch.rand(50, 1))
    assert len(counter) < 50
    running = len(counter)
    pipe[2].forward = lambda x: x
    pipe(torch.rand(1, 1))  # the workers are idle again: this one pass adds one
    assert len(counter) == running + 1


def test_threads_draw_the_same_random_numbers_in_every_run():
    """torchgpipe's own test of parallel dropout, over the modes."""
    outputs = []
    for checkpoint in CHECKPOINTS * 2:
        torch.manual_seed(0)
        pipe = GPipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], devices=CPU * 2, chunks=10,
                     checkpoint=checkpoint)  # fmt: skip
        outputs.append(pipe(torch.rand(100, 10, requires_grad=True) * 0 + 1).detach())
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_an_autograd_function_that_returns_its_input_works():
    """In Python, with and without recomputation."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Layer(nn.Module):
        def forward(self, x):
            return Same.apply(x)

    for checkpoint in CHECKPOINTS:
        x = torch.rand(42, 1, requires_grad=True)
        pipe = GPipe(nn.Sequential(Layer(), Layer()), [1, 1], devices=CPU * 2, chunks=4, checkpoint=checkpoint)
        out = pipe(x)
        torch.testing.assert_close(out, x)
        out.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_in_place_layers_are_right_wherever_they_stand(checkpoint):
    """torchgpipe computes a wrong gradient for some of these, as its own tests say."""
    plain = nn.Sequential(nn.Linear(1, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.LeakyReLU(inplace=True))
    x = torch.randn(6, 1)
    plain(x).pow(2).sum().backward()
    expected = [p.grad for p in plain.parameters()]
    for balance in ([1, 1, 1, 1], [1, 2, 1], [2, 2], [1, 3]):
        plain.zero_grad()
        pipe = GPipe(plain, balance, devices=CPU * len(balance), chunks=3, checkpoint=checkpoint)
        pipe(x.clone()).pow(2).sum().backward()
        torch.testing.assert_close([p.grad for p in plain.parameters()], expected)
    for first in (nn.ReLU(inplace=True), nn.Identity()):
        batch = torch.randn(6, 4)
        before = batch.clone()
        pipe = GPipe(nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(4, 1)), [1, 2], devices=CPU * 2, chunks=2)
        pipe(batch).sum().backward()
        assert torch.equal(batch, before)


def test_threads_of_the_caller_may_share_a_pipe():
    """Their passes take turns."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=CPU * 2, chunks=2)
    batches = [torch.full((4, 3), float(i)) for i in range(8)]
    expected = [pipe[1](pipe[0](batch)) for batch in batches]
    found = [None] * len(batches)

    def work(i):
        with torch.no_grad():
            found[i] = pipe(batches[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(found, expected)
