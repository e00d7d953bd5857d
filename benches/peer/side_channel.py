#!/usr/bin/env python3
"""Whether the time to the first token tells a client which prompts another one has sent.

    benches/peer/side_channel.py [--cellar target/release/cellar] [--trials 2000] [MODEL.gguf]

Starts `cellar serve` with two keys. In each trial one client sends a prompt of random words, then a second
client sends either that prompt or a random one of the same kind, and takes the time to its first token. How
well the times tell the two cases apart is the area under the ROC curve (AUC: the probability that a random
prompt takes longer than a sent one, 0.5 where they tell nothing). It is measured with the keys of two tenants, and with one
key, where prompts are reused on purpose: that it shows there proves that the test can see it.

Exits with 1 where tenants can be told apart (outside 0.45 to 0.55), or a tenant's own prompts cannot (below
0.95).
"""

import argparse
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time

WORDS = "time day man boy girl dog cat sun park ball tree home friend mom dad toy car fish bird big red".split()
N_WORDS = 250


def prompt(numbers):
    return " ".join(numbers.choice(WORDS) for _ in range(N_WORDS))


def first_token_seconds(port, key, text):
    """Seconds until the first event of a streamed completion."""
    body = json.dumps({"prompt": text, "max_tokens": 1, "temperature": 0, "stream": True})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"error: the server answered {answer.status}: {answer.read().decode()}")
    answer.readline()
    taken = time.perf_counter() - started
    answer.read()
    connection.close()
    return taken


def auc(sent, other):
    """The probability that a value of `other` is larger than one of `sent` (Mann and Whitney)."""
    ranked = sorted([(value, 0) for value in sent] + [(value, 1) for value in other])
    ranks = sum(rank for rank, (_, is_other) in enumerate(ranked, 1) if is_other)
    n, m = len(other), len(sent)
    return (ranks - n * (n + 1) / 2) / (n * m)


def measure(port, keys, n_trials, numbers):
    times = {True: [], False: []}
    for trial in range(n_trials):
        secret, other = prompt(numbers), prompt(numbers)
        first_token_seconds(port, keys[0], secret)
        is_sent = numbers.random() < 0.5
        times[is_sent].append(first_token_seconds(port, keys[1], secret if is_sent else other))
        if sys.stderr.isatty():
            print(f"\r{trial + 1} of {n_trials}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return auc(times[True], times[False])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(cellar, model, key_file):
    port = free_port()
    command = [cellar, "serve", "--port", str(port), "--api-key-file", key_file]
    command += ["-m", model] if model else []
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if f":{port}" in line:
            # What it says later is not read: it is little.
            return server, port
    sys.exit("error: the server did not start")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--cellar", default="target/release/cellar")
    arguments.add_argument("--trials", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("model", nargs="?", help="GGUF file [default: the built-in model]")
    options = arguments.parse_args()
    numbers = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        key_file = os.path.join(folder, "keys")
        with open(key_file, "w", encoding="ascii") as file:
            file.write("alpha\nbeta\n")
        server, port = serve(options.cellar, options.model, key_file)
        try:
            strangers = measure(port, ("alpha", "beta"), options.trials, numbers)
            own = measure(port, ("alpha", "alpha"), options.trials, numbers)
        finally:
            server.terminate()
            server.wait()
    print(f"two tenants: AUC {strangers:.3f}, one tenant: AUC {own:.3f}, {options.trials} trials each")
    sys.exit(0 if 0.45 <= strangers <= 0.55 and own >= 0.95 else 1)


if __name__ == "__main__":
    main()
