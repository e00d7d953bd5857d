"""A server of the program, on a free port, with a chat template."""

import os
import pathlib
import sys
import time
import urllib.request

import pytest
from served import TEMPLATE, served

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
ENCODER = FIXTURES / "encoders" / "bert_tiny"
sys.path.insert(0, str(FIXTURES / "python"))

from tower_model import tower_model  # noqa: E402


def serve(*arguments):
    """The address of a server, which ends after the tests."""
    with served(os.environ["CELLAR"], *arguments) as address:
        yield address


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    template = tmp_path_factory.mktemp("server") / "template.jinja"
    template.write_text(TEMPLATE)
    yield from serve("-c", "4096", "--chat-template", str(template), "--alias", "stories")


@pytest.fixture(scope="session")
def encoder():
    """The address of a server with a model that gives vectors."""
    yield from serve("-m", str(ENCODER))


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """The address of a server with a tiny model that sees."""
    folder = tower_model(tmp_path_factory.mktemp("seeing"), "vision/llava", "<image>", "image")
    yield from serve("-m", str(folder), "--alias", "tiny")


@pytest.fixture(scope="session")
def hearing(tmp_path_factory):
    """The address of a server with a tiny model that hears."""
    folder = tmp_path_factory.mktemp("hearing")
    folder = tower_model(folder, "audio/qwen2_audio", "<|AUDIO|>", "audio")
    yield from serve("-m", str(folder), "--alias", "tiny")


@pytest.fixture
def no_requests(address):
    """Waits until no request is computed."""

    def running():
        with urllib.request.urlopen(f"{address}/metrics") as metrics:
            lines = metrics.read().decode().splitlines()
        (line,) = [line for line in lines if line.startswith("cellar_requests_running{")]
        return float(line.split()[-1])

    def wait():
        until = time.time() + 60
        while running() > 0:
            assert time.time() < until
            time.sleep(0.02)

    return wait
