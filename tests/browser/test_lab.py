"""The book in JupyterLab, in a real browser, as a learner sees it."""

import json

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
