#!/usr/bin/env python3
"""Cellar against llama.cpp: the same file, machine and threads, run alternately.

    benches/peer/compare.py --llama-bench PATH MODEL.gguf [MODEL.gguf ...]
    benches/peer/compare.py --llama-bench PATH --llama-quantize PATH --work FOLDER \\
        --requantize SMALL.gguf:Q8_0,Q5_K_M,Q6_K,Q4_0,F16 MODEL.gguf ... --depths 0,4096,16384 --minutes 40
    benches/peer/compare.py --batched-bench PATH --seqs 16 MODEL.gguf
    benches/peer/compare.py --llama-completion PATH --load MODEL.gguf

Prints a Markdown table: the median of each program's tokens per second, and the median ratio of
runs of one round (machines drift; runs of a round drift together). Every llama.cpp setting in
VARIANTS runs in every round; Cellar is compared with the one of the best median.

--limits    adds the share of the machine's read bandwidth and int8 peak, measured in the same rounds,
            and how fast matmuls alone read weights while generating (at depth 0, by one more run of
            Cellar with --times, relative to the mean of the bandwidth before and after it)
--kv-type   the type of K and V in both programs
--seqs      concurrent sequences instead of one, first each with a prompt of its own, then all with
            2048 tokens that they share; llama.cpp with shared cells (-kvu) and with streams
--load      whole programs for one token: less is better, the ratio is llama.cpp's by Cellar's
--minutes   divides the time among the cases; slow ones get fewer rounds, at least one
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

VARIANTS = {"default": [], "--repack 0": ["--repack", "0"], "-fa on": ["-fa", "on"]}
# llama.cpp needs flash attention for quantized V.
QUANTIZED_KV = {"-fa on": ["-fa", "on"], "-fa on --repack 0": ["-fa", "on", "--repack", "0"]}
SEQ_VARIANTS = {
    "-kvu -fa on": ["-kvu", "-fa", "on"],
    "-kvu -fa off": ["-kvu", "-fa", "off"],
    "streams -fa on": ["-no-kvu", "-fa", "on"],
    "streams -fa off": ["-no-kvu", "-fa", "off"],
}
SHARED_PROMPT = 2048


def output(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


class Case:
    """A model at a depth: the runs of both programs and their results."""

    best = max  # of tokens per second

    def __init__(self, args, model, depth):
        self.args, self.model, self.depth = args, model, depth
        # Prompts are measured at depth 0 only: at depth the time is for generating.
        self.prompt = 0 if depth else args.prompt
        self.variants = {name: flags for name, flags in self.settings().items() if args.setting in (None, name)}
        if not self.variants:
            sys.exit(f"--setting {args.setting}: it is one of {', '.join(map(repr, self.settings()))} here")
        self.ours, self.theirs = [], {name: [] for name in self.variants}
        self.weights, self.limits = None, []
        self.matmuls = []

    def settings(self):
        return QUANTIZED_KV if self.args.kv_type not in (None, "f16", "f32") else VARIANTS

    @staticmethod
    def ratio(ours, theirs):
        return ours / theirs

    def phases(self):
        all_phases = [(self.prompt, f"prompt {self.prompt}"), (self.args.generate, f"generate {self.args.generate}")]
        at = f" at depth {self.depth}" if self.depth else ""
        return [(i, what + at) for i, (n, what) in enumerate(all_phases) if n]

    def round(self):
        self.ours.append(self.cellar())
        for name, flags in self.variants.items():
            self.theirs[name].append(self.llama(flags))
        if self.args.limits:
            self.limits.append(self.measured_limits())
            if not self.depth and self.args.generate:
                speed = self.matmul_speed()
                self.limits.append(self.measured_limits())
                around = statistics.mean(row["read_gb_per_second"] for row in self.limits[-2:])
                self.matmuls.append((speed, speed / around))

    def measured_limits(self):
        return json.loads(output([self.args.limits, str(self.args.threads)]))

    def common(self, prompt):
        return ["-m", self.model, "-p", str(prompt), "-n", str(self.args.generate), "-t", str(self.args.threads)]

    def cellar(self):
        depth = ["--depth", str(self.depth)] if self.depth else []
        kv_type = ["--kv-type", self.args.kv_type] if self.args.kv_type else []
        return cellar_bench(self.args, [*self.common(self.prompt), *depth, *kv_type])

    def matmul_speed(self):
        """GB of weights per second during the matmuls of generating."""
        steps = bench_report(self.args, [*self.common(0), "--times"])["generation_steps"]
        return next(step["weight_gb_per_second"] for step in steps if step["kind"] in ("matmul", "matrices"))

    def llama(self, flags):
        depth = ["-d", str(self.depth)] if self.depth else []
        kv_type = ["-ctk", self.args.kv_type, "-ctv", self.args.kv_type] if self.args.kv_type else []
        rows = json.loads(output([self.args.llama_bench, *self.common(self.prompt), *depth, *kv_type, "-r", "1", "-o", "json", *flags]))
        self.weights = multiplied(self.args.cellar, self.model)
        prompt = next((row["avg_ts"] for row in rows if row["n_gen"] == 0), None)
        return [prompt, next((row["avg_ts"] for row in rows if row["n_prompt"] == 0), None)]

    def name(self):
        kv_type = f", {self.args.kv_type} K and V" if self.args.kv_type else ""
        return os.path.basename(self.model).removesuffix(".gguf") + kv_type

    def print(self):
        name = self.name()
        for phase, what in self.phases():
            median = {n: statistics.median(r[phase] for r in rounds) for n, rounds in self.theirs.items()}
            best = self.best(median, key=median.get)
            ratio = statistics.median(self.ratio(a[phase], b[phase]) for a, b in zip(self.ours, self.theirs[best]))
            own = statistics.median(r[phase] for r in self.ours)
            cells = [name, what, number(own), number(median[best]), best, f"{ratio:.2f}", str(len(self.ours))]
            if self.args.limits:
                cells.append(self.share(phase, own))
            print(f"| {' | '.join(cells)} |", flush=True)

    def share(self, phase, own):
        """The share of the limit that weights alone need: bytes per token, two operations per value."""
        n_bytes, n_values = self.weights
        if phase == 1:
            limit = statistics.median(row["read_gb_per_second"] for row in self.limits)
            reached = own * n_bytes / 1e9
            whole = f"{reached:.1f} of {limit:.1f} GB/s ({reached / limit:.0%})"
            if not self.matmuls:
                return whole
            speed, part = (statistics.median(column) for column in zip(*self.matmuls))
            return f"{whole}; matmuls {speed:.1f} ({part:.0%})"
        limits = [row["int8_tera_ops_per_second"] for row in self.limits]
        reached = own * 2 * n_values / 1e12
        if None in limits:
            return f"{reached:.2f} TOP/s"
        limit = statistics.median(limits)
        return f"{reached:.2f} of {limit:.2f} TOP/s ({reached / limit:.0%})"


class SeqCase(Case):
    """Concurrent sequences: with prompts of their own, or generating after one that they share."""

    def __init__(self, args, model, shared):
        super().__init__(args, model, SHARED_PROMPT if shared else 0)
        self.shared = shared

    def settings(self):
        return SEQ_VARIANTS

    def phases(self):
        n_seqs, n_generate = self.args.seqs, self.args.generate
        if self.shared:
            return [(1, f"{n_seqs} sequences sharing {self.depth} tokens: generate {n_generate}")]
        prompt = f"{n_seqs} sequences: prompt {self.prompt}"
        return [(0, prompt), (1, f"{n_seqs} sequences after {self.prompt} tokens: generate {n_generate}")]

    def cellar(self):
        common = ["-m", self.model, "-t", str(self.args.threads), "--seqs", str(self.args.seqs)]
        n_generate = str(self.args.generate)
        if self.shared:
            depth = ["--depth", str(self.depth), "--share-depth"]
            return cellar_bench(self.args, [*common, "-p", "0", "-n", n_generate, *depth])
        prompt, _ = cellar_bench(self.args, [*common, "-p", str(self.prompt), "-n", "0"])
        _, generation = cellar_bench(self.args, [*common, "-p", "0", "-n", n_generate, "--depth", str(self.prompt)])
        return [prompt, generation]

    def llama(self, flags):
        n_prompt, n_seqs, n_generate = self.depth or self.prompt, self.args.seqs, self.args.generate
        n_ctx = n_seqs * (n_prompt + n_generate) + 256
        sizes = ["-c", str(n_ctx), "-b", "2048", "-ub", "512", "-npp", str(n_prompt), "-ntg", str(n_generate), "-npl", str(n_seqs)]
        threads = ["-t", str(self.args.threads), "--output-format", "jsonl"]
        shared = ["-pps"] if self.shared else []
        report = output([self.args.batched_bench, "-m", self.model, *sizes, *threads, *shared, *flags])
        row = json.loads(next(line for line in report.splitlines() if line.startswith("{")))
        return [row["speed_pp"], row["speed_tg"]]


class LoadCase(Case):
    """From the start of the program to its first token, with the file in the page cache."""

    best = min  # of seconds and megabytes
    PROMPT, CONTEXT = "The first token", 4096

    def settings(self):
        return {"default": [], "--repack 0": ["--no-repack"]}

    @staticmethod
    def ratio(ours, theirs):
        return theirs / ours

    def phases(self):
        return [(0, "to the first token, s"), (1, f"peak memory, MB, {self.CONTEXT} tokens")]

    def flags(self):
        return ["-m", self.model, "-n", "1", "-t", str(self.args.threads), "-c", str(self.CONTEXT), "--temp", "0"]

    def cellar(self):
        return seconds_and_megabytes([self.args.cellar, "run", *self.flags(), self.PROMPT])

    def llama(self, flags):
        return seconds_and_megabytes([self.args.llama_completion, *self.flags(), "-p", self.PROMPT, "-no-cnv", "--no-warmup", *flags])


def seconds_and_megabytes(command):
    """How long a program ran, and its peak resident memory."""
    start = time.monotonic()
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = subprocess.Popen(command, **nothing)
    _, status, usage = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with {running.returncode}")
    return [time.monotonic() - start, usage.ru_maxrss * 1024 / 1e6]


def bench_report(args, flags):
    return json.loads(output([args.cellar, "bench", *flags, "-r", "1", "--json"]).splitlines()[-1])


def cellar_bench(args, flags):
    """Tokens per second of prompt and generation; None if not measured."""
    found = bench_report(args, flags)
    keys = ("prompt_tokens_per_second", "generation_tokens_per_second")
    return [found[key]["median"] if found.get(key) else None for key in keys]


def number(x):
    return f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def multiplied(cellar, model):
    """Bytes of weights that a generated token reads, and weights that a prompt token is multiplied with:
    neither counts the embedding, and only the last prompt token is multiplied with the output matrix."""
    report = json.loads(output([cellar, "inspect", model, "--json"]))
    tensors, sizes = report["tensors"], report["model"]
    looked_up, n_output = tensors["looked_up"], sizes["embedding_dim"] * sizes["vocab_size"]
    return tensors["n_bytes"] - looked_up["n_bytes"], tensors["n_values"] - looked_up["n_values"] - n_output


def requantized(args):
    """The files that --requantize names; missing ones are made."""
    for request in args.requantize:
        source, _, types = request.rpartition(":")
        for kind in filter(None, types.split(",")):
            stem = os.path.basename(source).removesuffix(".gguf")
            target = os.path.join(args.work, f"{stem}-as-{kind}.gguf")
            if not os.path.exists(target):
                output([args.llama_quantize, "--allow-requantize", source, target + ".part", kind])
                os.rename(target + ".part", target)
            yield target


def processor():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--llama-bench", help="the program of a llama.cpp build")
    parser.add_argument("--batched-bench", help="llama-batched-bench of a llama.cpp build, for --seqs")
    parser.add_argument("--seqs", type=int, help="measure so many concurrent sequences instead of one")
    parser.add_argument("--kv-type", help="how K and V are stored, in both programs [default: f16]")
    parser.add_argument("--llama-quantize", help="the program of a llama.cpp build, for --requantize")
    parser.add_argument("--requantize", "--requantise", action="append", default=[], metavar="MODEL:TYPE,TYPE", help="other formats of a model to make and measure")
    parser.add_argument("--work", default=".", help="folder for requantized files")
    parser.add_argument("--cellar", default="target/release/cellar")
    parser.add_argument("--limits", help="the program target/release/limits, for the share of the limit")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--depths", default="0", help="depths (tokens before) at which generating is measured, such as 0,4096")
    parser.add_argument("--load", action="store_true", help="measure the time to the first token and the memory instead")
    parser.add_argument("--llama-completion", help="llama-completion of a llama.cpp build, for --load")
    parser.add_argument("--setting", help="only this llama.cpp setting, such as '-fa on', if a round takes long")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--minutes", type=float, help="about how long all may take")
    args = parser.parse_args()
    needed = "batched-bench" if args.seqs else "llama-completion" if args.load else "llama-bench"
    if not getattr(args, needed.replace("-", "_")):
        parser.error(f"--{needed} is needed")
    if (args.seqs or args.load) and (args.limits or args.kv_type or args.depths != "0" or args.seqs and args.load):
        parser.error("--seqs and --load cannot be combined with each other, --limits, --kv-type or --depths")
    if args.requantize and not args.llama_quantize:
        parser.error("--requantize needs --llama-quantize")
    return args


def main():
    args = arguments()
    models = args.models + list(requantized(args))
    if args.seqs:
        cases = [SeqCase(args, model, shared) for model in models for shared in (False, True)]
    elif args.load:
        cases = [LoadCase(args, model, 0) for model in models]
    else:
        cases = [Case(args, model, int(depth)) for model in models for depth in args.depths.split(",")]
    print(f"{processor()}, {args.threads} threads; medians of rounds.\n")
    columns = ["model", "phase", *(name if args.load else f"{name}, t/s" for name in ("Cellar", "llama.cpp")), "best llama.cpp setting", "ratio", "rounds"]
    columns += ["share of the limit"] if args.limits else []
    print(f"| {' | '.join(columns)} |\n| {' | '.join('---' for _ in columns)} |")
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    for left, case in zip(range(len(cases), 0, -1), cases):
        start = time.monotonic()
        share = (end - start) / left if end else float("inf")
        for done in range(1, args.pairs + 1):
            case.round()
            used = time.monotonic() - start
            # Another round is begun if it is likely to end in time.
            if used + used / done > share:
                break
        case.print()


if __name__ == "__main__":
    main()
