"""The client of OpenAI, as it comes from its registry."""

import json
import threading

import openai
import pytest

# A text that does not end by itself.
LONG = {"type": "string", "minLength": 3000}
HELLO = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_a_chat_whole_and_streamed(client):
    options = {"model": "stories", "messages": HELLO, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    text = whole.choices[0].message.content
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(parts) == text
    assert chunks[-1].usage.completion_tokens == 16
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_a_seed_gives_the_same_text(client):
    def text(seed):
        answer = client.completions.create(
            model="stories", prompt="One day", seed=seed, temperature=1.2, max_tokens=24
        )
        return answer.choices[0].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_a_schema_gives_a_typed_object(client):
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["sad", "happy"]}, "legs": {"enum": [2, 4]}},
        "required": ["mood", "legs"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="stories",
        messages=HELLO,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "animal", "strict": True, "schema": schema},
        },
    )
    animal = json.loads(answer.choices[0].message.content)
    assert animal["mood"] in ("sad", "happy") and animal["legs"] in (2, 4)


def test_a_tool_round_trip(client):
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    choice = {"type": "function", "function": {"name": "weather"}}
    options = {"model": "stories", "tools": [tool]}
    answer = client.chat.completions.create(
        **options, messages=HELLO, tool_choice=choice, temperature=0
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(
        **options, messages=HELLO, tool_choice=choice, temperature=0
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = [*HELLO, answer.choices[0].message, result]
    assert client.chat.completions.create(**options, messages=after, max_tokens=8).choices


def test_models(client):
    assert [model.id for model in client.models.list()] == ["stories"]
    assert client.models.retrieve("stories").owned_by == "cellar"


def test_embeddings(encoder):
    client = openai.OpenAI(base_url=f"{encoder}/v1", api_key="none", max_retries=0)
    # The client asks for base64 where it is told nothing.
    texts = ["How is it?", "It rains."]
    packed = client.embeddings.create(model="bert_tiny", input=texts)
    plain = client.embeddings.create(model="bert_tiny", input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


def test_several_answers_with_log_probabilities(client):
    options = {"max_tokens": 3, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(model="stories", messages=HELLO, **options)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        places = choice.logprobs.content
        assert len(places) == 3
        assert all(place.logprob <= 0 and len(place.top_logprobs) == 2 for place in places)


def test_errors_are_the_client_s_own(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-4")
    assert error.value.code == "model_not_found"
    # The only model has every name in requests.
    answer = client.chat.completions.create(model="gpt-4", messages=HELLO, max_tokens=1)
    assert answer.model == "stories"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="stories", messages=HELLO, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="stories", prompt="word " * 20_000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="stories", input="Hello")


def test_a_stream_that_is_closed_frees_its_place(client, no_requests):
    stream = client.completions.create(
        model="stories",
        prompt="Once upon a time",
        max_tokens=4000,
        stream=True,
        temperature=0,
        extra_body={"response_format": {"type": "json_object", "schema": LONG}},
    )
    next(iter(stream))
    stream.close()
    no_requests()


def test_many_clients_get_the_texts_of_each_alone(client):
    def text(number):
        answer = client.completions.create(
            model="stories", prompt=f"{number} cats", seed=number, max_tokens=20, temperature=0.9
        )
        return answer.choices[0].text

    alone = [text(number) for number in range(12)]
    together = [None] * 12

    def ask(number):
        together[number] = text(number)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
