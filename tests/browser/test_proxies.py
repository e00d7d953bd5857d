"""Caddy and nginx in front of `cellar serve`, by the recipes of docs/how-to/operations.md word for word: only the
places of files and the numbers of ports are others. A client checks the proxy's certificate.

CADDY and NGINX are the programs."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
import unittest

import chrome
from page import PREFIX, STATE, Page
from recipes import put, recipe

NAME = "llm.example.org"
APP = "https://app.example.org"
SECTION = "Behind a proxy"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Proxy:
    """A proxy that listens on a port of its own; its certificates are signed by what `authority` has."""

    def __init__(self, command, port, authority):
        self.port, self.authority = port, authority
        log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + 30
        with log:
            while not self.is_ready():
                if self.process.poll() is not None or time.monotonic() > until:
                    self.close()
                    log.seek(0)
                    raise AssertionError(f"{command} does not start:\n{log.read()}")
                time.sleep(0.05)

    def is_ready(self):
        try:
            self.connect().close()
            return True
        except OSError:
            return False

    def connect(self):
        context = ssl.create_default_context(cafile=self.authority)
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        return context.wrap_socket(plain, server_hostname=NAME)

    def pieces(self, method, path, body=None, **headers):
        """What comes back, in the pieces in which the proxy sent it: one record of TLS each."""
        data = b"" if body is None else json.dumps(body).encode()
        all_headers = {"Host": NAME, "Connection": "close", "Content-Length": len(data),
                       "Content-Type": "application/json"}
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        with self.connect() as stream:
            stream.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
            pieces = []
            while piece := stream.recv(1 << 16):
                pieces.append(piece)
        return pieces

    def ask(self, *request, **headers):
        """The status, the headers and the body of an answer."""
        head, _, body = b"".join(self.pieces(*request, **headers)).partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:])
        headers = {name.lower(): value for name, value in pairs}
        return int(lines[0].split()[1]), headers, body.decode()

    def close(self):
        self.process.terminate()
        self.process.wait(timeout=30)


def caddy(folder, port, upstream):
    """Caddy makes the certificate itself; on the Internet it asks an authority for one."""
    site = put(recipe(SECTION, "llm.example.org {"), {"127.0.0.1:8080": upstream})
    options = (f"admin off\nlocal_certs\nskip_install_trust\nhttp_port {free_port()}\nhttps_port {port}\n"
               # Without it, Caddy waits at its end for connections that a browser keeps.
               f"storage file_system {folder}\ngrace_period 1s\n")
    path = os.path.join(folder, "Caddyfile")
    with open(path, "w") as file:
        file.write(f"{{\n{options}}}\n{site}")
    command = [os.environ["CADDY"], "run", "--adapter", "caddyfile", "--config", path]
    return Proxy(command, port, os.path.join(folder, "pki/authorities/local/root.crt"))


def nginx(folder, port, upstream):
    """nginx with the site that is in the page, and a certificate that signs itself."""
    certificate, key = (os.path.join(folder, f"site.{kind}") for kind in ("pem", "key"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
                    "-out", certificate, "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"],
                   check=True, capture_output=True)
    site = put(recipe(SECTION, "server {"), {
        "127.0.0.1:8080": upstream,
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/llm.example.org.pem": certificate,
        "/etc/ssl/llm.example.org.key": key,
    })
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n"
                    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;\n" if os.geteuid() == 0 else ""
    path = os.path.join(folder, "nginx.conf")
    with open(path, "w") as file:
        file.write(f"{user}daemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
                   f"http {{\naccess_log off;\n{paths}{site}}}\n")
    return Proxy([os.environ["NGINX"], "-p", folder, "-c", path], port, certificate)


class BehindAProxy:
    """What holds behind every proxy."""

    @classmethod
    def setUpClass(cls):
        # The browser comes to the proxy as a user's does: by its name, at the usual port.
        cls.port = free_port()
        rules = f"--host-resolver-rules=MAP {NAME}:443 127.0.0.1:{cls.port}"
        cls.browser = chrome.Chrome(chrome.find(), rules, "--ignore-certificate-errors")

    def behind(self, *flags):
        """The proxy, with a server behind it that is started with these flags."""
        server = self.serve("-c", "1024", "--max-client-connections", "0", *flags)
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        proxy = type(self).start(folder, self.port, server.address.removeprefix("http://"))
        self.addCleanup(proxy.close)
        # First, as a proxy waits for streams that are read.
        self.addCleanup(self.browser.go, "about:blank")
        return proxy

    def test_chats_and_streams_pass(self):
        proxy = self.behind("--allow-host", NAME)
        body = {"prompt": PREFIX, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        status, _, text = proxy.ask("POST", "/v1/completions", body)
        self.assertEqual(status, 200, text)
        self.assertIn('"completion_tokens":400', text)
        pieces = proxy.pieces("POST", "/v1/completions", {**body, "stream": True})
        events = sum(piece.count(b"data: ") for piece in pieces)
        # One event carries several tokens where the machine is busy: an eighth of 400 is far from all.
        self.assertGreater(events, 50)
        # A proxy that gathers an answer sends pieces of 4 KiB or more: eight events at once, not one or two.
        self.assertGreater(4 * len(pieces), events)
        self.assertIn(b"data: [DONE]", b"".join(pieces))

    def test_hosts_are_checked(self):
        proxy = self.behind()
        status, _, text = proxy.ask("GET", "/v1/models")
        self.assertEqual(status, 403)
        self.assertIn("--allow-host NAME", text)
        proxy.close()
        proxy = self.behind("--allow-host", NAME)
        self.assertEqual(proxy.ask("GET", "/v1/models")[0], 200)
        # A page of another site whose name leads here finds nothing.
        status, _, text = proxy.ask("GET", "/v1/models", Host="evil.example")
        self.assertNotIn("stories", text)
        proxy.close()
        # Where a key is needed, any name will do.
        proxy = self.behind("--api-key", "secret")
        self.assertEqual(proxy.ask("GET", "/v1/models")[0], 401)
        status, _, text = proxy.ask("GET", "/v1/models", Authorization="Bearer secret")
        self.assertEqual(status, 200, text)

    def test_pages_of_other_origins_ask_first(self):
        proxy = self.behind("--allow-host", NAME, "--allow-origin", APP)
        asked = {"Access_Control_Request_Method": "POST",
                 "Access_Control_Request_Headers": "authorization,x-stainless-os"}
        status, headers, _ = proxy.ask("OPTIONS", "/v1/chat/completions", Origin=APP, **asked)
        self.assertEqual((status, headers["access-control-allow-origin"]), (204, APP))
        self.assertEqual(headers["access-control-allow-headers"], "authorization,x-stainless-os")
        status, headers, _ = proxy.ask("GET", "/v1/models", Origin=APP)
        self.assertEqual((status, headers["access-control-allow-origin"]), (200, APP))
        status, headers, _ = proxy.ask("OPTIONS", "/v1/models", Origin="https://evil.example", **asked)
        self.assertNotIn("access-control-allow-origin", headers)

    def test_the_page_chats(self):
        self.behind("--allow-host", NAME)
        b = self.browser
        b.go(f"https://{NAME}/")
        b.wait(f"typeof cellarView !== 'undefined' && {STATE}.shown")
        self.set("max_tokens", "24")
        self.say(PREFIX)
        b.wait("document.querySelector('#chat-log .usage')")
        self.assertIn("24 tokens", b.run("document.querySelector('#chat-log .usage').textContent"))
        # The live view is a stream, too, and goes on.
        b.wait(f"{STATE}.history.events.some((one) => one.kind === 'ended')")
        self.console_is_clean()


class Caddy(BehindAProxy, Page):
    start = staticmethod(caddy)


class Nginx(BehindAProxy, Page):
    start = staticmethod(nginx)


if __name__ == "__main__":
    unittest.main(verbosity=2)
