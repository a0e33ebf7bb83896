"""Values on their way between ranks, over torch.distributed's point-to-point operations.

A value is a nesting of tensors and other things. First goes a header of eight numbers, then, if it is not as it was for
the last value of its kind, a description of the nesting, its shapes and dtypes, and then the tensors as they are::

    rank 0, main thread          rank 0, a thread           rank 1, a thread              rank 1, main thread
    send(1, key, value) ─isend─► waits until it is gone     reads header, shapes, data ──► recv(0, key)

What is sent to a rank arrives there in order. Both threads run ahead of the main thread, by so many values and no more.
"""

import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, Full, Queue
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_lite import transfer
from gpipe_lite.microbatch import Spec, flatten, map_tensors, unflatten
from gpipe_lite.watch import RankFailedError, Watch

Key = tuple[int, int, int, int]
"""What a value is for; values whose first two numbers are equal are of one kind, and mostly nest alike."""

_BYE = (-1, 0, 0, 0)
_HEADER = 8  # the key; how many bytes the description has; 3 to spare
_TICK = 0.1  # seconds after which those who wait look whether someone failed


@dataclass(frozen=True)
class _Form:
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Form":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


Description = tuple[Spec, tuple[Any, ...]]
"""How a value nests, and its leaves, forms in the place of tensors."""


class Wire:
    """One rank's connections to the others of its group.

    Args:
        group: of gloo; for headers, and for data on the CPU.
        peers: the ranks in the group to which there are connections.
        device: where tensors are needed.
        watch: learns of what breaks, and wakes those who wait.
        room: how many values each side of a connection may run ahead.
        up: for data on a CUDA device to higher ranks, of NCCL; None sends it by way of the CPU.
        down: to lower ranks, likewise.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Iterable[int],
        device: torch.device,
        watch: Watch,
        room: int,
        up: dist.ProcessGroup | None = None,
        down: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = group.rank()
        self._group, self._device, self._watch = group, device, watch
        self._nccl = up, down
        self._peers = tuple(sorted(set(peers) - {self.rank}))
        self._sent: dict[tuple[int, int, int], Description] = {}
        self._known: dict[tuple[int, int, int], Description] = {}
        self._closing = False
        self._leaving: dict[int, Queue[list[tuple[dist.Work, Tensor]]]] = {peer: Queue(room) for peer in self._peers}
        self._arriving: dict[int, Queue[tuple[Key, Any, transfer.Ready]]] = {peer: Queue(room) for peer in self._peers}
        self._threads = [
            threading.Thread(target=self._attend, args=(work, peer), name=f"{name}-rank-{peer}", daemon=True)
            for peer in self._peers
            for name, work in (("from", self._read), ("to", self._reap))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, key: Key, value: Any) -> None:
        """Send a value; it may not be written to until it has arrived.

        Raises:
            TypeError: if something in the value cannot be sent to another process.
            RankFailedError: if a rank failed while this one waited for room.
        """
        leaves, spec = flatten(value)
        description = self._describe((peer, *key[:2]), spec, leaves)
        parts = [(torch.tensor([*key, len(description), 0, 0, 0]), self._group)]
        if description:
            parts.append((torch.frombuffer(bytearray(description), dtype=torch.uint8), self._group))
        parts += [self._outgoing(leaf, peer) for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        self._put(self._leaving[peer], [self._isend(data, peer, group) for data, group in parts])

    def recv(self, peer: int, key: Key, limit: float | None = None) -> Any:
        """Wait for the value that a rank sends next.

        Args:
            peer: the rank.
            key: of the value.
            limit: seconds to wait; None is no limit.

        Raises:
            RankFailedError: if a rank failed.
            RuntimeError: if another value came.
        """
        queue, start = self._arriving[peer], monotonic()
        while True:
            self._watch.check()
            try:
                found, value, ready = queue.get(timeout=_TICK)
                break
            except Empty:
                if limit is not None and monotonic() - start > limit:
                    self._watch.look_for_the_slow(f"waiting for rank {peer}")
                    start = monotonic() - limit + 1.0
        if found != key:
            raise RuntimeError(
                f"rank {peer} sent {found} where rank {self.rank} expects {key}: all ranks must call the same methods "
                "in the same order, with the same model, chunks, checkpoint and schedule"
            )
        if not ready:
            return value
        return map_tensors(partial(self._after, ready), value)  # pragma: no cover - needs CUDA

    def _after(self, ready: transfer.Ready, tensor: Tensor) -> Tensor:  # pragma: no cover - needs CUDA
        """A tensor that may be read in this thread's work."""
        return transfer.receive(tensor.detach(), ready, self._device).requires_grad_(tensor.requires_grad)

    def close(self) -> None:
        """Say goodbye to all, and wait until they have said it, or are gone."""
        self._closing = True
        if self._watch.failure is None:
            for peer in self._peers:
                with suppress(RuntimeError):  # it may be gone already
                    bye = torch.tensor([*_BYE, 0, 0, 0, 0])
                    self._put(self._leaving[peer], [self._isend(bye, peer, self._group)])
        deadline = monotonic() + self._watch.timeout
        for thread in self._threads:
            while thread.is_alive() and monotonic() < deadline and self._watch.failure is None:
                thread.join(_TICK)

    def _isend(self, data: Tensor, peer: int, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
        try:
            work = dist.isend(data, group=group, group_dst=peer)
        except RuntimeError as error:
            self._broke(peer, error)
            self._watch.check()
            raise
        assert work is not None, "this rank is in the group"
        return work, data

    def _outgoing(self, leaf: Tensor, peer: int) -> tuple[Tensor, dist.ProcessGroup]:
        """A tensor's bytes, and the group to send them by."""
        data, group = leaf.detach(), self._nccl[peer < self.rank]
        if data.is_cuda and group is None:  # pragma: no cover - needs CUDA
            data = data.cpu()
        return _bytes_of(data.contiguous()), group if group is not None and data.is_cuda else self._group

    def _describe(self, kind: tuple[int, int, int], spec: Spec, leaves: Sequence[Any]) -> bytes:
        """Of a value to a rank; nothing if it is as it was for the last of its kind."""
        forms = tuple(_Form.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if all(isinstance(form, _Form) for form in forms):
            if self._sent.get(kind) == (spec, forms):
                return b""
            self._sent[kind] = spec, forms
        else:
            self._sent.pop(kind, None)  # of other things nobody knows whether they changed
        try:
            return pickle.dumps(unflatten(forms, spec))
        except Exception as error:
            raise TypeError(
                f"something on its way to rank {kind[0]} cannot be sent to another process ({error}): pass tensors and "
                "plain values from layer to layer"
            ) from error

    def _attend(self, work: Callable[[int], bool], peer: int) -> None:
        """What a thread does: one thing after the other, until there are no more."""
        if self._device.type == "cuda":  # pragma: no cover - needs CUDA
            torch.cuda.set_device(self._device)
        try:
            while work(peer):
                pass
        except RankFailedError:
            pass
        except Exception as error:
            self._broke(peer, error)

    def _broke(self, peer: int, error: Exception) -> None:
        """Tell the others of a connection that broke, unless that was to be."""
        if not self._closing:
            said = str(error).splitlines()[0]
            self._watch.fail(f"the connection to rank {peer} broke: its process ended, or was killed ({said})", peer)

    def _read(self, peer: int) -> bool:
        """Read one value that a rank sends; whether more may come."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        dist.recv(header, group=self._group, group_src=peer)
        kind, port, stage, micro_batch, size, *_ = header.tolist()
        key = kind, port, stage, micro_batch
        if key == _BYE:
            return False
        if size:
            description = torch.empty(size, dtype=torch.uint8)
            dist.recv(description, group=self._group, group_src=peer)
            found, spec = flatten(pickle.loads(description.numpy().tobytes()))
            self._known[peer, kind, port] = spec, tuple(found)
        spec, forms = self._known[peer, kind, port]
        leaves = [self._incoming(form, peer) if isinstance(form, _Form) else form for form in forms]
        self._put(self._arriving[peer], (key, unflatten(leaves, spec), transfer.mark([self._device])))
        return True

    def _incoming(self, form: _Form, peer: int) -> Tensor:
        """Read a tensor's bytes."""
        group = self._nccl[peer > self.rank] if self._device.type == "cuda" else None
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device if group is not None else "cpu")
        if tensor.numel():
            dist.recv(_bytes_of(tensor), group=self._group if group is None else group, group_src=peer)
        return tensor.to(self._device).requires_grad_(form.requires_grad)

    def _reap(self, peer: int) -> bool:
        """Wait until one value has left for a rank; whether more may come."""
        works = self._leaving[peer].get()
        for work, _ in works:
            work.wait()
        return works[0][1][0].item() != _BYE[0]

    def _put(self, queue: Queue[Any], item: Any) -> None:
        while True:
            try:
                return queue.put(item, timeout=_TICK)
            except Full:
                self._watch.check()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor; gloo knows few dtypes."""
    return tensor.view(-1).view(torch.uint8)
