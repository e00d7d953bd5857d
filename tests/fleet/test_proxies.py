"""nginx and HAProxy in front of three servers, by the recipes of docs/how-to/scale-out.md word for word: only the places
of files and the numbers of ports are others. NGINX and HAPROXY are the programs."""

import os
import shutil
import sys
import tempfile
import unittest

from servers import Program, Server, ask, completion, free_port

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../browser"))
from recipes import put, recipe  # noqa: E402

SECTION, PAGE = "A proxy that hashes", "scale-out.md"
N_CONVERSATIONS, N_TURNS = 12, 4
OPENING = "Once upon a time there was a little girl. She had a big red ball and a small brown dog. " * 3


def places(servers):
    return {f"127.0.0.1:{8081 + at}": f"127.0.0.1:{server.port}" for at, server in enumerate(servers)}


def nginx(folder, port, servers):
    site = put(recipe(SECTION, "map ", PAGE), {**places(servers), "listen 8000": f"listen 127.0.0.1:{port}"})
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n"
                    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;\n" if os.geteuid() == 0 else ""
    path = os.path.join(folder, "nginx.conf")
    with open(path, "w") as file:
        file.write(f"{user}daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
                   f"http {{\naccess_log off;\n{paths}{site}}}\n")
    return Program([os.environ["NGINX"], "-p", folder, "-c", path], port)


def haproxy(folder, port, servers):
    site = put(recipe(SECTION, "global", PAGE), {**places(servers), "bind :8000": f"bind 127.0.0.1:{port}"})
    path = os.path.join(folder, "haproxy.cfg")
    with open(path, "w") as file:
        file.write(site)
    return Program([os.environ["HAPROXY"], "-f", path, "-db"], port)


class Hashing:
    """What holds behind a proxy that hashes an id of the conversation."""

    def setUp(self):
        self.servers = []
        for _ in range(3):
            server = Server("-c", "4096", "-t", "1", "--max-client-connections", "0")
            self.addCleanup(server.close)
            self.servers.append(server)
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.proxy = type(self).start(folder, free_port(), self.servers)
        self.addCleanup(self.proxy.close)

    def named(self, number):
        """What names a conversation in a request."""
        return {"headers": {"x-conversation-id": f"conversation-{number}"}}

    def converse(self, prompts):
        """A turn of each conversation; returns the tokens that were cached, and all."""
        reused = total = 0
        for number in prompts:
            text, n_prompt, n_cached = completion(self.proxy.port, prompts[number], 12, **self.named(number))
            prompts[number] += text + f" Then number {number} said: "
            reused, total = reused + n_cached, total + n_prompt
        return reused, total

    def busy(self):
        """The servers that computed something."""
        return [server for server in self.servers if server.metric("cellar_prompt_tokens_total")]

    def test_conversations_stay_where_their_prefix_is(self):
        prompts = {number: f"Number {number}. " + OPENING for number in range(N_CONVERSATIONS)}
        reused, total = 0, 0
        for turn in range(N_TURNS):
            of_turn = self.converse(prompts)
            if turn > 0:
                reused, total = reused + of_turn[0], total + of_turn[1]
        # But for what is new in a turn.
        self.assertGreater(reused, 0.8 * total)
        # Which have how many depends on their ports.
        busy = self.busy()
        self.assertGreater(len(busy), 1, "one server got everything")
        # One is killed: its conversations go on elsewhere, and the others stay.
        busy[0].kill()
        reused, total = self.converse(prompts)
        self.assertGreater(reused, 0)
        reused, total = self.converse(prompts)
        self.assertGreater(reused, 0.8 * total)

    def test_streams_and_errors_pass(self):
        status, text = ask(self.proxy.port, "POST", "/v1/completions",
                           {"prompt": OPENING, "max_tokens": 50, "stream": True})
        self.assertEqual(status, 200)
        self.assertIn("data: [DONE]", text)
        self.assertGreater(text.count("data: "), 5)  # an event carries several tokens where the machine is busy
        self.assertEqual(ask(self.proxy.port, "GET", "/no-such-path")[0], 404)
        self.assertEqual(ask(self.proxy.port, "POST", "/v1/completions", {"prompt": 7})[0], 400)


@unittest.skipUnless(os.environ.get("NGINX"), "NGINX is not set")
class Nginx(Hashing, unittest.TestCase):
    start = staticmethod(nginx)


@unittest.skipUnless(os.environ.get("HAPROXY"), "HAPROXY is not set")
class HAProxy(Hashing, unittest.TestCase):
    start = staticmethod(haproxy)


@unittest.skipUnless(os.environ.get("HAPROXY"), "HAPROXY is not set")
class HAProxyByTheBody(HAProxy):
    def named(self, number):
        return {"prompt_cache_key": f"conversation-{number}"}


if __name__ == "__main__":
    unittest.main(verbosity=2)
