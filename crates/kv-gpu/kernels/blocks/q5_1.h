// Q5_1: planes qs 16, qh 4, d and m 4 of 32 values; d q + m.
struct Q5_1 {
  enum { halves = 1, has_m = 1 };
};
FN void unpack(Q5_1, OWN const Planes &w, uint64_t i, OWN Block &b) {
  nibbles(quad_at(w.p0, i), b);
  add_fifth_bits(word_at(w.p1, i), b);
  uint32_t both = word_at(w.p2, i);
  set_scale(b, half_float(uint16_t(both)), half_float(uint16_t(both >> 16)));
}
