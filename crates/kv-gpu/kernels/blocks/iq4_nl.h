// IQ4_NL: planes qs 16, d 2 of 32 values; d table[q].
struct IQ4_NL {
  enum { halves = 1, has_m = 0 };
};
FN Quad iq4_table() {
  Quad table = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
  return table;
}
FN void unpack(IQ4_NL, OWN const Planes &w, uint64_t i, OWN Block &b) {
  look_up(quad_at(w.p0, i), iq4_table(), b);
  set_scale(b, half_at(w.p1, i), 0.0f);
}
