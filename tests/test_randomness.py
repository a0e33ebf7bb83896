"""Random numbers belong to (step, layer, micro-batch), not to the thread that came first."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe
from gpipe_lite.randomness import StepSeed, Stream, draws, never_draws

CPU = torch.device("cpu")


def with_stream(function, layer=0, micro_batch=0, seed=1):
    stream = Stream(StepSeed(seed), CPU)
    with stream:
        stream.at(layer, micro_batch)
        return function()


FUNCTIONS = {
    "F.dropout": lambda: functional.dropout(torch.ones(50)),
    "F.dropout2d": lambda: functional.dropout2d(torch.ones(1, 50, 1, 1)),
    "F.alpha_dropout": lambda: functional.alpha_dropout(torch.ones(50), training=True),
    "F.feature_alpha_dropout": lambda: functional.feature_alpha_dropout(torch.ones(1, 50, 1), training=True),
    "F.rrelu": lambda: functional.rrelu(-torch.ones(50), training=True),
    "F.gumbel_softmax": lambda: functional.gumbel_softmax(torch.ones(50)),
    "F.fractional_max_pool2d": lambda: functional.fractional_max_pool2d(torch.arange(18e3).view(1, 20, 30, 30), 2, 9),
    "F.scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(
        *[torch.ones(1, 50, 4)] * 3, dropout_p=0.5
    ),
    "torch.dropout": lambda: torch.dropout(torch.ones(50), 0.5, True),
    "torch.rand": lambda: torch.rand(50),
    "torch.randn_like": lambda: torch.randn_like(torch.ones(50)),
    "torch.randint": lambda: torch.randint(100, (50,)),
    "torch.randperm": lambda: torch.randperm(50),
    "torch.bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "torch.multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "torch.normal": lambda: torch.normal(torch.zeros(50)),
    "torch.poisson": lambda: torch.poisson(torch.full((50,), 9.0)),
    "Tensor.bernoulli_": lambda: torch.ones(50).bernoulli_(0.5),
    "Tensor.uniform_": lambda: torch.ones(50).uniform_(),
    "Tensor.exponential_": lambda: torch.ones(50).exponential_(),
    "nn.init": lambda: nn.init.xavier_normal_(torch.ones(5, 5)),
    "Gamma.sample": lambda: torch.distributions.Gamma(torch.ones(50), 1.0).sample(),
    "Dirichlet.sample": lambda: torch.distributions.Dirichlet(torch.ones(50)).sample(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_function_of_torch_that_draws_draws_from_the_stream(function):
    """The same stream gives the same numbers, others give others, and torch's generator is left alone."""
    before = torch.get_rng_state()
    first = with_stream(function)
    torch.manual_seed(0)  # nothing outside the stream matters
    assert torch.equal(with_stream(function), first)
    assert not torch.equal(with_stream(function, layer=1), first)
    assert not torch.equal(with_stream(function, micro_batch=1), first)
    assert not torch.equal(with_stream(function, seed=2), first)
    torch.set_rng_state(before)
    with_stream(function)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_draw_from_the_stream(module):
    """Their dropout is inside one operator, on padded and on packed sequences."""
    layer, x = module(4, 4, num_layers=2, dropout=0.5), torch.ones(6, 3, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 6, 6])
    for value, data in ((x, lambda out: out[0]), (packed, lambda out: out[0].data)):
        first = with_stream(lambda value=value: layer(value))
        assert torch.equal(data(with_stream(lambda value=value: layer(value))), data(first))
        assert not torch.equal(data(with_stream(lambda value=value: layer(value), seed=2)), data(first))
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    first = with_stream(lambda: attention(x, x, x)[0])
    assert torch.equal(with_stream(lambda: attention(x, x, x)[0]), first)
    assert not torch.equal(with_stream(lambda: attention(x, x, x)[0], seed=2), first)


def test_draws_follow_each_other_within_a_layer_and_start_anew_in_the_next():
    """A layer's second draw is not its first again."""
    stream = Stream(StepSeed(1), CPU)
    with stream:
        stream.at(0, 0)
        a, b = torch.rand(4), torch.rand(4)
        stream.at(0, 0)
        again = torch.rand(8)
    assert not torch.equal(a, b)
    assert torch.equal(again, torch.cat([a, b]))


def test_functions_whose_dropout_is_off_do_not_take_turns():
    """Attention and recurrent layers compute much; with nothing to draw they must not wait for each other."""
    x = torch.ones(2, 3, 4)
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5).eval()
    attention = nn.MultiheadAttention(4, 2, dropout=0.5).eval()
    quiet = [
        lambda: functional.scaled_dot_product_attention(x, x, x),
        lambda: lstm(x),
        lambda: lstm(nn.utils.rnn.pack_padded_sequence(x, [2, 2, 2])),
        lambda: attention(x, x, x),
    ]
    seed = StepSeed()
    before = torch.get_rng_state()
    with Stream(seed, CPU) as stream:
        stream.at(0, 0)
        for function in quiet:
            function()
    assert torch.equal(torch.get_rng_state(), before), "a draw would have drawn the step's seed"


def test_draws_tells_functions_that_draw_from_those_that_do_not():
    """As torch's tags say; comparisons and arithmetic do not."""
    aten = torch.ops.aten
    drawing = [torch.rand, torch.Tensor.bernoulli_, functional.dropout, torch.lstm, aten.bernoulli, aten.rand.default]
    quiet = [torch.add, torch.Tensor.__eq__, functional.relu, functional.conv2d, torch.zeros, aten.add, aten.add.Tensor]
    assert all(map(draws, drawing))
    assert not any(map(draws, quiet))


def test_a_model_that_draws_nothing_leaves_torchs_generator_untouched():
    """So that a user's data order does not change when a pipeline is put in."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu"] * 2, chunks=2)
    x = torch.randn(4, 2)
    before = torch.get_rng_state()
    pipe(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_draws_advances_torchs_generator_once_a_step():
    """So that the next step draws other numbers, and manual_seed governs all."""
    pipe = GPipe(nn.Sequential(nn.Dropout(), nn.Dropout()), [1, 1], devices=["cpu"] * 2, chunks=2)
    x = torch.ones(64, 2)
    torch.manual_seed(5)
    first, second = pipe(x), pipe(x)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(pipe(x), second)


def test_only_torchs_own_quiet_layers_are_trusted_to_draw_nothing():
    """Other people's modules and hooks may call anything."""

    class Custom(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    assert never_draws(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU())).modules())
    for layer in (
        nn.Dropout(0.0),
        nn.LSTM(2, 2),
        nn.MultiheadAttention(2, 1),
        nn.TransformerEncoderLayer(4, 2),
        Custom(),
    ):
        assert not never_draws(nn.Sequential(nn.Linear(2, 2), layer).modules())
    hooked, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = torch.rand_like
    for layer in (hooked, patched):
        assert not never_draws(nn.Sequential(layer).modules())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not never_draws(nn.Sequential(nn.Linear(2, 2)).modules())
    handle.remove()
    assert never_draws(nn.Sequential(nn.Linear(2, 2)).modules())


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_masks_are_right_in_six_hundred_tasks_on_racing_threads(checkpoint):
    """Saving and restoring the shared generator around a stage failed here; each mask is checked by its gradient.

    With y = dropout(x), dy/dx is the mask that the backward pass used, and y/x the one that the forward pass used.
    """
    pipe = GPipe(nn.Sequential(*[nn.Dropout(0.5) for _ in range(4)]), [1] * 4, devices=["cpu"] * 4, chunks=10,
                 checkpoint=checkpoint)  # fmt: skip
    for _ in range(15):
        x = torch.full((40, 30), 3.0, requires_grad=True)
        y = pipe(x)
        y.sum().backward()
        assert torch.equal(y / 3.0, x.grad)


def test_streams_of_threads_do_not_disturb_each_other():
    """Two threads draw through their own streams at once; each finds the numbers that it finds alone."""
    alone = {seed: with_stream(lambda: torch.stack([torch.rand(3) for _ in range(50)]), seed=seed) for seed in (1, 2)}
    found = {}
    start = threading.Barrier(2)

    def draw(seed):
        start.wait(timeout=60)
        found[seed] = with_stream(lambda: torch.stack([torch.rand(3) for _ in range(50)]), seed=seed)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(found[seed], alone[seed]) for seed in (1, 2))
