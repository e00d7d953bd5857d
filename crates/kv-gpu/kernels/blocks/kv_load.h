// K and V rows as they are stored, of the nine types that are numbered as in KvType::ALL: F32, F16,
// BF16, Q8_0, and blocks of indices of 4 and 5 bits: Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL. A kernel chooses
// the loader of a class for a whole loop by KV_CLASSES: types of K and V need no kernels in pairs.

struct Eight {
  float v[8];
};

// Runs code with the constant KV_CLASS: the type, or 4 for all types of indices.
#define KV_CLASS_OF(n, ...)                                                                         \
  {                                                                                                 \
    constexpr uint32_t KV_CLASS = n;                                                                \
    __VA_ARGS__;                                                                                    \
    break;                                                                                          \
  }
#define KV_CLASSES(type, ...)                                                                       \
  switch (type) {                                                                                   \
    case 0: KV_CLASS_OF(0, __VA_ARGS__) case 1: KV_CLASS_OF(1, __VA_ARGS__)                         \
    case 2: KV_CLASS_OF(2, __VA_ARGS__) case 3: KV_CLASS_OF(3, __VA_ARGS__)                         \
    default: KV_CLASS_OF(4, __VA_ARGS__)                                                            \
  }

// Bytes of a block of 32 values of types from 3 on, and where its quants begin.
FN uint32_t kv_block_bytes(uint32_t type) {
  return type == 3 ? 34 : type == 5 ? 20 : type == 6 ? 22 : type == 7 ? 24 : 18;
}
FN uint32_t kv_quants_at(uint32_t type) { return type == 5 ? 4 : type == 6 ? 6 : type == 7 ? 8 : 2; }
FN bool kv_has_minimum(uint32_t type) { return type == 5 || type == 7; }
FN bool kv_has_fifth_bits(uint32_t type) { return type == 6 || type == 7; }

FN uint32_t kv_u16(DEV const uint8_t *at) { return *(DEV const uint16_t *)at; }
FN float kv_half(DEV const uint8_t *at) { return half_float(uint16_t(kv_u16(at))); }

// The 16 values of IQ4_NL.
FN float kv_iq4(uint32_t q) {
  uint32_t word = q < 8 ? (q < 4 ? 0xBFAD9881u : 0xF6EADDCFu) : (q < 12 ? 0x26190D01u : 0x71594535u);
  return float(int8_t(word >> (q % 4 * 8)));
}

// What an index of 4 or 5 bits stands for in a block with scale `d` and minimum `m`, or 0.
FN float kv_dequantize(uint32_t type, uint32_t q, float d, float m) {
  float x = float(q) - (type == 4 ? 8.0f : type == 6 ? 16.0f : 0.0f);
  if (type == 8) x = kv_iq4(q);
  return d * x + m;
}

// Values `i` to `i + 7` of a row: `i` is a multiple of 8, and so is the length of the row.
template <uint32_t kv_class> FN Eight kv_load8(uint32_t type, DEV const uint8_t *row, uint32_t i) {
  Eight y;
  if (kv_class == 0) {
    Float4 a = ((DEV const Float4 *)row)[i / 4], b = ((DEV const Float4 *)row)[i / 4 + 1];
    y = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  } else if (kv_class <= 2) {
    Quad q = ((DEV const Quad *)row)[i / 8];
    uint32_t words[4] = {q.x, q.y, q.z, q.w};
    UNROLL for (uint32_t j = 0; j < 4; ++j) {
      y.v[2 * j] = kv_class == 1 ? half_float(uint16_t(words[j])) : bits_float(words[j] << 16);
      y.v[2 * j + 1] = kv_class == 1 ? half_float(uint16_t(words[j] >> 16)) : bits_float(words[j] & 0xffff0000u);
    }
  } else {
    uint32_t at = kv_class == 3 ? 2 : kv_quants_at(type);
    DEV const uint8_t *block = row + i / 32 * (kv_class == 3 ? 34 : kv_block_bytes(type));
    DEV const uint8_t *quants = block + at + (kv_class == 3 ? i % 32 : i % 16);
    float d = kv_half(block), m = 0.0f;
    uint32_t fifth = 0;
    if (kv_class == 4 && kv_has_minimum(type)) m = kv_half(block + 2);
    if (kv_class == 4 && kv_has_fifth_bits(type)) fifth = kv_u16(block + at - 4 + i % 32 / 16 * 2) >> (i % 16);
    UNROLL for (uint32_t j = 0; j < 8; j += 2) {
      uint32_t pair = kv_u16(quants + j);
      if (kv_class == 3) {
        y.v[j] = d * float(int8_t(pair));
        y.v[j + 1] = d * float(int8_t(pair >> 8));
      } else {
        if (i % 32 >= 16) pair >>= 4;
        y.v[j] = kv_dequantize(type, (pair & 15) | (fifth >> j & 1) << 4, d, m);
        y.v[j + 1] = kv_dequantize(type, (pair >> 8 & 15) | (fifth >> j & 2) << 3, d, m);
      }
    }
  }
  return y;
}

// The same of blocks of any type.
FN Eight kv_load8_any(uint32_t type, DEV const uint8_t *row, uint32_t i) {
  return type == 3 ? kv_load8<3>(type, row, i) : kv_load8<4>(type, row, i);
}

// Value `i` of a row.
FN float kv_load(uint32_t type, DEV const uint8_t *row, uint32_t i) {
  if (type == 0) return ((DEV const float *)row)[i];
  if (type == 1) return half_float(((DEV const uint16_t *)row)[i]);
  if (type == 2) return bits_float(uint32_t(((DEV const uint16_t *)row)[i]) << 16);
  DEV const uint8_t *block = row + i / 32 * kv_block_bytes(type), *quants = block + kv_quants_at(type);
  if (type == 3) return kv_half(block) * float(int8_t(quants[i % 32]));
  uint32_t q = quants[i % 16] >> (i % 32 / 16 * 4) & 15;
  if (kv_has_fifth_bits(type)) q |= (quants[int(i % 32 / 8) - 4] >> (i % 8) & 1) << 4;
  return kv_dequantize(type, q, kv_half(block), kv_has_minimum(type) ? kv_half(block + 2) : 0.0f);
}
