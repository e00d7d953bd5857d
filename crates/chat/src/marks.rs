//! Marks in a text that is not complete.
//!
//! Pure functions. Invariant: what [`undecided`] gives out is part of no mark.

/// The treatment of white space at the end of the text so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LastSpaces {
    /// It waits: a mark would swallow it.
    Held,
    /// It is given out.
    Given,
}

/// The number of bytes of a text that can be given out: all but its longest end that may begin a
/// mark, and where a mark would swallow it, without white space at its end.
pub(crate) fn undecided(text: &str, marks: &[&str], spaces: LastSpaces) -> usize {
    let longest = marks.iter().map(|mark| mark.len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest);
    let is_open = |at: &usize| {
        let end = text.get(*at..).unwrap_or_default();
        !end.is_empty() && marks.iter().any(|mark| mark.starts_with(end))
    };
    let mut starts = (from..text.len()).filter(|&at| text.is_char_boundary(at));
    let n = starts.find(is_open).unwrap_or(text.len());
    match spaces {
        LastSpaces::Held => text.get(..n).unwrap_or_default().trim_end().len(),
        LastSpaces::Given => n,
    }
}

/// The place of the first of these marks in a text, and the mark.
pub(crate) fn find_first<'m>(text: &str, marks: &[&'m str]) -> Option<(usize, &'m str)> {
    let mut first: Option<(usize, &str)> = None;
    for &mark in marks {
        // What stands behind the first so far is of no interest.
        let end = first.map_or(text.len(), |(at, _)| (at + mark.len()).min(text.len()));
        let found = text.get(..end).unwrap_or(text).find(mark);
        if let Some(at) = found.filter(|&at| first.is_none_or(|(first, _)| at < first)) {
            first = Some((at, mark));
        }
    }
    first
}

/// Takes the first bytes of a text out of it.
pub(crate) fn take_front(held: &mut String, n: usize) -> String {
    let rest = held.split_off(n);
    std::mem::replace(held, rest)
}
