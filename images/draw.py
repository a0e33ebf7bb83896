"""Draw the pictures of the README from their data: ``python images/draw.py``.

``hero.png`` shows a step that really ran, kept in ``hero_trace.json``; ``--measure`` runs and keeps another one.
``schedules.png`` shows three schedules, simulated. The sentences that describe the pictures are printed and kept in
``alt.json``.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from gpipe_lite import plot
from gpipe_lite.schedule import gpipe, naive, one_f_one_b
from gpipe_lite.simulate import TYPICAL_COSTS, simulate
from gpipe_lite.trace import Trace

HERE = Path(__file__).parent
K, M = 4, 8


def measure() -> Trace:
    """Run one step of a Transformer on four CPU stages, after one to warm up."""
    import torch
    from torch import Tensor
    from torch.nn import functional

    from gpipe_lite import GPipe
    from gpipe_lite.data import VOCAB_SIZE, text
    from gpipe_lite.models import transformer

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    model = transformer(num_layers=12, vocab_size=VOCAB_SIZE, d_model=256, num_heads=4, d_ff=1024)
    pipe = GPipe(model, [4, 3, 3, 4], devices=["cpu"] * K, chunks=M)
    x, y = (part[:64] for part in text(length=64).tensors)
    for _ in range(2):
        trace = pipe.step(x, y, loss_fn).trace
    return trace


def hero(trace: Trace) -> plot.Picture:
    """Draw the measured step, and name the idle times that every pipeline has."""
    picture = plot.timeline(trace, f"a measured step of a Transformer, {K} stages, {M} micro-batches")
    (ax,) = picture.figure.axes
    first, last = trace.on(0), trace.on(trace.num_devices - 1)
    gap = max(pairwise(first), key=lambda pair: pair[1].start - pair[0].end)
    idle = {
        "fill": (trace.start, last[0].start, trace.num_devices - 1),
        "drain": (last[-1].end, trace.end, trace.num_devices - 1),
        "bubble": (gap[0].end, gap[1].start, 0),
    }
    for word, (start, end, device) in idle.items():
        middle = ((start + end) / 2 - trace.start) * 1e3
        ax.text(middle, device, word, ha="center", va="center", style="italic", color="0.3", fontsize=10)
    return picture


def schedules() -> plot.Picture:
    """Draw three schedules and what stage 0 keeps, side by side, on one axis of time as long as GPipe's."""
    made = {
        "naive, one micro-batch at a time": naive(K, M),
        "GPipe with recomputation": gpipe(K, M, "except_last"),
        "1F1B": one_f_one_b(K, M),
    }
    until = simulate(made["GPipe with recomputation"], TYPICAL_COSTS).end
    figure = Figure(figsize=(plot.WIDTH, 7.2), layout="constrained")
    axes = figure.subplots(len(made), 2, width_ratios=[3.4, 1], squeeze=False)
    sentences = []
    for (left, right), (name, schedule) in zip(axes, made.items(), strict=True):
        trace = simulate(schedule, TYPICAL_COSTS)
        plot.draw_timeline(left, trace, name, until)
        if trace.end > until:
            left.set_title(f"goes on to step {trace.end:g} →", loc="right", fontsize=10, style="italic", color="0.3")
        kept = [(trace.live_boundaries(0), "inputs"), (trace.live_activations(0), "activations")]
        looks = {"color": "black", "linestyle": "-", "linewidth": 2.4}, plot.curve(1) | {"color": "#56B4E9"}
        for (curve, label), look in zip(kept, looks, strict=True):
            times, counts = zip(*curve, strict=True)
            right.step(times, counts, where="post", label=label, **look)
        right.set(xlabel="time, steps", xlim=(0, until), ylim=(0, M + 1), yticks=range(0, M + 1, 4))
        right.set_title("stage 0 keeps", loc="left", fontsize=10)
        right.set_ylabel("micro-batches")
        right.spines[["top", "right"]].set_visible(False)
        most = [max(count for _, count in curve) for curve, _ in kept]
        sentences.append(
            f"{name}: {trace.makespan:g} steps, {trace.bubble_fraction:.0%} idle, and of the micro-batches stage 0 "
            f"keeps the inputs of at most {most[0]} and all activations of at most {most[1]}"
        )
    axes[0][1].legend(fontsize=8, frameon=False, loc="upper right")
    plot.draw_legend(figure, simulate(made["GPipe with recomputation"]))
    alt = f"Simulated timelines of three schedules for {K} equal stages and {M} micro-batches. {'; '.join(sentences)}."
    return plot.Picture(figure, alt)


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the step of the hero picture again")
    kept = HERE / "hero_trace.json"
    if parser.parse_args().measure:
        measure().save(kept)
    pictures = {"hero.png": hero(Trace.load(kept)), "schedules.png": schedules()}
    for name, picture in pictures.items():
        picture.save(HERE / name)
        print(f"{name}: {picture.alt}")
    alts = {name: picture.alt for name, picture in pictures.items()}
    (HERE / "alt.json").write_text(json.dumps(alts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
