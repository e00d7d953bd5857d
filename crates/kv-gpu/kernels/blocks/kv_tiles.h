// Tiles of cells: which ones, and their K or V as halves in shared memory. Rows of a tile that halves do
// not hold well are scaled by powers of two. F16 rows are copied asynchronously, others are unpacked:
// blocks by words, in halves, a block a lane.

// Runs code with the constant KV_CLASS: that of KV_CLASSES, or 5 for blocks that heads, which begin at
// multiples of `dim` values, do not begin with.
#define TILE_CLASSES(type, dim, ...)                                                                \
  if ((dim) % 32 != 0 && (type) > 2) {                                                              \
    constexpr uint32_t KV_CLASS = 5;                                                                \
    __VA_ARGS__;                                                                                    \
  } else {                                                                                          \
    KV_CLASSES(type, __VA_ARGS__)                                                                   \
  }

enum : uint32_t { kTileThreads = 128, kNoPosition = ~0u };

// Cells of a tile whose rows have up to D values: a tile of K and one of V fit shared memory.
#define TILE_CELLS(D) (SHARED_KIB >= 48 ? (D > 128 ? 32u : 64u) : D > 128 ? 16u : D > 64 ? 32u : 64u)

// By what a row is multiplied to be halves, for values of up to `most`.
FN float tile_scale(float most) {
  return most > 32768.0f || (most < 0.015625f && most > 0.0f) ? half_scale(most) : 1.0f;
}

// A block of a row as it is stored: whole words from the one that its quants begin in, `skip` bytes
// before them, then two bytes of the next one; its scale, and its minimum above that; its fifth bits.
template <uint32_t kv_class> struct StoredBlock {
  enum { n_words = kv_class == 3 ? 8 : 4 };
  uint32_t words[n_words + 1], skip, scales, fifth;
};

template <uint32_t kv_class>
FN StoredBlock<kv_class> kv_stored(uint32_t type, DEV const uint8_t *rows, uint64_t at) {
  constexpr uint32_t n_words = StoredBlock<kv_class>::n_words;
  StoredBlock<kv_class> y;
  uint32_t quants_at = kv_class == 3 ? 2 : kv_quants_at(type);
  DEV const uint8_t *of = rows + at;
  y.skip = (uint32_t(at) + quants_at) & 2;
  DEV const uint32_t *words = (DEV const uint32_t *)(of + (quants_at - y.skip));
  UNROLL for (uint32_t i = 0; i < n_words; ++i) y.words[i] = words[i];
  y.words[n_words] = y.skip ? kv_u16((DEV const uint8_t *)(words + n_words)) : 0;
  y.scales = kv_u16(of);
  y.fifth = 0;
  if (kv_class == 4 && kv_has_minimum(type)) y.scales |= kv_u16(of + 2) << 16;
  if (kv_class == 4 && kv_has_fifth_bits(type))
    y.fifth = kv_u16(of + quants_at - 4) | kv_u16(of + quants_at - 2) << 16;
  return y;
}

// The quants of a block as unsigned bytes x: values are d (x + zero) + m. Returns `zero` as two halves,
// less the 1024 that a byte becomes a half with.
template <uint32_t kv_class>
FN uint32_t kv_bytes(uint32_t type, OWN const StoredBlock<kv_class> &s, OWN Block &b) {
  constexpr uint32_t n_words = StoredBlock<kv_class>::n_words;
  uint32_t select = s.skip ? 0x5432u : 0x3210u, words[n_words];
  UNROLL for (uint32_t i = 0; i < n_words; ++i) words[i] = byte_perm(s.words[i], s.words[i + 1], select);
  if (kv_class == 3) {
    UNROLL for (uint32_t i = 0; i < 8; ++i) b.q[i] = int(words[i % n_words] ^ 0x80808080u);
    return 0xe480e480u; // -1024 - 128
  }
  Quad bytes = {words[0], words[1], words[2], words[3]};
  nibbles(bytes, b);
  uint32_t zero = 0xe400u + (type == 4 ? 8 : type == 6 ? 16 : 0);
  if (type == 8) {
    Quad iq4 = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}; // 128 more
    look_up(bytes, iq4, b);
    zero += 128;
  }
  if (kv_has_fifth_bits(type)) add_fifth_bits(s.fifth, b);
  return zero << 16 | zero;
}

// At most so much is |x + zero| of a type's values.
FN float kv_most(uint32_t type) {
  return type == 4 ? 8.0f : type == 5 ? 15.0f : type == 6 ? 16.0f : type == 7 ? 31.0f : 128.0f;
}

// Eight bytes times `d` plus `m`, which are two halves each.
FN Quad eight_halves(uint32_t low, uint32_t high, uint32_t zero, uint32_t d, uint32_t m) {
  uint32_t x[2] = {low, high}, y[4];
  UNROLL for (uint32_t i = 0; i < 4; ++i) {
    // 0x64 before a byte is 1024 more than it, as a half.
    uint32_t pair = byte_perm(x[i / 2], 0x64646464u, i % 2 ? 0x4342u : 0x4140u);
    y[i] = fma_halves(fma_halves(pair, 0x3c003c00u, zero), d, m);
  }
  Quad q = {y[0], y[1], y[2], y[3]};
  return q;
}

// As load_tile, for rows of blocks that heads begin with. Lanes that share a row have a block each.
template <uint32_t D, uint32_t kv_class>
FN void load_blocks(uint32_t type, DEV const uint8_t *rows, uint32_t row_bytes, uint32_t first, uint32_t dim,
                    TG const uint32_t *cells, TG Quad *tile, TG float *scales, uint32_t tid) {
  constexpr uint32_t lanes = D / 32, at_once = kTileThreads / lanes, held = TILE_CELLS(D) / at_once;
  uint32_t block = tid % lanes, c0 = tid / lanes;
  bool has = block * 32 < dim;
  uint32_t from = (first / 32 + (has ? block : 0)) * (kv_class == 3 ? 34 : kv_block_bytes(type));
  float most_of = kv_class == 3 ? 128.0f : kv_most(type);
  StoredBlock<kv_class> stored[held];
  UNROLL for (uint32_t u = 0; u < held; ++u)
    stored[u] = kv_stored<kv_class>(type, rows, uint64_t(cells[c0 + u * at_once]) * row_bytes + from);
  UNROLL for (uint32_t u = 0; u < held; ++u) {
    Block b;
    uint32_t c = c0 + u * at_once, zero = kv_bytes(type, stored[u], b), scales_of = has ? stored[u].scales : 0;
    float d = half_float(uint16_t(scales_of)), m = kv_class == 3 ? 0.0f : half_float(uint16_t(scales_of >> 16));
    float most = kv_class == 3 ? abs_f(d) * most_of : abs_f(d) * most_of + abs_f(m);
    UNROLL for (uint32_t mask = lanes / 2; mask; mask /= 2) most = max_f(most, warp_xor(most, mask));
    float scale = tile_scale(most);
    uint32_t ds = pack_halves(d * scale, d * scale), ms = kv_class == 3 ? 0 : pack_halves(m * scale, m * scale);
    UNROLL for (uint32_t i = 0; i < 4; ++i)
      tile[c * (D / 8 + 1) + block * 4 + i] = eight_halves(uint32_t(b.q[2 * i]), uint32_t(b.q[2 * i + 1]), zero, ds, ms);
    if (block == 0) scales[c] = inverse_power(scale);
  }
}

// Copies or unpacks `dim` values from `first` on of each cell's row, and zeros up to D; scales[c] is what
// row c is to be multiplied by, unless rows are halves. Lanes that share a row have 8 values each.
template <uint32_t D, uint32_t kv_class>
FN void load_tile(uint32_t type, DEV const uint8_t *rows, uint32_t row_bytes, uint32_t first, uint32_t dim,
                  TG const uint32_t *cells, TG Quad *tile, TG float *scales, uint32_t tid) {
  constexpr uint32_t lanes = D / 8, at_once = kTileThreads / lanes, n_cells = TILE_CELLS(D);
  constexpr uint32_t held = kv_class == 1 ? n_cells / at_once : kv_class == 5 ? 1 : 4; // rows that are loaded together
  if (kv_class == 3 || kv_class == 4) {
    load_blocks<D, kv_class>(type, rows, row_bytes, first, dim, cells, tile, scales, tid);
    copy_commit();
    return;
  }
  uint32_t column = tid % lanes;
  NO_UNROLL for (uint32_t base = 0; base < n_cells; base += held * at_once) {
    UNROLL for (uint32_t u = 0; u < held; ++u) {
      uint32_t c = base + tid / lanes + u * at_once;
      TG Quad *to = tile + c * (lanes + 1) + column;
      bool is = column * 8 < dim;
      DEV const uint8_t *row = rows + uint64_t(cells[c]) * row_bytes;
      if (kv_class == 1 && is) {
        copy_async16(to, row + (first + column * 8) * 2);
      } else {
        Eight x = {{0, 0, 0, 0, 0, 0, 0, 0}};
        if (is && kv_class == 5)
          x = kv_load8_any(type, row, first + column * 8);
        else if (is)
          x = kv_load8<kv_class>(type, row, first + column * 8);
        if (kv_class != 1) {
          float most = 0.0f;
          UNROLL for (uint32_t j = 0; j < 8; ++j) most = max_f(most, abs_f(x.v[j]));
          for (uint32_t mask = lanes / 2; mask; mask /= 2) most = max_f(most, warp_xor(most, mask));
          float scale = tile_scale(most);
          if (column == 0) scales[c] = inverse_power(scale);
          UNROLL for (uint32_t j = 0; j < 8; ++j) x.v[j] *= scale;
        }
        Quad halves = {pack_halves(x.v[0], x.v[1]), pack_halves(x.v[2], x.v[3]), pack_halves(x.v[4], x.v[5]),
                       pack_halves(x.v[6], x.v[7])};
        *to = halves;
      }
    }
  }
  copy_commit();
}

// Writes entry `c` of a tile from number `at` of the piece on: beyond the end, its last cell, which is
// seen from nowhere. Returns the position.
template <uint32_t n_cells>
FN uint32_t write_cell(DEV const uint32_t *inputs, uint32_t runs, Piece piece, uint32_t at, uint32_t c,
                       TG uint32_t *cells, bool is_written) {
  uint32_t number = at + c < piece.n_cells ? at + c : piece.n_cells - 1;
  Cell cell = attend_cell(inputs, runs, piece, piece.first + number);
  uint32_t pos = at + c < piece.n_cells ? cell.pos : kNoPosition;
  if (is_written) {
    cells[c] = cell.cell;
    cells[n_cells + c] = pos;
  }
  return pos;
}

// The next tile of a piece of one row, which sees all of the piece's cells: see next_tile.
template <uint32_t n_cells>
FN uint32_t tile_of_row(DEV const uint32_t *inputs, uint32_t runs, Piece piece, uint32_t at, TG uint32_t *cells,
                        OWN uint32_t &n, uint32_t tid) {
  n = piece.n_cells - at < n_cells ? piece.n_cells - at : n_cells;
  if (n && tid < n_cells) write_cell<n_cells>(inputs, runs, piece, at, tid, cells, true);
  return at + n;
}

// Finds the next tile of cells, from number `at` of the piece on, with one at a position from `first`
// to `last`, and writes the tile's cells and positions. Returns where it ends; `n` is its length.
// Each warp finds the same.
template <uint32_t n_cells>
FN uint32_t next_tile(DEV const uint32_t *inputs, uint32_t runs, Piece piece, uint32_t at, uint32_t first,
                      uint32_t last, TG uint32_t *cells, OWN uint32_t &n, uint32_t tid) {
  for (n = 0; n == 0 && at < piece.n_cells; at += n_cells) {
    float seen = 0.0f;
    for (uint32_t c = tid % 32; c < n_cells; c += 32) {
      uint32_t pos = write_cell<n_cells>(inputs, runs, piece, at, c, cells, tid < 32);
      if (pos >= first && pos <= last && pos != kNoPosition) seen = 1.0f;
    }
    if (warp_max(seen) > 0.0f) n = piece.n_cells - at < n_cells ? piece.n_cells - at : n_cells;
  }
  return at;
}
