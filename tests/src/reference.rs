//! [`Reference`]: what an independent implementation computed for three prompts.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use lzma_rust2::LzmaReader;

/// Numbers of an independent implementation for three prompts.
#[derive(Clone, Debug)]
pub struct Reference {
    tensors: HashMap<String, (Vec<usize>, Vec<[u8; 4]>)>,
}

/// Logits of some tokens of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitsRows {
    /// Positions of the tokens in the prompt.
    pub positions: Vec<usize>,
    /// Logits, `[positions, vocab]`.
    pub values: Vec<f32>,
}

/// The bytes of a packed file of tensors: behind the header, the first bytes of all words of 4
/// stand together, then the second ones and so on.
fn unpacked(path: &Path) -> Vec<u8> {
    let file = fs::File::open(path).unwrap();
    let mut bytes = Vec::new();
    let mut reader = LzmaReader::new_mem_limit(file, u32::MAX, None).unwrap();
    reader.read_to_end(&mut bytes).unwrap();
    let n_header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let planes = bytes.split_off(8 + n_header);
    let n_words = planes.len() / 4;
    bytes.extend((0..4 * n_words).map(|at| planes[at % 4 * n_words + at / 4]));
    bytes.extend(&planes[4 * n_words..]);
    bytes
}

impl Reference {
    /// Reads a file of tensors, or the packed one next to its path (`.lzma`, see
    /// `tests/fixtures/pack.py`).
    pub fn open(path: &Path) -> Self {
        let packed = path.with_added_extension("lzma");
        let bytes = if packed.exists() {
            unpacked(&packed)
        } else {
            let bytes = fs::read(path);
            bytes.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, tensor)| {
            let words = tensor.data().as_chunks::<4>().0.to_vec();
            (name.to_owned(), (tensor.shape().to_vec(), words))
        });
        Self {
            tensors: tensors.collect(),
        }
    }

    /// Whole numbers, where they are there.
    pub fn ids(&self, name: &str) -> Option<Vec<u32>> {
        let words = self.tensors.get(name)?.1.iter();
        Some(words.map(|b| u32::from_le_bytes(*b)).collect())
    }

    /// All three prompts.
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        let prompts = (0..3).map(|i| self.ids(&format!("ids_{i}")).unwrap());
        prompts.collect()
    }

    /// The greedy continuation of a prompt.
    pub fn greedy(&self, prompt: usize) -> Vec<u32> {
        self.ids(&format!("greedy_{prompt}")).unwrap()
    }

    /// The logits rows of a prompt that were kept: those of `rows_i`, or the last.
    pub fn logits(&self, prompt: usize) -> LogitsRows {
        let (shape, values) = self.values(&format!("logits_{prompt}")).unwrap();
        let positions = match self.ids(&format!("rows_{prompt}")) {
            Some(rows) => rows.into_iter().map(|row| row as usize).collect(),
            None => {
                let n_tokens = self.ids(&format!("ids_{prompt}")).unwrap().len();
                (n_tokens - shape[0]..n_tokens).collect()
            }
        };
        LogitsRows { positions, values }
    }

    /// The number of recorded tensors of keys, values and states.
    pub fn n_recorded(&self) -> usize {
        let is_state = |name: &&String| {
            let kinds = [
                "k_l",
                "v_l",
                "idxk_l",
                "conv_state",
                "ssm_state",
                "state",
                "mlstm_c",
            ];
            kinds.iter().any(|kind| name.starts_with(kind)) && !name.ends_with("_rows")
        };
        self.tensors.keys().filter(is_state).count()
    }

    /// Shape and values of a tensor, where there is one.
    pub fn values(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let (shape, words) = self.tensors.get(name)?;
        let values = words.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Some((shape.clone(), values))
    }
}

impl LogitsRows {
    /// Mean Kullback-Leibler divergence of the distributions of tokens, from these rows to
    /// `ours`, which has a row for every position; in nats a token.
    pub fn divergence(&self, ours: &[f32]) -> f64 {
        let n = self.values.len() / self.positions.len();
        let rows = self.positions.iter().zip(self.values.chunks(n));
        let of_row = |(&at, wanted): (&usize, &[f32])| {
            let (p, q) = (log_softmax(wanted), log_softmax(&ours[at * n..][..n]));
            let terms = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q));
            terms.sum::<f64>()
        };
        rows.map(of_row).sum::<f64>() / self.positions.len() as f64
    }

    /// Largest absolute difference from the same tokens' logits among those of all tokens of the
    /// prompt, `[tokens, vocab]`.
    pub fn distance(&self, ours: &[f32]) -> f32 {
        let n_vocab = self.values.len() / self.positions.len();
        let rows = self.positions.iter();
        let kept: Vec<f32> = rows
            .flat_map(|&at| &ours[at * n_vocab..][..n_vocab])
            .copied()
            .collect();
        crate::distance(&kept, &self.values)
    }

    /// Those of the first `n_tokens` tokens.
    #[must_use]
    pub fn of_first(self, n_tokens: usize) -> Self {
        let n_vocab = self.values.len() / self.positions.len();
        let n = self.positions.iter().filter(|&&at| at < n_tokens).count();
        assert!(self.positions[..n].iter().all(|&at| at < n_tokens));
        Self {
            positions: self.positions[..n].to_vec(),
            values: self.values[..n * n_vocab].to_vec(),
        }
    }
}

/// `ln(e^x / sum(e^x))` of every value.
fn log_softmax(row: &[f32]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
    row.iter().map(|&x| f64::from(x) - sum.ln()).collect()
}
