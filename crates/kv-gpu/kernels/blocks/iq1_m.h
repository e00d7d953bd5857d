// IQ1_M: planes q 32, high 16, scales 8 of 256 values; (d / 8 (2 sc + 1)) grid[q] in groups of 16. A nibble of high has
// the upper bits of an index and the sign of the eighth; each 16 bits of scales have four scales and a nibble of d.
struct IQ1_M {
  enum { halves = 2, has_m = 0 };
};
FN void unpack(IQ1_M, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t block = i / 8;
  uint32_t g = uint32_t(i) & 7u, at = word_at(w.p0, i), high = short_at(w.p1, i);
  UNROLL
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t nibble = high >> 4 * k;
    iq1_eight((at >> 8 * k & 255u) | (nibble & 7u) << 8, nibble & 8u, b.q + 2 * k);
  }
  uint32_t low = word_at(w.p2, 2 * block), up = word_at(w.p2, 2 * block + 1);
  uint32_t d = (low >> 12 & 15u) | low >> 28 << 4 | (up >> 12 & 15u) << 8 | up >> 28 << 12;
  uint32_t scales = (g < 4 ? low : up) >> (16 * (g / 2 & 1u) + 6 * (g & 1u));
  set_odd_scales(b, half_float(uint16_t(d)) * 0.125f, scales & 7u, scales >> 3 & 7u);
}
