"""A page in headless Chromium that can be driven: DevTools messages over a pipe, so no package is needed for it."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from support.browser import CHROMIUM, FLAGS

LIMIT_S = 60.0
_KEYS = {
    "Enter": 13,
    "ArrowUp": 38,
    "ArrowDown": 40,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Tab": 9,
    "Home": 36,
    "End": 35,
}


class BrowserPage:
    """One page; ``problems`` are the lines of its console that are warnings or errors, and its exceptions."""

    def __init__(
        self, url: str, *, width: int = 1366, height: int = 900, theme: str = "light", ratio: float = 1
    ) -> None:
        assert CHROMIUM is not None
        self.problems: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._buffer, self._number = b"", 0
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def pipes() -> None:
            kept = os.dup(theirs_in), os.dup(theirs_out)  # one of them may be 3 or 4 itself
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        command = [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height, ratio=ratio)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.send("Page.navigate", url=url)

    def send(self, method: str, **params: Any) -> Any:
        """The result of a DevTools command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = self._receive(deadline)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, "the browser did not answer in time"
            if select.select([self._in], [], [], left)[0]:
                part = os.read(self._in, 1 << 20)
                assert part, "the browser has ended"
                self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found.get("method", ""), found.get("params", {}))
        return found

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"][:500])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression (or promise) comes to."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, limit_s: float = LIMIT_S) -> Any:
        """The expression's value once it is true."""
        deadline = time.monotonic() + limit_s
        while not (
            found := self.value(f"(() => {{ try {{ return {expression} }} catch (e) {{ return null }} }})()")
        ):
            assert time.monotonic() < deadline, (
                f"not within {limit_s:g} s: {expression}; console: {self.problems}"
            )
            time.sleep(0.1)
        return found

    def press(self, key: str) -> None:
        """A key down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key]
            )

    def move(self, x: float, y: float, *, click: bool = False) -> None:
        """The mouse, to a place of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, *, ratio: float = 1, mobile: bool = False) -> None:
        """Another window."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=mobile,
        )

    def screenshot(self, target: Path, *, whole: bool = False) -> Path:
        """A PNG of the window, or of the whole page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        target.write_bytes(base64.b64decode(found["data"]))
        return target

    def __enter__(self) -> BrowserPage:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()
