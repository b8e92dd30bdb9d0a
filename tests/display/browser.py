"""Drives a headless Chromium over its debugging pipe: opens a page, clicks, types, evaluates, takes screenshots.

It speaks the DevTools protocol on two file descriptors (JSON, a zero byte after each message), so it needs no package.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "--lang=en"),
)
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Tab": 9,
        "Home": 36, "End": 35, "PageDown": 34, "PageUp": 33}  # fmt: skip


def chromium() -> str:
    """The browser's program; the test is skipped where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser on the PATH: one of {', '.join(NAMES)}")
    return found


class Browser:
    """One tab. ``problems`` are console errors and exceptions, ``requests`` the addresses that the page asked for."""

    def __init__(self, program: str, folder: Path) -> None:
        asked, self._write = os.pipe()
        self._read, said = os.pipe()

        def on_three_and_four() -> None:
            first, second = (os.dup(one) for one in (asked, said))
            while min(first, second) <= 4:  # where 3 and 4 are to be
                first, second = os.dup(first), os.dup(second)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=on_three_and_four,
            pass_fds=(3, 4),
        )
        os.close(asked)
        os.close(said)
        self._number, self._session, self._rest = 0, "", b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        (tab, *_) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{room}.enable")

    def call(self, method: str, *, wait: float = 60.0, **values: object) -> dict[str, Any]:
        """The answer to one command of the protocol; events that come before it are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        sent = json.dumps(message).encode() + b"\0"
        while sent:
            sent = sent[os.write(self._write, sent) :]
        for answer in self._messages(wait):
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
        raise TimeoutError(f"{method}: no answer within {wait} s")

    def _messages(self, wait: float) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + wait
        while (left := end - time.monotonic()) > 0:
            if b"\0" not in self._rest:
                if select.select([self._read], [], [], left)[0]:
                    more = os.read(self._read, 1 << 20)
                    assert more, f"the browser ended with {self._process.poll()}"
                    self._rest += more
                continue
            one, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(one)
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                found = given["exceptionDetails"]
                self.problems.append(str(found.get("exception", {}).get("description", found["text"])))
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in given["args"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(given["entry"]["text"]))
            case "Network.requestWillBeSent":
                self.requests.append(str(given["request"]["url"]))
            case "Page.loadEventFired":
                self._loaded = True

    # -------------------------------------------------------------------------------------------- a reader

    def open(self, page: Path, *, wait: float = 60.0) -> None:
        """Opens a file and waits until it is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        if not self._loaded:
            for _ in self._messages(wait):
                if self._loaded:
                    return
            raise TimeoutError(f"{page}: not loaded within {wait} s")

    def value(self, script: str) -> Any:
        """The value of an expression in the page; of a promise what it comes to."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, *, wait: float = 30.0) -> Any:
        """The first true value of an expression, asked for until it is."""
        end = time.monotonic() + wait
        while not (found := self.value(script)):
            assert time.monotonic() < end, f"still not after {wait} s: {script}"
            time.sleep(0.02)
        return found

    def click(self, selector: str) -> None:
        """Clicks the middle of the first element that a CSS selector finds."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Moves the mouse over an element."""
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _middle(self, selector: str) -> tuple[float, float]:
        place = "r => [r.x + r.width / 2, r.y + r.height / 2]"
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{found}.scrollIntoView({{block: 'nearest'}})")
        x, y = self.value(f"({place})({found}.getClientRects()[0])")
        return x, y

    def press(self, key: str) -> None:
        """Presses a key by its name ("ArrowDown") or character."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def type(self, text: str) -> None:
        """Types a text into what has the focus."""
        self.call("Input.insertText", text=text)

    def look(self, *, dark: bool = False, width: int = 1200, height: int = 900) -> None:
        """Sets the size of the window in pixels and the reader's light or dark setting."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """Writes what is seen, or the ``whole`` page, as PNG."""
        more = {"captureBeyondViewport": True} if whole else {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}  # type: ignore[assignment]
        shot = self.call("Page.captureScreenshot", format="png", **more)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        """Ends the browser."""
        self._session = ""
        try:
            self.call("Browser.close", wait=10)
        except (AssertionError, BrokenPipeError, TimeoutError):
            self._process.kill()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with an empty profile, ended afterwards; the test is skipped where none is installed."""
    program = chromium()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        tab = Browser(program, Path(folder))
        try:
            yield tab
        finally:
            tab.close()
