"""The first five minutes: what users of ollama and llama.cpp type, and what they read."""

import json
import os
import time

from place import Place

# Command lines that cannot do what was meant: the code, and what the one line of the answer says.
MISTAKES = [
    ("run llama3", 2, "cellar pull|OWNER/NAME"),
    ("run llama3.2:1b", 1, "cellar pull|OWNER/NAME"),
    ("run missing.gguf", 1, "missing.gguf.*(No such file|there is no)"),
    ("run OWNER/NAME-GGUF hello", 1, "cellar pull OWNER/NAME-GGUF"),
    ("chat missing.gguf", 1, "missing.gguf"),
    ("run -m https://huggingface.co/OWNER/NAME-GGUF hi", 1, "cellar pull OWNER/NAME-GGUF"),
    ("run -m https://ollama.com/library/llama3 hi", 1, "OWNER/NAME"),
    ("run -m model.gguf --lora a.gguf hi", 1, "cannot open 'a.gguf'"),
    ("run -m model.gguf --image a.png hi", 1, "no vision or audio tower.*--mmproj FILE"),
    ("run -m model.gguf --mmproj a.gguf hi", 1, "cannot open 'a.gguf'"),
    ("generate hi", 2, "cellar run"),
    ("quantize model.gguf out.gguf q4_0", 2, "cellar convert"),
    ("show model.gguf", 2, "cellar inspect"),
    ("ps", 2, "a server lists its models"),
    ("server -m model.gguf", 2, "serve"),
    ("kl -m model.gguf -f notes.txt", 2, "--kv-type"),
    ("run -m model.gguf -n nine hi", 2, "a number of at least 0"),
    ("run -m model.gguf --max-tokens 9 hi", 2, "--predict"),
    ("embed 'A text'", 2, "CELLAR_MODEL"),
    ("tokenize -m model.gguf two texts", 2, "in quotes"),
    ("serve -m model.gguf --tensor-parallel-size 2", 2, "one GPU"),
    ("serve -m model.gguf --cors-origins=x", 2, "proxy"),
    ("run -m model.gguf --port 8080 hi", 2, "cellar serve"),
    ("convert model.gguf out.gguf q4_0", 2, "--type q4_0"),
    ("batch model.gguf p.jsonl", 2, "-f p.jsonl"),
    ("graph dif llama qwen2", 2, "cellar graph diff"),
    ("signin", 2, "no accounts"),
]

# Command lines of others that work.
WORKING = [
    "run model.gguf 'Once upon a time' -n 2",
    "run model.gguf -p 'Once upon a time' -n 2",
    "run ./model.gguf Once -n 2",
    "run -m model.gguf -fa on -n 2 Once",
    "run -m model.gguf -fa -n 2 Once",
    "run -m model.gguf --flash-attn auto -n 2 Once",
    "run -m model.gguf -no-cnv -n 2 Once",
    "run -m model.gguf --jinja -n 2 Once",
    "run -m model.gguf --mlock -n 2 Once",
    "run -m model.gguf --no-mmap -ngl 0 -c 64 -n 2 Once",
    "run -m model.gguf -q -n 2 Once",
    "run -m model.gguf -v -n 2 Once",
    "run -m model.gguf --n-predict=2 --cache-type-k=f16 --log-verbosity=3 Once",
]

# Commands that take a model before texts, and from CELLAR_MODEL.
WITH_MODEL = [
    "tokenize MODEL 'Once upon'",
    "embed MODEL --pooling mean 'Once upon' 'One day'",
    "graph MODEL",
    "inspect MODEL",
    "perplexity MODEL -f notes.txt -c 64 --chunks 1",
    "kl MODEL 'Once upon a time there was a cat' --kv-type q8_0",
    "imatrix MODEL -f notes.txt -c 64 --chunks 1 -o -",
]

COMMANDS = ["run", "chat", "batch", "serve", "bench", "embed", "convert", "inspect", "plan", "perplexity"]


def run(program, report):
    with Place(program) as place:
        for line, code, pattern in MISTAKES:
            done = place.shell(f"cellar {line}")
            report.check(f"mistake: {line}", done.is_refused(code, pattern), done)
        for line in WORKING:
            done = place.shell(f"cellar {line} --temp 0")
            report.check(f"works: {line}", done.code == 0 and done.out.strip() != "", done)
        for line in WITH_MODEL:
            named = place.shell("cellar " + line.replace("MODEL", "model.gguf"))
            report.check(f"a model before texts: {line}", named.code == 0 and named.out != "", named)
            given = place.shell("CELLAR_MODEL=model.gguf cellar " + line.replace("MODEL ", "", 1).replace("MODEL", ""))
            report.check(f"CELLAR_MODEL: {line}", given.code == 0, given)
        toy(place, report)
        stdin(place, report)
        quiet(place, report)
        for command in COMMANDS:
            done = place.shell(f"cellar {command} -h")
            n_lines = len(done.out.splitlines())
            report.check(f"{command} -h fits 60 lines", done.code == 0 and n_lines <= 60, n_lines)
        done = place.shell("cellar -h")
        report.check("-h fits 60 lines", len(done.out.splitlines()) <= 60, len(done.out.splitlines()))


def toy(place, report):
    """The built-in model tells its story alone, or of words."""
    for line in ["run -n 8 --temp 0", "run 'Once upon a time' -n 8 --temp 0"]:
        done = place.shell(f"cellar {line}")
        report.check(f"toy: {line}", done.code == 0 and done.out.startswith("Once"), done)


def stdin(place, report):
    """Standard input is read where it is meant, and never waited for where it is not."""
    (place.dir / "q.txt").write_text("Once upon a time\nThe cat\nOne day\n")
    flags = "-m model.gguf --raw -n 2 --temp 0"
    done = place.shell(f"while read -r p; do cellar run {flags} \"$p\"; echo END; done < q.txt")
    report.check("a loop answers each line", done.out.count("END") == 3, done)
    (place.dir / "piped").write_text("")
    pipe_read, pipe_write = os.pipe()
    started = time.monotonic()
    done = place.shell(f"cellar run {flags} Once", stdin=pipe_read)
    is_soon = done.code == 0 and time.monotonic() - started < 5
    report.check("a pipe without data is not waited for", is_soon, done)
    os.close(pipe_write)
    os.close(pipe_read)
    done = place.shell(f"cat notes.txt | cellar run {flags} --json 'So,'")
    prompt = json.loads(done.out or "{}").get("prompt_tokens", 0)
    report.check("cat FILE | cellar run PROMPT reads the file", prompt > 200, done)
    done = place.shell(f"cat notes.txt | cellar run {flags} --no-stdin --json 'So,'")
    prompt = json.loads(done.out or "{}").get("prompt_tokens", 0)
    report.check("--no-stdin does not", 0 < prompt < 20, done)
    done = place.shell(f"cellar run {flags} -f - < notes.txt --json")
    prompt = json.loads(done.out or "{}").get("prompt_tokens", 0)
    report.check("-f - reads stdin", prompt > 200, done)
    done = place.shell(f"cellar run {flags} Once <&-")
    report.check("a closed stdin is no error", done.code == 0, done)


def quiet(place, report):
    """What is on stderr."""
    done = place.shell("cellar run -m model.gguf --raw Once -n 2 --temp 0 --quiet")
    report.check("--quiet prints the text alone", done.code == 0 and done.err == "", done)
    done = place.shell("cellar run -m model.gguf --raw Once -n 2 --temp 0")
    report.check("--temp 0 shows no seed", "seed" not in done.err, done)
    n = (os.cpu_count() or 1) * 4
    done = place.shell(f"cellar run -m model.gguf --raw Once -n 2 --temp 0 -t {n}")
    report.check("-t beyond the cores warns", f"{n}" in done.err and "warning" in done.err, done)
    done = place.shell("CELLAR_MODEL=model.gguf cellar run --raw Once -n 2 --temp 0 --json")
    report.check("CELLAR_MODEL names the model", done.code == 0, done)
    done = place.shell("CELLAR_MODEL=missing.gguf cellar run --raw Once -n 2 --temp 0")
    report.check("CELLAR_MODEL that is not there", done.is_refused(1, "missing.gguf"), done)
