"""A server that is attacked, or asked for too much: it answers, others do not wait, and nothing changes."""

import json
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time

from place import TEMPLATE, Place

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}


def run(program, report):
    with Place(program) as place:
        place.model_with("model.gguf", "tokenizer.chat_template", TEMPLATE)
        models(place, report)
        start(place, report)
        with place.serve("-m model.gguf --parallel 4") as server:
            origins(server, report)
            fields(server, report)
            connections(server, report)
        large_bodies(place, report)
        keys(place, report)


def models(place, report):
    """Reading changes nothing: no GET loads a model."""
    folder = place.dir / "models"
    folder.mkdir()
    shutil.copy(place.dir / "other.gguf", folder / "good.gguf")
    with place.serve("--models models") as server:
        for path in ["/props?model=good", "/slots?model=good", "/v1/models/good", "/metrics", "/v1/models"]:
            server.ask("GET", path, headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})
            server.ask("GET", path)
        _, answer = server.ask("GET", "/models")
        states = [model.get("status", {}).get("value") for model in answer.get("data", [])]
        report.check("no GET loads a model", states == ["unloaded"], answer)
        cross = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        status, answer = server.ask("POST", "/models/load", {"model": "good"}, headers=cross)
        report.check("a web page of others loads no model", status == 403, (status, answer))
        status, answer = server.ask("POST", "/models/load", {"model": "good"})
        report.check("POST /models/load loads it", status == 200, (status, answer))


def start(place, report):
    """What cannot work is said at the start."""
    for where in ["/proc/1/cache", "/dev/null", "/sys/cache"]:
        done = place.shell(f"timeout 5 cellar serve -m model.gguf --port 1 --cache-dir {where}")
        report.check(f"--cache-dir {where}", done.is_refused(1, where) or done.is_refused(2, where), done)


def origins(server, report):
    """Whose pages may ask: parsed as URLs, never by how the text begins."""
    host = f"127.0.0.1:{server.port}"
    for origin, is_ours in [
        (f"http://{host}", True),
        (f"http://localhost:{server.port}", True),
        (f"http://[::1]:{server.port}", True),
        ("http://localhost:x@evil.com", False),
        ("http://[::1]evil.com", False),
        ("http://localhost@evil.com", False),
        ("http://localhost.evil.com", False),
        ("http://evil.com#localhost", False),
        ("null", False),
    ]:
        status, answer = server.ask("POST", "/v1/chat/completions", CHAT, headers={"Origin": origin})
        report.check(f"Origin {origin}", (status == 200) == is_ours and status in (200, 403), (status, answer))
    for name in ["localhost:x@evil.com", "[::1]evil.com", "evil.com", "127.0.0.1.evil.com"]:
        status, answer = server.ask("GET", "/props", headers={"Host": name})
        report.check(f"Host {name}", status in (400, 403), (status, answer))


def fields(server, report):
    """Values at the edges."""
    ask = lambda **fields: server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2, **fields})
    for limit in (-1, None):
        status, answer = ask(max_tokens=limit, stop=["."])
        report.check(f"max_tokens {limit} is no limit", status == 200, (status, answer))
    status, answer = server.ask("POST", "/v1/chat/completions", dict(CHAT, max_tokens=-1, stop=["."]))
    report.check("max_tokens -1 of a chat is no limit", status == 200, (status, answer))
    status, answer = ask(stop=[f"stop {i}" for i in range(100_000)])
    report.check("100,000 stops", status == 400 and "stop" in str(answer), (status, str(answer)[:300]))
    status, answer = ask(stop=["x" * (1 << 20)])
    report.check("a stop of 1 MB", status == 400 and "stop" in str(answer), (status, str(answer)[:300]))
    _, vocabulary = server.ask("GET", "/props")
    n_vocab = 4096
    status, answer = ask(logit_bias={str(i): -100 for i in range(n_vocab)})
    report.check("all tokens biased", status in (200, 400), (status, answer, str(vocabulary)[:100]))
    banned = [[i, False] for i in range(n_vocab)]
    status, answer = server.ask("POST", "/completion", {"prompt": "Once", "n_predict": 2, "logit_bias": banned})
    report.check("all tokens banned", status == 400, (status, answer))


def connections(server, report):
    """One client cannot take all connections, and the log says that some are refused."""
    sockets = []
    for _ in range(1200):
        try:
            sockets.append(socket.create_connection(("127.0.0.1", server.port), timeout=2))
        except OSError:
            break
    time.sleep(0.2)
    n_open = sum(is_open(connection) for connection in sockets)
    report.check("one client has not all connections", 64 <= n_open < 1200, n_open)
    log = server.log.read_text()
    report.check("the log says so", "127.0.0.1" in log and "connections" in log, log[-400:])
    for connection in sockets:
        connection.close()
    time.sleep(0.2)
    report.check("after they have left, all is well", server.is_alive())


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def large_bodies(place, report):
    """`/health` stays quick while large bodies come; memory returns."""
    with place.serve("-m model.gguf --parallel 4 --max-body 16m") as server:
        before = server.memory()
        empty = b'{"messages":[' + b",".join([b'{"":0}'] * (8_000_000 // 7)) + b"]}"
        text = json.dumps({"content": "word " * 1_580_000}).encode()
        times, over = [], threading.Event()
        # Processes of their own, as a thread that reads an answer of 10 MB would hold up the one that measures.
        clients = [send(server, *body) for body in [("/v1/chat/completions", empty)] * 8 + [("/tokenize", text)] * 4]

        def watch():
            while not over.is_set():
                started = time.monotonic()
                server.ask("GET", "/health")
                times.append(time.monotonic() - started)
                time.sleep(0.005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        answers = [int(client.communicate(timeout=120)[0]) for client in clients]
        over.set()
        watcher.join()
        worst, usual = max(times) * 1000, statistics.median(times) * 1000
        found = f"worst {worst:.0f} ms, median {usual:.1f} ms of {len(times)}; answers {answers}"
        # It is 8 to 21 ms on an idle machine, and seconds are what was mended.
        report.check("/health while eight and four bodies of 8 MB come", worst < 200, found)
        report.check("large bodies are answered", all(status in (200, 400, 413, 429, 503) for status in answers), found)
        time.sleep(1)
        grown = (server.memory() - before) >> 20
        report.check("memory returns", grown < 50, f"{grown} MB more")
        print(f"large bodies: {found}; {grown} MB more after them")


def send(server, path, body):
    """A process that posts a body and prints the status of the answer."""
    program = (
        "import http.client, sys; connection = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]), timeout=120);"
        "connection.request('POST', sys.argv[2], sys.stdin.buffer.read(), {'Content-Type': 'application/json'});"
        "answer = connection.getresponse(); answer.read(); print(answer.status)"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(server.port), path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    client.stdin.write(body)
    client.stdin.close()
    client.stdin = None
    return client


def keys(place, report):
    """What a key may do: see docs/how-to/operations.md."""
    (place.dir / "keys.txt").write_text("alpha-key-1\nbeta-key-22\n")
    pathlib.Path(place.dir / "keys.txt").chmod(0o600)
    with place.serve("-m model.gguf --api-key-file keys.txt") as server:
        for path in ["/v1/models", "/props", "/slots", "/metrics", "/view/events"]:
            status, _ = server.ask("GET", path)
            report.check(f"no key, {path}", status == 401, status)
        beta = {"Authorization": "Bearer beta-key-22"}
        status, answer = server.ask("POST", "/v1/chat/completions", CHAT, headers=beta)
        report.check("a key is served", status == 200, (status, answer))
        status, answer = server.ask("POST", "/models/unload", {"model": "model"}, headers=beta)
        report.check("a key unloads no model", status in (403, 404), (status, answer))
