"""The book in JupyterLab, in a real browser, as a learner sees it."""

import json
import re

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


@pytest.fixture
def explorer(lab, page):
    """A page with an explorer in it."""
    name = "notebooks/explorer.ipynb"
    cell = nbformat.v4.new_code_cell("from gpipe_lite.explore import explore\n\nexplore(num_stages=2)")
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), lab.folder / name)
    run_all_cells(page, lab.address(name))
    page.get_by_role("img", name="8 micro-batches, 32 tasks in 27 steps").wait_for(timeout=60_000)
    return page


def is_drawn(page, words):
    """Wait until the picture is called so, and until the same sentence stands on the page."""
    picture = page.get_by_role("img", name=words)
    picture.wait_for()
    sentence = picture.get_attribute("aria-label")
    assert words in sentence
    page.get_by_role("paragraph").filter(has_text=sentence).wait_for()


def press(page, *keys):
    """Press keys, one after the other, wherever the focus is."""
    for key in keys:
        page.keyboard.press(key)


def test_the_explorers_settings_answer_the_keyboard(explorer):
    """From box to slider to list by Tab; each draws a new picture with a new sentence."""
    explorer.get_by_label("micro-batches, M").focus()
    press(explorer, "Control+a", "5", "Enter")
    is_drawn(explorer, "5 micro-batches, 20 tasks in 18 steps")
    press(explorer, "Tab", "ArrowRight")
    is_drawn(explorer, "6 micro-batches, 24 tasks in 21 steps")
    press(explorer, "Tab", "Space", "ArrowDown", "Enter")
    is_drawn(explorer, "Timeline of 1f1b: 2 stages on 2 devices, 6 micro-batches, 24 tasks in 21 steps")
    press(explorer, "Tab", "Space", "Home", "Enter")
    is_drawn(explorer, "6 micro-batches, 36 tasks")
    press(explorer, "Tab", "Tab", "Tab", "Control+a", *"1.13", "Enter")
    is_drawn(explorer, "36 tasks in 20.91 steps")
    assert explorer.get_by_label("backward cost").input_value() == "1.13"


def test_the_explorers_clock_answers_the_keyboard(explorer):
    """It steps, goes back, plays by itself to the end, and always says what each device does."""
    explorer.get_by_text("device 1 waits at time 0 for F(0,0), which runs on device 0 until 1").wait_for()
    explorer.get_by_label("clock, moment").focus()
    press(explorer, "Tab", "Tab", "Tab", "Enter")
    explorer.get_by_text("device 1 runs F(0,0) until 2").wait_for(state="detached")
    explorer.get_by_text("device 1 runs F(1,0) until 2").wait_for()
    press(explorer, "Shift+Tab", "Enter")
    explorer.get_by_text("device 1 waits at time 0 for F(0,0)").wait_for()
    press(explorer, "Tab", "Tab", "Enter")
    explorer.get_by_text("device 0 runs F(0,2) until 3").wait_for()
    explorer.get_by_label("clock, moment").focus()
    press(explorer, "Tab", "End")
    explorer.get_by_text("device 0 has nothing left to do").wait_for()
    press(explorer, "Home")
    explorer.get_by_text("device 1 waits at time 0 for F(0,0)").wait_for()


@pytest.mark.parametrize("width", [1280, 900])
@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_the_explorer_fits_its_page(explorer, tmp_path, width, theme):
    """Nothing is cut off, the legend stays within the picture, and its text has the theme's colour."""
    explorer.get_by_label("stages, K").fill("8")
    explorer.get_by_label("stages, K").press("Enter")
    explorer.get_by_label("recomputation", exact=True).select_option("always")
    is_drawn(explorer, "8 stages on 8 devices, 8 micro-batches, 192 tasks")
    explorer.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
    explorer.evaluate(change, f"JupyterLab {theme}")
    explorer.locator(f"body[data-jp-theme-light={'true' if theme == 'Light' else 'false'}]").wait_for(state="attached")
    explorer.set_viewport_size({"width": width, "height": 1200})
    wide = "parts => parts.filter(part => part.scrollWidth > part.clientWidth).map(part => part.textContent)"
    for part in (".widget-label", ".jp-OutputArea-output", ".widget-vbox", ".widget-hbox"):
        assert explorer.eval_on_selector_all(part, wide) == []
    beyond = """svg => {
        const frame = svg.getBoundingClientRect();
        const inside = box => box.left > frame.left - 1 && box.right < frame.right + 1;
        return [...svg.querySelectorAll("text")].filter(t => !inside(t.getBoundingClientRect())).length;
    }"""
    picture = explorer.get_by_role("img", name="8 stages")
    assert picture.evaluate(beyond) == 0
    ink = picture.locator("text").first.evaluate("text => getComputedStyle(text).fill")
    red, green, blue = map(int, re.findall(r"\d+", ink)[:3])
    assert (red + green + blue < 384) == (theme == "Light")
    screenshot = tmp_path / f"explorer-{width}-{theme}.png"
    explorer.screenshot(path=screenshot)
    assert screenshot.stat().st_size > 10_000
