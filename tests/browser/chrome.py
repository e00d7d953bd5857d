"""Drives a Chromium through its DevTools protocol over a pipe: no driver and no package is needed."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]


def find():
    """The browser of this machine, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def above_4(fd):
    """The same file under a number of at least 5."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD, 5)
    os.close(fd)
    return copy


class Chrome:
    """A browser with one page."""

    def __init__(self, program, *more_flags):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()
        # The shell (bash: others know single digits) makes 3 and 4 of them: neither may be one of these before.
        to_browser, from_browser = above_4(to_browser), above_4(from_browser)
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
                 "--hide-scrollbars", "--force-color-profile=srgb",
                 f"--user-data-dir={self.profile.name}", *more_flags, "about:blank"]
        if os.geteuid() == 0:
            flags.insert(0, "--no-sandbox")  # as Chromium demands of root
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', program, *flags],
            pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.next_id, self.session = b"", 0, None
        self.console = []
        targets = self.call("Target.getTargets")["targetInfos"]
        self.attach(next(target["targetId"] for target in targets if target["type"] == "page"))

    def attach(self, target):
        """Drives this page from now on."""
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.call(f"{domain}.enable")

    def open_window(self):
        """Another page next to this one, which is driven from now on; gives what `session` was."""
        before, self.session = self.session, None
        self.attach(self.call("Target.createTarget", url="about:blank")["targetId"])
        return before

    def switch(self, session):
        """Drives another of the pages, in front: those behind it take no keys."""
        self.session = session
        self.call("Page.bringToFront")

    def close_window(self, before):
        """Closes this page; the one before it is driven again."""
        self.call("Page.close")
        self.switch(before)

    def _read(self):
        while b"\0" not in self.buffer:
            more = os.read(self.answers, 1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self.buffer += more
        line, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, message):
        """Keeps what a person would see in red in the console."""
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.console.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.console.append(f"{entry['text']} {entry.get('url', '')}")

    def call(self, method, **params):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def run(self, script):
        """The value of an expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script, seconds=20):
        """Waits until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > until:
                raise AssertionError(f"never true: {script}")
            time.sleep(0.03)

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)

    def dark(self, is_dark):
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": value}])

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def key(self, key, code=None):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
        common = {"key": key, "code": code or key, "windowsVirtualKeyCode": codes.get(key, 0)}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def picture(self, path, whole=False):
        kind = os.path.splitext(path)[1][1:]
        data = self.call("Page.captureScreenshot", format=kind, captureBeyondViewport=whole)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
        except (RuntimeError, OSError):
            pass
        self.process.wait(timeout=20)
        self.profile.cleanup()
