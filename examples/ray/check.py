"""Tries cellar_app.py: two replicas with the built-in model. CELLAR is the program."""

import collections
import os
import signal
import subprocess
import sys
import time

os.environ["CELLAR_FLAGS"] = "-c 4096 -t 1"

import httpx  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cellar_app import app  # noqa: E402

PORT = 18731
URL = f"http://127.0.0.1:{PORT}"


def body(number, **more):
    return {"prompt": f"Story {number}: Once upon a time", "max_tokens": 40, "temperature": 0, **more}


def alone(number):
    """The text of the program without a server."""
    command = [os.environ["CELLAR"], "run", "--raw", "--temp", "0", "-n", "40", body(number)["prompt"]]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return text.removeprefix(body(number)["prompt"]).removesuffix("\n")


def program_at(port):
    """The number of the process that serves at a port."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                words = file.read().split("\0")
        except OSError:
            continue
        if words[1:2] == ["serve"] and str(port) in words:
            return int(name)
    raise AssertionError(f"no program serves at {port}")


def texts_are_those_of_the_program():
    workers = collections.Counter()
    for number in range(12):
        answer = httpx.post(f"{URL}/v1/completions", json=body(number), timeout=120)
        assert answer.status_code == 200, answer.text
        workers[answer.headers["x-replica"]] += 1
        if number < 3:
            text = answer.json()["choices"][0]["text"]
            assert text == alone(number), (text, alone(number))
    assert len(workers) == 2, workers
    return workers


def streams_come_in_pieces():
    with httpx.stream("POST", f"{URL}/v1/completions", json=body(0, stream=True, max_tokens=200), timeout=120) as one:
        pieces = list(one.iter_raw())
    assert b"data: [DONE]" in b"".join(pieces)
    assert len(pieces) > 10, len(pieces)
    return len(pieces)


def what_is_wrong_is_said():
    assert httpx.post(f"{URL}/v1/completions", content=b"{").status_code == 400
    assert httpx.get(f"{URL}/no-such-path").status_code == 404


def a_killed_program_comes_back(port):
    os.kill(program_at(port), signal.SIGKILL)
    began, codes, last_bad = time.monotonic(), collections.Counter(), 0.0
    while time.monotonic() < began + 30:
        answer = httpx.post(f"{URL}/v1/completions", json=body(1, max_tokens=8), timeout=60)
        codes[answer.status_code] += 1
        if answer.status_code != 200:
            last_bad = time.monotonic() - began
        elif time.monotonic() > began + last_bad + 8:
            break
        time.sleep(0.2)
    assert set(codes) <= {200, 503}, codes
    workers = {httpx.post(f"{URL}/v1/completions", json=body(n)).headers["x-replica"] for n in range(12)}
    assert len(workers) == 2 and str(port) not in workers, (port, workers)
    return codes, last_bad


def main():
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(app)
    workers = texts_are_those_of_the_program()
    print("texts are those of the program; requests of each replica:", dict(workers))
    print("pieces of a stream:", streams_come_in_pieces())
    what_is_wrong_is_said()
    codes, last_bad = a_killed_program_comes_back(int(next(iter(workers))))
    print(f"after a kill: {dict(codes)}, the last 503 after {last_bad:.1f} s")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
