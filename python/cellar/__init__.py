"""Language models from GGUF files and safetensors directories.

    import cellar

    model = cellar.Model("model.gguf")
    for piece in model.generate("Once upon a time", max_tokens=60):
        print(piece, end="", flush=True)
"""

from ._native import (
    CellarError,
    Embedder,
    FinishedText,
    Memory,
    Model,
    Reranker,
    Text,
    Timings,
    TokenProbabilities,
    __version__,
    pull,
)

__all__ = [
    "CellarError",
    "Embedder",
    "FinishedText",
    "Memory",
    "Model",
    "Reranker",
    "Text",
    "Timings",
    "TokenProbabilities",
    "__version__",
    "pull",
]
