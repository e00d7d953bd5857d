"""The client of Anthropic, as it comes from its registry."""

from typing import Literal

import anthropic
import pydantic
import pytest

# The client has no `temperature` any more; servers have.
OPTIONS = {"model": "stories", "max_tokens": 16, "extra_body": {"temperature": 0}}
HELLO = [{"role": "user", "content": "Once upon a time"}]
TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(address):
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def test_a_message_whole_and_streamed(client):
    whole = client.messages.create(**OPTIONS, messages=HELLO, system="Be brief.")
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 16
    with client.messages.stream(**OPTIONS, messages=HELLO, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.stop_reason == "max_tokens"
    assert last.usage.cache_read_input_tokens > 0


def test_a_tool_round_trip(client):
    options = {**OPTIONS, "max_tokens": 100, "tools": [TOOL]}
    choice = {"type": "tool", "name": "weather"}
    answer = client.messages.create(**options, messages=HELLO, tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    (call,) = answer.content
    assert call.input["city"] in ("Rome", "Oslo")
    with client.messages.stream(**options, messages=HELLO, tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    after = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**options, messages=after).content


class Place(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]


def test_an_answer_is_an_object_of_a_schema(client):
    options = {**OPTIONS, "max_tokens": 60}
    answer = client.messages.parse(**options, messages=HELLO, output_format=Place)
    assert answer.parsed_output.city in ("Rome", "Oslo")


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(model="stories", messages=HELLO)
    answer = client.messages.create(**OPTIONS, messages=HELLO)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_stream_that_is_closed_frees_its_place(client, no_requests):
    with client.messages.stream(**{**OPTIONS, "max_tokens": 4000}, messages=HELLO) as stream:
        next(iter(stream.text_stream))
    no_requests()


def test_errors_are_the_client_s_own(client):
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")
    assert client.messages.create(**{**OPTIONS, "model": "claude"}, messages=HELLO).model == "stories"
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**{**OPTIONS, "extra_body": {"temperature": -1}}, messages=HELLO)
    assert error.value.body["error"]["type"] == "invalid_request_error"
