//! Stop strings over text that arrives piece by piece.
//!
//! Invariant: released text never contains the beginning of a stop string that is completed later,
//! but where that is part of the text ([`StopStrings::included`]), and is the same however the text
//! was cut into pieces: the stop string that is complete first wins, of several complete at once
//! the longest. Knows nothing of tokens.

use crate::config::ConfigError;

/// The result of adding a piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Released {
    /// Text that can be shown now: it is not part of a stop string.
    pub text: String,
    /// Index of the stop string that is complete; no text follows it.
    pub stopped_by: Option<usize>,
}

/// Searches streamed text for stop strings and holds back text that may begin one.
///
/// ```
/// use cellar_engine::stop::StopStrings;
///
/// let mut stop = StopStrings::new(["END"])?;
/// assert_eq!(stop.push("to the E").text, "to the ");
/// assert_eq!(stop.push("arth").text, "Earth");
/// assert_eq!(stop.push(" END").stopped_by, Some(0));
/// # Ok::<(), cellar_engine::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    is_included: bool,
    held: String,
    stopped_by: Option<usize>,
}

impl StopStrings {
    /// Searches for these strings; without any, all text is released at once.
    ///
    /// # Errors
    /// [`ConfigError::EmptyStop`] where one is empty.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Result<Self, ConfigError> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        match stops.iter().position(String::is_empty) {
            Some(index) => Err(ConfigError::EmptyStop { index }),
            None => Ok(Self {
                stops,
                ..Self::default()
            }),
        }
    }

    /// The same, where the stop string that is complete is part of the text.
    #[must_use]
    pub fn included(self) -> Self {
        Self {
            is_included: true,
            ..self
        }
    }

    /// The stop string with this number.
    pub fn get(&self, index: usize) -> Option<&str> {
        self.stops.get(index).map(String::as_str)
    }

    /// Adds a piece of text. Once a stop string is complete, later text is dropped.
    pub fn push(&mut self, piece: &str) -> Released {
        let mut text = String::new();
        for c in piece.chars() {
            if self.stopped_by.is_some() {
                break;
            }
            self.held.push(c);
            if let Some(index) = self.complete() {
                let end = if self.is_included {
                    self.held.len()
                } else {
                    self.held.len() - self.stops[index].len()
                };
                text.push_str(&self.held[..end]);
                self.held.clear();
                self.stopped_by = Some(index);
            } else {
                let free = self.held.len() - self.n_held_back();
                text.extend(self.held.drain(..free));
            }
        }
        Released {
            text,
            stopped_by: self.stopped_by,
        }
    }

    /// The text still held back, for when no more will come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The longest stop string that the held text ends with.
    fn complete(&self) -> Option<usize> {
        let complete = self
            .stops
            .iter()
            .enumerate()
            .filter(|(_, s)| self.held.ends_with(*s));
        complete
            .max_by_key(|(i, s)| (s.len(), std::cmp::Reverse(*i)))
            .map(|(i, _)| i)
    }

    /// Bytes at the end of the held text that may begin a stop string.
    fn n_held_back(&self) -> usize {
        let begins = |n: &usize| {
            let tail = &self.held.as_bytes()[self.held.len() - n..];
            self.stops.iter().any(|s| s.as_bytes().starts_with(tail))
        };
        (1..=self.held.len()).rev().find(begins).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stream(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut watch = StopStrings::new(stops.iter().copied()).unwrap();
        let mut text = String::new();
        for piece in pieces {
            text += &watch.push(piece).text;
        }
        text += &watch.finish();
        (text, watch.stopped_by)
    }

    #[test]
    fn stop_strings_have_numbers() {
        let stop = StopStrings::new(["END", "###"]).unwrap();
        assert_eq!((stop.get(1), stop.get(2)), (Some("###"), None));
    }

    #[test]
    fn a_stop_string_may_be_cut_anywhere() {
        let cut = (String::from("ab"), Some(0));
        assert_eq!(stream(&["<end>"], &["ab<end>cd"]), cut);
        assert_eq!(stream(&["<end>"], &["ab<", "en", "d>", "cd"]), cut);
        assert_eq!(
            stream(&["<end>"], &["ab<en", "<end>"]),
            ("ab<en".into(), Some(0))
        );
        assert_eq!(stream(&["aab"], &["aa", "ab"]), ("a".into(), Some(0)));
    }

    #[test]
    fn a_stop_string_may_be_part_of_the_text() {
        let mut watch = StopStrings::new(["<end>", "d>"]).unwrap().included();
        let pieces = ["ab<", "en", "d>cd"].map(|piece| watch.push(piece).text);
        assert_eq!(pieces, ["ab", "", "<end>"]);
        assert_eq!((watch.finish().as_str(), watch.stopped_by), ("", Some(0)));
    }

    #[test]
    fn held_text_comes_out_in_the_end() {
        assert_eq!(stream(&["<end>"], &["ab<en"]), ("ab<en".into(), None));
        assert_eq!(stream(&[], &["a", "b"]), ("ab".into(), None));
        let mut watch = StopStrings::new(["\n\n"]).unwrap();
        assert_eq!(watch.push("x\n").text, "x");
        assert_eq!(watch.push("y").text, "\ny");
    }

    #[test]
    fn the_first_complete_one_wins_then_the_longest() {
        assert_eq!(stream(&["abcd", "c"], &["xabcd"]), ("xab".into(), Some(1)));
        assert_eq!(stream(&["c", "abc"], &["xabcd"]), ("x".into(), Some(1)));
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        assert_eq!(
            StopStrings::new(["a", ""]).unwrap_err(),
            ConfigError::EmptyStop { index: 1 }
        );
    }

    proptest! {
        #[test]
        fn cutting_the_text_differently_changes_nothing(
            text in "[abé]{0,40}",
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let chars: Vec<char> = text.chars().collect();
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(chars.len() + 1)).collect();
            at.extend([0, chars.len()]);
            at.sort_unstable();
            let pieces: Vec<String> = at.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (shown, stopped_by) = stream(&stops, &pieces);
            prop_assert_eq!(stream(&stops, &[&text]), (shown.clone(), stopped_by));
            prop_assert!(text.starts_with(&shown));
            // The oracle: the shortest prefix that ends with a stop string.
            let ends = (0..=text.len()).filter(|&n| text.is_char_boundary(n));
            let end = ends.into_iter().find(|&n| stops.iter().any(|s| text[..n].ends_with(s)));
            let wanted = match end {
                None => text.as_str(),
                Some(n) => {
                    let hit = stops.iter().filter(|s| text[..n].ends_with(**s));
                    &text[..n - hit.map(|s| s.len()).max().unwrap()]
                }
            };
            prop_assert_eq!(shown, wanted);
        }
    }
}
