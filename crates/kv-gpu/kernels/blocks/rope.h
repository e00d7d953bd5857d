// One value of a head, rotated by cosines and sines that the inputs have.

struct RopeArgs {
  uint32_t n_rows, n_heads, dim, n_pairs;
  // 0: pairs of neighbours; 1: of halves.
  uint32_t halves;
  // Heads of the second operand.
  uint32_t n_more_heads;
};

// Value `i` of the heads of row `row`, which begin at `x`; values beyond the pairs stay.
FN float rotated(DEV const float *x, uint32_t i, DEV const float *angles, RopeArgs a, uint32_t row) {
  uint32_t item = i % a.dim;
  if (item >= 2 * a.n_pairs) return x[i];
  uint32_t pair = a.halves ? item % a.n_pairs : item / 2;
  uint32_t first = i - item + (a.halves ? pair : 2 * pair), second = first + (a.halves ? a.n_pairs : 1);
  float cosine = angles[row * a.n_pairs + pair], sine = angles[(a.n_rows + row) * a.n_pairs + pair];
  float u = x[first], v = x[second];
  return i == first ? u * cosine - v * sine : u * sine + v * cosine;
}
