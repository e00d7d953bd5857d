"""llama-index by its packages for servers like OpenAI's, and for Ollama's API."""

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from typed import Child, check

HELLO = [ChatMessage(role="user", content="Once upon a time")]


def like(address, max_tokens=300):
    return OpenAILike(
        model="stories", api_base=f"{address}/v1", api_key="none", temperature=0, max_retries=0,
        max_tokens=max_tokens, context_window=4096, is_chat_model=True,
        is_function_calling_model=True,
    )


def ollama(address, max_tokens=300):
    return Ollama(
        model="stories", base_url=address, temperature=0, context_window=4096,
        additional_kwargs={"num_predict": max_tokens},
    )


@pytest.mark.parametrize("llm", [like, ollama])
def test_a_chat_whole_and_streamed(address, llm):
    whole = llm(address, 16).chat(HELLO).message.content
    assert "".join(part.delta or "" for part in llm(address, 16).stream_chat(HELLO)) == whole != ""


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def test_a_tool_is_called(address):
    tools = [FunctionTool.from_defaults(weather)]
    answer = like(address).chat_with_tools(tools, "How is it?", tool_required=True)
    calls = like(address).get_tool_calls_from_response(answer)
    assert calls and calls[0].tool_name == "weather" and "city" in calls[0].tool_kwargs


@pytest.mark.parametrize("llm", [like, ollama])
def test_tools_are_offered(address, llm):
    tools = [FunctionTool.from_defaults(weather)]
    assert llm(address, 16).chat_with_tools(tools, "How is it?").message.content


@pytest.mark.parametrize("llm", [like, ollama])
def test_a_typed_object(address, llm):
    check(llm(address).as_structured_llm(Child).chat(HELLO).raw)
