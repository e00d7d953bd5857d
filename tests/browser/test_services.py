"""The recipes of docs/how-to/operations.md that start the server as a service: systemd's checker reads the unit, and
the program is started with what the file, the container and the compose file give it."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest
import urllib.error
import urllib.request

import yaml
from page import Server
from recipes import put, recipe

MODEL = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../models/stories-llama-f16.gguf"))


class Services(unittest.TestCase):
    def starts(self, *flags, **variables):
        """The server starts with these, takes its key, and nobody without it."""
        server = Server("-c", "512", *flags, env={**os.environ, **variables})
        self.addCleanup(server.close)
        request = urllib.request.Request(f"{server.address}/v1/models", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request) as answer:
            self.assertEqual(answer.status, 200)
        with self.assertRaises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.address}/v1/models")
        self.assertEqual(refused.exception.code, 401)
        refused.exception.close()

    @unittest.skipUnless(shutil.which("systemd-analyze"), "there is no systemd-analyze")
    def test_systemd_takes_the_unit(self):
        unit = put(recipe("Run it as a service", "[Unit]"), {"/usr/local/bin/cellar": os.environ["CELLAR"]})
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "cellar.service")
            with open(path, "w") as file:
                file.write(unit)
            said = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
        self.assertEqual((said.returncode, said.stderr), (0, ""))

    def test_the_program_takes_the_file(self):
        with tempfile.TemporaryDirectory() as folder:
            keys, config = (os.path.join(folder, name) for name in ("keys", "cellar.toml"))
            with open(keys, "w") as file:
                file.write("secret\n")
            with open(config, "w") as file:
                file.write(put(recipe("Settings in a file or in variables", "# cellar serve --config"), {
                    '"qwen2.5-coder.gguf", "all-MiniLM-L6-v2/"': f'"{MODEL}"',
                    "/etc/cellar.keys": keys,
                }))
            self.starts("--config", config)

    def test_the_program_takes_what_the_containers_give_it(self):
        command = shlex.split(recipe("Run it as a service", "docker run").replace("\\\n", " "))
        at = command.index("cellar")
        variables = dict(command[n + 1].split("=", 1) for n, word in enumerate(command) if word == "-e")
        flags = [put(word, {"OWNER/NAME": MODEL}) if "/" in word else word for word in command[at + 2:]]
        self.assertEqual(command[at + 1], "serve")
        self.starts(*flags, **variables)

        file = yaml.safe_load(recipe("Run it as a service", "services:"))
        self.assertEqual(set(file), {"services", "volumes"})
        [(_, service)] = file["services"].items()
        known = {"image", "command", "environment", "ports", "volumes", "stop_grace_period", "restart"}
        self.assertEqual(set(service) - known, set())
        self.assertEqual(service["command"], ["serve"])
        of_service = {name: value for name, value in service["environment"].items() if name != "CELLAR_API_KEY"}
        self.assertRegex(service["environment"]["CELLAR_API_KEY"], re.escape("${CELLAR_API_KEY:?"))
        of_service["CELLAR_MODEL"] = put(of_service["CELLAR_MODEL"], {"OWNER/NAME": MODEL})
        self.starts(CELLAR_API_KEY="secret", **of_service)
        volume, place = service["volumes"][0].split(":")
        self.assertIn(volume, file["volumes"])
        with open(os.path.join(os.path.dirname(__file__), "../../Containerfile")) as container:
            self.assertIn(f"ENV HF_HOME={place}\n", container.read())


if __name__ == "__main__":
    unittest.main(verbosity=2)
