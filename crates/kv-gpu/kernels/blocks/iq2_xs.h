// IQ2_XS: planes q 64, scales 8, d 2 of 256 values; (d / 8 (2 sc + 1)) grid[q] in groups of 16. Of 16 bits of q nine
// are the index, seven signs.
struct IQ2_XS {
  enum { halves = 2, has_m = 0 };
};
FN void unpack(IQ2_XS, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint32_t both[2] = {word_at(w.p0, 2 * i), word_at(w.p0, 2 * i + 1)}, scales = w.p1[i], sevens = 0;
  UNROLL
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t at = both[k / 2] >> 16 * (k & 1u);
    grid_eight(GRID_IQ2_XS + (at & 511u), IQ2_LEVELS, b.q + 2 * k);
    sevens |= (at >> 9 & 127u) << 8 * k;
  }
  negate(even_signs(sevens), b);
  set_odd_scales(b, half_at(w.p2, i / 8) * 0.125f, scales & 15u, scales >> 4);
}
