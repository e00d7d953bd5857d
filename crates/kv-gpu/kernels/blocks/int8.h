// Activations as blocks of int8.

// A block of 32 values, one a lane, as 32 signed bytes q; after all `n_blocks` blocks, a scale d and the
// sums of both halves of q (16 bits each) a block: x = d q. This is block `i` of those at `to`. All lanes of the warp take part, whether there is such a block or not.
FN void quantize_block(float v, uint64_t i, uint32_t n_blocks, uint32_t lane, DEV uint8_t *to) {
  float most = warp_max(abs_f(v));
  // Zero, or NaN where a value is not finite: the whole block then is.
  float not_finite = warp_sum(v - v), d = most / 127.0f;
  int q = not_finite == 0.0f && d > 0.0f ? int(rint_f(v / d)) : 0, sum = q;
  for (uint32_t o = 8; o; o >>= 1) sum += warp_xor(sum, o);
  int other = warp_xor(sum, 16);
  if (i >= n_blocks) return;
  to[i * 32 + lane] = uint8_t(q);
  DEV uint32_t *scale = (DEV uint32_t *)(to + uint64_t(n_blocks) * 32) + i * 2;
  if (lane == 0) {
    scale[0] = float_bits(d + not_finite);
    scale[1] = (uint32_t(sum) & 0xffffu) | uint32_t(other) << 16;
  }
}
