"""Train a model on a pipeline: ``python -m gpipe_lite.train``, or its pieces from a notebook.

The way of a training: :func:`workload` makes the model and the data, ``GPipe`` the pipeline, :func:`train` runs the
epochs, :func:`evaluate` tells how good the model is. Which samples make which batch follows from the seed and the
epoch, the learning rate from the step; so a run that was stopped and resumed is bit-equal to one that was not.
"""

import argparse
import math
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
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from tqdm import tqdm

from gpipe_lite import data, saving
from gpipe_lite.balance import balance as best_balance
from gpipe_lite.gpipe import GPipe
from gpipe_lite.models import amoebanetd, transformer
from gpipe_lite.profiling import layer_costs, parameter_counts

EXAMPLES = """\
examples:
  python -m gpipe_lite.train                                     AmoebaNet-D (3, 16) on digits, four stages
  python -m gpipe_lite.train --save run.pt                       the same; Ctrl-C stops and saves
  python -m gpipe_lite.train --save run.pt --resume --stages 2   go on with it, on two stages
  python -m gpipe_lite.train --model transformer --layers 4 --epochs 1 --schedule 1f1b
"""


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
def evaluate(pipe: GPipe, dataset: TensorDataset, batch_size: int) -> tuple[float, float]:
    """The model's mean loss and accuracy.

    Args:
        pipe: left in the mode in which it was.
        dataset: inputs and targets.
        batch_size: samples at a time.

    Returns:
        The loss, and the share of targets to which the model gives the highest score.
    """
    was_training, loss, right, num_targets = pipe.training, 0.0, 0, 0
    pipe.eval()
    x, y = dataset.tensors
    for inputs, target in zip(x.split(batch_size), y.split(batch_size), strict=True):
        result = pipe.step(inputs, target, loss_fn, keep_outputs=True)
        loss += float(result.loss) * len(inputs)
        right += int((result.outputs.argmax(-1).cpu() == target).sum())
        num_targets += target.numel()
    pipe.train(was_training)
    return loss / len(x), right / num_targets


def quality(pipe: GPipe, work: Workload, batch_size: int) -> str:
    """The test set's loss, and accuracy or perplexity, in words."""
    loss, accuracy = evaluate(pipe, work.test, batch_size)
    count = f"{accuracy:.2%}" if work.counts == "accuracy" else f"{math.exp(min(loss, 700)):.2f}"
    return f"test loss {loss:.4f}  test {work.counts} {count}"


def train(pipe: GPipe, work: Workload, optimizer: torch.optim.Optimizer, options: argparse.Namespace, step: int) -> int:
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
        saving.save(options.save, pipe, optimizer, step=step, config=_config(options))
        return f"saved to {options.save}: go on with --resume"

    bar = tqdm(total=num_steps, initial=step, unit="step", disable=None if options.progress else True, leave=False)
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
                if interrupted:
                    raise Stopped(f"interrupted after {step} of {num_steps} steps; {save()}")
                if options.save_every and step % options.save_every == 0:
                    save()
            bar.write(
                f"epoch {epoch + 1}/{options.epochs}  loss {total / num_samples:.4f}  "
                f"{quality(pipe, work, options.batch_size)}  {num_samples / seconds:.0f} {work.unit}s/s  "
                f"bubble {median(bubbles):.0%}",
                file=sys.stdout,
            )
            if options.save is not None:
                save()
            if options.trace is not None:
                result.trace.save(options.trace)
    return step


@contextmanager
def _stop_on_interrupt() -> Iterator[list[bool]]:
    """Take Ctrl-C as a wish to stop after the running step; a second one stops at once."""
    interrupted: list[bool] = []

    def note(_signal: int, _frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


_FREE = ("stages", "balance", "devices", "checkpoint", "schedule", "epochs", "save", "save_every", "resume", "trace")


def _config(options: argparse.Namespace) -> dict[str, Any]:
    """The options on which a training's result depends; the others may change when it is resumed."""
    return {key: value for key, value in vars(options).items() if key not in (*_FREE, "progress")}


def _resume(pipe: GPipe, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> int:
    if options.save is None:
        raise ValueError("--resume goes on from the file that --save names: give --save FILE too")
    more, config = saving.load(options.save, pipe, optimizer), _config(options)
    if changed := [key for key in config if more["config"].get(key) != config[key]]:
        key = changed[0]
        raise ValueError(
            f"--{key.replace('_', '-')} is {config[key]!r}, and {options.save} was trained with "
            f"{more['config'].get(key)!r}: a resumed training keeps what its result depends on"
        )
    return int(more["step"])


def _devices(options: argparse.Namespace) -> list[str]:
    """One a stage; the number of stages is said by --stages, --balance or --devices, and they must agree."""
    said = {
        "--stages": options.stages,
        "--balance": len(options.balance) if options.balance else None,
        "--devices": len(options.devices) if options.devices else None,
    }
    numbers = {option: number for option, number in said.items() if number is not None}
    if len(set(numbers.values())) > 1:
        words = ", ".join(f"{option} {number}" for option, number in numbers.items())
        raise ValueError(f"the numbers of stages disagree: {words}")
    num_stages, num_gpus = next(iter(numbers.values()), 4), torch.cuda.device_count()
    return options.devices or [f"cuda:{k % num_gpus}" if num_gpus else "cpu" for k in range(num_stages)]


def _check_file(options: argparse.Namespace) -> None:
    """Find out now, not after the first epoch, that --save cannot or should not be written."""
    if options.save is not None:
        file = Path(options.save)
        if not file.parent.is_dir():
            raise ValueError(f"--save {file}: there is no folder {file.parent}")
        if file.exists() and not options.resume:
            raise ValueError(f"--save {file} is there already: add --resume to go on with it, or name another file")


def _optimizer(pipe: GPipe, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.model == "amoebanetd":
        return torch.optim.SGD(pipe.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return torch.optim.Adam(pipe.parameters(), lr=options.lr)


def _data(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in ("digits", "cifar10", "text", "text-folder"):
        raise argparse.ArgumentTypeError(f"{name!r} is none of digits, cifar10=PATH, text, text-folder=PATH")
    if (name in ("cifar10", "text-folder")) != bool(path):
        raise argparse.ArgumentTypeError(f"{name} {'takes no' if path else 'needs a'} path, as in {name}=PATH")
    return name, path


def _whole(text: str) -> int:
    if not (text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _wholes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what is not given follows from the model."""
    parser = argparse.ArgumentParser(
        "python -m gpipe_lite.train",
        description="Train AmoebaNet-D on images, or a Transformer on text, over several pipeline stages.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--model", choices=("amoebanetd", "transformer"), default="amoebanetd", help="default: amoebanetd"
    )
    group.add_argument("--layers", type=_whole, help="L; default: 3, or 4 for the Transformer")
    group.add_argument("--filters", type=_whole, default=16, help="AmoebaNet-D: D, a multiple of 16; default: 16")
    group.add_argument("--width", type=_whole, default=128, help="Transformer: d_model; default: 128")
    group.add_argument("--heads", type=_whole, default=4, help="Transformer: attention heads; default: 4")
    group.add_argument("--dropout", type=float, default=0.0, help="Transformer: probability; default: 0")
    group = parser.add_argument_group("the data")
    group.add_argument(
        "--data", type=_data, help="digits, cifar10=PATH, text, text-folder=PATH; default: digits or text"
    )
    group.add_argument("--size", type=_whole, default=16, help="digits: pixels, 8 or more; default: 16")
    group.add_argument("--length", type=_whole, default=64, help="text: tokens a sequence; default: 64")
    group = parser.add_argument_group("the pipeline")
    group.add_argument("--stages", type=_whole, help="K; default: 4")
    group.add_argument(
        "--balance", type=_wholes, help="layers per stage, as in 2,2,2,3; default: equal shares of the time"
    )
    group.add_argument(
        "--devices",
        type=lambda text: text.split(","),
        help="one a stage, as in cuda:0,cuda:1; default: CUDA devices in turn, else CPU",
    )
    group.add_argument("--chunks", type=_whole, default=8, help="M, micro-batches a mini-batch; default: 8")
    group.add_argument("--checkpoint", choices=("always", "except_last", "never"), default="except_last",
                       help="which micro-batches are recomputed; default: except_last")  # fmt: skip
    group.add_argument("--schedule", choices=("gpipe", "1f1b", "naive"), default="gpipe", help="default: gpipe")
    group = parser.add_argument_group("the training")
    group.add_argument("--epochs", type=_whole, default=6, help="default: 6")
    group.add_argument("--batch-size", type=_whole, default=128, help="samples a mini-batch; default: 128")
    group.add_argument("--lr", type=float, help="its peak; default: 0.2 (SGD), or 0.003 (Transformer, Adam)")
    group.add_argument("--seed", type=int, default=0, help="of the weights, the data's order and dropout; default: 0")
    group = parser.add_argument_group("files")
    group.add_argument("--save", metavar="FILE", help="write a checkpoint there after each epoch, and on Ctrl-C")
    group.add_argument("--save-every", metavar="STEPS", type=_whole, help="write it after so many steps, too")
    group.add_argument("--resume", action="store_true", help="go on from --save; on other stages if asked")
    group.add_argument("--trace", metavar="FILE", help="write the last step's timeline, for ui.perfetto.dev")
    group.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    options = parser.parse_args(arguments)
    is_amoebanet = options.model == "amoebanetd"
    options.layers = options.layers or (3 if is_amoebanet else 4)
    options.data = options.data or _data("digits" if is_amoebanet else "text")
    options.lr = (0.2 if is_amoebanet else 0.003) if options.lr is None else options.lr
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Returns:
        The exit code: 0 when done, 1 for what cannot be done, 130 when interrupted.
    """
    options = parse(arguments)
    try:
        work = workload(options)
        devices = _devices(options)
        if torch.get_num_threads() < 2 * len(devices):
            torch.set_num_threads(1)  # one for each stage; more would only wait for each other
        if options.balance:
            balance = options.balance
        else:
            micro_batch = work.train.tensors[0][: max(1, options.batch_size // options.chunks)]
            balance = best_balance(layer_costs(work.model, "time", sample=micro_batch), len(devices))
        _check_file(options)
        pipe = GPipe(work.model, balance, devices=devices, chunks=options.chunks, checkpoint=options.checkpoint,
                     schedule=options.schedule)  # fmt: skip
        optimizer = _optimizer(pipe, options)
        step = _resume(pipe, optimizer, options) if options.resume else 0
        num_parameters = sum(parameter_counts(pipe))
        print(
            f"{options.model}: {len(pipe)} layers, {num_parameters:,} parameters, {len(work.train)} {work.unit}s; "
            f"stages of {pipe.balance} layers on {', '.join(map(str, pipe.devices))}; {options.chunks} micro-batches"
            + (f"; resumed after step {step}" if options.resume else "")
        )
        start = perf_counter()
        train(pipe, work, optimizer, options, step)
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return 130 if "interrupted" in str(stop) else 1
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"done: {options.epochs} epochs in {perf_counter() - start:.0f} s; {quality(pipe, work, options.batch_size)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
