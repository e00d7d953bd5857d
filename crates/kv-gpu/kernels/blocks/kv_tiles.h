// Tiles of cells: which ones, and their K or V as halves in shared memory. Rows of a tile that halves do
// not hold well are scaled by powers of two. F16 rows are copied asynchronously, others are unpacked.

enum : uint32_t { kTileThreads = 128 };

// Cells of a tile whose rows have up to D values: a tile of K and one of V fit shared memory.
#define TILE_CELLS(D) (SHARED_KIB >= 48 ? (D > 128 ? 32u : 64u) : D > 128 ? 16u : D > 64 ? 32u : 64u)

// Copies or unpacks `dim` values from `first` on of each cell's row, zeros up to D and beyond `n`;
// scales[c] is what row c is to be multiplied by. Lanes that share a row have 8 values each.
template <uint32_t D, uint32_t kv_class>
FN void load_tile(uint32_t type, DEV const uint8_t *rows, uint32_t row_bytes, uint32_t first, uint32_t dim,
                  TG const uint32_t *cells, uint32_t n, TG Quad *tile, TG float *scales, uint32_t tid) {
  constexpr uint32_t lanes = D / 8, at_once = kTileThreads / lanes, n_cells = TILE_CELLS(D);
  constexpr uint32_t held = kv_class == 4 ? 2 : 4; // rows that are loaded together
  uint32_t column = tid % lanes;
  NO_UNROLL for (uint32_t base = 0; base < n_cells; base += held * at_once) {
    UNROLL for (uint32_t u = 0; u < held; ++u) {
      uint32_t c = base + tid / lanes + u * at_once;
      TG Quad *to = tile + c * (lanes + 1) + column;
      bool is = c < n && column * 8 < dim;
      DEV const uint8_t *row = is ? rows + uint64_t(cells[c]) * row_bytes : rows;
      float scale = 1.0f;
      if (kv_class == 1 && is) {
        copy_async16(to, row + (first + column * 8) * 2);
      } else {
        Eight x = {{0, 0, 0, 0, 0, 0, 0, 0}};
        if (is) x = kv_load8<kv_class>(type, row, first + column * 8);
        if (kv_class != 1) {
          float most = 0.0f;
          UNROLL for (uint32_t j = 0; j < 8; ++j) most = max_f(most, abs_f(x.v[j]));
          for (uint32_t mask = lanes / 2; mask; mask /= 2) most = max_f(most, warp_xor(most, mask));
          if (most > 32768.0f || (most < 0.015625f && most > 0.0f)) scale = half_scale(most);
          UNROLL for (uint32_t j = 0; j < 8; ++j) x.v[j] *= scale;
        }
        Quad halves = {pack_halves(x.v[0], x.v[1]), pack_halves(x.v[2], x.v[3]), pack_halves(x.v[4], x.v[5]),
                       pack_halves(x.v[6], x.v[7])};
        *to = halves;
      }
      if (column == 0) scales[c] = c < n ? 1.0f / scale : 0.0f;
    }
  }
  copy_commit();
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
      if (at + c >= piece.n_cells) break;
      Cell cell = attend_cell(inputs, runs, piece, piece.first + at + c);
      if (cell.pos >= first && cell.pos <= last) seen = 1.0f;
      if (tid < 32) {
        cells[c] = cell.cell;
        cells[n_cells + c] = cell.pos;
      }
    }
    if (warp_max(seen) > 0.0f) n = piece.n_cells - at < n_cells ? piece.n_cells - at : n_cells;
  }
  return at;
}
