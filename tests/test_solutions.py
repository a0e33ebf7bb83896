"""Each worked solution is right by the check of its chapter, and each exercise is open until it is solved."""

import ast
import re
import symtable
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import nbformat
import pytest
from matplotlib import use

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
CHAPTERS = sorted(path.name for path in (NOTEBOOKS / "solutions").glob("*.ipynb"))


def statements(path: Path) -> list[ast.stmt]:
    """All of a notebook's code, in order."""
    notebook = nbformat.read(path, as_version=4)
    return [line for cell in notebook.cells if cell.cell_type == "code" for line in ast.parse(cell.source).body]


def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from tables(child)


def read_and_made(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names of the notebook that a statement reads, also within functions, and those that it makes."""
    top = symtable.symtable(ast.unparse(statement), "a notebook", "exec")
    read = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    for table in tables(top):
        read |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    made = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return read, made


def call_of_check(statement: ast.stmt) -> set[str]:
    """The names of the answers that a check is called with; none if this calls no check."""
    match statement:
        case ast.Expr(ast.Call(ast.Name(id=name), args)) if name.startswith("check_"):
            return {node.id for node in args if isinstance(node, ast.Name)}
    return set()


def only_shows(statement: ast.stmt) -> bool:
    """Whether a statement leaves everything as it is: it prints, draws or asserts."""
    match statement:
        case ast.Expr(ast.Call(ast.Name(id=name))):
            return name in {"print", "look", "explore"} or name.startswith("check_")
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(id=name)))):
            return name in {"plot", "figure", "ax"}
    return isinstance(statement, ast.Assert | ast.Expr) and not isinstance(getattr(statement, "value", None), ast.Call)


def needed(lines: list[ast.stmt], wanted: set[str], given: set[str]) -> list[ast.stmt]:
    """The lines that make some names, or do something to them, if others have their values already."""
    chosen: list[ast.stmt] = []
    wanted = wanted - given
    for line in reversed(lines):
        read, made = read_and_made(line)
        changes = isinstance(line, ast.Expr | ast.For | ast.With | ast.If | ast.Try | ast.AugAssign | ast.Assign)
        if made & wanted or (changes and not made - wanted and read & wanted and not only_shows(line)):
            if not isinstance(line, ast.For | ast.With | ast.If | ast.Try):
                wanted -= made
            wanted |= read - given
            chosen.insert(0, line)
    return chosen


def run(lines: list[ast.stmt], namespace: dict) -> str:
    """What they print."""
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(lines, []), "a notebook", "exec"), namespace)
    return printed.getvalue()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_solutions_of_a_chapter_are_right_by_its_checks(chapter, monkeypatch):
    """As if a learner had written them into the cells; and all exercises of a chapter have a solution."""
    use("agg")
    monkeypatch.chdir(NOTEBOOKS)
    lines, solution = statements(NOTEBOOKS / chapter), statements(NOTEBOOKS / "solutions" / chapter)
    checks = [(i, answers) for i, line in enumerate(lines) if (answers := call_of_check(line))]
    assert len(checks) >= 3
    whole: dict | None = None
    for number, (i, answers) in enumerate(checks, 1):
        solved: dict = {"__name__": "solution"}
        run(needed(solution, answers, set()), solved)
        missing = answers - solved.keys()
        assert not missing, f"exercise {number}: the solution has no {missing}"
        given = {"__name__": "chapter"} | {name: solved[name] for name in answers}
        chapters = given.copy()
        try:
            run(needed(lines[:i], read_and_made(lines[i])[0], answers), chapters)
        except Exception:  # something that was left out did something to what was not: run it all, once
            if whole is None:
                whole = {"__name__": "chapter"}
                run([line for line in lines if not call_of_check(line)], whole)
            chapters = whole
            chapters.update(given)
        said = run([lines[i]], chapters)
        assert re.search(rf"^Exercise {number} is right", said, re.M), said
        run(needed(lines[:i], answers, chapters.keys() - answers), chapters)  # the cell as it stands
        said = run([lines[i]], chapters)
        assert re.search(rf"^Exercise {number} is open", said, re.M), said
