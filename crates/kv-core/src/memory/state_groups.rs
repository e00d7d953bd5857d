//! [`StateGroup`]: which rows of a ubatch continue which recurrent state, and where states are
//! stored.
//!
//! Recurrent layers take each group's rows one after the other, beginning with the state that its
//! source holds. Groups may differ in length, and a group may begin with a state that an earlier
//! one stored. Invariant, checked by [`StateMarks::check`]: no stored row is read by an earlier
//! group or written twice, so a group's source is the same whether or not the run before it failed.
//! Does not know sequences.

use crate::ids::CellIdx;

/// Rows of a ubatch that follow one another in one recurrent state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateGroup {
    /// The rows of the ubatch, ascending; at least one.
    pub rows: Vec<u32>,
    /// The state before the first of them; `None` is the state before any token: zeros.
    pub source: Option<CellIdx>,
    /// The states that are kept, ascending; the last is that after the last row.
    pub stores: Vec<StateStore>,
}

/// A state that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateStore {
    /// The state after this many of the group's rows; at least 1.
    pub n_rows: u32,
    /// The row that takes it.
    pub to: CellIdx,
}

/// Reusable memory for [`StateMarks::check`]: the second check of the same sizes allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct StateMarks {
    /// By row of the ubatch: the groups that it is in.
    n_groups_of: Vec<u32>,
    /// By state row: whether it was read or written.
    touched: Vec<bool>,
}

impl StateMarks {
    /// Checks that groups that cover `n_rows` rows of a ubatch can be computed with `n_states`
    /// state rows.
    ///
    /// # Errors
    /// The first thing that is wrong, with its numbers.
    pub fn check(
        &mut self,
        groups: &[StateGroup],
        n_rows: u32,
        n_states: u32,
    ) -> Result<(), String> {
        self.n_groups_of.clear();
        self.n_groups_of.resize(n_rows as usize, 0);
        self.touched.clear();
        self.touched.resize(n_states as usize, false);
        check(groups, &mut self.n_groups_of, &mut self.touched)
    }
}

/// [`StateMarks::check`] with memory of its own.
///
/// # Errors
/// The first thing that is wrong, with its numbers.
pub fn check_states(groups: &[StateGroup], n_rows: u32, n_states: u32) -> Result<(), String> {
    StateMarks::default().check(groups, n_rows, n_states)
}

fn check(
    groups: &[StateGroup],
    n_groups_of: &mut [u32],
    touched: &mut [bool],
) -> Result<(), String> {
    let (n_rows, n_states) = (n_groups_of.len() as u32, touched.len() as u32);
    for (number, group) in groups.iter().enumerate() {
        check_order(number, group)?;
        for &row in &group.rows {
            match n_groups_of.get_mut(row as usize) {
                Some(n) => *n += 1,
                None => {
                    return Err(format!("row {row} of {n_rows} is in 1 groups"));
                }
            }
        }
        let out_of_range = |row: CellIdx| {
            format!("group {number}: there is no state row {row}, there are {n_states}")
        };
        if let Some(row) = group.source {
            let touched = touched.get_mut(row.as_usize());
            *touched.ok_or_else(|| out_of_range(row))? = true;
        }
        for store in &group.stores {
            let row = store.to;
            let touched = touched.get_mut(row.as_usize());
            if std::mem::replace(touched.ok_or_else(|| out_of_range(row))?, true) {
                return Err(format!(
                    "group {number}: state row {row} is written, but was read or written before"
                ));
            }
        }
    }
    match (0u32..).zip(&*n_groups_of).find(|&(_, &n)| n != 1) {
        Some((row, &n_groups)) => Err(format!("row {row} of {n_rows} is in {n_groups} groups")),
        None => Ok(()),
    }
}

fn check_order(number: usize, group: &StateGroup) -> Result<(), String> {
    let n_rows = group.rows.len();
    if n_rows == 0 || !group.rows.is_sorted_by(|a, b| a < b) {
        return Err(format!(
            "group {number}: its {n_rows} rows do not ascend, or are none"
        ));
    }
    let stores = &group.stores;
    let ends = stores.last().map(|last| last.n_rows as usize) == Some(n_rows);
    let starts = stores.first().is_some_and(|first| first.n_rows > 0);
    if !ends || !starts || !stores.is_sorted_by(|a, b| a.n_rows < b.n_rows) {
        let n_stores = stores.len();
        return Err(format!(
            "group {number}: it stores {n_stores} states, not in order or not that after row {n_rows}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(rows: &[u32], source: Option<u32>, stores: &[(u32, u32)]) -> StateGroup {
        let store = |&(n_rows, to)| StateStore {
            n_rows,
            to: CellIdx(to),
        };
        StateGroup {
            rows: rows.to_vec(),
            source: source.map(CellIdx),
            stores: stores.iter().map(store).collect(),
        }
    }

    fn error(groups: &[StateGroup]) -> String {
        check_states(groups, 3, 4).unwrap_err()
    }

    #[test]
    fn a_group_may_begin_with_a_state_that_an_earlier_one_stored() {
        let first = group(&[0], None, &[(1, 2)]);
        let second = group(&[1, 2], Some(2), &[(1, 0), (2, 1)]);
        let groups = [first, second];
        assert_eq!(check_states(&groups, 3, 4), Ok(()));
        let [first, second] = groups;
        assert_eq!(
            error(&[second, first]),
            "group 1: state row 2 is written, but was read or written before"
        );
    }

    #[test]
    fn every_row_is_in_one_group() {
        let first = group(&[0, 2], None, &[(2, 0)]);
        assert_eq!(
            error(std::slice::from_ref(&first)),
            "row 1 of 3 is in 0 groups"
        );
        let again = group(&[1, 2], None, &[(2, 1)]);
        assert_eq!(error(&[first, again]), "row 2 of 3 is in 2 groups");
        let beyond = group(&[0, 1, 2, 3], None, &[(4, 0)]);
        assert_eq!(error(&[beyond]), "row 3 of 3 is in 1 groups");
    }

    #[test]
    fn rows_and_stores_ascend_and_the_last_state_is_stored() {
        for rows in [&[][..], &[1, 0, 2], &[0, 0, 1]] {
            let wrong = error(&[group(rows, None, &[(3, 0)])]);
            let n = rows.len();
            assert_eq!(
                wrong,
                format!("group 0: its {n} rows do not ascend, or are none")
            );
        }
        for stores in [
            &[][..],
            &[(2, 0)],
            &[(0, 0), (3, 1)],
            &[(2, 0), (2, 1), (3, 2)],
            &[(4, 0)],
        ] {
            let wrong = error(&[group(&[0, 1, 2], None, stores)]);
            assert!(
                wrong.contains(&format!("it stores {} states", stores.len())),
                "{wrong}"
            );
        }
    }

    #[test]
    fn state_rows_exist_and_are_written_once() {
        let wrong = [
            (
                group(&[0, 1, 2], Some(4), &[(3, 0)]),
                "no state row 4, there are 4",
            ),
            (
                group(&[0, 1, 2], None, &[(3, 9)]),
                "no state row 9, there are 4",
            ),
            (
                group(&[0, 1, 2], Some(1), &[(3, 1)]),
                "state row 1 is written",
            ),
            (
                group(&[0, 1, 2], None, &[(1, 1), (3, 1)]),
                "state row 1 is written",
            ),
        ];
        for (group, text) in wrong {
            let wrong = error(&[group]);
            assert!(wrong.contains(text), "{wrong}");
        }
    }

    #[test]
    fn marks_forget_the_ubatch_before() {
        let mut marks = StateMarks::default();
        let groups = [group(&[0, 1, 2], Some(3), &[(3, 0)])];
        for _ in 0..2 {
            assert_eq!(marks.check(&groups, 3, 4), Ok(()));
        }
    }
}
