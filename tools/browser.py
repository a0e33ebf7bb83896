"""Find a Chromium for the browser tests, or install one where the system lets us.

Usage::

    python tools/browser.py    prints the path of one; installs it first if there is none

An administrator on Debian or Ubuntu gets the system's package, anyone else Playwright's own download.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SYSTEMS = ("chromium", "chromium-browser", "google-chrome")
HINT = "install one (on Debian and Ubuntu: sudo apt install chromium) to run the browser tests"


def find() -> str | None:
    """The path of a Chromium: the system's, else Playwright's own; None if there is none."""
    for name in SYSTEMS:
        if path := shutil.which(name):
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def install() -> None:
    """Install one; what goes wrong is told by the commands themselves."""
    if shutil.which("apt-get") and os.getuid() == 0:
        subprocess.run(["apt-get", "update", "--quiet", "--quiet"], check=False)
        subprocess.run(["apt-get", "install", "--yes", "--quiet", "--quiet", "chromium"], check=False)
    else:
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=False)


def main() -> int:
    """Find one, if need be after installing it.

    Returns:
        The exit code: 0 if there is one.
    """
    if find() is None:
        install()
    path = find()
    print(path or f"no Chromium here: {HINT}")
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
