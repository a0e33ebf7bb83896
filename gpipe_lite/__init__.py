"""Pipeline-parallel training, small enough to read: one schedule as data, simulated, executed and drawn."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_lite.distributed import DistributedGPipe
    from gpipe_lite.gpipe import GPipe
    from gpipe_lite.launcher import launch
    from gpipe_lite.runtime import StepResult
    from gpipe_lite.skip import Pop, Stash
    from gpipe_lite.stage import is_recomputing

__all__ = ["DistributedGPipe", "GPipe", "Pop", "Stash", "StepResult", "is_recomputing", "launch"]
_ROOMS = {
    "DistributedGPipe": "distributed",
    "GPipe": "gpipe",
    "Pop": "skip",
    "Stash": "skip",
    "StepResult": "runtime",
    "is_recomputing": "stage",
    "launch": "launcher",
}
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load what needs torch when it is asked for, so that schedules and simulations start at once."""
    if name in _ROOMS:
        return getattr(import_module(f"gpipe_lite.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
