"""Programs and libraries on top of the clients: langchain-openai, and `llm` of the command line."""

import json
import os
import subprocess
import sys
from typing import Literal

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Animal(BaseModel):
    mood: Literal["sad", "happy"]


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def model(address, **options):
    return ChatOpenAI(
        base_url=f"{address}/v1", api_key="none", model="stories", temperature=0, **options
    )


def test_langchain_chats(address):
    for options in ({}, {"use_responses_api": True}):
        chat = model(address, max_tokens=16, **options)
        whole = chat.invoke("Once upon a time")
        assert whole.usage_metadata["output_tokens"] == 16
        streamed = "".join(chunk.text for chunk in chat.stream("Once upon a time"))
        assert streamed == whole.text


def test_langchain_gets_a_typed_object(address):
    for options in ({}, {"use_responses_api": True}):
        typed = model(address, **options).with_structured_output(Animal, method="json_schema")
        assert isinstance(typed.invoke("An animal"), Animal)


def test_langchain_calls_a_tool(address):
    for options in ({}, {"use_responses_api": True}):
        chat = model(address, **options)
        question = HumanMessage("How is it?")
        answer = chat.bind_tools([weather], tool_choice="weather", strict=True).invoke([question])
        (call,) = answer.tool_calls
        result = weather.invoke(call)
        assert isinstance(result, ToolMessage)
        after = chat.bind_tools([weather]).bind(max_tokens=8).invoke([question, answer, result])
        assert after.usage_metadata["output_tokens"] <= 8


def test_langchain_is_cancelled_and_refused(address, no_requests):
    stream = model(address, max_tokens=4000).stream("Once upon a time")
    next(stream)
    stream.close()
    no_requests()
    with pytest.raises(openai.BadRequestError) as error:
        model(address, top_p=2).invoke("Once upon a time")
    assert error.value.param == "top_p"


def test_langchain_gets_vectors(encoder):
    # Without the check, which downloads a tokenizer of OpenAI's.
    embeddings = OpenAIEmbeddings(
        base_url=f"{encoder}/v1",
        api_key="none",
        model="bert_tiny",
        check_embedding_ctx_length=False,
    )
    first, second = embeddings.embed_documents(["How is it?", "It is raining."])
    assert embeddings.embed_query("How is it?") == pytest.approx(first)
    assert first != second


def test_llm_of_the_command_line(address, tmp_path):
    # A model of another server is a line of this file.
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: stories\n  api_base: {address}/v1\n"
        "  supports_schema: true\n"
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", "-m", "mine", "-o", "temperature", "0"]

    def run(*more):
        done = subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    story = ["-o", "max_tokens", "16", "Once upon a time"]
    assert run(*story) == run(*story, "--no-stream") != ""
    # Without it the model goes on with properties of its own.
    schema = json.dumps({**Animal.model_json_schema(), "additionalProperties": False})
    for more in ([], ["--no-stream"]):
        animal = json.loads(run("--schema", schema, *more, "An animal"))
        assert animal["mood"] in ("sad", "happy"), animal
