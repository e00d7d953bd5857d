#!/usr/bin/env python3
"""Counts the machine code of the shipped PTX, without a GPU: crates/kv-cuda/ptx/counts.tsv.

    scripts/gpu-counts.py [--accept] [--loops KERNEL...]

Assembles crates/kv-cuda/ptx/kernels.ptx.lzma for compute capability 8.0, 9.0 and 10.0 by ptxas, reads
it back by nvdisasm, and writes the table. Fails, and writes nothing, where a count has grown by more
than 5 % or a kernel spills more registers than in the table: --accept writes it all the same, for a
change that is worth it. --loops prints the loops of kernels and writes nothing.

ptxas and nvdisasm are those of CUDA_HOME or PATH; else they come from PyPI (target/ptx/tools).

What a row of loops says: warp instructions of a pass, bytes of weights or of K and V that a warp's pass
reads for the first time, and their quotient. Of attention, a pass is a tile of cells, K and V, by one of
four warps: the shortest way through all matrix instructions and loads of a type.
"""

import collections
import lzma
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PTX = os.path.join(ROOT, "crates/kv-cuda/ptx/kernels.ptx.lzma")
TABLE = os.path.join(ROOT, "crates/kv-cuda/ptx/counts.tsv")
WORK = os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")), "ptx")
TARGETS = ["80", "90", "100"]
GROWTH = 1.05

# Values and bytes of a block.
BLOCKS = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17), "iq1_s": (256, 50), "iq1_m": (256, 56),
    "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq2_s": (256, 82), "iq3_xxs": (256, 98),
    "iq3_s": (256, 110), "tq1_0": (256, 54), "tq2_0": (256, 66), "q1_0": (128, 18), "q2_0": (64, 18),
    "nvfp4": (64, 36), "f16": (1, 2), "bf16": (1, 2), "f32": (1, 4),
}
# Types of K and V: bytes of 32 values, and what only the instructions that load their tiles have.
ROWS = {
    "f16": (64, "LDGSTS"),
    "q8_0": (34, "0x80808080"),
    "q4_0": (18, "0xf0f0f0f"),
}


def tool(name):
    """The path of ptxas or nvdisasm."""
    home = os.environ.get("CUDA_HOME")
    found = [os.path.join(home, "bin", name)] if home else []
    found += [shutil.which(name) or ""]
    folder = os.path.join(WORK, "tools")
    packages = {"ptxas": "nvidia-cuda-nvcc==13.5.37", "nvdisasm": "nvidia-cuda-nvdisasm==13.5.37"}
    found.append(os.path.join(folder, "nvidia/cu13/bin", name))
    found.append(os.path.join(WORK, "cuda/nvidia/cu13/bin", name))
    for path in found:
        if os.access(path, os.X_OK):
            return path
    print(f"no {name}: fetching it from PyPI", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
    subprocess.run(pip + [packages[name]], check=True)
    path = os.path.join(folder, "nvidia/cu13/bin", name)
    os.chmod(path, 0o755)
    return path


def files(text):
    """The PTX of each file of kernels."""
    starts = [m.start() for m in re.finditer(r"^\.version ", text, re.M)] + [len(text)]
    return [text[a:b] for a, b in zip(starts, starts[1:])]


def assembled(job):
    """What ptxas says of one file's kernels on one target, and their machine code."""
    number, text, target, ptxas, nvdisasm = job
    base = os.path.join(WORK, f"count.{number}.{target}")
    with open(base + ".ptx", "w") as file:
        file.write(text)
    cubin = base + ".cubin"
    said = subprocess.run([ptxas, "-v", f"-arch=sm_{target}", base + ".ptx", "-o", cubin],
                          capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"ptxas for {target}: {said.stderr}")
    # Instructions are counted for one target.
    code = ""
    if target == "90":
        code = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    os.remove(base + ".ptx")
    os.remove(cubin)
    kernels = {}
    name, spills = None, 0
    for line in said.stderr.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
        elif spilled := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(spilled[1]) + int(spilled[2])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name] = {"registers": int(used[1]), "spills": spills,
                             "shared": int(shared[1]) if shared else 0}
    for name, code in instructions(code).items():
        kernels[name]["code"] = code
    return target, kernels


def instructions(sass):
    """Of each kernel: its instructions, and the index of each label."""
    kernels, code, labels = {}, [], {}
    for line in sass.splitlines():
        line = line.strip()
        if section := re.match(r"\.text\.(\w+):", line):
            code, labels = [], {}
            kernels[section[1]] = (code, labels)
        elif label := re.match(r"(\.L_x?_?\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return kernels


def operation(instruction):
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def loops(kernel):
    """Loops as (first, last) instruction: those of backward branches."""
    code, labels = kernel["code"]
    found = []
    for at, instruction in enumerate(code):
        branch = re.search(r"\bBRA(?:\.\w+)*\b.*?`\((\.\w+)\)", instruction)
        if branch and labels.get(branch[1], at + 1) < at:
            found.append((labels[branch[1]], at))
    return sorted(found)


def counted(kernel, span):
    """How often the operations that matter are in a loop."""
    body = kernel["code"][0][span[0]:span[1] + 1]
    count = collections.Counter(operation(line).split(".")[0] for line in body)
    return {"instructions": len(body),
            "matrix": count["HMMA"] + count["IMMA"],
            "loads": count["LDG"] + count["LDGSTS"],
            "text": " ".join(f"{n} {count[n]}" for n in
                             ("LDG", "LDGSTS", "LDS", "LDSM", "STS", "SHFL", "IDP", "HMMA", "BAR", "MUFU", "CALL", "LDL")
                             if count[n])}


def successors(kernel):
    """Of each instruction, those that may come next."""
    code, labels = kernel["code"]
    after = []
    for at, instruction in enumerate(code):
        name, is_conditional = operation(instruction).split(".")[0], instruction.startswith("@")
        targets = [labels[label] for label in re.findall(r"\.L_x?_?\w+", instruction) if label in labels]
        if name in ("BRA", "BRX"):
            after.append(targets + ([at + 1] if is_conditional else []))
        elif name == "EXIT":
            after.append([at + 1] if is_conditional else [])
        else:
            after.append([at + 1])
    return after


def shortest(after, start, end):
    """Instructions of the shortest way from one to another, without the last one."""
    reached, front, n = {start}, [start], 0
    while front:
        if end in reached:
            return n
        front = [to for at in front for to in after[at] if to < len(after) and to not in reached]
        reached.update(front)
        n += 1
    return None


def main_loop(kernel):
    """The loop without another in it that loads most."""
    spans = loops(kernel)
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return max(inner, key=lambda s: counted(kernel, s)["loads"], default=None)


def gemm_pass(kernel):
    """Instructions of the shortest way through all matrix instructions, loads of 16 bytes and stores of a
    GEMM's loop, no bytes, matrix instructions."""
    spans = [s for s in loops(kernel) if counted(kernel, s)["matrix"]]
    start, end = min(spans, key=lambda s: s[1] - s[0])
    after, code = successors(kernel), kernel["code"][0]
    matrices = [i for i in range(start, end) if operation(code[i]).startswith("HMMA")]
    moves = [i for i in range(start, end) if operation(code[i]).startswith(("LDG.E.128", "STS"))]
    way = [start] + sorted(matrices + moves) + [end]
    parts = [shortest(after, a, b) for a, b in zip(way, way[1:])]
    if None in parts:
        sys.exit("there is no way through a GEMM's loop")
    return 1 + sum(parts), 0, len(matrices)


def product_rows(kernels):
    """GEMV and GEMM: (kernel, what, instructions, bytes, matrix instructions)."""
    rows = []
    for name, kernel in sorted(kernels.items()):
        of = re.fullmatch(r"gem([vm])_(\w+?)(?:_([18]))?", name)
        if not of or of[2] not in BLOCKS:
            continue
        if of[1] == "m":
            rows.append((name, "loop", *gemm_pass(kernel)))
            continue
        else:
            span = main_loop(kernel)
            values, size = BLOCKS[of[2]]
            n_rows = 2 if of[3] == "1" else 4
            n_bytes = n_rows * 32 * (8 if values == 1 else 32) * size // values
        if span:
            count = counted(kernel, span)
            rows.append((name, "loop", count["instructions"], n_bytes, count["matrix"]))
    return rows


def attention_rows(kernels):
    """Attention by tensor cores: a tile of K and V of each type."""
    rows = []
    for name, kernel in sorted(kernels.items()):
        of = re.fullmatch(r"attend_(group|tiles)_(\d+)", name)
        if not of:
            continue
        dim = int(of[2])
        n_cells = 64 if dim <= 128 else 32
        code, spans = kernel["code"][0], loops(kernel)
        # The loop over tiles, which has matrix instructions and all others in it.
        def holds(span):
            names = [operation(line) for line in code[span[0]:span[1] + 1]]
            return sum(name.startswith(("HMMA", "LDGSTS")) for name in names), -span[1], span[0]

        outer = max(spans, key=holds)
        after = successors(kernel)
        matrices = [i for i in range(outer[0], outer[1]) if operation(code[i]).startswith("HMMA")]
        for kind, (size, mark) in ROWS.items():
            own = [i for i in range(outer[0], outer[1]) if mark in code[i]]
            way = sorted(matrices + own) + [outer[1]]
            parts = [shortest(after, a, b) for a, b in zip([outer[0]] + way, way)]
            if None in parts or not own:
                sys.exit(f"{name}: there is no way through all matrix instructions and loads of {kind}")
            rows.append((name, kind, 1 + sum(parts), 2 * n_cells * dim // 32 * size // 4, len(matrices)))
    return rows


def table(of_targets, sources):
    """The text of the table."""
    newest = of_targets["90"]
    lines = [f"# Machine code of the PTX with sources {sources}; written by scripts/gpu-counts.py.",
             "# kernel\tregisters\tshared\tspills\tinstructions (registers, spills: " + ", ".join(TARGETS) +
             "; the rest: 90)"]
    for name in sorted(newest):
        every = [of_targets[target][name] for target in TARGETS]
        registers = " ".join(str(kernel["registers"]) for kernel in every)
        spills = " ".join(str(kernel["spills"]) for kernel in every)
        kernel = newest[name]
        lines.append(f"{name}\t{registers}\t{kernel['shared']}\t{spills}\t{len(kernel['code'][0])}")
    lines.append("# loop\tof\tinstructions\tbytes\tbytes an instruction\tmatrix instructions")
    for name, what, n, n_bytes, matrix in product_rows(newest) + attention_rows(newest):
        lines.append(f"{name}\t{what}\t{n}\t{n_bytes}\t{n_bytes / n:.2f}\t{matrix}")
    return "\n".join(lines) + "\n"


def numbers(text):
    """What must not grow, by name: instructions of kernels and of loops, registers that are spilled."""
    found = {}
    for line in text.splitlines():
        words = line.split("\t")
        if line.startswith("#"):
            continue
        if len(words) == 5:
            found[f"{words[0]}, instructions"] = int(words[4])
            found[f"{words[0]}, bytes of spills"] = max(map(int, words[3].split()))
        else:
            found[f"{words[0]}, {words[1]}, instructions a pass"] = int(words[2])
    return found


def main():
    arguments = sys.argv[1:]
    os.makedirs(WORK, exist_ok=True)
    with open(PTX, "rb") as file:
        text = lzma.decompress(file.read()).decode()
    sources = re.search(r"sources (\w+),", text)[1]
    only = arguments[arguments.index("--loops") + 1:] if "--loops" in arguments else None
    texts = files(text)
    if only:
        texts = [t for t in texts if any(f".entry {name}(" in t for name in only)]
    tools = [tool("ptxas"), tool("nvdisasm")]
    of_targets = {target: {} for target in TARGETS}
    targets = ["90"] if only else TARGETS
    jobs = [(n, t, target, *tools) for n, t in enumerate(texts) for target in targets]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for target, kernels in pool.map(assembled, jobs):
            of_targets[target].update(kernels)
    if only:
        for name in only:
            kernel = of_targets["90"][name]
            print(f"{name}: {kernel['registers']} registers, {kernel['spills']} bytes of spills, {len(kernel['code'][0])}")
            for span in loops(kernel):
                count = counted(kernel, span)
                print(f"  {span[0]:5} to {span[1]:5}: {count['instructions']:5}  {count['text']}")
        return
    new = table(of_targets, sources)
    if os.path.exists(TABLE) and "--accept" not in arguments:
        with open(TABLE) as file:
            before = numbers(file.read())
        grown = [f"{name}: {n}, not {before[name]}" for name, n in numbers(new).items()
                 if name in before and n > before[name] * GROWTH]
        if grown:
            sys.exit("grown by more than 5 %; --accept takes it:\n" + "\n".join(grown))
    with open(TABLE, "w") as file:
        file.write(new)


main()
