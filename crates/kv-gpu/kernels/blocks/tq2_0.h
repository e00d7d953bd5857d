// TQ2_0: planes qs 64, d 2 of 256 values; d (q - 1).
struct TQ2_0 {
  enum { halves = 1, has_m = 1 };
};
FN void unpack(TQ2_0, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u;
  uint64_t at = k * 4 + g / 4 * 2;
  for (int j = 0; j < 8; ++j) b.q[j] = 0;
  add_bits(quad_at(w.p0, at), quad_at(w.p0, at + 1), 2 * (g & 3u), 0x03030303u, 0, b);
  float d = half_at(w.p1, k);
  set_scale(b, d, -d);
}
