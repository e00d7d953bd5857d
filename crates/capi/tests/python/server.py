"""Drives a llama-server with 8 slots: `server.py URL`.

Eight clients at once get what each gets alone; a slot is saved, erased and restored; a prompt whose middle was
taken out reuses what is behind it.
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request

URL = sys.argv[1]
TOPICS = ["a dog", "the sea", "bread", "a train", "the moon", "a garden", "music", "snow"]


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def wait():
    for _ in range(600):
        try:
            if ask("/health")["status"] == "ok":
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.5)
    sys.exit("the server does not answer")


def complete(prompt, slot, n=16):
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "id_slot": slot, "cache_prompt": True}
    return ask("/completion", {**body, "seed": 1, "ignore_eos": True})


def prompt_of(topic):
    return f"Here is a short story about {topic}. It was told many times, and everyone liked it."


def clients():
    answers = {}

    def one(slot, topic):
        answers[topic] = complete(prompt_of(topic), slot)["content"]

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(TOPICS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    assert len(answers) == 8, answers
    alone = {topic: complete(prompt_of(topic), slot)["content"] for slot, topic in enumerate(TOPICS)}
    same = sum(answers[topic] == alone[topic] for topic in TOPICS)
    print(f"8 clients in {took:.1f} s: {same} of 8 texts as alone")
    return same


def slots():
    prompt = prompt_of("a ship") * 4
    before = complete(prompt, 0)
    saved = ask("/slots/0?action=save", {"filename": "one"})
    ask("/slots/0?action=erase", {})
    restored = ask("/slots/0?action=restore", {"filename": "one"})
    after = complete(prompt, 0)
    computed = after["timings"]["prompt_n"]
    assert saved["n_saved"] == restored["n_restored"] > 40, (saved, restored)
    assert after["content"] == before["content"], (before["content"], after["content"])
    assert computed < 8, after["timings"]
    print(f"slot of {saved['n_saved']} tokens saved and restored, {computed} computed after that")


def reuse():
    parts = [prompt_of(topic) * 3 for topic in ("a mill", "a bridge", "a clock")]
    complete("".join(parts), 1)
    whole = complete(parts[0] + parts[2], 1)
    computed, cached = whole["timings"]["prompt_n"], whole["timings"]["cache_n"]
    assert computed < cached, whole["timings"]
    print(f"without its middle, a prompt reuses {cached} tokens and computes {computed}")


wait()
same = clients()
slots()
reuse()
sys.exit(0 if same >= 7 else "the clients' texts are not those that they get alone")
