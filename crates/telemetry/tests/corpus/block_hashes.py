#!/usr/bin/env python3
"""Makes block_hashes.json and kv_events.hex: block hashes and KV events as vLLM 0.29 computes and encodes them.

    pip install cbor2 msgspec
    python block_hashes.py

The hashes are those of vLLM's `sha256_cbor`, `init_none_hash` and `hash_block_tokens`, restated here; a salt is
this server's number in 16 hexadecimal digits, in the place of vLLM's `cache_salt`.
"""

import hashlib
import json
import pathlib
from typing import Any

import cbor2
import msgspec

FOLDER = pathlib.Path(__file__).parent


def sha256_cbor(value):
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def block_hashes(seed, salt, block_size, tokens):
    parent, hashes = sha256_cbor(seed), []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra_keys = (f"{salt:016x}",) if salt is not None and start == 0 else None
        parent = sha256_cbor((parent, tuple(tokens[start : start + block_size]), extra_keys))
        hashes.append(parent.hex())
    return hashes


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes] | list[int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes] | list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


def stored(parent, extra_keys):
    hashes, tokens = [b"\x01" * 32, b"\xff" * 32], [5, 300, 70_000, 1]
    return BlockStored(hashes, parent, tokens, 2, None, "GPU", None, extra_keys)


def low_64_bits(hash):
    """vLLM's `maybe_convert_block_hash` without VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    return hash if hash is None else int.from_bytes(hash, "big") & (2**64 - 1)


def in_numbers(event):
    """The event with numbers in place of hashes."""
    changed = {}
    if hasattr(event, "block_hashes"):
        changed["block_hashes"] = [low_64_bits(hash) for hash in event.block_hashes]
    if hasattr(event, "parent_block_hash"):
        changed["parent_block_hash"] = low_64_bits(event.parent_block_hash)
    return msgspec.structs.replace(event, **changed)


def main():
    # Token ids on both sides of each length that CBOR has, and a last block that is not whole.
    edges = [0, 1, 22, 23, 24, 25, 254, 255, 256, 257, 65534, 65535, 65536, 65537, 2**32 - 2, 2**32 - 1]
    cases = []
    for seed, salt, block_size, tokens in [
        ("0", None, 16, edges * 2 + [9, 9, 9]),
        ("0", 0xAB, 16, edges * 2 + [9, 9, 9]),
        ("42", 2**64 - 1, 1, edges),
        ("4294967295", None, 300, list(range(700))),
        ("", None, 4, edges),
    ]:
        hashes = block_hashes(seed, salt, block_size, tokens)
        cases.append(dict(seed=seed, salt=salt, block_size=block_size, tokens=tokens, hashes=hashes))
    lines = ",\n".join(json.dumps(case) for case in cases)
    (FOLDER / "block_hashes.json").write_text(f"[\n{lines}\n]\n")

    before, salt = b"\x07" * 32, ("00000000000000ab",)
    events = [
        AllBlocksCleared(),
        stored(None, None),
        stored(before, None),
        stored(None, [salt, None]),
        stored(before, [None, None]),
        BlockRemoved([b"\xc8" * 32], "GPU"),
    ]
    batches = [msgspec.msgpack.encode(EventBatch(1.5, of, 0)) for of in (events, [in_numbers(event) for event in events])]
    (FOLDER / "kv_events.hex").write_text("".join(batch.hex() + "\n" for batch in batches))


if __name__ == "__main__":
    main()
