// IQ3_S: planes q 64, high 8, signs 32 and scales 4, d 2 of 256 values; (d (2 sc + 1)) grid[q] in groups of 32.
struct IQ3_S {
  enum { halves = 1, has_m = 0 };
};
FN void unpack(IQ3_S, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u, at[2] = {word_at(w.p0, 2 * i), word_at(w.p0, 2 * i + 1)}, high = w.p1[i];
  UNROLL
  for (uint32_t j = 0; j < 8; ++j) {
    uint32_t entry = (at[j / 4] >> 8 * (j & 3u) & 255u) | (high >> j & 1u) << 8;
    b.q[j] = grid_four(GRID_IQ3_S + entry, 0x07050301u, 0x0f0d0b09u);
  }
  negate(word_at(w.p2, k * 9 + g), b);
  uint32_t scale = w.p2[k * 36 + 32 + g / 2] >> 4 * (g & 1u) & 15u;
  set_odd_scales(b, half_at(w.p3, k), scale, scale);
}
