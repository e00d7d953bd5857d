//! Which layers of a model see a window and which see everything.
//!
//! Keys are `attention.sliding_window` and `attention.sliding_window_pattern` of the GGUF
//! specification. Invariant: one window for each layer. Knows no architecture by name.

use kv_core::Window;

use crate::error::ModelError;
use crate::gguf::Value;
use crate::hyperparameters::Hyperparameters;

/// A repeating order of layers: of every `period`, one sees everything.
///
/// A period of 1 has no windowed layer, one of 0 no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPattern {
    /// After how many layers it repeats.
    pub period: u32,
    /// The layer of a period that sees everything.
    pub full: FullLayer,
}

/// The one layer of a period that sees everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullLayer {
    /// The last: layers 5, 11, 17 … of a period of 6.
    #[default]
    Last,
    /// The first: layers 0, 6, 12 … of a period of 6.
    First,
}

impl WindowPattern {
    /// Every layer has a window.
    pub const EVERY: Self = Self {
        period: 0,
        full: FullLayer::Last,
    };

    /// True if layer `index`, counted from 0, sees a window only.
    pub fn is_windowed(self, index: usize) -> bool {
        let period = self.period as usize;
        match (period, self.full) {
            (0, _) => true,
            (_, FullLayer::Last) => index % period < period - 1,
            (_, FullLayer::First) => !index.is_multiple_of(period),
        }
    }
}

impl Hyperparameters<'_> {
    /// The window of every layer. Which layers are windowed is what the file says, by one flag a
    /// layer or by another period, or else `pattern`; where one is, the file has to name its width.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn windows(
        &self,
        n_layers: usize,
        pattern: WindowPattern,
    ) -> Result<Vec<Window>, ModelError> {
        let name = "attention.sliding_window_pattern";
        let flags: Vec<bool> = match self.value(name) {
            Some(Value::Array(_)) => self.flags(name, n_layers)?,
            _ => {
                let period = self.optional::<u32>(name)?.unwrap_or(pattern.period);
                let pattern = WindowPattern { period, ..pattern };
                (0..n_layers).map(|i| pattern.is_windowed(i)).collect()
            }
        };
        let window = |is_windowed| {
            if is_windowed {
                Ok(Window::Sliding(
                    self.count("attention.sliding_window")? as u32
                ))
            } else {
                Ok(Window::Full)
            }
        };
        flags.into_iter().map(window).collect()
    }

    /// The same of a model that has no window where the file names none, or one of 0.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn windows_if_named(
        &self,
        n_layers: usize,
        pattern: WindowPattern,
    ) -> Result<Vec<Window>, ModelError> {
        if self.names_window()? {
            self.windows(n_layers, pattern)
        } else {
            Ok(vec![Window::Full; n_layers])
        }
    }

    /// True if the file names a window.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn names_window(&self) -> Result<bool, ModelError> {
        let width = self.optional::<u32>("attention.sliding_window")?;
        Ok(width.is_some_and(|width| width != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{Array, Metadata};

    fn drawn(pattern: WindowPattern, n_layers: usize) -> String {
        let letter = |i| if pattern.is_windowed(i) { 's' } else { 'F' };
        (0..n_layers).map(letter).collect()
    }

    #[test]
    fn w3_layers_by_pattern() {
        let last = |period| WindowPattern {
            period,
            full: FullLayer::Last,
        };
        let first = |period| WindowPattern {
            period,
            full: FullLayer::First,
        };
        assert_eq!(drawn(last(6), 13), "sssssFsssssFs");
        assert_eq!(drawn(last(2), 5), "sFsFs");
        assert_eq!(drawn(first(2), 5), "FsFsF");
        assert_eq!(drawn(first(4), 6), "FsssFs");
        assert_eq!(drawn(last(1), 3), "FFF");
        assert_eq!(drawn(first(1), 3), "FFF");
        assert_eq!(drawn(last(0), 3), "sss");
        assert_eq!(drawn(first(0), 3), "sss");
    }

    fn windows(metadata: &Metadata) -> Result<String, ModelError> {
        let pattern = WindowPattern {
            period: 3,
            full: FullLayer::Last,
        };
        let windows = Hyperparameters::new(metadata, "m").windows(4, pattern)?;
        let names: Vec<String> = windows.iter().map(Window::to_string).collect();
        Ok(names.join(" "))
    }

    #[test]
    fn w3_the_file_decides() {
        let mut file = Metadata::new();
        let width = "m.attention.sliding_window";
        assert!(windows(&file).unwrap_err().to_string().contains(width));
        file.insert(width, 0u32);
        assert!(windows(&file).unwrap_err().to_string().contains(width));
        file.insert(width, 8u32);
        assert_eq!(
            windows(&file).unwrap(),
            "sliding(8) sliding(8) full sliding(8)"
        );
        let key = "m.attention.sliding_window_pattern";
        file.insert(key, 2u32);
        assert_eq!(windows(&file).unwrap(), "sliding(8) full sliding(8) full");
        file.insert(key, Array::Bool(vec![false, true, true, false]));
        assert_eq!(windows(&file).unwrap(), "full sliding(8) sliding(8) full");
        file.insert(key, Array::I32(vec![1, 0, 0, 1]));
        assert_eq!(windows(&file).unwrap(), "sliding(8) full full sliding(8)");
        file.insert(key, Array::I32(vec![1, 0, 2, 1]));
        let error = windows(&file).unwrap_err().to_string();
        assert!(
            error.contains(key) && error.contains("2 is neither"),
            "{error}"
        );
        file.insert(key, Array::Bool(vec![true]));
        assert!(windows(&file).unwrap_err().to_string().contains(key));
        file.insert(key, "often");
        assert!(windows(&file).unwrap_err().to_string().contains(key));
        let mut file = Metadata::new();
        file.insert(key, 1u32);
        assert_eq!(windows(&file).unwrap(), "full full full full");
    }

    #[test]
    fn a_window_that_need_not_be() {
        let mut file = Metadata::new();
        let windows = |file: &Metadata| {
            Hyperparameters::new(file, "m").windows_if_named(2, WindowPattern::EVERY)
        };
        assert_eq!(windows(&file).unwrap(), [Window::Full; 2]);
        file.insert("m.attention.sliding_window", 0u32);
        assert_eq!(windows(&file).unwrap(), [Window::Full; 2]);
        file.insert("m.attention.sliding_window", 8u32);
        assert_eq!(windows(&file).unwrap(), [Window::Sliding(8); 2]);
    }
}
