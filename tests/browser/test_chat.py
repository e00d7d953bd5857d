"""The chat of the page in a real browser. Where a test is about what is shown, it gives the answers itself."""

import json
import tempfile
import unittest

from page import PREFIX, STATE, Page

CHAT = "cellarView.chat"
LAST = "[...document.querySelectorAll('#chat-log .say')].at(-1)"

ANSWER = """# Title
Some **bold** text, a formula $a_1 * b_1$ and \\(x_2 * y_2\\).

| Name | Number |
| --- | ---: |
| one | 1 |

```python
print("hello")
```
<img src=x onerror="globalThis.ran = 1"><script>globalThis.ran = 1</script>
![picture](https://example.invalid/a.png) [bad](javascript:globalThis.ran=1) [good](https://example.invalid/)
"""

SHOWN = """A **KV cache** keeps what a model has computed of earlier tokens, so that it need not compute it again:

| Token | Key | Value |
| --- | ---: | ---: |
| Once | 0.12 | 0.80 |
| upon | 0.47 | 0.33 |

```python
cache.append(key(token), value(token))
```
"""


class Chats(Page):
    def answers(self, *answers):
        """Lets the chat get these answers, as `(text, finish_reason)`, in place of the model's; gives what it
        has sent."""
        self.browser.run(f"""(() => {{
            const answers = {json.dumps(answers)};
            globalThis.sent = [];
            const network = globalThis.fetch;
            const reply = (events) => new Response(events.map((e) => `data: ${{JSON.stringify(e)}}\\n\\n`).join("") + "data: [DONE]\\n\\n");
            globalThis.fetch = async (url, options) => {{
                if (!["v1/chat/completions", "v1/completions", "apply-template"].includes(url)) return network(url, options);
                const body = JSON.parse(options.body);
                sent.push([url, body]);
                if (url === "apply-template") return new Response(JSON.stringify({{ prompt: `<${{body.messages.length}}>` }}));
                const [text, finish_reason] = answers.shift();
                await globalThis.gate;
                const part = url === "v1/completions" ? {{ text }} : {{ delta: {{ content: text }} }};
                const usage = {{ prompt_tokens: 40, completion_tokens: 8, prompt_tokens_details: {{ cached_tokens: 30 }} }};
                return reply([{{ choices: [part] }}, {{ choices: [{{ delta: {{}}, finish_reason }}] }}, {{ choices: [], usage }}]);
            }};
            {CHAT}.layouts.get({CHAT}.model).can_chat = true;
            {CHAT}.draw();
        }})()""")

    def press(self, name):
        """Presses a button of the last turn."""
        self.browser.run(f"[...{LAST}.querySelectorAll('button')].find((one) => one.textContent === {json.dumps(name)}).click()")
        self.rest()

    def rest(self):
        self.browser.wait(f"{CHAT}.running.size === 0")

    def turns(self):
        return self.browser.run("[...document.querySelectorAll('#chat-log .say .body')].map((one) => one.textContent.trim())")

    def test_markdown_is_shown_and_nothing_in_it_runs(self):
        self.open(self.serve("-c", "512"))
        b = self.browser
        self.answers((ANSWER, "stop"))
        self.say("<b>Show</b> *me*")
        self.rest()
        has = lambda selector: b.run(f"{LAST}.querySelectorAll({json.dumps(selector)}).length")
        for selector in ["h1", "strong", "table td[align=right]", ".code pre code", ".code button"]:
            self.assertEqual(has(selector), 1, selector)
        formulas = b.run(f"[...{LAST}.querySelectorAll('.formula')].map((one) => one.textContent.trim())")
        self.assertEqual(formulas, ["$a_1 * b_1$", "\\(x_2 * y_2\\)"])
        self.assertEqual(has("img, script, iframe, style, [onerror]"), 0)
        links = b.run(f"[...{LAST}.querySelectorAll('a')].map((one) => one.getAttribute('href'))")
        self.assertEqual(links, ["https://example.invalid/a.png", None, "https://example.invalid/"])
        self.assertIn("<script>", b.run(f"{LAST}.textContent"))
        self.assertIsNone(b.run("globalThis.ran ?? null"))
        # What a person writes is shown as it is.
        self.assertEqual(self.turns()[0], "<b>Show</b> *me*")
        self.picture("chat.png")
        self.console_is_clean()

    def test_edit_regenerate_branch_and_go_on(self):
        self.open(self.serve("-c", "512"))
        b = self.browser
        self.answers(("one", "stop"), ("two", "stop"), ("three", "stop"), ("a cut", "length"), (" and whole", "stop"), ("last", "stop"))
        self.say("First")
        self.rest()
        self.assertEqual(self.turns(), ["First", "one"])
        self.assertNotIn("max_tokens", b.run("sent.at(-1)[1]"))
        self.press("Regenerate")
        self.assertEqual(self.turns(), ["First", "two"])
        self.assertIn("2/2", b.run(f"{LAST}.textContent"))
        self.assertIn("30 of them cached (75 %)", b.run(f"{LAST}.textContent"))
        self.assertIn("The branches share these cells", b.run(f"{LAST}.textContent"))
        self.press("‹")
        self.assertEqual(self.turns(), ["First", "one"])
        # An edited message is a branch of its own.
        b.run("[...document.querySelectorAll('.say.user button')].find((one) => one.textContent === 'Edit').click()")
        self.assertEqual(b.run("document.getElementById('chat-input').value"), "First")
        b.run("document.getElementById('chat-input').value = ''")
        self.say("Edited")
        self.rest()
        self.assertEqual(self.turns(), ["Edited", "three"])
        self.assertEqual(b.run("sent.at(-1)[1].messages"), [{"role": "user", "content": "Edited"}])
        # A conversation that begins with another one's turns.
        self.press("Branch")
        self.assertEqual(self.turns(), ["Edited", "three"])
        self.assertEqual(b.run("document.querySelectorAll('#chats li').length"), 2)
        self.set("max_tokens", "7")
        self.set("temperature", "0.5")
        self.set("system", "Be short.")
        self.say("More")
        self.rest()
        _, sent = b.run("sent.at(-1)")
        self.assertEqual((sent["max_tokens"], sent["temperature"], len(sent["messages"])), (7, 0.5, 4))
        self.assertEqual(sent["messages"][0], {"role": "system", "content": "Be short."})
        self.assertIn("Cut at the limit of 7 tokens", b.run(f"{LAST}.textContent"))
        self.press("Go on")
        self.assertEqual(b.run("sent.at(-1)[1].prompt"), "<4>a cut")
        self.assertEqual(self.turns()[-1], "a cut and whole")
        self.assertNotIn("Go on", b.run(f"{LAST}.textContent"))
        # All of it is there after a reload, and the settings belong to one conversation.
        b.go(b.run("location.href"))
        b.wait(f"typeof cellarView !== 'undefined' && {STATE}.shown")
        b.run(f"{CHAT}.layouts.get({CHAT}.model).can_chat = true; {CHAT}.draw()")
        self.assertEqual(self.turns(), ["Edited", "three", "More", "a cut and whole"])
        self.assertEqual(b.run("document.getElementById('set-system').value"), "Be short.")
        b.run("document.querySelector('#chats li:nth-child(2) button').click()")
        self.assertEqual(b.run("document.getElementById('set-system').value"), "")
        self.assertEqual(self.turns(), ["Edited", "three"])
        self.console_is_clean()

    def test_files_go_with_a_message(self):
        self.open(self.serve("-c", "512"))
        b = self.browser
        self.answers(("read", "stop"))
        b.run(f"{CHAT}.files.add([new File(['a\\n```\\nb'], 'a.md'), new File([new Uint8Array([255, 0])], 'b.bin')])")
        self.assertIn("b.bin is no text", b.run("document.getElementById('chat-problem').textContent"))
        self.assertEqual(b.run("document.querySelectorAll('#chat-attached li').length"), 1)
        self.say("What is it?")
        self.rest()
        content = b.run("sent.at(-1)[1].messages[0].content")
        self.assertEqual(content, "File a.md:\n````\na\n```\nb\n````\n\nWhat is it?")
        self.assertIn("a.md", b.run("document.querySelector('.say.user .files').textContent"))
        self.console_is_clean()

    def test_an_answer_is_stopped_and_its_reason_of_reuse_is_told(self):
        server = self.serve("-c", "1024", "--parallel", "4")
        self.open(server)
        b = self.browser
        server.complete(PREFIX, 4)
        self.set("max_tokens", "8")
        self.say(PREFIX + " The dog")
        self.rest()
        b.wait(f"{LAST}.textContent.includes('differs from what is cached at token')")
        self.assertIn("Cut at the limit of 8 tokens", b.run(f"{LAST}.textContent"))
        # Its cells are shown in the memory.
        b.run("document.getElementById('view-chat').click()")
        self.press("Cells")
        b.wait("!document.getElementById('selected').hidden")
        self.assertRegex(b.run("document.getElementById('selected').textContent"), r"cells.*of which \d+ are shared")
        before = self.turns()[-1]
        self.press("Go on")
        self.assertTrue(self.turns()[-1].startswith(before))
        self.assertGreater(len(self.turns()[-1]), len(before))
        # Readers of screens are told the whole answer, once.
        self.assertIn("The model said", b.run("document.getElementById('chat-said').textContent"))
        self.set("max_tokens", "")
        b.run("document.getElementById('chat-new').click()")
        self.say("Once")
        b.wait("!document.getElementById('chat-stop').hidden")
        b.run("document.getElementById('chat-stop').click()")
        self.rest()
        self.assertIn("Stopped.", b.run(f"{LAST}.textContent"))
        self.console_is_clean()

    def test_a_key_that_may_not_watch_may_chat(self):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write("first-key\nsecond-key\n")
            keys.flush()
            server = self.serve("-c", "512", "--api-key-file", keys.name)
            b = self.browser
            b.go(server.address + "/")
            b.wait("!document.getElementById('key-form').hidden")
            b.run("document.getElementById('key').focus()")
            b.type("second-key")
            b.key("Enter")
            b.wait("document.getElementById('status').dataset.state === 'denied'")
            self.assertIn("The chat works", b.run("document.getElementById('problem').textContent"))
            b.wait(f"{CHAT}.listed.length === 1")
            self.set("max_tokens", "4")
            self.say("Once upon")
            self.rest()
            self.assertIn("Cut at the limit of 4 tokens", b.run(f"{LAST}.textContent"))
            # What was said is kept, and the key is not.
            self.assertNotIn("second-key", b.run("JSON.stringify(Object.entries(localStorage))"))

    def test_two_windows_lose_nothing_of_a_conversation(self):
        server = self.serve("-c", "512")
        self.open(server)
        b = self.browser
        b.run("localStorage.clear()")
        self.open(server)
        self.answers(("First.", "stop"))
        self.say("One")
        self.rest()
        first = b.open_window()
        self.open(server)
        self.assertEqual(self.turns(), ["One", "First."])
        self.answers(("Third.", "stop"), ("A branch.", "stop"))
        # What one window adds, the other shows.
        second = b.session
        b.switch(first)
        self.answers(("Second.", "stop"), ("Fourth.", "stop"))
        self.say("Two")
        self.rest()
        b.switch(second)
        b.wait(f"{LAST}.textContent.includes('Second.')")
        self.say("Three")
        self.rest()
        b.switch(first)
        b.wait(f"{LAST}.textContent.includes('Third.')")
        six = ["One", "First.", "Two", "Second.", "Three", "Third."]
        self.assertEqual(self.turns(), six)
        # Two answers to two messages at once are two branches: none is lost, in no window.
        for session, text in [(first, "Four"), (second, "Other")]:
            b.switch(session)
            b.run("void (globalThis.gate = new Promise((open) => (globalThis.openGate = open)))")
            self.say(text)
        kept = "Object.values(JSON.parse(localStorage[Object.keys(localStorage).find((name) => name.startsWith('cellar.talk.'))]).turns)"
        all_texts = sorted([*six, "Four", "Fourth.", "Other", "A branch."])
        for session, end in [(first, "Fourth."), (second, "A branch.")]:
            b.switch(session)
            b.run("openGate()")
            self.rest()
            self.assertEqual(self.turns()[-1], end)
        for session in (first, second):
            b.switch(session)
            for turns in (kept, f"Object.values({CHAT}.current.turns)"):
                b.wait(f"{turns}.map((turn) => turn.text).toSorted().join() === {json.dumps(','.join(all_texts))}")
        # One that is deleted in a window is gone in the other.
        b.switch(second)
        b.run("globalThis.confirm = () => true; document.getElementById('chat-delete').click()")
        b.switch(first)
        b.wait("document.querySelectorAll('#chat-log .say').length === 0")
        b.switch(second)
        self.console_is_clean()
        b.close_window(first)

    def test_the_views(self):
        server = self.serve("-c", "512")
        b = self.browser
        server.complete(PREFIX, 4)
        self.open(server)
        # What happened before the page came is told, and one snapshot is no slope.
        b.wait("document.getElementById('events').textContent.includes('is complete after')")
        self.assertEqual(b.run("document.getElementById('moment').textContent"), "1 snapshot kept")
        levels = b.run("""[0.25, 0.75].map((part) => {
            const canvas = document.getElementById('spark');
            const x = Math.floor(part * canvas.width);
            const { data } = canvas.getContext('2d').getImageData(x, 0, 1, canvas.height);
            return Array.from({ length: canvas.height }, (_, y) => data[4 * y + 3]).findIndex((alpha) => alpha > 0);
        })""")
        self.assertEqual(levels[0], levels[1])
        self.assertGreater(levels[0], 0)
        seen = "['chat', 'memory', 'requests'].filter((id) => document.getElementById(id).offsetParent !== null)"
        top = "['chat', 'memory'].map((id) => Math.round(document.getElementById(id).getBoundingClientRect().top))"
        self.assertEqual(b.run(seen), ["chat", "memory", "requests"])
        self.assertEqual(len(set(b.run(top))), 1)
        for view, parts in [("chat", ["chat"]), ("memory", ["memory", "requests"])]:
            b.run(f"document.getElementById('view-{view}').click()")
            self.assertEqual(b.run(seen), parts)
        b.go(b.run("location.href"))
        b.wait(f"typeof cellarView !== 'undefined' && {STATE}.shown")
        self.assertEqual(b.run(seen), ["memory", "requests"])
        b.run("document.getElementById('view-both').click()")
        self.answers((SHOWN, "stop"))
        self.say("What is a KV cache?")
        self.rest()
        self.picture("chat.webp")
        # On a phone the chat comes first, and all of it is in sight.
        b.size(400, 860)
        chat, memory = b.run(top)
        self.assertLess(chat, memory)
        self.assertLessEqual(b.run("document.getElementById('chat-send').getBoundingClientRect().bottom"), 860)
        self.assertLessEqual(b.run("document.documentElement.scrollWidth"), 400)
        self.picture("phone.webp")
        self.console_is_clean()


if __name__ == "__main__":
    unittest.main(verbosity=2)
