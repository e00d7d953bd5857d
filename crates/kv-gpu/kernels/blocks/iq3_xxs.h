// IQ3_XXS: planes q 64, words 32, d 2 of 256 values; (d / 4 (2 sc + 1)) grid[q] in groups of 32. A word has signs and
// the scale.
struct IQ3_XXS {
  enum { halves = 1, has_m = 0 };
};
FN void unpack(IQ3_XXS, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint32_t at[2] = {word_at(w.p0, 2 * i), word_at(w.p0, 2 * i + 1)}, word = word_at(w.p1, i);
  UNROLL
  for (uint32_t k = 0; k < 8; ++k)
    b.q[k] = grid_four(GRID_IQ3_XXS + (at[k / 4] >> 8 * (k & 3u) & 255u), 0x1c140c04u, 0x3e342c24u);
  negate(even_signs_of(word), b);
  set_odd_scales(b, half_at(w.p2, i / 8) * 0.25f, word >> 28, word >> 28);
}
