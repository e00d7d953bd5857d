// Values to K and V rows, bit for bit as RowShape::encode: rotated by groups, then quantised.

// Rotates groups of values in shared memory: a Walsh-Hadamard transform, divided by the root of the
// group's length. All threads of the block take part; `n` is a whole number of groups.
FN void kv_hadamard(TG float *x, uint32_t n, uint32_t group, uint32_t tid, uint32_t n_threads) {
  for (uint32_t middle = 1; middle < group; middle *= 2) {
    for (uint32_t pair = tid; pair < n / 2; pair += n_threads) {
      uint32_t i = pair / middle * 2 * middle + pair % middle;
      float low = x[i], high = x[i + middle];
      x[i] = low + high;
      x[i + middle] = low - high;
    }
    sync_group();
  }
  if (group == 1) return;
  float scale = 1.0f / sqrt_f(float(group));
  for (uint32_t i = tid; i < n; i += n_threads) x[i] *= scale;
  sync_group();
}

// Scales beyond the range of halves are clipped.
FN float kv_representable(float d) { return d < -65504.0f ? -65504.0f : d > 65504.0f ? 65504.0f : d; }

// What a block's indices are computed with.
struct KvScale {
  float inverse, low;
  uint32_t last;
};

FN uint32_t kv_index(uint32_t type, float x, KvScale s) {
  float scaled = x * s.inverse;
  if (type == 3) { // halves away from zero
    float whole = trunc_f(scaled);
    if (abs_f(scaled - whole) >= 0.5f) whole += scaled < 0.0f ? -1.0f : 1.0f;
    return uint32_t(whole >= 127.0f ? 127 : whole <= -128.0f ? -128 : whole == whole ? int(whole) : 0) & 255;
  }
  if (type == 8) { // as many as there are midpoints between neighbours below it
    uint32_t index = 0;
    for (uint32_t t = 0; t < 15; ++t) index += scaled > (kv_iq4(t) + kv_iq4(t + 1)) / 2.0f;
    return index;
  }
  if (type == 4) scaled += 8.0f;
  if (type == 6) scaled += 16.0f;
  if (type == 5 || type == 7) scaled = (x - s.low) * s.inverse;
  scaled += 0.5f;
  if (!(scaled > 0.0f)) return 0;
  return scaled >= float(s.last) ? s.last : uint32_t(scaled);
}

// Stores a block of 32 values, which are in shared memory, by one warp.
FN void kv_store_block(uint32_t type, TG const float *x, DEV uint8_t *to, uint32_t lane) {
  float far = 0.0f, low = bits_float(0x7f800000u), high = -low;
  for (uint32_t i = 0; i < 32; ++i) { // of equals the first
    float v = x[i];
    if (abs_f(v) > abs_f(far)) far = v;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  float d = type == 3   ? abs_f(far) / 127.0f
            : type == 4 ? far / -8.0f
            : type == 5 ? (high - low) / 15.0f
            : type == 6 ? far / -16.0f
            : type == 7 ? (high - low) / 31.0f
                        : far / -127.0f;
  d = kv_representable(d);
  KvScale s = {d == 0.0f ? 0.0f : 1.0f / d, low, type == 6 || type == 7 ? 31u : 15u};
  DEV uint8_t *quants = to + kv_quants_at(type);
  if (type == 3) {
    quants[lane] = uint8_t(kv_index(type, x[lane], s));
  } else if (lane < 16) {
    quants[lane] = uint8_t((kv_index(type, x[lane], s) & 15) | (kv_index(type, x[lane + 16], s) & 15) << 4);
  } else if (lane < 20 && (type == 6 || type == 7)) {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 8; ++i) bits |= kv_index(type, x[(lane - 16) * 8 + i], s) >> 4 << i;
    to[kv_quants_at(type) - 4 + lane - 16] = uint8_t(bits);
  }
  if (lane == 20) {
    if (type == 8) { // the scale that fits the chosen values best
      float products = 0.0f, squares = 0.0f;
      for (uint32_t i = 0; i < 32; ++i) {
        float t = kv_iq4(kv_index(type, x[i], s));
        products += t * x[i];
        squares += t * t;
      }
      d = kv_representable(products / squares);
    }
    *(DEV uint16_t *)to = float_half(kv_representable(d));
  }
  if (lane == 21 && (type == 5 || type == 7)) *(DEV uint16_t *)(to + 2) = float_half(kv_representable(low));
}

// Stores `n` values, which are in shared memory, as values `first` and on of a row: whole blocks.
FN void kv_store(uint32_t type, TG const float *x, uint32_t n, DEV uint8_t *row, uint32_t first, uint32_t tid,
                 uint32_t n_threads) {
  if (type >= 3) {
    for (uint32_t b = tid / 32; b < n / 32; b += n_threads / 32)
      kv_store_block(type, x + b * 32, row + (first / 32 + b) * kv_block_bytes(type), tid % 32);
    return;
  }
  for (uint32_t i = tid; i < n; i += n_threads) {
    uint32_t bits = float_bits(x[i]);
    if (type == 0) ((DEV uint32_t *)row)[first + i] = bits;
    if (type == 1) ((DEV uint16_t *)row)[first + i] = float_half(x[i]);
    if (type == 2) {
      bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
      uint32_t rounded = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      ((DEV uint16_t *)row)[first + i] = uint16_t(rounded);
    }
  }
}
