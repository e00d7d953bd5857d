// Q3_K: planes qs 64, hmask 32, scales 12, d 2 of 256 values; (d (sc - 32)) (q - 4) in groups of 16.
struct Q3_K {
  enum { halves = 2, has_m = 1 };
};
FN float q3_k_scale(DEV const uint8_t *packed, uint32_t g) {
  uint32_t low = packed[g & 7u] >> g / 8 * 4 & 15u, high = packed[8 + (g & 3u)] >> g / 4 * 2 & 3u;
  return float(int(low | high << 4) - 32);
}
FN void unpack(Q3_K, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u;
  uint64_t at = k * 4 + g / 4 * 2;
  for (int j = 0; j < 8; ++j) b.q[j] = 0;
  add_bits(quad_at(w.p0, at), quad_at(w.p0, at + 1), 2 * (g & 3u), 0x03030303u, 0, b);
  add_bits(quad_at(w.p1, 2 * k), quad_at(w.p1, 2 * k + 1), g, 0x01010101u, 2, b);
  float d = half_at(w.p3, k);
  UNROLL
  for (uint32_t h = 0; h < 2; ++h) {
    b.d[h] = d * q3_k_scale(w.p2 + k * 12, 2 * g + h);
    b.m[h] = -4.0f * b.d[h];
  }
}
