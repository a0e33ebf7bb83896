"""Gradients summed over micro-batches and stages."""

import torch
from torch import nn

from gpipe_lite.gradients import GradientSums, merged


def test_what_autograd_returned_is_not_written_to():
    """One tensor may be the gradient of two parameters, or an expanded one."""
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    sums = GradientSums([a, b])
    given = torch.ones(()).expand(3)
    for _ in range(3):
        sums.add([given, given])
    assert torch.equal(given, torch.ones(3))
    assert [g.tolist() for g in merged([sums], [a, b])] == [[3.0] * 3] * 2


def test_a_single_gradient_is_handed_on_uncopied():
    """Autograd decides whether it can become ``.grad``."""
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    sums, gradient = GradientSums([a, b]), torch.ones(3)
    sums.add([gradient, None])
    first, second = merged([sums], [a, b])
    assert first is gradient
    assert second is None
    assert merged([sums], [a, b]) == [None, None]  # they were taken


def test_a_gradient_does_not_keep_a_larger_tensor_alive():
    """Such as one micro-batch's rows of the whole output's gradient, of which an identity layer's bias gets a view."""
    parameter, whole = nn.Parameter(torch.zeros(3)), torch.arange(12.0).view(4, 3)
    sums = GradientSums([parameter])
    sums.add([whole[1]])
    (total,) = merged([sums], [parameter])
    assert total.tolist() == whole[1].tolist()
    assert total.untyped_storage().nbytes() == total.nbytes


def test_sums_of_sparse_and_dense_gradients_are_right():
    """In any order, over micro-batches and over stages."""
    parameter = nn.Parameter(torch.zeros(3))
    sparse, dense = torch.tensor([0.0, 2.0, 0.0]).to_sparse(), torch.tensor([1.0, 1.0, 1.0])
    for order in ([sparse, sparse, dense], [sparse, dense, sparse], [dense, sparse, sparse], [sparse] * 3):
        one, other = GradientSums([parameter]), GradientSums([parameter])
        for gradient in order:
            one.add([gradient])
        other.add([sparse])
        (total,) = merged([one, other], [parameter])
        assert total.to_dense().tolist() == sum(g.to_dense() for g in [*order, sparse]).tolist()


def test_a_parameter_that_is_covered_twice_counts_once():
    """A loss function may share a weight with the last stage."""
    parameter = nn.Parameter(torch.zeros(3))
    sums = GradientSums([parameter])
    sums.cover(parameter)
    sums.cover(other := nn.Parameter(torch.zeros(2)))
    assert [id(p) for p in sums.parameters] == [id(parameter), id(other)]
