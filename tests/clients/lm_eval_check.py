#!/usr/bin/env python3
"""lm-evaluation-harness (PyPI, `lm-eval[api]`) on `cellar serve`, with its `local-completions`.

    pip install lm-eval[api]
    VENV/bin/python tests/clients/lm_eval_check.py [--cellar target/release/cellar]

The server has the built-in model. A task of multiple choice, ten rows in a file, is evaluated: the harness sends each
choice with `echo`, `logprobs` and `max_tokens: 1`. Each log-likelihood is compared with the one out of the rows of
`cellar logits`, and so are the accuracy and which choices are greedy. Only the tokenizer is not the harness's own: it
has none without a model hub, so one that asks the server's /tokenize stands in for it.
"""

import argparse
import importlib.metadata
import json
import math
import struct
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from served import served

ROWS = [
    ("Once upon a", [" time", " dog", " ran"], 0),
    ("There was a little", [" the", " girl", " said"], 1),
    ("Tim and Lily went to the", [" park", " was", " happy"], 0),
    ("She was very", [" the", " tree", " happy"], 2),
    ("The dog ran", [" and played", " happy the", " day a"], 0),
    ("Her mom", [" red", " said", " ball"], 1),
    ("They played with the", [" ball", " and", " said yes"], 0),
    ("He saw a big", [" was", " tree", " to"], 1),
    ("One day, a boy named", [" the", " and", " Tim"], 2),
    ("The sun was", [" mom", " shining", " Tom"], 1),
]

# K and V as in `cellar logits`.
SERVER = ["-c", "2048", "--alias", "stories", "--kv-type", "f32"]

TASK = """
task: cellar_stories
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


class ServerTokenizer:
    """Encodes as the server does."""

    def __init__(self, address):
        self.address = address

    def encode(self, text):
        data = json.dumps({"content": text, "add_special": False}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/tokenize", data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]


def evaluate(address, folder, n_concurrent):
    rows, task = folder / "rows.jsonl", folder / "cellar_stories.yaml"
    keys = ("prompt", "choices", "answer")
    rows.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in ROWS))
    task.write_text(TASK.format(rows=rows))
    model = LocalCompletionsAPI(
        model="stories",
        base_url=f"{address}/v1/completions",
        tokenizer_backend="none",
        num_concurrent=n_concurrent,
        max_length=512,
    )
    model.tokenizer, model.tokenizer_backend = ServerTokenizer(address), "server"
    model.tokenized_requests = True
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(
        model=model, tasks=["cellar_stories"], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    accuracy = results["results"]["cellar_stories"]["acc,none"]
    answers = []
    for sample in sorted(results["samples"]["cellar_stories"], key=lambda sample: sample["doc_id"]):
        answers.append([(float(logprob), str(greedy) == "True") for logprob, greedy in sample["filtered_resps"]])
    return accuracy, answers


def rows_of(path):
    """The matrices of a safetensors file of f32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    matrices = {}
    for name, tensor in header.items():
        begin, end = (8 + length + at for at in tensor["data_offsets"])
        n_columns = tensor["shape"][1]
        values = struct.unpack(f"<{(end - begin) // 4}f", data[begin:end])
        matrices[name] = [values[at : at + n_columns] for at in range(0, len(values), n_columns)]
    return matrices


def expected(cellar, address, folder):
    """The same, out of logits."""
    tokenizer = ServerTokenizer(address)
    pairs = [(prompt, prompt + choice) for prompt, choices, _ in ROWS for choice in choices]
    encoded = [(tokenizer.encode(prompt), tokenizer.encode(text)) for prompt, text in pairs]
    ids, out = folder / "tokens.txt", folder / "logits.safetensors"
    ids.write_text("".join(",".join(map(str, tokens)) + "\n" for _, tokens in encoded))
    subprocess.run([cellar, "logits", "--tokens-file", ids, "--out", out], check=True, stderr=subprocess.DEVNULL)
    matrices = rows_of(out)
    answers = []
    for number, (prompt, tokens) in enumerate(encoded):
        logits = matrices[f"logits_{number}"]
        logprob, is_greedy = 0.0, True
        for at in range(len(prompt), len(tokens)):
            row = logits[at - 1]
            largest = max(row)
            logprob += row[tokens[at]] - largest - math.log(sum(math.exp(value - largest) for value in row))
            is_greedy &= row[tokens[at]] == largest
        answers.append((logprob, is_greedy))
    n = len(ROWS[0][1])
    return [answers[at : at + n] for at in range(0, len(answers), n)]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--cellar", default="target/release/cellar")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name, served(options.cellar, *SERVER) as address:
        folder = Path(name)
        wanted = expected(options.cellar, address, folder)
        is_right = [max(range(3), key=lambda at: row[at][0]) == answer for row, (*_, answer) in zip(wanted, ROWS)]
        for n_concurrent in (1, 4):
            accuracy, answers = evaluate(address, folder, n_concurrent)
            pairs = [pair for got, row in zip(answers, wanted, strict=True) for pair in zip(got, row, strict=True)]
            largest = max(abs(got[0] - want[0]) for got, want in pairs)
            assert largest < 1e-3, largest
            assert [got[1] for got, _ in pairs] == [want[1] for _, want in pairs]
            assert accuracy == sum(is_right) / len(ROWS), (accuracy, is_right)
            print(
                f"lm-eval {importlib.metadata.version('lm_eval')}, {n_concurrent} at once: accuracy {accuracy}, "
                f"{len(pairs)} log-likelihoods, of which {sum(got[1] for got, _ in pairs)} greedy; "
                f"largest difference {largest:.2g}"
            )


if __name__ == "__main__":
    main()
