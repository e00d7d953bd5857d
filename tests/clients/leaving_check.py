#!/usr/bin/env python3
"""Clients that leave at any byte, for ten minutes: everybody else is answered exactly, and the server stays as
large as it is after a tenth of the time.

    tests/clients/leaving_check.py [--cellar target/release/cellar] [--seconds 600]

64 clients ask for texts whose greedy answers are known; a third of them goes away: in the request, while it waits,
in the prompt, in the stream. `crates/server/tests/http/leaving.rs` checks the same within one process, with
cells and states counted; here the server is a process of its own, whose size can be told.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time

from router_check import free_port, metric, wait_until_healthy, whole

N_CLIENTS = 64
OPENINGS = [
    "Once upon a time there was a little girl named Lily.",
    "Tom and his dog went to the park. It was a sunny day.",
    "Once upon a time there was a big red ball.",
    "The sun was warm.",
]
REQUESTS = [(OPENINGS[at % 4] * [1, 2, 9][at % 3], 8 + at * 5 % 33) for at in range(24)]


def resident_kib(process):
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        (line,) = [line for line in status if line.startswith("VmRSS")]
    return int(line.split()[1])


def leave(port, prompt, n, numbers):
    body = json.dumps({"prompt": prompt, "max_tokens": n, "temperature": 0, "stream": numbers.random() < 0.75})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    request = (head + body).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        kind = numbers.random()
        if kind < 0.125:
            connection.sendall(request[: numbers.randrange(len(request))])
            return
        connection.sendall(request)
        if kind < 0.5:
            time.sleep(numbers.random() * 0.4)
            return
        left = numbers.randrange(1, 4000)
        while left > 0:
            data = connection.recv(min(left, 512))
            left -= len(data)
            if not data or data.endswith((b"0\r\n\r\n", b"}")):
                return


def client(seed, port, expected, until, counts):
    numbers = random.Random(seed)
    while time.monotonic() < until:
        at = numbers.randrange(len(REQUESTS))
        prompt, n = REQUESTS[at]
        if numbers.random() < 1 / 3:
            leave(port, prompt, n, numbers)
            counts["left"] += 1
        else:
            text = whole(port, prompt, n)[0]
            counts["exact" if text == expected[at] else "WRONG"] += 1
        time.sleep(numbers.random() * 0.5)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--cellar", default="target/release/cellar")
    arguments.add_argument("--seconds", type=int, default=600)
    options = arguments.parse_args()
    port = free_port()
    command = [options.cellar, "serve", "--port", str(port), "--alias", "stories", "-c", "2048", "--parallel", "8"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(port)
        expected = [whole(port, prompt, n)[0] for prompt, n in REQUESTS]
        until = time.monotonic() + options.seconds
        counts = {"exact": 0, "left": 0, "WRONG": 0}
        threads = [
            threading.Thread(target=client, args=(seed, port, expected, until, counts)) for seed in range(N_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        time.sleep(options.seconds / 10)
        before = resident_kib(server)
        for thread in threads:
            thread.join()
        time.sleep(2)
        after = resident_kib(server)
        left = metric(port, "cellar_requests_running{") + metric(port, "cellar_requests_waiting{")
    finally:
        server.terminate()
        server.wait()
    print(f"{counts}; {before} KiB resident after a tenth of the time, {after} KiB at the end; {left:.0f} requests left")
    sys.exit(0 if not counts["WRONG"] and not left and after <= 1.02 * before else 1)


if __name__ == "__main__":
    main()
