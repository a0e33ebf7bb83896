"""Long skips: a layer stashes a value under a name, and a layer further on pops it.

A model is a chain of layers, and a U-Net is more: what its first layers made is needed again by its last. The chain
stays a chain; the value takes another way::

    model = nn.Sequential(Down(), Stash("fine"), Down(), Middle(), Up(), Pop("fine", torch.add), Up())

    stage 0 ──► stage 1 ──► stage 2 ──► stage 3           the boundaries
        └───────────────────────────────────►              the skip: once, straight to the stage that pops it
        ◄───────────────────────────────────┘              and its gradient straight back

Both are modules without parameters, which may also be parts of other layers. The unsplit model runs as it is.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpipe_lite.microbatch import flatten
from gpipe_lite.schedule import Phase, Task
from gpipe_lite.snapshot import version

Kept = dict[str, tuple[Any, int]]
"""What is kept, by name, with the version of its tensors."""


class Stash(nn.Module):
    """Keeps what passes through it under a name, until :class:`Pop` of that name takes it.

    Args:
        name: within the model; one Stash and one Pop have it.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Any) -> Any:
        """Return ``x``, any nesting of tensors. Until it is popped nobody may write into it.

        Raises:
            RuntimeError: if the name is taken within one pass of a pipeline.
        """
        if _here.strict and self.name in _here.kept:
            raise RuntimeError(f"Stash({self.name!r}) ran twice in one pass: a name keeps one value")
        _here.kept[self.name] = x, _version(x)
        return x

    def extra_repr(self) -> str:
        """The name, in the model's picture."""
        return repr(self.name)


class Pop(nn.Module):
    """Takes what :class:`Stash` kept under a name.

    Args:
        name: within the model.
        join: what to make of ``x`` and the kept value, such as ``torch.add``; None gives the next layer the pair.
    """

    def __init__(self, name: str, join: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        self.name = name
        self.join = join

    def forward(self, x: Any) -> Any:
        """Return ``join(x, kept)``, or the pair.

        Raises:
            RuntimeError: if nothing was kept, or it was written to in the meantime.
        """
        if self.name not in _here.kept:
            raise RuntimeError(f"Pop({self.name!r}) finds nothing: Stash({self.name!r}) has to run before, and once")
        kept = unchanged(self.name, *_here.kept.pop(self.name))
        return (x, kept) if self.join is None else self.join(x, kept)

    def extra_repr(self) -> str:
        """The name, in the model's picture."""
        return repr(self.name)


class _Here(threading.local):
    """What is kept at the moment, in this thread: in a pipeline of the running micro-batch, else of the model."""

    def __init__(self) -> None:
        self.kept: Kept = {}
        self.strict = False  # a pass outside a pipeline may have failed halfway, and left something


_here = _Here()


@contextmanager
def carried(arriving: Mapping[str, Any]) -> Iterator[Kept]:
    """Run layers that stash and pop.

    Args:
        arriving: what earlier stages kept for these layers, by name.

    Yields:
        What is kept; when the layers have run, what they leave to later stages.
    """
    before = _here.kept, _here.strict
    _here.kept, _here.strict = {name: (value, _version(value)) for name, value in arriving.items()}, True
    try:
        yield _here.kept
    finally:
        _here.kept, _here.strict = before


def left_over(kept: Kept, leaving: "Iterable[Skip]") -> "dict[Skip, Any]":
    """What layers leave to later stages.

    Raises:
        RuntimeError: if they stashed less or more than they leave: a Stash or a Pop among them did not run.
    """
    wanted = {skip.name: skip for skip in leaving}
    for name in sorted(wanted.keys() ^ kept.keys()):
        kind = "Stash" if name in wanted else "Pop"
        raise RuntimeError(f"{kind}({name!r}) did not run: in a pipeline it has to run once for each micro-batch")
    return {skip: unchanged(name, *kept[name]) for name, skip in wanted.items()}


def unchanged(name: str, value: Any, version: int) -> Any:
    """The kept value.

    Raises:
        RuntimeError: if someone wrote into it after it was stashed.
    """
    if _version(value) != version:
        raise RuntimeError(
            f"what Stash({name!r}) kept was modified in place before Pop({name!r}) took it: let the layer after the "
            "Stash write elsewhere (inplace=False)"
        )
    return value


def _version(value: Any) -> int:
    return version(leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Skip:
    """A value that is kept on one stage and taken on another."""

    name: str
    stashed_on: int
    popped_on: int


Port = int | Skip
"""Where a stage's values come from or go to: a neighbour, by its index, or the other end of a skip."""


def sender_of(task: Task, source: Port) -> int:
    """The stage that sends what a task receives by a port."""
    if isinstance(source, int):
        return source
    return source.stashed_on if task.phase is Phase.FORWARD else source.popped_on


class Routes:
    """The ways between stages.

    The caller stands before stage 0, as stage −1, and after the last, as stage K.

    Args:
        skips: those that cross a boundary.
    """

    def __init__(self, skips: Iterable[Skip] = ()) -> None:
        self.skips = tuple(skips)
        self._arriving: dict[int, tuple[Skip, ...]] = {}
        self._leaving: dict[int, tuple[Skip, ...]] = {}
        for skip in self.skips:
            self._arriving[skip.popped_on] = *self.arriving(skip.popped_on), skip
            self._leaving[skip.stashed_on] = *self.leaving(skip.stashed_on), skip

    def arriving(self, stage: int) -> tuple[Skip, ...]:
        """The skips that end on a stage."""
        return self._arriving.get(stage, ())

    def leaving(self, stage: int) -> tuple[Skip, ...]:
        """The skips that start on a stage."""
        return self._leaving.get(stage, ())

    def sources(self, task: Task) -> tuple[Port, ...]:
        """Where the values come from that ``task`` needs; the neighbour is first."""
        match task.phase:
            case Phase.FORWARD:
                return task.stage - 1, *self.arriving(task.stage)
            case Phase.BACKWARD:
                return task.stage + 1, *self.leaving(task.stage)
            case Phase.RECOMPUTE:
                return ()

    def made_for(self, task: Task) -> tuple[Port, ...]:
        """Where the values go that ``task`` makes; the neighbour is first."""
        match task.phase:
            case Phase.FORWARD:
                return task.stage + 1, *self.leaving(task.stage)
            case Phase.BACKWARD:
                return task.stage - 1, *self.arriving(task.stage)
            case Phase.RECOMPUTE:
                return ()

    @staticmethod
    def destination(task: Task, port: Port) -> tuple[Task, Port]:
        """Which task needs a value that ``task`` made for a port, and the port by which that receives it."""
        if isinstance(port, int):
            return Task(task.phase, port, task.micro_batch), task.stage
        stage = port.popped_on if task.phase is Phase.FORWARD else port.stashed_on
        return Task(task.phase, stage, task.micro_batch), port


def routes(partitions: Sequence[nn.Sequential]) -> Routes:
    """Find the skips of a model.

    Raises:
        ValueError: if a name is popped but never stashed, or the other way round, or either twice, or popped by a
            layer before the one that stashes it.
    """
    stashes: dict[str, tuple[int, int, str]] = {}
    pops: dict[str, tuple[int, int, str]] = {}
    position = 0
    for stage, layers in enumerate(partitions):
        for layer, module in layers.named_children():
            for part in module.modules():
                if isinstance(part, Stash | Pop):
                    kind = type(part).__name__
                    found = stashes if isinstance(part, Stash) else pops
                    if part.name in found:
                        raise ValueError(
                            f"{kind}({part.name!r}) stands in layer {found[part.name][2]!r} and again in layer "
                            f"{layer!r}: a name is stashed once and popped once, so give the second another name"
                        )
                    found[part.name] = position, stage, layer
            position += 1
    for name in stashes.keys() ^ pops.keys():
        kind, other = ("Stash", "Pop") if name in stashes else ("Pop", "Stash")
        layer = (stashes | pops)[name][2]
        raise ValueError(f"{kind}({name!r}) stands in layer {layer!r}, and no layer has {other}({name!r}): add it")
    for name, (position, _, layer) in stashes.items():
        if pops[name][0] < position:
            raise ValueError(
                f"Pop({name!r}) stands in layer {pops[name][2]!r}, before Stash({name!r}) in layer {layer!r}: "
                "a value must be stashed before it is popped"
            )
    return Routes(Skip(n, at[1], pops[n][1]) for n, at in stashes.items() if at[1] != pops[n][1])
