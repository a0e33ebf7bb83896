"""Train a model on a pipeline: ``python -m gpipe_lite.train``, or its pieces from a notebook.

Under torchrun each process is a stage, ``torchrun --nproc-per-node 4 -m gpipe_lite.train``, and computes the same.

The way of a training: :func:`workload` makes the model and the data, ``GPipe`` the pipeline, :func:`train` runs the
epochs, :func:`evaluate` tells how good the model is. Which samples make which batch follows from the seed and the
epoch, the learning rate from the step; so a run that was stopped and resumed is bit-equal to one that was not.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # public, but not marked as such
from torch.nn import functional
from torch.utils.data import TensorDataset
from tqdm import tqdm

from gpipe_lite import data, saving
from gpipe_lite.balance import balance as best_balance
from gpipe_lite.distributed import DistributedGPipe
from gpipe_lite.gpipe import GPipe
from gpipe_lite.models import amoebanetd, transformer
from gpipe_lite.options import check_file, config_of, devices_of, parse
from gpipe_lite.profiling import layer_costs, parameter_counts
from gpipe_lite.watch import RankFailedError

Pipe = GPipe | DistributedGPipe


@dataclass(frozen=True)
class Workload:
    """What is trained on what.

    Attributes:
        model: not yet on a pipeline.
        train: inputs and targets to train on.
        test: inputs and targets to evaluate with.
        counts: "accuracy" of the most likely class, or "perplexity" of the next token.
        unit: of throughput: what a sample is called.
    """

    model: nn.Sequential
    train: TensorDataset
    test: TensorDataset
    counts: str
    unit: str


class Stopped(Exception):  # noqa: N818 - no error: the user or the loss asked for it
    """Training ends early; the message says why."""


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over samples, or over all tokens of all samples.

    Args:
        output: scores, shape (N, classes) or (N, T, classes).
        target: the right classes, shape (N,) or (N, T).
    """
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def workload(options: argparse.Namespace) -> Workload:
    """Make the model and the data that the options name."""
    torch.manual_seed(options.seed)
    name, path = options.data
    if options.model == "amoebanetd":
        if name == "digits":
            sets = [data.digits(options.size, train=train) for train in (True, False)]
        elif name == "cifar10":
            sets = [data.cifar10(path, train=train) for train in (True, False)]
        else:
            raise ValueError(f"amoebanetd reads images, and --data {name} is text: take digits or cifar10=PATH")
        channels = sets[0].tensors[0].shape[1]
        model = amoebanetd(options.layers, options.filters, 10, in_channels=channels, stem="small")
        return Workload(model, sets[0], sets[1], counts="accuracy", unit="image")
    if name == "text":
        sets = [data.text(options.length, train=train) for train in (True, False)]
    elif name == "text-folder":
        sets = [data.text_folder(path, options.length, train=train) for train in (True, False)]
    else:
        raise ValueError(f"transformer reads text, and --data {name} is images: take text or text-folder=PATH")
    width, heads = options.width, options.heads
    model = transformer(options.layers, data.VOCAB_SIZE, width, heads, 4 * width, options.dropout)
    return Workload(model, sets[0], sets[1], counts="perplexity", unit="sequence")


def batches(dataset: TensorDataset, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples once, in an order that follows from seed and epoch; the last batch may be smaller."""
    x, y = dataset.tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32))
    for rows in order.split(size):
        yield x[rows], y[rows]


def learning_rate(peak: float, step: int, num_steps: int) -> float:
    """Rise to the peak in the first tenth of the steps, then fall to nothing along half a cosine."""
    rising = max(1, num_steps // 10)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, num_steps - rising)))


@torch.no_grad()
def evaluate(pipe: Pipe, dataset: TensorDataset, batch_size: int) -> tuple[float, float]:
    """The model's mean loss and accuracy.

    Args:
        pipe: left in the mode in which it was.
        dataset: inputs and targets.
        batch_size: samples at a time.

    Returns:
        The loss, and the share of targets to which the model gives the highest score.
    """
    was_training, loss, right = pipe.training, 0.0, 0
    pipe.eval()
    x, y = dataset.tensors
    for inputs, target in zip(x.split(batch_size), y.split(batch_size), strict=True):
        result = pipe.step(inputs, target, loss_fn, keep_outputs=True)
        loss += float(result.loss) * len(inputs)
        if result.outputs is not None:  # the last rank has them
            right += int((result.outputs.argmax(-1).cpu() == target).sum())
    pipe.train(was_training)
    return loss / len(x), _of_all(pipe, right)[-1] / y.numel()


def _of_all(pipe: Pipe, own: Any) -> list[Any]:
    """What each process has, where stages are processes."""
    return pipe.exchange(own) if isinstance(pipe, DistributedGPipe) else [own]


def quality(pipe: Pipe, work: Workload, batch_size: int) -> str:
    """The test set's loss, and accuracy or perplexity, in words."""
    loss, accuracy = evaluate(pipe, work.test, batch_size)
    count = f"{accuracy:.2%}" if work.counts == "accuracy" else f"{math.exp(min(loss, 700)):.2f}"
    return f"test loss {loss:.4f}  test {work.counts} {count}"


def train(pipe: Pipe, work: Workload, optimizer: torch.optim.Optimizer, options: argparse.Namespace, step: int) -> int:
    """Train from a step to the end of the last epoch, with a progress bar and a line an epoch.

    Args:
        pipe: the pipeline.
        work: its data.
        optimizer: of its parameters.
        options: batch_size, epochs, seed, lr; save, save_every, trace, progress.
        step: steps done before, 0 for a new training.

    Returns:
        Steps done in all.

    Raises:
        Stopped: when interrupted, after the running step and a checkpoint; and when the loss is not finite,
            before the weights have changed and without a checkpoint.
    """
    steps_per_epoch = math.ceil(len(work.train) / options.batch_size)
    num_steps = options.epochs * steps_per_epoch
    if step > num_steps:
        raise ValueError(f"the checkpoint has {step} steps, {options.epochs} epochs are {num_steps}: raise --epochs")

    def save() -> str:
        if options.save is None:
            return "nothing was saved, for want of --save FILE"
        saving.save(options.save, pipe, optimizer, step=step, config=config_of(options))
        return f"saved to {options.save}: go on with --resume"

    is_first = pipe.rank == 0 if isinstance(pipe, DistributedGPipe) else True
    shows = options.progress and is_first
    bar = tqdm(total=num_steps, initial=step, unit="step", disable=None if shows else True, leave=False)
    with bar, _stop_on_interrupt() as interrupted:
        while step < num_steps:
            epoch, skip = divmod(step, steps_per_epoch)
            seconds, total, num_samples, bubbles = 0.0, 0.0, 0, []
            for i, (x, y) in enumerate(batches(work.train, options.batch_size, options.seed, epoch)):
                if i < skip:
                    continue
                start = perf_counter()
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(options.lr, step, num_steps)
                optimizer.zero_grad()
                result = pipe.step(x, y, loss_fn)
                loss = float(result.loss)
                if not math.isfinite(loss):
                    raise Stopped(
                        f"the loss is {loss} in epoch {epoch + 1}, step {step + 1}; stopped before the weights took it "
                        f"in. Try a smaller --lr than {options.lr:g}"
                    )
                optimizer.step()
                step += 1
                seconds += perf_counter() - start
                num_samples += len(x)
                total += loss * len(x)
                bubbles.append(result.trace.bubble_fraction)
                bar.set_postfix(loss=f"{loss:.3f}", rate=f"{num_samples / seconds:.0f} {work.unit}s/s")
                bar.update()
                if any(_of_all(pipe, bool(interrupted))):
                    raise Stopped(f"interrupted after {step} of {num_steps} steps; {save()}")
                if options.save_every and step % options.save_every == 0:
                    save()
            trace = pipe.gather_trace() if isinstance(pipe, DistributedGPipe) else result.trace
            bubble = trace.bubble_fraction if isinstance(pipe, DistributedGPipe) else median(bubbles)
            said = quality(pipe, work, options.batch_size)
            if is_first:
                bar.write(
                    f"epoch {epoch + 1}/{options.epochs}  loss {total / num_samples:.4f}  {said}  "
                    f"{num_samples / seconds:.0f} {work.unit}s/s  bubble {bubble:.0%}",
                    file=sys.stdout,
                )
            if options.save is not None:
                save()
            if options.trace is not None and is_first:
                trace.save(options.trace)
    return step


@contextmanager
def _stop_on_interrupt() -> Iterator[list[bool]]:
    """Take Ctrl-C as a wish to stop after the running step; a second one stops at once."""
    interrupted: list[bool] = []

    def note(_signal: int, _frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    signals = [signal.SIGINT, *([signal.SIGTERM] if dist.is_torchelastic_launched() else [])]  # torchrun sends that
    before = [(which, signal.signal(which, note)) for which in signals]
    try:
        yield interrupted
    finally:
        for which, handler in before:
            signal.signal(which, handler)


def _resume(pipe: Pipe, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> int:
    if options.save is None:
        raise ValueError("--resume goes on from the file that --save names: give --save FILE too")
    more, config = saving.load(options.save, pipe, optimizer), config_of(options)
    if missing := {"config", "step"} - more.keys():
        raise ValueError(
            f"{options.save} has no {' and no '.join(sorted(missing))}, so no training on this command line wrote it: "
            "load it with gpipe_lite.saving.load"
        )
    if changed := [key for key in config if more["config"].get(key) != config[key]]:
        key = changed[0]
        raise ValueError(
            f"--{key.replace('_', '-')} is {config[key]!r}, and {options.save} was trained with "
            f"{more['config'].get(key)!r}: a resumed training keeps what its result depends on"
        )
    return int(more["step"])


def _optimizer(pipe: Pipe, options: argparse.Namespace) -> torch.optim.Optimizer:
    groups = [{"params": list(pipe.parameters())}]  # a stage may have none
    if options.model == "amoebanetd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return torch.optim.Adam(groups, lr=options.lr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Returns:
        The exit code: 0 when done, 1 for what cannot be done, 130 when interrupted.
    """
    options = parse(arguments)
    rank = 0
    try:
        if dist.is_torchelastic_launched():
            rank = _join()
        is_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        options.resume = options.resume or (is_restarted and options.save is not None and Path(options.save).exists())
        work = workload(options)
        pipe = _pipe(work, options)
        optimizer = _optimizer(pipe, options)
        step = _resume(pipe, optimizer, options) if options.resume else 0
        if rank == 0:
            num_parameters = sum(parameter_counts(work.model))
            where = (
                f"{len(pipe.balance)} processes"
                if isinstance(pipe, DistributedGPipe)
                else ", ".join(map(str, pipe.devices))
            )
            print(
                f"{options.model}: {len(work.model)} layers, {num_parameters:,} parameters, {len(work.train)} "
                f"{work.unit}s; stages of {pipe.balance} layers on {where}; {options.chunks} micro-batches"
                + (f"; resumed after step {step}" if options.resume else "")
            )
        start = perf_counter()
        train(pipe, work, optimizer, options, step)
        said = quality(pipe, work, options.batch_size)
    except Stopped as stop:
        if rank == 0:
            print(stop, file=sys.stderr)
        return 130 if "interrupted" in str(stop) else 1
    except RankFailedError as error:
        print(f"error: rank {rank} stops: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # threads may wait for ranks that are gone
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        epochs = "1 epoch" if options.epochs == 1 else f"{options.epochs} epochs"
        print(f"done: {epochs} in {perf_counter() - start:.0f} s; {said}")
    return 0


def _join() -> int:
    """Join the processes that torchrun started; this one's rank."""
    store, rank, num_ranks = next(rendezvous("env://"))
    # When torchrun starts them again, the store may still have the addresses of those that died.
    attempt = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=num_ranks)
    return int(rank)


def _pipe(work: Workload, options: argparse.Namespace) -> Pipe:
    """The pipeline: of threads, or, under torchrun, of processes."""
    num_processes = dist.get_world_size() if dist.is_initialized() else None
    devices = devices_of(options, num_processes)
    if num_processes or torch.get_num_threads() < 2 * len(devices):
        torch.set_num_threads(1)  # one for each stage; more would only wait for each other
    balance = options.balance
    if not balance and (num_processes is None or dist.get_rank() == 0):
        micro_batch = work.train.tensors[0][: max(1, options.batch_size // options.chunks)]
        balance = best_balance(layer_costs(work.model, "time", sample=micro_batch), len(devices))
    check_file(options)
    settings: dict[str, Any] = {
        "chunks": options.chunks,
        "checkpoint": options.checkpoint,
        "schedule": options.schedule,
        "deferred_batch_norm": True,
    }
    if num_processes is None:
        return GPipe(work.model, balance, devices=devices, **settings)
    found = [balance]
    dist.broadcast_object_list(found)  # times differ; all must cut alike
    return DistributedGPipe(work.model, found[0], device=devices[dist.get_rank()], timeout=options.timeout, **settings)


if __name__ == "__main__":
    sys.exit(main())
