"""The module against the reference texts of the story model, in the repository's models/."""

import asyncio
import base64
import json
import math
import os
import struct
import subprocess
import sys
import threading
import time

import cellar
import numpy as np
import pytest
from conftest import ENCODER, RERANKER, ROOT, STORIES

REFERENCES = json.loads((STORIES.parent / "stories-llama.reference.json").read_text())["prompts"]


@pytest.fixture
def model():
    return cellar.Model(STORIES, n_seqs=2, kv_type="f32")


def test_greedy_text_is_the_references(model):
    for reference in REFERENCES:
        n = len(reference["greedy_ids"])
        text = model.generate(reference["prompt"], max_tokens=n, temperature=0)
        assert "".join(text) == reference["continuation"] == text.text
        assert text.tokens == reference["greedy_ids"]
        assert text.finish_reason == "length"


def test_tokens_and_text(model):
    reference = REFERENCES[0]
    assert model.tokenize(reference["prompt"]) == reference["ids"]
    assert model.detokenize(reference["ids"]) == reference["prompt"]
    text = model.generate(np.array(reference["ids"]), max_tokens=3, temperature=0)
    assert text.finish() == model.detokenize(reference["ids"] + reference["greedy_ids"][:3])[
        len(reference["prompt"]) :
    ]


def test_two_texts_take_turns(model):
    texts = [
        model.generate(r["prompt"], max_tokens=20, temperature=0) for r in REFERENCES[:2]
    ]
    for _ in range(20):
        for text in texts:
            next(text, None)
    for text, reference in zip(texts, REFERENCES):
        assert text.tokens == reference["greedy_ids"][:20]


def test_logits_choose_the_reference(model):
    reference = REFERENCES[0]
    ids = reference["ids"] + reference["greedy_ids"][:10]
    logits = model.logits(ids)
    assert logits.dtype == np.float32 and logits.shape[0] == len(ids)
    best = logits.argmax(axis=1)[len(reference["ids"]) - 1 :]
    assert best.tolist() == reference["greedy_ids"][:11]


def test_texts_are_saved_and_restored(model, tmp_path):
    reference = REFERENCES[0]
    n = len(reference["greedy_ids"])
    first = model.generate(reference["prompt"], max_tokens=12, temperature=0)
    first.finish()
    state = first.save()
    first.save_file(tmp_path / "text.state")
    assert (tmp_path / "text.state").read_bytes() == state
    model.memory.clear()
    assert model.memory.n_used == 0
    # The last token was chosen and not computed.
    known = reference["ids"] + reference["greedy_ids"][:11]
    assert model.memory.load(state) == known
    text = model.generate(known, max_tokens=n - 11, temperature=0)
    assert text.n_prompt_evaluated == 1
    assert text.tokens == [] and text.finish() in reference["continuation"]
    assert known + text.tokens == reference["ids"] + reference["greedy_ids"]
    other = cellar.Model(STORIES, kv_type="f32")
    assert other.memory.load_file(tmp_path / "text.state") == known
    with pytest.raises(cellar.CellarError, match="checksum|ends|bytes"):
        model.memory.load(state[:-5])


def test_the_gil_is_free_while_a_text_is_written(model):
    text = model.generate("Once", max_tokens=400, seed=3)
    n_turns = 0
    writer = threading.Thread(target=text.finish)
    writer.start()
    while writer.is_alive():
        n_turns += 1
        time.sleep(0.001)
    assert n_turns > 5


def test_a_text_can_be_cancelled_from_another_thread(model):
    text = model.generate("Once", max_tokens=400, seed=3)
    next(text)
    threading.Thread(target=text.cancel).start()
    text.finish()
    assert text.finish_reason == "cancelled"


def test_what_is_wrong_is_named(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such.gguf"):
        cellar.Model(tmp_path / "no-such.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(cellar.CellarError, match="bad.gguf"):
        cellar.Model(tmp_path / "bad.gguf")
    with pytest.raises(ValueError, match="q9"):
        cellar.Model(STORIES, kv_type="q9")
    with pytest.raises(TypeError, match="warmth"):
        model.generate("Once", warmth=1)
    with pytest.raises(ValueError, match="top-p 2"):
        model.generate("Once", top_p=2)
    with pytest.raises(cellar.CellarError, match="chat template"):
        model.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(TypeError, match="seq"):
        model.generate("Once", seq=7)


def test_vectors_have_length_one():
    embedder = cellar.Embedder(ENCODER)
    vectors = embedder.embed(["A cat.", "A dog."])
    assert vectors.shape == (2, embedder.dim)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_texts_go_on_whatever_else_is_done(model):
    first, second = REFERENCES[:2]
    state = model.generate(second["prompt"], max_tokens=5, temperature=0)
    state.finish()
    state = state.save()
    changes = [
        model.memory.clear,
        lambda: model.logits(first["ids"]),
        lambda: model.memory.load(state),
        lambda: [next(model.generate(r["prompt"], max_tokens=20)) for r in REFERENCES],
        lambda: model.generate_batch(["Once", "One day"], max_tokens=5),
    ]
    for change in changes:
        n = len(first["greedy_ids"])
        text = model.generate(first["prompt"], max_tokens=n, temperature=0)
        next(text)
        change()
        assert text.finish() == first["continuation"]


def test_logits_leave_nothing_in_the_memory(model):
    assert model.logits([]).shape == (0, model.n_vocab)
    reference = REFERENCES[0]
    model.logits(reference["ids"])
    assert model.memory.n_used == 0
    with pytest.raises(cellar.CellarError, match="does not fit the context"):
        model.logits([5] * (model.n_ctx + 1))


def test_a_text_without_computed_tokens_is_not_saved(model, tmp_path):
    text = model.generate("Once", max_tokens=3)
    model.memory.clear()
    with pytest.raises(cellar.CellarError, match="no text that is kept"):
        text.save()
    with pytest.raises(cellar.CellarError, match="no text that is kept"):
        text.save_file(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_numbers_out_of_range_are_value_errors(model):
    for wrong in [
        lambda: model.logits([-1]),
        lambda: model.generate([5, -3]),
        lambda: model.generate("Once", max_tokens=-1),
        lambda: model.generate("Once", seed=-1),
        lambda: cellar.Model(STORIES, n_ctx=-5),
    ]:
        with pytest.raises(ValueError, match="out of range"):
            wrong()


def test_seeds_are_drawn_and_told(model):
    texts = [model.generate("Once", max_tokens=30) for _ in range(1)]
    texts += [model.generate("Once", max_tokens=30)]
    assert texts[0].seed != texts[1].seed
    first = texts[0].finish()
    again = model.generate("Once", max_tokens=30, seed=texts[0].seed)
    assert again.finish() == first and again.seed == texts[0].seed


def test_log_probabilities_are_those_of_the_logits(model):
    reference = REFERENCES[0]
    text = model.generate(reference["prompt"], max_tokens=3, temperature=0, logprobs=4)
    text.finish()
    rows = model.logits(reference["ids"] + reference["greedy_ids"][:3]).astype(np.float64)
    rows = rows[len(reference["ids"]) - 1 :]
    assert [place.token for place in text.logprobs] == reference["greedy_ids"][:3]
    for place, row in zip(text.logprobs, rows):
        wanted = row[place.token] - np.log(np.exp(row).sum())
        assert math.isclose(place.logprob, wanted, abs_tol=1e-4)
        assert len(place.top) == 4 and place.top[0][0] == place.token


def test_a_biased_token_is_not_chosen(model):
    reference = REFERENCES[0]
    best = reference["greedy_ids"][0]
    text = model.generate(
        reference["prompt"], max_tokens=1, temperature=0, logit_bias={best: float("-inf")}
    )
    text.finish()
    second = model.logits(reference["ids"])[-1].argsort()[-2]
    assert text.tokens == [second]


def test_schemas_and_grammars_hold_a_text(model):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for given in [schema, json.dumps(schema)]:
        text = model.generate("Once", schema=given, max_tokens=60, seed=1).finish()
        assert isinstance(json.loads(text)["a"], bool)
    text = model.generate("Once", grammar='start: "yes" | "no"', seed=1)
    assert text.finish() in ("yes", "no") and text.finish_reason == "end"
    text = model.generate("Once", grammar='root ::= "yes" | "no"', seed=1)
    assert text.finish() in ("yes", "no") and text.finish_reason == "end"
    with pytest.raises(ValueError, match="line 1, column 10"):
        model.generate("Once", grammar="root ::= x")
    with pytest.raises(ValueError, match="not both"):
        model.generate("Once", grammar='start: "a"', schema={})


def test_prompts_of_a_batch_are_as_alone(model):
    n = 20
    texts = model.generate_batch(
        [r["prompt"] for r in REFERENCES] * 2, max_tokens=n, temperature=0, logprobs=0
    )
    for text, reference in zip(texts, REFERENCES * 2, strict=True):
        assert text.tokens == reference["greedy_ids"][:n]
        assert text.finish_reason == "length" and len(text.logprobs) == n
        assert reference["continuation"].startswith(text.text)
    with pytest.raises(cellar.CellarError, match="prompt"):
        model.generate_batch(["Once", []])
    test_greedy_text_is_the_references(model)
    assert model.generate_batch([]) == []


def test_chats_take_parts_tools_and_variables(chat_model):
    model = cellar.Model(chat_model)
    parts = [{"type": "text", "text": "Who is "}, {"type": "text", "text": "Lily?"}]
    messages = [{"role": "user", "content": parts}]
    plain = [{"role": "user", "content": "Who is Lily?"}]
    assert model.apply_chat_template(messages) == "user: Who is Lily?\nassistant:"
    without = model.apply_chat_template(messages, add_generation_prompt=False)
    assert without == "user: Who is Lily?\n"
    tools = [{"type": "function", "function": {"name": "now"}}]
    rendered = model.apply_chat_template(plain, tools=tools, variables={"greeting": "Hello "})
    assert rendered.startswith('[{"type": "function"') and "Hello user: Who" in rendered
    answer = model.chat(messages, max_tokens=8, temperature=0).finish()
    assert answer == model.chat(plain, max_tokens=8, temperature=0).finish()
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(cellar.CellarError, match="no vision tower"):
        model.chat(image)
    with pytest.raises(cellar.CellarError, match="no audio tower"):
        model.chat([{"role": "user", "content": [{"type": "input_audio"}]}])
    with pytest.raises(ValueError, match="input_video"):
        model.chat([{"role": "user", "content": [{"type": "input_video"}]}])
    with pytest.raises(ValueError, match="role"):
        model.chat([{"content": "Hello"}])


def test_chats_show_images(seeing_model, tmp_path):
    model = cellar.Model(seeing_model)
    pixels = np.arange(40 * 30 * 3, dtype=np.uint32).astype(np.uint8).reshape(30, 40, 3)
    rows = pixels[::-1, :, ::-1].tobytes()
    sizes = (54 + len(rows), 0, 54, 40, 40, 30, 1 | 24 << 16, 0, len(rows), 0, 0, 0, 0)
    bitmap = b"BM" + struct.pack("<13I", *sizes) + rows
    path = tmp_path / "a.bmp"
    path.write_bytes(bitmap)

    def tokens(content, images=()):
        messages = [{"role": "user", "content": content}]
        text = model.chat(messages, images=list(images), max_tokens=8, temperature=0)
        text.finish()
        return text.tokens

    image, question = {"type": "image"}, {"type": "text", "text": "What?"}
    wanted = tokens("What?", [bitmap])
    assert wanted != tokens("What?", [255 - pixels])
    url = "data:image/bmp;base64," + base64.b64encode(bitmap).decode()
    for content, images in [
        ("What?", [path]),
        ("What?", [str(path)]),
        ("What?", [pixels]),
        ([image, question], [pixels]),
        ([{"type": "image_url", "image_url": {"url": url}}, question], []),
    ]:
        assert tokens(content, images) == wanted
    assert tokens([question, image], [pixels]) != wanted
    for content, images, error, reason in [
        ([image, image, question], [pixels], ValueError, "1 are fewer than the parts"),
        ([image, question], [pixels, pixels], ValueError, "1 of 2 have no part"),
        ("What?", [pixels.astype(float)], TypeError, "numpy array"),
        ("What?", [b"no picture"], ValueError, "none of PNG"),
        ("What?", [tmp_path / "b.bmp"], FileNotFoundError, "b.bmp"),
    ]:
        with pytest.raises(error, match=reason):
            tokens(content, images)


def test_chats_play_sounds(hearing_model, tmp_path):
    model = cellar.Model(hearing_model)
    samples = np.arange(9690, dtype=np.int64) * 911 % 20000 - 10000
    data = samples.astype("<i2").tobytes()
    form = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    chunks = b"WAVEfmt " + form + b"data" + struct.pack("<I", len(data)) + data
    wav = b"RIFF" + struct.pack("<I", len(chunks)) + chunks
    path = tmp_path / "a.wav"
    path.write_bytes(wav)

    def tokens(content, audio=()):
        messages = [{"role": "user", "content": content}]
        text = model.chat(messages, audio=list(audio), max_tokens=8, temperature=0)
        text.finish()
        return text.tokens

    audio, question = {"type": "audio"}, {"type": "text", "text": "What?"}
    wanted = tokens("What?", [wav])
    floats = (samples / 32768).astype(np.float32)
    assert wanted != tokens("What?", [floats[::-1].copy()])
    given = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode()}}
    for content, sounds in [
        ("What?", [path]),
        ("What?", [floats]),
        ([audio, question], [str(path)]),
        ([given, question], []),
    ]:
        assert tokens(content, sounds) == wanted
    for content, sounds, error, reason in [
        ([audio, audio, question], [wav], ValueError, "1 are fewer than the parts"),
        ([audio, question], [wav, wav], ValueError, "1 of 2 have no part"),
        ("What?", [samples], TypeError, "numpy array of float32"),
        ("What?", [b"no sound"], ValueError, "none of WAV"),
        ("What?", [floats.repeat(2)], ValueError, "2 seconds: at most 1"),
    ]:
        with pytest.raises(error, match=reason):
            tokens(content, sounds)
    with pytest.raises(ValueError, match="takes no pictures"):
        messages = [{"role": "user", "content": "What?"}]
        model.chat(messages, images=[np.zeros((4, 4, 3), np.uint8)])


def test_texts_are_awaited_and_iterated(model):
    reference = REFERENCES[0]

    async def write():
        text = await model.generate_async(reference["prompt"], max_tokens=12, temperature=0)
        return [piece async for piece in text], text

    pieces, text = asyncio.run(write())
    assert "".join(pieces) == text.text and text.tokens == reference["greedy_ids"][:12]


def test_what_the_file_says(model):
    assert model.architecture == "llama" == model.metadata["general.architecture"]
    assert model.n_vocab == len(model.metadata["tokenizer.ggml.tokens"])
    assert model.bos_id == REFERENCES[0]["ids"][0] or model.bos_id is None
    text = model.generate("Once", max_tokens=3, temperature=0)
    text.finish()
    assert text.timings.generated_tokens == 2 and text.timings.prompt_seconds > 0
    shown = [repr(model), repr(model.memory), repr(text), repr(text.timings)]
    assert all("0x" not in one and one.startswith("<cellar.") for one in shown), shown


def test_what_is_closed_says_so():
    with cellar.Model(STORIES) as model:
        text = model.generate("Once", max_tokens=5)
    for use in [lambda: next(text), lambda: model.generate("Once"), text.save]:
        with pytest.raises(ValueError, match="closed"):
            use()
    with cellar.Embedder(ENCODER) as embedder:
        pass
    with pytest.raises(ValueError, match="closed"):
        embedder.embed(["A cat."])


def test_decoders_give_vectors_with_a_pooling():
    with pytest.raises(ValueError, match="pooling='mean'"):
        cellar.Embedder(STORIES)
    with pytest.raises(ValueError, match="middle"):
        cellar.Embedder(STORIES, pooling="middle")
    last = cellar.Embedder(STORIES, pooling="last", normalize=False).embed(["A cat.", "A dog."])
    unit = cellar.Embedder(STORIES, pooling="last", normalize=True).embed(["A cat.", "A dog."])
    lengths = np.linalg.norm(last, axis=1, keepdims=True)
    assert not np.allclose(lengths, 1, atol=0.01) and np.allclose(last / lengths, unit, atol=1e-5)


def test_a_reranker_scores_as_its_reference():
    reference = json.loads(RERANKER.with_name("bert_rerank_tiny.reference.json").read_text())
    reranker = cellar.Reranker(RERANKER)
    query, documents = reference["query"], reference["documents"]
    scores = reranker.scores(query, documents)
    assert np.allclose(scores, np.ravel(reference["scores"]), atol=1e-4)
    ranked = reranker.rank(query, documents)
    assert sorted(ranked) == list(enumerate(scores.tolist()))
    assert [score for _, score in ranked] == sorted(scores.tolist(), reverse=True)


def test_backends_have_names():
    reference = REFERENCES[0]
    model = cellar.Model(STORIES, backend="cpu", gpu_layers=0)
    text = model.generate(reference["prompt"], max_tokens=5, temperature=0)
    assert text.finish() and text.tokens == reference["greedy_ids"][:5]
    with pytest.raises(ValueError, match="cpu, cuda"):
        cellar.Model(STORIES, backend="abacus")
    with pytest.raises(cellar.CellarError, match="candle"):
        cellar.Model(STORIES, backend="candle")


def test_adapters_are_of_each_text(adapters):
    prompt, options = REFERENCES[0]["prompt"], {"max_tokens": 20, "temperature": 0}
    plain = cellar.Model(STORIES).generate(prompt, **options).finish()
    tales, poems = (cellar.Model(STORIES, lora=path) for path in adapters)
    wanted = [model.generate(prompt, **options).finish() for model in (tales, poems)]
    assert len({plain, *wanted}) == 3
    both = cellar.Model(STORIES, n_seqs=3, lora={adapters[0]: 0, adapters[1]: 1})
    assert both.lora == {"tales": 0.0, "poems": 1.0}
    texts = [
        both.generate(prompt, lora=lora, **options)
        for lora in ({"tales": 1}, None, {}, {"tales": 1.0, "poems": 0})
    ]
    assert [text.finish() for text in texts] == [*wanted, plain, wanted[0]]
    batch = both.generate_batch([prompt, prompt], lora={"tales": 1}, **options)
    assert [text.text for text in batch] == [wanted[0]] * 2


def test_wrong_adapters_are_named(adapters, model):
    with pytest.raises(ValueError, match="none of the adapters: tales, poems"):
        cellar.Model(STORIES, lora=adapters).generate("a", lora={"other": 1})
    with pytest.raises(ValueError, match="finite"):
        cellar.Model(STORIES, lora=adapters[0]).generate("a", lora={"tales": math.nan})
    with pytest.raises(ValueError, match="opened without adapters"):
        model.generate("a", lora={"tales": 1})
    with pytest.raises(TypeError, match="lora"):
        cellar.Model(STORIES, lora=3)
    with pytest.raises(cellar.CellarError, match="stories-llama"):
        cellar.Model(STORIES, lora=STORIES)
    with pytest.raises(cellar.CellarError, match="no-such"):
        cellar.Model(STORIES, lora="no-such.gguf")


def test_pulling_finds_what_is_there_and_says_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="name"):
        cellar.pull("no name")
    with pytest.raises(cellar.CellarError, match="HF_HUB_OFFLINE"):
        cellar.pull("owner/name")
    folder = tmp_path / "models--owner--name"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    (snapshot / "name-Q4_K_M.gguf").write_bytes(STORIES.read_bytes())
    assert cellar.pull("owner/name:Q4_K_M") == snapshot / "name-Q4_K_M.gguf"


INTERRUPTED = """
import os, signal, sys, threading, time
import cellar
# A shell that starts tests in the background has them ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
model = cellar.Model(sys.argv[1], n_ctx=4096, threads=1)
prompt = [5] * 4000
def interrupt():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
started = time.monotonic()
calls = {
    "logits": lambda: model.logits(prompt),
    "generate": lambda: (model.memory.clear(), model.generate(prompt, max_tokens=0)),
    "batch": lambda: model.generate_batch([prompt] * 50, max_tokens=90),
}
try:
    while True:
        calls[sys.argv[2]]()
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - started)
# Nothing is broken.
print(model.generate([5, 6], max_tokens=2, seed=1).finish())
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("call", ["logits", "generate", "batch"])
def test_ctrl_c_interrupts_a_computation(call):
    run = [sys.executable, "-c", INTERRUPTED, str(STORIES), call]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "interrupted" in ended.stdout, ended
    assert "panic" not in ended.stderr and ended.returncode == 0, ended.stderr
