#!/usr/bin/env python3
"""Writes a Mamba model with random weights in the shape of the smallest published one (d_model 768,
24 layers), for measurements only. Needs the packages `gguf` and `numpy`.

    benches/peer/random_mamba.py OUT.gguf [--type f16|q8_0] [--vocab 50280]
"""

import argparse

import gguf
import numpy as np

DIM, LAYERS, D_STATE, D_CONV = 768, 24, 16, 4
D_INNER, DT_RANK = 2 * DIM, DIM // 16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--type", choices=("f16", "q8_0"), default="f16")
    parser.add_argument("--vocab", type=int, default=50280)
    args = parser.parse_args()
    kind = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}[args.type]
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(args.out, "mamba")
    writer.add_context_length(2048)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(LAYERS)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(DT_RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tokens += [f"t{i}" for i in range(len(tokens), args.vocab)]
    types = [2, 3, 3] + [6] * 256 + [1] * (args.vocab - 259)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(args.vocab)])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name, rows, columns):
        values = random.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def floats(name, values):
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    matrix("token_embd.weight", args.vocab, DIM)
    for layer in range(LAYERS):
        weight = f"blk.{layer}.".__add__
        floats(weight("attn_norm.weight"), np.ones(DIM))
        matrix(weight("ssm_in.weight"), 2 * D_INNER, DIM)
        floats(weight("ssm_conv1d.weight"), random.standard_normal((D_INNER, D_CONV)) / 2)
        floats(weight("ssm_conv1d.bias"), np.zeros(D_INNER))
        matrix(weight("ssm_x.weight"), DT_RANK + 2 * D_STATE, D_INNER)
        # Rows of 48 values are not whole blocks, so this one stays F16.
        values = random.standard_normal((D_INNER, DT_RANK)) / 7
        writer.add_tensor(weight("ssm_dt.weight"), values.astype(np.float16))
        floats(weight("ssm_dt.bias"), np.full(D_INNER, -4.0))
        floats(weight("ssm_a"), -np.tile(np.arange(1.0, D_STATE + 1), (D_INNER, 1)))
        floats(weight("ssm_d"), np.ones(D_INNER))
        matrix(weight("ssm_out.weight"), DIM, D_INNER)
    floats("output_norm.weight", np.ones(DIM))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
