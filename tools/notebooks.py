"""Execute the book's notebooks in place, lint what is committed, and write it as web pages.

Usage::

    python tools/notebooks.py execute [FILE ...]    all notebooks, in order
    python tools/notebooks.py lint [FILE ...]       the same, README.md and CONTRIBUTING.md
    python tools/notebooks.py pages [FILE ...]      write each notebook as a web page, beside it

``lint`` names each fault with its file, its cell (counted from 1, Markdown included) and the way out.
"""

import argparse
import copy
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
from bs4 import BeautifulSoup
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from nbformat.v4 import new_output
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 600  # seconds, as in the Makefile for nbval
WIDGETS = "application/vnd.jupyter.widget-{}+json"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def book() -> list[Path]:
    """All notebooks in reading order."""
    return sorted(p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)


def pages() -> list[Path]:
    """The Markdown files whose links are linted."""
    return [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.exists()]


# Execute


def execute(path: Path) -> None:
    """Execute a notebook in its folder and write it back without what differs from run to run.

    Raises:
        RuntimeError: if a cell fails, takes too long or kills the kernel; the file is left as it was.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    started = 0

    def note(cell: NotebookNode, cell_index: int) -> None:
        nonlocal started
        started = cell_index + 1

    client = NotebookClient(
        notebook,
        kernel_name=KERNEL["name"],
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=ERROR"],  # its warnings would break the progress bar
        record_timing=False,
        coalesce_streams=True,
        on_cell_start=note,
    )
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError) as error:
        raise RuntimeError(f"{_shown(path)}: cell {started} failed\n{error}") from error
    notebook = normalise(notebook)
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Remove what tells of one machine or one run.

    That is: times of execution, Python's version, folders in tracebacks, and the random names of widgets.
    """
    notebook.metadata.kernelspec = KERNEL
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [_without_folders(line) for line in output.traceback]
    text = json.dumps(notebook)
    widgets = notebook.metadata.get("widgets", {}).get(WIDGETS.format("state"), {})
    for number, name in enumerate(widgets.get("state", {})):
        text = text.replace(name, f"{number:032x}")
    normal: NotebookNode = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
    return normal


def _without_folders(text: str) -> str:
    for folder in (ROOT, Path(sys.base_prefix)):
        for shown in (str(folder), str(folder).replace(str(Path.home()), "~", 1)):
            text = text.replace(f"{shown}/", "")
    return text


# Pages


def page(path: Path) -> Path:
    """Write a notebook as a web page beside it, so that its links into the repository lead there too.

    nbconvert prefers a widget to its picture, and would leave a blank where no server sends it the widgets' code.
    """
    notebook = still(nbformat.read(path, as_version=4))  # type: ignore[no-untyped-call]
    exporter = HTMLExporter()  # type: ignore[no-untyped-call]
    html, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": path.stem}})
    html = re.sub(r'(href="(?![a-z]+:)[^"#]+)\.ipynb(?=["#])', r"\1.html", html)
    target = path.with_suffix(".html")
    target.write_text(html, encoding="utf-8", newline="\n")
    return target


def still(notebook: NotebookNode) -> NotebookNode:
    """A notebook whose widgets have given way to the pictures and sentences that they carry."""
    still = copy.deepcopy(notebook)
    still.metadata.pop("widgets", None)
    for cell in still.cells:
        outputs = []
        for output in cell.get("outputs", []):
            outputs.append(output)
            data = output.get("data", {})
            if data.pop(WIDGETS.format("view"), None) and "image/png" in data:
                said = {"text/html": f"<p><em>{escape(data['text/plain'])}</em></p>", "text/plain": data["text/plain"]}
                outputs.append(new_output("display_data", said))  # type: ignore[no-untyped-call]
        if "outputs" in cell:
            cell.outputs = outputs
    return still


# Lint


def lint(path: Path) -> Iterator[str]:
    """Yield what is wrong with a notebook or a Markdown file."""
    if path.suffix == ".md":
        yield from _page_faults(_render(path.read_text(encoding="utf-8")), path)
        return
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    if (name := notebook.metadata.get("kernelspec", {}).get("name")) != KERNEL["name"]:
        yield f"the kernel is {name!r}, not 'python3': execute it with `make notebooks`"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    if None not in counts and counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(counts)}: execute it with `make notebooks`"
    state = notebook.metadata.get("widgets", {}).get(WIDGETS.format("state"), {}).get("state", {})
    for number, cell in enumerate(notebook.cells, start=1):
        shown = [output.get("data", {}).get(WIDGETS.format("view")) for output in cell.get("outputs", [])]
        if any(view and view.get("model_id") not in state for view in shown):
            yield f"cell {number}: its widget's state is not kept, so that a page cannot show it: `make notebooks`"
        for fault in _cell_faults(cell, path):
            yield f"cell {number} ({cell.source.strip().partition(chr(10))[0][:40]!r}): {fault}"


def _cell_faults(cell: NotebookNode, path: Path) -> Iterator[str]:
    if cell.cell_type == "markdown":
        yield from _page_faults(_render(cell.source), path)
    if cell.cell_type != "code":
        return
    if not cell.source.strip():
        yield "empty: delete it"
    elif cell.execution_count is None:
        yield "not executed: execute the notebook with `make notebooks`"
    for output in cell.outputs:
        yield from _output_faults(output, cell.metadata.get("tags", []), path)


def _output_faults(output: NotebookNode, tags: Iterable[str], path: Path) -> Iterator[str]:
    data: Mapping[str, Any] = output.get("data", {})
    if output.output_type == "error" and "raises-exception" not in tags:
        yield f"{output.ename}: mend it, or tag the cell raises-exception if it is meant"
    if WIDGETS.format("view") in data and not {"image/png", "text/plain"} <= data.keys():
        yield "a widget without a picture and a sentence for pages without a kernel: see Explorer._repr_mimebundle_"
    for mime in data:
        if mime.startswith("image/") and not output.metadata.get(mime, {}).get("alt", "").strip():
            yield f"{mime} output without a text alternative: plot.show(figure, 'what it shows')"
    yield from _page_faults(BeautifulSoup(data.get("text/html", ""), "html.parser"), path)
    yield from _page_faults(_render(data.get("text/markdown", "")), path)
    texts = [output.get("text", ""), *output.get("traceback", []), *data.values()]
    if any(f"{ROOT}/" in text for text in texts if isinstance(text, str)):
        yield f"shows this machine's folder {ROOT}: print a relative path, or the file's name"


def _render(markdown: str) -> BeautifulSoup:
    """Render Markdown as Jupyter does, with an id for each heading."""
    markdown = markdown.replace("](attachment:", "](data:")  # travels with its cell: no file to look for
    return BeautifulSoup(MarkdownWithMath(IPythonRenderer(escape=False)).render(markdown), "html.parser")


def _page_faults(page: BeautifulSoup, path: Path) -> Iterator[str]:
    images = page.find_all("img")
    for image in images:
        if not str(image.get("alt", "")).strip():
            yield f"image {str(image.get('src'))[:60]!r} without a text alternative: ![what it shows](…)"
    links = [str(a["href"]) for a in page.select("a[href]:not(.anchor-link)")]
    for link in links + [str(image.get("src", "")) for image in images]:
        if fault := _link_fault(link, path):
            yield fault


def _link_fault(link: str, path: Path) -> str | None:
    url = urlsplit(link)
    if url.scheme or url.netloc:
        return None  # the web is not asked
    target = path.parent / unquote(url.path) if url.path else path
    if not link or not target.exists():
        return f"link {link!r} leads to no file: write the path relative to {_shown(path.parent)}/"
    if url.fragment and target.suffix in (".md", ".ipynb") and unquote(url.fragment) not in _anchors(target):
        return f"link {link!r} leads to no heading: {_shown(target)} has {', '.join(sorted(_anchors(target)))}"
    return None


@cache
def _anchors(path: Path) -> set[str]:
    """What a link into the file may name: headings as Jupyter, or for .md files GitHub, spells them."""
    if path.suffix == ".md":
        ids = _ids(_render(path.read_text(encoding="utf-8")))
        return {re.sub(r"[^\w-]", "", name.lower()) for name in ids}
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return {name for c in notebook.cells if c.cell_type == "markdown" for name in _ids(_render(c.source))}


def _ids(page: BeautifulSoup) -> Iterator[str]:
    for element in page.find_all(id=True):
        yield unquote(str(element["id"]))


def _shown(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


# Command line


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=["execute", "lint", "pages"])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: the whole book")
    options = parser.parse_args(arguments)
    faults = []
    if options.command == "lint":
        for path in options.files or book() + pages():
            faults += [f"{_shown(path)}: {fault}" for fault in lint(path)]
    elif options.command == "pages":
        for path in options.files or book():
            print(_shown(page(path)))
    else:
        bar = tqdm(options.files or book(), unit="notebook")
        for path in bar:
            bar.set_description(path.stem)
            try:
                execute(path)
            except RuntimeError as error:
                faults.append(str(error))
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
