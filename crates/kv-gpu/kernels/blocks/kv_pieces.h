// Attention of up to G queries of one K/V head over a piece: a range of positions of some rows.
//
// A query is a row and one of the query heads that share the K/V head. Cells are taken in chunks:
// scores to shared memory, softmax weights with a running maximum, then values by columns. What a
// piece gives for a query is its maximum, the sum of its weights and the weighted sum of values.

struct AttendArgs {
  uint32_t header, positions, many;
  uint32_t n_heads, kv_heads, k_dim, v_dim;
  uint32_t k_type, v_type, k_row_bytes, v_row_bytes;
  uint32_t v_stride; // values from one head's beginning to the next one's in rows of V
  uint32_t sums;     // where weighted sums begin in the partial results
  float alibi; // the factor of linear biases; 0 where scores have none
  float scale, soft_cap, max_bias;
};

enum : uint32_t { kChunk = 256, kAttendThreads = 256 };

// The negated slope of a head's linear biases, see Alibi::slopes.
FN float alibi_slope(uint32_t head, uint32_t n_heads, float max_bias) {
  uint32_t whole = 1;
  while (whole * 2 <= n_heads) whole *= 2;
  float of = head < whole ? float(head + 1) / float(whole) : float(2 * (head - whole) + 1) / float(2 * whole);
  return -exp_f(-0.6931471805599453f * max_bias * of);
}

// A piece's place in the tables of a visibility.
struct Piece {
  uint32_t rows, n_rows, first_run, end_run, slot, first, n_cells;
};

// The run of an entry of the table of runs: cell, position, length, cells before it.
FN Quad attend_run(DEV const uint32_t *inputs, uint32_t runs, uint32_t i) {
  return *(DEV const Quad *)(inputs + runs + 4 * i);
}

FN Piece attend_piece(DEV const uint32_t *inputs, uint32_t header, uint32_t many, uint32_t number) {
  DEV const uint32_t *h = inputs + header, *p = inputs + h[many ? 3 : 1] + number * 8;
  Piece piece;
  piece.rows = h[5] + 3 * p[0];
  piece.n_rows = many ? p[1] : 1;
  p += many ? 2 : 1;
  piece.first_run = p[0];
  piece.end_run = p[1];
  piece.slot = p[4];
  Quad first = attend_run(inputs, h[4], p[0]), last = attend_run(inputs, h[4], p[1] - 1);
  uint32_t skip = p[2] > first.y ? p[2] - first.y : 0, held = p[3] - last.y + 1;
  piece.first = first.w + skip;
  piece.n_cells = last.w + (held < last.z ? held : last.z) - piece.first;
  return piece;
}

struct Cell {
  uint32_t cell, pos;
};

// Cell number `number` of the group whose runs the piece looks at.
FN Cell attend_cell(DEV const uint32_t *inputs, uint32_t runs, Piece piece, uint32_t number) {
  uint32_t low = piece.first_run, high = piece.end_run;
  while (high - low > 1) {
    uint32_t middle = (low + high) / 2;
    if (attend_run(inputs, runs, middle).w <= number)
      low = middle;
    else
      high = middle;
  }
  Quad run = attend_run(inputs, runs, low);
  Cell cell = {run.x + (number - run.w), run.y + (number - run.w)};
  return cell;
}

// What each query sees, in shared memory.
struct AttendQuery {
  uint32_t q, first, last, pos; // its number among rows and heads; positions
  uint32_t slot;
  float slope;
};

FN AttendQuery attend_query(DEV const uint32_t *inputs, AttendArgs a, Piece piece, uint32_t kv_head, uint32_t number) {
  uint32_t group = a.n_heads / a.kv_heads, head = kv_head * group + number % group, at = number / group;
  AttendQuery query = {~0u, 1, 0, 0, 0, 0.0f};
  if (at >= piece.n_rows) return query;
  DEV const uint32_t *row = inputs + piece.rows + 3 * at;
  query.q = row[0] * a.n_heads + head;
  query.first = row[1];
  query.last = row[2];
  query.slot = (piece.slot + at) * a.n_heads + head;
  if (a.alibi != 0.0f) {
    query.pos = inputs[a.positions + row[0]];
    query.slope = a.alibi * alibi_slope(head, a.n_heads, a.max_bias);
  }
  return query;
}

// How far a position is from a query's: what its slope is multiplied by.
FN float alibi_distance(AttendQuery query, uint32_t pos) {
  return float(pos > query.pos ? pos - query.pos : query.pos - pos);
}

// A score with its linear bias, or -inf where the query does not see the position.
FN float attend_bias(AttendQuery query, AttendArgs a, uint32_t pos, float score) {
  if (pos < query.first || pos > query.last) return bits_float(0xff800000u);
  return a.alibi == 0.0f ? score : fma_f(query.slope, alibi_distance(query, pos), score);
}

FN float attend_scale(AttendArgs a, float product) {
  float score = product * a.scale;
  return a.soft_cap > 0.0f ? a.soft_cap * tanh_f(score / a.soft_cap) : score;
}

// Values `i` to `i + 7` of a row, zeros from `end` on. Rows of class 5 have any type and any length.
template <uint32_t kv_class> FN Eight attend_load(uint32_t type, DEV const uint8_t *row, uint32_t i, uint32_t end) {
  if (kv_class < 5) return kv_load8<kv_class>(type, row, i);
  Eight y;
  UNROLL for (uint32_t j = 0; j < 8; ++j) y.v[j] = 0.0f;
  for (uint32_t j = 0; j < 8 && i + j < end; ++j) {
    float x = kv_load(type, row, i + j);
    UNROLL for (uint32_t l = 0; l < 8; ++l) if (l == j) y.v[l] = x;
  }
  return y;
}

// Products of queries with the keys of `n` cells, in lanes that share a cell, 8 columns each.
template <uint32_t kv_class, uint32_t G>
FN void attend_scores(DEV const float *q, TG const AttendQuery *queries, DEV const uint8_t *k, AttendArgs a,
                      uint32_t kv_head, TG const uint32_t *cells, uint32_t n, TG float *scores, uint32_t tid) {
  constexpr uint32_t held = kv_class == 5 ? 1 : G == 1 ? 4 : 2; // cells that are loaded together
  uint32_t lanes = 8, lane = tid % 32;
  while (lanes < 32 && lanes * 8 < a.k_dim) lanes *= 2;
  uint32_t part = tid / lanes, parts = kAttendThreads / lanes, end = (kv_head + 1) * a.k_dim;
  for (uint32_t at = 0; at < a.k_dim; at += lanes * 8) {
    uint32_t column = at + lane % lanes * 8, i = kv_head * a.k_dim + column;
    float query[G][8];
    UNROLL for (uint32_t g = 0; g < G; ++g) UNROLL for (uint32_t j = 0; j < 8; ++j) {
      bool is = queries[g].q != ~0u && column + j < a.k_dim;
      query[g][j] = is ? q[uint64_t(queries[g].q) * a.k_dim + column + j] : 0.0f;
    }
    for (uint32_t base = 0; base < n; base += parts * held) {
      Eight key[held];
      UNROLL for (uint32_t u = 0; u < held; ++u) {
        uint32_t c = base + u * parts + part;
        key[u] = {{0, 0, 0, 0, 0, 0, 0, 0}};
        if (c < n && column < a.k_dim)
          key[u] = attend_load<kv_class>(a.k_type, k + uint64_t(cells[c]) * a.k_row_bytes, i, end);
      }
      UNROLL for (uint32_t u = 0; u < held; ++u) {
        float dots[G];
        UNROLL for (uint32_t g = 0; g < G; ++g) {
          dots[g] = 0.0f;
          UNROLL for (uint32_t j = 0; j < 8; ++j) dots[g] = fma_f(query[g][j], key[u].v[j], dots[g]);
        }
        // Of four queries (G is 1 or 4), lanes add up for two, then for one. Not as a loop over halves of `dots`,
        // which Intel's compiler for CPUs gets wrong (docs/gpu.md).
        uint32_t mine = 0, mask = G;
        if (G == 4) {
          bool high = (lane & 1) != 0, odd = (lane & 2) != 0;
          float even_sum = (high ? dots[2 % G] : dots[0]) + warp_xor(high ? dots[0] : dots[2 % G], 1);
          float odd_sum = (high ? dots[3 % G] : dots[1 % G]) + warp_xor(high ? dots[1 % G] : dots[3 % G], 1);
          dots[0] = (odd ? odd_sum : even_sum) + warp_xor(odd ? even_sum : odd_sum, 2);
          mine = (high ? 2 : 0) + (odd ? 1 : 0);
        }
        for (; mask < lanes; mask *= 2) dots[0] += warp_xor(dots[0], mask);
        uint32_t c = base + u * parts + part;
        if (c < n && lane % lanes < G) scores[c * G + mine] = (at ? scores[c * G + mine] : 0.0f) + dots[0];
      }
    }
  }
}

// Scores to weights of `n` cells; `state` has maxima, sums and the factors for what was summed before.
template <uint32_t G, class Source>
FN void attend_weights(Source source, TG const AttendQuery *queries, AttendArgs a, TG const uint32_t *cells, uint32_t n,
                       TG float *scores, TG float *state, uint32_t tid) {
  for (uint32_t g = tid / 32; g < G; g += kAttendThreads / 32) {
    AttendQuery query = queries[g];
    float before = state[g], most = before;
    for (uint32_t c = tid % 32; c < n; c += 32) {
      Cell cell = {cells[c], cells[kChunk + c]};
      float s = source_score(source, query, a, cell, attend_scale(a, scores[c * G + g]));
      scores[c * G + g] = s;
      most = max_f(most, s);
    }
    most = warp_max(most);
    float base = most == bits_float(0xff800000u) ? 0.0f : most, sum = 0.0f;
    for (uint32_t c = tid % 32; c < n; c += 32) {
      float weight = exp_f(scores[c * G + g] - base);
      scores[c * G + g] = weight;
      sum += weight;
    }
    sum = warp_sum(sum);
    sync_warp();
    if (tid % 32 == 0) {
      float factor = exp_f(before - base);
      state[g] = most;
      state[G + g] = state[G + g] * factor + sum;
      state[2 * G + g] = factor;
    }
  }
}

template <uint32_t G> struct AttendSums {
  float v[G][8];
};

// Adds the weighted values of `n` cells, 8 columns a thread, in threads that share a cell.
template <uint32_t kv_class, uint32_t G>
FN AttendSums<G> attend_values(AttendSums<G> sums, DEV const uint8_t *v, AttendArgs a, uint32_t kv_head,
                               TG const uint32_t *cells, uint32_t n, TG const float *weights, uint32_t threads,
                               uint32_t tid) {
  constexpr uint32_t held = kv_class == 5 ? 1 : G == 1 ? 4 : 2;
  uint32_t column = tid % threads * 8, part = tid / threads, parts = kAttendThreads / threads;
  uint32_t i = kv_head * a.v_stride + column, end = kv_head * a.v_stride + a.v_dim;
  if (column >= a.v_dim) return sums;
  for (uint32_t base = part; base < n; base += parts * held) {
    Eight value[held];
    UNROLL for (uint32_t u = 0; u < held; ++u) {
      uint32_t c = base + u * parts;
      if (c < n) value[u] = attend_load<kv_class>(a.v_type, v + uint64_t(cells[c]) * a.v_row_bytes, i, end);
    }
    UNROLL for (uint32_t u = 0; u < held; ++u) {
      uint32_t c = base + u * parts;
      if (c >= n) continue;
      UNROLL for (uint32_t g = 0; g < G; ++g) {
        float weight = weights[c * G + g];
        UNROLL for (uint32_t j = 0; j < 8; ++j) sums.v[g][j] = fma_f(weight, value[u].v[j], sums.v[g][j]);
      }
    }
  }
  return sums;
}
