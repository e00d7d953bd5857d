#!/usr/bin/env python3
"""Writes a GGUF file of a mixture of experts with random weights, to measure with.

Usage: mixture.py FILE.gguf [--layers 48] [--experts 128] [--used 8] [--dim 2048] [--inner 768] [--skew 1.0]

The defaults are the shape of Qwen3-30B-A3B, but for its vocabulary, in Q4_K with half of the down matrices in Q6_K,
as Q4_K_M has them: 17 GB. Texts are noise. Routers have favourites: the rows of their matrices differ in length by
--skew (0: all alike), so that some experts are chosen more often. Needs nothing but Python.
"""
import argparse
import os
import random
import struct

Q4_K, Q6_K, F32 = 12, 14, 0
BLOCK_BYTES = {Q4_K: 144, Q6_K: 210, F32: 1024}  # of 256 values


def half(value):
    return struct.pack("<e", value)


def text(value):
    return struct.pack("<Q", len(value)) + value


def entry(key, kind, value):
    """A key of the header: 4 is a u32, 6 an f32, 8 a string, 9 an array of strings or (with kind 5) of i32."""
    head = text(key.encode())
    if isinstance(value, list):
        of = 8 if kind == 8 else 5
        items = b"".join(text(v) if of == 8 else struct.pack("<i", v) for v in value)
        return head + struct.pack("<IIQ", 9, of, len(value)) + items
    if kind == 8:
        return head + struct.pack("<I", 8) + text(value.encode())
    return head + struct.pack("<I", kind) + struct.pack("<I" if kind == 4 else "<f", value)


def blocks(kind, n, scale, rng):
    """`n` random blocks, whose values have about this size."""
    size = BLOCK_BYTES[kind]
    data = bytearray(rng.randbytes(n * size))
    for at in range(0, n * size, size):
        if kind == Q4_K:
            # Six bits of scale and of minimum for each 32 values, four bits each.
            data[at : at + 4] = half(scale / 480) + half(scale / 64)
        else:
            data[at + 208 : at + 210] = half(scale / 2048)
    return bytes(data)


def tensors(args):
    """Name, shape with the fastest dimension first, type, and the size of values."""
    dim, inner, heads, width = args.dim, args.inner, 32, 128
    yield "token_embd.weight", (dim, len(vocabulary())), Q4_K, 1.0
    yield "output_norm.weight", (dim,), F32, None
    yield "output.weight", (dim, len(vocabulary())), Q6_K, 0.05
    for at in range(args.layers):
        layer = f"blk.{at}."
        yield layer + "attn_norm.weight", (dim,), F32, None
        yield layer + "attn_q.weight", (dim, heads * width), Q4_K, 0.04
        yield layer + "attn_k.weight", (dim, 4 * width), Q4_K, 0.04
        yield layer + "attn_v.weight", (dim, 4 * width), Q6_K, 0.04
        yield layer + "attn_output.weight", (heads * width, dim), Q4_K, 0.03
        yield layer + "attn_q_norm.weight", (width,), F32, None
        yield layer + "attn_k_norm.weight", (width,), F32, None
        yield layer + "ffn_norm.weight", (dim,), F32, None
        yield layer + "ffn_gate_inp.weight", (dim, args.experts), F32, "router"
        yield layer + "ffn_gate_exps.weight", (dim, inner, args.experts), Q4_K, 0.04
        yield layer + "ffn_up_exps.weight", (dim, inner, args.experts), Q4_K, 0.04
        down = Q6_K if at % 2 == 0 else Q4_K
        yield layer + "ffn_down_exps.weight", (inner, dim, args.experts), down, 0.06


def vocabulary():
    """A token for each byte, as GPT-2 writes them, and one that ends texts."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    of_byte = {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    return [of_byte[b].encode() for b in range(256)] + [b"<|end|>"] + [b"<|%d|>" % i for i in range(255)]


def header(args):
    arch = "qwen3moe"
    tokens = vocabulary()
    values = [
        ("general.architecture", 8, arch),
        ("general.name", 8, "random mixture"),
        (arch + ".block_count", 4, args.layers),
        (arch + ".context_length", 4, 32768),
        (arch + ".embedding_length", 4, args.dim),
        (arch + ".feed_forward_length", 4, 3 * args.inner),
        (arch + ".expert_feed_forward_length", 4, args.inner),
        (arch + ".expert_count", 4, args.experts),
        (arch + ".expert_used_count", 4, args.used),
        (arch + ".attention.head_count", 4, 32),
        (arch + ".attention.head_count_kv", 4, 4),
        (arch + ".attention.key_length", 4, 128),
        (arch + ".attention.value_length", 4, 128),
        (arch + ".attention.layer_norm_rms_epsilon", 6, 1e-6),
        (arch + ".rope.freq_base", 6, 1e6),
        ("tokenizer.ggml.model", 8, "gpt2"),
        ("tokenizer.ggml.pre", 8, "qwen2"),
        ("tokenizer.ggml.tokens", 8, tokens),
        ("tokenizer.ggml.token_type", 5, [1] * 256 + [3] * 256),
        ("tokenizer.ggml.merges", 8, [b"a b"]),
        ("tokenizer.ggml.eos_token_id", 4, 256),
    ]
    infos, offset = [], 0
    for name, shape, kind, _ in tensors(args):
        infos.append(text(name.encode()) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", d) for d in shape))
        infos[-1] += struct.pack("<IQ", kind, offset)
        offset += -(-size_of(shape, kind) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(values))
    head += b"".join(entry(*value) for value in values) + b"".join(infos)
    return head + b"\0" * (-len(head) % 32)


def size_of(shape, kind):
    n = 1
    for d in shape:
        n *= d
    return n * 4 if kind == F32 else n // 256 * BLOCK_BYTES[kind]


def write_values(out, name, shape, kind, scale, args, noise):
    rng = random.Random(name)
    if scale is None:
        out.write(struct.pack("<f", 1.0) * shape[0])
    elif scale == "router":
        for _ in range(shape[1]):
            length = 0.05 * 2 ** rng.gauss(0, args.skew)
            out.write(struct.pack(f"<{shape[0]}f", *(rng.gauss(0, length) for _ in range(shape[0]))))
    else:
        left = size_of(shape, kind)
        key = (kind, scale)
        if key not in noise:
            noise[key] = blocks(kind, 1 << 16, scale, random.Random(str(key)))
        data, block = noise[key], BLOCK_BYTES[kind]
        while left > 0:
            # Each piece begins elsewhere, so that no two experts are alike.
            first = rng.randrange(len(data) // block // 2) * block
            piece = data[first : first + left]
            out.write(piece)
            left -= len(piece)
    out.write(b"\0" * (-out.tell() % 32))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    for name, default in [("layers", 48), ("experts", 128), ("used", 8), ("dim", 2048), ("inner", 768)]:
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--skew", type=float, default=1.0)
    args = parser.parse_args()
    noise = {}
    with open(args.file, "wb") as out:
        out.write(header(args))
        for name, shape, kind, scale in tensors(args):
            write_values(out, name, shape, kind, scale, args, noise)
    print(f"{args.file}: {os.path.getsize(args.file) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
