#!/usr/bin/env python3
"""Cellar and llama.cpp side by side: the same file, machine and threads, one after the other in turns.

    benches/peer/compare.py --llama-bench PATH MODEL.gguf [MODEL.gguf ...]

Prints a Markdown table: the median of each program's tokens per second, and the median of the ratios
of pairs that ran next to each other (machines drift; pairs drift together). Every llama.cpp variant in
VARIANTS runs in every round; its best median is what Cellar is compared with.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

VARIANTS = {"default": [], "--repack 0": ["--repack", "0"], "-fa on": ["-fa", "on"]}


def output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def cellar(args, model):
    command = [args.cellar, "bench", "-m", model, "-p", str(args.prompt), "-n", str(args.generate)]
    found = json.loads(output(command + ["-t", str(args.threads), "-r", "1", "--json"]).splitlines()[-1])
    keys = ("prompt_tokens_per_second", "generation_tokens_per_second")
    return [found[key]["median"] for key in keys]


def llama(args, model, flags):
    command = [args.llama_bench, "-m", model, "-p", str(args.prompt), "-n", str(args.generate)]
    rows = json.loads(output(command + ["-t", str(args.threads), "-r", "1", "-o", "json"] + flags))
    prompt = next(row["avg_ts"] for row in rows if row["n_gen"] == 0)
    return [prompt, next(row["avg_ts"] for row in rows if row["n_prompt"] == 0)]


def processor():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--llama-bench", required=True, help="the program of a llama.cpp build")
    parser.add_argument("--cellar", default="target/release/cellar")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()

    print(f"{processor()}, {args.threads} threads; medians of {args.pairs} rounds in turns.\n")
    print("| model | phase | Cellar, t/s | llama.cpp, t/s | its best setting | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in args.models:
        ours, theirs = [], {name: [] for name in VARIANTS}
        for _ in range(args.pairs):
            ours.append(cellar(args, model))
            for name, flags in VARIANTS.items():
                theirs[name].append(llama(args, model, flags))
        for phase, what in enumerate((f"prompt {args.prompt}", f"generate {args.generate}")):
            median = {n: statistics.median(r[phase] for r in rounds) for n, rounds in theirs.items()}
            best = max(median, key=median.get)
            pairs = zip(ours, theirs[best])
            ratio = statistics.median(a[phase] / b[phase] for a, b in pairs)
            own = statistics.median(r[phase] for r in ours)
            name = os.path.basename(model).removesuffix(".gguf")
            print(f"| {name} | {what} | {own:.1f} | {median[best]:.1f} | {best} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
