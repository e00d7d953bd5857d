"""The program that serves the page, and a browser that has it open.

CELLAR is the program; PICTURES a folder for pictures, where they are wanted."""

import json
import os
import re
import subprocess
import unittest
import urllib.request

import chrome

PREFIX = "Once upon a time there was a little girl named Lily who had a big red ball and a small dog."
STATE = "cellarView.state"


class Server:
    def __init__(self, *flags, env=None):
        command = [os.environ["CELLAR"], "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        for line in self.process.stderr:
            if found := re.search(r"http://[\d.]+:\d+", line):
                self.address = found[0]
                return
        raise AssertionError("the server does not start")

    def complete(self, prompt, n, **more):
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0, **more}
        request = urllib.request.Request(f"{self.address}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=60)
        self.process.stderr.close()


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = chrome.Chrome(chrome.find())

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()

    def setUp(self):
        self.browser.run("0")  # takes in what came since the last command
        self.browser.console.clear()
        self.browser.size(1440, 900)
        self.browser.dark(False)

    def serve(self, *flags):
        server = Server(*flags)
        self.addCleanup(server.close)
        # First, so that no page looks for a server that is gone, and complains in the test after this.
        self.addCleanup(self.browser.go, "about:blank")
        return server

    def open(self, server):
        self.browser.go(server.address + "/")
        self.browser.wait(f"typeof cellarView !== 'undefined' && {STATE}.shown")

    def picture(self, name, whole=False):
        if folder := os.environ.get("PICTURES"):
            self.browser.picture(os.path.join(folder, name), whole)

    def console_is_clean(self):
        self.browser.run("0")
        self.assertEqual(self.browser.console, [])

    def set(self, name, value):
        """Sets one of the settings of the conversation."""
        self.browser.run(f"""(() => {{ const box = document.getElementById('set-{name}');
            box.value = {json.dumps(value)}; box.dispatchEvent(new Event('change')); }})()""")

    def say(self, text):
        """Writes in the chat, as a person does."""
        b = self.browser
        b.run("document.getElementById('chat-input').focus()")
        b.type(text)
        b.key("Enter")
        b.wait("document.querySelector('#chat-log .say')")
