"""instructor over OpenAI's two APIs. It needs the client of OpenAI before 3."""

from typing import Literal

import instructor
import openai
import pytest
from typed import Child, Part, check

class Animal(Part):
    sound: Literal["moo", "meow"]


MESSAGES = [{"role": "user", "content": "A child"}]


def create(address, mode, method="create", response_model=Child, **options):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(client, mode=mode)
    options = {"temperature": 0, "max_retries": 0, **options}
    return getattr(client.chat.completions, method)(
        model="stories", messages=MESSAGES, response_model=response_model, **options
    )


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_typed_object(address, mode):
    check(create(address, instructor.Mode[mode], max_tokens=300))


def test_a_typed_object_of_a_response(address):
    check(create(address, instructor.Mode.RESPONSES_TOOLS, max_output_tokens=300))


def test_a_typed_object_comes_in_parts(address):
    # The library itself fails on enums and decimals here.
    parts = create(address, instructor.Mode.TOOLS, "create_partial", Animal, max_tokens=300)
    first, *_, last = list(parts)
    assert first.sound is None and last.sound in ("moo", "meow")
