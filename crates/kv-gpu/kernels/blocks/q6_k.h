// Q6_K: planes ql 128, qh 64, scales 16, d 2 of 256 values; (d sc) (q - 32) in groups of 16.
struct Q6_K {
  enum { halves = 2, has_m = 1 };
};
FN void unpack(Q6_K, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u, r = g & 3u, scales = short_at(w.p2, i);
  uint64_t low = k * 8 + g / 4 * 4 + (r & 1u) * 2, high = k * 4 + g / 4 * 2;
  for (int j = 0; j < 8; ++j) b.q[j] = 0;
  add_bits(quad_at(w.p0, low), quad_at(w.p0, low + 1), r / 2 * 4, 0x0f0f0f0fu, 0, b);
  add_bits(quad_at(w.p1, high), quad_at(w.p1, high + 1), 2 * r, 0x03030303u, 4, b);
  float d = half_at(w.p3, k);
  b.d[0] = d * float(int8_t(scales));
  b.d[1] = d * float(int8_t(scales >> 8));
  b.m[0] = -32.0f * b.d[0];
  b.m[1] = -32.0f * b.d[1];
}
