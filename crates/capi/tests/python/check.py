"""Unmodified llama-cpp-python on this library: what programs do with it, on a small model.

`check.py MODEL PROGRAM`: a GGUF file, and `cellar` to compare its text with. LLAMA_CPP_LIB_PATH names
the library's folder.
"""

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import llama_cpp
import numpy
from llama_cpp import Llama, LlamaGrammar, llama_speculative

MODEL, PROGRAM = sys.argv[1:3]
PROMPT = "Once upon a time"
LINES = []


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def keep(level, text, _data):
    if level >= 3:
        LINES.append(text.decode())


def opened(**options):
    return Llama(MODEL, n_ctx=256, seed=1, verbose=False, **options)


def text(llm, prompt=PROMPT, n=24, **options):
    options = {"temperature": 0.0, **options}
    return llm(prompt, max_tokens=n, **options)["choices"][0]["text"]


def completion():
    llm = opened()
    got = text(llm)
    told = [PROGRAM, "run", MODEL, "--prompt", PROMPT, "-n", "24", "--temperature", "0"]
    wanted = subprocess.run(told, check=True, capture_output=True, text=True).stdout
    wanted = wanted.strip("\n").removeprefix(PROMPT)
    assert got == wanted, (got, wanted)
    pieces = llm(PROMPT, max_tokens=24, temperature=0.0, stream=True)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == got
    stopped = llm(PROMPT, max_tokens=64, temperature=0.0, stop=["."])["choices"][0]
    assert stopped["finish_reason"] == "stop" and "." not in stopped["text"], stopped
    seeded = [text(llm, temperature=1.0, top_k=20, top_p=0.9, seed=7) for _ in range(2)]
    assert seeded[0] == seeded[1], seeded


def logprobs():
    llm = opened(logits_all=True)
    choice = llm(PROMPT, max_tokens=8, temperature=0.0, logprobs=3)["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"], told
    for chosen, top in zip(told["token_logprobs"], told["top_logprobs"]):
        assert len(top) in (3, 4) and abs(chosen - max(top.values())) < 1e-6, told


def states():
    llm = opened()
    text(llm)
    state = llm.save_state()
    prompt = PROMPT + ", there was a"
    one = text(llm, prompt)
    llm.reset()
    text(llm, "The dog ran")
    llm.load_state(state)
    assert text(llm, prompt) == one
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state").encode()
        tokens = (ctypes.c_int32 * 3)(1, 2, 3)
        assert llama_cpp.llama_state_save_file(llm.ctx, path, tokens, 3)
        room, n = (ctypes.c_int32 * 8)(), ctypes.c_size_t()
        assert llama_cpp.llama_state_load_file(llm.ctx, path, room, 8, ctypes.byref(n))
        assert list(room[: n.value]) == [1, 2, 3]


def chat():
    llm = opened(chat_format="chatml")
    messages = [{"role": "user", "content": "Tell me a story."}]
    answer = llm.create_chat_completion(messages, max_tokens=8, temperature=0.0)
    assert answer["choices"][0]["message"]["role"] == "assistant", answer
    # The buffer is cut as `strncpy` does.
    message = llama_cpp.llama_chat_message(b"user", b"Hi")
    buffer = ctypes.create_string_buffer(128)
    n = llama_cpp.llama_chat_apply_template(b"chatml", ctypes.pointer(message), 1, True, buffer, 128)
    wanted = b"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (buffer.value, n) == (wanted, len(wanted)), buffer.value


def tools():
    llm = opened(chat_format="chatml-function-calling")
    weather = {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}, "wind": {"type": "boolean"}},
            "required": ["days", "wind"],
        },
    }
    answer = llm.create_chat_completion(
        [{"role": "user", "content": "The weather?"}],
        tools=[{"type": "function", "function": weather}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=80,
        temperature=0.0,
    )
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather", call
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments["days"], int) and isinstance(arguments["wind"], bool), arguments


def server():
    """llama-cpp-python's own server, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = ["--model", MODEL, "--n_ctx", "256", "--port", str(port), "--chat_format", "chatml"]
    command = [sys.executable, "-m", "llama_cpp.server", *told]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path, **body):
        url = f"http://127.0.0.1:{port}/v1/{path}"
        data = json.dumps({"temperature": 0.0, "repeat_penalty": 1.0, **body}).encode() if body else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()

    try:
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                models = json.loads(ask("models"))
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        assert len(models["data"]) == 1, models
        wanted = text(opened())
        answer = json.loads(ask("completions", prompt=PROMPT, max_tokens=24))
        assert answer["choices"][0]["text"] == wanted, answer
        lines = ask("completions", prompt=PROMPT, max_tokens=24, stream=True).split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == wanted, lines
        messages = [{"role": "user", "content": "Hi"}]
        chat = json.loads(ask("chat/completions", messages=messages, max_tokens=8))
        assert chat["choices"][0]["message"]["content"], chat
    finally:
        process.terminate()
        process.wait()


def grammars():
    llm = opened()
    grammar = LlamaGrammar.from_string('root ::= " yes" | " no"', verbose=False)
    assert text(llm, grammar=grammar) in (" yes", " no")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    grammar = LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
    assert isinstance(json.loads(text(llm, n=64, grammar=grammar))["a"], bool)
    assert not llama_cpp.llama_sampler_init_grammar(
        llama_cpp.llama_model_get_vocab(llm.model), b"root ::= (", b"root"
    )


def embeddings():
    llm = opened(embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN)
    vectors = numpy.array(llm.embed([PROMPT, "The dog ran", PROMPT], normalize=True))
    assert vectors.shape == (3, llm.n_embd())
    products = vectors @ vectors.T
    assert abs(products[0, 2] - 1) < 1e-4 and products[0, 1] < 0.999, products


def drafts():
    plain = text(opened(), n=48)
    draft = llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=4)
    assert text(opened(draft_model=draft), n=48) == plain


def sequences():
    llm = opened()
    memory = llama_cpp.llama_get_memory(llm.ctx)
    text(llm)
    last = llama_cpp.llama_memory_seq_pos_max(memory, 0)
    assert last > 4 and llama_cpp.llama_memory_seq_pos_min(memory, 0) == 0
    assert llama_cpp.llama_memory_seq_rm(memory, 0, 2, 4)
    llama_cpp.llama_memory_seq_add(memory, 0, 4, -1, -2)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == last - 2
    assert not llama_cpp.llama_memory_seq_rm(memory, 9, -1, -1)
    llama_cpp.llama_memory_clear(memory, True)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == -1


def write_adapter(path, llm):
    """A LoRA of every layer's attention Q, of rank 2, as a GGUF file."""
    of_text = lambda value: struct.pack("<Q", len(value)) + value
    keys = {b"general.type": b"adapter", b"general.architecture": b"llama", b"adapter.type": b"lora"}
    head = b"".join(of_text(key) + struct.pack("<I", 8) + of_text(v) for key, v in keys.items())
    head += of_text(b"adapter.lora.alpha") + struct.pack("<If", 6, 60.0)
    width, random = llm.n_embd(), numpy.random.default_rng(1)
    infos, data = [], b""
    for layer in range(llama_cpp.llama_model_n_layer(llm.model)):
        for part, shape in (("a", (2, width)), ("b", (width, 2))):
            name = f"blk.{layer}.attn_q.weight.lora_{part}".encode()
            # Innermost first, F32.
            info = struct.pack("<IQQIQ", 2, shape[1], shape[0], 0, len(data))
            infos.append(of_text(name) + info)
            data += random.normal(0, 0.2, shape).astype("<f4").tobytes()
            data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys) + 1) + head + b"".join(infos)
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % 32) + data)


def adapters():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tales.gguf")
        plain = opened()
        write_adapter(path, plain)
        got = text(opened(lora_path=path, lora_scale=0.5))
        told = [PROGRAM, "run", MODEL, "--lora", f"{path}=0.5", "--prompt", PROMPT, "-n", "24"]
        wanted = subprocess.run(
            [*told, "--temperature", "0"], check=True, capture_output=True, text=True
        ).stdout
        assert got == wanted.strip("\n").removeprefix(PROMPT), (got, wanted)
        assert got != text(plain)
        try:
            opened(lora_path=MODEL)
        except RuntimeError:
            pass
        else:
            raise AssertionError("a model was taken for an adapter")


def quantizing():
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = os.path.join(folder, "ours.gguf"), os.path.join(folder, "theirs.gguf")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
        wanted = ctypes.byref(params)
        assert llama_cpp.llama_model_quantize(MODEL.encode(), ours.encode(), wanted) == 0
        told = [PROGRAM, "convert", MODEL, theirs, "--type", "q4_k_m"]
        subprocess.run(told, check=True, stdout=subprocess.DEVNULL)
        with open(ours, "rb") as one, open(theirs, "rb") as other:
            assert one.read() == other.read()
        params.ftype = 38  # MXFP4 for experts, which 'cellar convert' does not write
        LINES.clear()
        assert llama_cpp.llama_model_quantize(MODEL.encode(), ours.encode(), wanted) == 1
        assert any("ftype 38" in line for line in LINES), LINES
        assert text(Llama(ours, n_ctx=256, verbose=False), n=4)


def refusals():
    try:
        Llama("no-such-file.gguf", verbose=False)
    except ValueError:
        pass
    else:
        raise AssertionError("a file that is not there was opened")
    LINES.clear()
    llama_cpp.llama_sampler_apply(None, None)
    llama_cpp.llama_sampler_accept(None, 1)
    assert not LINES, "no sampler is no mistake"
    params = llama_cpp.llama_model_default_params()
    assert not llama_cpp.llama_model_load_from_file(__file__.encode(), params)
    assert any("check.py" in line for line in LINES), LINES


def main():
    for check in (
        completion,
        logprobs,
        states,
        chat,
        tools,
        grammars,
        embeddings,
        drafts,
        sequences,
        adapters,
        quantizing,
        refusals,
        server,
    ):
        llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
        LINES.clear()
        check()
        print(f"libllama: {check.__name__}: ok", flush=True)


main()
