"""The live view in a real browser, against `cellar serve` with the model that is compiled into it."""

import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest

from page import PREFIX, STATE, Page


class View(Page):
    def pixels(self):
        """How many different colours the map of the first part has."""
        return self.browser.run("""(() => {
            const canvas = document.querySelector('#parts canvas');
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
            return seen.size;
        })()""")

    def test_two_conversations_share_cells(self):
        server = self.serve("-c", "1024", "--parallel", "8")
        self.open(server)
        b = self.browser
        numbers = "['n-running', 'n-cached', 'n-free'].map((id) => document.getElementById(id).textContent)"
        self.assertEqual(b.run(numbers), ["0 %", "0 %", "100 %"])
        empty = self.pixels()
        self.set("max_tokens", "32")
        self.say(PREFIX + " One day")
        b.wait("document.querySelector('#chat-log .usage')")
        b.run("document.getElementById('chat-new').click()")
        self.say(PREFIX + " The dog")
        b.wait("document.querySelector('#chat-log .usage')")
        usage = b.run("document.querySelector('#chat-log .usage').textContent")
        cached = int(re.search(r"(\d+) of them cached", usage)[1])
        self.assertGreater(cached, 15, usage)
        # The map shows as many shared cells as the API reports.
        b.wait(f"{STATE}.shown.totals.shared === {cached}")
        shown = b.run("document.getElementById('n-shared').textContent")
        self.assertEqual(int(shown), cached)
        self.assertGreater(self.pixels(), empty + 3)
        b.wait("document.querySelectorAll('#cached .card').length === 2")
        events = b.run("document.getElementById('events').textContent")
        self.assertIn(f"shares {cached} cells", events)
        self.assertIn("differs from what is cached at token", events)
        # Prompts are not shown: neither in the page's data nor in its lists.
        data = b.run(f"JSON.stringify({STATE}.history.snapshots.map((s) => [s.running, s.cached, s.events]))")
        self.assertNotIn("Lily", data)
        self.assertNotIn("Lily", b.run("document.querySelector('.side').textContent"))
        self.console_is_clean()

    def test_an_eviction_is_seen(self):
        server = self.serve("-c", "160", "--parallel", "4")
        self.open(server)
        b = self.browser
        for n, beginning in enumerate(["Once upon a time", "One day", "Tom and Anna", "The sun"]):
            server.complete(f"{beginning}, {PREFIX} {n}", 60)
        b.wait("document.querySelector('#events [data-kind=dropped-evicted]')")
        text = b.run("document.querySelector('#events [data-kind=dropped-evicted]').textContent")
        self.assertIn("evicted for others", text)
        b.wait("Number(document.querySelector('#parts canvas').dataset.evictions) > 0")
        self.assertGreater(int(b.run("document.getElementById('n-evicted').textContent")), 0)
        self.console_is_clean()

    def test_the_stream_reconnects_without_a_gap(self):
        server = self.serve("-c", "1024", "--parallel", "4")
        self.open(server)
        b = self.browser
        server.complete(PREFIX, 8)
        b.wait(f"{STATE}.history.events.some((e) => e.kind === 'ended')")
        # While there is no network, so that the request comes and ends when nobody watches.
        b.run("globalThis.network = fetch; globalThis.fetch = () => Promise.reject(new Error('no network'))")
        b.run("cellarView.stream.cut()")
        b.wait("document.getElementById('problem').textContent.includes('no network')")
        self.assertEqual(b.run("document.getElementById('status').dataset.state"), "lost")
        server.complete(PREFIX + " It was", 8)
        b.run("globalThis.fetch = network")
        b.wait("document.getElementById('status').dataset.state === 'live'")
        b.wait(f"{STATE}.history.events.filter((e) => e.kind === 'ended').length === 2")
        numbers = b.run(f"{STATE}.history.events.map((e) => e.n)")
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))))
        self.console_is_clean()

    def test_pause_step_and_select_with_the_keyboard(self):
        server = self.serve("-c", "1024", "--parallel", "4")
        self.open(server)
        b = self.browser
        for n in range(3):
            server.complete(f"{PREFIX} {n}", 8)
            b.wait(f"{STATE}.history.events.filter((e) => e.kind === 'ended').length === {n + 1}")
        # The last update has the end of the last request, and the memory after it; it is drawn later.
        b.wait(f"{STATE}.shown === {STATE}.history.snapshots.at(-1)")
        b.run("document.activeElement.blur()")
        used = b.run("document.querySelector('#parts canvas').dataset.used")
        b.key(" ", "Space")
        b.wait("document.getElementById('status').dataset.state === 'paused'")
        last = b.run("Number(document.getElementById('scrub').value)")
        while b.run(f"{STATE}.paused") > 0:
            b.key("ArrowLeft")
            last -= 1
            b.wait(f"{STATE}.paused === {last}")
        b.wait("document.querySelector('#parts canvas').dataset.used === '0'")
        self.assertEqual(b.run("document.querySelectorAll('#cached .card').length"), 0)
        b.key(" ", "Space")
        b.wait(f"document.querySelector('#parts canvas').dataset.used === '{used}'")
        # Every control is reached by Tab, has a name, and shows that it has the focus.
        names = set()
        for _ in range(90):
            b.key("Tab")
            name = b.run("""(() => { const e = document.activeElement; if (e === document.body) return '';
                const ring = getComputedStyle(e).outlineStyle !== 'none' || e.matches('.skip');
                return (ring ? '' : 'NO RING ') + (e.getAttribute('aria-label') || e.textContent.trim()
                    || e.labels?.[0]?.textContent || e.title || 'NO NAME ' + e.outerHTML); })()""")
            names.add(name)
        bad = [name for name in names if name.startswith("NO ")]
        self.assertEqual(bad, [])
        self.assertTrue(any("Arrow keys move over the cells" in name for name in names), names)
        b.run("document.querySelector('#cached .card').focus()")
        b.key("Enter")
        b.wait("!document.getElementById('selected').hidden")
        facts = b.run("document.getElementById('selected').textContent")
        self.assertRegex(facts, r"cells.*of which \d+ are shared")
        b.key("Escape")
        b.wait("document.getElementById('selected').hidden")
        self.console_is_clean()

    def test_a_key_is_asked_for(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("secret-key\n")
            keys.flush()
            server = self.serve("-c", "256", "--api-key-file", keys.name)
            b = self.browser
            b.go(server.address + "/")
            b.wait("!document.getElementById('key-form').hidden")
            self.assertFalse(b.run(f"Boolean({STATE}.layout)"))
            b.run("document.getElementById('key').focus()")
            b.type("secret-key")
            b.key("Enter")
            b.wait(f"{STATE}.shown")
            self.assertTrue(b.run("document.getElementById('key-form').hidden"))
            self.assertEqual(b.run("document.getElementById('key').value"), "")
            stored = b.run("localStorage.length + sessionStorage.length + document.cookie.length")
            self.assertEqual(stored, 0)

    def test_many_requests_at_once(self):
        server = self.serve("-c", "2048", "--parallel", "12", "--temp", "0.8")
        self.open(server)
        b = self.browser
        starts = ["Tom and Sue went to the park.", "The big cat sat in the sun all day.",
                  "Ben had a blue car.", PREFIX, PREFIX + " She was happy.", PREFIX + " The dog ran."]
        threads = []
        for n in range(22):
            n_tokens = [60, 150, 30, 90][n % 4] if n < 10 else 400
            prompt = f"{starts[n % 6]} It was day {n}."
            threads.append(threading.Thread(target=server.complete, args=(prompt, n_tokens),
                                            kwargs={"temperature": 0.8, "seed": n}))
            threads[-1].start()
        self.say(PREFIX + " The dog")
        b.wait(f"{STATE}.shown.running.length > 4 && {STATE}.shown.cached.length > 1", 60)
        b.wait("document.querySelectorAll('#running .bar[aria-valuenow]').length > 4")
        self.picture("live-view.webp")
        b.dark(True)
        b.wait("document.documentElement.dataset.theme === 'dark'")
        b.wait(f"{STATE}.shown === {STATE}.history.snapshots.at(-1)")
        self.picture("live-view-dark.png")
        for thread in threads:
            thread.join()
        b.wait(f"{STATE}.shown.running.length === 0", 60)
        self.console_is_clean()

    def test_experts_are_a_map_beside_the_cells(self):
        script = os.path.join(os.path.dirname(__file__), "../../scripts/mixture.py")
        shape = "--layers 2 --experts 8 --used 2 --dim 256 --inner 256".split()
        with tempfile.TemporaryDirectory() as folder:
            model = os.path.join(folder, "mixture.gguf")
            subprocess.run([sys.executable, script, model, *shape], check=True, capture_output=True)
            server = self.serve("-m", model, "-c", "256", "--expert-memory", "1M")
            self.open(server)
            b = self.browser
            b.wait("!document.getElementById('experts').hidden")
            canvas = "document.querySelector('#experts canvas')"
            server.complete("Once upon", 20)
            b.wait(f"Number({canvas}.dataset.resident) > 0")
            b.wait(f"{STATE}.history.events.some((e) => e.kind === 'ended')")
            b.wait(f"{STATE}.shown === {STATE}.history.snapshots.at(-1)")
            there = b.run(f"[...{STATE}.shown.experts.resident].filter((n) => n > 0).length")
            self.assertEqual(int(b.run(f"{canvas}.dataset.resident")), there)
            caption = b.run("document.querySelector('#experts figcaption').textContent")
            self.assertIn("at most 1.0 MiB", caption)
            self.assertRegex(caption, r"\d+ of \d+ experts, \d+ % hits")
            b.run(f"{canvas}.focus()")
            b.key("ArrowRight")
            tip = b.run("document.getElementById('tip').textContent")
            self.assertRegex(tip, r"Mixture 0, expert 0: in (memory|the file); chosen in \d+ steps?, found in memory in \d+")
            self.picture("experts.png")
            # An earlier snapshot has the experts of its moment.
            b.run("document.activeElement.blur()")
            b.key(" ", "Space")
            while b.run(f"{STATE}.paused") > 0:
                b.run("document.getElementById('back').click()")
            b.wait(f"{STATE}.shown === {STATE}.history.snapshots[0]")
            before = b.run(f"{STATE}.shown.experts.uses.reduce((a, b) => a + b, 0)")
            after = b.run(f"{STATE}.history.snapshots.at(-1).experts.uses.reduce((a, b) => a + b, 0)")
            self.assertLess(before, after)
            self.console_is_clean()

    def test_a_model_is_chosen(self):
        model = os.path.join(os.path.dirname(__file__), "../../models/stories-llama-f16.gguf")
        with tempfile.TemporaryDirectory() as folder:
            # Names as long as those of files are.
            names = [f"{name}-a-model-of-stories-with-a-long-name-q4_k_m" for name in ("first", "second")]
            for name in names:
                os.symlink(os.path.abspath(model), os.path.join(folder, f"{name}.gguf"))
            files = [flag for name in names for flag in ("-m", os.path.join(folder, f"{name}.gguf"))]
            server = self.serve(*files, "-c", "512", "--parallel", "4")
            b = self.browser
            b.size(400, 860)
            self.open(server)
            server.complete(PREFIX, 8, model=names[1])
            choice = "document.getElementById('model-choice')"
            b.wait(f"!{choice}.hidden")
            self.assertEqual(b.run(f"[...{choice}.options].map((one) => one.textContent)"), names)
            self.assertEqual(b.run(f"{choice}.value"), names[0])
            self.assertEqual(b.run("document.getElementById('n-free').textContent"), "100 %")
            self.assertLessEqual(b.run("document.documentElement.scrollWidth"), 400)
            # With the keyboard: the next of the list.
            b.run(f"{choice}.focus()")
            b.key("ArrowDown")
            b.wait(f"{STATE}.layout.model === '{names[1]}'")
            b.wait(f"{STATE}.shown && {STATE}.shown.totals.cached > 0")
            self.picture("models.png")
            # The choice is in the address.
            self.assertIn(f"?model={names[1]}", b.run("location.href"))
            b.go(b.run("location.href"))
            b.wait(f"typeof cellarView !== 'undefined' && {STATE}.layout?.model === '{names[1]}'")
            self.assertEqual(b.run(f"{choice}.value"), names[1])
            # A conversation can have another one than is watched: its chat template is asked for, in vain here.
            b.run("""globalThis.asked = [];
                const network = fetch;
                globalThis.fetch = (url, options) => {
                    if (options?.body) asked.push([url, JSON.parse(options.body).model]);
                    return network(url, options);
                };""")
            self.set("model", names[0])
            self.set("max_tokens", "8")
            self.say(PREFIX)
            b.wait("document.querySelector('#chat-log .usage')")
            self.assertEqual(b.run("asked"), [["v1/chat/completions", names[0]], ["v1/completions", names[0]]])

    def test_it_is_readable_on_a_phone(self):
        server = self.serve("-c", "1024", "--parallel", "4")
        b = self.browser
        b.size(400, 860)
        self.open(server)
        server.complete(PREFIX, 30)
        b.wait("document.querySelectorAll('#cached .card').length === 1")
        # Nothing is cut off at the side.
        self.assertLessEqual(b.run("document.documentElement.scrollWidth"), 400)
        self.assertLessEqual(b.run("document.querySelector('#parts canvas').getBoundingClientRect().right"), 400)
        self.picture("phone.png", whole=True)
        self.console_is_clean()


if __name__ == "__main__":
    unittest.main(verbosity=2)
