"""A web app of another origin in a real browser: it asks first (preflight), and reads an answer as it comes."""

import http.server
import threading
import unittest

import chrome
from page import PREFIX, Page

APP = "http://app.example.org"

ASK = """(async () => {
    const headers = { "content-type": "application/json", authorization: "Bearer secret", "x-stainless-lang": "js" };
    const body = JSON.stringify({ prompt: %r, max_tokens: 240, temperature: 0, ignore_eos: true, stream: true });
    const answer = await fetch("%s/v1/completions", { method: "POST", headers, body });
    const reader = answer.body.getReader();
    const decoder = new TextDecoder();
    let pieces = 0, text = "";
    for (let next; !(next = await reader.read()).done; pieces += 1) text += decoder.decode(next.value, { stream: true });
    return { status: answer.status, id: answer.headers.get("x-request-id"), pieces, events: text.split("data: ").length - 1 };
})().catch((error) => ({ error: String(error) }))"""


class Empty(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><link rel=icon href=data:,><title>An app</title>")

    def log_message(self, *_):
        pass


class Origins(Page):
    @classmethod
    def setUpClass(cls):
        cls.site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
        threading.Thread(target=cls.site.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{cls.site.server_port}"
        rules = ",".join(f"MAP {name}.example.org:80 {place}" for name in ("app", "other"))
        cls.browser = chrome.Chrome(chrome.find(), f"--host-resolver-rules={rules}")

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.site.shutdown()
        cls.site.server_close()

    def ask(self, server):
        return self.browser.run(ASK % (PREFIX, server.address))

    def test_an_app_that_is_named_streams_an_answer(self):
        for keys in [(), ("--api-key", "secret")]:
            server = self.serve("-c", "512", "--allow-origin", APP, *keys)
            self.browser.go(APP)
            answer = self.ask(server)
            self.assertEqual(answer.get("status"), 200, answer)
            # 240 tokens: one event carries several where the machine is busy, an eighth is far from all.
            self.assertGreater(answer["events"], 30)
            self.assertGreater(answer["pieces"], 10, "it comes in pieces")
            self.assertIsNotNone(answer["id"], "a page reads headers, too")
            self.console_is_clean()
            # Another app on the same machine is not named.
            self.browser.go("http://other.example.org")
            self.assertIn("Failed to fetch", self.ask(server)["error"])
            self.browser.run("0")
            self.assertIn("blocked by CORS policy", " ".join(self.browser.console))
            self.browser.console.clear()

    def test_no_app_is_named_without_the_flag(self):
        server = self.serve("-c", "512", "--api-key", "secret")
        self.browser.go(APP)
        self.assertIn("Failed to fetch", self.ask(server)["error"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
