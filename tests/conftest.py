"""What holds for every test."""

import pytest
import torch
from hypothesis import settings

# The same cases in every run: a failure is a failure for everyone, and slow machines are not failures.
settings.register_profile("gpipe_lite", derandomize=True, deadline=None, database=None)
settings.load_profile("gpipe_lite")

# Where other programs want the cores too, two intra-op threads wait for each other a hundred times longer than
# one takes for the tests' small tensors.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` on a machine without one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
