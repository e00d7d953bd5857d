// Q5_K: planes qs 128, qh 32, head 16 of 256 values; (d sc) q - dmin min in groups of 32.
struct Q5_K {
  enum { halves = 1, has_m = 1 };
};
FN void unpack(Q5_K, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u;
  uint64_t at = k * 8 + g / 2 * 2;
  for (int j = 0; j < 8; ++j) b.q[j] = 0;
  add_bits(quad_at(w.p0, at), quad_at(w.p0, at + 1), 4 * (g & 1u), 0x0f0f0f0fu, 0, b);
  add_bits(quad_at(w.p1, 2 * k), quad_at(w.p1, 2 * k + 1), g, 0x01010101u, 4, b);
  q4_k_scale(quad_at(w.p2, k), g, b);
}
