"""Servers of the program, and programs in front of them. CELLAR is the program."""

import http.client
import json
import os
import re
import socket
import subprocess
import tempfile
import time


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(port, method, path, body=None, headers=(), timeout=120):
    """The status and the body of an answer: as JSON, where it is some."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **dict(headers)})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    return answer.status, json.loads(text) if text[:1] in ("{", "[") else text


class Server:
    """`cellar serve` on a port of its own, with the built-in model or the one of a flag as `stories`, or with several."""

    def __init__(self, *flags):
        alias = ["--alias", "stories"] if flags.count("-m") < 2 else []
        command = [os.environ["CELLAR"], "serve", "--port", "0", *alias, *flags]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stderr=self.log)
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", self.said()):
                self.port = int(found[1])
                return
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"the server does not start:\n{self.said()}")

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def complete(self, prompt, n, **more):
        """The text of a completion, and how many tokens of its prompt were cached."""
        return completion(self.port, prompt, n, **more)

    def metric(self, name):
        """The sum of the lines of a metric."""
        lines = ask(self.port, "GET", "/metrics")[1].splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}[ {{]", line)]
        assert values, f"there is no metric '{name}'"
        return sum(values)

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=60)
        self.log.close()

    def close(self):
        """Ends it, where nobody has killed it."""
        self.process.terminate()
        self.process.wait(timeout=60)
        self.log.close()


def completion(port, prompt, n, headers=(), **more):
    """The text of a completion at a port, and how many tokens of its prompt were cached."""
    body = {"model": "stories", "prompt": prompt, "max_tokens": n, "temperature": 0, **more}
    status, answer = ask(port, "POST", "/v1/completions", body, headers)
    assert status == 200, answer
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], usage["prompt_tokens"], details.get("cached_tokens", 0)


class Program:
    """A program that listens at a port, once it is ready."""

    def __init__(self, command, port, path=None, seconds=60):
        self.port, self.log = port, tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        until = time.monotonic() + seconds
        while not self.is_ready(path):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise AssertionError(f"{command} does not start:\n{self.said()}")
            time.sleep(0.05)

    def is_ready(self, path):
        try:
            if path is None:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return True
            return ask(self.port, "GET", path, timeout=5)[0] == 200
        except OSError:
            return False

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=60)
        self.log.close()
