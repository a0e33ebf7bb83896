"""The command line of ``python -m gpipe_lite.train``: what may be said, and what must agree."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

EXAMPLES = """\
examples:
  python -m gpipe_lite.train                                     AmoebaNet-D (3, 16) on digits, four stages
  python -m gpipe_lite.train --save run.pt                       the same; Ctrl-C stops and saves
  python -m gpipe_lite.train --save run.pt --resume --stages 2   go on with it, on two stages
  python -m gpipe_lite.train --model transformer --layers 4 --epochs 1 --schedule 1f1b
  torchrun --nproc-per-node 4 -m gpipe_lite.train                a process a stage
  torchrun --nproc-per-node 4 --max-restarts 3 -m gpipe_lite.train --save run.pt --save-every 5
                                                                 goes on by itself if a process dies
"""


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


def _seed(text: str) -> int:
    if not (text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 − 1")
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
    group.add_argument("--timeout", type=float, default=30.0,
                       help="under torchrun: seconds until a silent process counts as failed; default: 30")  # fmt: skip
    group.add_argument("--schedule", choices=("gpipe", "1f1b", "naive"), default="gpipe", help="default: gpipe")
    group = parser.add_argument_group("the training")
    group.add_argument("--epochs", type=_whole, default=6, help="default: 6")
    group.add_argument("--batch-size", type=_whole, default=128, help="samples a mini-batch; default: 128")
    group.add_argument("--lr", type=float, help="its peak; default: 0.2 (SGD), or 0.003 (Transformer, Adam)")
    group.add_argument("--seed", type=_seed, default=0, help="of the weights, the data's order and dropout; default: 0")
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


def devices_of(options: argparse.Namespace, num_processes: int | None = None) -> list[str]:
    """One a stage; the number of stages is said by --stages, --balance, --devices or torchrun, and they must agree."""
    said = {
        "the processes of torchrun": num_processes,
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


def check_file(options: argparse.Namespace) -> None:
    """Find out now, not after the first epoch, that a file cannot or should not be written."""
    if options.save is not None:
        file = Path(options.save)
        if not file.parent.is_dir():
            raise ValueError(f"--save {file}: there is no folder {file.parent}")
        if file.exists() and not options.resume:
            raise ValueError(f"--save {file} is there already: add --resume to go on with it, or name another file")
    if options.trace is not None and not Path(options.trace).parent.is_dir():
        raise ValueError(f"--trace {options.trace}: there is no folder {Path(options.trace).parent}")


_FREE = (
    "timeout",
    "stages",
    "balance",
    "devices",
    "checkpoint",
    "schedule",
    "epochs",
    "save",
    "save_every",
    "resume",
    "trace",
)


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options on which a training's result depends; the others may change when it is resumed."""
    return {key: value for key, value in vars(options).items() if key not in (*_FREE, "progress")}
