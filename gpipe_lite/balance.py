"""Where to cut: layer costs in, layers per stage out.

A pipeline is as fast as its slowest stage, so the best split is one whose largest stage is smallest. It is
found exactly, in two steps::

    costs       2 1 2 1 6, to be split into three stages
    1. bound    how small can the largest stage be? Bisection finds 6.
    2. balance  which split within the bound is most even? Dynamic programming finds 2 1 | 2 1 | 6.

Costs are added and compared as whole numbers: a float is a whole number over a power of two, so multiplied by
the largest such power all become whole, and nothing is rounded.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import SupportsIndex


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Split layers into contiguous stages so that the largest stage cost is as small as can be.

    Of the splits with the smallest largest stage it takes the most even one: the least sum of squared stage
    costs, which is the least variance. If there is still a choice, the last stage gets as few layers as can
    be, then the one before it, and so on: a layer that costs nothing, such as a ReLU by parameters, stays
    with the layer before it.

    >>> balance([2, 1, 2, 1, 6], 3)
    [2, 2, 1]

    Args:
        costs: of each layer, 0 or more, in any unit that adds up.
        num_stages: K, from 1 to the number of layers.

    Returns:
        The number of layers of each stage, each 1 or more. It takes O(N · (N + K)) steps for N layers.

    Raises:
        ValueError: if there are no layers, fewer layers than stages, or a cost is negative, infinite or NaN.
    """
    sums = [0, *accumulate(_whole_numbers(costs))]
    num_layers = len(sums) - 1
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
        raise ValueError(f"layers are split into a whole number of stages, 1 or more, not {num_stages!r}")
    if num_stages > num_layers:
        raise ValueError(
            f"{num_stages} stages need a layer each, the model has {num_layers}: "
            f"use at most {num_layers} stages, or cut the model into more layers"
        )
    return _most_even(sums, num_stages, _smallest_bound(sums, num_stages))


def _layers(number: int) -> str:
    return f"{number} layer{'' if number == 1 else 's'}"


def check_balance(balance: Iterable[SupportsIndex], num_layers: int) -> list[int]:
    """Check that a balance covers a model's layers, and return it as a list.

    Args:
        balance: layers of each stage.
        num_layers: of the model.

    Raises:
        TypeError: if it is not a sequence of whole numbers.
        ValueError: if a stage would be empty, or the sum is not ``num_layers``.
    """
    if not isinstance(balance, Iterable):
        raise TypeError(f"balance is a sequence such as [2, 2], the number of layers of each stage, not {balance!r}")
    sizes = []
    for stage, size in enumerate(balance):
        if isinstance(size, bool) or not isinstance(size, SupportsIndex):
            raise TypeError(f"balance gives stage {stage} {size!r} layers: write a whole number, 1 or more")
        if index(size) < 1:
            raise ValueError(f"balance gives stage {stage} {size} layers: give it 1 or more, or drop the entry")
        sizes.append(index(size))
    if (missing := num_layers - sum(sizes)) != 0:
        way_out = f"add {missing} to" if missing > 0 else f"take {-missing} from"
        raise ValueError(
            f"balance {sizes} covers {_layers(sum(sizes))}, the model has {num_layers}: {way_out} one entry"
        )
    return sizes


def stage_costs(costs: Sequence[float], balance: Sequence[int]) -> list[float]:
    """Add up each stage's layer costs.

    >>> stage_costs([3, 1, 4, 1, 5], [2, 3])
    [4.0, 10.0]

    Raises:
        TypeError, ValueError: if the balance does not cover the layers; see :func:`check_balance`.
    """
    cuts = [0, *accumulate(check_balance(balance, len(costs)))]
    return [math.fsum(costs[start:end]) for start, end in pairwise(cuts)]


def imbalance(costs: Sequence[float], balance: Sequence[int]) -> float:
    """How many times longer the largest stage takes than the average one: 1 if all are equal, at most K."""
    stages = stage_costs(costs, balance)
    total = math.fsum(stages)
    return max(stages) * len(stages) / total if total else 1.0


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The costs, multiplied by the one power of two that makes them all whole."""
    if not len(costs):
        raise ValueError("there are 0 layers to split: pass the cost of at least 1")
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ValueError(f"layer {layer} of {len(costs)} costs {cost!r}: a cost is a finite number, 0 or more")
    ratios = [(cost if isinstance(cost, int) else float(cost)).as_integer_ratio() for cost in costs]
    scale = max(denominator for _, denominator in ratios)
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _smallest_bound(sums: list[int], num_stages: int) -> int:
    """How small the largest stage can be, by bisection; ``sums[i]`` is the cost of the first i layers."""

    def is_enough(bound: int) -> bool:
        end = 0
        for _ in range(num_stages):  # each as full as the bound allows; stages left empty can take from others
            end = bisect_right(sums, sums[end] + bound) - 1
        return end == len(sums) - 1

    too_little, enough = -1, sums[-1]
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_little = middle
    return enough


def _most_even(sums: list[int], num_stages: int, bound: int) -> list[int]:
    """The balance with the least sum of squares, no stage above the bound, by dynamic programming.

    ``best[j]`` is the least price of the first j layers in k stages, ``cut[j]`` where their last stage
    starts. A stage above the bound pays a fine that exceeds the price of any split within it, and yet the
    price stays a convex function of the stage's cost. So the best cut moves right, if at all, as layers or
    stages are added: the one for k - 1 stages and the one for j + 1 layers fence it in (F. F. Yao,
    *Efficient dynamic programming using quadrangle inequalities*, STOC 1980).
    """
    num_layers = len(sums) - 1
    fine = sums[-1] ** 2 + 1

    def price(cost: int) -> int:
        return cost * cost if cost <= bound else cost * cost + fine * (cost - bound)

    best = [price(cost) for cost in sums]
    cuts = [[0] * (num_layers + 1)]
    for k in range(2, num_stages + 1):
        shorter, best = best, [0] * (num_layers + 1)
        cut = [num_layers - 1] * (num_layers + 2)
        for j in range(num_layers, k - 1, -1):
            starts = range(max(cuts[-1][j], k - 1), min(cut[j + 1], j - 1) + 1)
            best[j], negated = min((shorter[i] + price(sums[j] - sums[i]), -i) for i in starts)
            cut[j] = -negated
        cuts.append(cut)

    sizes, end = [], num_layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return sizes[::-1]
