// F32, F16 and BF16: one plane of values, as they are stored.
struct F32 {};
struct F16 {};
struct BF16 {};
FN float plain_at(F32, DEV const uint8_t *w, uint64_t i) { return bits_float(word_at(w, i)); }
FN float plain_at(F16, DEV const uint8_t *w, uint64_t i) { return half_at(w, i); }
FN float plain_at(BF16, DEV const uint8_t *w, uint64_t i) { return bits_float(short_at(w, i) << 16); }

// Values 8 i to 8 i + 7.
FN void plain_eight(F32, DEV const uint8_t *w, uint64_t i, OWN float *v) {
  Quad a = quad_at(w, 2 * i), b = quad_at(w, 2 * i + 1);
  uint32_t u[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  UNROLL
  for (int j = 0; j < 8; ++j) v[j] = bits_float(u[j]);
}
FN void plain_eight(F16, DEV const uint8_t *w, uint64_t i, OWN float *v) {
  Quad a = quad_at(w, i);
  uint32_t u[4] = {a.x, a.y, a.z, a.w};
  UNROLL
  for (int j = 0; j < 8; ++j) v[j] = half_float(uint16_t(u[j / 2] >> j % 2 * 16));
}
FN void plain_eight(BF16, DEV const uint8_t *w, uint64_t i, OWN float *v) {
  Quad a = quad_at(w, i);
  uint32_t u[4] = {a.x, a.y, a.z, a.w};
  UNROLL
  for (int j = 0; j < 8; ++j) v[j] = bits_float(j % 2 ? u[j / 2] & 0xffff0000u : u[j / 2] << 16);
}
