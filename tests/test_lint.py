"""lint finds what a pipeline would trip over, in layers that show nothing else, and says nothing of sound ones."""

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_lite import GPipe
from gpipe_lite.lint import Finding, lint
from gpipe_lite.models import transformer
from gpipe_lite.skip import Pop, Stash

X = torch.linspace(-1, 1, 20).view(5, 4)


class Layer(nn.Module):
    """Computes a function of itself and its input, and counts in a buffer."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.generator = torch.Generator()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.function(self, x)


def count_up(layer, x):
    layer.count += 1
    return x + layer.count


def count_anew(layer, x):
    layer.count = layer.count + 1
    return x


ELSEWHERE = torch.ones(4, requires_grad=True)
LSTM = nn.LSTM(4, 3, batch_first=True).requires_grad_(False)
SLOW = nn.Linear(4, 4)  # its singular values are close, so that the power iteration is not at its end yet
SLOW.weight.data = torch.diag(torch.tensor([1.0, 0.99, 0.98, 0.97]))

UNSOUND = {
    "ReLU(inplace=True)": (nn.ReLU(inplace=True), "in-place"),
    "in place, deep inside": (nn.Sequential(nn.Identity(), nn.Sequential(nn.Dropout(0.5, inplace=True))), "in-place"),
    "in place, through a view": (Layer(lambda _, x: x.view(-1).mul_(2).view_as(x)), "in-place"),
    "numpy.random": (Layer(lambda _, x: x * np.random.rand()), "randomness"),
    "random": (Layer(lambda _, x: x * random.random()), "randomness"),
    "a generator of its own": (Layer(lambda own, x: x + torch.rand(x.shape, generator=own.generator)), "randomness"),
    "a counter": (Layer(count_up), "state-in-forward"),
    "a counter that is replaced": (Layer(count_anew), "state-in-forward"),
    "spectral normalisation": (nn.utils.parametrizations.spectral_norm(SLOW), "state-in-forward"),
    "BatchNorm": (nn.BatchNorm1d(4), "batch-norm"),
    "BatchNorm, deep inside": (nn.Sequential(nn.Sequential(nn.Identity(), nn.BatchNorm1d(4))), "batch-norm"),
    "BatchNorm without statistics": (nn.BatchNorm1d(4, track_running_stats=False), "batch-size"),
    "the batch's mean": (Layer(lambda _, x: x - x.mean(0)), "batch-size"),
    "the batch's length": (Layer(lambda _, x: x * len(x)), "batch-size"),
    "a number for the batch": (Layer(lambda _, x: x.sum()), "batch-size"),
    "the samples' products": (Layer(lambda _, x: x @ x.T), "batch-size"),
    "one row for the batch": (Layer(lambda _, x: x.sum(0, keepdim=True)), "batch-size"),
    "a fixed batch size": (Layer(lambda _, x: x.view(5, 2, 2)), "batch-size"),
    "dropout inside torch's checkpoint": (
        Layer(lambda _, x: torch_checkpoint(functional.dropout, x, use_reentrant=False)),
        "randomness",
    ),
    "a tensor from elsewhere": (Layer(lambda _, x: x * ELSEWHERE), "outside-tensor"),
    "what was computed from one": (Layer(lambda _, x: x + (2 * ELSEWHERE).sum()), "outside-tensor"),
    "a recurrent layer's state at the end": (Layer(lambda _, x: LSTM(x[:, None])[1][0]), "batch-size"),
    "squeeze": (Layer(lambda _, x: x[:, :, None].squeeze()), "batch-size"),
}


@pytest.mark.parametrize(("layer", "rule"), UNSOUND.values(), ids=UNSOUND)
def test_each_fault_is_found_where_it_is_and_nothing_else(layer, rule):
    """Between sound layers; the finding names the rule and the layer."""
    model = nn.Sequential(OrderedDict(before=nn.Linear(4, 4), it=layer))
    findings = lint(model, X)
    assert [(finding.rule, finding.layer) for finding in findings] == [(rule, "it")]
    assert str(findings[0]).startswith(f"{rule}: layer 'it' ({type(layer).__name__}) ")


class Pair(nn.Module):
    def forward(self, x):
        return {"x": x, "scale": 2.0}


class Unpair(nn.Module):
    def forward(self, pair):
        return pair["x"] * pair["scale"]


class Tied(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = [weight]

    def forward(self, x):
        return x @ self.weight[0]


SOUND = {
    "layers": [nn.Linear(4, 3), nn.ReLU(), nn.LayerNorm(3), nn.Dropout(0.5), nn.Linear(3, 1)],
    "a dict, and a number": [Pair(), Unpair()],
    "attention": [nn.Unflatten(1, (2, 2)), nn.TransformerEncoderLayer(2, 1, 4, dropout=0.3, batch_first=True)],
    "dropout in evaluation, too": [Layer(lambda _, x: functional.dropout(x))],
    "an operator itself": [Layer(lambda _, x: x * torch.ops.aten.rand.default([1]))],
    "recurrent layers": [nn.Unflatten(1, (2, 2)), nn.LSTM(2, 3, 2, batch_first=True), Layer(lambda _, x: x[0])],
    "torch's checkpoint": [Layer(lambda _, x: torch_checkpoint(torch.tanh, x, use_reentrant=True))],
    "frozen BatchNorm": [nn.BatchNorm1d(4).eval()],
    "lazy": [nn.LazyLinear(3), nn.LazyLinear(2)],
    "skips": [Stash("x"), nn.Linear(4, 4), Pop("x", torch.add)],
}


@pytest.mark.parametrize("layers", SOUND.values(), ids=SOUND)
def test_sound_layers_are_not_suspected(layers):
    """Torch's dropout, nestings, skips, parameters without a shape: a pipeline can do all that."""
    assert lint(nn.Sequential(*layers), X) == []


def test_the_transformer_is_sound():
    """The package's own model, with dropout."""
    model = transformer(num_layers=2, vocab_size=11, d_model=8, num_heads=2, d_ff=16, dropout=0.2)
    assert lint(model, torch.randint(11, (3, 5))) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # people have them still
def test_a_scripted_layer_is_sound():
    """Its tensors have other Python objects each time."""
    assert lint(nn.Sequential(torch.jit.script(nn.Linear(4, 3)), nn.Linear(3, 1)), X) == []


def test_another_layers_parameter_is_not_from_outside():
    """A pipeline sums its gradient from all stages that use it."""
    encoder = nn.Linear(4, 4)
    assert lint(nn.Sequential(encoder, Tied(encoder.weight)), X) == []


def test_a_shared_parameter_is_named_by_all_its_names():
    """It stands at the first layer that has it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    (finding,) = lint(model, X)
    assert (finding.rule, finding.layer) == ("shared-parameter", "0")
    assert "'0.weight' and '1.weight' are one parameter" in finding.message


def test_fewer_layers_than_stages_are_counted():
    """The message has both numbers; as many are enough."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    (finding,) = lint(model, X, num_stages=3)
    assert (finding.rule, finding.layer) == ("stage-count", "")
    assert "3 stages need 1 layer each or more, and the model has 2" in finding.message
    assert lint(model, X, num_stages=2) == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(4, 4), "this is a Linear"),
        (nn.Sequential(*[nn.Linear(4, 4)] * 2), "layers 0 and 1 are one"),
        (nn.Sequential(), "0 layers"),
    ],
)
def test_what_is_no_chain_is_a_finding(model, words):
    """With the words of check_model; nothing else can be told of it."""
    (finding,) = lint(model, X)
    assert (finding.rule, finding.layer) == ("chain", "")
    assert words in finding.message


def test_deferral_settles_batch_norm():
    """Running statistics then follow the mini-batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert lint(model, X, deferred_batch_norm=True) == []
    assert lint(GPipe(model, [1, 1], devices=["cpu"] * 2, deferred_batch_norm=True), X) == []
    assert [finding.rule for finding in lint(GPipe(model, [2], devices=["cpu"]), X)] == ["batch-norm"]


def test_of_a_pipe_it_is_known_which_layers_are_first():
    """A layer that works in place matters at a boundary, and only there."""
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU(inplace=True), c=nn.Linear(4, 4)))
    assert lint(GPipe(copy.deepcopy(model), [2, 1], devices=["cpu"] * 2), X) == []
    (finding,) = lint(GPipe(copy.deepcopy(model), [1, 2], devices=["cpu"] * 2), X)
    assert (finding.rule, finding.layer) == ("in-place", "b")


def test_one_fault_does_not_make_the_next_layer_suspect():
    """Each layer is judged by itself, on what the others make of the sample."""
    layers = [layer for layer, _ in UNSOUND.values() if not isinstance(layer, Layer)]
    rules = [rule for layer, rule in UNSOUND.values() if not isinstance(layer, Layer)]
    findings = lint(nn.Sequential(*layers), X)
    assert sorted((finding.layer, finding.rule) for finding in findings) == [
        (str(i), rule) for i, rule in enumerate(rules)
    ]


def test_what_gets_no_batch_is_not_judged_by_parts():
    """The layer that made it is at fault."""
    model = nn.Sequential(Layer(lambda _, x: x.sum()), Layer(lambda _, x: x * 2))
    assert [(finding.layer, finding.rule) for finding in lint(model, X)] == [("0", "batch-size")]


def test_findings_come_rule_by_rule():
    """In the order of the table, and for each rule in the order of the layers."""
    model = nn.Sequential(Layer(lambda _, x: x - x.mean(0)), nn.ReLU(inplace=True), nn.BatchNorm1d(4))
    assert [(f.rule, f.layer) for f in lint(model, X, num_stages=4)] == [
        ("stage-count", ""),
        ("batch-norm", "2"),
        ("in-place", "1"),
        ("batch-size", "0"),
    ]


def test_lint_leaves_no_trace():
    """Weights, gradients, buffers, modes, the sample, and the next random numbers are what they were."""
    layers = [copy.deepcopy(layer) for layer, _ in UNSOUND.values() if not isinstance(layer, Layer)]
    model = nn.Sequential(*layers, Layer(count_up), nn.Linear(4, 4))
    model[-1](X).sum().backward()
    model[0].eval()
    sample = X.clone().requires_grad_()
    gradient = model[-1].weight.grad.clone()
    before = copy.deepcopy(model.state_dict())
    modes = [part.training for part in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert lint(model, sample)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(sample, X)
    assert sample.grad is None
    assert torch.equal(model[-1].weight.grad, gradient)


def test_lint_runs_in_any_grad_mode():
    """In inference mode tensors know less; the findings are the same."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        assert [(f.rule, f.layer) for f in lint(model, X.clone())] == [("in-place", "1")]


def test_one_sample_tells_nothing_of_the_batch_size():
    """The error asks for 2 or more."""
    with pytest.raises(ValueError, match="2 samples or more: pass them, not 1"):
        lint(nn.Sequential(nn.Linear(4, 4)), X[:1])


def test_a_layer_that_cannot_run_is_named():
    """The layer's own error, with a note; in training mode, too."""
    with pytest.raises(RuntimeError) as caught:
        lint(nn.Sequential(OrderedDict(a=nn.Linear(4, 3), b=nn.Linear(4, 3))), X)
    assert "lint ran layer 'b' (Linear)" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="unsupported") as caught:
        lint(nn.Sequential(Layer(lambda own, x: x + ("text" if own.training else 0))), X)
    assert "lint ran layer '0' (Layer)" in caught.value.__notes__[0]


def test_a_finding_reads_as_a_sentence():
    """With its rule in front."""
    assert str(Finding("in-place", "1", "layer '1' writes.")) == "in-place: layer '1' writes."
