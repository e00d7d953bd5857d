"""The client of Ollama, as it comes from its registry."""

import json

import ollama
import pytest

OPTIONS = {"temperature": 0, "num_predict": 16}
HELLO = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture
def client(address):
    return ollama.Client(host=address)


def test_a_chat_whole_and_streamed(client):
    whole = client.chat(model="stories", messages=HELLO, options=OPTIONS)
    assert whole.done_reason == "length"
    assert whole.eval_count == 16
    lines = list(client.chat(model="stories", messages=HELLO, options=OPTIONS, stream=True))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert lines[-1].done and lines[-1].prompt_eval_count == whole.prompt_eval_count


def test_a_text_is_continued(client):
    whole = client.generate(model="stories", prompt="One day", raw=True, options=OPTIONS)
    lines = client.generate(
        model="stories", prompt="One day", raw=True, options=OPTIONS, stream=True
    )
    assert "".join(line.response for line in lines) == whole.response


def test_a_schema_gives_a_typed_object(client):
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["sad", "happy"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    answer = client.chat(model="stories", messages=HELLO, format=schema)
    assert json.loads(answer.message.content)["mood"] in ("sad", "happy")


def test_a_tool_is_called(client):
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
          city: The city.
        """
        return f"sunny in {city}"

    # The client makes the tool of the function. Whether this model calls it is up to the model.
    options = {"temperature": 0, "num_predict": 16}
    answer = client.chat(model="stories", messages=HELLO, tools=[weather], options=options)
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "weather", "content": weather("Rome")}
    after = client.chat(
        model="stories", messages=[*HELLO, asked, result], tools=[weather], options=options
    )
    assert after.prompt_eval_count > answer.prompt_eval_count


def test_embeddings(encoder):
    answer = ollama.Client(host=encoder).embed(model="bert_tiny", input=["Hello", "Bye"])
    first, second = answer.embeddings
    assert len(first) == len(second) > 8


def test_models(client):
    assert [model.model for model in client.list().models] == ["stories"]
    assert [model.model for model in client.ps().models] == ["stories"]
    assert "completion" in client.show("stories").capabilities


def test_a_stream_that_is_closed_frees_its_place(client, no_requests):
    options = {"num_predict": 4000, "temperature": 0}
    stream = client.generate(
        model="stories", prompt="One day", raw=True, options=options, stream=True
    )
    next(stream)
    stream.close()
    no_requests()


def test_errors_are_the_client_s_own(client):
    with pytest.raises(ollama.ResponseError) as error:
        client.show("llama3")
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as error:
        client.pull("llama3")
    assert error.value.status_code == 501
    with pytest.raises(ollama.ResponseError) as error:
        client.embed(model="stories", input="Hello")
    assert error.value.status_code == 400
