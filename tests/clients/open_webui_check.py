#!/usr/bin/env python3
"""Open WebUI (PyPI) on `cellar serve` as its OpenAI backend, through Open WebUI's own API.

    pip install open-webui
    tests/clients/open_webui_check.py --open-webui VENV/bin/open-webui [--cellar target/release/cellar]

The server has the built-in model and a key. Checks that Open WebUI lists the model, and that a chat through it is
the text of the server alone, whole and streamed, with its usage.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

KEY = "key-of-the-server"
PROMPT = "Once upon a time there was a little girl."
# The built-in model has no chat template.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(url, body=None, key=None, timeout=120):
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
        return answer.read().decode()


def wait_for(url, process, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            sys.exit(f"error: a program ended with {process.returncode} before {url} answered")
        try:
            ask(url, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"error: nothing at {url} within {seconds} s")


def start_webui(program, server_port, folder, log):
    port = free_port()
    environment = dict(
        os.environ,
        DATA_DIR=folder,
        WEBUI_AUTH="False",
        WEBUI_SECRET_KEY="secret",
        ENABLE_OLLAMA_API="False",
        ENABLE_OPENAI_API="True",
        OPENAI_API_BASE_URLS=f"http://127.0.0.1:{server_port}/v1",
        OPENAI_API_KEYS=KEY,
        # Nothing is downloaded: no model of embeddings, no newer version.
        HF_HUB_OFFLINE="1",
        OFFLINE_MODE="True",
        RAG_EMBEDDING_ENGINE="openai",
        ENABLE_VERSION_UPDATE_CHECK="False",
        ANONYMIZED_TELEMETRY="False",
    )
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    wait_for(f"http://127.0.0.1:{port}/health", process, 600)
    return process, f"http://127.0.0.1:{port}"


def check(webui, direct):
    # Without accounts everybody is the administrator.
    token = json.loads(ask(f"{webui}/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
    models = [model["id"] for model in json.loads(ask(f"{webui}/api/models", key=token))["data"]]
    assert "stories" in models, models
    body = {
        "model": "stories",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 24,
    }
    expected = json.loads(ask(f"{direct}/v1/chat/completions", body, KEY))
    text = expected["choices"][0]["message"]["content"]
    assert text, expected
    whole = json.loads(ask(f"{webui}/api/chat/completions", {**body, "stream": False}, token))
    assert whole["choices"][0]["message"]["content"] == text, whole
    assert whole["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"], whole
    streamed, n_events, is_done = "", 0, False
    for line in ask(f"{webui}/api/chat/completions", {**body, "stream": True}, token).splitlines():
        data = line.removeprefix("data: ").strip()
        is_done |= data == "[DONE]"
        if data.startswith("{"):
            choices = json.loads(data).get("choices") or [{}]
            streamed += choices[0].get("delta", {}).get("content") or ""
            n_events += 1
    assert is_done and streamed == text, f"'{streamed}' for '{text}'"
    try:
        # Open WebUI knows the names of its models itself.
        ask(f"{webui}/api/chat/completions", {**body, "model": "nothing"}, token)
        sys.exit("error: an unknown model was answered")
    except urllib.error.HTTPError as error:
        assert 400 <= error.code < 500, error
    version = json.loads(ask(f"{webui}/api/version"))["version"]
    print(f"Open WebUI {version}: lists {models}; whole and streamed ({n_events} events) as from the server: {text!r}")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--open-webui", required=True)
    arguments.add_argument("--cellar", default="target/release/cellar")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, template = os.path.join(folder, "keys"), os.path.join(folder, "template.jinja")
        with open(keys, "w") as file:
            file.write(KEY + "\n")
        with open(template, "w") as file:
            file.write(TEMPLATE)
        port = free_port()
        command = [options.cellar, "serve", "--port", str(port), "--alias", "stories", "-c", "2048"]
        command += ["--api-key-file", keys, "--chat-template", template]
        processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL)]
        try:
            direct = f"http://127.0.0.1:{port}"
            wait_for(f"{direct}/health", processes[0], 60)
            with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
                process, webui = start_webui(os.path.abspath(options.open_webui), port, folder, log)
                processes.append(process)
                check(webui, direct)
            os.unlink(log.name)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


if __name__ == "__main__":
    main()
