"""The balance is the best contiguous split: no other has a smaller largest stage."""

import math
import subprocess
import sys
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_lite.balance import balance, check_balance, imbalance, stage_costs

whole = st.integers(0, 6)
spiky = st.sampled_from([0, 1, 1, 40])
real = st.floats(0, 1e6)
extreme = st.floats(0, allow_infinity=False, allow_nan=False)
some_costs = st.one_of(*(st.lists(kind, min_size=1, max_size=8) for kind in (whole, spiky, real, extreme)))


def all_balances(num_layers, num_stages):
    """Every way to cut the layers into stages of one or more."""
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield [end - start for start, end in pairwise((0, *cuts, num_layers))]


def exact_stage_costs(costs, sizes):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [sum(map(Fraction, costs[end - size : end])) for size, end in zip(sizes, ends, strict=True)]


@given(some_costs, st.data())
def test_no_split_is_better(costs, data):
    """Against all splits, in exact arithmetic: largest stage, then evenness, then few layers at the end."""
    num_stages = data.draw(st.integers(1, len(costs)))

    def rank(sizes):
        stages = exact_stage_costs(costs, sizes)
        return max(stages), sum(stage**2 for stage in stages), sizes[::-1]

    assert balance(costs, num_stages) == min(all_balances(len(costs), num_stages), key=rank)


def test_rounding_decides_nothing():
    """A float sum would lose the ones, and see no difference to [4, 1]; the exact sum sees it."""
    assert 1e16 + 1.0 + 1.0 + 1.0 == 1e16
    assert balance([1e16, 1.0, 1.0, 1.0, 1e16], 2) == [3, 2]


def test_the_rest_is_even_when_one_layer_is_too_large():
    """The largest layer is the bottleneck wherever the others go, and still they are spread."""
    assert balance([10, 1, 1, 1, 1, 1, 1], 3) == [1, 3, 3]
    assert balance([1, 1, 1, 1, 1, 1, 10], 3) == [3, 3, 1]


def test_a_layer_without_cost_stays_with_the_layer_before():
    """By parameters, an activation function goes where its linear layer is."""
    assert balance([7, 0, 7, 0, 7, 0], 3) == [2, 2, 2]


def test_layers_without_any_cost_can_be_split():
    """A model without parameters has a balance too."""
    assert balance([0, 0, 0], 2) == [2, 1]


def test_a_thousand_layers_are_cut_into_128_stages():
    """The algorithm's steps grow with N · (N + K), not with K · N², which a test's time limit would not allow."""
    costs = [1000.5, *([1.25] * 999)]
    assert sum(balance(costs, 128)) == 1000


@pytest.mark.parametrize(
    ("costs", "num_stages", "words"),
    [
        ([], 1, "0 layers"),
        ([1, 2], 3, "3 stages need a layer each, the model has 2"),
        ([1, 2], 0, "1 or more, not 0"),
        ([1, 2], True, "not True"),
        ([1, 2], 2.0, "not 2.0"),
        ([1, -2.5], 1, r"layer 1 of 2 costs -2\.5"),
        ([math.nan], 1, "layer 0 of 1 costs nan"),
        ([1, math.inf], 1, "layer 1 of 2 costs inf"),
    ],
)
def test_what_cannot_be_split_is_refused(costs, num_stages, words):
    """The error shows the number that is wrong."""
    with pytest.raises(ValueError, match=words):
        balance(costs, num_stages)


def test_stage_costs_add_up():
    """Each stage's cost is the sum over its layers."""
    assert stage_costs([3, 1, 4, 1, 5], [2, 3]) == [4, 10]
    assert stage_costs([0.1] * 10, [10]) == [1.0]


@given(some_costs.filter(lambda costs: max(costs) < 1e300), st.data())
def test_imbalance_is_between_one_and_the_number_of_stages(costs, data):
    """The largest stage is at least the average one and at most everything."""
    num_stages = data.draw(st.integers(1, len(costs)))
    assert 1 - 1e-9 <= imbalance(costs, balance(costs, num_stages)) <= num_stages + 1e-9


def test_imbalance_is_largest_over_mean():
    """Stages of 4 and 10 average 7; stages that cost nothing are equal."""
    assert imbalance([3, 1, 4, 1, 5], [2, 3]) == pytest.approx(10 / 7)
    assert imbalance([0, 0], [1, 1]) == 1


def test_any_sequence_of_whole_numbers_is_a_balance():
    """Numbers that are whole by Python's index protocol count, such as numpy's."""
    import numpy as np

    assert check_balance(np.array([2, 1]), 3) == [2, 1]
    assert check_balance((3,), 3) == [3]


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        (2, TypeError, "a sequence such as"),
        ("22", TypeError, "stage 0 '2' layers"),
        ([2, 2.0], TypeError, r"stage 1 2\.0 layers"),
        ([True, 3], TypeError, "stage 0 True layers"),
        ([4, 0], ValueError, "stage 1 0 layers"),
        ([5, -1], ValueError, "stage 1 -1 layers"),
        ([2, 1], ValueError, r"\[2, 1\] covers 3 layers, the model has 4: add 1 to one entry"),
        ([4, 2], ValueError, r"\[4, 2\] covers 6 layers, the model has 4: take 2 from one entry"),
        ([], ValueError, r"\[\] covers 0 layers, the model has 4"),
    ],
)
def test_a_balance_that_does_not_cover_the_model_is_refused(sizes, error, words):
    """The error shows both numbers and what to change."""
    with pytest.raises(error, match=words):
        check_balance(sizes, 4)


def test_balancing_does_not_load_torch():
    """Chapters about time start at once."""
    code = "import sys, gpipe_lite.balance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
