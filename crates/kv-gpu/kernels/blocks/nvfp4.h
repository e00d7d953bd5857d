// NVFP4: planes qs 32, d 4 of 64 values; (d / 2) table[q] in groups of 16.
struct NVFP4 {
  enum { halves = 2, has_m = 0 };
};
// Half of a float with four bits of exponent and three of mantissa, whose sign means nothing. NaN is 0.
FN float nvfp4_scale(uint32_t d) {
  uint32_t e = d >> 3 & 15u, m = d & 7u;
  if (d == 127) return 0.0f;
  return e ? bits_float((e + 119) << 23 | m << 20) : float(m) * 0.0009765625f;
}
FN void unpack(NVFP4, OWN const Planes &w, uint64_t i, OWN Block &b) {
  look_up(quad_at(w.p0, i), mxfp4_table(), b);
  // A group has value j in low and value j + 8 in high nibbles.
  int q2 = b.q[2], q3 = b.q[3];
  b.q[2] = b.q[4];
  b.q[3] = b.q[5];
  b.q[4] = q2;
  b.q[5] = q3;
  uint32_t d = short_at(w.p1, i);
  set_scale(b, nvfp4_scale(d & 255u), 0.0f);
  b.d[1] = nvfp4_scale(d >> 8);
}
