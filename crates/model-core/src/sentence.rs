//! [`SentenceSettings`]: how the rows that a model gives for the tokens of a text become one
//! vector.
//!
//! Keys are `{architecture}.pooling_type` of the GGUF specification and, since it has none for
//! them, `{architecture}.normalize_embeddings` and `{architecture}.max_sequence_length`. Invariant:
//! what comes out of [`Pooling::pool`] is a vector of the width of a row, but for
//! [`Pooling::None`]. Knows no architecture and no file but its metadata.

use crate::error::ModelError;
use crate::gguf::Metadata;

/// The rule by which rows become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// They do not: a text has a row for every token.
    None,
    /// Their mean (Reimers and Gurevych, arXiv 1908.10084).
    Mean,
    /// The first: that of the mark before the text, `[CLS]`.
    Cls,
    /// The last.
    Last,
    /// The first, which went through a classification head: the scores of a reranker.
    Rank,
}

/// The length of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Normalization {
    /// 1, so that a dot product is the cosine similarity.
    #[default]
    Unit,
    /// As pooled.
    None,
}

/// A file's settings for whole texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentenceSettings {
    /// The rule by which rows become one, where the file specifies it.
    pub pooling: Option<Pooling>,
    /// The length of vectors, where the file specifies it.
    pub normalization: Option<Normalization>,
    /// The longest text that the model was made for, in tokens with their marks, where that is less
    /// than its context.
    pub max_tokens: Option<usize>,
}

/// Key of [`SentenceSettings::pooling`], after the architecture's name.
pub(crate) const POOLING: &str = "pooling_type";
/// Key of [`SentenceSettings::normalization`], after the architecture's name: true for length 1.
pub(crate) const NORMALIZE: &str = "normalize_embeddings";
/// Key of [`SentenceSettings::max_tokens`], after the architecture's name.
pub(crate) const MAX_TOKENS: &str = "max_sequence_length";

impl Pooling {
    /// The number that GGUF files have for it.
    pub const fn code(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Mean => 1,
            Self::Cls => 2,
            Self::Last => 3,
            Self::Rank => 4,
        }
    }

    /// The vector of `rows`, which have `dim` values each; zeros where there are none. Without
    /// pooling all of them.
    pub fn pool(self, rows: &[f32], dim: usize) -> Vec<f32> {
        let mut each = rows.chunks_exact(dim.max(1));
        let one = match self {
            Self::None => return rows.to_vec(),
            Self::Cls | Self::Rank => each.next(),
            Self::Last => each.next_back(),
            Self::Mean => {
                let n = each.len().max(1) as f64;
                let mut sums = vec![0.0f64; dim];
                for row in each {
                    sums.iter_mut()
                        .zip(row)
                        .for_each(|(sum, x)| *sum += f64::from(*x));
                }
                return sums.into_iter().map(|sum| (sum / n) as f32).collect();
            }
        };
        one.map_or_else(|| vec![0.0; dim], <[f32]>::to_vec)
    }
}

impl SentenceSettings {
    /// Reads the settings.
    ///
    /// # Errors
    /// [`ModelError`] naming the key.
    pub fn read(metadata: &Metadata) -> Result<Self, ModelError> {
        let architecture: &str = metadata.get("general.architecture")?;
        let key = |name: &str| format!("{architecture}.{name}");
        let wrong = |name: &str, reason: String| ModelError::Setting {
            key: key(name),
            reason,
        };
        let pooling = match metadata.optional::<u32>(&key(POOLING))? {
            // 0 means that rows are not pooled.
            None | Some(0) => None,
            Some(1) => Some(Pooling::Mean),
            Some(2) => Some(Pooling::Cls),
            Some(3) => Some(Pooling::Last),
            Some(4) => Some(Pooling::Rank),
            Some(other) => {
                let reason =
                    format!("{other} is not one of: 0 to 4 (none, mean, first, last, rank)");
                return Err(wrong(POOLING, reason));
            }
        };
        let normalization = match metadata.optional::<bool>(&key(NORMALIZE))? {
            Some(true) => Some(Normalization::Unit),
            Some(false) => Some(Normalization::None),
            None => None,
        };
        let max_tokens = match metadata.optional::<u32>(&key(MAX_TOKENS))? {
            Some(0) => return Err(wrong(MAX_TOKENS, "0 is not possible".to_owned())),
            n => n.map(|n| n as usize),
        };
        Ok(Self {
            pooling,
            normalization,
            max_tokens,
        })
    }
}

/// Makes the vector as long as 1; one of zeros stays.
pub fn normalise(vector: &mut [f32]) {
    let square: f64 = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    // The bound of the reference (torch's `normalize`).
    let length = square.sqrt().max(1e-12);
    for x in vector {
        *x = (f64::from(*x) / length) as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_one() {
        let rows = [1.0, 2.0, 3.0, 6.0, -1.0, 1.0];
        assert_eq!(Pooling::Mean.pool(&rows, 2), [1.0, 3.0]);
        assert_eq!(Pooling::Cls.pool(&rows, 2), [1.0, 2.0]);
        assert_eq!(Pooling::Last.pool(&rows, 2), [-1.0, 1.0]);
        assert_eq!(Pooling::Rank.pool(&rows, 2), [1.0, 2.0]);
        assert_eq!(Pooling::None.pool(&rows, 2), rows);
        assert_eq!(Pooling::Mean.pool(&[], 2), [0.0, 0.0]);
        assert_eq!(Pooling::Cls.pool(&[], 2), [0.0, 0.0]);
    }

    #[test]
    fn vectors_get_length_one() {
        let mut vector = [3.0, -4.0];
        normalise(&mut vector);
        assert_eq!(vector, [0.6, -0.8]);
        let mut large = [f32::MAX, f32::MAX];
        normalise(&mut large);
        assert!((large[0] - 0.5f32.sqrt()).abs() < 1e-7);
        let mut zeros = [0.0, 0.0];
        normalise(&mut zeros);
        assert_eq!(zeros, [0.0, 0.0]);
    }

    #[test]
    fn what_a_file_says() {
        let mut file = Metadata::new();
        file.insert("general.architecture", "bert");
        assert_eq!(
            SentenceSettings::read(&file).unwrap(),
            SentenceSettings::default()
        );
        for (normalize, normalization) in
            [(true, Normalization::Unit), (false, Normalization::None)]
        {
            file.insert("bert.normalize_embeddings", normalize);
            let settings = SentenceSettings::read(&file).unwrap();
            assert_eq!(settings.normalization, Some(normalization));
        }
        for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Rank] {
            file.insert("bert.pooling_type", pooling.code());
            file.insert("bert.max_sequence_length", 256u32);
            let settings = SentenceSettings::read(&file).unwrap();
            assert_eq!(settings.pooling, Some(pooling));
            assert_eq!(settings.max_tokens, Some(256));
        }
        let refused = |file: &Metadata| SentenceSettings::read(file).unwrap_err().to_string();
        file.insert("bert.max_sequence_length", 0u32);
        assert_eq!(
            refused(&file),
            "bert.max_sequence_length: 0 is not possible"
        );
        file.insert("bert.pooling_type", 9u32);
        assert_eq!(
            refused(&file),
            "bert.pooling_type: 9 is not one of: 0 to 4 (none, mean, first, last, rank)"
        );
    }
}
