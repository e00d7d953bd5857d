"""Makes block_golden.bin: what an independent implementation reads from random blocks.

Needs `numpy` and the `gguf` package (its pure numpy `gguf.quants`). All numbers little endian.

    section 1: u32 count, then for each format
        u8 length + name, u32 n_blocks, the blocks, n_blocks * block_len values (f32)
    section 2: u32 n_values, the values (f32), u32 count, then for each format
        u8 length + name, u32 n_bytes, the bytes that encode those values
"""

import struct
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

READ = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
        "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
WRITE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
# Offsets of the f16 scales in a block.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
          "IQ4_XS": [0]}


def name_bytes(name):
    return struct.pack("<B", len(name)) + name.encode()


def main(path):
    rng = np.random.default_rng(20240229)
    out = struct.pack("<I", len(READ))
    for name in READ:
        block_len, block_bytes = GGML_QUANT_SIZES[T[name]]
        n_blocks = 4 if block_len > 1 else 64
        blocks = rng.integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)
        for at in SCALES.get(name, []):
            scale = rng.normal(0, 0.1, n_blocks).astype("<f2")
            blocks[:, at:at + 2] = scale.view(np.uint8).reshape(n_blocks, 2)
        if name == "MXFP4":  # the exponent of a power of two
            blocks[:, 0] = rng.integers(110, 140, n_blocks)
        if block_len == 1:  # no infinities, no NaN
            values = rng.normal(0, 100, n_blocks).astype("<f4")
            blocks = {"F32": values.view(np.uint8), "F16": values.astype("<f2").view(np.uint8),
                      "BF16": (values.view("<u4") >> 16).astype("<u2").view(np.uint8)}[name]
        values = quants.dequantize(blocks.reshape(n_blocks, block_bytes), T[name])
        out += name_bytes(name) + struct.pack("<I", n_blocks) + blocks.tobytes()
        out += values.astype("<f4").tobytes()
        assert values.size == n_blocks * block_len and np.isfinite(values).all()
    values = rng.normal(0, 1, (1, 8 * 32)).astype("<f4")
    values[0, 32:64] = 0
    out += struct.pack("<I", values.size) + values.tobytes() + struct.pack("<I", len(WRITE))
    for name in WRITE:
        data = quants.quantize(values, T[name]).tobytes()
        out += name_bytes(name) + struct.pack("<I", len(data)) + data
    with open(path, "wb") as f:
        f.write(out)


main(sys.argv[1])
