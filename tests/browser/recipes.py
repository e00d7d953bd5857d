"""The recipes of pages in docs/how-to as they stand there, so that the page and what is tried cannot differ."""

import os
import re

PAGES = os.path.join(os.path.dirname(__file__), "../../docs/how-to")


def recipe(heading, beginning, page="operations.md"):
    """The only block of code below a heading that begins with this."""
    with open(os.path.join(PAGES, page)) as file:
        sections = re.split(r"^## ", file.read(), flags=re.M)
    [section] = [section for section in sections if section.startswith(heading + "\n")]
    blocks = re.findall(r"^```\w+\n(.*?)^```$", section, flags=re.M | re.S)
    [block] = [block for block in blocks if block.startswith(beginning)]
    return block


def put(text, values):
    """The text with places of this machine instead of those of the page, each of which it has."""
    for of_page, own in values.items():
        if of_page not in text:
            raise AssertionError(f"the recipe has no '{of_page}':\n{text}")
        text = text.replace(of_page, own)
    return text
