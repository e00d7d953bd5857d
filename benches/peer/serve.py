#!/usr/bin/env python3
"""`cellar serve` against llama-server: the same file, machine, threads and requests, run alternately.

    benches/peer/serve.py --llama-server PATH [--cellar target/release/cellar] [--rounds 5] MODEL.gguf

Prints a Markdown table: medians of the rounds, and the median ratio of runs of one round (machines
drift; runs of a round drift together). Each server is started anew for each round and warmed by one
request; every llama-server setting in VARIANTS runs in every round, and Cellar is compared with the one
of the best median. Prompts are random words, drawn anew for each round; answers are greedy and end at
their length alone. All clients are one thread of this process, which streams `/v1/completions`.

distinct  16 clients, each with a prompt of about 512 tokens and an answer of 64: answered tokens a second
shared    16 clients after one prefix of about 2,048 tokens, 32 of their own, 64 answered: requests a second
gap       8 clients read 256 tokens each while a prompt of about 4,096 arrives: 99th percentile of the
          times between two tokens of one client, in milliseconds
one       one client: answered tokens a second after the first token
first     the same client: milliseconds to the first token of a prompt of about 512
ready     seconds from the start of the program to the first successful /health
idle      CPU seconds in ten seconds without a request
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time

from compare import processor

N_CLIENTS = 16
N_ANSWER = 64
N_CTX = 16 * 5120
VARIANTS = {
    "-kvu -fa on": ["-kvu", "-fa", "on"],
    "streams -fa on": ["-no-kvu", "-fa", "on"],
    "-kvu -fa on --no-repack": ["-kvu", "-fa", "on", "--no-repack"],
}
# Measure: unit, whether more is better.
MEASURES = {
    "distinct": ("tokens/s", True),
    "shared": ("requests/s", True),
    "gap": ("ms", False),
    "one": ("tokens/s", True),
    "first": ("ms", False),
    "ready": ("s", False),
    "idle": ("CPU s", False),
}
# Each is about one token in vocabularies of today's models.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue"
).split()


def words(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


class Server:
    """A running server, and how it is asked not to end an answer early."""

    def __init__(self, command, not_early, log):
        self.not_early = not_early
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        started = time.monotonic()
        self.process = subprocess.Popen(command + ["--port", str(self.port)], stdout=log, stderr=log)
        while not self.healthy():
            if self.process.poll() is not None:
                sys.exit(f"{' '.join(command)}\nended with {self.process.returncode}, see {log.name}")
            time.sleep(0.005)
        self.ready = time.monotonic() - started

    def healthy(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in connection.recv(64)
        except OSError:
            return False

    def cpu_seconds(self):
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stream(self, prompt, n_answer):
        """The times at which tokens of the answer came, after the time of the request."""
        body = {"prompt": prompt, "max_tokens": n_answer, "temperature": 0, "stream": True, **self.not_early(n_answer)}
        payload = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        times = [time.monotonic()]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            sys.exit(f"{status!r} {(await reader.read())[-400:]!r}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    sys.exit(f"{event}")
                if any(choice.get("text") for choice in event["choices"]):
                    times.append(time.monotonic())
        writer.close()
        return times

    def stop(self):
        self.process.terminate()
        self.process.wait()


async def distinct(server, rng):
    prompts = [words(rng, 512) for _ in range(N_CLIENTS)]
    started = time.monotonic()
    await asyncio.gather(*(server.stream(prompt, N_ANSWER) for prompt in prompts))
    return {"distinct": N_CLIENTS * N_ANSWER / (time.monotonic() - started)}


async def shared(server, rng):
    prefix = words(rng, 2048)
    prompts = [f"{prefix} {words(rng, 32)}" for _ in range(N_CLIENTS)]
    started = time.monotonic()
    await asyncio.gather(*(server.stream(prompt, N_ANSWER) for prompt in prompts))
    return {"shared": N_CLIENTS / (time.monotonic() - started)}


async def gap(server, rng):
    readers = [asyncio.create_task(server.stream(words(rng, 64), 256)) for _ in range(8)]
    await asyncio.sleep(4)
    intruder = await server.stream(words(rng, 4096), 8)
    # Only what the arriving prompt can disturb; the last gap may end after it.
    gaps = []
    for times in await asyncio.gather(*readers):
        pairs = zip(times[1:], times[2:])
        gaps += [b - a for a, b in pairs if b >= intruder[0] and a <= intruder[1]]
    print(f"  {len(gaps)} gaps while the prompt was computed", file=sys.stderr)
    return {"gap": 1e3 * sorted(gaps)[max(0, int(len(gaps) * 0.99) - 1)]}


async def one(server, rng):
    times = await server.stream(words(rng, 512), 256)
    return {"first": 1e3 * (times[1] - times[0]), "one": (len(times) - 2) / (times[-1] - times[1])}


async def idle(server, _):
    before = server.cpu_seconds()
    await asyncio.sleep(10)
    return {"idle": server.cpu_seconds() - before}


LOADS = {"distinct": distinct, "shared": shared, "gap": gap, "one": one, "idle": idle}


async def load(server, seed, names):
    """The measures of one run of one server. Prompts are the same for all servers of a round."""
    result = {"ready": server.ready}
    await server.stream(words(random.Random(seed), 64), 8)
    for number, name in enumerate(names):
        result |= await LOADS[name](server, random.Random(seed * 100 + number))
    return result


def run(command, not_early, seed, names, log):
    server = Server(command, not_early, log)
    try:
        return asyncio.run(load(server, seed, names))
    finally:
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--cellar", default="target/release/cellar")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default=",".join(LOADS), help="measures, separated by commas [default: %(default)s]")
    parser.add_argument("--setting", choices=VARIANTS, help="measure this setting of llama-server alone")
    parser.add_argument("--log", default=os.devnull, help="what the servers print goes here")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in LOADS]:
        parser.error(f"--only {unknown[0]}: it is one of {', '.join(LOADS)}")
    variants = {name: flags for name, flags in VARIANTS.items() if args.setting in (None, name)}
    common = ["-m", args.model, "-t", str(args.threads), "--host", "127.0.0.1", "-c", str(N_CTX)]
    ours, theirs = [], {name: [] for name in variants}
    with open(args.log, "w") as log:
        for round_ in range(args.rounds):
            command = [args.cellar, "serve", *common, "--parallel", str(N_CLIENTS)]
            ours.append(run(command, lambda n: {"min_tokens": n}, round_, names, log))
            print(f"round {round_ + 1}: cellar {ours[-1]}", file=sys.stderr)
            for name, flags in variants.items():
                command = [args.llama_server, *common, "-np", str(N_CLIENTS), *flags]
                theirs[name].append(run(command, lambda _: {"ignore_eos": True}, round_, names, log))
                print(f"round {round_ + 1}: llama-server {name} {theirs[name][-1]}", file=sys.stderr)

    print(f"{os.path.basename(args.model)}, {processor()}, {args.threads} threads, {args.rounds} rounds\n")
    print("| measure | Cellar | llama-server | its best setting | ratio (Cellar : llama-server) |")
    print("| --- | --- | --- | --- | --- |")
    for measure, (unit, more) in MEASURES.items():
        if measure not in ours[0]:
            continue
        medians = {name: statistics.median(r[measure] for r in runs) for name, runs in theirs.items()}
        best = (max if more else min)(medians, key=medians.get)
        mine = statistics.median(r[measure] for r in ours)
        ratios = [a[measure] / b[measure] for a, b in zip(ours, theirs[best]) if b[measure]]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "–"
        print(f"| {measure}, {unit} | {mine:.3g} | {medians[best]:.3g} | {best} | {ratio} |")


if __name__ == "__main__":
    main()
