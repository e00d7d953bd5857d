"""langchain-anthropic and langchain-ollama (langchain-openai: test_others.py)."""

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from typed import Child, Feeling, Mood, check

HELLO = "Once upon a time"


@tool(args_schema=Feeling)
def weather(mood: Mood, pet: str | None) -> str:
    """The weather for a mood."""
    return f"sunny for {mood.value}"


def anthropic(address, max_tokens=300):
    return ChatAnthropic(
        base_url=address, api_key="none", model="stories", max_tokens=max_tokens, max_retries=0,
        model_kwargs={"extra_body": {"temperature": 0}},
    )


def ollama(address, max_tokens=300):
    return ChatOllama(base_url=address, model="stories", temperature=0, num_predict=max_tokens)


@pytest.mark.parametrize("chat", [anthropic, ollama])
def test_a_chat_whole_and_streamed(address, chat):
    model = chat(address, 16)
    whole = model.invoke(HELLO)
    assert whole.usage_metadata["output_tokens"] == 16
    assert "".join(chunk.text for chunk in model.stream(HELLO)) == whole.text != ""


def test_a_tool_round_trip(address):
    question = HumanMessage("How is it?")
    # The library's own form of the tool lets other properties in, which a small model goes on with.
    closed = {"name": "weather", "input_schema": Feeling.model_json_schema()}
    called = anthropic(address).bind_tools([closed], tool_choice="weather").invoke([question])
    result = weather.invoke(called.tool_calls[0])
    offered = anthropic(address, 8).bind_tools([weather])
    after = offered.invoke([question, called, result])
    assert after.usage_metadata["output_tokens"] <= 8


def test_tools_are_offered_by_ollama_s_api(address):
    # The API has no `tool_choice`: whether this model calls the tool is up to the model.
    plain = ollama(address, 8).invoke("How is it?")
    answer = ollama(address, 8).bind_tools([weather]).invoke("How is it?")
    assert answer.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]


@pytest.mark.parametrize(
    ("chat", "method"),
    [(anthropic, "function_calling"), (ollama, "json_schema")],
)
def test_a_typed_object(address, chat, method):
    check(chat(address).with_structured_output(Child, method=method).invoke("A child"))


def test_anthropic_s_client_leaves_out_bounds(address):
    typed = anthropic(address).with_structured_output(Feeling, method="json_schema")
    assert isinstance(typed.invoke("A child"), Feeling)
