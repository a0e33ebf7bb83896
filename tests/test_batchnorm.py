"""BatchNorm's running statistics: the mini-batch's when deferred, else each micro-batch's once."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe
from gpipe_lite.batchnorm import Moments

CHECKPOINTS = ["always", "except_last", "never"]
KINDS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}


def model(dims, momentum):
    conv, norm = KINDS[dims]
    return nn.Sequential(
        conv(2, 3, 2), norm(3, momentum=momentum), nn.ReLU(), conv(3, 4, 1), norm(4, momentum=momentum)
    )


def statistics(module):
    return {name: buffer for name, buffer in module.named_buffers() if "running" in name or "tracked" in name}


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    st.sampled_from([0.1, 0.7, None]),
    st.integers(1, 5),
    st.lists(st.integers(2, 9), min_size=1, max_size=3),
    st.sampled_from(CHECKPOINTS),
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(0, 2**32 - 1),
)
def test_deferred_statistics_equal_the_unsplit_layers(dims, momentum, chunks, batches, checkpoint, schedule, seed):
    """Over several steps with evaluation in between; the first layer's input is the same in both, so its are exact."""
    torch.manual_seed(seed)
    plain = model(dims, momentum).double()
    pipe = GPipe(copy.deepcopy(plain), [2, 3], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint,
                 schedule=schedule, deferred_batch_norm=True)  # fmt: skip
    for samples in batches:
        x = 100 + torch.randn(samples, 2, *[3] * dims).double()
        pipe.step(x, torch.zeros(samples), lambda output, _: output.pow(2).mean())
        with torch.no_grad():
            pipe.eval()(x)
            # BatchNorm 1 sees what the micro-batches' BatchNorm 0 made of x: the oracle does the same.
            between = [plain[2](functional.batch_norm(plain[0](part), None, None, plain[1].weight, plain[1].bias, True))
                       for part in x.tensor_split(min(chunks, samples))]  # fmt: skip
            plain[1](plain[0](x))
            plain[4](plain[3](torch.cat(between)))
        pipe.train()
    for name, expected in statistics(plain).items():
        torch.testing.assert_close(statistics(pipe)[name], expected, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.filterwarnings("ignore:layer .* is a BatchNorm:UserWarning")  # what it warns of is tested here
def test_recomputation_updates_nothing_twice(checkpoint, deferred):
    """One batch counts once when deferred, and each micro-batch once when not."""
    pipe = GPipe(model(2, 0.1), [2, 3], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint,
                 deferred_batch_norm=deferred)  # fmt: skip
    pipe(torch.randn(8, 2, 3, 3)).sum().backward()
    assert int(pipe[1].num_batches_tracked) == (1 if deferred else 4)


def test_a_forward_pass_updates_and_an_evaluation_does_not():
    """As in the unsplit model, whether or not a backward follows; a frozen layer's own mode counts."""
    pipe = GPipe(model(2, 0.1), [2, 3], devices=["cpu"] * 2, chunks=4, deferred_batch_norm=True)
    pipe[4].eval()
    with torch.no_grad():
        pipe(torch.randn(8, 2, 3, 3))
    assert [int(pipe[i].num_batches_tracked) for i in (1, 4)] == [1, 0]
    pipe.eval()(torch.randn(8, 2, 3, 3))
    assert [int(pipe[i].num_batches_tracked) for i in (1, 4)] == [1, 0]


def test_a_layer_called_twice_in_a_pass_updates_twice():
    """With the moments of its first calls, then of its second, as the unsplit layer would."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            self.norm(x)
            return self.norm(input=x * x)

    plain = nn.Sequential(Twice(), nn.Identity()).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=3, deferred_batch_norm=True)
    x = torch.randn(8, 3).double()
    plain(x)
    pipe(x)
    for name, expected in statistics(plain).items():
        torch.testing.assert_close(statistics(pipe)[name], expected, rtol=1e-10, atol=1e-10)


def test_a_layer_that_some_micro_batches_skip_follows_the_others():
    """As the unsplit layer would, had it been given those samples alone."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x) if x[0, 0] > 0 else x

    x = torch.randn(8, 3).double()
    x[:, 0] = torch.tensor([1.0] * 2 + [-1.0] * 4 + [1.0] * 2)
    plain = nn.Sequential(Sometimes(), nn.Identity()).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=4, deferred_batch_norm=True)
    plain[0].norm(torch.cat([x[:2], x[6:]]))
    pipe(x)
    for name, expected in statistics(plain).items():
        torch.testing.assert_close(statistics(pipe)[name], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_in_half_precision_do_not_overflow(dtype):
    """Sums of squares soon pass 65504; they are gathered in float32, as torch gathers its own."""
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Identity()).to(dtype)
    pipe = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=3, deferred_batch_norm=True)
    x = (30 * torch.randn(400, 3)).to(dtype)
    plain(x)
    pipe(x)
    for name, expected in statistics(plain).items():
        torch.testing.assert_close(statistics(pipe)[name], expected, rtol=1e-2, atol=1e-2, msg=name)


def test_a_failed_step_changes_no_deferred_statistics():
    """They are updated when the last micro-batch has passed."""

    class Fails(nn.Module):
        def forward(self, x):
            if len(x) == 2:
                raise ValueError("two samples")
            return x

    pipe = GPipe(nn.Sequential(nn.BatchNorm1d(3), Fails()), [2], devices=["cpu"], chunks=2, deferred_batch_norm=True)
    with pytest.raises(ValueError, match="two samples"):
        pipe(torch.randn(5, 3))
    assert int(pipe[0].num_batches_tracked) == 0
    assert not pipe[0]._forward_pre_hooks
    assert pipe[0].track_running_stats


def test_a_micro_batch_of_one_sample_is_explained():
    """Torch says what it lacks, and we where it comes from."""
    pipe = GPipe(nn.Sequential(nn.BatchNorm1d(3)), [1], devices=["cpu"], chunks=4, deferred_batch_norm=True)
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        pipe(torch.randn(4, 3))
    assert "take fewer chunks, or larger batches" in raised.value.__notes__[1]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_moments_of_parts_add_up_to_those_of_the_whole(sizes, seed):
    """Far from zero too, where differences of large sums would lose all digits."""
    x = 1e6 + torch.randn(sum(sizes), 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    total, *rest = [Moments.of(part, torch.float64) for part in x.split(sizes)]
    for part in rest:
        total += part
    assert total.count == 2 * sum(sizes)
    torch.testing.assert_close(total.mean, x.mean([0, 2]))
    expected = (x - x.mean([0, 2], keepdim=True)).square().sum([0, 2])
    torch.testing.assert_close(total.squares, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3)])
def test_layers_without_running_statistics_have_nothing_to_defer(layer):
    """They run as they are."""
    pipe = GPipe(nn.Sequential(layer, nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=2, deferred_batch_norm=True)
    assert pipe(torch.randn(4, 3, 5)).shape == (4, 3, 5)
