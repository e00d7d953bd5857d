"""What all cases share: a folder with models and texts, running the program, and comparing what came out."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
STORIES = ROOT / "models" / "stories-llama-f16.gguf"

# A chat template with which the small model answers messages.
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"

# How long a command may take that should end at once or after a few tokens of the small model.
SOON = 60


class Report:
    """Counts cases, and prints those that differ."""

    def __init__(self):
        self.n_cases = 0
        self.differ = []

    def check(self, name, is_right, found=""):
        self.n_cases += 1
        if not is_right:
            self.differ.append(name)
            print(f"DIFFERS {name}\n    {str(found).strip()[-1500:]}", flush=True)


class Place:
    """A new folder with `model.gguf`, `link.gguf` (a link to it), `other.gguf`, texts and requests."""

    def __init__(self, program):
        self.program = str(pathlib.Path(program).resolve())
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="edges-"))
        shutil.copy(STORIES, self.dir / "model.gguf")
        shutil.copy(STORIES, self.dir / "other.gguf")
        os.symlink("model.gguf", self.dir / "link.gguf")
        text = "One day, Tom went to the park with his red ball. " * 30
        (self.dir / "notes.txt").write_text(text)
        lines = [{"prompt": f"Once upon a time {i}", "max_tokens": 4, "temperature": 0} for i in range(4)]
        (self.dir / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.dir, ignore_errors=True)

    def contents(self):
        files = sorted(path for path in self.dir.rglob("*") if path.is_file())
        return {str(path.relative_to(self.dir)): path.read_bytes() for path in files}

    def environment(self):
        environment = dict(os.environ, HF_HUB_CACHE=str(self.dir / "hub"), CUDA_VISIBLE_DEVICES="")
        environment.pop("CELLAR_MODEL", None)
        environment["PATH"] = str(pathlib.Path(self.program).parent) + os.pathsep + environment["PATH"]
        return environment

    def shell(self, command, limit=SOON, stdin=subprocess.DEVNULL, address_space=None):
        """Runs a line of shell in which `cellar` is the program."""

        def limits():
            if address_space:
                resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

        started = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.dir,
            env=self.environment(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=limits,
        )
        try:
            out, err = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            code = "no end"
        return Done(code, out.decode(errors="replace"), err.decode(errors="replace"), time.monotonic() - started)

    def kill(self, command, after):
        """Starts a line of shell, and kills it with all that it started after so many seconds."""
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.dir,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(after)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def model_with(self, name, key, text):
        """The small model with one more text in its metadata."""
        source = (self.dir / "other.gguf").read_bytes()
        (self.dir / name).write_bytes(with_text(source, key, text.encode()))

    @contextlib.contextmanager
    def serve(self, flags):
        """A server on a port of its own."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = open(self.dir / "server.log", "wb")
        process = subprocess.Popen(
            ["bash", "-c", f"exec cellar serve --port {port} {flags}"],
            cwd=self.dir,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        server = Server(port, process, self.dir / "server.log")
        try:
            server.wait_until_up()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.close()


class Done:
    """How a command ended."""

    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds

    def __str__(self):
        return f"code {self.code} after {self.seconds:.1f} s\n{self.out[-400:]}\n{self.err[-800:]}"

    def is_refused(self, code, pattern):
        """It ended with this code and one line, which matches; nothing panicked."""
        error = [line for line in self.err.splitlines() if line.startswith("error:")]
        is_clean = "panicked" not in self.err and "RUST_BACKTRACE" not in self.err
        return self.code == code and len(error) == 1 and is_clean and bool(re.search(pattern, error[0]))


class Server:
    """A running `cellar serve`."""

    def __init__(self, port, process, log):
        self.port, self.process, self.log = port, process, log

    def wait_until_up(self):
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(self.log.read_text())
            if self.ask("GET", "/health")[0] == 200:
                return
            time.sleep(0.05)
        raise RuntimeError("the server does not answer")

    def ask(self, method, path, body=None, headers=None, limit=SOON):
        """The status and the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        try:
            connection.request(method, path, body, dict({"Content-Type": "application/json"}, **(headers or {})))
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, f"no answer: {error!r}"
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode(errors="replace")

    def is_alive(self):
        return self.process.poll() is None and self.ask("GET", "/health")[0] == 200

    def memory(self):
        """Resident memory in bytes."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def with_text(gguf, key, text):
    """A GGUF file with one more text in its metadata: the header grows, and the tensors move to the next boundary."""
    n_tensors, n_values = struct.unpack_from("<QQ", gguf, 8)
    at = 24
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def text_end(at):
        return at + 8 + struct.unpack_from("<Q", gguf, at)[0]

    def value_end(at, kind):
        if kind == 8:
            return text_end(at)
        if kind == 9:
            of, n = struct.unpack_from("<IQ", gguf, at)
            at += 12
            if of in sizes:
                return at + n * sizes[of]
            for _ in range(n):
                at = value_end(at, of)
            return at
        return at + sizes[kind]

    for _ in range(n_values):
        at = text_end(at)
        at = value_end(at + 4, struct.unpack_from("<I", gguf, at)[0])
    values_end = at
    for _ in range(n_tensors):
        at = text_end(at)
        n_dims = struct.unpack_from("<I", gguf, at)[0]
        at += 4 + 8 * n_dims + 4 + 8
    data = gguf[(at + 31) // 32 * 32 :]
    value = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(text)) + text
    head = gguf[:8] + struct.pack("<QQ", n_tensors, n_values + 1) + gguf[24:values_end] + value + gguf[values_end:at]
    return head + bytes(-len(head) % 32) + data
