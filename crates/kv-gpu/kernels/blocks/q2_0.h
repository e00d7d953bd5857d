// Q2_0: planes qs 16, d 2 of 64 values; d (q - 1), four neighbours a byte.
struct Q2_0 {
  enum { halves = 1, has_m = 1 };
};
FN void unpack(Q2_0, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint32_t packed[2] = {word_at(w.p0, 2 * i), word_at(w.p0, 2 * i + 1)};
  UNROLL
  for (uint32_t j = 0; j < 8; ++j) {
    uint32_t x = packed[j / 4] >> 8 * (j & 3u) & 255u;
    x = (x | x << 12) & 0x000f000fu;
    b.q[j] = int((x | x << 6) & 0x03030303u);
  }
  float d = half_at(w.p1, i / 2);
  set_scale(b, d, -d);
}
