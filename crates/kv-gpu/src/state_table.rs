//! What recurrent kernels read of the [`StateGroup`]s of a run, as words in its inputs.
//!
//! Groups that begin with a state that an earlier group stores form a chain, whose groups are
//! computed one after the other; chains are independent of each other.
//!
//! The header, [`HEADER_WORDS`] words: `n_chains, chains_at, groups_at, rows_at, stores_at`. Places
//! are word numbers within the inputs. The tables, in words:
//! * chains: `first group, end group`;
//! * groups: `first row, end row, source + 1 (0: zeros), first store, end store`;
//! * rows: the rows of the ubatch, by group;
//! * stores: `rows of the group before it, state row`.

use kv_core::memory::StateGroup;

/// Words of the header.
pub(crate) const HEADER_WORDS: usize = 8;

/// Appends the tables of `groups` to `words`, fills the header at `header` and returns the number
/// of chains.
pub(crate) fn write(groups: &[StateGroup], words: &mut Vec<u32>, header: usize) -> u32 {
    let chains = chains(groups);
    let [mut of_chains, mut of_groups, mut rows, mut stores] = [const { Vec::new() }; 4];
    let mut n_groups = 0u32;
    for chain in &chains {
        of_chains.extend([n_groups, n_groups + chain.len() as u32]);
        n_groups += chain.len() as u32;
        for group in chain.iter().filter_map(|&number| groups.get(number)) {
            let (first_row, first_store) = (rows.len() as u32, (stores.len() / 2) as u32);
            rows.extend_from_slice(&group.rows);
            stores.extend(group.stores.iter().flat_map(|s| [s.n_rows, s.to.0]));
            let source = group.source.map_or(0, |cell| cell.0 + 1);
            of_groups.extend([first_row, rows.len() as u32, source]);
            of_groups.extend([first_store, (stores.len() / 2) as u32]);
        }
    }
    let mut append = |table: &[u32]| {
        let at = words.len() as u32;
        words.extend_from_slice(table);
        at
    };
    let places = [&of_chains, &of_groups, &rows, &stores].map(|table| append(table));
    let [chains_at, groups_at, rows_at, stores_at] = places;
    let n_chains = chains.len() as u32;
    let values = [n_chains, chains_at, groups_at, rows_at, stores_at, 0, 0, 0];
    if let Some(to) = words.get_mut(header..header + HEADER_WORDS) {
        to.copy_from_slice(&values);
    }
    n_chains
}

/// The numbers of the groups of each chain, in order.
fn chains(groups: &[StateGroup]) -> Vec<Vec<usize>> {
    let mut chains: Vec<Vec<usize>> = Vec::new();
    // Which chain stores a state row.
    let mut stored = std::collections::HashMap::new();
    for (number, group) in groups.iter().enumerate() {
        let before = group.source.and_then(|cell| stored.get(&cell)).copied();
        let chain = before.unwrap_or_else(|| {
            chains.push(Vec::new());
            chains.len() - 1
        });
        chains[chain].push(number);
        stored.extend(group.stores.iter().map(|store| (store.to, chain)));
    }
    chains
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::CellIdx;
    use kv_core::memory::StateStore;

    fn group(rows: &[u32], source: Option<u32>, stores: &[(u32, u32)]) -> StateGroup {
        StateGroup {
            rows: rows.to_vec(),
            source: source.map(CellIdx),
            stores: stores
                .iter()
                .map(|&(n_rows, to)| StateStore {
                    n_rows,
                    to: CellIdx(to),
                })
                .collect(),
        }
    }

    #[test]
    fn groups_that_continue_each_other_form_a_chain() {
        let groups = [
            group(&[0, 3], Some(7), &[(1, 2), (2, 3)]),
            group(&[1], None, &[(1, 4)]),
            group(&[2], Some(2), &[(1, 5)]),
        ];
        assert_eq!(chains(&groups), [vec![0, 2], vec![1]]);
        let mut words = vec![9; HEADER_WORDS];
        assert_eq!(write(&groups, &mut words, 0), 2);
        assert_eq!(words[..8], [2, 8, 12, 27, 31, 0, 0, 0]);
        assert_eq!(words[8..12], [0, 2, 2, 3]);
        assert_eq!(words[12..22], [0, 2, 8, 0, 2, 2, 3, 3, 2, 3]);
        assert_eq!(words[22..27], [3, 4, 0, 3, 4]);
        assert_eq!(words[27..31], [0, 3, 2, 1]);
        assert_eq!(words[31..], [1, 2, 2, 3, 1, 5, 1, 4]);
    }
}
