"""Pictures and sounds as the clients of others send them, as they come from their registries."""

import base64
import struct
import zlib

import anthropic
import ollama
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

QUESTION = "What is this?"


def png(shade):
    """A picture of 40 × 30 pixels."""

    def chunk(kind, data):
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    rows = b"".join(b"\0" + bytes((x * 5 + y * shade) % 256 for x in range(120)) for y in range(30))
    head = struct.pack(">IIBBBBB", 40, 30, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def encoded(data):
    return base64.b64encode(data).decode()


def parts(picture):
    url = f"data:image/png;base64,{encoded(picture)}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]


@pytest.fixture
def with_openai(seeing):
    client = openai.OpenAI(base_url=f"{seeing}/v1", api_key="none", max_retries=0)

    def ask(content):
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=12
        )

    return ask


def text_of(answer):
    return answer.choices[0].message.content


def test_a_picture_is_seen_and_remembered(with_openai):
    first, again = with_openai(parts(png(3))), with_openai(parts(png(3)))
    assert text_of(first) == text_of(again)
    assert text_of(with_openai(parts(png(11)))) != text_of(first)
    n_prompt = first.usage.prompt_tokens
    assert n_prompt > with_openai(QUESTION).usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == n_prompt - 1


def test_every_client_sees_the_same(seeing, with_openai):
    picture = png(7)
    wanted = text_of(with_openai(parts(picture)))
    options = {"temperature": 0, "num_predict": 12}
    messages = [{"role": "user", "content": QUESTION, "images": [picture]}]
    answer = ollama.Client(host=seeing).chat(model="tiny", messages=messages, options=options)
    assert answer.message.content == wanted
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    client = anthropic.Anthropic(base_url=seeing, api_key="none", max_retries=0)
    answer = client.messages.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=12,
        extra_body={"temperature": 0},
    )
    assert answer.content[0].text == wanted
    chat = ChatOpenAI(
        base_url=f"{seeing}/v1", api_key="none", model="tiny", temperature=0, max_tokens=12
    )
    assert chat.invoke([HumanMessage(content=parts(picture))]).content == wanted
    client = openai.OpenAI(base_url=f"{seeing}/v1", api_key="none", max_retries=0)
    picture, question = parts(picture)
    content = [
        {"type": "input_image", "image_url": picture["image_url"]["url"]},
        {"type": "input_text", "text": question["text"]},
    ]
    answer = client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=12,
    )
    assert answer.output_text == wanted


def test_no_picture_is_an_error_of_the_request(with_openai):
    with pytest.raises(openai.BadRequestError, match="none of PNG"):
        with_openai(parts(b"no picture"))


def test_a_model_that_sees_nothing_says_so(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": parts(png(3))}]
    with pytest.raises(openai.BadRequestError, match="tower"):
        client.chat.completions.create(model="stories", messages=messages)


def test_a_sound_is_heard(hearing):
    client = openai.OpenAI(base_url=f"{hearing}/v1", api_key="none", max_retries=0)

    def text(step):
        samples = struct.pack("<9690h", *(n * step % 20000 - 10000 for n in range(9690)))
        head = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
        data = b"data" + struct.pack("<I", len(samples)) + samples
        chunks = b"WAVEfmt " + head + data
        wav = b"RIFF" + struct.pack("<I", len(chunks)) + chunks
        sound = {"data": encoded(wav), "format": "wav"}
        content = [
            {"type": "input_audio", "input_audio": sound},
            {"type": "text", "text": QUESTION},
        ]
        return text_of(
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=12,
            )
        )

    assert text(911) == text(911) != text(300)
