"""The pipeline equals the unsplit model: outputs, losses, gradients, state, and bits."""

import copy
import pickle
import struct
from hashlib import blake2b

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe
from gpipe_lite.models import amoebanetd
from gpipe_lite.schedule import BY_NAME, Phase, Schedule, gpipe, one_f_one_b
from gpipe_lite.simulate import simulate

CHECKPOINTS = ["always", "except_last", "never"]


class Pair(nn.Module):
    """Turns a tensor into a pair."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x)), x


class Unpair(nn.Module):
    """Turns a pair into a tensor."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        return torch.sin(self.linear(pair[0]) + 0.5 * pair[1])


def model(width=5, dropout=0.0):
    return nn.Sequential(
        nn.Linear(3, width),
        nn.Tanh(),
        Pair(width),
        Unpair(width),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, 2),
    )


def gradients(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-10)


balances = st.lists(st.integers(1, 4), min_size=1, max_size=8).filter(lambda b: sum(b) == 8)
balances = st.sampled_from([[8], [4, 4], [1, 7], [7, 1], [2, 3, 3], [3, 1, 4], [2, 2, 2, 2], [1] * 8])


@settings(max_examples=60)
@given(
    st.sampled_from(list(BY_NAME)),
    balances,
    st.integers(1, 7),
    st.integers(1, 11),
    st.sampled_from(CHECKPOINTS),
    st.integers(0, 2**32 - 1),
)
def test_a_step_equals_the_unsplit_models(schedule, balance, chunks, samples, checkpoint, seed):
    """Loss, outputs and gradients in float64, over schedule × K × M × uneven batches × checkpoint mode."""
    torch.manual_seed(seed)
    plain = model().double()
    x, y = torch.randn(samples, 3).double(), torch.randn(samples, 2).double()
    pipe = GPipe(copy.deepcopy(plain), balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=checkpoint,
                 schedule=schedule)  # fmt: skip
    before = torch.randn(samples, 3).double().requires_grad_()  # what the batch is computed from
    expected = functional.mse_loss(plain(x + before), y)
    expected.backward()
    input_gradient, before.grad = before.grad, None
    result = pipe.step(x + before, y, functional.mse_loss, keep_outputs=True)
    torch.testing.assert_close(before.grad, input_gradient, rtol=0, atol=1e-10)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(result.outputs, plain(x + before).detach(), rtol=0, atol=1e-10)
    close(gradients(pipe), gradients(plain))


@settings(max_examples=60)
@given(
    balances,
    st.integers(1, 7),
    st.integers(1, 11),
    st.sampled_from(CHECKPOINTS),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_forward_and_backward_equal_the_unsplit_models(balance, chunks, samples, checkpoint, input_grad, seed):
    """The same through ``loss.backward()``, the input's gradient included."""
    torch.manual_seed(seed)
    plain = model().double()
    pipe = GPipe(copy.deepcopy(plain), balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(samples, 3).double()
    found = []
    for module in (plain, pipe):
        batch = x.clone().requires_grad_(input_grad)
        output = module(batch)
        output.pow(3).mean().backward()
        found.append((output.detach(), batch.grad, gradients(module)))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=0, atol=1e-10)
    close(found[1][2], found[0][2])


def dropout_oracle(plain, x, y, chunks, order, seed):
    """Plain layers on torch's own generator, seeded for each layer and micro-batch by the documented rule."""
    torch.manual_seed(seed)
    step_seed = int(torch.empty((), dtype=torch.int64).random_())
    losses = {}
    pieces = list(zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True))
    for m in order:
        value, target = pieces[m]
        for i, layer in enumerate(plain):
            digest = blake2b(struct.pack("<3q", step_seed, i, m), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little"))
            value = layer(value)
        losses[m] = functional.mse_loss(value, target)
        losses[m].backward(torch.tensor(len(target) / len(x)))
    return gradients(plain)


@pytest.mark.parametrize("schedule", BY_NAME)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("balance", [[8], [4, 4], [2, 3, 3], [1] * 8])
def test_with_dropout_the_bits_are_those_of_the_plain_layers(schedule, checkpoint, balance):
    """Every checkpoint mode, K and schedule draws the oracle's numbers and sums in its own order: the same bits."""
    torch.manual_seed(0)
    plain = model(dropout=0.4)
    pipe = GPipe(copy.deepcopy(plain), balance, devices=["cpu"] * len(balance), chunks=4, checkpoint=checkpoint,
                 schedule=schedule)  # fmt: skip
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    order = [t.micro_batch for t in pipe.schedule_for(4).device_tasks[-1] if t.phase is Phase.BACKWARD]
    expected = dropout_oracle(plain, x, y, 4, order, seed=7)
    torch.manual_seed(7)
    pipe.step(x, y, functional.mse_loss)
    for name, gradient in gradients(pipe).items():
        assert torch.equal(gradient, expected[name]), name


def test_two_runs_with_one_seed_are_bit_identical():
    """Ten steps with dropout and an optimiser, twice, whatever the threads' timing."""

    def train():
        torch.manual_seed(3)
        pipe = GPipe(model(dropout=0.3), [2, 2, 2, 2], devices=["cpu"] * 4, chunks=4, checkpoint="always")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            pipe.step(torch.randn(8, 3), torch.randn(8, 2), functional.mse_loss)
            optimizer.step()
        return pipe.state_dict()

    first, second = train(), train()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("schedule", BY_NAME)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_schedule_simulator_and_runtime_agree_task_for_task(schedule, checkpoint):
    """One object is what all of them read: the measured trace is the schedule again, and so is the simulated."""
    pipe = GPipe(model(), [2, 2, 2, 2], devices=["cpu"] * 4, chunks=5, checkpoint=checkpoint, schedule=schedule)
    planned = pipe.schedule_for(5)
    measured = pipe.step(torch.randn(9, 3), torch.randn(9, 2), functional.mse_loss).trace
    assert measured.schedule == planned == simulate(planned).schedule
    ends = {event.task: event.end for event in measured.events}
    for event in measured.events:
        assert all(ends[before] <= event.start for before in planned.predecessors(event.task))


def test_the_trace_of_forward_and_backward_is_the_schedules_two_halves():
    """Called like a model, the pipe runs F at once, and R and B in ``backward()``."""
    pipe = GPipe(model(), [4, 4], devices=["cpu"] * 2, chunks=3)
    with pytest.raises(RuntimeError, match="nothing ran yet"):
        _ = pipe.trace
    loss = pipe(torch.randn(6, 3)).sum()
    assert pipe.trace.schedule.device_tasks == gpipe(2, 3).only(Phase.FORWARD).device_tasks
    loss.backward()
    assert pipe.trace.schedule.device_tasks == gpipe(2, 3, "except_last").device_tasks


def test_state_dict_keys_are_the_modules_own():
    """Weights load into any number of stages, or none."""
    named = nn.Sequential()
    named.add_module("stem", nn.Linear(3, 5))
    named.add_module("norm", nn.BatchNorm1d(5))
    named.add_module("head", nn.Linear(5, 2))
    keys = list(named.state_dict())
    for balance in ([3], [1, 2], [1, 1, 1]):
        pipe = GPipe(copy.deepcopy(named), balance, devices=["cpu"] * len(balance))
        assert list(pipe.state_dict()) == keys
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in named.named_parameters()]
        pipe.load_state_dict(named.state_dict())
        named.load_state_dict(pipe.state_dict())


def test_the_parameters_are_the_users_own():
    """The same objects, so that an optimiser made before keeps working."""
    plain = model()
    pipe = GPipe(plain, [4, 4], devices=["cpu"] * 2)
    assert all(a is b for a, b in zip(plain.parameters(), pipe.parameters(), strict=True))
    assert list(pipe) == list(plain)
    assert (len(pipe), pipe[2]) == (8, plain[2])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_is_usable_and_independent(duplicate):
    """deepcopy and pickle, after steps, leave threads and traces behind."""
    pipe = GPipe(model(), [4, 4], devices=["cpu"] * 2, chunks=2)
    x = torch.randn(4, 3)
    pipe(x).sum().backward()
    other = duplicate(pipe)
    before = pipe(x)
    torch.testing.assert_close(other(x), before)
    with torch.no_grad():
        other[0].weight.add_(1.0)
    assert torch.equal(pipe(x), before)
    assert not torch.equal(other(x), before)
    other.zero_grad()
    other(x).sum().backward()
    assert all(p.grad is not None for p in other.parameters())


def test_a_users_own_schedule_runs():
    """As a function of (K, M), and as data."""
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    plain = model().double()
    functional.mse_loss(plain(x), y).backward()
    own = Schedule.from_text("F0 F2 F1 B1 B0 B2\nF0 F2 F1 B1 B0 B2")
    for schedule in (own, lambda k, m: one_f_one_b(k, m)):
        pipe = GPipe(copy.deepcopy(plain), [4, 4], devices=["cpu"] * 2, chunks=3, schedule=schedule)
        pipe.zero_grad()
        pipe.step(x, y, functional.mse_loss)
        close(gradients(pipe), gradients(plain))


def test_a_schedule_for_other_sizes_is_refused():
    """The message shows both sets of numbers."""
    pipe = GPipe(model(), [4, 4], devices=["cpu"] * 2, chunks=3, schedule=gpipe(2, 4))
    with pytest.raises(ValueError, match="has 2 stages, 4 micro-batches and 2 devices; the pipeline has 2, 3 and 2"):
        pipe(torch.randn(6, 3))


def test_a_schedule_function_that_returns_something_else_is_refused():
    """The message shows K, M and what came."""
    pipe = GPipe(model(), [4, 4], devices=["cpu"] * 2, chunks=3, schedule=lambda k, m: None)
    with pytest.raises(TypeError, match=r"schedule\(K=2, M=3\) returned None"):
        pipe(torch.randn(6, 3))


def test_1f1b_needs_the_loss_inside():
    """Its backward tasks begin before the last forward one; evaluation needs none."""
    pipe = GPipe(model(), [4, 4], devices=["cpu"] * 2, chunks=3, schedule="1f1b")
    with pytest.raises(ValueError, match=r"call pipe\.step"):
        pipe(torch.randn(6, 3))
    with torch.no_grad():
        assert pipe(torch.randn(6, 3)).shape == (6, 2)


def test_without_gradients_nothing_is_kept_or_recomputed():
    """Under no_grad and inference_mode, only F tasks run; step evaluates."""
    pipe = GPipe(model(), [4, 4], devices=["cpu"] * 2, chunks=3, checkpoint="always")
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = pipe(x)
            result = pipe.step(x, y, functional.mse_loss)
        assert not output.requires_grad
        assert {event.task.phase for event in result.trace.events} == {Phase.FORWARD}
        torch.testing.assert_close(result.loss, functional.mse_loss(output, y))
    assert all(p.grad is None for p in pipe.parameters())


def test_the_output_requires_no_grad_when_nothing_does():
    """A frozen model is evaluated; a step on it says what to do."""
    pipe = GPipe(model().requires_grad_(False), [4, 4], devices=["cpu"] * 2, chunks=2)
    assert not pipe(torch.randn(4, 3)).requires_grad
    with pytest.raises(RuntimeError, match="unfreeze a parameter"):
        pipe.step(torch.randn(4, 3), torch.randn(4, 2), functional.mse_loss)


def test_frozen_stages_get_no_gradient_and_the_others_do():
    """The first stage's input requires no grad, the last stage is frozen but passes gradients on."""
    plain = model().double()
    plain[0].requires_grad_(False)
    plain[7].requires_grad_(False)
    x = torch.randn(5, 3).double()
    pipe = GPipe(copy.deepcopy(plain), [2, 4, 2], devices=["cpu"] * 3, chunks=2, checkpoint="always")
    plain(x).sum().backward()
    pipe(x).sum().backward()
    assert pipe[0].weight.grad is None
    assert pipe[7].weight.grad is None
    assert pipe[2].linear.weight.grad is not None
    close({k: v for k, v in gradients(pipe).items() if v is not None},
          {k: v for k, v in gradients(plain).items() if v is not None})  # fmt: skip


def test_several_forwards_before_one_backward_accumulate():
    """Each output has its own activations; gradients add up as in plain torch."""
    plain = model().double()
    pipe = GPipe(copy.deepcopy(plain), [4, 4], devices=["cpu"] * 2, chunks=2)
    a, b = torch.randn(4, 3).double(), torch.randn(5, 3).double()
    for module in (plain, pipe):
        (module(a).sum() * module(b).mean()).backward()
        module(a).sum().backward()
    close(gradients(pipe), gradients(plain))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_retained_graph_runs_backward_again_and_accumulates(checkpoint):
    """With dropout, recomputation included; then the stages free their activations, and the next one says so."""
    x = torch.randn(5, 3, requires_grad=True)
    pipe = GPipe(model(dropout=0.3), [3, 3, 2], devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint)
    loss = pipe(x).sum()
    loss.backward(retain_graph=True)
    once = gradients(pipe) | {"x": x.grad.clone()}
    loss.backward()
    for name, gradient in (gradients(pipe) | {"x": x.grad}).items():
        assert torch.equal(gradient, 2 * once[name]), name
    with pytest.raises(RuntimeError, match="pass retain_graph=True to the first"):
        loss.backward()


def test_masked_and_summed_losses_equal_the_whole_batchs():
    """Each micro-batch weighs what its loss averages over: the mean-of-means mistake is not made."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(7, 3).double()
    y = torch.tensor([0, -100, -100, -100, 3, 1, -100])
    classes = torch.tensor([0.1, 1.0, 2.0, 0.5]).double()
    losses = [
        functional.cross_entropy,
        nn.CrossEntropyLoss(weight=classes),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ]
    for loss_fn in losses:
        plain.zero_grad()
        expected = loss_fn(plain(x), y)
        expected.backward()
        for schedule in BY_NAME:
            pipe = GPipe(copy.deepcopy(plain), [2, 1], devices=["cpu"] * 2, chunks=3, schedule=schedule)
            pipe.zero_grad()
            loss = pipe.step(x, y, loss_fn).loss
            torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
            close(gradients(pipe), gradients(plain))


def test_a_micro_batch_of_which_nothing_counts_takes_no_part():
    """Its own loss is 0/0, and would make every gradient NaN; the whole batch's is finite."""

    def masked(output, target):
        counts = (target >= 0).double()
        each = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
        return (each * counts).sum() / counts.sum()

    plain = model().double()
    x, y = torch.randn(8, 3).double(), torch.randint(2, (8,))
    y[2:4] = -1
    masked(plain(x), y).backward()
    for schedule in BY_NAME:
        pipe = GPipe(copy.deepcopy(plain), [4, 4], devices=["cpu"] * 2, chunks=4, schedule=schedule)
        pipe.zero_grad()
        pipe.step(x, y, masked, weight=lambda target: (target >= 0).sum())
        close(gradients(pipe), gradients(plain))


def test_targets_may_be_nested():
    """Tensors are cut, all else is handed to every micro-batch; a loss may use any of it."""
    plain = model().double()
    pipe = GPipe(copy.deepcopy(plain), [4, 4], devices=["cpu"] * 2, chunks=3)
    x = torch.randn(7, 3).double()
    y = {"value": torch.randn(7, 2).double(), "weights": [torch.rand(7, 1).double(), 0.5], "note": None}

    def loss_fn(output, target):
        (weights, factor), note = target["weights"], target["note"]
        assert note is None
        return factor * (weights * (output - target["value"]).pow(2)).mean()

    loss_fn(plain(x), y).backward()
    pipe.step(x, y, loss_fn)
    close(gradients(pipe), gradients(plain))


def test_a_loss_says_what_it_averages_over():
    """An opaque function with a mask takes ``weight``."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).double()
    x, y = torch.randn(6, 5, 3).double(), torch.randint(4, (6, 5))
    y[0] = y[1] = 0

    def loss_fn(output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)

    pipe = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=4)
    expected = loss_fn(plain(x), y)
    expected.backward()
    loss = pipe.step(x, y, loss_fn, weight=lambda target: (target != 0).sum()).loss
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    close(gradients(pipe), gradients(plain))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_amoebanet_on_four_stages_equals_itself_over_the_same_micro_batches(checkpoint):
    """A pair of tensors crosses every boundary; BatchNorm sees micro-batches, in both, and updates once each."""
    torch.manual_seed(0)
    plain = amoebanetd(num_layers=3, num_filters=16, num_classes=10, in_channels=1, stem="small").double()
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 2, 3], devices=["cpu"] * 4, chunks=3, checkpoint=checkpoint)
    x, y = torch.randn(7, 1, 16, 16).double(), torch.randint(10, (7,))
    with pytest.warns(UserWarning, match="3 updates a mini-batch: pass deferred_batch_norm=True"):
        loss = pipe.step(x, y, functional.cross_entropy).loss
    expected = 0.0
    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        part = functional.cross_entropy(plain(a), b) * (len(a) / 7)
        part.backward()
        expected += part.detach()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    close(gradients(pipe), gradients(plain))
    close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


def test_without_a_balance_the_largest_partition_is_as_small_as_possible():
    """By parameters, over the devices given, or as many stages as torch has threads."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 40), nn.Linear(40, 1)]
    assert GPipe(nn.Sequential(*layers), devices=["cpu"] * 3).balance == [2, 1, 1]
    assert GPipe(nn.Sequential(*layers), devices=["cpu"] * 9).balance == [1, 1, 1, 1]
    if not torch.cuda.is_available():
        torch.set_num_threads(3)
        try:
            assert GPipe(nn.Sequential(*layers)).balance == [2, 1, 1]
        finally:
            torch.set_num_threads(1)


def test_without_devices_there_are_as_many_cpu_stages_as_balance_has_entries():
    """On a machine without CUDA."""
    if torch.cuda.is_available():
        pytest.skip("takes the CUDA devices")
    pipe = GPipe(model(), [2, 2, 4])
    assert pipe.devices == [torch.device("cpu")] * 3
    assert [len(layers) for layers in pipe.partitions] == [2, 2, 4]


def test_stages_may_live_on_devices_of_different_kinds():
    """What crosses is copied; the output and the loss are on the last device. Here it is "meta": shapes alone."""
    pipe = GPipe(model(), [4, 4], devices=["cpu", "meta"], chunks=2)
    with torch.no_grad():  # from "meta" no gradient can come back
        assert pipe(torch.randn(4, 3)).device.type == "meta"
        result = pipe.step(torch.randn(4, 3), torch.randn(4, 2), functional.mse_loss, keep_outputs=True)
    assert (result.loss.device.type, result.outputs.shape) == ("meta", (4, 2))


def test_a_parameter_shared_by_stages_gets_the_sum_of_its_gradients():
    """Tied weights on one device; across devices they are refused with the stages' numbers."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    plain[2].weight = plain[0].weight
    x = torch.randn(5, 3).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=3)
    for module in (plain, pipe):
        module(x).pow(2).sum().backward()
    close(gradients(pipe), gradients(plain))
    with pytest.raises(ValueError, match=r"shared by stages .*0.*1.* on different devices"):
        GPipe(copy.deepcopy(plain), [1, 2], devices=["cpu", "meta"])


def test_what_is_not_a_tensor_crosses_the_stages_and_comes_out():
    """Each micro-batch gets it; an input of a nesting that gets no gradient has None."""

    class Scale(nn.Module):
        def forward(self, batch):
            x, other, factor = batch
            return x * factor, other, factor

    x, other = torch.randn(5, 2, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    pipe = GPipe(nn.Sequential(Scale(), Scale()), [1, 1], devices=["cpu"] * 2, chunks=3)
    out, same, factor = pipe((x, other, 3.0))
    assert factor == 3.0
    assert torch.equal(same, other)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((5, 2), 9.0))
    assert other.grad is None


def test_an_output_that_some_micro_batches_do_not_depend_on_has_gradient_zero_there():
    """A layer that uses its input for some samples only."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return x + self.bias if bool((x.detach() > 0).all()) else self.bias.expand(len(x), 2)

    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [2.0, 2.0]], requires_grad=True)
    pipe = GPipe(nn.Sequential(Sometimes(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=3)
    pipe(x).sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert pipe[0].bias.grad.tolist() == [3.0, 3.0]


def test_losses_outputs_and_input_gradients_have_the_same_bits_in_every_mode():
    """Over schedules, checkpoint modes and K. (Parameters' gradients are sums, whose last bit follows the order.)"""
    torch.manual_seed(0)
    plain = model(dropout=0.4)
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    found = []
    for schedule in BY_NAME:
        for checkpoint in CHECKPOINTS:
            for balance in ([8], [4, 4], [2, 2, 2, 2]):
                pipe = GPipe(copy.deepcopy(plain), balance, devices=["cpu"] * len(balance), chunks=4,
                             checkpoint=checkpoint, schedule=schedule)  # fmt: skip
                torch.manual_seed(1)
                batch = x.clone().requires_grad_()
                result = pipe.step(batch, y, functional.mse_loss, keep_outputs=True)
                found.append((result.loss, result.outputs, batch.grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
