#!/usr/bin/env python3
"""Writes a mmproj file with the vision tower of Gemma 3 (SigLIP 400M) and random weights, to measure with.

Usage: tower.py FILE.gguf [--side 448] [--width 640] [--layers 27]

--side is that of pictures in pixels (56 times a whole number), --width that of the rows of the text decoder: 640 is
Gemma 3 270M's, 2560 that of 4B. Matrices are F16. Needs nothing but Python.
"""
import argparse
import random
import struct

from mixture import entry, text

F32, F16 = 0, 1
DIM, INNER, HEADS, PATCH = 1152, 4304, 16, 14


def tensors(args):
    """Name, shape with the fastest dimension first, and type."""
    yield "v.patch_embd.weight", (PATCH, PATCH, 3, DIM), F16
    yield "v.patch_embd.bias", (DIM,), F32
    yield "v.position_embd.weight", (DIM, (args.side // PATCH) ** 2), F32
    for at in range(args.layers):
        layer = f"v.blk.{at}."
        for norm in ("ln1", "ln2"):
            yield f"{layer}{norm}.weight", (DIM,), F32
            yield f"{layer}{norm}.bias", (DIM,), F32
        for name, n_in, n_out in (
            ("attn_q", DIM, DIM),
            ("attn_k", DIM, DIM),
            ("attn_v", DIM, DIM),
            ("attn_out", DIM, DIM),
            ("ffn_up", DIM, INNER),
            ("ffn_down", INNER, DIM),
        ):
            yield f"{layer}{name}.weight", (n_in, n_out), F16
            yield f"{layer}{name}.bias", (n_out,), F32
    yield "v.post_ln.weight", (DIM,), F32
    yield "v.post_ln.bias", (DIM,), F32
    yield "mm.input_projection.weight", (args.width, DIM), F16
    yield "mm.soft_emb_norm.weight", (DIM,), F32


def n_bytes(shape, kind):
    n = 2 if kind == F16 else 4
    for d in shape:
        n *= d
    return n


def header(args):
    values = [
        ("general.architecture", 8, "clip"),
        ("general.name", 8, "random tower"),
        ("clip.projector_type", 8, "gemma3"),
        ("clip.vision.image_size", 4, args.side),
        ("clip.vision.patch_size", 4, PATCH),
        ("clip.vision.embedding_length", 4, DIM),
        ("clip.vision.feed_forward_length", 4, INNER),
        ("clip.vision.projection_dim", 4, args.width),
        ("clip.vision.block_count", 4, args.layers),
        ("clip.vision.attention.head_count", 4, HEADS),
        ("clip.vision.attention.layer_norm_epsilon", 6, 1e-6),
    ]
    flags = [("clip.has_vision_encoder", True), ("clip.use_gelu", True)]
    floats = ["clip.vision.image_mean", "clip.vision.image_std"]
    infos, offset = [], 0
    for name, shape, kind in tensors(args):
        infos.append(text(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
        offset += -(-n_bytes(shape, kind) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(values) + len(flags) + len(floats))
    head += b"".join(entry(*value) for value in values)
    head += b"".join(text(key.encode()) + struct.pack("<I?", 7, flag) for key, flag in flags)
    head += b"".join(text(key.encode()) + struct.pack("<IIQ3f", 9, 6, 3, 0.5, 0.5, 0.5) for key in floats)
    head += b"".join(infos)
    return head + b"\0" * (-len(head) % 32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--layers", type=int, default=27)
    args = parser.parse_args()
    if args.side <= 0 or args.side % (4 * PATCH):
        parser.error(f"--side {args.side}: a whole number of times {4 * PATCH} is needed")
    rng = random.Random(7)
    noise = [rng.gauss(0, 0.02) for _ in range(1 << 16)]
    noise = {F16: struct.pack(f"<{len(noise)}e", *noise), F32: struct.pack(f"<{len(noise)}f", *noise)}
    with open(args.file, "wb") as out:
        out.write(header(args))
        for name, shape, kind in tensors(args):
            size = n_bytes(shape, kind)
            if name.endswith("norm.weight") or name.split(".")[-2].startswith(("ln", "post_ln")) and "weight" in name:
                values = struct.pack("<f", 1.0) * shape[0]
            else:
                # From another place of the noise each time.
                start = rng.randrange(1 << 12) * 4
                times = (size + start) // len(noise[kind]) + 1
                values = (noise[kind] * times)[start : start + size]
            out.write(values + b"\0" * (-size % 32))


if __name__ == "__main__":
    main()
