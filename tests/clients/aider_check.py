#!/usr/bin/env python3
"""aider (PyPI) on `cellar serve` as its OpenAI backend.

    pip install aider-chat
    tests/clients/aider_check.py --aider VENV/bin/aider [--cellar target/release/cellar]

The server has the built-in model, which cannot edit code. Checks that aider sends a message about a file, streamed and
whole, shows the server's answer, leaves the file as it was and ends without an error.
"""

import argparse
import os
import re
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from served import TEMPLATE, served

COMMAND = [
    "--model", "openai/stories", "--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update",
    "--no-analytics", "--no-pretty", "--no-show-release-notes", "--map-tokens", "0", "--edit-format", "ask",
]  # fmt: skip


def n_tokens(address):
    with urllib.request.urlopen(f"{address}/metrics") as metrics:
        lines = metrics.read().decode().splitlines()
    found = [line for line in lines if line.startswith("cellar_generated_tokens_total")]
    return sum(float(line.split()[-1]) for line in found)


def ask(aider, address, folder, *more):
    """What aider prints."""
    settings = Path(folder) / "settings.yml"
    settings.write_text("- name: openai/stories\n  extra_params:\n    max_tokens: 200\n    temperature: 0\n    stop: .\n")
    environment = {
        **os.environ,
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": "none",
        "HOME": folder,
    }
    command = [aider, *COMMAND, "--model-settings-file", str(settings), *more]
    command += ["--message", "What does this do?", "hello.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    return done.stdout


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--aider", required=True)
    arguments.add_argument("--cellar", default="target/release/cellar")
    options = arguments.parse_args()
    aider = os.path.abspath(options.aider)
    version = subprocess.run([aider, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        template, program = Path(folder) / "template.jinja", Path(folder) / "hello.py"
        template.write_text(TEMPLATE)
        program.write_text("print('hello')\n")
        with served(options.cellar, "-c", "16384", "--chat-template", str(template), "--alias", "stories") as address:
            for more in ([], ["--no-stream"]):
                before = n_tokens(address)
                printed = ask(aider, address, folder, *more)
                n = n_tokens(address) - before
                assert 0 < n < 200, (n, printed)
                answer = printed.split("Added hello.py to the chat.", 1)[1]
                answer, received = re.split(r"Tokens: .* sent, ", answer, maxsplit=1)
                assert answer.strip() and int(received.split()[0]) > 0, printed
                assert program.read_text() == "print('hello')\n"
                print(f"{version} {' '.join(more) or 'streamed'}: {n:.0f} tokens: {answer.strip()!r}, {received.strip()}")


if __name__ == "__main__":
    main()
