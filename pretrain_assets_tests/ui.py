"""`make ui` as a person meets it: the real command, the real daemon and webserver, a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parent.parent
ARTIFACTS = ROOT / "test-artifacts"
"""Screenshots, kept after the run and never committed."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@contextmanager
def make_ui(home: Path) -> Iterator[int]:
    """`make ui` on the instance at `home`; yields the port, and ends every process of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # dagster dev ends on SIGINT, which a shell's background job would have handed down as ignored
    command = ["env", "--default-signal=INT", "make", "-s", "ui", f"PORT={port}", f"DAGSTER_HOME={home}"]
    log = (home / "ui.log").open("wb")
    server = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=log, stderr=log)
    try:
        _wait_until_served(port, server, home / "ui.log")
        yield port
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(30)
        finally:
            log.close()


def _wait_until_served(port: int, server: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise TimeoutError(f"make ui did not serve port {port} within {seconds} s: {log.read_text()}")


@contextmanager
def browser_page(port: int) -> Iterator[Page]:
    """A page of headless Chromium whose relative addresses are those of the UI."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1600, "height": 1200}, base_url=f"http://127.0.0.1:{port}")
            page.set_default_timeout(60_000)
            yield page
        finally:
            browser.close()


def screenshot(page: Page, name: str) -> None:
    """Keep what the page shows."""
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=str(ARTIFACTS / f"{name}.png"))
