#!/usr/bin/env python3
"""litellm (PyPI) on `cellar serve`, through OpenAI's, Anthropic's and Ollama's API.

    pip install litellm
    VENV/bin/python tests/clients/litellm_check.py [--cellar target/release/cellar]

The server has the built-in model. Checks that a chat, whole and streamed, is the text of the server alone through each
API, calls of tools, a schema into a typed object, text completions with an echo of the prompt, responses, and that a
prompt that is too long is litellm's ContextWindowExceededError.
"""

import argparse
import importlib.metadata
import json
import os
import tempfile
import urllib.request
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from served import TEMPLATE, served

# Prices are not fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # noqa: E402

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Animal(BaseModel):
    # Other properties are allowed otherwise, and this model has many.
    model_config = ConfigDict(extra="forbid")
    mood: Literal["sad", "happy"]


def providers(address):
    """The model's name and the address through each API."""
    return {
        "openai": {"model": "openai/stories", "api_base": f"{address}/v1", "api_key": "none"},
        "anthropic": {"model": "anthropic/stories", "api_base": address, "api_key": "none"},
        "ollama": {"model": "ollama_chat/stories", "api_base": address},
    }


def direct(address, body):
    data = json.dumps({"messages": MESSAGES, "temperature": 0, **body}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def check_chat(of, text):
    options = {**of, "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    whole = litellm.completion(**options)
    assert whole.choices[0].message.content.strip() == text.strip(), whole
    assert whole.choices[0].finish_reason == "length", whole
    assert whole.usage.completion_tokens == 16, whole
    chunks = litellm.completion(**options, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed.strip() == text.strip(), streamed


def check_tools(of):
    forced = {"type": "function", "function": {"name": "weather"}}
    answer = litellm.completion(**of, messages=MESSAGES, tools=[WEATHER], tool_choice=forced, max_tokens=200)
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "weather", answer
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo"), answer


def check_schema(of):
    answer = litellm.completion(**of, messages=MESSAGES, response_format=Animal, max_tokens=200)
    assert Animal.model_validate_json(answer.choices[0].message.content), answer


def check_completion(of):
    options = {**of, "model": "text-completion-openai/stories", "prompt": "Once upon a time", "temperature": 0}
    text = litellm.text_completion(**options, max_tokens=8).choices[0].text
    echoed = litellm.text_completion(**options, max_tokens=8, echo=True).choices[0].text
    assert text and echoed == f"Once upon a time{text}", (text, echoed)


def check_response(of, text):
    options = {**of, "input": "Once upon a time", "temperature": 0, "max_output_tokens": 16}
    answer = litellm.responses(**options)
    assert answer.output[0].content[0].text.strip() == text.strip(), answer


def check_error(of):
    long = [{"role": "user", "content": "One day. " * 4000}]
    try:
        litellm.completion(**of, messages=long, max_tokens=8)
    except litellm.ContextWindowExceededError:
        return "ContextWindowExceededError"
    except litellm.BadRequestError as error:
        return type(error).__name__
    except litellm.APIConnectionError as error:
        return type(error).__name__
    raise AssertionError("a prompt that is too long was answered")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--cellar", default="target/release/cellar")
    options = arguments.parse_args()
    litellm.drop_params = False
    litellm.suppress_debug_info = True
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        with served(options.cellar, "-c", "4096", "--chat-template", str(template), "--alias", "stories") as address:
            text = direct(address, {"max_tokens": 16})
            print(f"litellm {importlib.metadata.version('litellm')}")
            for name, of in providers(address).items():
                check_chat(of, text)
                done = ["chat whole and streamed"]
                if name != "ollama":
                    # litellm asks Ollama's API for a tool without holding the answer to it.
                    check_tools(of)
                    done.append("tools")
                check_schema(of)
                done.append("schema")
                if name == "openai":
                    check_completion(of)
                    check_response(of, text)
                    done.append("completion with echo, response")
                    error = check_error(of)
                    assert error == "ContextWindowExceededError", error
                else:
                    error = check_error(of)
                print(f"{name}: {', '.join(done)}; a prompt that is too long: {error}")


if __name__ == "__main__":
    main()
