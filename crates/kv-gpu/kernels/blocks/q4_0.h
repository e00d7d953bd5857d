// Q4_0: planes qs 16, d 2 of 32 values; d (q - 8).
struct Q4_0 {
  enum { halves = 1, has_m = 1 };
};
FN void unpack(Q4_0, OWN const Planes &w, uint64_t i, OWN Block &b) {
  nibbles(quad_at(w.p0, i), b);
  float d = half_at(w.p1, i);
  set_scale(b, d, -8.0f * d);
}
