#!/usr/bin/env python3
"""Compares Cellar's tokenizers with those of others.

    token_ids.py PROGRAM VOCABULARIES DIRECTORIES KNOWN

PROGRAM is model-core's example `tokens`. VOCABULARIES is llama.cpp's `models/`: each
`ggml-vocab-NAME.gguf` is read, and the texts of its `.inp` must give the ids of its `.out`.
DIRECTORIES holds folders, each with a `tokenizer.json`: texts that are hard to cut must give the ids
that the library `tokenizers` gives. KNOWN lists differences and their reasons, one a line:
`NAME<tab>reason`. Exit code 1 where another one differs.
"""

import json
import subprocess
import sys
from pathlib import Path

import results


HARD = [
    "", " ", "  ", "\t", "\n", "\r\n", "\n\n\n", " \n \n", "a", " a", "a ", "  a  b   c    d",
    "Hello, world!", "I'll we've they're don't HE'S", "don\u2019t \u2018quote\u2019", "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m",
    "1234567890", "3.14159, 1e-7, 0x1F", "12 345\u00a0678", "\u00bd\u00b2\u2167\u0663\u0664", "foo_bar fooBar FooBAR HTTPServer",
    "for(int i=0;i<10;++i){a[i]=i*2;}", "if x == 1:\n    return {'a': [1, 2]}\n", "\tindent\n\t\tmore\n",
    "<b>bold</b><s>gone</s> </s> &amp;", "https://example.org/a/b?c=d&e=%20f#g", "user@example.org",
    "\u6f22\u5b57\u304b\u306a\u30ab\u30ca \u4ea4\u3058\u308a", "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442, \u0441\u043b\u043e\u0432\u0430", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0646\u0635",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u092a\u093e\u0920", "\u0e44\u0e17\u0e22 \u0e20\u0e32\u0e29\u0e32", "\u05e2\u05d1\u05e8\u05d9\u05ea",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea", "a\u200bb\u200dc\ufeffd", "\u00a0\u2003\u3000x",
    "zero\u0000byte \u0007bell", "!!!??? ... --- ***", "((((nested))))", "x" * 200, "ab " * 60, " " * 70 + "y", "\n" * 40,
    "Das ist \u201ewichtig\u201c \u2013 sehr\u2026", "\ufb01ne \u2460 \u3392 \uff21\uff22\uff23",
]


def known_differences(path):
    """Names that may differ, with the reason, from lines `NAME<tab>reason`."""
    lines = Path(path).read_text().splitlines()
    return dict(line.split("\t", 1) for line in lines if line and not line.startswith("#"))


def ids_of(program, model, texts):
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    run = subprocess.run([program, model], input=lines, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return run.stderr.strip()
    return [json.loads(line) for line in run.stdout.splitlines()]


def vocabulary(program, path):
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = path.with_suffix(".gguf.out").read_text().split("\n")
    expected = [[int(n) for n in line.split()] for line in expected]
    return texts, expected, ids_of(program, path, texts)


def directory(program, path):
    from tokenizers import Tokenizer  # here: another script reads this file without that library

    reference = Tokenizer.from_file(str(path / "tokenizer.json"))
    expected = [reference.encode(text, add_special_tokens=False).ids for text in HARD]
    return HARD, expected, ids_of(program, path, HARD)


def main():
    program, vocabularies, directories = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    known = known_differences(sys.argv[4])
    cases = [(p.name, vocabulary, p) for p in sorted(vocabularies.glob("ggml-vocab-*.gguf"))
             if p.with_suffix(".gguf.inp").exists()]
    cases += [(p.parent.name, directory, p.parent) for p in sorted(directories.glob("*/tokenizer.json"))]
    n_texts = n_wrong = 0
    for name, compare, path in cases:
        texts, expected, found = compare(program, path)
        if isinstance(found, str):
            print(f"{name}: {found}")
            n_wrong += len(texts)
            continue
        wrong = [case for case in zip(texts, expected, found) if case[1] != case[2]]
        results.add("tokenizer", name.removeprefix("ggml-vocab-").removesuffix(".gguf"), len(texts), len(wrong))
        n_texts += len(texts)
        if name in known:
            continue
        n_wrong += len(wrong)
        for text, wanted, got in wrong:
            print(f"{name}: {text!r:.120}\n    expected {wanted[:24]}\n    found    {got[:24]}")
    print(f"{len(cases)} tokenizers, {n_texts} texts, {n_wrong} differ")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
