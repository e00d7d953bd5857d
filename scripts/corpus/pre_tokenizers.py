#!/usr/bin/env python3
"""Compares how Cellar and llama.cpp cut words, for every pre-tokenizer name that llama.cpp has.

    pre_tokenizers.py PROGRAM LLAMA_TOKENIZE LLAMA_CPP KNOWN [--write GOLDEN]

PROGRAM is model-core's example `tokens`, LLAMA_TOKENIZE the program `llama-tokenize`, LLAMA_CPP the
folder of its source, where the names and texts are read. A vocabulary is made for each name: single
bytes (or characters) and every two that are neighbours in some text, so that the ids show each place
where a word was cut. KNOWN lists names that may differ, `NAME<tab>reason`. `--write` writes our own
texts and the ids that are right, for the tests of a checkout alone.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf

import results
from token_ids import HARD, ids_of, known_differences

# Vocabularies of characters, and how they write a space.
OF_CHARACTERS = {"gemma4": "\u2581", "granite-embed-multi-311m": "\u2581", "mmbert": "\u2581",
                 "sarvam-moe": "\u2581", "whitespace": " "}


def byte_alphabet():
    """The character that GPT-2's vocabulary writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


BYTES = byte_alphabet()


def spelled(name, text):
    if name in OF_CHARACTERS:
        return text.replace(" ", OF_CHARACTERS[name])
    return "".join(BYTES[b] for b in text.encode())


def vocabulary(name, texts):
    """Tokens, their types and merges."""
    spellings = [spelled(name, text) for text in texts]
    if name in OF_CHARACTERS:
        characters = {c for text in spellings for c in text if c != "\0"} | {OF_CHARACTERS[name]}
        tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *sorted(characters), "\n\n", "\n\n\n"]
        types = [2, *[6] * 256, *[1] * len(characters), 4, 4]
    else:
        tokens, types = [BYTES[b] for b in range(256)], [1] * 256
    pairs = {}
    for text in spellings:
        for pair in zip(text, text[1:]):
            if not {"\n", " ", "\0"} & set(pair):
                pairs.setdefault(pair)
    for left, right in pairs:
        if left + right not in tokens:
            tokens.append(left + right)
            types.append(1)
    return tokens, types, [f"{left} {right}" for left, right in pairs]


def write_model(path, name, texts):
    tokens, types, merges = vocabulary(name, texts)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gemma4" if name == "gemma4" else "gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs(program, model, texts, folder):
    file = folder / "text"
    found = []
    for text in texts:
        file.write_text(text, newline="")
        run = subprocess.run([program, "-m", model, "--ids", "--no-bos", "--log-disable", "-f", file],
                             capture_output=True, text=True, check=False)
        found.append(json.loads(run.stdout) if run.returncode == 0 else run.stderr[-200:])
    return found


def main():
    program, tokenize, source = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    known = known_differences(sys.argv[4])
    code = (source / "src/llama-vocab.cpp").read_text()
    names = sorted({*re.findall(r'tokenizer_pre == "([^"]+)"', code), "default"})
    suite = (source / "models/ggml-vocab-llama-bpe.gguf.inp").read_bytes().decode()
    suite = suite.split("\n__ggml_vocab_test__\n")
    golden, n_texts, n_wrong = {}, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for name in names:
            # llama.cpp stops at two spaces in a row there.
            texts = [t for t in HARD + suite if name != "whitespace" or not re.search(r"\s\s|\0", t)]
            model = folder / "model.gguf"
            write_model(model, name, texts)
            ours, wanted = ids_of(program, model, texts), theirs(tokenize, model, texts, folder)
            if isinstance(ours, str):
                ours = [ours] * len(texts)
            n_texts += len(texts)
            wrong = [i for i, pair in enumerate(zip(ours, wanted)) if pair[0] != pair[1]]
            results.add("tokenizer", name, len(texts), len(wrong))
            if wrong and name not in known:
                n_wrong += len(wrong)
                print(f"{name}: {len(wrong)} of {len(texts)} differ, the first: {texts[wrong[0]]!r:.120}\n"
                      f"    llama.cpp {wanted[wrong[0]]!r:.160}\n    found     {ours[wrong[0]]!r:.160}")
            # Our own texts alone, with a vocabulary of theirs.
            texts = [t for t in texts if t in HARD]
            write_model(model, name, texts)
            ids = json.dumps([texts, ids_of(program, model, texts)])
            golden.setdefault(ids, []).append(name)
    print(f"{len(names)} pre-tokenizers, {n_texts} texts, {n_wrong} differ")
    if "--write" in sys.argv:
        lines = [json.dumps({"names": names, "texts": json.loads(ids)[0], "ids": json.loads(ids)[1]})
                 for ids, names in golden.items()]
        Path(sys.argv[-1]).write_text("\n".join(lines) + "\n")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
