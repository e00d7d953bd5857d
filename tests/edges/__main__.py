"""Runs the commands with which strangers found faults at the edges, and compares what they do with what they should.

    python3 tests/edges target/release/cellar [files|terminal|models|server|pages …]

Needs Python alone. Prints each case that differs, and ends with 1 if there is one.
"""

import sys
import time

import files
import models
import pages
import server
import terminal
from place import Report

SUBJECTS = {"files": files, "terminal": terminal, "models": models, "server": server, "pages": pages}


def main():
    program, chosen = sys.argv[1], sys.argv[2:] or list(SUBJECTS)
    report = Report()
    for name in chosen:
        started, before = time.monotonic(), report.n_cases
        SUBJECTS[name].run(program, report)
        print(f"{name}: {report.n_cases - before} cases, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{report.n_cases} cases, {len(report.differ)} differ")
    sys.exit(bool(report.differ))


main()
