"""Pipeline-parallel training, small enough to read: one schedule as data, simulated, executed and drawn."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_lite.gpipe import GPipe
    from gpipe_lite.runtime import StepResult
    from gpipe_lite.skip import Pop, Stash
    from gpipe_lite.stage import is_recomputing

__all__ = ["GPipe", "Pop", "Stash", "StepResult", "is_recomputing"]
_ROOMS = {"GPipe": "gpipe", "StepResult": "runtime", "Pop": "skip", "Stash": "skip", "is_recomputing": "stage"}
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load what needs torch when it is asked for, so that schedules and simulations start at once."""
    if name in _ROOMS:
        return getattr(import_module(f"gpipe_lite.{_ROOMS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
