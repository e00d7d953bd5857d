"""A server of the program, on a free port, with a chat template."""

import os
import re
import subprocess

import pytest

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    template = tmp_path_factory.mktemp("server") / "template.jinja"
    template.write_text(TEMPLATE)
    command = [os.environ["CELLAR"], "serve", "--port", "0", "-c", "4096"]
    command += ["--chat-template", str(template), "--alias", "stories"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        line = server.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found.group()
        server.terminate()
        assert server.wait(60) == 0
