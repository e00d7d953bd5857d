"""Every command of README and of the pages in `docs/` runs as it is written, over small models of these names."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

from place import ROOT, SOON, STORIES, TEMPLATE, Place

PAGES = ["README.md", "docs", "python/README.md"]

# Lines that do not run here, and why.
ELSEWHERE = [
    (r"^git clone|^cargo |^cd ", "the gate builds the project"),
    (r"cellar pull|OWNER/NAME|^cellar (list|rm)", "needs the Hugging Face Hub; tests of the program have a hub of their own"),
    (r"--backend cuda \"|^scripts/|^gpu-check/|^benches/", "needs a GPU, a Mac or llama.cpp"),
    (r"vllm-router|lm_eval|^  --|maturin|docker|your_program|libllama/|^(claude|codex|opencode|qwen|aider)( |$)", "other programs"),
    (r"--kv-events", "a cargo feature that is off by default"),
]


def run(program, report):
    with Place(program) as place:
        prepare(place)
        n_run = 0
        for page in pages():
            for line in commands(page):
                if any(re.search(pattern, line) for pattern, _ in ELSEWHERE):
                    continue
                n_run += 1
                name = f"{page.relative_to(ROOT)}: {line}"
                if re.search(r"(^| )cellar serve", line):
                    report.check(name, *serves(place, line))
                elif line.startswith("curl"):
                    with place.serve("-m model.gguf") as server:
                        done = place.shell(line.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}"))
                        report.check(name, done.code == 0 and '"error"' not in done.out and done.out, done)
                else:
                    done = place.shell(short(line))
                    # The graphs of the example differ.
                    report.check(name, done.code == (1 if "graph diff" in line else 0), done)
        report.check("commands were found", n_run > 40, n_run)


def pages():
    for name in PAGES:
        path = ROOT / name
        # The page of all flags is made of the help texts, whose examples name files of anybody.
        yield from [path] if path.is_file() else sorted(p for p in path.rglob("*.md") if p.name != "flags.md")


def commands(page):
    """The lines of shell in a page, without comments. Blocks of `bash` are for other programs and machines."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).splitlines():
        line = re.sub(r"\s+#\s.*$", "", line).rstrip(" \\")
        if line:
            yield line


def prepare(place):
    """The models and texts that the pages name."""
    place.model_with("model.gguf", "tokenizer.chat_template", TEMPLATE)
    for name in ["chat.gguf", "big.gguf", "small.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"]:
        shutil.copy(place.dir / "model.gguf", place.dir / name)
    encoders = ROOT / "tests" / "fixtures" / "encoders"
    shutil.copytree(encoders / "bert_tiny", place.dir / "all-MiniLM-L6-v2")
    shutil.copytree(encoders / "bert_rerank_tiny", place.dir / "bge-reranker-v2-m3")
    shutil.copytree(encoders / "qwen3_embed_tiny", place.dir / "DIRECTORY", dirs_exist_ok=True)
    embedder = place.shell("cellar convert DIRECTORY embedder.gguf --type f16")
    assert embedder.code == 0, embedder
    text = (place.dir / "notes.txt").read_text()
    (place.dir / "notes.txt").write_text("You press a key.\nIt rains.\nThe sun shines.\nTom plays.\n")
    for name in ["prompt.txt", "edit-this-code.txt"]:
        (place.dir / name).write_text("Once upon a time there was a dog.")
    (place.dir / "book.txt").write_text(text[:300])
    (place.dir / "calibration.txt").write_text(4 * text)
    (place.dir / "README.md").write_text(text)
    (place.dir / "lines.txt").write_text("It rains.\nThe sun shines.\n")
    (place.dir / "questions.txt").write_text("Who was it?\nWhere did they go?\n")
    mixture = ["--layers", "2", "--experts", "4", "--used", "2", "--dim", "256", "--inner", "256"]
    subprocess.run([sys.executable, ROOT / "scripts/mixture.py", place.dir / "mixture.gguf", *mixture], check=True)
    request = {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}
    (place.dir / "conversation.jsonl").write_text(2 * (json.dumps(request) + "\n"))
    (place.dir / "prompts.jsonl").write_text('{"prompt": "Once"}\n{"prompt": "One day"}\n')
    schema = {"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"]}
    (place.dir / "person.json").write_text(json.dumps(schema))


def short(line):
    """The same with less to generate."""
    return line.replace("-n 10000", "-n 3000")


def serves(place, line):
    """Whether the server that a line starts answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = re.sub(r" --port \d+", "", line).replace("cellar serve", f"exec cellar serve --port {port}")
    line = re.sub(r"^((\w+=\S+ )+)exec", r"exec env \1", line).replace("~/models", "models")
    (place.dir / "models").mkdir(exist_ok=True)
    if not (place.dir / "models" / "model.gguf").exists():
        shutil.copy(STORIES, place.dir / "models" / "model.gguf")
    process = subprocess.Popen(
        ["bash", "-c", line],
        cwd=place.dir,
        env=place.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    up = False
    for _ in range(SOON * 10):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            up = True
            break
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.1)
    process.terminate()
    out, _ = process.communicate(timeout=SOON)
    # One that is ended while it still loads is ended by the signal.
    is_good = process.returncode in (0, -signal.SIGTERM)
    return up and is_good, f"{process.returncode}\n{out.decode(errors='replace')}"
