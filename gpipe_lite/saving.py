"""Training checkpoints that any number of stages can load.

A checkpoint holds the model's state under the model's own keys, which say nothing of stages; the optimiser's, which
counts parameters in the model's order; and whatever else a training needs to go on exactly. It is written beside the
old one and then put in its place, so that a crash while writing leaves the old one whole. Reading it never runs code
from it. (torch.distributed.checkpoint is not used, since it reads its table of contents by running a pickle.)

Where each stage is a process, each writes its *shard*, all at once, and then rank 0 the file that names them::

    run.pt.3f9a.0of2   model and optimiser of rank 0 ─┐
    run.pt.3f9a.1of2   of rank 1                      ├─ all are there ─► run.pt names them, and has the rest
                                                      ┘                   the shards of the one before go
"""

import glob
import os
import pickle
import re
import secrets
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_lite.distributed import DistributedGPipe

FORMAT = "gpipe_lite checkpoint 1"
_PARTS = {"format", "model", "optimizer", "random", "more"}


class CheckpointError(ValueError):
    """A file that cannot be loaded; the message names it and says what is wrong."""

    reason = ""


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    """Write a checkpoint, all of it or nothing.

    Args:
        path: the file; the one that is there is replaced at once, when the new one is complete. On several machines,
            in a folder that all of them see.
        model: a GPipe, or the model itself; or a DistributedGPipe, and every rank calls this.
        optimizer: of its parameters.
        more: what else is to be kept: numbers, text, tensors, and lists and dicts of them.

    Raises:
        OSError: if the file cannot be written; what was there before is there still.
        CheckpointError: if ``more`` has something that could not be loaded; likewise.
    """
    path = Path(path).resolve()  # of a link, what it points to is replaced
    own = {
        "model": model.state_dict(),
        "optimizer": {"kind": type(optimizer).__name__, "state": optimizer.state_dict()},
    }
    rest = {"format": FORMAT, "random": random_state(), "more": more}
    if not isinstance(model, DistributedGPipe):
        _write(path, {**rest, **own})
        return
    with model.telling():
        number = model.exchange(secrets.token_hex(4))[0]
        shard = path.with_name(f"{path.name}.{number}.{model.rank}of{len(model.balance)}")
        _write(shard, {"format": FORMAT, **own})
        shards = model.exchange(shard.name)
        if model.rank == 0:
            _write(path, {**rest, "shards": shards})
            for old in path.parent.glob(f"{glob.escape(path.name)}.*of*"):
                if old.name not in shards and re.fullmatch(r"[0-9a-f]{8}\.\d+of\d+", old.name[len(path.name) + 1 :]):
                    old.unlink()
        model.exchange(None)  # now it is there


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, all of it or nothing."""
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
        model: a GPipe with any balance, or the model itself; or a DistributedGPipe, and every rank calls this.
        optimizer: of its parameters; None leaves the optimiser's state out.

    Returns:
        What else was kept.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is truncated, not a checkpoint of ours, or another model's. Then nothing is changed.
    """
    path = Path(path)
    if not isinstance(model, DistributedGPipe):
        return _load(path, model, optimizer, [model.state_dict().keys()], [_group_sizes(optimizer)], 0)
    with model.telling():
        keys = [list(keys) for keys in model.exchange(list(model.state_dict()))]
        more = _load(path, model, optimizer, keys, model.exchange(_group_sizes(optimizer)), model.rank)
        model.exchange(None)  # all have it
        return more


def _group_sizes(optimizer: torch.optim.Optimizer | None) -> list[int]:
    """How many parameters each of its groups has."""
    return [len(group["params"]) for group in optimizer.param_groups] if optimizer else []


def _load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    keys: Sequence[Iterable[str]],
    group_sizes: Sequence[Sequence[int]],
    rank: int,
) -> dict[str, Any]:
    """Read this rank's part, of a model whose ranks have these keys, and optimisers with groups of these sizes."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}: check the name, or start without resuming")
    content = _read(path)
    parts = {"random", "more", "shards"} if isinstance(content, dict) and "shards" in content else _PARTS
    if not isinstance(content, dict) or content.get("format") != FORMAT or not content.keys() >= parts:
        found = content.get("format", "no format") if isinstance(content, dict) else f"a {type(content).__name__}"
        raise CheckpointError(f"{path} is not a whole checkpoint of this version: it has {found!r}, we read {FORMAT!r}")
    here = model.state_dict()
    if "shards" in content:
        content |= _joined([_read(path.with_name(name)) for name in content["shards"]])
    there = content["model"]
    if fault := _mismatch(there, dict.fromkeys(key for part in keys for key in part), here):
        raise CheckpointError(f"{path} is another model's: {fault}")
    if not isinstance(content["random"], Mapping) or not isinstance(content["random"].get("cpu"), Tensor):
        raise CheckpointError(f"{path} has no state of torch's random generators: take an earlier one")
    if optimizer is not None:
        kind, state = content["optimizer"]["kind"], content["optimizer"]["state"]
        in_file, wanted = [len(group["params"]) for group in state["param_groups"]], _sums(group_sizes)
        if (kind, in_file) != (type(optimizer).__name__, wanted):
            raise CheckpointError(
                f"{path} has the state of {kind} with groups of {in_file} parameters, this is "
                f"{type(optimizer).__name__} with {wanted}: build the optimiser as it was built then"
            )
        optimizer.load_state_dict(_part_of(state, group_sizes, rank))
    model.load_state_dict({key: there[key] for key in here})
    set_random_state(content["random"])
    more: dict[str, Any] = content["more"]
    return more


def _sums(group_sizes: Sequence[Sequence[int]]) -> list[int]:
    """Of the ranks' groups; those of ranks without parameters count as empty."""
    return [sum(column) for column in zip_longest(*group_sizes, fillvalue=0)]


def _joined(shards: Sequence[Any]) -> dict[str, Any]:
    """What one process would have written."""
    states = [shard["optimizer"]["state"] for shard in shards]
    groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    number = 0
    for g in range(max(len(its["param_groups"]) for its in states)):
        groups.append({**states[0]["param_groups"][g], "params": []})
        for its in states:
            for old in its["param_groups"][g]["params"]:
                groups[g]["params"].append(number)
                if old in its["state"]:
                    state[number] = its["state"][old]
                number += 1
    return {
        "model": {key: tensor for shard in shards for key, tensor in shard["model"].items()},
        "optimizer": {"kind": shards[0]["optimizer"]["kind"], "state": {"state": state, "param_groups": groups}},
    }


def _part_of(state: Mapping[str, Any], group_sizes: Sequence[Sequence[int]], rank: int) -> dict[str, Any]:
    """A rank's part of the state of an optimiser of the whole model."""
    own: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for g, group in enumerate(state["param_groups"]):
        start = sum(sizes[g] for sizes in group_sizes[:rank])
        params = group["params"][start : start + group_sizes[rank][g]]
        groups.append({**group, "params": list(range(number, number + len(params)))})
        own |= {number + i: state["state"][old] for i, old in enumerate(params) if old in state["state"]}
        number += len(params)
    return {"state": own, "param_groups": groups}


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


def _mismatch(kept: Mapping[str, Any], wanted: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first way in which what a file has and what a model, or its stage here, needs do not fit, or nothing."""
    for one, other, where in ((kept, wanted, "the file"), (wanted, kept, "the model")):
        if extra := [key for key in one if key not in other]:
            return f"{len(extra)} keys are only in {where}, the first is {extra[0]!r}"
    for key, tensor in here.items():
        there = kept[key]
        if not (isinstance(tensor, Tensor) and isinstance(there, Tensor)):  # a layer's extra state
            continue
        if tensor.dtype != there.dtype:
            return f"{key!r} is {there.dtype} in the file and {tensor.dtype} in the model"
        if tensor.shape != there.shape:
            return f"{key!r} has shape {tuple(there.shape)} in the file and {tuple(tensor.shape)} in the model"
    return ""
