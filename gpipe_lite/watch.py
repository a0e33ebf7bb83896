"""Ranks watch each other: when one fails, all stop, and each says who was first and what it was doing.

Every rank has a thread that writes a *beat* into the store that torch.distributed's processes share, and reads the
others'. Who fails leaves a note there; only the first is kept, since what follows (connections that break, say) follows
from it::

    rank 0   beat  beat  beat  reads the note ──► RankFailedError
    rank 1   beat  beat  beat  reads the note ──► RankFailedError
    rank 2   beat  raises ──► note: "ValueError in F(2,3)"
    rank 3   beat  beat  a connection broke, and the note is there already ──► RankFailedError

Who leaves no note, since it was killed or its machine was cut off, is missed by its broken connection or its beat.
"""

import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import monotonic

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # public, but not marked as such


class RankFailedError(RuntimeError):
    """Another rank failed, so this one stops. The message says which, where, and while doing what."""


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        count: rises from beat to beat.
        doing: what the rank does.
        seconds: since when.
        host: where it runs.
        ended: whether it stopped in good order.
    """

    count: int
    doing: str
    seconds: float
    host: str
    ended: bool = False


@dataclass(frozen=True)
class Note:
    """The first failure.

    Attributes:
        rank: whose.
        text: what happened, in a sentence.
    """

    rank: int
    text: str


class Watch:
    """One rank's eye on the others.

    Args:
        store: shared by all.
        rank: this process.
        ranks: all that are watched, this one among them.
        timeout: seconds after which a rank that is not heard of, or is waited for, counts as failed.
        wake: called once, in the watching thread, when another rank has failed.
    """

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], timeout: float, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self.failure: Note | None = None
        self._ranks = tuple(ranks)
        self._interval = min(1.0, timeout / 8)
        self._store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]  # its types lack it; a connection of its own: the other may be waiting
        self._store.set_timeout(timedelta(seconds=max(1.0, timeout / 4)))
        self._wake = wake
        self._doing = "starting", monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"watch-{rank}", daemon=True)
        self._write_beat(0)
        self._thread.start()

    def doing(self, what: str) -> None:
        """Say what this rank does now, such as "running F(2,3)"."""
        self._doing = what, monotonic()

    def check(self) -> None:
        """Go on if all is well.

        Raises:
            RankFailedError: if another rank failed.
        """
        if self.failure is not None:
            raise RankFailedError(self.failure.text)

    def wait_for_all(self) -> None:
        """Wait until all ranks are here.

        Raises:
            RankFailedError: if one of them failed instead.
        """
        with self._lock:
            self._store.set(f"here {self.rank}", "")
        while True:
            self.check()
            with self._lock:
                if self._store.check([f"here {rank}" for rank in self._ranks]):
                    return
            self._ended.wait(0.02)

    def fail(self, what: str, rank: int | None = None) -> None:
        """Leave a note that a rank, this one if none is named, has failed; the first that is left counts."""
        rank = self.rank if rank is None else rank
        note = Note(rank, what)
        with self._lock, suppress(DistError, RuntimeError):
            # What was there before, or this.
            kept = self._store.compare_set("failure", "", json.dumps(asdict(note)))
            note = Note(**json.loads(kept))
        self._learn(note)

    def look_for_the_slow(self, what: str) -> None:
        """Find out on whom everyone waits, and leave a note if that takes longer than the timeout."""
        doing = {rank: said for rank in self._ranks if (said := self._read_beat(rank)) is not None}
        busy = {rank: said for rank, said in doing.items() if not said.doing.startswith("waiting")}
        if busy:
            rank, said = max(busy.items(), key=lambda item: item[1].seconds)
            if said.seconds > self.timeout:
                self.fail(
                    f"rank {rank} on {said.host} has been {said.doing} for {said.seconds:.0f} s, and rank {self.rank} "
                    f"is {what}: if it only is slow, raise timeout",
                    rank,
                )
        elif all(said.seconds > self.timeout for said in doing.values()):
            each = "; ".join(f"rank {rank} is {said.doing}" for rank, said in doing.items())
            self.fail(f"all ranks wait for each other for {self.timeout:.0f} s: {each}. Do all call the same methods?")

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join(timeout=2 * self._interval + 1)
        with suppress(DistError, RuntimeError):  # whoever holds the store may be gone already
            self._write_beat(-1, ended=True)

    def _run(self) -> None:
        count, seen = 1, {rank: (-1, monotonic()) for rank in self._ranks if rank != self.rank}
        while not self._ended.wait(self._interval):
            try:
                with self._lock:
                    self._write_beat(count)
                    failed = self._store.check(["failure"])
                    note = Note(**json.loads(self._store.get("failure"))) if failed else None
                if note is not None:
                    self._learn(note)
                    return
                self._look_at_others(seen)
            except (DistError, RuntimeError) as error:
                if not self._ended.is_set():
                    said = str(error).splitlines()[0]
                    self._learn(Note(0, f"the store of the process group is out of reach ({said}): its process ended, "
                                     "or its machine was cut off"))  # fmt: skip
                return
            count += 1

    def _look_at_others(self, seen: dict[int, tuple[int, float]]) -> None:
        for rank, (last, since) in list(seen.items()):
            said = self._read_beat(rank)
            if said is None or said.ended:
                seen[rank] = last, monotonic()
            elif said.count != last:
                seen[rank] = said.count, monotonic()
            elif (silent := monotonic() - since) > self.timeout:
                self.fail(
                    f"rank {rank} on {said.host} has not been heard of for {silent:.0f} s, and was {said.doing} last: "
                    "its process stands still, or its machine was cut off",
                    rank,
                )

    def _write_beat(self, count: int, *, ended: bool = False) -> None:
        doing, since = self._doing
        beat = Beat(count, doing, monotonic() - since, socket.gethostname(), ended)
        self._store.set(f"beat {self.rank}", json.dumps(asdict(beat)))

    def _read_beat(self, rank: int) -> Beat | None:
        key = f"beat {rank}"
        with self._lock:
            return Beat(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _learn(self, note: Note) -> None:
        if self.failure is None:
            self.failure = note
            self._ended.set()
            self._wake()
