// MXFP4: planes qs 16, e 1 of 32 values; 2^(e - 128) table[q].
struct MXFP4 {
  enum { halves = 1, has_m = 0 };
};
FN Quad mxfp4_table() {
  Quad table = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
  return table;
}
FN void unpack(MXFP4, OWN const Planes &w, uint64_t i, OWN Block &b) {
  look_up(quad_at(w.p0, i), mxfp4_table(), b);
  uint32_t e = w.p1[i];
  set_scale(b, bits_float(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0.0f);
}
