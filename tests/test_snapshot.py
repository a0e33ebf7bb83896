"""Recomputation finds the layers as the forward pass found them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from gpipe_lite import GPipe

CHECKPOINTS = ["always", "except_last", "never"]


class Codebook(nn.Module):
    """Its output depends on a buffer that each pass replaces by a new tensor, or writes into."""

    def __init__(self, replaces):
        super().__init__()
        self.replaces = replaces
        self.linear = nn.Linear(3, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.ones(3))
        self.register_buffer("absent", None)

    def forward(self, x):
        out = torch.tanh(self.linear(x) * self.constant - self.centre.clone())
        with torch.no_grad():
            if self.replaces:
                self.centre = 0.5 * self.centre + out.mean(0)
            else:
                self.centre.mul_(0.5).add_(out.mean(0))
            self.calls += 1
        return out


def kinds():
    torch.manual_seed(0)
    with_hook = nn.Linear(3, 3)
    with_hook.register_buffer("sum", torch.zeros(3))

    def hook(layer, inputs):
        with torch.no_grad():
            layer.sum += inputs[0].mean(0)
        return (inputs[0] + layer.sum.clone(),)

    with_hook.register_forward_pre_hook(hook)
    return {
        "spectral_norm": parametrizations.spectral_norm(nn.Linear(3, 3)),
        "old spectral_norm": nn.utils.spectral_norm(nn.Linear(3, 3)),
        "in place": Codebook(replaces=False),
        "replaced": Codebook(replaces=True),
        "hook": with_hook,
    }


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning")  # people use it still
def test_layers_that_write_buffers_equal_the_plain_layers_over_the_same_micro_batches(kind, checkpoint):
    """Gradients and the buffers afterwards: each micro-batch updates once, recomputation sees the old values."""
    plain = nn.Sequential(nn.Linear(3, 3), kinds()[kind], nn.Linear(3, 2)).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    for _ in range(2):
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            (functional.mse_loss(plain(a), b) / 4).backward()
        pipe.step(x, y, functional.mse_loss)
    for (name, a), (_, b) in zip(plain.named_parameters(), pipe.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10, msg=name)
    for (name, a), (_, b) in zip(plain.named_buffers(), pipe.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


def test_a_layer_keeps_its_own_buffer_object():
    """What others hold a reference to stays the layer's."""
    layer = Codebook(replaces=False)
    before = layer.centre
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="always")
    pipe(torch.randn(4, 3)).sum().backward()
    assert layer.centre is before
    assert layer.calls == 2
