// Q5_0: planes qs 16, qh 4, d 2 of 32 values; d (q - 16).
struct Q5_0 {
  enum { halves = 1, has_m = 1 };
};
FN void unpack(Q5_0, OWN const Planes &w, uint64_t i, OWN Block &b) {
  nibbles(quad_at(w.p0, i), b);
  add_fifth_bits(word_at(w.p1, i), b);
  float d = half_at(w.p2, i);
  set_scale(b, d, -16.0f * d);
}
