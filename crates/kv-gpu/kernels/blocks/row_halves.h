// Rows of a weight as halves for tensor cores, 32 values at a time.
#ifndef CELLAR_ROW_HALVES
#define CELLAR_ROW_HALVES

// Whether rows of format F are multiplied by powers of two to become halves, which end at 65504. The other formats
// end there, too, and BF16 may be multiplied as it is.
template <class F, class T> struct IsScaled {
  enum { value = 0 };
};
template <> struct IsScaled<F32, Half> {
  enum { value = 1 };
};
template <> struct IsScaled<BF16, Half> {
  enum { value = 1 };
};
// The power of two for a row: 1 where halves hold it well. Half `part` of the row is this lane's, the other half
// its neighbour's.
template <class F> FN float plain_scale(F format, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t part) {
  float most = 0.0f;
  if (n % 8 == 0) {
    NO_UNROLL
    for (uint32_t k = part; k < n / 8; k += 2) {
      float v[8];
      plain_eight(format, w.p0, row * (n / 8) + k, v);
      UNROLL
      for (uint32_t j = 0; j < 8; ++j) most = max_f(most, abs_f(v[j]));
    }
  } else {
    for (uint32_t c = part; c < n; c += 2) most = max_f(most, abs_f(plain_at(format, w.p0, row * n + c)));
  }
  most = max_f(most, warp_xor(most, 1));
  return most > 32768.0f || (most < 0.015625f && most > 0.0f) ? half_scale(most) : 1.0f;
}
template <class F, class T> FN float row_scale(F, T, OWN const Planes &, uint64_t, uint32_t, uint32_t) { return 1.0f; }
FN float row_scale(F32 f, Half, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t part) {
  return plain_scale(f, w, row, n, part);
}
FN float row_scale(BF16 f, Half, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t part) {
  return plain_scale(f, w, row, n, part);
}

// Values 32 k to 32 k + 31 of a row, times `scale` where it is scaled, as pairs of halves, zeros beyond its end.
template <class F>
FN void row_halves(F format, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, float, OWN uint32_t *h) {
  if (k * 32 >= n) {
    UNROLL
    for (uint32_t i = 0; i < 16; ++i) h[i] = 0;
    return;
  }
  Block b;
  unpack(format, w, row * (n / 32) + k, b);
  UNROLL
  for (int i = 0; i < 16; ++i) h[i] = pack_halves(value_of(b, 2 * i), value_of(b, 2 * i + 1));
}
template <class F>
FN void plain_halves(F format, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, float scale,
                     OWN uint32_t *h) {
  if (n % 8 == 0) {
    UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
      if (k * 32 + i * 8 < n) plain_eight(format, w.p0, (row * n + k * 32) / 8 + i, v);
      UNROLL
      for (uint32_t j = 0; j < 4; ++j) h[i * 4 + j] = pack_halves(v[2 * j] * scale, v[2 * j + 1] * scale);
    }
    return;
  }
  UNROLL
  for (uint32_t i = 0; i < 16; ++i) {
    uint32_t c = k * 32 + 2 * i;
    float low = c < n ? plain_at(format, w.p0, row * n + c) : 0.0f;
    float high = c + 1 < n ? plain_at(format, w.p0, row * n + c + 1) : 0.0f;
    h[i] = pack_halves(low * scale, high * scale);
  }
}
FN void row_halves(F32 f, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, float scale, OWN uint32_t *h) {
  plain_halves(f, w, row, n, k, scale, h);
}
FN void row_halves(BF16 f, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, float scale, OWN uint32_t *h) {
  plain_halves(f, w, row, n, k, scale, h);
}

// Values of two bytes as they are stored.
FN void stored_values(OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, OWN uint32_t *h) {
  if (n % 8 == 0) {
    UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      Quad q = {0, 0, 0, 0};
      if (k * 32 + i * 8 < n) q = quad_at(w.p0, (row * n + k * 32) / 8 + i);
      h[i * 4] = q.x;
      h[i * 4 + 1] = q.y;
      h[i * 4 + 2] = q.z;
      h[i * 4 + 3] = q.w;
    }
    return;
  }
  UNROLL
  for (uint32_t i = 0; i < 16; ++i) {
    uint32_t c = k * 32 + 2 * i;
    h[i] = c < n ? short_at(w.p0, row * n + c) : 0;
    if (c + 1 < n) h[i] |= short_at(w.p0, row * n + c + 1) << 16;
  }
}

// The same as what is multiplied: F16 as it is stored, and BF16 where matrices of it exist.
template <class F>
FN void row_values(F format, Half, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, float scale,
                   OWN uint32_t *h) {
  row_halves(format, w, row, n, k, scale, h);
}
FN void row_values(F16, Half, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, float, OWN uint32_t *h) {
  stored_values(w, row, n, k, h);
}
FN void row_values(BF16, Bfloat, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, float, OWN uint32_t *h) {
  stored_values(w, row, n, k, h);
}
#endif
