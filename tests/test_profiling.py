"""What a layer costs, against counts by hand and closed formulas; measuring disturbs nothing."""

import copy
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_lite import profiling
from gpipe_lite.profiling import activation_bytes, layer_costs, layer_times, parameter_counts, saved_bytes

FLOAT = 4  # bytes


class Pair(nn.Module):
    """Takes a pair, returns a pair; the second goes through untouched."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair):
        left, right = pair
        return self.linear(left), right


class Slow(nn.Module):
    """Sleeps forward, and not backward."""

    def forward(self, x):
        time.sleep(0.01)
        return x * 2


def disturbable():
    """A model with everything that measuring could disturb."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
    model[3].eval()
    model(torch.ones(2, 3)).sum().backward()
    model[3].train()
    return model


def state(model):
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    return copy.deepcopy(model.state_dict()), gradients, modes, torch.get_rng_state()


def test_parameters_are_counted():
    """A linear layer has in · out + out, an activation function none."""
    assert parameter_counts(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))) == [16, 0, 10]


def test_shared_parameters_count_at_the_first_layer():
    """Within a layer and between layers; a list of layers is as good as a Sequential."""
    tied, other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    other.weight = tied.weight
    assert parameter_counts([nn.Sequential(tied, other), other, tied]) == [12, 0, 0]


def test_parameters_are_counted_on_the_meta_device():
    """A model too large for this machine can be balanced on it."""
    with torch.device("meta"):
        assert parameter_counts([nn.Linear(100_000, 100_000)]) == [100_000 * 100_001]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_saved_bytes_are_those_that_the_gradients_need(device):
    """A linear layer saves its input, tanh its output, a sum nothing; weights do not count."""
    with torch.device(device):
        layers = [nn.Linear(3, 5), nn.Tanh(), nn.Flatten()]
        assert activation_bytes(layers, torch.ones(7, 3)) == [7 * 3 * FLOAT, 7 * 5 * FLOAT, 0]


def test_a_storage_that_two_layers_save_counts_at_the_first():
    """ReLU saves its output, which is also what the next linear layer saves."""
    layers = [nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)]
    assert activation_bytes(layers, torch.ones(7, 3)) == [7 * 3 * FLOAT, 7 * 5 * FLOAT, 0]
    assert saved_bytes(layers[2], torch.ones(7, 5)) == 7 * 5 * FLOAT


@given(st.integers(1, 50), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_saved_bytes_are_linear_in_the_batch(batch_size, dtype):
    """So a small batch tells the memory of a large one."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    layers = layers.to("meta", dtype)
    one, many = (activation_bytes(layers, torch.empty(n, 3, 8, 8, device="meta", dtype=dtype)) for n in (1, batch_size))
    assert many == [batch_size * size for size in one]


def test_the_whole_model_saves_what_its_layers_save():
    """Layer by layer or at once, each storage counts once."""
    model = disturbable()
    assert saved_bytes(model, torch.ones(7, 3)) == sum(activation_bytes(model, torch.ones(7, 3)))


def test_only_the_sample_counts_and_not_what_it_is_a_view_of():
    """A batch sliced from a data set is charged for itself alone."""
    data = torch.ones(1000, 3)
    assert saved_bytes(nn.Linear(3, 5), data[:7]) == 7 * 3 * FLOAT


def test_layers_may_pass_nestings():
    """A pair goes from layer to layer, and a module may take several inputs."""
    layers, sample = [Pair(), Pair()], (torch.ones(2, 3), torch.ones(2, dtype=torch.int64))
    assert activation_bytes(layers, sample) == [2 * 3 * FLOAT, 2 * 3 * FLOAT]
    assert len(layer_times(layers, sample, repeats=1)) == 2
    assert saved_bytes(nn.Bilinear(2, 3, 4), torch.ones(5, 2), torch.ones(5, 3)) == 5 * (2 + 3) * FLOAT


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by", ["time", "memory"])
def test_measuring_disturbs_nothing(by, mode):
    """Weights, gradients, buffers, modes, random numbers and the sample stay, in any gradient mode."""
    model = disturbable()
    before = state(model)
    with mode():
        sample = torch.ones(6, 3)
        costs = layer_costs(model, by, sample)
        assert torch.equal(sample, torch.ones(6, 3))
    assert min(costs) > 0
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["time", "memory"])
def test_measuring_on_a_gpu_disturbs_nothing(by):
    """Its random numbers go on as if nothing had happened."""
    model, sample = disturbable().cuda(), torch.ones(6, 3, device="cuda")
    before = torch.cuda.get_rng_state()
    assert min(layer_costs(model, by, sample)) > 0
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_first_layer_may_write_into_its_input():
    """Each run gets its own copy, also of a sample that needs a gradient."""
    sample = torch.full((2, 3), -1.0, requires_grad=True)
    layers = [nn.ReLU(inplace=True), nn.Linear(3, 1)]
    assert activation_bytes(layers, sample) == [2 * 3 * FLOAT, 0]
    assert len(layer_times(layers, sample)) == 2
    assert sample.grad is None
    assert torch.equal(sample, torch.full((2, 3), -1.0))


def test_times_tell_slow_layers():
    """Forward and backward apart, in seconds."""
    fast, slow = layer_times([nn.Identity(), Slow()], torch.ones(2, requires_grad=True), repeats=3)
    assert slow.forward >= 0.01
    assert slow.forward > fast.forward
    assert 0 < slow.backward < slow.forward


def test_layers_without_gradients_are_timed_too():
    """Frozen layers and integers have no backward pass."""
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert len(layer_times([frozen, nn.ReLU()], torch.ones(2, 3), repeats=1)) == 2


def test_a_gradient_without_a_parameter_is_no_obstacle():
    """A layer may hold a tensor that torch does not know as its parameter."""
    hidden = torch.ones(3, requires_grad=True)

    class Hidden(nn.Module):
        def forward(self, x):
            return x * hidden

    assert len(layer_times([Hidden()], torch.ones(2, 3), repeats=1)) == 1
    assert hidden.grad is None


def test_the_devices_are_waited_for(monkeypatch):
    """An accelerator works on after the call returned; the CPU does not."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    profiling._now({torch.device("cpu"), torch.device("cuda", 1)})
    assert waited == [torch.device("cuda", 1)]


def test_costs_are_what_the_measures_say():
    """One function for all three; by parameters unless asked otherwise."""
    model, sample = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.ones(2, 3)
    assert layer_costs(model) == layer_costs(model, "parameters") == [16.0, 0.0]
    assert layer_costs(model, "memory", sample) == [float(size) for size in activation_bytes(model, sample)]
    assert all(cost > 0 for cost in layer_costs(model, by="time", sample=sample))


def test_layers_may_come_one_by_one():
    """A generator is read once."""
    assert layer_costs(nn.Linear(1, n) for n in (1, 2)) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("measure", "error", "words"),
    [
        (
            lambda: layer_costs([nn.ReLU()], "flops"),
            ValueError,
            "one of parameters, time, memory, not 'flops'",
        ),
        (lambda: layer_costs([nn.ReLU()], "time"), ValueError, "by time they must run: pass sample="),
        (lambda: layer_costs([nn.ReLU()], "memory"), ValueError, "by memory they must run"),
        (lambda: layer_times([nn.ReLU()], torch.ones(1, device="meta")), ValueError, "meta device"),
        (lambda: layer_times([nn.ReLU()], torch.ones(1), repeats=0), ValueError, "1 time or more, not 0"),
        (lambda: parameter_counts(nn.ReLU()), TypeError, "not a ReLU"),
        (lambda: parameter_counts([nn.ReLU(), torch.relu]), TypeError, "layer 1 of 2 is a builtin"),
        (lambda: parameter_counts([nn.LazyLinear(2)]), ValueError, "layer 0 of 1, a LazyLinear, has"),
    ],
)
def test_what_cannot_be_measured_is_refused(measure, error, words):
    """The error says what is missing."""
    with pytest.raises(error, match=words):
        measure()
