"""A browser without a window, spoken to by the DevTools protocol over two pipes.

The protocol: messages of JSON, each ended by a NUL, on descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
KEYS = {"Escape": 27, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One browser; `page` opens pages in it."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        assert program, "no browser: `make test-packages` installs chromium-headless-shell"
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [
            "--no-first-run",
            "--disable-breakpad",
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
        ]
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        # Out of the way of 3 and 4, which the shell makes of them.
        theirs, answers = (_moved(descriptor) for descriptor in (theirs, answers))
        script = f'exec "$@" 3<&{theirs} 4>&{answers} {theirs}<&- {answers}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(theirs, answers),
            env={**os.environ, "HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(answers)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._in, selectors.EVENT_READ)
        self._received = b""
        self._number = 0
        self._events: dict[str, list[dict[str, Any]]] = {}

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        # It waits for its own processes, which would be left to nobody if it were killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        self._selector.close()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, session: str = "", **parameters: object) -> dict[str, Any]:
        """The answer of the browser; an error of its own fails the test."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._events.setdefault(answer.get("sessionId", ""), []).append(answer)

    def event(self, session: str, method: str) -> dict[str, Any]:
        """Wait for an event of a page."""
        while True:
            for event in self._events.get(session, []):
                if event["method"] == method:
                    return event
            event = self._receive()
            self._events.setdefault(event.get("sessionId", ""), []).append(event)

    def events(self, session: str) -> list[dict[str, Any]]:
        return self._events.get(session, [])

    def page(
        self, file: Path, *, fragment: str = "", size: tuple[int, int] = (1000, 700), dark: bool = False
    ) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(*size)
        page.prefer("dark" if dark else "light")
        page.call("Page.navigate", url=f"{file.as_uri()}{fragment}")
        self.event(session, "Page.loadEventFired")
        return page

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._received:
            assert self._selector.select(max(0.0, deadline - time.monotonic())), "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


class Page:
    """A page as someone at the screen has it; coordinates are CSS pixels."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, once what was to be drawn is drawn."""
        drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        script = f"{drawn}.then(() => ({expression}))"
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click_on(self, selector: str, text: str = "") -> None:
        """Click in the middle of the first element that fits and contains the text."""
        found = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".filter(e => e.textContent.includes({json.dumps(text)}))"
            ".map(e => e.getBoundingClientRect()).map(r => [r.x + r.width / 2, r.y + r.height / 2])"
        )
        assert found, f"no {selector} with {text!r}"
        self.click(*found[0])

    def press(self, *keys: str) -> None:
        for key in keys:
            code = KEYS.get(key, ord(key[0].upper()))
            down: dict[str, object] = {"key": key, "windowsVirtualKeyCode": code}
            if len(key) == 1:
                down["text"] = key
            self.call("Input.dispatchKeyEvent", type="keyDown", **down)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def complaints(self) -> list[str]:
        """What stands in the console: exceptions, errors, breaches of the page's policy."""
        wanted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        events = self._browser.events(self._session)
        return [json.dumps(event["params"])[:2000] for event in events if event["method"] in wanted]

    def requests(self) -> list[str]:
        """The addresses that the page asked for, itself included."""
        events = self._browser.events(self._session)
        wanted = "Network.requestWillBeSent"
        return [event["params"]["request"]["url"] for event in events if event["method"] == wanted]


def _moved(descriptor: int) -> int:
    moved: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(descriptor)
    return moved


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """WCAG 2's contrast of two colours, each red, green and blue of 0 to 255; 4.5 is enough for text."""

    def luminance(colour: Sequence[int]) -> float:
        parts = [c / 255 for c in colour[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
