"""The book in JupyterLab, in a real browser, as a learner sees it."""

import json

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.timeout(300)]


def run_all_cells(page, address):
    """Open a notebook, wait for its kernel, run all cells; wait until they have run."""
    page.goto(address)
    page.wait_for_function(
        """() => {
            const kernel = window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel;
            return kernel?.connectionStatus === "connected" && kernel.status === "idle";
        }""",
        timeout=90_000,
    )
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")


def test_the_first_chapter_runs_and_shows_its_pictures(lab, page, tmp_path):
    """No cell ends in an error, every figure is drawn, and the sentence that describes it stands below it."""
    name = "notebooks/00_start_here.ipynb"
    run_all_cells(page, lab.address(name))
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    cells = json.loads((lab.folder / name).read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    widths = page.eval_on_selector_all(".jp-RenderedImage img", "images => images.map(image => image.naturalWidth)")
    assert widths
    assert min(widths) > 300
    screenshot = tmp_path / "chapter.png"
    page.screenshot(path=screenshot)
    assert screenshot.stat().st_size > 10_000


def test_the_explorer_answers_the_keyboard(lab, page):
    """A number typed into a box, an arrow key on a slider, Enter on a button: each draws a new picture."""
    name = "notebooks/explorer.ipynb"
    cell = nbformat.v4.new_code_cell("from gpipe_lite.explore import explore\n\nexplore(num_stages=2)")
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), lab.folder / name)
    run_all_cells(page, lab.address(name))
    page.get_by_role("img", name="8 micro-batches, 32 tasks in 27 steps").wait_for(timeout=60_000)
    for label, number in (("micro-batches, M", "5"), ("backward cost", "1.13")):
        page.get_by_label(label).fill(number)
        page.get_by_label(label).press("Enter")
    page.get_by_role("img", name="5 micro-batches, 20 tasks in 12.78 steps").wait_for()
    page.locator(".noUi-handle").nth(1).press("ArrowRight")
    page.get_by_role("img", name="6 micro-batches, 24 tasks in 14.91 steps").wait_for()
    page.get_by_label("schedule", exact=True).select_option("1f1b")
    page.get_by_role("img", name="Timeline of 1f1b").wait_for()
    page.get_by_text("device 1 waits at time 0 for F(0,0), which runs on device 0 until 1").wait_for()
    page.get_by_role("button", name="Step").press("Enter")
    page.get_by_text("device 1 runs F(1,0) until 2").wait_for()
    cut = "labels => labels.filter(l => l.scrollWidth > l.clientWidth).map(l => l.textContent)"
    assert page.eval_on_selector_all(".widget-label", cut) == []
