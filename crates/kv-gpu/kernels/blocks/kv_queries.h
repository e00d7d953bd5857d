// Attention of up to G queries of one K/V head over the cells of a source, in floats.
//
// A source is a struct that is passed by value: source_n_cells, source_cell, source_query and
// source_score are overloaded for it. Here is the source of pieces, which sees what visibilities show.

// The class of a loader that is chosen by the type of rows.
enum : uint32_t { kClassOfType = 6 };

#define ATTEND_CLASSES(kv_class, type, ...)                                                         \
  if (kv_class == kClassOfType) {                                                                   \
    KV_CLASSES(type, __VA_ARGS__)                                                                   \
  } else {                                                                                          \
    constexpr uint32_t KV_CLASS = kv_class;                                                         \
    __VA_ARGS__;                                                                                    \
  }

// A block's shared memory, which ATTEND_MEMORY declares.
struct AttendMemory {
  TG AttendQuery *queries;
  TG uint32_t *cells;
  TG float *scores, *state, *exchange;
};
#define ATTEND_MEMORY(m, G)                                                                         \
  SHARED(AttendQuery, queries, G);                                                                  \
  SHARED(uint32_t, cells, 512);                                                                     \
  SHARED(float, scores, 256 * G);                                                                   \
  SHARED(float, state, 3 * G);                                                                      \
  SHARED(float, exchange, 1024 * G);                                                                \
  AttendMemory m = {queries, cells, scores, state, exchange}

// The cells of a piece.
struct PieceCells {
  DEV const uint32_t *inputs;
  uint32_t runs;
  Piece piece;
};
FN uint32_t source_n_cells(PieceCells s) { return s.piece.n_cells; }
FN Cell source_cell(PieceCells s, uint32_t i) { return attend_cell(s.inputs, s.runs, s.piece, s.piece.first + i); }
FN AttendQuery source_query(PieceCells s, AttendArgs a, uint32_t kv_head, uint32_t number) {
  return attend_query(s.inputs, a, s.piece, kv_head, number);
}
FN float source_score(PieceCells s, AttendQuery query, AttendArgs a, Cell cell, float score) {
  return attend_bias(query, a, cell.pos, score);
}

// Which queries of a K/V head a block attends, and whether there are any.
struct BlockQueries {
  uint32_t kv_head, first;
  bool any;
};
// Those of block `gx`, G at a time, of `n_rows` rows, where there may be as many as `most_rows`.
template <uint32_t G> FN BlockQueries block_queries(AttendArgs a, uint32_t gx, uint32_t n_rows, uint32_t most_rows) {
  uint32_t group = a.n_heads / a.kv_heads, chunks = (group * most_rows + G - 1) / G;
  BlockQueries b = {gx / chunks, gx % chunks * G, gx % chunks * G < group * n_rows};
  return b;
}

// Attends queries `first` to `first + G - 1` of a K/V head.
template <uint32_t G, uint32_t kv_class, class Source>
FN void attend_queries(Source source, DEV const float *q, DEV const uint8_t *k, DEV const uint8_t *v, DEV float *partial,
                       AttendArgs a, AttendMemory m, uint32_t kv_head, uint32_t first, uint32_t tid) {
  if (tid < G) {
    m.queries[tid] = source_query(source, a, kv_head, first + tid);
    m.state[tid] = bits_float(0xff800000u);
    m.state[G + tid] = 0.0f;
  }
  uint32_t threads = 1, n_cells = source_n_cells(source);
  while (threads * 8 < a.v_dim) threads *= 2;
  AttendSums<G> sums;
  UNROLL for (uint32_t g = 0; g < G; ++g) UNROLL for (uint32_t j = 0; j < 8; ++j) sums.v[g][j] = 0.0f;
  for (uint32_t done = 0; done < n_cells; done += kChunk) {
    uint32_t n = n_cells - done < kChunk ? n_cells - done : kChunk;
    sync_group();
    if (tid < n) {
      Cell cell = source_cell(source, done + tid);
      m.cells[tid] = cell.cell;
      m.cells[kChunk + tid] = cell.pos;
    }
    sync_group();
    ATTEND_CLASSES(kv_class, a.k_type, attend_scores<KV_CLASS, G>(q, m.queries, k, a, kv_head, m.cells, n, m.scores, tid));
    sync_group();
    attend_weights<G>(source, m.queries, a, m.cells, n, m.scores, m.state, tid);
    sync_group();
    UNROLL for (uint32_t g = 0; g < G; ++g) {
      float factor = m.state[2 * G + g];
      UNROLL for (uint32_t j = 0; j < 8; ++j) sums.v[g][j] *= factor;
    }
    ATTEND_CLASSES(kv_class, a.v_type,
                   sums = attend_values<KV_CLASS, G>(sums, v, a, kv_head, m.cells, n, m.scores, threads, tid));
  }
  // The threads of a column add up, the upper half's sums to the lower half's.
  for (uint32_t left = kAttendThreads / 2; left >= threads; left /= 2) {
    sync_group();
    if (tid >= left && tid < 2 * left)
      UNROLL for (uint32_t i = 0; i < 8 * G; ++i) m.exchange[i * left + tid - left] = sums.v[i / 8][i % 8];
    sync_group();
    if (tid < left) UNROLL for (uint32_t i = 0; i < 8 * G; ++i) sums.v[i / 8][i % 8] += m.exchange[i * left + tid];
  }
  sync_group();
  UNROLL for (uint32_t g = 0; g < G; ++g) {
    AttendQuery query = m.queries[g];
    if (query.q == ~0u) continue;
    DEV float *to = partial + a.sums + uint64_t(query.slot) * a.v_dim;
    if (tid < threads)
      UNROLL for (uint32_t j = 0; j < 8; ++j) if (tid * 8 + j < a.v_dim) to[tid * 8 + j] = sums.v[g][j];
    if (tid < 2) partial[uint64_t(query.slot) * 2 + tid] = m.state[tid * G + g];
  }
}
