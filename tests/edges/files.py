"""Files: an output never destroys an input or a model; whatever ends a command, nothing is lost and nothing is left."""

import concurrent.futures
import contextlib
import hashlib
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time

from place import SOON, Place

# Commands that name a file as input and output, or a model as an output: code 2, and all files as before.
DESTROYING = [
    ("batch -m model.gguf -f p.jsonl -o model.gguf", "is read as --model"),
    ("batch -m model.gguf -f p.jsonl -o link.gguf", "is read as --model"),
    ("batch -m model.gguf -f p.jsonl -o o.jsonl --trace model.gguf", "is read as --model"),
    ("batch -m model.gguf -f p.jsonl -o p.jsonl", "is read as --file"),
    ("batch -m model.gguf -f - -o p.jsonl < p.jsonl", "is read as stdin"),
    ("batch -m model.gguf -f p.jsonl -o o.jsonl --trace o.jsonl", "is the file of --output, too"),
    ("run -m model.gguf --raw x -n 1 --save-state model.gguf", "is read as --model"),
    ("run -m model.gguf --raw x -n 1 --save-state other.gguf", "is a model"),
    ("logits -m model.gguf --tokens 1,2 -o model.gguf", "is read as --model"),
    ("logits -m model.gguf --tokens 1,2 -o other.gguf", "is a model"),
    ("imatrix -m model.gguf -f notes.txt -o model.gguf", "is read as --model"),
    ("imatrix -m model.gguf -f notes.txt -o notes.txt", "is read as --file"),
    ("convert model.gguf model.gguf --type q8_0", "is read as"),
    ("convert model.gguf link.gguf --type q8_0 --force", "is read as"),
    ("convert model.gguf other.gguf --type q8_0", "--force"),
    ("bench -m model.gguf --clients 1 --trace model.gguf", "is read as --model"),
    ("graph -m model.gguf -o model.gguf", "is read as --model"),
]

# A command for each way of writing; `OUT` is the file.
WRITERS = [
    "run --raw 'Once upon' -n 4 --temp 0 --save-state OUT",
    "logits --tokens 1,2,3 -o OUT",
    "imatrix -f notes.txt -c 64 -o OUT",
    "convert model.gguf OUT --type q8_0",
    "batch -f p.jsonl --temp 0 -o OUT",
    "batch -f p.jsonl --temp 0 --trace OUT",
    "graph --arch llama -o OUT",
]

# What prints on stdout.
PRINTERS = [
    "run 'Once upon' -n 4 --temp 0",
    "tokenize 'Once upon'",
    "inspect",
    "graph",
    "plan -c 64",
    "devices",
    "bench -p 4 -n 2 -r 1",
    "perplexity -f notes.txt -c 64 --chunks 1",
    "embed model.gguf --pooling mean Once",
    "batch -f p.jsonl --temp 0",
    "convert model.gguf - --type q8_0",
    "completions bash",
    "run --help",
    "--version",
]

# How often each writer is killed.
N_KILLS = 20


def run(program, report):
    with Place(program) as place:
        before = place.contents()
        for line, pattern in DESTROYING:
            done = place.shell(f"cellar {line}")
            report.check(f"destroys: {line}", done.is_refused(2, pattern), done)
            report.check(f"destroys, files: {line}", place.contents() == before)
    with Place(program) as place:
        for line in WRITERS:
            writer(place, report, line)
        for line in PRINTERS:
            printer(place, report, line)
        killed(place, report)
        killed_batch(place, report)
    killed_servers(program, report)
    killed_pulls(program, report)
    descriptors(program, report)
    changed(program, report)


def writer(place, report, line):
    """A full disk, a place that may not be written, a closed stdout, and a file that may not grow."""
    before = place.contents()
    command = "cellar " + line
    full = place.shell(command.replace("OUT", "/dev/full"))
    report.check(f"full disk: {line}", full.is_refused(1, "No space left"), full)
    absent = place.shell(command.replace("OUT", "/proc/1/out"))
    report.check(f"read-only: {line}", absent.is_refused(1, "'/proc/1/out'"), absent)
    short = place.shell(f"ulimit -f 0; {command.replace('OUT', 'out')} > /dev/null")
    report.check(f"ulimit -f: {line}", short.is_refused(1, "File too large"), short)
    after = place.contents()
    if "batch" in line:
        # It is written line by line under its own name, and has no line yet.
        report.check(f"no line: {line}", after.pop("out", b"") == b"", after)
        (place.dir / "out").unlink(missing_ok=True)
    report.check(f"nothing left: {line}", after == before, sorted(after))
    closed = place.shell(command.replace("OUT", "-") + " | true")
    report.check(f"closed stdout: {line}", closed.code == 0 and "panicked" not in closed.err, closed)
    report.check(f"nothing left after a closed stdout: {line}", place.contents() == before)
    good = place.shell(command.replace("OUT", "out"))
    report.check(f"works: {line}", good.code == 0 and (place.dir / "out").stat().st_size > 0, good)
    (place.dir / "out").unlink(missing_ok=True)


def printer(place, report, line):
    """A stdout that is closed, whose reader goes away, or whose disk is full."""
    closed = place.shell(f"cellar {line} >&-")
    report.check(f"stdout is closed: {line}", closed.code == 0 and "panicked" not in closed.err, closed)
    read = place.shell(f"set -o pipefail; cellar {line} | head -c 1 | wc -c")
    is_quiet = read.code == 0 and read.out.strip() == "1" and "error" not in read.err
    report.check(f"| head: {line}", is_quiet and "panicked" not in read.err, read)
    full = place.shell(f"cellar {line} > /dev/full")
    report.check(f"> /dev/full: {line}", full.is_refused(1, "No space left"), full)


def killed(place, report):
    """SIGKILL at any moment: the file is as before or complete, and the next writer removes what was left."""
    for line, look in [
        ("convert model.gguf out --type q4_k", "inspect out"),
        ("run --raw 'Once upon' -n 4 --temp 0 --save-state out", "state inspect out"),
    ]:
        out = place.dir / "out"
        whole = place.shell(f"cellar {line}")
        report.check(f"whole: {line}", whole.code == 0, whole)
        out.write_text("before")
        left = 0
        for after in moments(N_KILLS, whole.seconds):
            place.kill(f"cellar {line}", after)
            found = out.read_bytes()
            left += bool(parts(place.dir))
            is_whole = found == b"before" or place.shell(f"cellar {look}").code == 0
            report.check(f"killed, the file is whole: {line}", is_whole, len(found))
            if found != b"before":
                out.write_text("before")
        place.shell("cellar logits --tokens 1 -o out")
        report.check(f"killed, {left} times a part was left, none stays: {line}", not parts(place.dir), parts(place.dir))
        out.unlink()


def moments(n, seconds):
    """When to kill what takes this long: half of them at its end, where files are written."""
    order = random.Random(51)
    return [order.uniform(0.6 if i % 2 else 0, 1.05) * seconds for i in range(n)]


def parts(folder):
    return [str(path) for path in folder.rglob("*") if path.name.endswith((".part", ".incomplete"))]


def killed_servers(program, report):
    """A server that is killed while it swaps, or while it saves its cache: the next one has the cache that was
    saved before, and leaves nothing of the other's."""
    with Place(program) as place:
        text = (place.dir / "notes.txt").read_text()
        flags = "-m model.gguf -c 256 --cache-dir cache --parallel 4"
        ask = lambda server, text: server.ask(
            "POST", "/completion", {"prompt": text, "n_predict": 1, "temperature": 0}
        )
        with place.serve(flags) as server:
            report.check("a prompt is cached", ask(server, text[:400])[0] == 200)
        saved = place.contents()
        report.check("a cache is saved", any(name.startswith("cache/") for name in saved), sorted(saved))
        for at, after in enumerate(moments(N_KILLS, 0.15)):
            with place.serve(flags) as server:
                status, answer = ask(server, text[:400])
                n_cached = answer.get("tokens_cached", 0) if status == 200 else 0
                n_reused = answer.get("timings", {}).get("cache_n", n_cached) if status == 200 else 0
                report.check("the cache outlives a killed server", n_reused > 10, (status, answer))
                ask(server, f"{at} " + text[:300])
                server.process.terminate()
                time.sleep(after)
                server.process.kill()
                server.process.wait()
            log = (place.dir / "server.log").read_text()
            report.check("no cache is damaged", "warning" not in log and "panicked" not in log, log)
        with place.serve(flags) as server:
            ask(server, text[:400])
        report.check("no part of a cache is left", not parts(place.dir), parts(place.dir))
    with Place(program) as place:
        swap = place.dir / "swap"
        swap.mkdir()
        flags = "-m model.gguf -c 160 --parallel 8 --swap-memory 64K --swap-disk 64M --swap-dir swap"
        request = {"prompt": "Once upon a time", "n_predict": 60, "temperature": 0}
        left = 0
        for after in moments(N_KILLS, 0.5):
            with place.serve(flags) as server, concurrent.futures.ThreadPoolExecutor(8) as clients:
                asked = [clients.submit(server.ask, "POST", "/completion", request) for _ in range(8)]
                time.sleep(after)
                server.process.kill()
                server.process.wait()
                for answer in asked:
                    answer.result()
            left += any(path.is_file() for path in swap.rglob("*"))
        with place.serve(flags) as server:
            answer = server.ask("POST", "/completion", request)
            report.check("a server after killed ones answers", answer[0] == 200, answer)
        files = [str(path) for path in swap.rglob("*") if path.stat().st_size > 0 and path.is_file()]
        report.check(f"killed, {left} times swapped bytes were left, none stay", not files, files)


def killed_pulls(program, report):
    """A download that is killed goes on where it was; a model is whole, or is not there."""
    with Place(program) as place, hub((place.dir / "other.gguf").read_bytes()) as endpoint:
        environment = f"HF_ENDPOINT={endpoint} HF_HUB_CACHE=$PWD/cache"
        started = time.monotonic()
        done = place.shell(f"{environment} cellar pull owner/tiny")
        report.check("pull", done.code == 0, done)
        seconds = time.monotonic() - started
        show = f"{environment} cellar inspect -m owner/tiny"
        report.check("what was pulled is a model", place.shell(show).code == 0, place.shell(show))
        shutil.rmtree(place.dir / "cache")
        n_whole = 0
        for after in moments(N_KILLS, seconds):
            place.kill(f"{environment} cellar pull owner/tiny", after)
            done = place.shell(show)
            is_absent = done.is_refused(1, "cellar pull owner/tiny")
            report.check("killed pull: whole or absent", done.code == 0 or is_absent, done)
            if done.code == 0:
                n_whole += 1
                shutil.rmtree(place.dir / "cache")
        report.check("killed pulls: not always whole", n_whole < N_KILLS, n_whole)
        done = place.shell(f"{environment} cellar pull owner/tiny && {show}")
        report.check("a killed pull goes on", done.code == 0, done)
        report.check("no part of a download is left", not parts(place.dir), parts(place.dir))


@contextlib.contextmanager
def hub(model):
    """A hub of one model, which it sends slowly."""
    etag, commit = hashlib.sha256(model).hexdigest(), "0123456789abcdef0123456789abcdef01234567"

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.head(0)

        def head(self, start):
            self.send_response(206 if start else 200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(model) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(model) - 1}/{len(model)}")
            self.end_headers()

        def do_GET(self):
            if self.path.startswith("/api/"):
                files = [{"rfilename": "tiny.gguf", "size": len(model)}]
                text = json.dumps({"id": "owner/tiny", "sha": commit, "siblings": files}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                return
            asked = self.headers.get("Range", "bytes=0-")
            start = int(asked.removeprefix("bytes=").split("-")[0])
            self.head(start)
            with contextlib.suppress(OSError):
                for at in range(start, len(model), len(model) // 20):
                    self.wfile.write(model[at : min(at + len(model) // 20, len(model))])
                    time.sleep(0.01)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def killed_batch(place, report):
    """A batch that is killed and resumed has the answers of one that was not."""
    lines = [f'{{"prompt": "Once {i}", "max_tokens": 40, "temperature": 0}}\n' for i in range(40)]
    (place.dir / "many.jsonl").write_text("".join(lines))
    whole = place.shell("cellar batch -f many.jsonl -o whole.jsonl --parallel 2")
    report.check("batch", whole.code == 0, whole)
    order = random.Random(52)
    for _ in range(5):
        process = subprocess.Popen(
            ["bash", "-c", "exec cellar batch -f many.jsonl -o out.jsonl --resume --parallel 2"],
            cwd=place.dir,
            env=place.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(order.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
    place.shell("cellar batch -f many.jsonl -o out.jsonl --resume --parallel 2")
    found, wanted = [(place.dir / name).read_text() for name in ("out.jsonl", "whole.jsonl")]

    def texts(answers):
        return [line[: line.find('"reuse"')] for line in answers.splitlines()]

    report.check("killed batch resumed", texts(found) == texts(wanted), found[-300:])


def descriptors(program, report):
    """Few file descriptors are an error, never a panic."""
    with Place(program) as place:
        for n in range(4, 24, 2):
            for line in ["run -n 1 --temp 0", "serve --port 1", "batch -f p.jsonl", "inspect model.gguf"]:
                # A server that comes up is ended.
                done = place.shell(f"ulimit -n {n}; exec timeout 1 cellar {line}")
                is_clean = "panicked" not in done.err and done.code in (0, 1, 2, 124, 126, 127)
                report.check(f"ulimit -n {n}: {line}", is_clean, done)


def changed(program, report):
    """A model file that is written to while a server has it: errors, and the server lives and loads a good one."""
    for flags in ["--repack never", "--repack auto"]:
        for how in ["shortened", "emptied", "overwritten"]:
            with Place(program) as place, place.serve(f"-m model.gguf {flags}") as server:
                request = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
                status, answer = server.ask("POST", "/v1/completions", request)
                report.check(f"before it is {how}, {flags}", status == 200, answer)
                path = place.dir / "model.gguf"
                if how == "shortened":
                    os.truncate(path, path.stat().st_size // 2)
                elif how == "emptied":
                    os.truncate(path, 0)
                else:
                    with open(path, "r+b") as file:
                        file.write(bytes(path.stat().st_size))
                request["prompt"] = "Another story"
                status, answer = server.ask("POST", "/v1/completions", request, limit=SOON)
                is_error = status >= 500 and "model.gguf" in str(answer)
                report.check(f"model file {how}, {flags}", is_error, (status, answer))
                report.check(f"the server lives, {how}, {flags}", server.is_alive())
                os.replace(place.dir / "other.gguf", path)
                status, answer = server.ask("POST", "/v1/completions", request, limit=SOON)
                report.check(f"a good file in its place is loaded, {how}, {flags}", status == 200, answer)
                os.utime(path)
                status, answer = server.ask("POST", "/v1/completions", request, limit=SOON)
                report.check(f"touched, {how}, {flags}", status == 200, answer)
