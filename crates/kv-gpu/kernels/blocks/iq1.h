// What IQ1_S and IQ1_M have in common: eight values -1, 0 and 1 an index, to each of which an eighth is added, or
// from each of which one is taken: in eighths.
FN void iq1_eight(uint32_t index, uint32_t is_less, OWN int *q) {
  grid_eight(GRID_IQ1 + index, is_less ? 0x0007fff7u : 0x000901f9u, q);
}
