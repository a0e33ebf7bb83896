"""What a slider move costs in the kernel: from the new value to the new picture, without the way to the browser.

    python tests/benchmarks/explore.py

The slider for M goes back and forth between two values at K = 8 and M = 32; each move makes the schedule, simulates
it, reads its figures, writes them in words, and draws the SVG anew: nothing is kept from the move before.
"""

from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

from gpipe_lite.explore import explore


def milliseconds(moves: int, **settings: Any) -> list[float]:
    """How long each move takes."""
    explorer = explore(num_stages=8, num_micro_batches=32, **settings)
    slider = explorer.controls["num_micro_batches"]
    found = []
    for move, value in zip(range(-4, moves), cycle([31, 32]), strict=False):
        start = perf_counter()
        slider.value = value
        if move >= 0:  # the first few warm up
            found.append((perf_counter() - start) * 1e3)
    return found


def main(moves: int = 50) -> None:
    """Measure and print."""
    for checkpoint in ("never", "always"):  # which adds half as many tasks again
        times = milliseconds(moves, checkpoint=checkpoint)
        print(
            f"a slider move of explore() at K = 8, M = 32, recomputation {checkpoint}, costs the kernel "
            f"{median(times):.1f} ms (median of {moves}; {min(times):.1f}–{max(times):.1f})"
        )


if __name__ == "__main__":
    main()
