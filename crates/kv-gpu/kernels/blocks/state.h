// Values of recurrent states, by their type: as they are stored, and rounded after every token.

FN float state_round(F32, float x) { return x; }
FN float state_round(F16, float x) { return half_float(float_half(x)); }
FN float state_round(BF16, float x) {
  uint32_t bits = float_bits(x);
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bits_float((nan ? bits | 0x400000u : bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// States from value `i` on.
FN DEV float *state_values(F32, DEV uint8_t *states, uint64_t i) { return (DEV float *)states + i; }
FN DEV uint16_t *state_values(F16, DEV uint8_t *states, uint64_t i) { return (DEV uint16_t *)states + i; }
FN DEV uint16_t *state_values(BF16, DEV uint8_t *states, uint64_t i) { return (DEV uint16_t *)states + i; }

FN float state_value(F32, float stored) { return stored; }
FN float state_value(F16, uint16_t stored) { return half_float(stored); }
FN float state_value(BF16, uint16_t stored) { return bits_float(uint32_t(stored) << 16); }

// What is stored of a value that is rounded already.
FN float stored_value(F32, float x) { return x; }
FN uint16_t stored_value(F16, float x) { return float_half(x); }
FN uint16_t stored_value(BF16, float x) { return uint16_t(float_bits(x) >> 16); }
