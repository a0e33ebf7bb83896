"""The house's rooms and the arrows between them: imports run one way."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gpipe_lite"

# The picture. Each room: the rooms that it may import. A folder is one room; __init__ is the door to all.
TIME = "schedule trace simulate"
PIECES = "microbatch randomness loss transfer batchnorm snapshot gradients skip balance profiling partition"
HOUSE = {
    # time, without torch
    "schedule": "",
    "trace": "schedule",
    "simulate": "schedule trace",
    "balance": "",
    # the pieces of a step
    "microbatch": "",
    "randomness": "",
    "loss": "microbatch",
    "transfer": "microbatch",
    "batchnorm": "",
    "snapshot": "randomness",
    "gradients": "",
    "profiling": "microbatch balance",
    "partition": "microbatch balance",
    "skip": "schedule microbatch snapshot",
    # what runs a schedule
    "stage": "schedule trace microbatch randomness batchnorm snapshot gradients skip",
    "runtime": "schedule trace microbatch transfer stage",
    "threads": "schedule microbatch transfer snapshot gradients skip stage runtime",
    "watch": "",
    "wire": "microbatch transfer watch",
    "launcher": "",
    "distributed": f"{TIME} {PIECES} plan connect stage runtime wire watch",
    "connect": "schedule microbatch threads",
    "plan": "schedule skip",
    "gpipe": f"{TIME} {PIECES} plan stage runtime threads connect",
    "saving": "partition gpipe distributed",
    # what reads schedules and traces
    "plot": TIME,
    "svg": "schedule trace plot",
    "explain": "schedule trace plot",
    "explore": f"{TIME} plot svg explain",
    "lab": f"{TIME} balance profiling models",
    # what stands on the engine
    "models": "skip batchnorm",
    "data": "",
    "compare": "microbatch",
    "lint": "compare gradients microbatch partition randomness gpipe",
    "verify": "compare lint loss microbatch partition",
    "options": "",
    "train": f"{TIME} balance profiling gpipe distributed watch saving data models options",
}
ARROWS = {room: set(rooms.split()) for room, rooms in HOUSE.items()}

TORCH_FREE = {"schedule", "trace", "simulate", "balance"}
RUNS = set(f"{TIME} {PIECES} plan stage runtime threads watch wire distributed connect gpipe saving".split())
READERS = {"plot", "svg", "explain", "explore", "lab", "data", "train", "compare", "lint", "verify"}


def room_of(file: Path) -> str:
    """The file's room: its own name, or its top folder's."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


FILES = sorted(file for file in PACKAGE.rglob("*.py") if room_of(file) != "__init__")


def imports(file: Path) -> set[str]:
    """Every module that the file imports anywhere, ``if TYPE_CHECKING`` and function bodies included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file}: write the import in full, from gpipe_lite"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms(modules: set[str]) -> set[str]:
    """The rooms of gpipe_lite among the modules; a name that the package's door offers is its own room."""
    return {module.split(".")[1] for module in modules if module.startswith("gpipe_lite.")}


def reached(room: str) -> set[str]:
    """The rooms that importing this one may load."""
    return ARROWS[room].union(*map(reached, ARROWS[room]))


def test_the_picture_has_no_circle():
    TopologicalSorter(ARROWS).prepare()


@pytest.mark.parametrize("room", sorted(RUNS))
def test_what_runs_never_imports_what_reads(room):
    assert not reached(room) & READERS


@pytest.mark.parametrize("room", sorted(TORCH_FREE))
def test_what_needs_no_torch_stays_among_its_like(room):
    assert reached(room) <= TORCH_FREE


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_room_imports_what_the_picture_allows(file):
    room = room_of(file)
    assert room in ARROWS, f"{room} is new: add it to the picture in {Path(__file__).name}, and to CONTRIBUTING.md"
    extra = rooms(imports(file)) - ARROWS[room] - {room}
    assert not extra, f"{room} imports {extra}: turn the arrow around, or add it to the picture if it is right"
    if room in TORCH_FREE:
        assert not {module for module in imports(file) if module.split(".")[0] == "torch"}


def test_the_rooms_about_time_load_no_torch():
    names = ", ".join(f"gpipe_lite.{room}" for room in sorted(TORCH_FREE) if (PACKAGE / f"{room}.py").exists())
    block = "import sys; sys.modules['torch'] = None"  # from here on, importing torch is an error
    subprocess.run([sys.executable, "-c", f"{block}; import {names}"], check=True)
