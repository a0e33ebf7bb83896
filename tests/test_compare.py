"""How far results are apart, and where in a batch some samples are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_lite.compare import gap, runs_like, scale, tolerance_for

NAN, INF = math.nan, math.inf

GAPS = {
    "numbers": (1.5, 2, 0.5),
    "the largest of all": (
        [torch.zeros(2), {"a": torch.tensor([1.0, -4.0])}],
        [torch.ones(2), {"a": torch.zeros(2)}],
        4,
    ),
    "truths": (torch.tensor([True, False]), torch.tensor([True, True]), 1),
    "whole numbers": (torch.tensor([2**40 + 1]), torch.tensor([2**40]), 1),
    "complex": (torch.tensor([3 + 4j]), torch.tensor([0j]), 5),
    "sparse": (torch.eye(2).to_sparse(), torch.zeros(2, 2), 1),
    "dtypes": (torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float16), 0),
    "nothing": ((), None, 0),
    "empty": (torch.ones(0, 3), torch.ones(0, 3), 0),
    "nan and nan, inf and inf": (torch.tensor([NAN, INF, -INF]), torch.tensor([NAN, INF, -INF]), 0),
    "nan and a number": (torch.tensor([NAN, 1.0]), torch.tensor([0.0, 1.0]), INF),
    "inf and a number": (torch.tensor([INF]), torch.tensor([0.0]), INF),
    "shapes": (torch.ones(2, 1), torch.ones(2), INF),
    "one missing": ([torch.ones(2)], [], INF),
}


@pytest.mark.parametrize(("one", "other", "expected"), GAPS.values(), ids=GAPS)
def test_the_gap_is_the_largest_absolute_difference(one, other, expected):
    """Either way round; nan is nan, and what cannot be compared is infinitely far."""
    assert gap(one, other) == gap(other, one) == expected


def test_the_scale_is_that_of_what_is_finite():
    """And 0 of nothing."""
    assert scale([torch.tensor([1.0, -3.0, INF, NAN]), torch.ones(0)]) == 3
    assert scale([]) == 0


def test_the_tolerance_is_that_of_the_coarsest_dtype():
    """Whole numbers are exact."""
    assert tolerance_for([torch.ones(1).double()]) == pytest.approx(2 ** (-52 * 2 / 3))
    assert tolerance_for([torch.ones(1).double(), torch.ones(1)]) == pytest.approx(2 ** (-23 * 2 / 3))
    assert tolerance_for([torch.ones(1, dtype=torch.int64)]) == 0


@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))), st.data())
def test_a_part_is_found_where_it_is(sizes, data):
    """Along whatever axis the samples lie, and beside tensors that are no samples."""
    total, length = sizes
    first = data.draw(st.integers(0, total - length))
    rows = torch.arange(total * 6.0).view(total, 6)
    parts = rows[first : first + length]
    constant = torch.ones(4)
    whole, part = [rows, rows.T, rows[:, 0], constant], [parts, parts.T, parts[:, 0], constant]
    assert list(runs_like(whole, part, 0.0)) == [(range(first, first + length), total, 0.0)]


def test_equal_samples_are_found_everywhere():
    """Which of them it was nobody can say."""
    runs = [run for run, _, _ in runs_like([torch.ones(5, 2)], [torch.ones(2, 2)], 0.0)]
    assert runs == [range(0, 2), range(1, 3), range(2, 4), range(3, 5)]


def test_of_what_is_nowhere_the_nearest_is_found():
    """With how far it is; by the first sample."""
    whole = torch.tensor([[0.0], [10.0], [20.0], [30.0]])
    assert list(runs_like([whole], [torch.tensor([[11.0], [20.0]])], 0.1)) == [(range(1, 3), 4, 1.0)]


@pytest.mark.parametrize(
    "part", [[torch.ones(2, 3), torch.ones(2)], [torch.ones(2, 4)], [torch.ones(9, 3)], [torch.ones(2, 3, 1)]]
)
def test_of_what_has_another_shape_nothing_is_near(part):
    """Another number of tensors, of features, of axes, or more samples than there are."""
    assert all(apart == INF for _, _, apart in runs_like([torch.ones(5, 3)], part, 0.0))
