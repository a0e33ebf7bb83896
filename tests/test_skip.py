"""Long skips: what a layer stashes reaches the layer that pops it, on whatever stage, and its gradient comes back."""

import copy
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_lite import GPipe, Pop, Stash
from gpipe_lite.microbatch import flatten
from gpipe_lite.partition import partition
from gpipe_lite.schedule import Phase, Task
from gpipe_lite.skip import Skip, routes
from gpipe_lite.threads import Mailboxes

CHECKPOINTS = ["always", "except_last", "never"]


class Block(nn.Module):
    """A convolution, a nonlinearity and dropout."""

    def __init__(self, before, after, dropout=0.0):
        super().__init__()
        self.conv, self.dropout = nn.Conv2d(before, after, 3, padding=1), nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(torch.tanh(self.conv(x)))


def concatenate(x, kept):
    return torch.cat([x, kept], dim=1)


def u_net(dropout=0.0):
    """Three levels; 15 layers."""
    return nn.Sequential(
        Block(1, 4, dropout),
        Stash("fine"),
        nn.AvgPool2d(2),
        Block(4, 8, dropout),
        Stash("middle"),
        nn.AvgPool2d(2),
        Block(8, 8, dropout),
        nn.Upsample(scale_factor=2),
        Pop("middle", concatenate),
        Block(16, 4, dropout),
        nn.Upsample(scale_factor=2),
        Pop("fine", concatenate),
        Block(8, 4, dropout),
        nn.Conv2d(4, 1, 1),
        nn.Identity(),
    )


def pipeline(model, balance, chunks=3, **options):
    return GPipe(model, balance, devices=["cpu"] * len(balance), chunks=chunks, **options)


@pytest.mark.parametrize("balance", [[15], [4, 11], [2, 3, 4, 6], [5, 1, 1, 1, 7], [1] * 15])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "naive"])
def test_a_u_net_trains_equal_to_its_unsplit_self(balance, checkpoint, schedule):
    """Losses, gradients and weights over three steps, in float64."""
    torch.manual_seed(0)
    plain = u_net().double()
    pipe = pipeline(copy.deepcopy(plain), balance, checkpoint=checkpoint, schedule=schedule)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in (plain, pipe)]
    x = torch.randn(5, 1, 8, 8).double().requires_grad_()
    y = torch.randn(5, 1, 8, 8).double()
    for _ in range(3):
        expected = functional.mse_loss(plain(x), y)
        expected.backward()
        of_input, x.grad = x.grad, None
        loss = pipe.step(x, y, functional.mse_loss).loss
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(x.grad, of_input, rtol=0, atol=1e-10)
        x.grad = None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_with_dropout_every_split_and_checkpoint_mode_gives_the_same_bits():
    """Backward by ``loss.backward()``, twice."""
    found = []
    x = torch.randn(5, 1, 8, 8)
    for balance, checkpoint in itertools.product([[15], [2, 3, 4, 6]], CHECKPOINTS):
        torch.manual_seed(0)
        pipe = pipeline(u_net(dropout=0.3), balance, checkpoint=checkpoint)
        torch.manual_seed(1)
        output = pipe(x)
        output.pow(2).sum().backward(retain_graph=True)
        output.sum().backward()
        found.append([output.detach(), *(p.grad for p in pipe.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_skip_goes_once_and_straight_to_the_stage_that_pops_it():
    """And its gradient straight back; the stages between see neither."""
    model = nn.Sequential(
        Stash("a"), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), Pop("a", torch.add), nn.Identity()
    )
    pipe = pipeline(model, [2, 1, 1, 2], chunks=2)
    letters = []
    put = Mailboxes.put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailboxes, "put", lambda mail, *letter: (letters.append(letter), put(mail, *letter)))
        pipe.step(torch.randn(4, 3, requires_grad=True), torch.randn(4, 3), functional.mse_loss)
    skips = {(task.phase, source, task.stage) for task, source, *_ in letters if isinstance(source, Skip)}
    assert skips == {(Phase.FORWARD, Skip("a", 0, 3), 3), (Phase.BACKWARD, Skip("a", 0, 3), 0)}
    assert len(letters) == 2 * (8 + 2)  # micro-batches × (tasks + skips)
    assert all(len(flatten(value)[0]) == 1 for _, _, value, _ in letters)


def test_routes_are_those_that_cross_a_boundary():
    """Where a stage's values come from, its neighbour first."""
    model = nn.Sequential(
        Stash("a"), Stash("b"), nn.Sequential(Stash("c"), Pop("c", torch.add)), Pop("b", torch.add), Pop("a", torch.add)
    )
    found = routes(partition(model, [2, 1, 1, 1]))
    a, b = Skip("a", 0, 3), Skip("b", 0, 2)
    assert found.skips == (a, b)
    assert found.sources(Task(Phase.FORWARD, 3, 0)) == (2, a)
    assert found.sources(Task(Phase.BACKWARD, 0, 0)) == (1, a, b)
    assert found.sources(Task(Phase.FORWARD, 1, 0)) == (0,)
    assert found.sources(Task(Phase.RECOMPUTE, 3, 0)) == ()
    assert found.destination(Task(Phase.FORWARD, 0, 5), a) == (Task(Phase.FORWARD, 3, 5), a)
    assert found.destination(Task(Phase.BACKWARD, 3, 5), a) == (Task(Phase.BACKWARD, 0, 5), a)
    assert found.destination(Task(Phase.BACKWARD, 3, 5), 2) == (Task(Phase.BACKWARD, 2, 5), 3)
    assert routes(partition(model, [5])).skips == ()


def test_what_is_kept_may_be_any_nesting():
    """Tensors that need no gradient among it; a pop without a join gives the pair."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.keep = Stash("all")

        def forward(self, x):
            self.keep({"x": (x, x > 0), "word": "yes", "none": None})
            return x.sin()

    class Join(nn.Module):
        def forward(self, pair):
            x, kept = pair
            assert kept["word"] == "yes"
            return x * kept["x"][0] * kept["x"][1]

    plain = nn.Sequential(nn.Linear(3, 3), Split(), nn.Linear(3, 3), Pop("all"), Join()).double()
    pipe = pipeline(copy.deepcopy(plain), [2, 1, 1, 1], checkpoint="always")
    x = torch.randn(4, 3).double()
    for module in (plain, pipe):
        module(x).pow(2).sum().backward()
    for a, b in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)


def test_skips_carry_no_gradient_where_none_is_needed():
    """A frozen first half, evaluation, and a skip that is thrown away."""
    model = nn.Sequential(nn.Linear(3, 3), Stash("a"), nn.Linear(3, 3), Pop("a", lambda x, kept: x), nn.Linear(3, 2))
    pipe = pipeline(model, [2, 1, 2], checkpoint="always")
    pipe(torch.randn(4, 3)).sum().backward()
    pipe[0].requires_grad_(False)
    pipe.zero_grad()
    pipe(torch.randn(4, 3)).sum().backward()
    assert pipe[0].weight.grad is None
    with torch.inference_mode():
        assert pipe(torch.randn(4, 3)).shape == (4, 2)


MISUSES = {
    "never stashed": ([nn.Identity(), Pop("a")], r"Pop\('a'\) stands in layer '1', and no layer has Stash\('a'\)"),
    "never popped": ([Stash("a"), nn.Identity()], r"Stash\('a'\) stands in layer '0', and no layer has Pop\('a'\)"),
    "stashed twice": ([Stash("a"), Stash("a"), Pop("a")], r"Stash\('a'\) stands in layer '0' and again in layer '1'"),
    "popped twice": ([Stash("a"), Pop("a"), Pop("a")], r"Pop\('a'\) stands in layer '1' and again in layer '2'"),
    "too early": ([Pop("a"), Stash("a")], r"Pop\('a'\) stands in layer '0', before Stash\('a'\) in layer '1'"),
    "inside": ([nn.Sequential(nn.Sequential(Pop("a")))], r"Pop\('a'\) stands in layer '0', and no layer has Stash"),
}


@pytest.mark.parametrize(("layers", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse_is_found_when_the_pipe_is_built(layers, message):
    """With the layer's name, on one stage and on several."""
    for balance in ([len(layers)], [1] * len(layers)):
        with pytest.raises(ValueError, match=message):
            pipeline(nn.Sequential(*layers), balance)


class Sometimes(nn.Module):
    """Runs what it holds, or not."""

    def __init__(self, inner, runs):
        super().__init__()
        self.inner, self.runs = inner, runs

    def forward(self, x):
        for _ in range(self.runs):
            x = self.inner(x)
        return x


def test_what_does_not_run_once_a_micro_batch_is_found_when_it_happens():
    """In a pipeline; the first pass says so."""
    for balance in ([2], [1, 1]):
        with pytest.raises(RuntimeError, match=r"Stash\('a'\) did not run|Pop\('a'\) finds nothing"):
            pipeline(nn.Sequential(Sometimes(Stash("a"), 0), Pop("a", torch.add)), balance)(torch.randn(4, 3))
        with pytest.raises(RuntimeError, match=r"Pop\('a'\) did not run"):
            pipeline(nn.Sequential(Stash("a"), Sometimes(Pop("a", torch.add), 0)), balance)(torch.randn(4, 3))
        with pytest.raises(RuntimeError, match=r"Stash\('a'\) ran twice"):
            pipeline(nn.Sequential(Sometimes(Stash("a"), 2), Pop("a", torch.add)), balance)(torch.randn(4, 3))


def test_writing_into_what_is_kept_is_refused():
    """Split and unsplit, so that both always compute the same."""
    model = nn.Sequential(nn.Linear(3, 3), Stash("a"), nn.ReLU(inplace=True), Pop("a", torch.add))
    for module in (model, pipeline(copy.deepcopy(model), [4]), pipeline(copy.deepcopy(model), [3, 1])):
        with pytest.raises(RuntimeError, match=r"Stash\('a'\) kept was modified in place"), torch.no_grad():
            module(torch.randn(4, 3))


def test_an_unsplit_model_can_run_again_after_it_failed_halfway():
    """What the failed pass kept is replaced; outside a model there is nothing to pop."""
    model = nn.Sequential(Stash("a"), nn.Linear(3, 3), Pop("a", torch.add))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(2, 4))
    x = torch.randn(2, 3)
    torch.testing.assert_close(model(x), model[1](x) + x)
    with pytest.raises(RuntimeError, match=r"Pop\('a'\) finds nothing"):
        Pop("a")(x)
    assert repr(model[0]) == "Stash('a')"
    assert repr(model[2]) == "Pop('a')"


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_first_layer_may_write_into_its_micro_batch_while_others_are_stashed(checkpoint):
    """They are views of one batch, and share autograd's count of writes."""

    class Normalise(nn.Module):
        def forward(self, x):
            return x.sub_(1.0).div_(2.0)

    class Slow(nn.Module):
        def forward(self, x):
            written.wait(5)  # until the first stage has written into the next micro-batch
            return x

    class Tells(nn.Module):
        def forward(self, x):
            passes.append(1)
            if len(passes) == 2:
                written.set()
            return x

    written, passes = threading.Event(), []
    layers = [Normalise(), Tells(), Stash("a"), nn.Linear(3, 3), Slow(), Pop("a", torch.add)]
    pipe = GPipe(nn.Sequential(*layers), [4, 2], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    x = torch.randn(8, 3)
    plain = nn.Sequential(*layers[:1], *layers[2:4], layers[5])
    expected = plain(x.clone())
    found = pipe(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
