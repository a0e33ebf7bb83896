"""The notebooks' lint, their execution, and what nbval does not compare."""

import re
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

from tools import notebooks

TESTS = Path(__file__).parent
PNG = {"image/png": "aGk=", "text/plain": "<Figure>"}
ALT = {"image/png": {"alt": "A four-by-four timeline"}}


def code(source="1 + 1", count=1, outputs=(), **metadata):
    return new_code_cell(source, execution_count=count, outputs=list(outputs), metadata=metadata)


def shown(data, metadata=None):
    return new_output("display_data", data, metadata=metadata or {})


def failed():
    return new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])


def write(path, *cells, kernel="python3"):
    metadata = {"kernelspec": {"name": kernel, "display_name": "Python 3"}}
    nbformat.write(new_notebook(cells=list(cells), metadata=metadata), path)
    return path


def faults(tmp_path, *cells, **options):
    return list(notebooks.lint(write(tmp_path / "chapter.ipynb", *cells, **options)))


def test_the_book_and_its_pages_are_clean():
    assert notebooks.main(["lint"]) == 0


def test_a_good_notebook_has_no_fault(tmp_path):
    (tmp_path / "a picture.png").touch()
    write(tmp_path / "next.ipynb", new_markdown_cell("## The bubble, again\n"))
    text = """
        # One step
        [the web](https://pytorch.org), [on](next.ipynb), [on](next.ipynb#The-bubble,-again),
        [here](#One-step), ![a pipeline](a%20picture.png), <img src="a picture.png" alt="a pipeline">,
        ![attached](attachment:a.png), math $[a](b)$, `[code](x.md)`

        ```
        [also code](x.md)
        ```
    """
    cells = [
        new_markdown_cell(re.sub("^ {8}", "", text, flags=re.MULTILINE)),
        code(
            outputs=[
                shown(PNG, ALT),
                shown({"text/html": '<img alt="dots" src="data:image/png;base64,aGk=">'}),
            ]
        ),
        code(count=2, outputs=[failed()], tags=["raises-exception"]),
    ]
    assert faults(tmp_path, *cells) == []


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (code(count=None), "cell 1 ('1 + 1'): not executed"),
        (code(source=" ", count=None), "cell 1 (''): empty"),
        (code(count=2), "execution counts are [2], not 1 to 1"),
        (code(outputs=[failed()]), "ValueError: mend it"),
        (code(outputs=[shown(PNG)]), "image/png output without a text alternative"),
        (
            code(outputs=[shown(PNG, {"image/png": {"alt": " "}})]),
            "image/png output without a text alternative",
        ),
        (
            code(outputs=[shown({"image/svg+xml": "<svg/>"})]),
            "image/svg+xml output without a text alternative",
        ),
        (
            code(outputs=[shown({"text/html": "<img src='data:,'>"})]),
            "image 'data:,' without a text alternative",
        ),
        (
            code(outputs=[shown({"text/markdown": "![](data:,)"})]),
            "image 'data:,' without a text alternative",
        ),
        (code(outputs=[shown({"text/plain": f"{notebooks.ROOT}/x"})]), "shows this machine's folder"),
        (new_markdown_cell("![](chapter.ipynb)"), "image 'chapter.ipynb' without a text alternative"),
        (new_markdown_cell("<img src='chapter.ipynb'>"), "image 'chapter.ipynb' without a text alternative"),
        (new_markdown_cell("[on](11.ipynb)"), "link '11.ipynb' leads to no file"),
        (new_markdown_cell("![a pipeline](11.png)"), "link '11.png' leads to no file"),
        (new_markdown_cell("<a href='11.ipynb'>on</a>"), "link '11.ipynb' leads to no file"),
        (new_markdown_cell("[on][next]\n\n[next]: 11.ipynb"), "link '11.ipynb' leads to no file"),
        (new_markdown_cell("[on]()"), "link '' leads to no file"),
        (new_markdown_cell("# Here\n[on](chapter.ipynb#There)"), "leads to no heading"),
        (new_markdown_cell("# Here\n[on](#There)"), "link '#There' leads to no heading"),
    ],
)
def test_each_fault_is_named(tmp_path, cell, fault):
    (found,) = faults(tmp_path, cell)
    assert fault in found


def test_a_widget_whose_state_is_not_kept_is_a_fault(tmp_path):
    """A page without a kernel reads it from the notebook's metadata, where code hosts demand the key ``state``."""
    path = write(tmp_path / "chapter.ipynb")
    data = {notebooks.WIDGETS.format("view"): {"model_id": "abc"}, "image/png": "iVBORw0KGgo=", "text/plain": "words"}
    notebook = new_notebook(cells=[code(outputs=[shown(data, {"image/png": {"alt": "words"}})])])
    notebook.metadata = nbformat.read(path, as_version=4).metadata
    nbformat.write(notebook, path)
    (found,) = notebooks.lint(path)
    assert found.startswith("cell 1: its widget's state is not kept")
    notebook.metadata["widgets"] = {notebooks.WIDGETS.format("state"): {"state": {"abc": {}}}}
    nbformat.write(notebook, path)
    assert list(notebooks.lint(path)) == []


@pytest.mark.notebook
def test_a_page_shows_a_widgets_picture_and_sentence(tmp_path):
    """No widget waits for code from elsewhere; links between notebooks lead to their pages."""
    data = {notebooks.WIDGETS.format("view"): {"model_id": "abc"}, "image/png": "iVBORw0KGgo=", "text/plain": "a <b"}
    write(tmp_path / "on.ipynb")
    links = new_markdown_cell("# Here\n[on](on.ipynb#There) [web](https://a.b/c.ipynb) [here](#Here)")
    path = write(tmp_path / "chapter.ipynb", links, code(outputs=[shown(data, {"image/png": {"alt": "words"}})]))
    assert notebooks.main(["pages", str(path)]) == 0
    text = (tmp_path / "chapter.html").read_text(encoding="utf-8")
    assert "widget-view" not in text
    page = BeautifulSoup(text, "html.parser")
    assert page.select_one("img[src^='data:image/png;base64,iVBORw0KGgo=']")
    assert [said.text for said in page.select("em")] == ["a <b"]
    links = [link["href"] for link in page.select("p a")]
    assert links == ["on.html#There", "https://a.b/c.ipynb", "#Here"]


def test_another_kernel_is_a_fault(tmp_path):
    (found,) = faults(tmp_path, kernel="my-env")
    assert found.startswith("the kernel is 'my-env', not 'python3'")


def test_a_page_has_its_links_checked_with_anchors_as_github_spells_them(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("# For `make`, and without\n[a](#for-make-and-without) [b](#without) [c](gone.md) ![](d.png)")
    alt, heading, file, image = notebooks.lint(page)
    assert "without a text alternative" in alt
    assert "'#without' leads to no heading" in heading
    assert "'gone.md' leads to no file" in file
    assert "'d.png' leads to no file" in image


def test_the_command_line_names_the_file_and_fails(tmp_path, capsys):
    path = write(tmp_path / "chapter.ipynb", code(count=None))
    assert notebooks.main(["lint", str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: cell 1 ('1 + 1'): not executed")


@pytest.mark.notebook
def test_an_executed_notebook_is_clean_and_the_same_every_time(tmp_path):
    sources = [
        "from pathlib import Path\nprint(Path.cwd().name)",
        "from ipywidgets import IntSlider\nIntSlider()",
        "import json\njson.loads('')",
    ]
    cells = [code(source, count=7) for source in sources]
    cells[-1].metadata.tags = ["raises-exception"]
    cells[0].metadata.execution = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    path = write(tmp_path / "chapter.ipynb", *cells, kernel="elsewhere")
    assert notebooks.main(["execute", str(path)]) == 0
    (bare,) = notebooks.lint(path)
    assert "a widget without a picture and a sentence for pages without a kernel" in bare
    once = path.read_text()
    assert f"{tmp_path.name}\\n" in once
    assert "widget-state+json" in once
    assert "iopub" not in once
    assert notebooks.main(["execute", str(path)]) == 0
    assert path.read_text() == once


@pytest.mark.notebook
def test_a_failing_notebook_is_named_and_left_as_it_was(tmp_path, capsys):
    path = write(tmp_path / "chapter.ipynb", new_markdown_cell("# One"), code("1 / 0", count=None))
    before = path.read_text()
    assert notebooks.main(["execute", str(path)]) == 1
    assert path.read_text() == before
    printed = capsys.readouterr().out
    assert f"{path}: cell 2 failed" in printed
    assert "ZeroDivisionError" in printed


def sanitised(text):
    for regex, replacement in get_sanitize_patterns((TESTS / "nbval_sanitize.cfg").read_text(encoding="utf-8")):
        text = re.sub(regex, replacement, text)
    return text


@pytest.mark.parametrize(
    ("committed", "new"),
    [
        ("step: 12.3 s", "step: 9 s"),
        ("took  9.8 ms,", "took 10.2 ms,"),
        ("1,234 samples/s", "980.5 samples/s"),
        ("2.1 s/it", "1.9 s/it"),
        ("1.5e-05 s", "2 s"),
        ("1 min 20 s", "2 min 3 s"),
        ("<f at 0x7f5c8e0b1d30>", "<f at 0x7f5c8e0b1d90>"),
        (
            "a\n 45%|████▌     | 9/20 [00:01<00:01, 8.5it/s]\nb",
            "a\n100%|██████████| 20/20 [00:02<?, ?it/s]\nb",
        ),
    ],
)
def test_measured_times_are_not_compared(committed, new):
    assert sanitised(committed) == sanitised(new)


@pytest.mark.parametrize(
    "text",
    [
        "loss 0.25",
        "97.5 %",
        "4 stages",
        "bubble 3/11",
        "1.56 times faster",
        "8 micro-batches",
        "12 steps",
        "5 MiB",
        "2s2",
    ],
)
def test_what_a_chapter_argues_with_is_compared(text):
    assert sanitised(text) == text
