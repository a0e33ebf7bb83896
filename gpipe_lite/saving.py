"""Training checkpoints that any number of stages can load.

A checkpoint holds the model's state under the model's own keys, which say nothing of stages; the optimiser's, which
counts parameters in the model's order; and whatever else a training needs to go on exactly. It is written beside the
old one and then put in its place, so that a crash while writing leaves the old one whole. Reading it never runs code
from it.
"""

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FORMAT = "gpipe_lite checkpoint 1"
_PARTS = {"format", "model", "optimizer", "random", "more"}


class CheckpointError(ValueError):
    """A file that cannot be loaded; the message names it and says what is wrong."""

    reason = ""


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    """Write a checkpoint, all of it or nothing.

    Args:
        path: the file; the one that is there is replaced at once, when the new one is complete.
        model: a GPipe, or the model itself.
        optimizer: of its parameters.
        more: what else is to be kept: numbers, text, tensors, and lists and dicts of them.

    Raises:
        OSError: if the file cannot be written; what was there before is there still.
        CheckpointError: if ``more`` has something that could not be loaded; likewise.
    """
    path = Path(path).resolve()  # of a link, what it points to is replaced
    content = {
        "format": FORMAT,
        "model": model.state_dict(),
        "optimizer": {"kind": type(optimizer).__name__, "state": optimizer.state_dict()},
        "random": random_state(),
        "more": more,
    }
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            try:
                torch.save(content, file)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise CheckpointError(f"{path} cannot keep this ({error}): keep tensors and plain values") from error
            file.flush()
            os.fsync(file.fileno())
        try:
            _read(new)  # what could not be read back must not replace what can
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} would hold what cannot be read back ({error.reason}): keep tensors, Python's numbers and "
                "text, and lists and dicts of them"
            ) from None
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Read a checkpoint into a model on any number of stages, and torch's random generators.

    Args:
        path: the file.
        model: a GPipe with any balance, or the model itself.
        optimizer: of its parameters; None leaves the optimiser's state out.

    Returns:
        What else was kept.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is truncated, not a checkpoint of ours, or another model's. Then nothing is changed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}: check the name, or start without resuming")
    content = _read(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not content.keys() >= _PARTS:
        found = content.get("format", "no format") if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(f"{path} is not a whole checkpoint of this version: it has {found!r}, we read {FORMAT!r}")
    if fault := _mismatch(content["model"], model.state_dict()):
        raise CheckpointError(f"{path} is another model's: {fault}")
    if not isinstance(content["random"], Mapping) or not isinstance(content["random"].get("cpu"), Tensor):
        raise CheckpointError(f"{path} has no state of torch's random generators: take an earlier one")
    if optimizer is not None:
        kind, state = content["optimizer"]["kind"], content["optimizer"]["state"]
        there, here = ([len(g["params"]) for g in o["param_groups"]] for o in (state, optimizer.state_dict()))
        if (kind, there) != (type(optimizer).__name__, here):
            raise CheckpointError(
                f"{path} has the state of {kind} with groups of {there} parameters, this is {type(optimizer).__name__} "
                f"with {here}: build the optimiser as it was built then"
            )
        optimizer.load_state_dict(state)
    model.load_state_dict(content["model"])
    set_random_state(content["random"])
    more: dict[str, Any] = content["more"]
    return more


def _read(path: Path) -> Any:
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wonders at a foreign pickle; the error that follows says more
        try:
            if (part := zipfile.ZipFile(file).testzip()) is not None:  # torch writes checksums, and does not check
                raise zipfile.BadZipFile(f"its part {part} is damaged")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:  # of a dozen kinds, depending on where the file is broken
            # torch's own text is left out: it advises to load such a file without protection.
            if found := re.search(r"GLOBAL (\S+)", str(error)):
                reason = f"it refers to {found[1]}, so that reading it could run code"
            else:
                reason = str(error) if isinstance(error, zipfile.BadZipFile) else type(error).__name__
            refused = CheckpointError(
                f"{path} is damaged, or holds more than tensors and plain values ({reason}): take an earlier one"
            )
            refused.reason = reason
            raise refused from None


def random_state() -> dict[str, Any]:
    """The state of torch's generators, on the CPU and on every CUDA device."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`random_state` returned; CUDA's only if there are as many devices."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():  # pragma: no cover - needs CUDA
        torch.cuda.set_rng_state_all(state["cuda"])


def _mismatch(kept: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first way in which two state dicts do not fit, or nothing."""
    for one, other, where in ((kept, here, "the file"), (here, kept, "the model")):
        if extra := [key for key in one if key not in other]:
            return f"{len(extra)} keys are only in {where}, the first is {extra[0]!r}"
    for key, tensor in kept.items():
        other = here[key]
        if not (isinstance(tensor, Tensor) and isinstance(other, Tensor)):  # a layer's extra state
            continue
        if tensor.dtype != other.dtype:
            return f"{key!r} is {tensor.dtype} in the file and {other.dtype} in the model"
        if tensor.shape != other.shape:
            return f"{key!r} has shape {tuple(tensor.shape)} in the file and {tuple(other.shape)} in the model"
    return ""
