"""Recomputation finds the layers as the forward pass found them."""

import copy
import random
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from gpipe_lite import GPipe
from gpipe_lite.snapshot import Buffers, Glimpse

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
        "instance_norm": nn.Sequential(
            nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
        ),
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


class Gate(nn.Module):
    """Has all that a user may change: a flag, a part, parameters, a mode, a nothing in the place of a bias."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.opens = False
        self.register_parameter("bias", None)

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        if self.bias is not None:
            x = x + self.bias
        return x if self.opens else self.dropout(x) * 2


def double(_layer, _inputs, output):
    return output * 2


CHANGES = {
    "mode": lambda gate: gate.eval(),
    "hook added": lambda gate: gate.register_forward_hook(double),
    "hook of a part removed": lambda gate: gate.linear._forward_hooks.clear(),
    "flag": lambda gate: setattr(gate, "opens", True),
    "part replaced": lambda gate: setattr(gate, "linear", nn.Linear(3, 3).double()),
    "part without dropout": lambda gate: setattr(gate, "dropout", nn.Identity()),
    "parameter added": lambda gate: setattr(gate, "bias", nn.Parameter(torch.ones(3).double())),
    "forward replaced": lambda gate: setattr(gate, "forward", lambda x: x),
    "pruned": lambda gate: prune.l1_unstructured(gate.linear, "weight", 0.5),
    "loaded in the place of the old": lambda gate: gate.linear.load_state_dict(
        nn.Linear(3, 3).double().state_dict(), assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_what_changes_before_backward_does_not_enter_a_recomputation(change, checkpoint):
    """The gradients are of the forward pass that was, with its random numbers; the change stays."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), Gate(), nn.Linear(3, 2)).double()
    layers[1].linear.register_forward_hook(double)
    x, found = torch.randn(6, 3).double(), []
    for changed in (False, True):
        pipe = GPipe(copy.deepcopy(layers), [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
        parameters = dict(pipe.named_parameters())
        torch.manual_seed(1)
        output = pipe(x)
        if changed:
            change(pipe[1])
            after = vars(pipe[1]).copy()
        output.pow(2).sum().backward()
        if changed:
            assert vars(pipe[1]) == after
        found.append({name: p.grad for name, p in parameters.items()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


class Forgets(nn.Module):
    """Computes something else each time, by means that nobody can see."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, []

    def forward(self, x):
        match self.kind:
            case "python's random numbers":
                return x * random.random()
            case "a list":
                self.calls.append(1)
                return x * len(self.calls)
            case "one number of many":
                self.calls.append(1)
                return torch.cat([x, x[:, -1:] + len(self.calls)], 1)
            case "number of tensors":
                self.calls.append(1)
                return x if len(self.calls) < 2 else (x, x)
            case "kind":
                self.calls.append(1)
                return x if len(self.calls) < 2 else x.float()


@pytest.mark.parametrize(
    "kind", ["python's random numbers", "a list", "one number of many", "number of tensors", "kind"]
)
def test_a_recomputation_that_makes_something_else_is_refused(kind):
    """Its gradients would be wrong, silently; without recomputation the layer works."""
    x = torch.randn(1, 3).double()
    for checkpoint, balance in (("always", [1, 1]), ("always", [2]), ("never", [1, 1])):
        model = nn.Sequential(nn.Linear(3, 3), Forgets(kind)).double()
        pipe = GPipe(model, balance, devices=["cpu"] * len(balance), chunks=1, checkpoint=checkpoint)
        output = pipe(x)
        if checkpoint == "never":
            output.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="made something else than its forward pass"):
            output.sum().backward()
        assert pipe[0].weight.grad is None, "nothing lands of what is wrong"


def test_a_loss_function_that_forgets_is_refused_too():
    """It belongs to what the last stage recomputes."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=["cpu"], chunks=2, checkpoint="always")
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="a layer or the loss function draws random"):
        pipe.step(x, x, lambda output, target: functional.mse_loss(output, target) * random.random())


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (torch.ones(3), torch.ones(3) + 1e-6, True),  # sums in another order
        (torch.ones(3), torch.ones(3) + 1e-2, False),
        (torch.tensor([1e6, 1.0]), torch.tensor([1e6, 1.5]), True),  # small beside the largest
        (torch.ones(3).double(), torch.ones(3).double() + 1e-6, False),
        (torch.tensor([torch.nan, torch.inf, 1.0]), torch.tensor([torch.nan, torch.inf, 1.0]), True),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.ones(3), torch.ones(1, 3), False),
        (torch.ones(3), torch.ones(4), False),
        (torch.ones(3), torch.ones(3).double(), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) + 1e-2j, False),
    ],
)
def test_a_glimpse_forgives_rounding_and_nothing_more(one, other, alike):
    """In each dtype its own."""
    assert Glimpse([one]).resembles(Glimpse([other])) is alike


def test_a_glimpse_is_of_a_few_values_from_everywhere():
    """A change to any row and to any column of a large matrix shows."""
    matrix = torch.zeros(512, 256)
    before = Glimpse([matrix])
    assert sum(len(values) for values in before._values) < 600
    for part in (*matrix.split(8), *matrix.split(8, 1)):
        part += 1
        assert not before.resembles(Glimpse([matrix]))
        part -= 1


class Quiet(nn.Module):
    """Writes its buffer so that autograd's version does not tell."""

    def __init__(self, buffer=None):
        super().__init__()
        self.register_buffer("scale", torch.ones(3) if buffer is None else buffer)

    def forward(self, x):
        y = x / self.scale.clone()
        self.scale.data.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        return y


class Reads(nn.Module):
    """Reads a buffer that another layer may write."""

    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("other", buffer)

    def forward(self, x):
        return x * self.other.clone()


def assert_as_plain_over_micro_batches(plain, balance, x, chunks=4):
    """Gradients and buffers, in each checkpoint mode."""
    atol = 1e-10 if x.dtype == torch.float64 else 1e-5
    for checkpoint in CHECKPOINTS:
        one, other = copy.deepcopy(plain), copy.deepcopy(plain)
        pipe = GPipe(other, balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=checkpoint)
        for part in x.tensor_split(chunks):
            one(part).pow(2).sum().backward()
        pipe(x).pow(2).sum().backward()
        for (name, a), (_, b) in zip(one.named_parameters(), pipe.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=atol, msg=f"{name}, {checkpoint}")
        for (name, a), (_, b) in zip(one.named_buffers(), pipe.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=f"{name}, {checkpoint}")


def test_a_buffer_that_is_written_past_autograd_is_had_back():
    """By ``.data``, as codebooks and averages are, or by one of torch's fused operators."""
    torch.manual_seed(0)
    x = torch.randn(8, 3)
    assert_as_plain_over_micro_batches(nn.Sequential(nn.Linear(3, 3), Quiet()).double(), [1, 1], x.double())
    fake = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
    assert_as_plain_over_micro_batches(nn.Sequential(nn.Linear(3, 3), fake, nn.Linear(3, 3)), [1, 2], x)


def test_a_buffer_that_two_layers_hold_stays_one():
    """One writes it, the other reads it, in a recomputation too."""
    torch.manual_seed(0)
    buffer = torch.ones(3).double()
    plain = nn.Sequential(nn.Linear(3, 3), Quiet(buffer), Reads(buffer)).double()
    assert plain[1].scale is plain[2].other
    assert_as_plain_over_micro_batches(plain, [1, 2], torch.randn(8, 3).double())


def test_a_large_buffer_is_copied_when_it_was_written_alone():
    """A mask of a million entries is not copied for each micro-batch."""
    layer = Reads(torch.ones(300, 300))
    buffers = Buffers([layer])
    first, second = buffers.copies(), buffers.copies()
    assert first[layer, "other"] is second[layer, "other"]
    layer.other += 1
    assert buffers.copies()[layer, "other"] is not first[layer, "other"]


def test_a_part_that_stages_share_keeps_its_buffers():
    """Such as rotary tables, which all blocks read while others recompute."""
    rotary = Reads(torch.full((3,), 2.0))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.rotary = nn.Linear(3, 3), rotary

        def forward(self, x):
            return self.rotary(self.linear(x))

    buffer = rotary.other
    pipe = GPipe(nn.Sequential(*[Block() for _ in range(4)]), [1] * 4, devices=["cpu"] * 4, chunks=8,
                 checkpoint="always")  # fmt: skip
    x = torch.randn(16, 3)
    for _ in range(5):
        pipe.step(x, x, functional.mse_loss)
    assert rotary.other is buffer


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_part_that_stages_share_and_write_is_refused_where_it_is_recomputed(checkpoint):
    """It would count each micro-batch twice; without recomputation it may."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            with LOCK:
                self.calls += 1
            return x * 1.0

    counts = Counts()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), counts) for _ in range(2)])
    pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    output = pipe(torch.randn(8, 3))
    if checkpoint == "never":
        output.sum().backward()
        assert counts.calls == 8
    else:
        with pytest.raises(RuntimeError, match="a part of layers that several stages share writes into its buffers"):
            output.sum().backward()


LOCK = threading.Lock()


def test_an_embedding_that_renormalises_may_do_so_before_a_recomputation():
    """It writes into its weight in every forward pass; the second time nothing changes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(10, 3, max_norm=0.5), nn.Linear(3, 3)).double()
    tokens = torch.arange(8)
    for checkpoint in CHECKPOINTS:
        pipe = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        (pipe(tokens).sum() + pipe(tokens).pow(2).sum()).backward()
        one = copy.deepcopy(plain)
        (one(tokens).sum() + one(tokens).pow(2).sum()).backward()
        for a, b in zip(one.parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # people have them still
def test_a_scripted_layer_with_buffers_is_refused_where_it_is_recomputed():
    """Its buffers cannot be given back to it; without them, or without recomputation, it works."""
    x = torch.randn(8, 3)
    norm, linear = torch.jit.script(nn.BatchNorm1d(3)), torch.jit.script(nn.Linear(3, 3))
    for layer, checkpoint, refused in ((norm, "always", True), (norm, "never", False), (linear, "always", False)):
        model = nn.Sequential(nn.Linear(3, 3), layer)
        pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        if refused:
            with pytest.raises(RuntimeError, match="a scripted layer has a buffer, 'running_mean'"):
                pipe(x)
        else:
            pipe(x).sum().backward()


def test_a_jagged_tensor_at_a_boundary_that_is_recomputed_is_refused():
    """Its recomputation has a size of its own, which its gradient does not fit; without recomputation it works."""

    class Jagged(nn.Module):
        def forward(self, x):
            return torch.nested.nested_tensor_from_jagged(x.reshape(-1, 1), torch.arange(0, x.numel() + 1, 3))

    class Dense(nn.Module):
        def forward(self, x):
            return x.values().reshape(-1, 3)

    for checkpoint in ("never", "always"):
        model = nn.Sequential(nn.Linear(3, 3), Jagged(), Dense())
        pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        if checkpoint == "always":
            with pytest.raises(RuntimeError, match="a nested tensor leaves stage 0, which is recomputed"):
                pipe(torch.randn(4, 3))
        else:
            pipe(torch.randn(4, 3)).sum().backward()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_small_complex_tensors_cross_a_boundary_that_is_recomputed():
    """Torch does not compare them, so they are compared as larger ones."""

    class Complex(nn.Module):
        def forward(self, x):
            return torch.view_as_complex(torch.stack([x, x], -1).half())

    class Real(nn.Module):
        def forward(self, x):
            return torch.view_as_real(x).float().sum(-1)

    model = nn.Sequential(nn.Linear(3, 3), Complex(), Real())
    pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    pipe(torch.randn(4, 3)).sum().backward()
    assert pipe[0].weight.grad is not None
