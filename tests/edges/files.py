"""Files: an output never destroys an input or a model; whatever ends a command, nothing is lost and nothing is left."""

import os
import random
import signal
import subprocess
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
        killed(place, report)
        killed_batch(place, report)
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


def killed(place, report):
    """SIGKILL at any moment: the file is as before or complete, and the next writer removes what was left."""
    (place.dir / "out").write_text("before")
    order = random.Random(51)
    left = 0
    for _ in range(12):
        command = "exec cellar convert model.gguf out --type q4_k"
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=place.dir,
            env=place.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(order.uniform(0, 0.08))
        process.kill()
        process.wait()
        found = (place.dir / "out").read_bytes()
        left += any(path.name.endswith(".part") for path in place.dir.iterdir())
        is_whole = found == b"before" or place.shell("cellar inspect out").code == 0
        report.check("killed: the file is whole", is_whole, len(found))
        if found != b"before":
            (place.dir / "out").write_text("before")
    place.shell("cellar logits --tokens 1 -o out")
    parts = [path.name for path in place.dir.iterdir() if path.name.endswith(".part")]
    report.check(f"killed: {left} times a part was left, none stays", not parts, parts)
    (place.dir / "out").unlink()


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
    """A model file that is shortened or replaced in place while a server has it: errors, and the server lives."""
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
                is_error = status >= 500 and "changed" in str(answer)
                report.check(f"model file {how}, {flags}", is_error, (status, answer))
                report.check(f"the server lives, {how}, {flags}", server.is_alive())
