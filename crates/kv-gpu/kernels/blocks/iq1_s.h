// IQ1_S: planes q 32, words 16, d 2 of 256 values; (d / 8 (2 sc + 1)) grid[q] in groups of 32. A word has the upper
// bits of four indices, the scale and the sign of the eighth.
struct IQ1_S {
  enum { halves = 1, has_m = 0 };
};
FN void unpack(IQ1_S, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint32_t at = word_at(w.p0, i), word = short_at(w.p1, i);
  UNROLL
  for (uint32_t k = 0; k < 4; ++k)
    iq1_eight((at >> 8 * k & 255u) | (word >> 3 * k & 7u) << 8, word >> 15, b.q + 2 * k);
  set_odd_scales(b, half_at(w.p2, i / 8) * 0.125f, word >> 12 & 7u, word >> 12 & 7u);
}
