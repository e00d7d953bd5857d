// K and V rows as they are stored: a loader for each of the nine types, numbered as in KvType::ALL.
// A kernel chooses one for a whole loop by KV_TYPES, so types of K and V need no kernels in pairs.

struct Eight {
  float v[8];
};

// Runs `code` with the constant KV_TYPE that `type` is.
#define KV_CASE(n, ...)                                                                             \
  case n: {                                                                                         \
    constexpr uint32_t KV_TYPE = n;                                                                 \
    __VA_ARGS__;                                                                                    \
    break;                                                                                          \
  }
#define KV_TYPES(type, ...)                                                                         \
  switch (type) {                                                                                   \
    KV_CASE(0, __VA_ARGS__) KV_CASE(1, __VA_ARGS__) KV_CASE(2, __VA_ARGS__)                         \
    KV_CASE(3, __VA_ARGS__) KV_CASE(4, __VA_ARGS__) KV_CASE(5, __VA_ARGS__)                         \
    KV_CASE(6, __VA_ARGS__) KV_CASE(7, __VA_ARGS__) KV_CASE(8, __VA_ARGS__)                         \
  }

// Bytes of a block of 32 values of types 3 to 8 (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL), and where
// its quants begin.
FN uint32_t kv_block_bytes(uint32_t type) {
  return type == 3 ? 34 : type == 5 ? 20 : type == 6 ? 22 : type == 7 ? 24 : 18;
}
FN uint32_t kv_quants_at(uint32_t type) { return type == 5 ? 4 : type == 6 ? 6 : type == 7 ? 8 : 2; }

FN uint32_t kv_u16(DEV const uint8_t *at) { return *(DEV const uint16_t *)at; }
FN float kv_half(DEV const uint8_t *at) { return half_float(uint16_t(kv_u16(at))); }

// The 16 values of IQ4_NL.
FN float kv_iq4(uint32_t q) {
  uint32_t word = q < 8 ? (q < 4 ? 0xBFAD9881u : 0xF6EADDCFu) : (q < 12 ? 0x26190D01u : 0x71594535u);
  return float(int8_t(word >> (q % 4 * 8)));
}

// What index `q` of a block with scale `d` and minimum `m` stands for.
template <uint32_t type> FN float kv_dequantize(uint32_t q, float d, float m) {
  if (type == 3) return d * float(int8_t(q));
  if (type == 4) return d * (float(q) - 8.0f);
  if (type == 6) return d * (float(q) - 16.0f);
  if (type == 8) return d * kv_iq4(q);
  return d * float(q) + m;
}

// Values `i` to `i + 7` of a row: `i` is a multiple of 8, and so is the length of the row.
template <uint32_t type> FN Eight kv_load8(DEV const uint8_t *row, uint32_t i) {
  Eight y;
  if (type == 0) {
    Float4 a = ((DEV const Float4 *)row)[i / 4], b = ((DEV const Float4 *)row)[i / 4 + 1];
    y = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  } else if (type <= 2) {
    Quad q = ((DEV const Quad *)row)[i / 8];
    uint32_t words[4] = {q.x, q.y, q.z, q.w};
    UNROLL for (uint32_t j = 0; j < 4; ++j) {
      y.v[2 * j] = type == 1 ? half_float(uint16_t(words[j])) : bits_float(words[j] << 16);
      y.v[2 * j + 1] = type == 1 ? half_float(uint16_t(words[j] >> 16)) : bits_float(words[j] & 0xffff0000u);
    }
  } else {
    DEV const uint8_t *block = row + i / 32 * kv_block_bytes(type);
    DEV const uint8_t *quants = block + kv_quants_at(type) + (type == 3 ? i % 32 : i % 16);
    float d = kv_half(block), m = type == 5 || type == 7 ? kv_half(block + 2) : 0.0f;
    DEV const uint8_t *fifth = block + kv_quants_at(type) - 4 + i % 32 / 16 * 2;
    uint32_t high = type == 6 || type == 7 ? kv_u16(fifth) >> (i % 16) : 0;
    UNROLL for (uint32_t j = 0; j < 4; ++j) {
      uint32_t pair = kv_u16(quants + 2 * j);
      UNROLL for (uint32_t b = 0; b < 2; ++b) {
        uint32_t q = pair >> (8 * b) & 255;
        if (type != 3) q = (i % 32 < 16 ? q & 15 : q >> 4) | (high >> (2 * j + b) & 1) << 4;
        y.v[2 * j + b] = kv_dequantize<type>(q, d, m);
      }
    }
  }
  return y;
}

// Value `i` of a row.
template <uint32_t type> FN float kv_load(DEV const uint8_t *row, uint32_t i) {
  if (type == 0) return ((DEV const float *)row)[i];
  if (type == 1) return half_float(((DEV const uint16_t *)row)[i]);
  if (type == 2) return bits_float(uint32_t(((DEV const uint16_t *)row)[i]) << 16);
  DEV const uint8_t *block = row + i / 32 * kv_block_bytes(type);
  DEV const uint8_t *quants = block + kv_quants_at(type);
  uint32_t q = type == 3 ? quants[i % 32] : quants[i % 16] >> (i % 32 / 16 * 4) & 15;
  if (type == 6 || type == 7) q |= (quants[int(i % 32 / 8) - 4] >> (i % 8) & 1) << 4;
  return kv_dequantize<type>(q, kv_half(block), type == 5 || type == 7 ? kv_half(block + 2) : 0.0f);
}

// Values `i` to `i + 7` of a head that ends before `end`, zeros beyond.
template <uint32_t type, bool wide> FN Eight kv_load_head(DEV const uint8_t *row, uint32_t i, uint32_t end) {
  if (wide) return kv_load8<type>(row, i);
  Eight y;
  UNROLL for (uint32_t j = 0; j < 8; ++j) y.v[j] = i + j < end ? kv_load<type>(row, i + j) : 0.0f;
  return y;
}
