"""A JupyterLab of its own and a real browser.

The server listens on loopback, with a token and private folders, and looks for no news or updates; the browser is the
system's Chromium, and asks for nothing outside.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from playwright.sync_api import sync_playwright

from tools.browser import HINT, find

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Lab:
    """A JupyterLab server that serves a folder."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder = folder
        homes = {
            name: str(private / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "HOME")
        }
        paths = {"PYTHONPATH": str(ROOT), "JUPYTER_PREFER_ENV_PATH": "1"}
        quiet = Path(homes["JUPYTER_CONFIG_DIR"]) / "lab/user-settings/@jupyterlab/apputils-extension"
        quiet.mkdir(parents=True)
        (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
        self._log = (private / "lab.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
             "--ServerApp.port=0", f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True",
             "--LabApp.news_url=None", "--LabApp.extension_manager=readonly",
             "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"],
            env={**os.environ, **homes, **paths, "OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._runtime = Path(homes["JUPYTER_RUNTIME_DIR"])

    def address(self, path: str = "") -> str:
        """Where a file is opened; waits until the server answers.

        Raises:
            RuntimeError: if the server ended.
        """
        server = self._runtime / f"jpserver-{self._process.pid}.json"
        while not server.exists():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.1)
                self._log.seek(0)
                raise RuntimeError(f"JupyterLab ended:\n{self._log.read()}")
        about = json.loads(server.read_text(encoding="utf-8"))
        return f"{about['url']}lab/tree/{path}?{urlencode({'token': about['token'], 'reset': ''})}"

    def close(self) -> None:
        """End the server and its kernels."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server for a copy of the book."""
    folder, private = tmp_path_factory.mktemp("book"), tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    lab = Lab(folder, private)
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium, driven by Playwright."""
    path = find()
    if path is None:
        if os.environ.get("BROWSER_TESTS") == "required":
            pytest.fail(f"BROWSER_TESTS=required, and there is no Chromium: {HINT}")
        pytest.skip(f"no Chromium: {HINT}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that must ask for nothing outside."""
    outside = []

    def note(request: Any) -> None:
        if urlsplit(request.url).hostname not in ("127.0.0.1", None):
            outside.append(request.url)

    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.on("request", note)
    yield page
    page.close()
    assert outside == []
