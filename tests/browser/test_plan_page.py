"""The page that plans, in a real browser: its numbers are those of `cellar plan`.

PAGE is the folder that crates/plan-page/build made, CELLAR the program."""

import functools
import http.server
import json
import os
import re
import struct
import subprocess
import tempfile
import threading
import unittest

import chrome

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
FIXTURES = os.path.join(ROOT, "tests", "fixtures")
STORIES = os.path.join(ROOT, "models", "stories-llama-f16.gguf")
# Of the program as it is fetched: packed.
MOST_BYTES = 460_000
FIELDS = ["architecture", "n_ctx", "n_seqs", "streams", "parts", "layers", "rows", "by_kind", "n_bytes", "memory",
          "weights"]


class Files(http.server.SimpleHTTPRequestHandler):
    """A server of files with ranges, from which other pages may read."""

    def send_head(self):
        wanted = self.headers.get("Range")
        path = self.translate_path(self.path)
        if wanted is None or not os.path.isfile(path):
            return super().send_head()
        first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()
        file = open(path, "rb")
        size = os.fstat(file.fileno()).st_size
        first, last = int(first), min(int(last), size - 1)
        file.seek(first)
        self.send_response(206)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        self.wfile.write(file.read(last - first + 1))
        file.close()
        return None

    def end_headers(self):
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Access-Control-Allow-Headers", "Range")
        super().end_headers()

    def do_OPTIONS(self):
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def serve(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def stop():
        server.shutdown()
        server.server_close()

    return stop, f"http://127.0.0.1:{server.server_address[1]}"


def planned(path, *flags):
    command = [os.environ["CELLAR"], "plan", path, "--json", "--backend", "cpu", *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)


def write_directory(recipe, to):
    """The directory of a recipe, with zeros for values."""
    folder = os.path.join(FIXTURES, "recipes", recipe)
    with open(os.path.join(folder, "recipe.json")) as file:
        tensors = json.load(file)["tensors"]
    with open(os.path.join(folder, "config.json")) as file:
        config = file.read()
    with open(os.path.join(to, "config.json"), "w") as file:
        file.write(config)
    header, end = {}, 0
    for tensor in tensors:
        n = 4
        for dim in tensor["shape"]:
            n *= dim
        header[tensor["name"]] = {"dtype": "F32", "shape": tensor["shape"], "data_offsets": [end, end + n]}
        end += n
    text = json.dumps(header).encode()
    with open(os.path.join(to, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return [os.path.join(to, name) for name in ("config.json", "model.safetensors")]


def write_large(path):
    """A mixture of experts with tensors of 2^32 values: more than a browser's 32 bits can count. Its file has holes
    where its values are."""
    width, hidden, experts, vocab = 4096, 2048, 512, 32000
    keys = {"block_count": 2, "context_length": 32768, "embedding_length": width, "feed_forward_length": hidden,
            "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128,
            "attention.value_length": 128, "expert_count": experts, "expert_used_count": 8,
            "expert_feed_forward_length": hidden}
    tensors = [("token_embd", [vocab, width]), ("output_norm", [width]), ("output", [vocab, width])]
    for layer in range(2):
        of_layer = {"attn_norm": [width], "attn_q": [32 * 128, width], "attn_k": [4 * 128, width],
                    "attn_v": [4 * 128, width], "attn_output": [width, 32 * 128], "attn_q_norm": [128],
                    "attn_k_norm": [128], "ffn_norm": [width], "ffn_gate_inp": [experts, width],
                    "ffn_gate_exps": [experts, hidden, width], "ffn_up_exps": [experts, hidden, width],
                    "ffn_down_exps": [experts, width, hidden]}
        tensors += [(f"blk.{layer}.{name}", shape) for name, shape in of_layer.items()]

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    body = text("general.architecture") + struct.pack("<I", 8) + text("qwen3moe")
    for key, value in keys.items():
        body += text(f"qwen3moe.{key}") + struct.pack("<II", 4, value)
    body += text("qwen3moe.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-6)
    end = 0
    for name, shape in tensors:
        body += text(f"{name}.weight") + struct.pack("<I", len(shape))
        body += b"".join(struct.pack("<Q", dim) for dim in reversed(shape))
        code = 0 if len(shape) == 1 else 1
        body += struct.pack("<IQ", code, end)
        n = 4 if code == 0 else 2
        for dim in shape:
            n *= dim
        end += -(-n // 32) * 32
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys) + 2) + body
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(-(-len(header) // 32) * 32 + end)


class PlanPage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.browser = chrome.Chrome(chrome.find())
        stop, cls.address = serve(os.environ["PAGE"])
        cls.addClassCleanup(stop)

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()

    def setUp(self):
        self.browser.console.clear()
        self.browser.size(1440, 900)
        self.browser.dark(False)
        self.browser.go(self.address + "/index.html")
        self.browser.wait("typeof planPage !== 'undefined' && planPage.isReady")

    def drop(self, *paths):
        found = self.browser.call("Runtime.evaluate", expression="document.getElementById('files')")
        self.browser.call("DOM.setFileInputFiles", objectId=found["result"]["objectId"], files=list(paths))
        self.browser.wait("planPage.plan || !document.getElementById('problem').hidden")

    def choose(self, **values):
        for name, value in values.items():
            self.browser.run(f"document.getElementById('{name}').value = {json.dumps(value)}")
        self.browser.run("""planPage.plan = null;
            document.getElementById('options').dispatchEvent(new Event('change'))""")
        self.browser.wait("planPage.plan || !document.getElementById('problem').hidden")

    def plan(self):
        plan = self.browser.run("planPage.plan")
        self.assertIsNotNone(plan, self.problem())
        return plan

    def problem(self):
        return self.browser.run("document.getElementById('problem').textContent")

    def same(self, plan, wanted, name):
        for field in FIELDS:
            self.assertEqual(plan.get(field), wanted.get(field), f"{name}: {field}")

    def picture(self, name):
        if folder := os.environ.get("PICTURES"):
            self.browser.picture(os.path.join(folder, name), whole=True)

    def console_is_clean(self):
        self.browser.run("0")
        self.assertEqual(self.browser.console, [])

    def test_files_give_the_bytes_of_the_program(self):
        folder = os.path.join(FIXTURES, "stories")
        paths = [STORIES, *(os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".gguf"))]
        self.assertGreater(len(paths), 2)
        for path in paths:
            self.browser.run("planPage.plan = null")
            self.drop(path)
            self.same(self.plan(), planned(path), path)
        # Of more than 32 bits can count.
        self.choose(n_ctx="1048576", n_seqs="64", streams="per_sequence", k="q8_0", v="f32", room="16")
        flags = ["-c", "1048576", "--seqs", "64", "--streams", "--kv-type-k", "q8_0", "--kv-type-v", "f32"]
        wanted = planned(paths[-1], *flags)
        self.same(self.plan(), wanted, flags)
        fits = self.browser.run("document.getElementById('fits').textContent")
        largest = self.plan()["largest_n_ctx"]
        if largest is not None:
            self.assertIn(f"{largest:,}", fits)
        self.console_is_clean()

    def test_the_largest_context_is_that_which_fits(self):
        self.drop(STORIES)
        self.choose(room="1")
        largest = self.plan()["largest_n_ctx"]
        for n_ctx, fits in [(largest, True), (largest + 1, False)]:
            self.choose(n_ctx=str(n_ctx))
            plan = self.plan()
            self.assertEqual(plan["memory"] + plan["weights"] <= 1 << 30, fits, n_ctx)
        self.assertIn("do not fit", self.browser.run("document.getElementById('fits').textContent"))
        self.picture("plan-full.png")

    def test_directories_give_the_bytes_of_the_program(self):
        for recipe in ["gemma3_iswa8", "falcon_h1", "deepseek_v2", "mamba2", "qwen3_moe"]:
            if not os.path.exists(os.path.join(FIXTURES, "recipes", recipe, "config.json")):
                continue
            with tempfile.TemporaryDirectory() as folder:
                self.browser.run("planPage.plan = null")
                self.drop(*write_directory(recipe, folder))
                self.same(self.plan(), planned(folder), recipe)
        self.console_is_clean()

    def test_a_model_larger_than_a_browser_can_hold(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "large.gguf")
            write_large(path)
            self.drop(path)
            wanted = planned(path)
            self.assertGreater(wanted["weights"], 48 << 30)
            self.same(self.plan(), wanted, path)
            self.picture("plan-large.png")

    def test_an_address_is_read_in_ranges(self):
        stop, address = serve(os.path.join(ROOT, "models"))
        self.addCleanup(stop)
        self.browser.run(f"""document.getElementById('url').value = '{address}/stories-llama-f16.gguf';
            document.getElementById('address').requestSubmit()""")
        self.browser.wait("planPage.plan || !document.getElementById('problem').hidden")
        self.same(self.plan(), planned(STORIES), address)
        with tempfile.TemporaryDirectory() as folder:
            write_directory("mamba2", folder)
            stop, address = serve(folder)
            self.addCleanup(stop)
            self.browser.run(f"""planPage.plan = null; document.getElementById('url').value = '{address}/';
                document.getElementById('address').requestSubmit()""")
            self.browser.wait("planPage.plan || !document.getElementById('problem').hidden")
            self.same(self.plan(), planned(folder), address)

    def test_the_beginning_of_a_file_is_enough_and_what_is_none_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "cut.gguf")
            with open(STORIES, "rb") as file, open(path, "wb") as cut:
                cut.write(file.read(os.path.getsize(STORIES) // 2))
            self.drop(path)
            self.same(self.plan(), planned(STORIES), path)
            self.assertIn("beginning", self.browser.run("document.getElementById('reading').textContent"))
            other = os.path.join(folder, "notes.txt")
            with open(other, "w") as file:
                file.write("no model at all")
            self.browser.run("planPage.plan = null")
            self.drop(other)
            self.assertIn("notes.txt", self.problem())
            self.browser.run("planPage.plan = null")
            self.drop(STORIES)
            self.same(self.plan(), planned(STORIES), STORIES)

    def test_every_walk_is_walked(self):
        b = self.browser
        b.run("document.getElementById('view-walk').click()")
        n = b.run("document.getElementById('walks').children.length")
        self.assertEqual(n, 5)
        refused = 0
        for i in range(n):
            b.run(f"document.getElementById('walks').children[{i}].click()")
            while not b.run("document.getElementById('next').disabled"):
                b.run("document.getElementById('next').click()")
                refused += b.run("!document.getElementById('refused').hidden")
                self.assertTrue(b.run("document.querySelector('#cells .cell') && document.getElementById('says').textContent"))
            self.picture(f"walk-{i}.png")
        self.assertGreaterEqual(refused, 4)
        b.run("document.getElementById('walks').children[1].click()")
        for _ in range(2):
            b.key("ArrowRight")
        self.assertEqual(b.run("document.querySelectorAll('#cells .seq-both').length"), 4)
        self.console_is_clean()

    def test_it_reads_well_on_a_small_screen_and_in_the_dark(self):
        b = self.browser
        b.dark(True)
        b.wait("document.documentElement.dataset.theme === 'dark'")
        self.drop(os.path.join(FIXTURES, "stories", "stories-gemma3-f16.gguf"))
        self.picture("plan-dark.png")
        b.size(390, 844)
        self.assertLessEqual(b.run("document.documentElement.scrollWidth"), 390)
        self.picture("plan-small.png")

    def test_the_program_in_it_is_small(self):
        size = os.path.getsize(os.path.join(os.environ["PAGE"], "plan_page.wasm.gz"))
        self.assertLessEqual(size, MOST_BYTES)


if __name__ == "__main__":
    unittest.main()
