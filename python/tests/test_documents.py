"""What the documents show is run: the README, the book's page, and the notebooks."""

import json
import re

import pytest
from conftest import ROOT


def snippets(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def run(pieces):
    names = {"__name__": "document"}
    for piece in pieces:
        exec(compile(piece, "document", "exec"), names)
    return names


def test_the_readme_saves_what_can_be_continued(in_folder):
    names = run(snippets("python/README.md"))
    model = names["model"]
    prompt = model.tokenize("Once upon a time")
    assert names["logits"].shape == (len(prompt), model.n_vocab)
    assert names["vectors"].shape[0] == 2
    other = names["cellar"].Model("model.gguf", n_ctx=4096)
    known = other.memory.load(names["state"])
    assert len(known) > 20
    text = other.generate(known + prompt[1:], max_tokens=20, temperature=0)
    assert text.n_prompt_evaluated == len(prompt) - 1
    alone = names["cellar"].Model("model.gguf")
    assert text.finish() == alone.generate(known + prompt[1:], max_tokens=20, temperature=0).finish()


def test_the_page_of_the_book_runs(in_folder):
    pieces = snippets("docs/how-to/python.md")
    assert len(pieces) >= 9
    run(pieces)


NOTEBOOKS = sorted((ROOT / "python/examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, in_folder):
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell.get("outputs") for cell in cells)
    run(code)


def test_there_is_a_notebook():
    assert NOTEBOOKS
