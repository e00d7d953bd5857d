//! [`WeightSummary`]: how many weights a model has, and how they are stored, from its header alone.
//!
//! Knows no weight's bytes.

use std::collections::BTreeMap;

use kv_graph::weights::WeightSource;

use crate::gguf::{GgufFile, Metadata};

/// The number of weights a model has, and how they are stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightSummary {
    /// All values of all tensors.
    pub n_values: u64,
    /// Their bytes, as they are stored.
    pub n_bytes: u64,
    /// The type of the file (`Q4_K_M`), or else that of most bytes of its tensors (`BF16`); empty
    /// where there are none.
    pub quantization: String,
}

/// Types of files (source: `llama_ftype` in llama.cpp's `llama.h`).
const FILE_TYPES: [(u32, &str); 36] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4"),
    (39, "NVFP4"),
    (40, "Q1_0"),
    (41, "Q2_0"),
];

impl WeightSummary {
    /// That of the tensors of a GGUF file.
    pub fn of_gguf(file: &GgufFile) -> Self {
        let tensors = file.tensors().iter().map(|tensor| Tensor {
            n_values: tensor.n_values(),
            n_bytes: tensor.n_bytes().unwrap_or(0),
            stored: tensor.stored().to_string(),
        });
        Self::new(file.metadata(), tensors)
    }

    /// That of weights from elsewhere.
    pub fn of_weights(metadata: &Metadata, weights: &dyn WeightSource) -> Self {
        let infos = weights.names().into_iter();
        let infos = infos.filter_map(|name| weights.describe(&name).ok());
        let tensors = infos.map(|info| Tensor {
            n_values: info.n_values(),
            n_bytes: info.n_bytes(),
            stored: info.format.to_string(),
        });
        Self::new(metadata, tensors)
    }

    fn new(metadata: &Metadata, tensors: impl Iterator<Item = Tensor>) -> Self {
        let (mut n_values, mut n_bytes) = (0, 0u64);
        let mut bytes = BTreeMap::<String, u64>::new();
        for tensor in tensors {
            n_values += tensor.n_values;
            n_bytes = n_bytes.saturating_add(tensor.n_bytes);
            *bytes.entry(tensor.stored).or_default() += tensor.n_bytes;
        }
        // A file type of another kind of number is as good as none.
        let number = metadata.optional::<u32>("general.file_type").ok().flatten();
        let known = FILE_TYPES.iter().find(|(known, _)| Some(*known) == number);
        let most = || bytes.into_iter().max_by_key(|(_, n_bytes)| *n_bytes);
        let quantization = match known {
            Some((_, name)) => (*name).to_owned(),
            None => most().map_or_else(String::new, |(stored, _)| stored),
        };
        Self {
            n_values,
            n_bytes,
            quantization,
        }
    }
}

struct Tensor {
    n_values: u64,
    n_bytes: u64,
    stored: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(file_type: Option<u32>, tensors: &[(u64, u64, &str)]) -> WeightSummary {
        let mut metadata = Metadata::new();
        if let Some(number) = file_type {
            metadata.insert("general.file_type", number);
        }
        let tensors = tensors.iter().map(|&(n_values, n_bytes, stored)| Tensor {
            n_values,
            n_bytes,
            stored: stored.to_owned(),
        });
        WeightSummary::new(&metadata, tensors)
    }

    #[test]
    fn the_type_of_the_file_goes_before_that_of_most_bytes() {
        let tensors = [(256, 144, "Q4_K"), (64, 256, "F32"), (512, 288, "Q4_K")];
        for (file_type, wanted) in [(Some(15), "Q4_K_M"), (Some(999), "Q4_K"), (None, "Q4_K")] {
            let got = summary(file_type, &tensors);
            assert_eq!((got.n_values, got.quantization.as_str()), (832, wanted));
        }
        assert_eq!(summary(None, &[]), WeightSummary::default());
    }
}
