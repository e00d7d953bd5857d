// The grids of the IQ1, IQ2 and IQ3 formats: an index stands for eight values, or for four.
#ifndef CELLAR_GRIDS
#define CELLAR_GRIDS

// The first entry of each grid.
enum { GRID_IQ2_XXS = 0, GRID_IQ2_XS = 256, GRID_IQ2_S = 768, GRID_IQ1 = 1792, GRID_IQ3_XXS = 3840, GRID_IQ3_S = 4096 };
// The magnitudes that values of the IQ2 formats have, a byte each.
enum { IQ2_LEVELS = 0x002b1908 };

// The eight values of an entry: each has two bits, which choose a byte of `levels`.
FN void grid_eight(uint32_t entry, uint32_t levels, OWN int *q) {
  uint32_t both = grid_table[entry];
  UNROLL
  for (uint32_t h = 0; h < 2; ++h) {
    uint32_t at = both >> 8 * h & 255u;
    at = (at | at << 4) & 0x0f0fu;
    at = (at | at << 2) & 0x3333u;
    q[h] = int(byte_perm(levels, 0, at));
  }
}
// The four values of an entry: each has three bits, which choose a byte of `low` or `high`.
FN int grid_four(uint32_t entry, uint32_t low, uint32_t high) {
  uint32_t at = grid_table[entry];
  at = (at & 7u) | (at & 0x38u) << 1 | (at & 0x1c0u) << 2 | (at & 0xe00u) << 3;
  return int(byte_perm(low, high, at));
}

// Negates value i where bit i of `signs` is set. No value may be 0.
FN void negate(uint32_t signs, OWN Block &b) {
  UNROLL
  for (int i = 0; i < 8; ++i) {
    uint32_t ones = (signs >> 4 * i & 15u) * 0x00204081u & 0x01010101u;
    b.q[i] = int((uint32_t(b.q[i]) ^ ones * 255u) + ones);
  }
}
// Bytes of seven signs, with an eighth that makes the number of those that are set even.
FN uint32_t even_signs(uint32_t sevens) {
  uint32_t odd = sevens ^ sevens >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return sevens | (odd & 0x01010101u) << 7;
}
// The same of four times seven bits of a number.
FN uint32_t even_signs_of(uint32_t word) {
  uint32_t low = (word & 127u) | (word & 127u << 7) << 1;
  return even_signs(low | (word & 127u << 14) << 2 | (word & 127u << 21) << 3);
}

// `unit` times the odd number of each scale: one for each half of a block.
FN void set_odd_scales(OWN Block &b, float unit, uint32_t first, uint32_t second) {
  set_scale(b, unit * float(2 * first + 1), 0.0f);
  b.d[1] = unit * float(2 * second + 1);
}
#endif
