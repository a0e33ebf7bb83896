"""Stages as processes, against torch's own pipelines in the same processes, as ratios measured in one run.

    python tests/benchmarks/processes.py

The workload is that of ``speed.py``, in K processes of one core each. By turns, one step of

- plain, one thread: the model without a pipeline, in the first process alone, the yardstick;
- DistributedGPipe, and torch.distributed.pipelining's ScheduleGPipe: all forward, all backward;
- DistributedGPipe with 1F1B, and torch.distributed.pipelining's Schedule1F1B.

None recomputes, and all stages are the same layers.
"""

import argparse
import copy
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from gpipe_lite import DistributedGPipe, launch
from gpipe_lite.balance import balance as best_balance
from gpipe_lite.data import text
from gpipe_lite.models import transformer
from gpipe_lite.partition import partition
from gpipe_lite.profiling import parameter_counts


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def measure(chunks: int, rounds: int) -> dict[str, list[float]]:
    """What each rank does: seconds a step of each contestant, without a warm-up round."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = transformer(num_layers=8, vocab_size=256, d_model=512, num_heads=8, d_ff=2048)
    data = text(length=128)
    x, y = (torch.stack(part) for part in zip(*(data[i] for i in range(32)), strict=True))
    numbers = best_balance(parameter_counts(plain), stages)

    def run_plain() -> None:
        if rank == 0:
            plain.zero_grad()
            loss_fn(plain(x), y).backward()

    def ours(schedule: str) -> Callable[[], None]:
        pipe = DistributedGPipe(copy.deepcopy(plain), numbers, chunks=chunks, schedule=schedule, checkpoint="never")

        def run() -> None:
            pipe.zero_grad()
            pipe.step(x, y, loss_fn)

        return run

    def torchs(kind: type[ScheduleGPipe | Schedule1F1B]) -> Callable[[], None]:
        layers: nn.Module = partition(copy.deepcopy(plain), numbers)[rank]
        stage = PipelineStage(layers, rank, stages, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=chunks, loss_fn=loss_fn)

        def run() -> None:
            layers.zero_grad()
            if rank == 0:
                schedule.step(x)
            elif rank == stages - 1:
                schedule.step(target=y, losses=[])
            else:
                schedule.step()

        return run

    contestants = {
        "plain, 1 thread": run_plain,
        "gpipe_lite, gpipe": ours("gpipe"),
        "torch, ScheduleGPipe": torchs(ScheduleGPipe),
        "gpipe_lite, 1f1b": ours("1f1b"),
        "torch, Schedule1F1B": torchs(Schedule1F1B),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for measured_round in range(-1, rounds):
        for name, run in contestants.items():
            dist.barrier()
            start = perf_counter()
            run()
            dist.barrier()
            if measured_round >= 0:
                seconds[name].append(perf_counter() - start)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="K, a process each (default: 2)")
    parser.add_argument("--chunks", type=int, default=8, help="M, the number of micro-batches (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    options = parser.parse_args()
    seconds = launch(measure, options.stages, options.chunks, options.rounds, timeout=3600)[0]
    baseline = median(seconds["plain, 1 thread"])
    bound = options.stages * options.chunks / (options.chunks + options.stages - 1)
    print(f"{'':24}  seconds a step (min–max)   times one thread")
    for name, times in seconds.items():
        print(f"{name:24}  {median(times):6.2f} ({min(times):.2f}–{max(times):.2f})   {baseline / median(times):13.2f}")
    print(f"bound for equal stages, K·M/(M+K−1): {bound:.2f}")


if __name__ == "__main__":
    main()
