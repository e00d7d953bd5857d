// Q2_K: planes qs 64, scales 16, d and dmin 4 of 256 values; (d sc) q - dmin min in groups of 16.
struct Q2_K {
  enum { halves = 2, has_m = 1 };
};
FN void unpack(Q2_K, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u, scales = short_at(w.p1, i), both = word_at(w.p2, k);
  uint64_t at = k * 4 + g / 4 * 2;
  for (int j = 0; j < 8; ++j) b.q[j] = 0;
  add_bits(quad_at(w.p0, at), quad_at(w.p0, at + 1), 2 * (g & 3u), 0x03030303u, 0, b);
  float d = half_float(uint16_t(both)), dmin = half_float(uint16_t(both >> 16));
  b.d[0] = d * float(scales & 15u);
  b.d[1] = d * float(scales >> 8 & 15u);
  b.m[0] = -(dmin * float(scales >> 4 & 15u));
  b.m[1] = -(dmin * float(scales >> 12 & 15u));
}
