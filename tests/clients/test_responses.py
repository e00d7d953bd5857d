"""OpenAI's Responses, by the client of OpenAI."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel


class Animal(BaseModel):
    mood: Literal["sad", "happy"]
    legs: Literal[2, 4]


TOOL = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CHOICE = {"type": "function", "name": "weather"}
OPTIONS = {"model": "stories", "temperature": 0}


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_a_response_whole_and_streamed(client):
    options = {**OPTIONS, "input": "Once upon a time", "max_output_tokens": 16}
    whole = client.responses.create(**options)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 16
    with client.responses.stream(**options) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.input_tokens_details.cached_tokens > 0


def test_a_conversation_is_kept(client):
    first = client.responses.create(**OPTIONS, input="One day", max_output_tokens=8)
    second = client.responses.create(
        **OPTIONS, input="And then?", max_output_tokens=8, previous_response_id=first.id
    )
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**OPTIONS, input="More", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"


def test_a_schema_gives_a_typed_object(client):
    answer = client.responses.parse(**OPTIONS, input="An animal", text_format=Animal)
    assert isinstance(answer.output_parsed, Animal)


def test_a_tool_round_trip(client):
    question = [{"role": "user", "content": "How is it?"}]
    options = {**OPTIONS, "tools": [TOOL]}
    answer = client.responses.create(**options, input=question, tool_choice=CHOICE)
    (call,) = answer.output
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    with client.responses.stream(**options, input=question, tool_choice=CHOICE) as stream:
        streamed = stream.get_final_response()
    assert streamed.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = [*question, *answer.output, result]
    assert client.responses.create(**options, input=after, max_output_tokens=8).output


def test_errors_are_the_client_s_own(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**OPTIONS, input="Hello", extra_body={"temperature": -1})
    assert error.value.param == "temperature"


def test_tools_that_the_server_does_not_know_are_skipped(client):
    answer = client.responses.create(**OPTIONS, input="Hello", tools=[{"type": "web_search"}])
    assert answer.output
    assert "web_search" in str(answer.model_extra["warnings"])
