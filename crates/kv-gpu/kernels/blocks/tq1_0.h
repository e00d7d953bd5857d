// TQ1_0: planes qs 48, qh 4, d 2 of 256 values; d (q - 1), where q is a digit of the ternary fraction that a byte is.
struct TQ1_0 {
  enum { halves = 1, has_m = 1 };
};
// Digit n, from 0 to 4, of each of four bytes.
FN int ternary_digits(uint32_t bytes, uint32_t n) {
  uint32_t power = n < 4 ? 0x1b090301u >> 8 * n & 255u : 81u;
  uint32_t even = (bytes & 0x00ff00ffu) * power & 0x00ff00ffu, odd = (bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
  return int((even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u));
}
// Each of the first five groups of 32 values has a digit of the first 32 bytes. The next two have two digits of the
// following 16 bytes; the last one has the fifth digit of these, and four digits of the last 4 bytes.
FN void unpack(TQ1_0, OWN const Planes &w, uint64_t i, OWN Block &b) {
  uint64_t k = i / 8;
  uint32_t g = uint32_t(i) & 7u, first = g < 5 ? g : 2 * (g - 5), second = g < 5 ? g : first + 1;
  Quad lo = quad_at(w.p0, 3 * k + (g < 5 ? 0 : 2)), hi = quad_at(w.p0, 3 * k + (g < 5 ? 1 : 2));
  uint32_t low[4] = {lo.x, lo.y, lo.z, lo.w}, high[4] = {hi.x, hi.y, hi.z, hi.w};
  UNROLL
  for (uint32_t j = 0; j < 4; ++j) {
    b.q[j] = ternary_digits(low[j], first);
    b.q[j + 4] = g < 7 ? ternary_digits(high[j], second) : ternary_digits(word_at(w.p1, k), j);
  }
  float d = half_at(w.p2, k);
  set_scale(b, d, -d);
}
