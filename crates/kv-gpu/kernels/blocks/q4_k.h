// Q4_K: planes qs 128, head 16 of 256 values; (d sc) q - dmin min in groups of 32.
struct Q4_K {
  enum { halves = 1, has_m = 1 };
};
// Scale and minimum of group g, from d, dmin and 12 bytes of packed scales.
FN void q4_k_scale(Quad head, uint32_t g, OWN Block &b) {
  uint32_t at = (g & 3u) * 8, scale, min;
  if (g < 4) {
    scale = head.y >> at & 63u;
    min = head.z >> at & 63u;
  } else {
    scale = (head.w >> at & 15u) | (head.y >> (at + 6) & 3u) << 4;
    min = (head.w >> (at + 4) & 15u) | (head.z >> (at + 6) & 3u) << 4;
  }
  float d = half_float(uint16_t(head.x)), dmin = half_float(uint16_t(head.x >> 16));
  set_scale(b, d * float(scale), -(dmin * float(min)));
}
FN void unpack(Q4_K, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u;
  uint64_t at = k * 8 + g / 2 * 2;
  for (int j = 0; j < 8; ++j) b.q[j] = 0;
  add_bits(quad_at(w.p0, at), quad_at(w.p0, at + 1), 4 * (g & 1u), 0x0f0f0f0fu, 0, b);
  q4_k_scale(quad_at(w.p1, k), g, b);
}
