// IQ2_S: planes q 32 and signs 32, high 8 and scales 8, d 2 of 256 values; (d / 8 (2 sc + 1)) grid[q] in groups of 16.
struct IQ2_S {
  enum { halves = 2, has_m = 0 };
};
FN void unpack(IQ2_S, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u, at = word_at(w.p0, k * 16 + g), high = w.p1[k * 16 + g], scales = w.p1[k * 16 + 8 + g];
  UNROLL
  for (uint32_t j = 0; j < 4; ++j)
    grid_eight(GRID_IQ2_S + ((at >> 8 * j & 255u) | (high >> 2 * j & 3u) << 8), IQ2_LEVELS, b.q + 2 * j);
  negate(word_at(w.p0, k * 16 + 8 + g), b);
  set_odd_scales(b, half_at(w.p2, k) * 0.125f, scales & 15u, scales >> 4);
}
