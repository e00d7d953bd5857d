// What each row sees, as src/visibility_table.rs describes it: cells by their rank in order of position.

struct SeenRow {
  DEV const uint32_t *inputs;
  uint32_t runs;
  // The runs of its group that it sees, the number of the first cell, and how many there are.
  Piece piece;
};

FN SeenRow seen_row(DEV const uint32_t *inputs, uint32_t header, uint32_t row) {
  DEV const uint32_t *seen = inputs + inputs[header + 7] + 4 * row;
  Piece piece = {0, 1, seen[0], seen[1], 0, seen[2], seen[3]};
  SeenRow of = {inputs, inputs[header + 4], piece};
  return of;
}

FN Cell seen_cell(SeenRow of, uint32_t rank) { return attend_cell(of.inputs, of.runs, of.piece, of.piece.first + rank); }
