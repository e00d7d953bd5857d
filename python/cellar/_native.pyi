from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NotRequired, Self, TypeAlias, TypedDict, Unpack, final

import numpy as np
from numpy.typing import NDArray

__version__: str

FinishReason: TypeAlias = Literal["end", "stop", "length", "context", "cancelled", "other"]
Backend: TypeAlias = Literal["cpu", "cuda", "metal", "opencl", "candle", "candle-cuda", "candle-metal"]

class CellarError(Exception): ...

class TextPart(TypedDict):
    type: Literal["text"]
    text: str

class ImagePart(TypedDict):
    type: Literal["image"]

class ImageUrlPart(TypedDict):
    type: Literal["image_url"]
    image_url: str | Mapping[str, str]

Part: TypeAlias = TextPart | ImagePart | ImageUrlPart
Image: TypeAlias = bytes | str | PathLike[str] | NDArray[np.uint8]
Audio: TypeAlias = bytes | str | PathLike[str] | NDArray[np.float32]

class Message(TypedDict):
    role: str
    content: NotRequired[str | Sequence[Part] | None]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]

class Options(TypedDict, total=False):
    max_tokens: int | None
    stop: str | list[str]
    stop_tokens: Sequence[int]
    keep: int | None
    lora: Mapping[str, float] | None
    speculate: Literal["off", "lookup", "head", "auto"]
    logprobs: int | None
    schema: str | Mapping[str, Any] | None
    grammar: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    min_tokens: int
    logit_bias: Mapping[int, float]
    seed: int | None
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    repeat_last_n: int

class ChatOptions(Options, total=False):
    images: Sequence[Image]
    audio: Sequence[Audio]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any] | None

def pull(name: str, *, progress: Callable[[int, int], object] | None = None) -> Path: ...

@final
class TokenProbabilities:
    @property
    def token(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...

@final
class Timings:
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prompt_seconds(self) -> float: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def generated_seconds(self) -> float: ...

@final
class FinishedText:
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def finish_reason(self) -> FinishReason: ...
    @property
    def logprobs(self) -> list[TokenProbabilities]: ...
    @property
    def seed(self) -> int: ...

@final
class Text(Iterator[str], AsyncIterator[str]):
    def __iter__(self) -> Text: ...
    def __next__(self) -> str: ...
    def __aiter__(self) -> Text: ...
    def __anext__(self) -> Awaitable[str]: ...
    def finish(self) -> str: ...
    def cancel(self) -> None: ...
    def save(self) -> bytes: ...
    def save_file(self, path: str | PathLike[str]) -> None: ...
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[TokenProbabilities]: ...
    @property
    def seed(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def n_prompt_evaluated(self) -> int: ...
    @property
    def timings(self) -> Timings: ...

@final
class Model:
    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        n_ctx: int | None = None,
        n_seqs: int = 1,
        threads: int | None = None,
        kv_type: str = "f16",
        backend: Backend | None = None,
        gpu_layers: int | None = None,
        draft_head: bool | str | PathLike[str] = False,
        mmproj: str | PathLike[str] | None = None,
        lora: str
        | PathLike[str]
        | Sequence[str | PathLike[str]]
        | Mapping[str | PathLike[str], float]
        | None = None,
    ) -> Model: ...
    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Text: ...
    async def generate_async(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> Text: ...
    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[Options]
    ) -> list[FinishedText]: ...
    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Text: ...
    async def chat_async(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> Text: ...
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...
    def tokenize(self, text: str, *, special: bool = True) -> list[int]: ...
    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str: ...
    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def architecture(self) -> str: ...
    @property
    def lora(self) -> dict[str, float]: ...
    @property
    def metadata(self) -> dict[str, Any]: ...

@final
class Memory:
    @property
    def n_seqs(self) -> int: ...
    @property
    def n_used(self) -> int: ...
    def clear(self) -> None: ...
    def load(self, state: bytes) -> list[int]: ...
    def load_file(self, path: str | PathLike[str]) -> list[int]: ...

@final
class Embedder:
    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        pooling: Literal["mean", "cls", "last"] | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        threads: int | None = None,
        backend: Backend | None = None,
        gpu_layers: int | None = None,
    ) -> Embedder: ...
    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    @property
    def dim(self) -> int: ...

@final
class Reranker:
    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        truncate: bool = False,
        threads: int | None = None,
        backend: Backend | None = None,
        gpu_layers: int | None = None,
    ) -> Reranker: ...
    def scores(self, query: str, documents: Sequence[str]) -> NDArray[np.float32]: ...
    def rank(self, query: str, documents: Sequence[str]) -> list[tuple[int, float]]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
