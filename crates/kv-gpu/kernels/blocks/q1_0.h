// Q1_0: planes qs 16, d 2 of 128 values; d where a bit is set, else -d.
struct Q1_0 {
  enum { halves = 1, has_m = 0 };
};
FN void unpack(Q1_0, OWN const Planes &w, uint64_t i, OWN Block &b) {
  for (int j = 0; j < 8; ++j) b.q[j] = 0x01010101;
  negate(~word_at(w.p0, i), b);
  set_scale(b, half_at(w.p1, i / 4), 0.0f);
}
