"""Random small models, cut at random places, run in random ways, equal their unsplit selves."""

import copy
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from gpipe_lite import GPipe, Pop, Stash
from gpipe_lite.schedule import BY_NAME

WIDTH = 4


class Residual(nn.Module):
    """Calls what it holds twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(inplace=True))

    def forward(self, x):
        return x + self.inner(self.inner(x))


class Cell(nn.Module):
    """Passes on a tensor, and in a dict another that some layers do not use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return {"x": torch.tanh(self.linear(x)), "side": [x.sin(), "word"]}


class Uncell(nn.Module):
    """Takes it up again, or the half of it."""

    def __init__(self, half):
        super().__init__()
        self.half = half

    def forward(self, cell):
        return cell["x"] if self.half else cell["x"] * cell["side"][0]


LAYERS = {
    "linear": lambda i: [nn.Linear(WIDTH, WIDTH)],
    "frozen": lambda i: [nn.Linear(WIDTH, WIDTH).requires_grad_(False)],
    "tanh": lambda i: [nn.Tanh()],
    "inplace": lambda i: [nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(inplace=True)],
    "norm": lambda i: [nn.LayerNorm(WIDTH)],
    "batch norm in evaluation": lambda i: [nn.BatchNorm1d(WIDTH).eval()],
    "weight norm": lambda i: [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))],
    "nested": lambda i: [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.GELU()))],
    "residual": lambda i: [Residual()],
    "dict": lambda i: [Cell(), Uncell(half=False)],
    "unused": lambda i: [Cell(), Uncell(half=True)],
    "skip": lambda i: [Stash(f"skip{i}"), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop(f"skip{i}", torch.add)],
    "nothing": lambda i: [nn.Identity()],
}


def build(kinds):
    return nn.Sequential(*(layer for i, kind in enumerate(kinds) for layer in LAYERS[kind](i)), nn.Linear(WIDTH, 2))


def cut(data, length):
    """A random balance."""
    cuts = data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) if length > 1 else set()
    edges = [0, *sorted(cuts), length]
    return [after - before for before, after in pairwise(edges)]


@settings(max_examples=150)
@given(st.data(), st.lists(st.sampled_from(sorted(LAYERS)), max_size=6), st.integers(0, 2**32 - 1))
def test_a_random_model_equals_its_unsplit_self(data, kinds, seed):
    """Loss, outputs, gradients of parameters and inputs, in float64, to 1e-10."""
    torch.manual_seed(seed)
    plain = build(kinds).double()
    samples, chunks = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    checkpoint = data.draw(st.sampled_from(["always", "except_last", "never"]))
    schedule = data.draw(st.sampled_from([*BY_NAME, "backward"]))
    x, y = torch.randn(samples, WIDTH).double(), torch.randn(samples, 2).double()
    x.requires_grad_(data.draw(st.booleans()))
    balance = cut(data, len(plain))
    pipe = GPipe(copy.deepcopy(plain), balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=checkpoint,
                 schedule="gpipe" if schedule == "backward" else schedule)  # fmt: skip
    expected = plain(x.clone())
    loss = functional.mse_loss(expected, y)
    loss.backward()
    of_input, x.grad = x.grad, None
    if schedule == "backward":
        output = pipe(x)
        found = functional.mse_loss(output, y)
        found.backward()
    else:
        result = pipe.step(x, y, functional.mse_loss, keep_outputs=True)
        found, output = result.loss, result.outputs
    torch.testing.assert_close(found, loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(x.grad, of_input, rtol=0, atol=1e-10)
    for (name, a), b in zip(plain.named_parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-10, msg=name)
