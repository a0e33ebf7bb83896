"""launch runs a function on ranks, returns what they return, and says which failed first; nothing is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from gpipe_lite.launcher import LaunchError, launch

pytestmark = pytest.mark.distributed


def test_what_each_rank_returns_comes_back_in_their_order():
    """From a function without a module, as one in a notebook's cell, which uses another; and its arguments."""
    offset = 10

    def helper(rank):
        return rank + offset

    def work(scale, tensor):
        total = tensor + dist.get_rank()
        dist.all_reduce(total)
        return scale * helper(dist.get_rank()), dist.get_world_size(), total, torch.get_num_threads()

    found = launch(work, 3, 2, torch.ones(2))
    assert [(a, b, c.tolist(), d) for a, b, c, d in found] == [(2 * (10 + r), 3, [6.0, 6.0], 1) for r in range(3)]


def test_the_rank_that_failed_first_is_named():
    """With its traceback; the others, which fail since it is gone, are counted."""

    def work():
        if dist.get_rank() == 1:
            raise KeyError("as ordered")
        dist.barrier()

    with pytest.raises(LaunchError, match=r"(?s)rank 1 failed:.*in work.*KeyError: 'as ordered'"):
        launch(work, 3)


def test_a_process_that_is_killed_is_named():
    """It cannot say so itself."""

    def work():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(LaunchError, match="rank 1 failed:\nthe process was ended by signal 9"):
        launch(work, 2)


def test_processes_that_wait_for_each_other_are_ended():
    """The error says what may be wrong."""

    def work():
        dist.recv(torch.zeros(1), 1 - dist.get_rank())

    with pytest.raises(TimeoutError, match=r"ranks 0, 1 did not return within 3 s.*Each recv needs a send"):
        launch(work, 2, timeout=3)
    assert not multiprocessing.active_children()


def test_an_exit_is_a_failure():
    """Whatever its code."""
    with pytest.raises(LaunchError, match="SystemExit: 3"):
        launch(lambda: sys.exit(3), 1)


def test_an_interrupt_ends_the_processes():
    """As in a notebook's cell that is stopped."""

    def interrupt(_signal, _frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 4)
        with pytest.raises(KeyboardInterrupt):
            launch(time.sleep, 2, 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not multiprocessing.active_children()


def test_a_script_needs_no_guard(tmp_path):
    """It is not run again in each process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from gpipe_lite import launch\n"
        "print('once')\n"
        "def work():\n"
        "    return dist.get_rank()\n"
        "print(launch(work, 2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "once\n[0, 1]\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((print, 0), ValueError, "nprocs must be a whole number, 1 or more, not 0"),
        ((print, 1.0), ValueError, "not 1.0"),
        (("print", 2), TypeError, "launch\\(\\) runs a function in each process, not 'print'"),
        ((print, 2, (i for i in ())), TypeError, "cannot be sent to another process"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments, kind, words):
    """Before a process starts."""
    with pytest.raises(kind, match=words):
        launch(*arguments)
