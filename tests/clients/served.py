"""A server of the program, on a free port."""

import contextlib
import re
import subprocess

TEMPLATE = (
    "{# Calls as in Hermes: <tool_call> #}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"
)


@contextlib.contextmanager
def served(cellar, *arguments):
    """The address of a server, which ends with the block."""
    command = [cellar, "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        line = server.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        try:
            yield found.group()
        finally:
            server.terminate()
        assert server.wait(60) == 0
