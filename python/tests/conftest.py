"""Models for the tests: the repository's, and one of them with a chat template."""

import json
import struct
import sys
from pathlib import Path

import cellar
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/fixtures/python"))

from tower_model import tower_model, write_safetensors  # noqa: E402

STORIES = ROOT / "models/stories-llama-f16.gguf"
ENCODER = ROOT / "tests/fixtures/encoders/bert_tiny"
RERANKER = ROOT / "tests/fixtures/encoders/bert_rerank_tiny"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{{ greeting or '' }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Bytes of GGUF's types of fixed size, and the types of strings and arrays.
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def with_template(gguf, template):
    """The bytes of a GGUF file with a chat template."""

    def number(kind, at):
        return struct.unpack_from(kind, gguf, at)[0]

    def behind_value(kind, at):
        if kind == STRING:
            return at + 8 + number("<Q", at)
        if kind != ARRAY:
            return at + SIZES[kind]
        kind, n, at = number("<I", at), number("<Q", at + 4), at + 12
        for _ in range(n):
            at = behind_value(kind, at)
        return at

    n_tensors, n_keys = number("<Q", 8), number("<Q", 16)
    at = 24
    for _ in range(n_keys):
        at = behind_value(STRING, at)
        at = behind_value(number("<I", at), at + 4)
    behind_keys = at
    for _ in range(n_tensors):
        at = behind_value(STRING, at)
        at += 4 + 8 * number("<I", at) + 4 + 8
    infos, data = gguf[behind_keys:at], gguf[-(-at // 32) * 32 :]
    text = lambda s: struct.pack("<Q", len(s.encode())) + s.encode()
    key = text("tokenizer.chat_template") + struct.pack("<I", STRING) + text(template)
    head = gguf[:16] + struct.pack("<Q", n_keys + 1) + gguf[24:behind_keys] + key + infos
    return head + bytes(-len(head) % 32) + data


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """The path of the story model with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "model.gguf"
    path.write_bytes(with_template(STORIES.read_bytes(), TEMPLATE))
    return path


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    """The paths of two LoRAs of the story model, as the PEFT library writes them."""
    folder = tmp_path_factory.mktemp("adapters")
    model = cellar.Model(STORIES)
    width, n_layers = (model.metadata[f"llama.{key}"] for key in ["embedding_length", "block_count"])
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 60, "target_modules": ["q_proj"]}
    for seed, name in enumerate(["tales", "poems"]):
        (folder / name).mkdir()
        random, tensors = np.random.default_rng(seed), {}
        for layer in range(n_layers):
            module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            for part, shape in [("A", (2, width)), ("B", (width, 2))]:
                values = random.normal(0, 0.2, shape).astype("<f4")
                tensors[f"{module}.lora_{part}.weight"] = shape, values.tobytes()
        write_safetensors(folder / name / "adapter_model.safetensors", tensors)
        (folder / name / "adapter_config.json").write_text(json.dumps(settings))
    return [folder / "tales", folder / "poems"]


@pytest.fixture
def in_folder(chat_model, adapters, tmp_path, monkeypatch):
    """A current folder with the models that examples name."""
    (tmp_path / "model.gguf").symlink_to(chat_model)
    for name in ["all-MiniLM-L6-v2", "embedder"]:
        (tmp_path / name).symlink_to(ENCODER)
    (tmp_path / "reranker").symlink_to(RERANKER)
    for path in adapters:
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory):
    """The path of a tiny LLaVA."""
    return tower_model(tmp_path_factory.mktemp("seeing"), "vision/llava", "<image>", "image")


@pytest.fixture(scope="session")
def hearing_model(tmp_path_factory):
    """The path of a tiny Qwen2-Audio."""
    folder = tmp_path_factory.mktemp("hearing")
    return tower_model(folder, "audio/qwen2_audio", "<|AUDIO|>", "audio")
