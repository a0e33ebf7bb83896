"""How much faster a pipeline is than the plain model, as ratios measured side by side in one run.

    python tests/benchmarks/speed.py

The workload is a Transformer (d = 512, 8 layers, sequence 128, batch 32) that is trained for one step, by turns:

- plain, one thread: the model without a pipeline on one core, the yardstick;
- micro-batches, one thread: the same in M pieces, to see what cutting costs by itself;
- plain, all threads: what torch's own intra-op threads make of K cores;
- pipeline: K stages, one core each.

No pipeline of K equal stages is faster than K·M/(M+K−1) times one core: that is the bound.
"""

import argparse
import copy
import json
import platform
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn import functional
from tqdm import tqdm

from gpipe_lite import GPipe
from gpipe_lite.data import text
from gpipe_lite.models import transformer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="K, one core each (default: 2)")
    parser.add_argument("--chunks", type=int, default=8, help="M, the number of micro-batches (default: 8)")
    parser.add_argument("--checkpoint", default="never", help="always, except_last or never (default: never)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--output", type=Path, help="write all times there, as JSON")
    options = parser.parse_args()
    stages, chunks = options.stages, options.chunks

    torch.manual_seed(0)
    plain = transformer(num_layers=8, vocab_size=256, d_model=512, num_heads=8, d_ff=2048)
    pipe = GPipe(copy.deepcopy(plain), devices=["cpu"] * stages, chunks=chunks, checkpoint=options.checkpoint)
    data = text(length=128)
    x, y = (torch.stack(part) for part in zip(*(data[i] for i in range(32)), strict=True))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def run_plain(pieces: int, threads: int) -> None:
        torch.set_num_threads(threads)
        plain.zero_grad()
        for a, b in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
            (loss_fn(plain(a), b) * (len(a) / len(x))).backward()

    def run_pipe() -> None:
        torch.set_num_threads(stages)  # shared out: one for each stage
        pipe.zero_grad()
        pipe.step(x, y, loss_fn)

    contestants = {
        "plain, 1 thread": lambda: run_plain(1, 1),
        f"{chunks} micro-batches, 1 thread": lambda: run_plain(chunks, 1),
        f"plain, {stages} threads": lambda: run_plain(1, stages),
        f"pipeline, {stages} stages": run_pipe,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for measured_round in tqdm(range(-1, options.rounds), desc="rounds, the first to warm up"):
        for name, run in contestants.items():
            start = perf_counter()
            run()
            if measured_round >= 0:
                seconds[name].append(perf_counter() - start)

    baseline = median(seconds["plain, 1 thread"])
    bound = stages * chunks / (chunks + stages - 1)
    print(f"{'':28}  seconds a step (min–max)   times one thread")
    for name, times in seconds.items():
        print(f"{name:28}  {median(times):6.2f} ({min(times):.2f}–{max(times):.2f})   {baseline / median(times):13.2f}")
    print(f"bound for equal stages, K·M/(M+K−1): {bound:.2f}")
    print(f"measured bubble of the last step: {pipe.trace.bubble_fraction:.1%}; by formula {1 - bound / stages:.1%}")
    if options.output:
        machine = f"{platform.machine()}, {torch.get_num_threads()} cores used, torch {torch.__version__}"
        found = {"machine": machine, "stages": stages, "chunks": chunks, "bound": bound, "seconds": seconds}
        options.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
