"""verify_equivalence passes what is right, and names the first thing that is wrong."""

import copy
import math
import random
import threading
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe
from gpipe_lite.schedule import BY_NAME
from gpipe_lite.skip import Pop, Stash
from gpipe_lite.verify import Difference, Equivalence, lint, verify_equivalence

# Whether statistics are deferred is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:layer .* is a BatchNorm:UserWarning")


class Engine:
    """An engine as a student writes it, with recomputation, and with a mistake if it is asked for one."""

    def __init__(self, model, cut, chunks, mistake=""):
        layers = list(model)
        self.stages = [layers[:cut], layers[cut:]]
        self.chunks = chunks
        self.mistake = mistake

    def step(self, x, y, loss_fn):
        if self.mistake == "replaces gradients":
            for layer in self.stages[1]:
                layer.zero_grad()
        total = 0.0
        pieces, targets = x.tensor_split(self.chunks), y.tensor_split(self.chunks)
        if self.mistake == "none, and cuts as torch.chunk":
            pieces, targets = x.chunk(self.chunks), y.chunk(self.chunks)
        if self.mistake == "forgets the last samples":
            size = len(x) // self.chunks
            pieces, targets = x.split(size)[: self.chunks], y.split(size)[: self.chunks]
        order = list(range(self.chunks))
        if self.mistake == "none, and last micro-batch first":
            order.reverse()
        for m in order:
            share = 1 / self.chunks if self.mistake == "mean of means" else len(pieces[m]) / len(x)
            total = total + share * self.micro_batch(pieces[m], targets[m], share, loss_fn)
        if self.mistake == "updates the weights":
            with torch.no_grad():
                self.stages[0][0].weight.sub_(0.1 * self.stages[0][0].weight.grad)
        if self.mistake == "stays in evaluation mode":
            self.stages[1][0].eval()
        if self.mistake == "forgets the loss's own weights":
            loss_fn.zero_grad()
        results = {"none, and returns a number": float(total), "none, and returns a tensor": total}
        results["returns nothing"] = None
        return results.get(self.mistake, SimpleNamespace(loss=total))

    def micro_batch(self, x, y, share, loss_fn):
        kept, value = [], x
        for stage in self.stages:
            leaf = value.detach().requires_grad_(value.is_floating_point())
            kept.append((leaf, torch.get_rng_state()))
            with torch.no_grad():
                value = self.run(stage, leaf)
        if self.mistake == "the loss of other outputs":
            value = value + 1
        loss = loss_fn(value, y)
        gradient = None
        for stage, (leaf, state) in reversed(list(zip(self.stages, kept, strict=True))):
            buffers = [(b, b.clone()) for layer in stage for b in layer.buffers()]
            now = torch.get_rng_state()
            if self.mistake != "other random numbers":
                torch.set_rng_state(state)
            output = self.run(stage, leaf)
            if self.mistake != "other random numbers":
                torch.set_rng_state(now)
            if gradient is None:
                (share * loss_fn(output, y)).backward(retain_graph=True)
                if self.mistake == "backward twice":
                    leaf.grad = None
                    (share * loss_fn(output, y)).backward()
            else:
                output.backward(gradient)
            if self.mistake != "statistics twice":
                for buffer, before in buffers:
                    buffer.copy_(before)
            gradient = leaf.grad
            if self.mistake == "divides by the stages":
                gradient = gradient / len(self.stages)
        if x.requires_grad and self.mistake != "forgets the input":
            x.backward(gradient)
        return loss.detach()

    def run(self, stage, value):
        for layer in stage:
            if self.mistake == "skips a layer" and layer is stage[-1] and stage is self.stages[0]:
                continue
            value = layer(value)
        return value


def plain(*extra):
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), *extra, nn.Tanh(), nn.Linear(4, 2)).double()


MODELS = {
    "plain": [],
    "BatchNorm": [nn.BatchNorm1d(4)],
    "dropout": [nn.Dropout(0.5)],
    "both": [nn.BatchNorm1d(4), nn.Dropout(0.5)],
}


def batch(samples=7):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, dtype=torch.float64, generator=generator).requires_grad_()
    return x, torch.randn(samples, 2, dtype=torch.float64, generator=generator)


def verify(model, pipe, **options):
    return verify_equivalence(model, pipe, *batch(), functional.mse_loss, **options)


@pytest.mark.parametrize("extra", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", BY_NAME)
@pytest.mark.parametrize("deferred", [False, True])
def test_a_gpipe_is_equal(schedule, checkpoint, extra, deferred):
    """Over schedules, recomputation, uneven micro-batches, BatchNorm, deferred or not, and dropout."""
    model = plain(*copy.deepcopy(extra))
    balance = [1, 2, len(model) - 3]
    pipe = GPipe(copy.deepcopy(model), balance, devices=["cpu"] * 3, chunks=3, schedule=schedule,
                 checkpoint=checkpoint, deferred_batch_norm=deferred)  # fmt: skip
    report = verify(model, pipe)
    assert report.ok, report
    assert report.first is None
    assert report.largest.keys() == {"output", "loss", "gradient", "state"}
    assert max(report.largest.values()) < 1e-14


RIGHT = ["", "none, and last micro-batch first", "none, and returns a number", "none, and returns a tensor"]


@pytest.mark.parametrize("extra", [MODELS["plain"], MODELS["dropout"]], ids=["plain", "dropout"])
@pytest.mark.parametrize("mistake", RIGHT)
def test_a_right_engine_of_another_kind_is_equal(mistake, extra):
    """It shares nothing with GPipe; the order of its micro-batches is its affair."""
    model = plain(*copy.deepcopy(extra))
    report = verify(model, Engine(model, 3, 3, mistake))
    assert report.ok, report


@pytest.mark.parametrize("mistake", ["none, and cuts as tensor_split", "none, and cuts as torch.chunk"])
def test_a_right_engine_may_cut_as_it_likes(mistake):
    """BatchNorm sees its micro-batches, of 3, 2 and 2 or 3, 3 and 1 pixels, and updates its statistics once each."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 2))
    report = verify(model.double(), Engine(model, 3, 3, mistake))
    assert report.ok, report


def test_equal_samples_are_told_apart_by_their_number():
    """With uneven micro-batches of which nobody could say which is which, BatchNorm and dropout are still right."""
    model = plain(nn.BatchNorm1d(4), nn.Dropout(0.5))
    x, y = torch.ones(7, 3, dtype=torch.float64), batch()[1]
    pipe = GPipe(copy.deepcopy(model), [4, 3], devices=["cpu"] * 2, chunks=3)
    report = verify_equivalence(model, pipe, x, y, functional.mse_loss)
    assert report.ok, report


# The mistake, what the model has in the middle, and the first thing that is wrong: its kind and its layer.
MISTAKES = {
    "skips a layer": ("plain", "output", "2"),
    "forgets the last samples": ("plain", "output", "0"),
    "mean of means": ("plain", "loss", ""),
    "the loss of other outputs": ("plain", "loss", ""),
    "returns nothing": ("plain", "loss", ""),
    "backward twice": ("plain", "gradient", "4"),
    "divides by the stages": ("plain", "gradient", "2"),
    "forgets the input": ("plain", "gradient", ""),
    "replaces gradients": ("plain", "gradient", "4"),
    "updates the weights": ("plain", "state", "0"),
    "stays in evaluation mode": ("plain", "state", "3"),
    "statistics twice": ("BatchNorm", "state", "3"),
    "other random numbers": ("dropout", "output", "3"),
}


@pytest.mark.parametrize(("mistake", "expected"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_named_where_it_first_shows(mistake, expected):
    """Right outputs are followed by the loss, that by the gradients from the last layer on, and those by the state."""
    kind, quantity, layer = expected
    model = plain(*copy.deepcopy(MODELS[kind]))
    report = verify(model, Engine(model, 3, 3, mistake))
    assert not report.ok
    assert (report.first.quantity, report.first.layer) == (quantity, layer), report
    assert str(report.first) in str(report)


@pytest.mark.parametrize("extra", MODELS.values(), ids=MODELS)
def test_samples_that_are_left_out_are_missed(extra):
    """Whatever the layers make of those that are there."""
    model = plain(*copy.deepcopy(extra))
    report = verify(model, Engine(model, 3, 3, "forgets the last samples"))
    assert (report.first.layer, report.first.largest) == ("0", math.inf)


def test_the_difference_is_the_mistakes():
    """Half of the gradient is lost where gradients are halved, and twice is once too much."""
    model = plain()
    x, y = batch()
    functional.mse_loss(model(x), y).backward()
    by_halves = verify(model, Engine(model, 3, 3, "divides by the stages"))
    found = {difference.what: difference.largest for difference in by_halves.differences}
    assert found["gradient of 4.weight"] < 1e-15  # behind the boundary nothing is wrong
    assert found["gradient of 2.weight"] == pytest.approx(float(model[2].weight.grad.abs().max()) / 2)
    twice = verify(model, Engine(model, 3, 3, "backward twice")).first
    assert twice.what == "gradient of 4.bias"
    assert twice.largest == pytest.approx(float(model[4].bias.grad.abs().max()))


class Deferring(Engine):
    deferred_batch_norm = True


def test_deferred_statistics_must_be_the_mini_batchs():
    """Who says so and updates them with each micro-batch is found out, unless there is only one."""
    model = plain(nn.BatchNorm1d(4))
    report = verify(model, Deferring(model, 3, 3))
    assert report.first.what == "3.running_mean after the step"
    assert verify(model, Deferring(model, 3, 1)).ok


def test_deferred_statistics_follow_each_call():
    """A layer that normalises twice, in a GPipe: the statistics are those of both calls, in order."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(torch.sin(self.norm(x)))

    model = plain(Twice())
    report = verify(model, GPipe(copy.deepcopy(model), [3, 3], devices=["cpu"] * 2, chunks=3, deferred_batch_norm=True))
    assert report.ok, report


class SampleSecond(nn.Module):
    def forward(self, x):
        return x.expand(5, *x.shape)


class SampleFirst(nn.Module):
    def forward(self, x):
        return x.mean(0)


class Pair(nn.Module):
    def forward(self, x):
        return x, x.sin()


class Unpair(nn.Module):
    def forward(self, pair):
        return pair[0] * pair[1]


OTHERS = {
    "samples along axis 1 in between": [SampleSecond(), nn.Dropout(0.5), SampleFirst()],
    "pairs": [Pair(), Unpair()],
    "in place": [nn.Identity(), nn.ReLU(inplace=True)],
    "buffers that are written": [nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))],
    "skips": [Stash("x"), nn.Linear(4, 4), Pop("x", torch.add)],
    "BatchNorm without statistics": [nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4).eval()],
}


@pytest.mark.parametrize("extra", OTHERS.values(), ids=OTHERS)
def test_all_that_a_pipe_can_do_can_be_verified(extra):
    """One layer a stage, so all of it crosses boundaries."""
    model = plain(*copy.deepcopy(extra))
    pipe = GPipe(copy.deepcopy(model), [1] * len(model), devices=["cpu"] * len(model), chunks=3, checkpoint="always")
    report = verify(model, pipe)
    assert report.ok, report


def test_a_layer_that_depends_on_the_batch_size_is_named():
    """Micro-batches are no excuse: the yardstick is the whole mini-batch."""

    class Centre(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = plain(Centre())
    first = verify(model, GPipe(copy.deepcopy(model), [3, 3], devices=["cpu"] * 2, chunks=3)).first
    assert first.what == "output of layer '3' (Centre)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_mistake_in_any_dtype(dtype):
    """By default as much is allowed as the dtype rounds, and no mistake is as small."""
    model = plain().to(dtype)
    x, y = (tensor.detach().to(dtype) for tensor in batch(64))
    right, wrong = (
        verify_equivalence(model, Engine(model, 3, 9, mistake), x, y, functional.mse_loss)
        for mistake in ("", "backward twice")
    )
    assert right.ok, right
    assert max(right.largest.values()) > 0
    assert not wrong.ok


def test_the_tolerance_is_a_share_of_the_largest_value():
    """Of the plain model's: an error of a half passes if a half is allowed."""
    model = plain()
    engine = Engine(model, 3, 3, "divides by the stages")
    assert not verify(model, engine, tolerance=0.1).ok
    assert verify(model, engine, tolerance=0.6).ok


def test_masked_losses_and_options_of_step():
    """The whole mini-batch's masked mean is the yardstick, and step gets its options."""
    model, (x, _) = plain(), batch(6)
    y = torch.tensor([[1.0, 0.0]] * 5 + [[0.0, 2.0]], dtype=torch.float64)

    def positives(output, target):
        return ((output - target).pow(2) * (target[:, :1] > 0)).sum() / (target[:, :1] > 0).sum()

    pipe = GPipe(copy.deepcopy(model), [2, 3], devices=["cpu"] * 2, chunks=3)
    assert verify_equivalence(model, pipe, x, y, positives, weight=lambda target: (target[:, 0] > 0).sum()).ok
    assert verify_equivalence(model, pipe, x, y, positives).first.quantity == "loss"


def test_a_step_must_add_to_the_gradients_that_stand_there():
    """Or accumulation over steps would be lost; the report says that this is what is wrong."""
    model = plain()
    report = verify(model, Engine(model, 3, 3, "replaces gradients"))
    assert "which replaced what stood in .grad and should be added to it" in str(report.first)


class Weighted(nn.Module):
    """A loss with a weight, a buffer, and a layer whose mode counts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(3.0, dtype=torch.float64))

    def forward(self, output, target):
        return ((output - target).pow(2) * self.weight).mean() * self.scale


def test_the_gradients_of_a_loss_are_compared_too():
    """When it is a module with weights of its own, which stay as they are."""
    model, loss_fn = plain(), Weighted()
    pipe = GPipe(copy.deepcopy(model), [2, 3], devices=["cpu"] * 2, chunks=3)
    assert verify_equivalence(model, pipe, *batch(), loss_fn).ok
    report = verify_equivalence(model, Engine(model, 3, 3, "forgets the loss's own weights"), *batch(), loss_fn)
    assert report.first.what == "gradient of the loss.weight"
    assert loss_fn.weight.grad is None


def test_an_engine_may_have_its_layers_as_children_of_the_same_names():
    """Then it need not be built from the model's own; the names count, not their order in the module."""
    model = plain()
    layers = OrderedDict(reversed(list(copy.deepcopy(model).named_children())))

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                self.add_module(name, layer)

        def step(self, x, y, loss_fn):
            for name in model._modules:
                x = self.get_submodule(name)(x)
            loss_fn(x, y).backward()
            return loss_fn(x, y)

    assert verify(model, Named()).ok


def test_verifying_leaves_no_trace():
    """Weights, gradients, buffers, the batch, and the next random numbers are what they were."""
    model = plain(nn.BatchNorm1d(4), nn.Dropout(0.5))
    pipe = GPipe(model, [3, 4], devices=["cpu"] * 2, chunks=2)
    x, y = batch()
    model(x).sum().backward()
    x.grad = None
    everything = [*model.state_dict().values(), *(p.grad for p in model.parameters()), x, y]
    before = [tensor.detach().clone() for tensor in everything]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert verify_equivalence(model, pipe, x, y, functional.mse_loss).ok
    assert all(torch.equal(one, other) for one, other in zip(before, everything, strict=True))
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert "forward" not in vars(model[4])
    with pytest.raises(RuntimeError, match="nothing ran yet"):
        pipe.trace  # noqa: B018 - reading it raises


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Locked(Engine):
    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()


def other_weights(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight += 0.25
    return GPipe(other, [3, 2], devices=["cpu"] * 2)


REFUSED = {
    "a random layer": (
        plain(Noise()),
        lambda m: Engine(m, 3, 3),
        ValueError,
        r"layer '3' \(Noise\) makes something else",
    ),
    "other weights": (plain(), other_weights, ValueError, r"2\.weight of the pipe is off by 0\.25"),
    "other layers": (plain(), lambda m: Engine(copy.deepcopy(m), 3, 3), ValueError, "the pipe has no layer '0'"),
    "another mode": (
        plain(),
        lambda m: GPipe(copy.deepcopy(m).eval(), [5]),
        ValueError,
        "trains in one of model and pipe only",
    ),
    "no chain": (nn.Linear(3, 2).double(), lambda m: None, TypeError, "this is a Linear"),
    "a lock": (plain(), lambda m: Locked(m, 3, 3), TypeError, "cannot pickle"),
}


@pytest.mark.parametrize(("model", "make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused(model, make, error, words):
    """The error names it, and the way out."""
    with pytest.raises(error, match=words):
        verify(model, make(model))


def test_an_engine_that_fails_fails_here():
    """With its own error."""
    with pytest.raises(TypeError, match="loose_fn"):
        verify(model := plain(), Engine(model, 3, 3), loose_fn=None)


def test_a_report_reads_from_top_to_bottom():
    """What differs, in order, then the largest differences; or one line, if all is well."""
    right = Difference("output", "0", "output of layer '0' (Linear)", 1e-17, 4e-11)
    wrong = Difference("gradient", "0", "gradient of 0.weight", 0.25, 4e-11)
    missing = Difference("state", "0", "0.weight after the step", math.inf, 4e-11)
    assert str(Equivalence((right,))) == (
        "equal to the plain model in all 1 things compared; largest differences: output 1e-17"
    )
    report = Equivalence((right, wrong, missing))
    assert report.first is wrong
    assert str(report).splitlines() == [
        "2 of 3 things differ, first",
        "  gradient of 0.weight: off by 0.25, and 4e-11 is allowed",
        "  0.weight after the step: missing, not a number, or of another shape",
        "  largest differences: output 1e-17, gradient 0.25, state inf",
    ]


def test_lint_is_at_hand():
    """Both come from one room."""
    assert lint(plain(), batch()[0]) == []
