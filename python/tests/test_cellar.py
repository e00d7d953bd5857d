"""The module against the reference texts of the story model, in the repository's models/."""

import json
import threading
import time
from pathlib import Path

import cellar
import numpy as np
import pytest

MODELS = Path(__file__).parents[2] / "models"
STORIES = MODELS / "stories-llama-f16.gguf"
REFERENCES = json.loads((MODELS / "stories-llama.reference.json").read_text())["prompts"]
ENCODER = Path(__file__).parents[2] / "tests/fixtures/encoders/bert_tiny"


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
    text = model.generate(reference["ids"], max_tokens=3, temperature=0)
    assert text.finish() == model.detokenize(reference["ids"] + reference["greedy_ids"][:3])[
        len(reference["prompt"]) :
    ]


def test_two_texts_take_turns(model):
    texts = [
        model.generate(r["prompt"], seq=seq, max_tokens=20, temperature=0)
        for seq, r in enumerate(REFERENCES[:2])
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


def test_memory_copies_and_restores(model, tmp_path):
    reference = REFERENCES[0]
    prompt, n = reference["prompt"], len(reference["greedy_ids"])
    model.generate(prompt, max_tokens=0).finish()
    memory = model.memory
    last = len(reference["ids"]) - 1
    assert memory.positions() == (0, last) and memory.positions(1) is None
    assert memory.copy(0, 1) == last + 1
    state = memory.save(1)
    memory.save_file(tmp_path / "text.state", 1)
    assert (tmp_path / "text.state").read_bytes() == state
    memory.clear()
    assert memory.positions() is None
    assert memory.load(state, 1) == last + 1
    text = model.generate(prompt, seq=1, max_tokens=n, temperature=0)
    assert text.n_prompt_evaluated == 1
    assert text.finish() == reference["continuation"]
    assert memory.remove(1, first=3) > 0 and memory.positions(1) == (0, 2)
    with pytest.raises(cellar.CellarError, match="checksum|ends|bytes"):
        memory.load(state[:-5], 0)


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
    with pytest.raises(cellar.CellarError, match="sequence 7"):
        model.generate("Once", seq=7)


def test_vectors_have_length_one():
    embedder = cellar.Embedder(ENCODER)
    vectors = embedder.embed(["A cat.", "A dog."])
    assert vectors.shape == (2, embedder.dim)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
