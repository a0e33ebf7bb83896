"""Run a function in several processes, from a script or from a notebook's cell.

    results = launch(fn, 4, *args)          fn runs on ranks 0 to 3, and what each returned comes back

The processes come from a *fork server*: a process that has imported torch and done nothing else. Forking the notebook
itself would copy the locks that its threads hold, and its first large product would hang; starting Python anew takes
seconds for each process.
"""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked as such


class LaunchError(RuntimeError):
    """A function failed on some rank; the message has the traceback of the rank that failed first."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    follows: bool  # from another rank's failure
    when: float


def launch(fn: Callable[..., Any], nprocs: int, *args: Any, timeout: float = 300.0, threads: int = 1) -> list[Any]:
    """Run a function on so many ranks of a new process group (gloo), and return what each returned.

    The function may be defined in a notebook's cell, and use what is defined there; it is sent as a value, and so are
    its arguments and results. What it prints may mix with what others print: return it instead.

    Args:
        fn: called as ``fn(*args)`` in each process, where ``torch.distributed`` knows rank and world size.
        nprocs: how many processes.
        args: the same for all.
        timeout: seconds for all.
        threads: torch's threads in each process.

    Returns:
        The results in the order of the ranks.

    Raises:
        LaunchError: if it raised on a rank, or a process ended; with the traceback of the first.
        TimeoutError: if it took too long; the processes are ended.
        KeyboardInterrupt: likewise, when interrupted.
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ValueError(f"nprocs must be a whole number, 1 or more, not {nprocs!r}")
    if not callable(fn):
        raise TypeError(f"launch() runs a function in each process, not {fn!r}")
    try:
        job = cloudpickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(f"this function or its arguments cannot be sent to another process: {error}") from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpipe_lite.launcher"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(nprocs):
            receiver, sender = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_work, args=(rank, nprocs, store.port, threads, job, sender), name=f"rank-{rank}", daemon=True
            )
            with _main_left_alone():
                process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        return _gather(processes, pipes, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process, pipe in zip(processes, pipes, strict=True):
            process.join()
            pipe.close()


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep a new process from running the script again, as multiprocessing does to find a function: ours is sent."""
    main = sys.modules["__main__"]
    before: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(before)


def _gather(processes: Sequence[BaseProcess], pipes: Sequence[Connection], timeout: float) -> list[Any]:
    """Wait for all results, and for all failures a moment longer: the first is not always the first to be heard of."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    deadline, waiting = monotonic() + timeout, dict(enumerate(pipes))
    while waiting and monotonic() < deadline:
        for pipe in wait(list(waiting.values()), timeout=0.1 if failures else 0.5):
            rank = next(r for r, other in waiting.items() if other is pipe)
            del waiting[rank]
            try:
                answer = cloudpickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
                answer = _Failure(rank, f"the process {how}", False, monotonic())
            if isinstance(answer, _Failure):
                failures.append(answer)
                deadline = min(deadline, monotonic() + _LAST_WORDS)
            else:
                results[rank] = answer[0]
    if failures:
        first = min(failures, key=lambda failure: (failure.follows, failure.when))
        others = sorted({failure.rank for failure in failures} - {first.rank})
        also = f"\n\n(ranks {', '.join(map(str, others))} failed, too)" if others else ""
        raise LaunchError(f"rank {first.rank} failed:\n{first.text}{also}")
    if waiting:
        ranks = ", ".join(map(str, waiting))
        raise TimeoutError(
            f"ranks {ranks} did not return within {timeout:g} s, and were ended. Do they wait for each other? Each "
            "recv needs a send, and all ranks must call the same collectives, in the same order"
        )
    return [results[rank] for rank in range(len(pipes))]


_LAST_WORDS = 3.0  # seconds in which others may say what happened to them


def _work(rank: int, nprocs: int, port: int, threads: int, job: bytes, answer: Connection) -> None:
    """What a process does."""
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nprocs), LOCAL_WORLD_SIZE=str(nprocs))
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nprocs)
        fn, args = cloudpickle.loads(job)
        result = cloudpickle.dumps((fn(*args),))
    except BaseException as error:
        follows = type(error).__name__ == "RankFailedError" or "gloo/transport" in str(error)
        failure = _Failure(rank, "".join(traceback.format_exception(error)), follows, monotonic())
        with suppress(OSError):
            answer.send_bytes(cloudpickle.dumps(failure))
        os._exit(1)  # threads may wait for ranks that are gone
    answer.send_bytes(result)
    del fn, args
    _say_goodbye()
    answer.close()
    dist.destroy_process_group()


def _say_goodbye() -> None:
    """Close the pipelines that are still open, if there are any."""
    if (module := sys.modules.get("gpipe_lite.distributed")) is not None:
        module.close_all()
