"""The clients for JavaScript, where there is node."""

import os
import pathlib
import subprocess

import pytest

MODULES = os.environ.get("CELLAR_NODE_MODULES")


@pytest.mark.skipif(not MODULES, reason="there is no node, or npm cannot install the clients")
@pytest.mark.parametrize("script", ["clients.test.cjs", "ai_sdk.test.cjs"])
def test_the_clients_for_javascript(address, encoder, script):
    script = pathlib.Path(__file__).with_name(script)
    environment = {**os.environ, "ADDRESS": address, "ENCODER": encoder, "NODE_PATH": MODULES}
    subprocess.run(["node", "--test", str(script)], env=environment, check=True)
