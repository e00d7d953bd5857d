#!/usr/bin/env python3
"""Makes the tiny model of the tests, and its logits by another formula than the crate's.

    pip install numpy gguf safetensors
    ./make_reference.py ../../models/stories-llama-f16.gguf tests/data

Weights are random. The tokenizer is that of the given GGUF file. Logits come from the *parallel* form of
retention (Sun et al., arXiv 2307.08621, equation 5): every token looks at all earlier ones and no state
exists, in float64. The crate computes the *recurrent* form (equation 6), in float32.
"""

import sys

import gguf
import numpy as np
from safetensors.numpy import save_file

DIM, HIDDEN, HEADS, K_DIM, V_DIM, LAYERS = 48, 96, 3, 16, 32, 2
EPS, ROPE_BASE, CONTEXT = 1e-5, 10000.0, 512


def weights(vocab):
    random = np.random.default_rng(2307)
    matrix = lambda rows, columns: random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
    gain = lambda n: (1 + 0.2 * random.normal(size=n)).astype(np.float32)
    found = {"token_embd.weight": random.normal(0, 1, (vocab, DIM)).astype(np.float32)}
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        found[name + "attn_norm.weight"] = gain(DIM)
        found[name + "attn_q.weight"] = matrix(HEADS * K_DIM, DIM)
        found[name + "attn_k.weight"] = matrix(HEADS * K_DIM, DIM)
        found[name + "attn_v.weight"] = matrix(HEADS * V_DIM, DIM)
        found[name + "attn_gate.weight"] = matrix(HEADS * V_DIM, DIM)
        found[name + "ret_norm.weight"] = gain(V_DIM)
        found[name + "attn_output.weight"] = matrix(DIM, HEADS * V_DIM)
        found[name + "ffn_norm.weight"] = gain(DIM)
        found[name + "ffn_gate.weight"] = matrix(HIDDEN, DIM)
        found[name + "ffn_up.weight"] = matrix(HIDDEN, DIM)
        found[name + "ffn_down.weight"] = matrix(DIM, HIDDEN)
    found["output_norm.weight"] = gain(DIM)
    return found


def rms_norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gain


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(x):
    """Halves of each head by position: x is [tokens, heads, dim]."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * ROPE_BASE ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def logits(w, ids):
    w = {name: value.astype(np.float64) for name, value in w.items()}
    n = len(ids)
    x = w["token_embd.weight"][ids]
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    for layer in range(LAYERS):
        of = lambda name: w[f"blk.{layer}.{name}.weight"]
        normed = rms_norm(x, of("attn_norm"))
        q = rotate((normed @ of("attn_q").T).reshape(n, HEADS, K_DIM))
        k = rotate((normed @ of("attn_k").T).reshape(n, HEADS, K_DIM)) * K_DIM**-0.5
        v = (normed @ of("attn_v").T).reshape(n, HEADS, V_DIM)
        kept = []
        for head in range(HEADS):
            gamma = 1 - 2.0 ** (-5 - head)
            decay = np.where(distance >= 0, gamma ** np.maximum(distance, 0), 0)
            kept.append((q[:, head] @ k[:, head].T * decay) @ v[:, head])
        kept = rms_norm(np.stack(kept, 1), of("ret_norm")).reshape(n, -1)
        x = x + (silu(normed @ of("attn_gate").T) * kept) @ of("attn_output").T
        normed = rms_norm(x, of("ffn_norm"))
        x = x + (silu(normed @ of("ffn_gate").T) * (normed @ of("ffn_up").T)) @ of("ffn_down").T
    return rms_norm(x, w["output_norm.weight"]) @ w["token_embd.weight"].T


def write_gguf(path, w, tokenizer):
    writer = gguf.GGUFWriter(path, "retnet")
    writer.add_name("tiny RetNet with random weights")
    writer.add_context_length(CONTEXT)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_key_length(K_DIM)
    writer.add_value_length(V_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    for field in gguf.GGUFReader(tokenizer).fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], kind)
    for name, value in w.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(tokenizer, out):
    vocab = len(gguf.GGUFReader(tokenizer).fields["tokenizer.ggml.tokens"].contents())
    # Matrices are halves, so that the file is small; the formula reads what the file has.
    w = {name: value.astype(np.float16) if value.ndim == 2 else value for name, value in weights(vocab).items()}
    write_gguf(f"{out}/retnet-tiny.gguf", w, tokenizer)
    random = np.random.default_rng(8621)
    found = {}
    for number, n in enumerate([20, 9]):
        ids = random.integers(3, vocab, n)
        found[f"ids_{number}"] = ids.astype(np.int32)
        found[f"logits_{number}"] = logits(w, ids).astype(np.float32)
    save_file(found, f"{out}/reference.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
