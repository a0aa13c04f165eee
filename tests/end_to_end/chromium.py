"""A page in headless Chromium, driven over the DevTools protocol with websockets alone."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--autoplay-policy=no-user-gesture-required", "--hide-scrollbars",
    "--remote-debugging-port=0",
]  # fmt: skip


def find():
    """The browser; scripts/bootstrap.sh installs it, so a test without it fails."""
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome")))
    browser = next(found, None)
    assert browser, "Chromium is not installed: run scripts/bootstrap.sh as root"
    return browser


class Page:
    """One page; ``evaluate`` runs JavaScript and returns its JSON value."""

    def __init__(self, socket):
        self.socket, self.count = socket, 0

    def call(self, method, **params):
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression):
        out = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in out, out["exceptionDetails"]
        return out["result"].get("value")

    def wait(self, expression, seconds=30):
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"waited {seconds} s for {expression}"
            time.sleep(0.05)
        return value

    def screenshot(self, path):
        import base64

        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(path).write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def open_page(html, profile, width=1200, height=900):
    """Open a file in a fresh browser profile; the browser is gone afterwards."""
    browser = subprocess.Popen(
        [find(), *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}",
         "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        active = Path(profile) / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (active.exists() and len(active.read_text().splitlines()) > 1):
            assert time.monotonic() < end, "Chromium did not start"
            assert browser.poll() is None, f"Chromium ended with {browser.returncode}"
            time.sleep(0.05)
        port = active.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as reply:
            target = next(t for t in json.load(reply) if t["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None, open_timeout=30) as socket:
            page = Page(socket)
            page.call("Page.enable")
            page.call("Network.enable")
            page.call("Page.navigate", url=Path(html).resolve().as_uri())
            page.wait("document.readyState === 'complete'")
            yield page
    finally:
        browser.terminate()
        browser.wait(timeout=30)
