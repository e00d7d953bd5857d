"""`kill -9` at random moments, over all kinds of memory, with a directory of cached prefixes: what was answered a while
before a kill is found after it, no text is another, and no file of the dead server stays. And models of all these kinds
that take turns in one server: what was answered before a model was unloaded is found when it is loaded again.

CELLAR is the program; CELLAR_KILLS the kills for each kind of memory (2), CELLAR_SWAPS how often each model is unloaded
(2), CELLAR_SEED a number that repeats a run.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

from servers import Server, ask

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
N_KILLS = int(os.environ.get("CELLAR_KILLS", "2"))
N_SWAPS = int(os.environ.get("CELLAR_SWAPS", "2"))
SEED = int(os.environ.get("CELLAR_SEED", time.time_ns() % 1_000_000))
# Seconds after which an answer's prefix has to be in the directory: it is written when there is nothing else to do.
WHILE = 2.0
# Prompts that are asked again after each restart.
N_AGAIN = 4
# A prefix that can be cut anywhere is stored in groups of 16 tokens; one with windows or states as a whole.
GROUPED = {"unified": 16, "latent": 16}
KINDS = {
    "unified": "models/stories-llama-f16.gguf",
    "iswa": "tests/fixtures/stories/stories-gemma3-f16.gguf",
    "recurrent": "tests/fixtures/stories/stories-mamba-f16.gguf",
    "hybrid": "jamba",
    "latent": "deepseek_v2",
}


def model(kind, folder):
    """The file of a model, or a directory that is made from its recipe."""
    name = KINDS[kind]
    if "/" in name:
        return os.path.join(ROOT, name)
    recipes = os.path.join(ROOT, "tests/fixtures")
    made = os.path.join(folder, name)
    subprocess.run([sys.executable, os.path.join(recipes, "recipe.py"), os.path.join(recipes, "recipes", name), made],
                   check=True, capture_output=True)
    # Prompts are tokens: any tokenizer of this size will do.
    shutil.copy(os.path.join(recipes, "tokenizers/spm512/tokenizer.json"), made)
    return made


def new_prompt(chance):
    """New tokens, which begin as others do: few of all tokens, so that recipes have them, too."""
    head = list(range(3, 43))
    return tuple(head + [chance.randrange(3, 60) for _ in range(chance.randrange(60, 300))])


class Killed:
    """A server that is killed and started again, with all that it was ever asked."""

    def __init__(self, case, kind, chance):
        self.case, self.chance = case, chance
        self.folder = tempfile.mkdtemp()
        case.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.model = model(kind, self.folder)
        self.group = GROUPED.get(kind, 1)
        self.cache = os.path.join(self.folder, "cache")
        self.answers = {}  # by prompt: the text, and when it came
        self.died = 0.0
        self.expected = self.reused = 0

    def start(self, *flags):
        return Server("-m", self.model, "-c", "4096", "-t", "1", "--parallel", "4", *flags)

    def prompt(self):
        return new_prompt(self.chance)

    def ask(self, server, prompt):
        body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, answer = ask(server.port, "POST", "/v1/completions", body)
        self.case.assertEqual(status, 200, answer)
        usage = answer["usage"]
        return answer["choices"][0]["text"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def found(self, server, prompt, before):
        """Tokens of a prompt that come back. A server computes what it would have to wait for longer, where the machine is
        busy: so others are asked, too, over the files as they were."""
        text, n_cached = self.ask(server, prompt)
        self.case.assertEqual(text, self.answers[prompt][0], "another text after a kill")
        wanted = (len(prompt) - 1) // self.group * self.group
        for number in range(3):
            if n_cached >= wanted:
                break
            copy = os.path.join(self.folder, f"copy-{number}")
            shutil.copytree(before, copy)
            again = self.start("--cache-dir", copy)
            n_cached = max(n_cached, self.ask(again, prompt)[1])
            again.kill()
            shutil.rmtree(copy)
        self.expected += wanted
        self.reused += min(n_cached, wanted)

    def one_life(self):
        """Starts the server, asks for what it knows and for more, and kills it at some moment."""
        before = os.path.join(self.folder, "before")
        shutil.rmtree(before, ignore_errors=True)
        if os.path.exists(self.cache):
            shutil.copytree(self.cache, before)
        server = self.start("--cache-dir", self.cache)
        try:
            parts = [name for name in os.listdir(self.cache) if name.endswith(".part")]
            self.case.assertEqual(parts, [], "files of a dead server stay")
            # The others may be there, too: that is not known.
            self.answers = {one: (text, at) for one, (text, at) in self.answers.items() if at < self.died - WHILE}
            sure = sorted(self.answers)
            for prompt in self.chance.sample(sure, min(N_AGAIN, len(sure))):
                self.found(server, prompt, before)
            # The first life is long enough for something that has to be found.
            least = 0.1 if self.answers else WHILE + 0.5
            until = time.monotonic() + self.chance.uniform(least, 2 * WHILE)
            while time.monotonic() < until:
                prompt = self.prompt()
                text, _ = self.ask(server, prompt)
                self.answers[prompt] = (text, time.monotonic())
                time.sleep(self.chance.uniform(0, 0.1))
        finally:
            server.kill()
        self.died = time.monotonic()

    def check_texts(self):
        """All texts are those of a server that nobody killed, and that keeps nothing."""
        server = self.start("--no-prefix-cache")
        self.case.addCleanup(server.close)
        for prompt in self.chance.sample(sorted(self.answers), min(20, len(self.answers))):
            self.case.assertEqual(self.ask(server, prompt)[0], self.answers[prompt][0])


class Kills(unittest.TestCase):
    def check(self, kind):
        chance = random.Random(f"{SEED} {kind}")
        killed = Killed(self, kind, chance)
        for _ in range(N_KILLS + 1):
            killed.one_life()
        killed.check_texts()
        part = killed.reused / max(1, killed.expected)
        print(f"{kind}: {N_KILLS} kills, {killed.reused} of {killed.expected} tokens reused ({100 * part:.1f} %), "
              f"seed {SEED}", flush=True)
        if killed.expected:
            self.assertGreaterEqual(part, 0.95, f"{kind}, seed {SEED}")

    def test_unified(self):
        self.check("unified")

    def test_iswa(self):
        self.check("iswa")

    def test_recurrent(self):
        self.check("recurrent")

    def test_hybrid(self):
        self.check("hybrid")

    def test_latent(self):
        self.check("latent")


class Swaps(unittest.TestCase):
    def test_models_that_take_turns_keep_their_prefixes(self):
        chance = random.Random(f"{SEED} swaps")
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        models = {kind: model(kind, folder) for kind in KINDS}
        flags = [flag for kind, file in models.items() for flag in ("-m", file)]
        server = Server("-c", "2048", "-t", "1", "--cache-dir", os.path.join(folder, "cache"), *flags)
        self.addCleanup(server.close)
        names = {kind: os.path.basename(file).removesuffix(".gguf") for kind, file in models.items()}
        answers = {kind: {} for kind in KINDS}
        expected = reused = 0
        for _ in range(N_SWAPS + 1):
            for kind, known in answers.items():
                prompts = chance.sample(sorted(known), min(2, len(known))) + [new_prompt(chance)]
                for prompt in prompts:
                    body = {"model": names[kind], "prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                    status, answer = ask(server.port, "POST", "/v1/completions", body)
                    self.assertEqual(status, 200, answer)
                    text = answer["choices"][0]["text"]
                    if prompt in known:
                        self.assertEqual(text, known[prompt], f"{kind}: another text after a swap")
                        wanted = (len(prompt) - 1) // GROUPED.get(kind, 1) * GROUPED.get(kind, 1)
                        expected += wanted
                        details = answer["usage"].get("prompt_tokens_details") or {}
                        reused += min(wanted, details.get("cached_tokens", 0))
                    known[prompt] = text
                status, answer = ask(server.port, "POST", "/models/unload", {"model": names[kind]})
                self.assertEqual(status, 200, answer)
        n_swaps = N_SWAPS * len(KINDS)
        print(f"{n_swaps} swaps, {reused} of {expected} tokens reused, seed {SEED}", flush=True)
        self.assertGreaterEqual(reused, 0.95 * expected, f"seed {SEED}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
