"""Three servers over one store on another machine: a real redis-server, and moto's S3. What one computed the others do not
compute again, with the same text; nobody finds what is not theirs; and a store that dies takes no text with it.

CELLAR is the program with the feature `tier`; MOTO_SERVER is moto's server."""

import os
import secrets
import shutil
import subprocess
import tempfile
import unittest

from servers import Program, Server, completion, free_port

PROMPTS = [f"Number {n}. " + "Once upon a time there was a little girl. She had a big red ball. " * (6 + 3 * n)
           for n in range(6)]


class OverAStore:
    """What holds over any store."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.store, self.url = self.start()
        self.addCleanup(self.store.close)

    def key(self, name):
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        return path

    def server(self, key="key"):
        server = Server("-c", "8192", "-t", "1", "--tier", self.url, "--tier-key-file", self.key(key))
        self.addCleanup(server.close)
        return server

    def alone(self):
        server = Server("-c", "8192", "-t", "1")
        self.addCleanup(server.close)
        return [server.complete(prompt, 16)[0] for prompt in PROMPTS]

    def published(self, server):
        """Computes the prompts on a server, and waits until they are stored."""
        for prompt in PROMPTS:
            params = {"do_remote_decode": True}
            completion(server.port, prompt, 1, kv_transfer_params=params)

    def test_what_one_computed_the_others_find(self):
        texts = self.alone()
        self.published(self.server())
        cached = total = 0
        for _ in range(2):
            other = self.server()
            for prompt, wanted in zip(PROMPTS, texts):
                text, n_prompt, n_cached = other.complete(prompt, 16)
                self.assertEqual(text, wanted)
                # Where computing is faster than fetching, it is computed: not the first one.
                cached, total = cached + n_cached, total + n_prompt
        print(f"{type(self).__name__}: {cached} of {total} tokens came back")
        self.assertGreater(cached, 0)
        # With another key it is another store.
        stranger = self.server("other")
        self.assertEqual(stranger.complete(PROMPTS[0], 16)[::2], (texts[0], 0))

    def test_a_store_that_dies_takes_no_text_with_it(self):
        texts = self.alone()
        first, second = self.server(), self.server()
        self.published(first)
        self.assertEqual(second.complete(PROMPTS[0], 16)[0], texts[0])
        self.store.process.kill()
        self.store.process.wait(timeout=60)
        for server in (first, second):
            self.assertEqual([server.complete(prompt, 16)[0] for prompt in PROMPTS], texts)


@unittest.skipUnless(shutil.which("redis-server"), "there is no redis-server")
class Redis(OverAStore, unittest.TestCase):
    def start(self):
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        return Program(command, port), f"redis://127.0.0.1:{port}"


@unittest.skipUnless(os.environ.get("MOTO_SERVER"), "MOTO_SERVER is not set")
class S3(OverAStore, unittest.TestCase):
    def start(self):
        port = free_port()
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        server = Program([os.environ["MOTO_SERVER"], "-H", "127.0.0.1", "-p", str(port)], port)
        address = f"http://127.0.0.1:{port}"
        subprocess.run(["curl", "-sSf", "-X", "PUT", f"{address}/prefixes"], check=True, capture_output=True)
        return server, f"s3://prefixes?endpoint={address}&region=us-east-1"


if __name__ == "__main__":
    unittest.main(verbosity=2)
