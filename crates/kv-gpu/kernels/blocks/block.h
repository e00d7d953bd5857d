// What the block formats have in common: planes, 32 unpacked values, bytes to integers.
#ifndef CELLAR_BLOCK
#define CELLAR_BLOCK

// The planes of a weight (src/planes.rs), each row after row, block after block; quants are first.
struct Planes {
  DEV const uint8_t *p0, *p1, *p2, *p3;
};

// 32 values of a weight row: value i is d[i / 16] * q[i] + m[i / 16], where q are signed bytes.
struct Block {
  int q[8];
  float d[2], m[2];
};

// `at1` to `at3` are where the planes begin, in units of 256 bytes.
FN Planes planes(DEV const uint8_t *w, uint32_t at1, uint32_t at2, uint32_t at3) {
  Planes p;
  p.p0 = w;
  p.p1 = w + uint64_t(at1) * 256;
  p.p2 = w + uint64_t(at2) * 256;
  p.p3 = w + uint64_t(at3) * 256;
  return p;
}

// Element i of an array of 16, 4 or 2 bytes each.
FN Quad quad_at(DEV const uint8_t *p, uint64_t i) { return ((DEV const Quad *)p)[i]; }
FN uint32_t word_at(DEV const uint8_t *p, uint64_t i) { return ((DEV const uint32_t *)p)[i]; }
FN uint32_t short_at(DEV const uint8_t *p, uint64_t i) { return ((DEV const uint16_t *)p)[i]; }
FN float half_at(DEV const uint8_t *p, uint64_t i) { return half_float(((DEV const uint16_t *)p)[i]); }

// A power of two by which values of up to `most` are multiplied to be halves, which end at 65504: the
// largest becomes one between 2^13 and 2^14.
FN float half_scale(float most) {
  uint32_t e = float_bits(most) >> 23;
  e = e == 255 ? 140 : e < 14 ? 14 : e;
  return bits_float((267 - e) << 23);
}

// 1 / p of a power of two p, without a division.
FN float inverse_power(float p) { return bits_float((254u << 23) - float_bits(p)); }

// One scale and one addend for all 32 values.
FN void set_scale(OWN Block &b, float d, float m) {
  b.d[0] = b.d[1] = d;
  b.m[0] = b.m[1] = m;
}

// Byte j has value j in its low and value j + 16 in its high nibble.
FN void nibbles(Quad x, OWN Block &b) {
  uint32_t w[4] = {x.x, x.y, x.z, x.w};
  UNROLL
  for (int i = 0; i < 4; ++i) {
    b.q[i] = int(w[i] & 0x0f0f0f0fu);
    b.q[i + 4] = int(w[i] >> 4 & 0x0f0f0f0fu);
  }
}

// The same of the bits `mask` of each of 32 bytes, from bit `shift` on, moved up by `up`.
FN void add_bits(Quad lo, Quad hi, uint32_t shift, uint32_t mask, uint32_t up, OWN Block &b) {
  uint32_t w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
  UNROLL
  for (int i = 0; i < 8; ++i) b.q[i] |= int((w[i] >> shift & mask) << up);
}

// Bit i of `high` is the fifth bit of value i.
FN void add_fifth_bits(uint32_t high, OWN Block &b) {
  UNROLL
  for (int i = 0; i < 8; ++i) b.q[i] |= int(((high >> 4 * i & 15u) * 0x00204081u & 0x01010101u) << 4);
}

// Nibbles as in `nibbles` that are indices into a table of 16 bytes.
FN void look_up(Quad x, Quad table, OWN Block &b) {
  uint32_t w[4] = {x.x, x.y, x.z, x.w};
  UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t of[2];
    UNROLL
    for (int h = 0; h < 2; ++h) {
      uint32_t at = w[i] >> 16 * h, low = at & 0x7777u;
      uint32_t which = 0x3210u | (at & 0x8888u) >> 1;
      of[h] = byte_perm(byte_perm(table.x, table.y, low), byte_perm(table.z, table.w, low), which);
    }
    b.q[i] = int(byte_perm(of[0], of[1], 0x6420u));
    b.q[i + 4] = int(byte_perm(of[0], of[1], 0x7531u));
  }
}

// Value `i` of a block as a float.
FN float value_of(OWN const Block &b, int i) {
  return b.d[i / 16] * float(int8_t(uint32_t(b.q[i / 4]) >> i % 4 * 8)) + b.m[i / 16];
}
#endif
