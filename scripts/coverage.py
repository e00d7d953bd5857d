#!/usr/bin/env python3
"""Branch coverage: which sides of which conditions does no test take?

    rustup component add llvm-tools && cargo install cargo-llvm-cov --locked
    scripts/coverage.py                    runs the tests, prints a table and what is not taken
    scripts/coverage.py --report FILE      only reads what `cargo llvm-cov --json` wrote

It looks at what must never be wrong: the memories (kv-core), the scheduler, the store of prefixes and saved states.
The tests are those of these crates and of the engine. A side that no test can take is in coverage.txt beside this
script, with the reason, and so are those that no test takes yet. The script ends with 1 where a side is neither taken
nor in that list, or where a line of the list is not needed any more.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "scripts/coverage.txt"
PACKAGES = ["cellar-kv-block", "cellar-kv-core", "cellar-kv-rows", "cellar-scheduler", "cellar-prefix-store",
            "cellar-kv-backend", "cellar-engine"]
LOOKED_AT = {
    "kv-core: memories": "crates/kv-core/src/",
    "kv-block: formats": "crates/kv-block/src/",
    "kv-rows: layouts": "crates/kv-rows/src/",
    "scheduler": "crates/scheduler/src/",
    "prefix-store": "crates/prefix-store/src/",
    "kv-backend: saved states": "crates/kv-backend/src/state/",
}
# The reason of those that a test could take.
UNTESTED = "No test takes them yet."
SIDES = {"T": "true", "F": "false"}


def measured(target):
    """The report of all tests of the packages."""
    out = target / "coverage.json"
    command = ["cargo", "llvm-cov", "--branch", "--locked", "--json", "--output-path", out]
    command += [word for package in PACKAGES for word in ("-p", package)]
    # Branches are counted by nightly compilers only, or by one that is told to be one.
    environment = dict(os.environ, RUSTC_BOOTSTRAP="1", CARGO_TARGET_DIR=str(target), CARGO_INCREMENTAL="0",
                       INSTA_UPDATE="no")
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return out


def allowed():
    """(path, text of the line, side) -> reason. A line `# reason` is that of the lines below it."""
    found, reason = {}, None
    for line in LIST.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line.strip():
            path, side, text = line.split(" | ", 2)
            found[path, text, side] = reason
    return found


def is_tests(path):
    """Whether a file is a module of tests."""
    file = ROOT / path
    declared = f"#[cfg(test)]\nmod {file.stem};"
    return any(declared in above.read_text() for above in file.parent.glob("*.rs") if above.name in ("mod.rs", "lib.rs"))


def tests_begin(lines):
    """The number of the first line of a file's own tests."""
    marks = (number for number, line in enumerate(lines, 1) if line.strip() == "#[cfg(test)]")
    return next(marks, len(lines) + 1)


def branches(report):
    """path -> {(line, column, end): [times true, times false]} of what is looked at."""
    found = collections.defaultdict(dict)
    for of_file in report["data"][0]["files"]:
        path = of_file["filename"]
        path = path[path.find("/crates/") + 1:]
        if not path.startswith(tuple(LOOKED_AT.values())) or is_tests(path):
            continue
        end = tests_begin((ROOT / path).read_text().splitlines())
        for line, column, line_end, column_end, yes, no, *_ in of_file["branches"]:
            if line < end:
                # A generic function is there once for each type.
                times = found[path].setdefault((line, column, line_end, column_end), [0, 0])
                times[0] += yes
                times[1] += no
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=pathlib.Path, help="what `cargo llvm-cov --json` wrote")
    parser.add_argument("--target", type=pathlib.Path, default=ROOT / "target/coverage", help="where to compile")
    options = parser.parse_args()
    report = json.loads((options.report or measured(options.target)).read_text())
    reasons, used, missing = allowed(), set(), []
    counts = {name: [0, 0, 0] for name in LOOKED_AT}
    for path, of_file in sorted(branches(report).items()):
        name = next(name for name, prefix in LOOKED_AT.items() if path.startswith(prefix))
        lines = (ROOT / path).read_text().splitlines()
        for (line, *_), times in sorted(of_file.items()):
            text = lines[line - 1].strip()
            for side, n in zip("TF", times):
                key = (path, text, side)
                counts[name][0] += 1
                if n:
                    counts[name][1] += 1
                elif key in reasons:
                    counts[name][2] += reasons[key] != UNTESTED
                    used.add(key)
                else:
                    missing.append(f"{path}:{line}: never {SIDES[side]}: {text}")
    print("| part | sides of branches | taken by tests | cannot be taken | not taken |\n| --- | ---: | ---: | ---: | ---: |")
    for name, (n, taken, excused) in counts.items():
        print(f"| {name} | {n} | {taken} | {excused} | {n - taken - excused} |")
    unused = [f"scripts/coverage.txt: not needed: {' | '.join((path, side, text))}"
              for path, text, side in reasons.keys() - used]
    for line in missing + sorted(unused):
        print(line, file=sys.stderr)
    sys.exit(1 if missing or unused else 0)


if __name__ == "__main__":
    main()
