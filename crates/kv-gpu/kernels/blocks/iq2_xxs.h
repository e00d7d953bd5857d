// IQ2_XXS: planes groups 64, d 2 of 256 values; (d / 8 (2 sc + 1)) grid[q] in groups of 32: four bytes of
// indices, then signs and the scale.
struct IQ2_XXS {
  enum { halves = 1, has_m = 0 };
};
FN void unpack(IQ2_XXS, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint32_t at = word_at(w.p0, 2 * i), word = word_at(w.p0, 2 * i + 1);
  UNROLL
  for (uint32_t k = 0; k < 4; ++k) grid_eight(GRID_IQ2_XXS + (at >> 8 * k & 255u), IQ2_LEVELS, b.q + 2 * k);
  negate(even_signs_of(word), b);
  set_odd_scales(b, half_at(w.p1, i / 8) * 0.125f, word >> 28, word >> 28);
}
