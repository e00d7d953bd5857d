"""openai-agents, smolagents and dspy: programs in which a model calls tools and answers in types."""

import asyncio
from typing import Literal

import dspy
import pytest
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent
from smolagents.models import ChatMessage, MessageRole
from typed import Child, Feeling, Mood, check

set_tracing_disabled(True)
MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


def agent(model, address, settings, **options):
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(temperature=0, **settings)
    model = model(model="stories", openai_client=client)
    return Agent(name="teller", model=model, model_settings=settings, **options)


def test_openai_agents_chat(address):
    # By responses the library takes a text that is cut off for an error.
    teller = agent(OpenAIChatCompletionsModel, address, {"max_tokens": 16})
    plain = Runner.run_sync(teller, "Once upon a time").raw_responses[0].usage
    assert plain.output_tokens == 16
    teller.tools = [function_tool(weather)]
    offered = Runner.run_sync(teller, "Once upon a time").raw_responses[0].usage
    assert offered.output_tokens == 16 and offered.input_tokens > plain.input_tokens


@pytest.mark.parametrize("model", MODELS)
def test_openai_agents_get_a_typed_object_whole_and_streamed(address, model):
    output = AgentOutputSchema(Child, strict_json_schema=False)

    async def objects():
        typed = agent(model, address, {"max_tokens": 300}, output_type=output)
        whole = await Runner.run(typed, "A child")
        result = Runner.run_streamed(typed, "A child")
        events = [event.data async for event in result.stream_events() if hasattr(event, "data")]
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        return whole.final_output, result.final_output, "".join(deltas)

    whole, streamed, text = asyncio.run(objects())
    check(whole)
    assert whole == streamed == Child.model_validate_json(text)


def weather(mood: Mood, days: Literal[1, 2] | None = None) -> str:
    """The weather for a mood."""
    return f"sunny for {mood.value}"


@pytest.mark.parametrize("model", MODELS)
def test_openai_agents_call_a_tool(address, model):
    settings = {"max_tokens": 300, "tool_choice": "required", "parallel_tool_calls": False}
    options = {"tools": [function_tool(weather)], "tool_use_behavior": "stop_on_first_tool"}
    answer = Runner.run_sync(agent(model, address, settings, **options), "How is it?")
    assert answer.final_output in ("sunny for sad", "sunny for happy")


class Weather(Tool):
    name = "weather"
    description = "The weather for a mood."
    inputs = {"mood": {"type": "string", "enum": ["sad", "happy"], "description": "The mood."}}
    output_type = "string"

    def forward(self, mood):
        return f"sunny for {mood}"


def test_smolagents_chat_whole_and_streamed(address):
    model = OpenAIServerModel(
        "stories", api_base=f"{address}/v1", api_key="none", temperature=0, max_tokens=16
    )
    hello = [ChatMessage(role=MessageRole.USER, content="Once upon a time")]
    whole = model.generate(hello)
    assert whole.token_usage.output_tokens == 16
    streamed = "".join(delta.content or "" for delta in model.generate_stream(hello))
    assert streamed == whole.content


def test_smolagents_call_a_tool(address):
    # Two calls of which one is the final answer are an error of the library's.
    model = OpenAIServerModel(
        "stories", api_base=f"{address}/v1", api_key="none", temperature=0, max_tokens=300,
        parallel_tool_calls=False,
    )
    # An agent of one step: the library asks for a call, which has to come.
    agent = ToolCallingAgent(tools=[Weather()], model=model, max_steps=1, verbosity_level=0)
    agent.run("How is it?")
    (step,) = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert {call.name for call in step.tool_calls} <= {"weather", "final_answer"}


def test_dspy_gets_a_typed_object(address):
    # The library asks for schemas where it knows of a name that the model can do so.
    model = dspy.LM(
        "openai/gpt-4o", api_base=f"{address}/v1", api_key="none", temperature=0, cache=False,
        max_tokens=300, num_retries=0,
    )
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):

        class Describe(dspy.Signature):
            """Describes a feeling."""

            hint: str = dspy.InputField()
            feeling: Feeling = dspy.OutputField()

        assert isinstance(dspy.Predict(Describe)(hint="a child").feeling, Feeling)
    assert model("Once upon a time", max_tokens=16)[0]
