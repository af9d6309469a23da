"""Chromium without a window, driven over a pair of pipes by its DevTools protocol."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
_SECONDS = 60.0
# The protocol is read from 3 and written to 4: our ends are put there, and the browser takes over.
_LAUNCH = """
import os, sys
reads, writes = (os.dup2(int(end), 200 + i) for i, end in enumerate(sys.argv[1:3]))
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """The browser that is installed here, if any."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page of a browser: what it shows, and every event that it told of."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; raises AssertionError where it is refused."""
        self._count += 1
        number = self._count
        asked: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._writing, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._told()
            if told.get("id") == number:
                assert "error" not in told, f"{method}: {told['error']}"
                return told["result"]
            self.events.append(told)

    def wait_for(self, event: str) -> None:
        """Until the page tells of an event that it has not told of before."""
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self._told())

    def open(self, path: Path) -> None:
        """Show a file; all events before are forgotten."""
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, once it is there."""
        done = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """As wide and high as a window would be."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def prefer(self, scheme: str, media: str = "") -> None:
        """The system's colour scheme, "light" or "dark", and "print" for what goes on paper."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def key(self, name: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if name == "Enter" else {}
        keyed = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        self.send("Input.dispatchKeyEvent", type="keyDown", **keyed, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **keyed)

    def picture(self, whole: bool = True) -> bytes:
        """The page as PNG, all of its height or what the window shows."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def paper(self) -> bytes:
        """The page as PDF, as it prints."""
        made = self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        return base64.b64decode(made["data"])

    def told_of(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of all events of some kinds since the page was opened."""
        return [e["params"] for e in self.events if e.get("method") in methods]

    def _told(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], _SECONDS)
            assert ready, f"the browser said nothing for {_SECONDS:.0f} s"
            chunk = os.read(self._reading, 1 << 16)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


@contextmanager
def browsing(program: str, profile: Path) -> Generator[Tab]:
    """A tab of a browser of its own, with a fresh profile; the browser ends with the block."""
    its_input, ours = os.pipe()
    theirs, its_output = os.pipe()
    ends = (str(its_input), str(its_output))
    command = [sys.executable, "-c", _LAUNCH, *ends, program, f"--user-data-dir={profile}", *_FLAGS]
    quiet = subprocess.DEVNULL
    running = subprocess.Popen(
        command, pass_fds=(its_input, its_output), stdin=quiet, stdout=quiet, stderr=quiet
    )
    os.close(its_input)
    os.close(its_output)
    try:
        yield Tab(theirs, ours)
    finally:
        with suppress(OSError):
            os.write(ours, b'{"id":0,"method":"Browser.close"}\0')
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        os.close(ours)
        os.close(theirs)
