// IQ4_XS: planes qs 128, d and scales 8 of 256 values; (d (sc - 32)) table[q] in groups of 32.
struct IQ4_XS {
  enum { halves = 1, has_m = 0 };
};
FN void unpack(IQ4_XS, OWN const Planes &w, uint64_t i, OWN Block &b) {
  look_up(quad_at(w.p0, i), iq4_table(), b);
  uint32_t g = uint32_t(i) & 7u, head = word_at(w.p1, i / 8 * 2), low = word_at(w.p1, i / 8 * 2 + 1);
  uint32_t scale = (low >> 4 * g & 15u) | (head >> (16 + 2 * g) & 3u) << 4;
  set_scale(b, half_float(uint16_t(head)) * float(int(scale) - 32), 0.0f);
}
