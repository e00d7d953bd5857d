// What a warp does with a tile of cells by tensor cores: its queries, scores, weights and sums of values.

enum : uint32_t { kOneRow = 0, kManyRows = 1 };

// Queries of a block, and cells of a tile that a warp multiplies.
template <uint32_t D, uint32_t rows> struct TileSplit {
  enum { queries = 64, cells = TILE_CELLS(D) };
};
template <uint32_t D> struct TileSplit<D, kOneRow> {
  enum { queries = 16, cells = 16 };
};

// A block's shared memory; of cells and positions there are two tiles' worth.
struct TileMemory {
  TG AttendQuery *queries;
  TG uint32_t *cells;
  TG Quad *k, *v;
  TG float *k_scales, *v_scales, *frag; // FRAG_MEMORY
};

// A warp's queries as fragments, scaled: `mine` are those of a lane's two rows, 8 apart, and `scales` are
// what their products are to be multiplied by.
template <uint32_t D>
FN void load_queries(DEV const float *q, AttendArgs a, TG const AttendQuery *mine, uint32_t lane, TG float *memory,
                     OWN FragA *to, OWN float *scales) {
  uint32_t pairs[D / 16][4];
  UNROLL for (uint32_t h = 0; h < 2; ++h) {
    uint32_t number = mine[8 * h].q, end = number == ~0u ? 0 : a.k_dim;
    DEV const float *row = q + uint64_t(number == ~0u ? 0 : number) * a.k_dim;
    float most = 0.0f;
    for (uint32_t i = lane % 4; i < end; i += 4) most = max_f(most, abs_f(row[i]));
    most = max_f(most, warp_xor(most, 1));
    most = max_f(most, warp_xor(most, 2));
    float scale = half_scale(most);
    scales[h] = inverse_power(scale);
    UNROLL for (uint32_t i = 0; i < D / 8; ++i) {
      uint32_t c = i * 8 + lane % 4 * 2;
      pairs[i / 2][i % 2 * 2 + h] = c < end ? pack_halves(row[c] * scale, row[c + 1] * scale) : 0;
    }
  }
  UNROLL for (uint32_t i = 0; i < D / 16; ++i) frag_set_a(to[i], memory, lane, pairs[i]);
}

// Scores are in units of ln 2, so that a weight is a power of two.
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

// What a warp has found so far, of the two rows of a lane: maxima, the lane's share of the sums of
// weights, and weighted sums of values in units of `unit`.
template <uint32_t D> struct TileSums {
  FragD v[D / 8];
  float most[2], sum[2], unit;
};

// What a query sees: positions from `first` on, and how many. Cells of a tile beyond its end have the
// position kNoPosition, which none sees.
struct TileSight {
  uint32_t first, n;
};
FN TileSight tile_sight(TG const AttendQuery *query) {
  uint32_t last = query->last < kNoPosition ? query->last : kNoPosition - 1;
  TileSight sight = {query->first, query->first > last ? 0 : last - query->first + 1};
  return sight;
}

// Scores, four of each eight cells, to weights, in place; returns what earlier sums are to be multiplied by.
template <uint32_t D, uint32_t n_cells>
FN void tile_weights(OWN float *s, AttendArgs a, TG const AttendQuery *mine, OWN const float *scales,
                     TG const uint32_t *pos, TG const float *k_scales, uint32_t lane, OWN TileSums<D> &sums,
                     OWN float *factors) {
  float none = bits_float(0xff800000u), base[2] = {sums.most[0], sums.most[1]}, bend = 2.0f / a.soft_cap;
  float unit = a.soft_cap > 0.0f ? a.scale : a.scale * LOG2_E, scale[2] = {scales[0] * unit, scales[1] * unit};
  UNROLL for (uint32_t i = 0; i < n_cells / 2; ++i)
    s[i] *= scale[i % 4 / 2] * k_scales[i / 4 * 8 + frag_column(lane, i % 4)];
  // cap * tanh(score / cap)
  if (a.soft_cap > 0.0f)
    UNROLL for (uint32_t i = 0; i < n_cells / 2; ++i)
      s[i] = LOG2_E * (a.soft_cap - 2.0f * a.soft_cap / (exp_f(s[i] * bend) + 1.0f));
  if (a.alibi != 0.0f)
    UNROLL for (uint32_t i = 0; i < n_cells / 2; ++i)
      s[i] = fma_f(mine[i % 4 / 2 * 8].slope * LOG2_E,
                   alibi_distance(mine[i % 4 / 2 * 8], pos[i / 4 * 8 + frag_column(lane, i % 4)]), s[i]);
  TileSight sight[2] = {tile_sight(mine), tile_sight(mine + 8)};
  UNROLL for (uint32_t i = 0; i < n_cells / 2; ++i) {
    uint32_t h = i % 4 / 2, at = pos[i / 4 * 8 + frag_column(lane, i % 4)];
    s[i] = at - sight[h].first < sight[h].n ? s[i] : none;
    base[h] = max_f(base[h], s[i]);
  }
  UNROLL for (uint32_t h = 0; h < 2; ++h) {
    base[h] = max_f(base[h], warp_xor(base[h], 1));
    base[h] = max_f(base[h], warp_xor(base[h], 2));
    float before = sums.most[h];
    sums.most[h] = base[h];
    base[h] = base[h] == none ? 0.0f : base[h];
    factors[h] = before == none ? 1.0f : exp2_f(before - base[h]); // sums are 0 until something is seen
    sums.sum[h] *= factors[h];
  }
  UNROLL for (uint32_t i = 0; i < n_cells / 2; ++i) {
    float weight = exp2_f(s[i] - base[i % 4 / 2]);
    sums.sum[i % 4 / 2] += weight;
    s[i] = weight;
  }
}

// Products of a warp's queries with the keys of a tile.
template <uint32_t D, uint32_t n_cells>
FN void multiply_keys(OWN FragA *q, TG const Quad *k, uint32_t k_dim, uint32_t lane, TG float *memory, OWN float *s) {
  FragD d[n_cells / 8];
  UNROLL for (uint32_t j = 0; j < n_cells / 8; ++j) frag_zero(d[j]);
  UNROLL for (uint32_t i = 0; i < D / 16; ++i) {
    if (i * 16 >= k_dim) break;
    UNROLL for (uint32_t j = 0; j < n_cells / 8; j += 2) {
      FragB<Half> b[2];
      frag_load_two(b[0], b[1], k + j * 8 * (D / 8 + 1) + i * 2, D / 8 + 1, lane);
      frag_mma(d[j], q[i], b[0]);
      frag_mma(d[j + 1], q[i], b[1]);
    }
  }
  UNROLL for (uint32_t j = 0; j < n_cells / 8; ++j) frag_values(d[j], memory, lane, s + 4 * j);
}

// Adds the weighted values of a tile, after what was summed before was multiplied by `factors`.
template <uint32_t D, uint32_t n_cells>
FN void add_values(OWN const float *weights, TG const Quad *v, TG const float *v_scales, uint32_t v_dim,
                   OWN const float *factors, uint32_t lane, TG float *memory, OWN TileSums<D> &sums) {
  float unit = sums.unit;
  for (uint32_t c = lane % (n_cells < 32 ? n_cells : 32); c < n_cells; c += 32) unit = max_f(unit, v_scales[c]);
  UNROLL for (uint32_t mask = n_cells < 32 ? n_cells / 2 : 16; mask; mask /= 2) unit = max_f(unit, warp_xor(unit, mask));
  float scale = inverse_power(unit), factor[2] = {factors[0] * sums.unit * scale, factors[1] * sums.unit * scale};
  sums.unit = unit;
  if (warp_any(factor[0] != 1.0f || factor[1] != 1.0f)) frag_scale_rows<D / 8>(sums.v, memory, lane, factor);
  UNROLL for (uint32_t k = 0; k < n_cells / 16; ++k) {
    uint32_t pairs[4];
    UNROLL for (uint32_t i = 0; i < 4; ++i) {
      uint32_t c = k * 16 + i / 2 * 8 + lane % 4 * 2, of = 4 * (2 * k + i / 2) + i % 2 * 2;
      pairs[i] = pack_halves(weights[of] * v_scales[c] * scale, weights[of + 1] * v_scales[c + 1] * scale);
    }
    FragA w;
    frag_set_a(w, memory, lane, pairs);
    UNROLL for (uint32_t j = 0; j < D / 16; ++j) {
      if (j * 16 >= v_dim) break;
      FragB<Half> b[2];
      frag_b_columns(b[0], b[1], v + k * 16 * (D / 8 + 1) + j * 2, D / 8 + 1, lane);
      frag_mma(sums.v[2 * j], w, b[0]);
      frag_mma(sums.v[2 * j + 1], w, b[1]);
    }
  }
}
