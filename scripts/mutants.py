#!/usr/bin/env python3
"""Mutation testing: which changes of an expression does no test notice?

    pip install tree-sitter tree-sitter-rust
    scripts/mutants.py --package cellar-kv-core --work target/mutants crates/kv-core/src/cells/*.rs
    scripts/mutants.py --changed HEAD~1 --work target/mutants

The second one takes the lines that differ from a commit, of what must never be wrong (WATCHED), for at most
`--seconds`, and names what it had no time for. It ends with 1 where a mutant survives, or no test reaches it, that is
not in mutants.txt in its folder, with the reason.

All mutants of the named files are compiled at once (mutant schemata): each stands behind a number, and
the environment variable MUTANT chooses one. Every test is first run alone to see which mutants it
reaches; then a mutant is run with the tests that reach it, quick ones first, until one fails. The
sources are copied to the work folder first; the checkout stays as it is. What does not compile is left
out. docs/testing.md has the results.

Nothing is mutated in tests, constants, `const fn`, attributes and macro arguments.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import tree_sitter
import tree_sitter_rust

# What must never be wrong, with the package whose tests look at it.
WATCHED = {
    "crates/kv-core/src/memory/": "cellar-kv-core",
    "crates/kv-core/src/cells/": "cellar-kv-core",
    "crates/kv-backend/src/state/": "cellar-kv-backend",
    "crates/scheduler/src/": "cellar-scheduler",
    "crates/prefix-store/src/": "cellar-prefix-store",
    "crates/server/src/auth.rs": "cellar-server",
    "crates/server/src/control_texts.rs": "cellar-server",
}
# Survivors with their reasons: `# reason`, then lines `path | mutant`.
KNOWN = pathlib.Path(__file__).resolve().parent / "mutants.txt"
# Of changed lines there are few mutants, and little time: shorter random tests, and none that takes longer than this.
LONGEST_TEST = 10
SHORT_TESTS = {"PROPTEST_CASES": "16", "CELLAR_SIM_STEPS": "4000", "CELLAR_EXHAUST_DEPTH": "4"}

PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))
SWITCH = pathlib.Path("src/mutant_switch.rs")
SWITCH_SOURCE = """//! Which mutant is on: the number in MUTANT, or none. With MUTANT_REACHED, writes what is reached.
#![allow(warnings)]
use std::io::Write;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};
static ACTIVE: AtomicU32 = AtomicU32::new(u32::MAX);
static REACHED: [AtomicU8; N_MUTANTS] = [const { AtomicU8::new(0) }; N_MUTANTS];
#[inline(always)]
pub fn m(id: u32) -> bool {
    let active = ACTIVE.load(Relaxed);
    active == id || (active >= u32::MAX - 1 && look(id))
}
#[cold]
#[inline(never)]
fn look(id: u32) -> bool {
    if let Some(file) = std::env::var_os("MUTANT_REACHED") {
        ACTIVE.store(u32::MAX - 1, Relaxed);
        if REACHED[id as usize].swap(1, Relaxed) == 0 {
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
            file.write_all(format!("{id}\\n").as_bytes()).unwrap();
        }
        return false;
    }
    let active = std::env::var("MUTANT").ok().and_then(|n| n.parse().ok()).unwrap_or(u32::MAX - 2);
    ACTIVE.store(active, Relaxed);
    active == id
}
"""

OPERATORS = {
    "<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="], "!=": ["=="],
    "&&": ["||"], "||": ["&&"], "+": ["-"], "-": ["+"], "*": ["/"], "/": ["*"], "%": ["/"],
    "<<": [">>"], ">>": ["<<"], "&": ["|"], "|": ["&"], "^": ["&"],
    "+=": ["-="], "-=": ["+="], "*=": ["/="], "/=": ["*="], "|=": ["&="], "&=": ["|="], "<<=": [">>="], ">>=": ["<<="],
}
METHODS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "is_some": "is_none", "is_none": "is_some",
    "is_ok": "is_err", "is_err": "is_ok", "first": "last", "last": "first", "saturating_sub": "saturating_add",
    "floor": "ceil", "ceil": "floor", "is_some_and": "is_none_or", "is_none_or": "is_some_and",
}
NEGATED = {"is_empty", "contains", "contains_key", "starts_with", "ends_with"}
RETURNS = [
    (r"bool", ["true", "false"]), (r"Option<.*>", ["None"]), (r"Result<\(\)(,.*)?>", ["Ok(())"]),
    (r"Result<bool(,.*)?>", ["Ok(true)", "Ok(false)"]), (r"Result<[ui](8|16|32|64|size)(,.*)?>", ["Ok(0)", "Ok(1)"]),
    (r"[ui](8|16|32|64|128|size)", ["0", "1"]), (r"f(32|64)", ["0.0", "1.0"]), (r"Vec<.*>", ["Vec::new()"]),
    (r"String", ["String::new()"]),
]
# Code that is not run, or not where an `if` may stand.
SKIPPED = {"attribute_item", "inner_attribute_item", "const_item", "static_item", "macro_invocation", "macro_definition",
           "const_block", "array_type", "type_arguments", "generic_type", "enum_variant", "line_comment"}

# Random tests draw the same in every run, and do not look for smaller failures.
ENVIRONMENT = os.environ | {
    "PROPTEST_RNG_SEED": "1", "CELLAR_ORACLE_SEED": "1", "PROPTEST_MAX_SHRINK_ITERS": "0",
    "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "true", "RUST_BACKTRACE": "0", "INSTA_UPDATE": "no",
}

Mutant = collections.namedtuple("Mutant", "id file line what")


class Schemata:
    """One file's source with all its mutants, or with those of some lines."""

    def __init__(self, name, source, first_id, dropped, lines=None):
        self.name, self.source, self.dropped, self.lines = name, source, dropped, lines
        self.mutants, self.next_id = [], first_id
        root = PARSER.parse(source).root_node
        self.text = self.render(root)

    def plain(self, node):
        return self.source[node.start_byte:node.end_byte].decode()

    def new(self, node, what):
        """The number of a mutant, or nothing if it is not wanted or known not to compile."""
        self.next_id += 1
        operator = node.child_by_field_name("operator") or node
        line = operator.start_point[0] + 1
        mutant = Mutant(self.next_id - 1, self.name, line, " ".join(what.split())[:120].rstrip())
        if mutant.id in self.dropped or self.lines is not None and line not in self.lines:
            return None
        self.mutants.append(mutant)
        return mutant.id

    def render(self, node):
        if node.type == "match_pattern" and node.child_by_field_name("condition") is not None:
            guard = node.child_by_field_name("condition")
            return self.source[node.start_byte:guard.start_byte].decode() + self.render(guard)
        if node.type in SKIPPED or is_test(self, node) or is_const_fn(node) or node.type.endswith("pattern"):
            return self.plain(node)
        inner = self.children(node)
        if node.type == "expression_statement":
            return self.statement(node, inner)
        if node.type == "block" and node.parent.type == "function_item":
            return self.body(node, inner)
        chain = ""
        for replacement in replacements(self, node):
            number = self.new(node, f"{self.plain(node)} -> {replacement}")
            if number is not None:
                chain += f"if crate::mutant_switch::m({number}) {{ {replacement} }} else "
        if not chain:
            return inner
        return f"({chain}{{ {inner} }})" if not node.type.startswith("compound") else f"{chain}{{ {inner} }}"

    def children(self, node):
        parts, at = [], node.start_byte
        for child in node.children:
            parts.append(self.source[at:child.start_byte].decode())
            parts.append(self.render(child))
            at = child.end_byte
        parts.append(self.source[at:node.end_byte].decode())
        return "".join(parts)

    def statement(self, node, inner):
        removable = {"call_expression", "assignment_expression", "compound_assignment_expr", "try_expression",
                     "return_expression", "continue_expression", "break_expression"}
        diverges = node.named_children[0].type in ("return_expression", "continue_expression", "break_expression")
        if node.named_children[0].type not in removable or diverges and node.parent.parent.type == "let_declaration":
            return inner
        number = self.new(node, f"without {self.plain(node)}")
        return inner if number is None else f"if !crate::mutant_switch::m({number}) {{ {inner} }}"

    def body(self, node, inner):
        returns = node.parent.child_by_field_name("return_type")
        returned = [""] if returns is None and node.named_child_count else []
        name = self.plain(node.parent.child_by_field_name("name"))
        if returns is not None:
            kind = self.plain(returns)
            returned = next((values for pattern, values in RETURNS if re.fullmatch(pattern, kind, re.S)), [])
        early = ""
        for value in returned:
            if self.plain(node).strip("{} \n") == value:
                continue
            number = self.new(node.parent, f"fn {name} -> {value or '()'}")
            if number is not None:
                early += f" if crate::mutant_switch::m({number}) {{ return {value}; }}"
        return "{" + early + inner[1:]


def is_test(file, node):
    before = node.prev_named_sibling
    while before is not None and before.type in ("attribute_item", "line_comment"):
        if before.type == "attribute_item" and re.search(r"cfg\(test\)|\btest\b", file.plain(before)):
            return True
        before = before.prev_named_sibling
    return False


def is_const_fn(node):
    modifiers = [child for child in node.children if child.type == "function_modifiers"]
    return node.type == "function_item" and any(b"const" in child.text for child in modifiers)


def has_let(node):
    return node.type in ("let_condition", "let_chain") or any(has_let(child) for child in node.children)


def replacements(file, node):
    """Other expressions in the place of this one."""
    field, plain = node.child_by_field_name, file.plain
    parent = node.parent
    found = []
    if node.type in ("binary_expression", "compound_assignment_expr") and not has_let(node):
        left, right = field("left"), field("right")
        for operator in OPERATORS.get(plain(field("operator")), []):
            if node.type == "binary_expression":
                found.append(f"({plain(left)}) {operator} ({plain(right)})")
            else:
                found.append(f"{plain(left)} {operator} {plain(right)}")
    elif node.type == "unary_expression" and node.children[0].type in ("!", "-"):
        found.append(plain(node.named_children[0]))
    elif node.type == "integer_literal" and parent.type not in ("field_expression", "array_expression"):
        found.append(f"{plain(node)} + 1")
    elif node.type == "float_literal":
        found.append(f"{plain(node)} + 1.0")
    elif node.type == "call_expression" and field("function").type == "field_expression":
        callee = field("function")
        receiver, name = callee.child_by_field_name("value"), plain(callee.child_by_field_name("field"))
        arguments = plain(field("arguments"))
        if name in METHODS:
            found.append(f"{plain(receiver)}.{METHODS[name]}{arguments}")
        if name in NEGATED:
            found.append(f"!{plain(node)}")
    if parent is not None and not has_let(node):
        condition = parent.child_by_field_name("condition")
        if condition is not None and condition.id == node.id:
            found += ["true", "false"] if parent.type in ("if_expression", "match_pattern") else ["false"]
    return found


def run(command, **options):
    return subprocess.run(command, text=True, capture_output=True, **options)


def run_until(end, command, **options):
    """The same, or `None` where it has not ended by then: it is killed with all that it started."""
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                          **options) as process:
        try:
            left = max(end - time.monotonic(), 0)
            out, errors = process.communicate(timeout=None if left == float("inf") else left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def copy_sources(root):
    """Copies what differs, so that cargo builds only that again."""
    for name in run(["git", "ls-files", "-co", "--exclude-standard"]).stdout.splitlines():
        source, target = pathlib.Path(name), root / name
        if source.is_file() and not (target.is_file() and target.read_bytes() == source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())


def guilty(message, outputs, root):
    """The mutants that a compiler error is about: the smallest choices around its places; else what its
    functions do without a `return`, as code behind it may use what was moved; else all in them."""
    numbers, functions = set(), []
    for span in message["spans"]:
        path = str((root / span["file_name"]).resolve())
        if path not in outputs:
            continue
        root_node = PARSER.parse(outputs[path]).root_node
        node = root_node.descendant_for_byte_range(span["byte_start"], span["byte_end"])
        while node is not None:
            match = re.match(rb"if !?crate::mutant_switch::m\((\d+)\)", node.text)
            if node.type == "if_expression" and match:
                numbers.add(int(match[1]))
                break
            if node.type == "function_item":
                functions.append(node.text)
                break
            node = node.parent
    leaving = rb"if !crate::mutant_switch::m\((\d+)\) { (?:return|continue|break)\b"
    for pattern in (leaving, rb"mutant_switch::m\((\d+)\)"):
        numbers = numbers or {int(number) for text in functions for number in re.findall(pattern, text)}
    return numbers


def compile_mutants(args, root, crate):
    """Writes the mutated files, leaving out what does not compile, and builds the tests: all mutants, and the
    programs of tests with the folder that each is run in, or `None` where there was no time for that."""
    originals = {name: (root / name).read_bytes() for name in args.files}
    library = root / crate / "src/lib.rs"
    plain_library = library.read_text()
    packages = [flag for package in args.tests_of or [args.package] for flag in ("-p", package)]
    dropped = set()
    while True:
        mutants, outputs, next_id = [], {}, 0
        for name, source in originals.items():
            file = Schemata(name, source, next_id, dropped, args.lines and args.lines[name])
            next_id, mutants = file.next_id, mutants + file.mutants
            (root / name).write_text(file.text)
            outputs[str((root / name).resolve())] = file.text.encode()
        (root / crate / SWITCH).write_text(SWITCH_SOURCE.replace("N_MUTANTS", str(max(next_id, 1))))
        # It may be one of the mutated files itself.
        text = outputs.get(str(library.resolve()), plain_library.encode()).decode()
        library.write_text(text + "\n#[allow(missing_docs)]\npub mod mutant_switch;\n")
        if not mutants:
            return mutants, []
        build = run_until(args.end, ["cargo", "test", "--no-run", "--message-format=json", *packages, *args.cargo], cwd=root)
        if build is None:
            return mutants, None
        messages = [json.loads(line) for line in build.stdout.splitlines() if line.startswith("{")]
        if build.returncode == 0:
            return mutants, [
                (message["executable"], pathlib.Path(message["manifest_path"]).parent)
                for message in messages
                if message.get("executable") and message["profile"]["test"]
                and message["target"]["name"] not in args.without
            ]
        errors = [message["message"] for message in messages if message["reason"] == "compiler-message"]
        errors = [error for error in errors if error["level"] == "error" and error["spans"]]
        new = set().union(*(guilty(error, outputs, root) for error in errors)) - dropped
        if not new:
            sys.exit("no mutant is to blame:\n" + "\n".join(error["rendered"] for error in errors) + build.stderr)
        print(f"{len(new)} mutants do not compile", flush=True)
        dropped |= new


def is_left_out(test, args):
    return any(test == name or test.startswith(f"{name}::") for name in args.without)


def reach(binaries, args):
    """What each test reaches and how long it takes: {(binary, test): (numbers, seconds)}."""
    def one(job):
        binary, folder, test = job
        file = args.work / f"reached-{threading.get_ident()}"
        file.write_text("")
        begin = time.time()
        end = min(args.end, time.monotonic() + args.longest)
        result = run_until(end, [binary, "--exact", test], cwd=folder, env=ENVIRONMENT | {"MUTANT_REACHED": str(file)})
        if result is None:
            return job, set(), 0.0
        if result.returncode != 0:
            print(f"fails without a mutant: {test}", flush=True)
            return job, set(), 0.0
        return job, set(map(int, file.read_text().split())), time.time() - begin
    jobs = []
    for binary, folder in binaries:
        listed = run([binary, "--list", "--format", "terse"], cwd=folder).stdout
        tests = [line[:-6] for line in listed.splitlines() if line.endswith(": test")]
        jobs += [(binary, folder, test) for test in tests if not is_left_out(test, args)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        return {job: (numbers, seconds) for job, numbers, seconds in pool.map(one, jobs)}


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


def try_mutant(mutant, reached, end):
    """`not reached`, `survived`, `endless loop`, `left out`, or the test that fails."""
    if time.monotonic() > end:
        return "left out"
    binaries = collections.defaultdict(list)
    for (binary, folder, test), (numbers, seconds) in reached.items():
        if mutant.id in numbers:
            binaries[binary, folder].append((seconds, test))
    if not binaries:
        return "not reached"
    for (binary, folder), tests in sorted(binaries.items(), key=lambda each: sum(s for s, _ in each[1])):
        names = [test for _, test in tests]
        seconds = 8 + 20 * sum(s for s, _ in tests)
        process = subprocess.Popen([binary, "--exact", *names], cwd=folder, env=ENVIRONMENT | {"MUTANT": str(mutant.id)},
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=limit_memory)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        failed = next((line for line in process.stdout if line.startswith("test ") and "FAILED" in line), None)
        late = not timer.is_alive()
        timer.cancel()
        if failed:
            process.kill()
        process.stdout.close()
        code = process.wait()
        if failed:
            return failed.split()[1]
        if late:
            return "endless loop"
        if code != 0:
            return "aborts"
    return "survived"


def changed_lines(base, watched):
    """Source file -> the numbers of its lines that differ from a commit, of what is watched."""
    diff = run(["git", "diff", "--unified=0", "--no-color", "--no-ext-diff", base, "--", *watched])
    if diff.returncode != 0:
        sys.exit(f"git cannot compare with '{base}': {diff.stderr.strip()}")
    lines, name = collections.defaultdict(set), None
    for line in diff.stdout.splitlines():
        if line.startswith("+++ "):
            name = line[6:] if line.endswith(".rs") else None
        place = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line)
        if place and name:
            first, n = int(place[1]), int(place[2] or 1)
            lines[name].update(range(first, first + n))
    return {name: numbers for name, numbers in lines.items() if numbers and not is_module_of_tests(name)}


def is_module_of_tests(name):
    file = pathlib.Path(name)
    above = [other for other in file.parent.glob("*.rs") if other.name in ("mod.rs", "lib.rs")]
    return any(f"#[cfg(test)]\nmod {file.stem};" in other.read_text() for other in above)


def known_survivors():
    lines = KNOWN.read_text().splitlines() if KNOWN.is_file() else []
    return {tuple(line.split(" | ", 1)) for line in lines if line and not line.startswith("# ")}


def try_changed(args):
    """Tries the mutants of changed lines, package by package. Returns the process's exit code."""
    begin = time.monotonic()
    args.end, args.longest = begin + args.seconds, LONGEST_TEST
    for name, value in SHORT_TESTS.items():
        ENVIRONMENT.setdefault(name, value)
    watched = dict(each.split("=", 1) for each in args.watch) or WATCHED
    args.lines = changed_lines(args.changed, watched)
    n_lines = sum(map(len, args.lines.values()))
    if args.most and n_lines > args.most:
        print(f"{n_lines} lines differ from {args.changed}: not tried, as {args.seconds} s are for at most {args.most}; "
              "name a nearer commit, or the files")
        return 0
    by_package = collections.defaultdict(list)
    for name in sorted(args.lines):
        by_package[next(package for prefix, package in watched.items() if name.startswith(prefix))].append(name)
    root = args.work / "copy"
    counts, known, bad = collections.Counter(), known_survivors(), []
    for args.package, args.files in by_package.items():
        copy_sources(root)
        mutants, binaries = compile_mutants(args, root, args.files[0].split("/src/")[0])
        if binaries is None:
            counts["left out"] += len(mutants)
            print(f"{args.package}: {len(mutants)} mutants are left out: its tests were not compiled in {args.seconds} s")
            continue
        reached = reach(binaries, args)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            ends = list(pool.map(lambda mutant: try_mutant(mutant, reached, args.end), mutants))
        for mutant, end in zip(mutants, ends):
            is_bad = end in ("survived", "not reached")
            is_known = is_bad and (mutant.file, mutant.what) in known
            counts[("known" if is_known else end) if is_bad or end == "left out" else "caught"] += 1
            if is_bad and not is_known:
                bad.append(f"{mutant.file}:{mutant.line}: {end}: {mutant.what}")
        n_left_out = ends.count("left out")
        if n_left_out:
            print(f"{args.package}: {n_left_out} of {len(mutants)} mutants are left out: {args.seconds} s are over")
    copy_sources(root)
    told = ", ".join(f"{n} {end}" for end, n in sorted(counts.items())) or "none"
    print(f"mutants of {n_lines} lines that differ from {args.changed}: {told}; {time.monotonic() - begin:.0f} s")
    for line in bad:
        print(line, file=sys.stderr)
    if bad:
        print(f"write a test for each, or a line `path | mutant` with its reason in {KNOWN.name}", file=sys.stderr)
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="source files of one crate, relative to the repository")
    parser.add_argument("--package", help="the crate's package")
    parser.add_argument("--changed", metavar="COMMIT", help="the lines that differ from it, in place of files")
    parser.add_argument("--most", type=int, metavar="LINES", help="with --changed: tries nothing where more differ")
    parser.add_argument("--seconds", type=int, default=180, help="with --changed: how long it may take (180)")
    parser.add_argument("--watch", action="append", default=[], metavar="PATH=PACKAGE",
                        help="with --changed: other files than what must never be wrong")
    parser.add_argument("--tests-of", action="append", help="packages whose tests are run (the crate's own)")
    parser.add_argument("--without", action="append", default=[], help="test programs, modules or tests that are left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many run at the same time (one for each core)")
    parser.add_argument("--cargo", action="append", default=[], help="further arguments of `cargo test --no-run`")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="a folder for the copy and the results")
    args = parser.parse_args()
    if bool(args.changed) == bool(args.files) or bool(args.files) != bool(args.package):
        parser.error("name files with their --package, or a commit with --changed")
    args.work = args.work.resolve()  # tests run in the folders of their crates
    root = args.work / "copy"
    root.mkdir(parents=True, exist_ok=True)
    if args.changed:
        sys.exit(try_changed(args))
    args.end, args.longest, args.lines = float("inf"), float("inf"), None
    copy_sources(root)
    crate = args.files[0].split("/src/")[0]
    mutants, binaries = compile_mutants(args, root, crate)
    print(f"{len(mutants)} mutants", flush=True)
    reached = reach(binaries, args)
    print(f"{len(reached)} tests, {sum(s for _, s in reached.values()):.1f} s", flush=True)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        report(mutants, pool.map(lambda mutant: try_mutant(mutant, reached, args.end), mutants), args.work)


def report(mutants, ends, work):
    kinds = ["not reached", "survived", "endless loop"]
    counts = collections.defaultdict(collections.Counter)
    with open(work / "survivors.txt", "w", buffering=1) as file:
        for mutant, end in zip(mutants, ends):
            counts[mutant.file][end if end in kinds else "caught"] += 1
            if end in kinds[:2]:
                print(f"{mutant.file}:{mutant.line}: {end}: {mutant.what}", file=file)
    for name, count in counts.items():
        columns = [sum(count.values()), count["caught"], count["endless loop"], count["not reached"], count["survived"]]
        print(f"| `{name}` | " + " | ".join(map(str, columns)) + " |")
    print(f"see {work / 'survivors.txt'}")


if __name__ == "__main__":
    main()
