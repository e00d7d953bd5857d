// Q8_0: planes qs 32, d 2 of 32 values; d q.
struct Q8_0 {
  enum { halves = 1, has_m = 0 };
};
FN void unpack(Q8_0, OWN const Planes &w, uint64_t i, OWN Block &b) {
  Quad lo = quad_at(w.p0, 2 * i), hi = quad_at(w.p0, 2 * i + 1);
  uint32_t q[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
  UNROLL
  for (int j = 0; j < 8; ++j) b.q[j] = int(q[j]);
  set_scale(b, half_at(w.p1, i), 0.0f);
}
