// Values of a weight in any format, where the format is the same for a whole grid: formats are
// numbered as in `BlockFormat::ALL`. For kernels that are not worth a copy for each format.
#ifndef CELLAR_UNPACK
#define CELLAR_UNPACK

FN void unpack_any(uint32_t format, OWN const Planes &w, uint64_t i, OWN Block &b) {
  switch (format) {
  case 3: return unpack(Q4_0(), w, i, b);
  case 4: return unpack(Q4_1(), w, i, b);
  case 5: return unpack(Q5_0(), w, i, b);
  case 6: return unpack(Q5_1(), w, i, b);
  case 7: return unpack(Q8_0(), w, i, b);
  case 8: return unpack(Q2_K(), w, i, b);
  case 9: return unpack(Q3_K(), w, i, b);
  case 10: return unpack(Q4_K(), w, i, b);
  case 11: return unpack(Q5_K(), w, i, b);
  case 12: return unpack(Q6_K(), w, i, b);
  case 13: return unpack(IQ4_NL(), w, i, b);
  case 14: return unpack(IQ4_XS(), w, i, b);
  case 15: return unpack(MXFP4(), w, i, b);
  case 16: return unpack(IQ1_S(), w, i, b);
  case 17: return unpack(IQ1_M(), w, i, b);
  case 18: return unpack(IQ2_XXS(), w, i, b);
  case 19: return unpack(IQ2_XS(), w, i, b);
  case 20: return unpack(IQ2_S(), w, i, b);
  case 21: return unpack(IQ3_XXS(), w, i, b);
  case 22: return unpack(IQ3_S(), w, i, b);
  case 23: return unpack(TQ1_0(), w, i, b);
  case 24: return unpack(TQ2_0(), w, i, b);
  case 25: return unpack(Q1_0(), w, i, b);
  case 26: return unpack(Q2_0(), w, i, b);
  default: return unpack(NVFP4(), w, i, b);
  }
}

FN float plain_any(uint32_t format, DEV const uint8_t *w, uint64_t i) {
  if (format == 0) return plain_at(F32(), w, i);
  return format == 1 ? plain_at(F16(), w, i) : plain_at(BF16(), w, i);
}

// Values 32 k to 32 k + 31 of a row of `n` values, zeros beyond its end.
FN void row_values(uint32_t format, OWN const Planes &w, uint64_t row, uint32_t n, uint32_t k, OWN float *v) {
  if (format < 3) {
    UNROLL
    for (uint32_t j = 0; j < 32; ++j)
      v[j] = k * 32 + j < n ? plain_any(format, w.p0, row * n + k * 32 + j) : 0.0f;
    return;
  }
  Block b;
  unpack_any(format, w, row * (n / 32) + k, b);
  UNROLL
  for (int j = 0; j < 32; ++j) v[j] = value_of(b, j);
}
#endif
