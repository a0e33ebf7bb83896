"""How a mini-batch becomes micro-batches, and micro-batches a mini-batch again.

A batch is any nesting of tuples, lists, dicts, named tuples and registered dataclasses. Its tensors are cut
along their first axis; everything else in it is handed to every micro-batch::

    {"x": tensor(7, 3), "scale": 2}
        │ split into 3                   ▲ merge
        ▼                                │
    {"x": tensor(3, 3), "scale": 2}, {"x": tensor(2, 3), "scale": 2}, {"x": tensor(2, 3), "scale": 2}

Both are made of ``flatten`` and ``unflatten``, with which the stages, too, reach the tensors in what crosses
a boundary. There most values are a tensor or a tuple of tensors, so these take a short way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# Torch's functions on nestings have no public name in 2.13; torch.func and torch.export are built on these.
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

Spec = TreeSpec
"""The structure of a nesting, without its leaves."""

_LEAF: Spec = tree_structure(0)


@cache
def _flat_tuple(length: int) -> Spec:
    return tree_structure((0,) * length)


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """Take a nesting apart into its leaves, from left to right, and its structure.

    Raises:
        TypeError: if a leaf hides tensors, such as a dataclass that is not registered: no one could cut them.
    """
    if isinstance(value, Tensor):
        return [value], _LEAF
    if type(value) is tuple:
        for part in value:
            if not isinstance(part, Tensor):
                break
        else:
            return list(value), _flat_tuple(len(value))
    leaves, spec = tree_flatten(value)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) and _hides_tensors(leaf):
            raise TypeError(
                f"{_place('value', value, i)} is a {type(leaf).__name__} whose tensors torch cannot reach: "
                "pass a tuple, list or dict, or register the class (torch.export.register_dataclass)"
            )
    return leaves, spec


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """Put a nesting together again; the inverse of :func:`flatten`."""
    if spec is _LEAF:
        return leaves[0]
    if spec is _flat_tuple(len(leaves)):
        return tuple(leaves)
    return tree_unflatten(leaves, spec)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The nesting with ``function`` applied to its tensors, and everything else as it is."""
    leaves, spec = flatten(value)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def batch_size(batch: Any, name: str = "batch") -> int:
    """How many samples a batch has: the size of the first axis, on which all its tensors agree.

    Args:
        batch: any nesting.
        name: what errors call it.

    Raises:
        TypeError: if the batch holds no tensor, or one that is not dense.
        ValueError: if a tensor has no axis, two tensors disagree, or there are 0 samples.
    """
    tensors = [(i, leaf) for i, leaf in enumerate(flatten(batch)[0]) if isinstance(leaf, Tensor)]
    if not tensors:
        raise TypeError(f"the {name} needs at least 1 tensor to tell its size; there are 0 in {_outline(batch)}")
    for i, tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(
                f"{_place(name, batch, i)} is a tensor of 0 axes, and a batch is cut along the first: "
                "give it 1 value a sample, or pass a Python number, which every micro-batch gets"
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise TypeError(
                f"{_place(name, batch, i)} is a {kind} tensor, which cannot be cut along the first axis: make it "
                "dense, padded if need be"
            )
    at, first = tensors[0]
    for i, tensor in tensors[1:]:
        if tensor.shape[0] != first.shape[0]:
            raise ValueError(
                f"{_place(name, batch, at)} has {first.shape[0]} samples, shape {tuple(first.shape)}, and "
                f"{_place(name, batch, i)} has {tensor.shape[0]}, shape {tuple(tensor.shape)}: "
                "make their first axes equal"
            )
    if first.shape[0] == 0:
        raise ValueError(f"the {name} has 0 samples, {_outline(batch)}: pass 1 or more, or skip it")
    return first.shape[0]


def sizes(num_samples: int, num_micro_batches: int) -> list[int]:
    """The sizes of the micro-batches: they differ by at most one, the larger ones come first.

    >>> sizes(7, 3)
    [3, 2, 2]

    Args:
        num_samples: N, 1 or more.
        num_micro_batches: M, 1 or more.

    Returns:
        min(M, N) sizes whose sum is N.

    Raises:
        ValueError: if either number is below 1.
    """
    for number, what in ((num_samples, "samples"), (num_micro_batches, "micro-batches")):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"a batch is split into a whole number of {what}, 1 or more, not {number!r}")
    pieces = min(num_samples, num_micro_batches)
    small, num_larger = divmod(num_samples, pieces)
    return [small + 1] * num_larger + [small] * (pieces - num_larger)


def split(batch: Any, num_micro_batches: int) -> list[Any]:
    """Cut a batch into micro-batches.

    Args:
        batch: a nesting whose tensors have shape ``(N, ...)``.
        num_micro_batches: M, 1 or more.

    Returns:
        min(M, N) nestings like the batch. Their tensors are views of the batch's, with these :func:`sizes`;
        what is not a tensor is the batch's own object in each.

    Raises:
        TypeError: as :func:`batch_size`.
        ValueError: as :func:`batch_size` and :func:`sizes`.
    """
    pieces = len(sizes(batch_size(batch), num_micro_batches))
    # Layers may write into each of tensor_split's views; into those of split and chunk autograd forbids it.
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(pieces))
    leaves, spec = flatten(batch)
    columns = [leaf.tensor_split(pieces) if isinstance(leaf, Tensor) else [leaf] * pieces for leaf in leaves]
    return [unflatten(row, spec) for row in zip(*columns, strict=True)]


def merge(micro_batches: Sequence[Any], sizes: Sequence[int] | None = None) -> Any:
    """Join micro-batches into a batch; the inverse of :func:`split`.

    Args:
        micro_batches: 1 or more nestings of one structure. Their tensors have shapes ``(n, ...)`` that differ
            in n alone, and they agree on what is not a tensor.
        sizes: samples of each micro-batch. If given, n must be that, or so many times that, in each.

    Returns:
        A nesting whose tensors have shape ``(N, ...)``. A single micro-batch is returned as it is, uncopied.

    Raises:
        ValueError: if there are no micro-batches, or they differ in more than n, or n is not of samples.
        TypeError: if they are packed sequences.
    """
    if not micro_batches:
        raise ValueError("there are 0 micro-batches to merge: pass 1 or more")
    first = micro_batches[0]
    if len(micro_batches) == 1:
        return first
    if isinstance(first, PackedSequence):
        raise TypeError("packed sequences cannot be joined: unpack them (torch.nn.utils.rnn.pad_packed_sequence)")
    rows, specs = zip(*(flatten(micro_batch) for micro_batch in micro_batches), strict=True)
    for m, spec in enumerate(specs):
        if spec != specs[0]:
            raise ValueError(
                f"micro-batch 0 is {_outline(first)}, and micro-batch {m} is {_outline(micro_batches[m])}: "
                "return the same structure for every micro-batch"
            )
    columns = list(zip(*rows, strict=True))
    for i, parts in enumerate(columns):
        _check_joinable(parts, sizes, _place("output", first, i))
    return unflatten([torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in columns], specs[0])


def _check_joinable(parts: Sequence[Any], sizes: Sequence[int] | None, place: str) -> None:
    """Check that one leaf's values in the micro-batches make one of the whole batch."""
    head = parts[0]
    for m, part in enumerate(parts):
        if not (isinstance(head, Tensor) and isinstance(part, Tensor)):
            if not _agree(head, part):
                raise ValueError(
                    f"{place} is {_outline(head)} in micro-batch 0, and {_outline(part)} in micro-batch {m}: "
                    "return what differs as a tensor with 1 value a sample"
                )
        elif part.dim() == 0:
            raise ValueError(
                f"{place} is a tensor of 0 axes in micro-batch {m} of {len(parts)}, and they are joined "
                "along the first: return 1 value a sample, and leave means to the loss function"
            )
        elif part.shape[1:] != head.shape[1:]:
            raise ValueError(
                f"{place} has shape {tuple(head.shape)} in micro-batch 0, and {tuple(part.shape)} "
                f"in micro-batch {m}: only the first axis may differ, so pad the others"
            )
        elif sizes and (part.shape[0] % sizes[m] or part.shape[0] // sizes[m] != head.shape[0] // sizes[0]):
            other = f", and {tuple(head.shape)} for the {sizes[0]} of micro-batch 0" if m else ""
            raise ValueError(
                f"{place} has shape {tuple(part.shape)} for the {sizes[m]} samples of micro-batch {m}{other}: they are "
                "joined along the first axis, so let that be of samples, 1 row or equally many for each"
            )


def _agree(one: Any, other: Any) -> bool:
    """Whether two leaves, not both of them tensors, are the same or equal."""
    if one is other:
        return True
    if type(one) is not type(other) or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)  # arrays compare element by element


def _hides_tensors(leaf: Any) -> bool:
    """Whether a leaf is a container that torch takes for one value, with tensors in it."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        parts = [getattr(leaf, field.name, None) for field in fields(leaf)]
    elif isinstance(leaf, Mapping):
        parts = list(leaf.values())
    elif isinstance(leaf, list | tuple | set | frozenset):
        parts = list(leaf)
    else:
        return False
    return any(isinstance(part, Tensor) for part in tree_leaves(parts))


def _place(root: str, value: Any, i: int) -> str:
    """Where leaf i stands in a nesting, such as ``batch['x'][0]``."""
    path, _ = tree_flatten_with_path(value)[0][i]
    return root + keystr(path)


class _Bare(str):
    """Text that stands in a repr without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _outline(value: Any) -> str:
    """A nesting for an error: shapes in the place of tensors."""
    return repr(tree_map(lambda x: _Bare(f"tensor{tuple(x.shape)}") if isinstance(x, Tensor) else x, value))
