"""The file of results, `results.tsv`, from which docs/architectures.md says what was compared.

One line: kind, name, number of comparisons, how many of them differ. It is written where
CELLAR_CORPUS_RESULTS names it.
"""

import os


def add(kind, name, n_compared, n_different):
    path = os.environ.get("CELLAR_CORPUS_RESULTS")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{kind}\t{name}\t{n_compared}\t{n_different}\n")
