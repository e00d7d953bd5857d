#!/usr/bin/env python3
"""Three `cellar serve` behind an unmodified vllm-router (PyPI), of which one is killed in a stream.

    tests/clients/router_check.py --router VENV/bin/vllm-router [--cellar target/release/cellar]

The servers have the built-in model, and tell which blocks of tokens they hold: they are built with
`--features kv-events`. Checks, with each of the router's policies `cache_aware` and `kv_aware`:
- answers through the router are those of a server alone, plain and streamed;
- conversations stay with the server that has their prefix: mostly with `cache_aware`, which guesses from the texts
  it sent (a random server would have a third of them), nearly always with `kv_aware`, which is told, and asks
  the servers for the tokens of each prompt;
- when a server is killed while it streams, its client's stream ends, all others get their whole text, and the
  next requests are served by the two that are left.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

N_SERVERS = 3
N_CONVERSATIONS = 9
N_TURNS = 4
# Of the tokens of earlier turns, how much has to be reused.
LEAST_REUSED = {"cache_aware": 0.4, "kv_aware": 0.9}
OPENING = "Once upon a time there was a little girl. She had a big red ball and a small brown dog. " * 4


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(port, body, timeout=120):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {text}")
    return text


def whole(port, prompt, n):
    body = {"model": "stories", "prompt": prompt, "max_tokens": n, "temperature": 0}
    answer = json.loads(ask(port, body))
    return answer["choices"][0]["text"], answer["usage"]


def stream(port, prompt, n, on_first=None):
    """The text of a stream, and whether it ended as it should."""
    body = {"model": "stories", "prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text, is_done = "", False
    try:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                is_done = True
            elif data.startswith("{"):
                choices = json.loads(data).get("choices") or [{}]
                text += choices[0].get("text", "")
                if on_first:
                    on_first()
                    on_first = None
    except (http.client.HTTPException, OSError):
        pass
    connection.close()
    return text, is_done


def wait_until_healthy(port, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit(f"error: nothing healthy at port {port} within {seconds} s")


def metric(port, name):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


class Servers:
    def __init__(self, cellar):
        self.processes, self.ports, self.events = [], [], []
        for _ in range(N_SERVERS):
            port, events = free_port(), [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            command = [cellar, "serve", "--port", str(port), "--alias", "stories", "-c", "4096"]
            command += ["--kv-events", events[0], "--kv-events-replay", events[1]]
            self.processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            self.ports.append(port)
            self.events.append(events)
        for port in self.ports:
            wait_until_healthy(port)

    def urls(self):
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def event_sources(self):
        arguments = ["--kv-event-model", "stories", "--kv-event-block-size", "16"]
        for url, (events, replay) in zip(self.urls(), self.events):
            arguments += ["--kv-event-source", f"{url}={events}", "--kv-event-replay-source", f"{url}={replay}"]
        return arguments

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


def start_router(program, policy, servers, log):
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    if policy == "kv_aware":
        command += servers.event_sources()
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *servers.urls()]
    command += ["--health-check-interval-secs", "2"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    wait_until_healthy(port)
    return process, port


def conversations(port, reference):
    """Runs conversations side by side; returns reused and possible tokens of their later turns."""

    def one(number):
        # Longer than what is added in a turn: the router sends a prompt elsewhere that is mostly new.
        prompt, reused, possible = f"Number {number}. " + OPENING, 0, 0
        for turn in range(N_TURNS):
            text, usage = whole(port, prompt, 24)
            expected, _ = whole(reference, prompt, 24)
            assert text == expected, f"conversation {number}, turn {turn}: '{text}', not '{expected}'"
            if turn:
                reused += usage["prompt_tokens_details"]["cached_tokens"]
                possible += before
            before = usage["prompt_tokens"] + usage["completion_tokens"] - 1
            prompt += text + f" Then came friend {number} with toy {turn}. They all went to the park and"
        return reused, possible

    with concurrent.futures.ThreadPoolExecutor(N_CONVERSATIONS) as pool:
        counts = list(pool.map(one, range(N_CONVERSATIONS)))
    return sum(reused for reused, _ in counts), sum(possible for _, possible in counts)


def kill_one(port, reference, servers):
    """Kills a server while many streams run."""
    prompts = [f"Story {number}: One day, Tom and Lily went to the big park and" for number in range(12)]
    expected = [whole(reference, prompt, 400)[0] for prompt in prompts]
    victim = servers.processes[0]
    state = {"killed": False}

    def on_first():
        if not state["killed"] and metric(servers.ports[0], "cellar_requests_running{") > 0:
            state["killed"] = True
            victim.send_signal(signal.SIGKILL)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        streams = pool.map(lambda prompt: stream(port, prompt, 400, on_first), prompts)
        results = list(streams)
    assert state["killed"], "no stream was on the server that was to be killed"
    victim.wait()
    n_whole = sum(is_done and text == wanted for (text, is_done), wanted in zip(results, expected))
    n_cut = sum(not is_done for _, is_done in results)
    for (text, is_done), wanted in zip(results, expected):
        assert wanted.startswith(text) if not is_done else text == wanted, f"'{text}' for '{wanted}'"
    assert n_cut, "no stream was cut"
    assert n_whole, "no stream was whole"
    for prompt, wanted in zip(prompts, expected):
        until = time.monotonic() + 30
        while True:
            try:
                assert whole(port, prompt, 400)[0] == wanted
                break
            except RuntimeError as error:
                if time.monotonic() > until:
                    sys.exit(f"error: the two servers that are left do not serve: {error}")
                time.sleep(0.5)
    return n_whole, n_cut


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--router", required=True)
    arguments.add_argument("--cellar", default="target/release/cellar")
    options = arguments.parse_args()
    reference_port = free_port()
    reference = subprocess.Popen(
        [options.cellar, "serve", "--port", str(reference_port), "--alias", "stories"], stderr=subprocess.DEVNULL
    )
    try:
        wait_until_healthy(reference_port)
        for policy in LEAST_REUSED:
            check(options, policy, reference_port)
    finally:
        reference.terminate()
        reference.wait()


def check(options, policy, reference_port):
    servers = Servers(options.cellar)
    log = tempfile.NamedTemporaryFile("w", suffix=".log", delete=False)
    router, port = start_router(options.router, policy, servers, log)
    try:
        reused, possible = conversations(port, reference_port)
        used = [int(metric(server, "cellar_requests_total{")) for server in servers.ports]
        print(f"{policy}: {reused} of {possible} tokens of earlier turns reused; requests by server: {used}")
        too_few = f"conversations do not stay where their prefix is, see {log.name}"
        assert reused >= LEAST_REUSED[policy] * possible, too_few
        n_whole, n_cut = kill_one(port, reference_port, servers)
        print(f"{policy}: a server killed: {n_whole} streams whole and exact, {n_cut} cut, the next requests served")
        os.unlink(log.name)
    finally:
        router.terminate()
        router.wait()
        servers.stop()


if __name__ == "__main__":
    main()
