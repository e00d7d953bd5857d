"""pydantic-ai over OpenAI's two APIs and Anthropic's."""

import asyncio

import pytest
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from typed import Child, Mood, check

APIS = ["chat", "responses", "anthropic"]


def agent(api, address, max_tokens=300, **options):
    if api == "anthropic":
        provider = AnthropicProvider(base_url=address, api_key="none")
        model = AnthropicModel("stories", provider=provider)
    else:
        provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
        models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
        model = models[api]("stories", provider=provider)
    settings = {"temperature": 0, "max_tokens": max_tokens}
    return Agent(model, model_settings=settings, retries=0, **options)


@pytest.mark.parametrize("api", APIS)
def test_a_chat_whole_and_streamed(address, api):
    teller = agent(api, address, max_tokens=16)
    whole = teller.run_sync("Once upon a time")
    assert whole.usage.output_tokens == 16

    async def streamed():
        async with teller.run_stream("Once upon a time") as stream:
            return "".join([part async for part in stream.stream_text(delta=True)])

    assert asyncio.run(streamed()) == whole.output != ""


@pytest.mark.parametrize("api", APIS)
def test_a_required_call_is_a_typed_object(address, api):
    # A type as output is a tool that has to be called.
    check(agent(api, address, output_type=ToolOutput(Child)).run_sync("A child").output)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_answer_is_a_typed_object(address, api):
    check(agent(api, address, output_type=NativeOutput(Child)).run_sync("A child").output)


@pytest.mark.parametrize("api", APIS)
def test_tools_are_offered(address, api):
    teller = agent(api, address, max_tokens=16)

    @teller.tool_plain
    def weather(mood: Mood) -> str:
        """The weather for a mood."""
        return f"sunny for {mood.value}"

    answer = teller.run_sync("How is it?")
    plain = agent(api, address, max_tokens=16).run_sync("How is it?")
    assert answer.output and answer.usage.input_tokens > plain.usage.input_tokens
