"""What a micro-batch's loss weighs: what it averaged over."""

from functools import partial, wraps

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from gpipe_lite.loss import micro_batch_weights

IGNORED = -100
targets = st.lists(st.lists(st.sampled_from([IGNORED, 0, 1, 2]), min_size=1, max_size=5), min_size=1, max_size=4)
CLASSES = torch.tensor([0.2, 1.0, 3.0]).double()


@pytest.mark.parametrize(
    "loss_fn",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=CLASSES),
        nn.CrossEntropyLoss(reduction="sum"),
        partial(functional.cross_entropy, ignore_index=1),
        partial(partial(functional.cross_entropy, weight=CLASSES), ignore_index=2),
        partial(functional.cross_entropy, reduction="sum"),
        torch.compile(functional.cross_entropy, backend="eager"),
        partial(torch.compile(functional.cross_entropy, backend="eager"), ignore_index=1),
        torch.compile(nn.CrossEntropyLoss(ignore_index=2), backend="eager"),
        partial(functional.cross_entropy, reduction="sum", size_average=None),
        partial(functional.cross_entropy, ignore_index=2),
    ],
)
@given(targets)
def test_weighted_micro_batch_losses_add_up_to_the_mini_batchs(loss_fn, targets):
    """Whatever is ignored, and however classes are weighed; also where whole micro-batches are ignored."""
    ignored = getattr(loss_fn, "ignore_index", None) or getattr(loss_fn, "keywords", {}).get("ignore_index", IGNORED)
    rows = [torch.tensor([IGNORED if t == ignored else t for t in row]) for row in targets]
    rows = [torch.where(row == IGNORED, ignored, row) for row in rows]
    scores = [torch.randn(len(row), 3).double() for row in rows]
    expected = loss_fn(torch.cat(scores), torch.cat(rows))
    weights = micro_batch_weights(loss_fn, rows, [len(row) for row in rows])
    parts = [w * loss_fn(s, t) for w, s, t in zip(weights, scores, rows, strict=True) if w != 0]
    torch.testing.assert_close(sum(parts), expected, rtol=0, atol=1e-10, equal_nan=True)


def test_targets_that_are_probabilities_are_all_counted():
    """Cross-entropy then averages over samples."""
    rows = [torch.rand(3, 4), torch.rand(1, 4)]
    assert micro_batch_weights(functional.cross_entropy, rows, [3, 1]) == [0.75, 0.25]


def test_other_losses_average_over_samples():
    """Also functions of which nothing is known."""
    rows = [torch.rand(2, 5), torch.rand(2, 5), torch.rand(1, 5)]
    for loss_fn in (functional.mse_loss, nn.L1Loss(), lambda output, target: (output - target).abs().mean()):
        assert micro_batch_weights(loss_fn, rows, [2, 2, 1]) == [0.4, 0.4, 0.2]


@pytest.mark.parametrize(
    ("options", "weights"),
    [({"size_average": False}, [1.0, 1.0]), ({"size_average": True}, [0.75, 0.25]), ({"reduce": True}, [0.75, 0.25])],
)
def test_torchs_older_options_are_known(options, weights):
    """They come before ``reduction``, as in torch."""
    rows = [torch.tensor([0, 1, 1]), torch.tensor([1])]
    assert micro_batch_weights(partial(functional.cross_entropy, **options), rows, [3, 1]) == weights


def test_the_loss_with_the_output_layer_inside_tells_what_it_ignores():
    """Torch's linear_cross_entropy, which never holds all scores at once."""
    rows = [torch.tensor([0, IGNORED, IGNORED]), torch.tensor([1, 1, 0])]
    for loss_fn in (nn.LinearCrossEntropyLoss(4, 2), functional.linear_cross_entropy):
        assert micro_batch_weights(loss_fn, rows, [3, 3]) == [1 / 4, 3 / 4]


class Focal(nn.CrossEntropyLoss):
    """Weighs hard samples more; it divides by the samples, whatever its base would divide by."""

    def forward(self, output, target):
        loss = functional.cross_entropy(output, target, reduction="none", weight=self.weight)
        return ((1 - (-loss).exp()).square() * loss).mean()


class Summed:
    reduction = "sum"

    def __call__(self, output, target):
        return (output - target).square().sum()


@pytest.mark.parametrize(
    ("loss_fn", "weights"),
    [
        (Focal(), [0.75, 0.25]),
        (Focal(weight=torch.tensor([1.0, 9.0])), [0.75, 0.25]),
        (Focal(reduction="none"), [0.75, 0.25]),
        (Focal(reduction="sum"), [1.0, 1.0]),
        (Summed(), [1.0, 1.0]),
    ],
)
def test_losses_that_go_their_own_way_are_not_taken_for_torchs(loss_fn, weights):
    """They average over samples, or say that they sum; ``weight`` says anything else."""
    assert micro_batch_weights(loss_fn, [torch.tensor([0, 1, 1]), torch.tensor([1])], [3, 1]) == weights


def test_a_function_without_a_module_is_a_function():
    """As a program defines that runs a student's text."""
    names = {}
    exec("def loss_fn(output, target):\n    return (output - target).mean()", {}, names)
    assert micro_batch_weights(names["loss_fn"], [torch.rand(3), torch.rand(1)], [3, 1]) == [0.75, 0.25]


def test_a_function_that_wraps_torchs_is_not_taken_for_it():
    """What it does with the target nobody knows, though it has the name."""

    @wraps(functional.cross_entropy)
    def mine(output, target):
        return functional.mse_loss(output, functional.one_hot(target.clamp_min(0), 3).double())

    rows = [torch.tensor([0, IGNORED, IGNORED]), torch.tensor([1])]
    assert micro_batch_weights(mine, rows, [3, 1]) == [0.75, 0.25]


def test_a_given_weight_is_what_counts():
    """It is called with each micro-batch's target."""
    rows = [torch.tensor([1, 0]), torch.tensor([1, 1])]
    weights = micro_batch_weights(functional.mse_loss, rows, [2, 2], lambda target: target.sum())
    assert weights == [1 / 3, 2 / 3]


def test_nothing_to_average_over_is_nan_as_for_the_whole_batch():
    """0/0: not hidden."""
    rows = [torch.tensor([IGNORED]), torch.tensor([IGNORED])]
    assert all(weight != weight for weight in micro_batch_weights(functional.cross_entropy, rows, [1, 1]))


def test_subclasses_of_torchs_losses_tell_what_they_ignore():
    """As their bases do."""

    class Mine(nn.CrossEntropyLoss):
        pass

    rows = [torch.tensor([0, IGNORED, IGNORED]), torch.tensor([1, 1, 0])]
    assert micro_batch_weights(Mine(ignore_index=IGNORED), rows, [3, 3]) == [1 / 4, 3 / 4]


@pytest.mark.parametrize(
    ("loss_fn", "weight", "kind", "message"),
    [
        (None, None, TypeError, "loss_fn must be a function, not None"),
        ("ce", None, TypeError, "loss_fn must be a function, not 'ce'"),
        (functional.mse_loss, 3, TypeError, "weight must be a function, not 3"),
        (nn.MSELoss(reduction="sum"), len, ValueError, "reduction='sum', and weight is for one that averages"),
        (nn.MSELoss(reduction="none"), None, ValueError, "reduction='none'"),
        (partial(functional.mse_loss, reduce=False), None, ValueError, "reduction='none'"),
        (functional.mse_loss, lambda t: t > 0, ValueError, r"a tensor of shape \(2,\), one number is needed"),
        (functional.mse_loss, lambda t: -1, ValueError, "weight is -1.0 for micro-batch 0"),
        (functional.mse_loss, lambda t: float("nan"), ValueError, "weight is nan for micro-batch 0"),
    ],
)
def test_what_is_no_loss_and_no_weight_is_refused(loss_fn, weight, kind, message):
    """Before anything runs."""
    with pytest.raises(kind, match=message):
        micro_batch_weights(loss_fn, [torch.tensor([0, 1])], [2], weight)
