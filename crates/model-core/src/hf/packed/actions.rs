//! Changes of packed matrices, which always lie as those of a product do: a row for each output.

use super::super::steps::Action;

/// The same changes for such a matrix. Where they begin with a transposition, or with parts of
/// columns that are transposed then, the matrices of others lie the other way round.
pub(in crate::hf) fn of_product(actions: Vec<Action>) -> Vec<Action> {
    let turned = |action: &Action| match *action {
        Action::ColumnPart { part, of } => Some(Action::RowPart { part, of }),
        Action::EveryColumn { first, step } => Some(Action::EveryRow { first, step }),
        _ => None,
    };
    let first = actions.iter().take_while(|a| turned(a).is_some()).count();
    if actions.get(first) != Some(&Action::Transposed) {
        return actions;
    }
    let parts = actions.iter().take(first).filter_map(turned);
    parts
        .chain(actions.iter().skip(first + 1).cloned())
        .collect()
}

/// True if rows stay what they are, whichever are taken: their blocks stay whole.
pub(in crate::hf) fn keep_rows(actions: &[Action]) -> bool {
    let moves_columns = |action: &Action| {
        matches!(
            action,
            Action::ColumnPart { .. }
                | Action::EveryColumn { .. }
                | Action::Transposed
                | Action::Column
                | Action::Rows(_)
        )
    };
    !actions.iter().any(moves_columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_before_a_transposition_is_turned() {
        let (odd, half) = ([1, 2], [0, 2]);
        let every = |[first, step]: [usize; 2]| Action::EveryColumn { first, step };
        let columns = |[part, of]: [usize; 2]| Action::ColumnPart { part, of };
        let rows = |[part, of]: [usize; 2]| Action::RowPart { part, of };
        let (first, step) = (odd[0], odd[1]);
        for (stated, wanted) in [
            (vec![Action::Transposed, rows(half)], vec![rows(half)]),
            (vec![columns(half), Action::Transposed], vec![rows(half)]),
            (
                vec![every(odd), Action::Transposed],
                vec![Action::EveryRow { first, step }],
            ),
            (vec![columns(half)], vec![columns(half)]),
            (
                vec![Action::Stacked(2), Action::Transposed],
                vec![Action::Stacked(2), Action::Transposed],
            ),
        ] {
            assert_eq!(of_product(stated), wanted);
        }
        assert!(keep_rows(&[Action::Stacked(2), rows(half)]));
        assert!(!keep_rows(&[Action::Stacked(2), Action::Transposed]));
    }
}
