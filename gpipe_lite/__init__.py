"""Pipeline-parallel training, small enough to read: one schedule as data, simulated, executed and drawn."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_lite.gpipe import GPipe, StepResult

__all__ = ["GPipe", "StepResult"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load what needs torch when it is asked for, so that schedules and simulations start at once."""
    if name in __all__:
        from gpipe_lite import gpipe

        return getattr(gpipe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
