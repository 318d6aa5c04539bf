"""A browser for tests: Chromium without a window, driven over a pair of pipes by its DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """One tab.   problems: errors and warnings of its console, and exceptions of its scripts."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol; return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self, timeout_s: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._from], [], [], timeout_s)[0], "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        event = json.loads(line)
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case _:
                pass
        return event

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and light or dark colours. Narrow ones are phones."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression is true; return its value. What is not there yet is not true."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.run(f"(() => {{ try {{ return {script}; }} catch {{ return false; }} }})()")):
            assert time.monotonic() < end_s, f"{script} is not true: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def press(self, key: str, text: str = "") -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "Backspace": 8, "End": 35, "Home": 36}
        codes |= {"ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        facts: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text or ("\r" if key == "Enter" else ""), **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def picture(self) -> bytes:
        """Return what is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A page of a new browser with its own profile; skips the test if there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser ({', '.join(NAMES)}); Debian: apt install chromium")
    flags = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "--disable-background-networking"),
    )
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    command = f'exec "$@" 3<&{to_read} 4>&{from_write}'  # the numbers at which the browser expects them
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *flags],
            pass_fds=(to_read, from_write),
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(folder)},
        )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(to_write, from_read)
    finally:
        os.close(to_write)  # it ends
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_read)
