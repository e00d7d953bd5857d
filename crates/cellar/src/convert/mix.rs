//! In which format each tensor of a converted model is stored.
//!
//! As `llama-quantize` stores them. Vectors, norms, and matrices that are small, are stored as F32;
//! a matrix whose rows are not a whole number of blocks takes the next larger format of smaller
//! blocks. The output matrix (or the embedding, where the two are tied) gets at least 6 bits per
//! value, because its errors affect every token.
//!
//! In the mixes `q4_k_m` and `q5_k_m`, attention V (also where it is joined with Q and K) and FFN
//! down take Q6_K in the first and last eighth of the layers and in every third between them; in
//! models of 8 experts, attention K and V take Q8_0, and with `q4_k_m` the attention output Q5_K;
//! in models of 80 layers whose heads share KV heads, V takes at least Q5_K. With an importance
//! matrix, FFN down of the first eighth of the layers takes Q4_1 in files of `q4_0`, and Q5_1 in
//! those of `q5_0`. In `q3_k_m` and `q2_k` attention V, attention output and FFN down take the
//! next larger format, or one after that; in `q2_k_s` shared attention V and the first eighth of
//! FFN down take Q4_K. In files of `tq1_0`, `tq2_0` and `q2_0` embeddings take Q4_K. The IQ types
//! are in [`super::few_bits`]. Knows nothing of values.

use kv_block::BlockFormat;
use model_core::gguf::is_of_convolutions;

use super::file_type::{FileType, IqMix, LowMix, Mix};

/// A tensor of the model that is converted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedShape {
    /// Its name.
    pub(super) name: String,
    /// Outermost first.
    pub(super) shape: Vec<usize>,
}

/// What the choice of formats depends on, besides the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelTraits {
    /// Layers of the model.
    pub(super) n_layers: usize,
    /// Experts of a layer; 0 where there are none.
    pub(super) n_experts: usize,
    /// Query heads that share a KV head.
    pub(super) queries_per_kv: usize,
    /// Whether there is an importance matrix.
    pub(super) columns: Columns,
}

/// What is known of the columns of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Columns {
    /// Nothing: they count alike.
    Alike,
    /// How important each is.
    Weighted,
}

/// The format of each tensor in a file of this type; tensors are in the order of the file.
pub(super) fn formats(
    file_type: FileType,
    model: ModelTraits,
    tensors: &[NamedShape],
) -> Vec<BlockFormat> {
    let has_output = tensors.iter().any(|tensor| tensor.name == "output.weight");
    let output = if has_output {
        "output.weight"
    } else {
        "token_embd.weight"
    };
    let mut counters = Counters {
        value: 0,
        down: 0,
        gate: 0,
        up: 0,
        n_values: tensors.iter().filter(|t| is_value(&t.name)).count(),
    };
    let format = |tensor: &NamedShape| {
        if is_exact(tensor) {
            return BlockFormat::F32;
        }
        let name = tensor.name.as_str();
        let wanted = match file_type.mix {
            _ if name == output => output_format(file_type, tensor),
            Mix::Uniform => counters.uniform(model, name, file_type.format),
            Mix::Medium => counters.medium(model, name, file_type.format),
            Mix::Low(low) => counters.low(model, name, low).unwrap_or(file_type.format),
            Mix::Iq(mix) => {
                let found = counters.iq(model, name, mix);
                found.unwrap_or(file_type.format)
            }
        };
        fitting(tensor, wanted)
    };
    tensors.iter().map(format).collect()
}

/// The format of the matrix that makes the logits.
fn output_format(file_type: FileType, tensor: &NamedShape) -> BlockFormat {
    let columns = tensor.shape.last().copied().unwrap_or(1);
    match file_type.format {
        BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16 => file_type.format,
        format if !columns.is_multiple_of(format.block_len()) => BlockFormat::Q8_0,
        BlockFormat::Q8_0 => BlockFormat::Q8_0,
        _ => match file_type.mix {
            Mix::Iq(mix) => mix.output(),
            _ => BlockFormat::Q6_K,
        },
    }
}

/// How many matrices of a kind came before, in the order of the file.
struct Counters {
    /// Of attention V.
    value: usize,
    /// Of FFN down.
    down: usize,
    /// Of FFN gate.
    gate: usize,
    /// Of FFN up.
    up: usize,
    /// All matrices of attention V.
    n_values: usize,
}

impl Counters {
    /// The format of the next matrix in a file of `base`.
    fn uniform(&mut self, model: ModelTraits, name: &str, base: BlockFormat) -> BlockFormat {
        let is_ternary = matches!(
            base,
            BlockFormat::TQ1_0 | BlockFormat::TQ2_0 | BlockFormat::Q2_0
        );
        if is_ternary && name == "token_embd.weight" {
            return BlockFormat::Q4_K;
        }
        let with_minimum = match (model.columns, base) {
            (Columns::Weighted, BlockFormat::Q4_0) => BlockFormat::Q4_1,
            (Columns::Weighted, BlockFormat::Q5_0) => BlockFormat::Q5_1,
            _ => return base,
        };
        if name.contains("ffn_down") && self.next_down(model, name) < model.n_layers / 8 {
            with_minimum
        } else {
            base
        }
    }

    /// The place of the next FFN down among those of the model.
    fn next_down(&mut self, model: ModelTraits, name: &str) -> usize {
        place(&mut self.down, model, name)
    }

    /// The format of the next matrix in a file of few bits, unless it is that of most.
    fn low(&mut self, model: ModelTraits, name: &str, low: LowMix) -> Option<BlockFormat> {
        let has_eight_experts = model.n_experts == 8;
        if is_value(name) {
            let index = self.value;
            self.value += 1;
            return Some(match low.value(model, index) {
                _ if has_eight_experts => BlockFormat::Q8_0,
                _ if model.is_70b() => BlockFormat::Q5_K,
                format => format,
            });
        }
        if name.contains("ffn_down") {
            let (index, n) = (self.next_down(model, name), model.n_layers);
            return match low {
                LowMix::Q3KM if index < n / 16 => Some(BlockFormat::Q5_K),
                LowMix::Q2KS if index < n / 8 => Some(BlockFormat::Q4_K),
                _ => low.base(),
            };
        }
        match name.strip_suffix(".weight").unwrap_or(name) {
            start if start.ends_with("attn_k") && has_eight_experts => Some(BlockFormat::Q8_0),
            start if start.ends_with("attn_output") => match low {
                LowMix::Q3KM | LowMix::Q2K if has_eight_experts => Some(BlockFormat::Q5_K),
                _ => low.base(),
            },
            _ => None,
        }
    }

    /// The format of the next matrix in a file of an IQ type, unless it is that of most.
    fn iq(&mut self, model: ModelTraits, name: &str, mix: IqMix) -> Option<BlockFormat> {
        if name == "token_embd.weight" {
            return mix.embedding();
        }
        if is_value(name) {
            return mix.value(model);
        }
        if name.contains("ffn_up") {
            return mix.gate_or_up(model, place(&mut self.up, model, name));
        }
        if name.contains("ffn_gate") {
            return mix.gate_or_up(model, place(&mut self.gate, model, name));
        }
        if name.contains("ffn_down") {
            let n_before = self.down;
            let index = self.next_down(model, name);
            // The least types count matrices, even of experts.
            let index = if mix.is_least() { n_before } else { index };
            return mix.down(model, index);
        }
        match name.strip_suffix(".weight").unwrap_or(name) {
            start if start.ends_with("attn_k") => mix.key(model),
            start if start.ends_with("attn_q") => mix.query(),
            start if start.ends_with("attn_output") => mix.attention_output(model),
            _ => None,
        }
    }

    /// The format of the next matrix in the mix around `base`.
    fn medium(&mut self, model: ModelTraits, name: &str, base: BlockFormat) -> BlockFormat {
        let has_eight_experts = model.n_experts == 8;
        let more_bits = |index, n| {
            if needs_more_bits(index, n) {
                BlockFormat::Q6_K
            } else {
                base
            }
        };
        if is_value(name) {
            let index = self.value;
            self.value += 1;
            return match more_bits(index, self.n_values) {
                _ if has_eight_experts => BlockFormat::Q8_0,
                BlockFormat::Q4_K if model.is_70b() => BlockFormat::Q5_K,
                format => format,
            };
        }
        if name.contains("ffn_down") {
            return more_bits(self.next_down(model, name), model.n_layers);
        }
        match name.strip_suffix(".weight").unwrap_or(name) {
            start if start.ends_with("attn_k") && has_eight_experts => BlockFormat::Q8_0,
            start if start.ends_with("attn_output") && has_eight_experts => BlockFormat::Q5_K,
            _ => base,
        }
    }
}

impl ModelTraits {
    /// By what llama.cpp knows models of 70 billion weights: their V is small.
    pub(super) fn is_70b(self) -> bool {
        self.n_layers == 80 && self.queries_per_kv > 1
    }
}

/// The place of the next of some matrices among those of the model, given how many came before.
fn place(n_before: &mut usize, model: ModelTraits, name: &str) -> usize {
    let index = match model.n_experts {
        0 | 1 => *n_before,
        // A layer of experts may have several.
        _ => layer_of(name).unwrap_or(0),
    };
    *n_before += 1;
    index
}

/// The first and the last eighth, and every third between them.
pub(super) fn needs_more_bits(index: usize, n: usize) -> bool {
    index < n / 8 || index >= 7 * n / 8 || (index - n / 8) % 3 == 2
}

/// Attention V, alone or joined with others.
fn is_value(name: &str) -> bool {
    let ends = ["attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"];
    ends.iter().any(|end| name.ends_with(end))
}

/// The number in a name such as `blk.3.attn_v.weight`.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    let rest = name.strip_prefix("blk.")?;
    rest.split_once('.')?.0.parse().ok()
}

/// Small matrices of RWKV, which llama.cpp does not quantize either.
const SMALL_OF_RWKV: [&str; 12] = [
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_first.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_lerp_fused.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
];

/// True for tensors that are F32 in every file: vectors, norms, and small matrices.
fn is_exact(tensor: &NamedShape) -> bool {
    let exact = [
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ssm_conv1d.weight",
        "lru_conv1d.weight",
        "ssm_dt_floor.weight",
        "position_embd.weight",
        "token_types.weight",
    ];
    let name = tensor.name.as_str();
    let mut exact = exact.iter().chain(&SMALL_OF_RWKV);
    tensor.shape.len() < 2 || exact.any(|end| name.ends_with(end)) || !name.ends_with(".weight")
}

/// The format of a tensor that should be of format `wanted`.
pub(super) fn fitting(tensor: &NamedShape, wanted: BlockFormat) -> BlockFormat {
    if is_exact(tensor) {
        return BlockFormat::F32;
    }
    let is_float = matches!(
        wanted,
        BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16
    );
    if is_of_convolutions(&tensor.name) && !is_float {
        return BlockFormat::F16;
    }
    let columns = tensor.shape.last().copied().unwrap_or(1);
    let fits = |format: &BlockFormat| columns.is_multiple_of(format.block_len());
    [wanted, of_smaller_blocks(wanted), BlockFormat::F16]
        .into_iter()
        .find(fits)
        .unwrap_or(BlockFormat::F32)
}

/// The next larger format of blocks of 32.
fn of_smaller_blocks(format: BlockFormat) -> BlockFormat {
    match format {
        BlockFormat::Q2_K | BlockFormat::Q3_K => BlockFormat::Q4_0,
        BlockFormat::TQ1_0 | BlockFormat::TQ2_0 => BlockFormat::Q4_0,
        BlockFormat::Q1_0 | BlockFormat::Q2_0 => BlockFormat::Q4_0,
        BlockFormat::IQ1_S | BlockFormat::IQ1_M | BlockFormat::IQ4_XS => BlockFormat::IQ4_NL,
        BlockFormat::IQ2_XXS | BlockFormat::IQ2_XS | BlockFormat::IQ2_S => BlockFormat::IQ4_NL,
        BlockFormat::IQ3_XXS | BlockFormat::IQ3_S => BlockFormat::IQ4_NL,
        BlockFormat::Q4_K => BlockFormat::Q5_0,
        BlockFormat::Q5_K => BlockFormat::Q5_1,
        _ => BlockFormat::Q8_0,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::collections::HashMap;

    use BlockFormat::*;

    use super::*;
    use crate::convert::FILE_TYPES;

    #[test]
    fn each_tensor_gets_a_format_that_fits() {
        let of = |name: &str, shape: &[usize], wanted| {
            let (name, shape) = (name.to_owned(), shape.to_vec());
            fitting(&NamedShape { name, shape }, wanted)
        };
        assert_eq!(of("blk.0.ffn_up.weight", &[8, 512], Q4_K), Q4_K);
        for (wanted, fits) in [(Q3_K, Q4_0), (Q4_K, Q5_0), (Q5_K, Q5_1), (Q6_K, Q8_0)] {
            assert_eq!(of("blk.0.ffn_up.weight", &[8, 96], wanted), fits);
            assert_eq!(of("blk.0.ffn_up.weight", &[8, 172], wanted), F16);
        }
        for wanted in [TQ1_0, TQ2_0, Q1_0, Q2_0] {
            assert_eq!(of("blk.0.ffn_up.weight", &[8, 512], wanted), wanted);
            assert_eq!(of("blk.0.ffn_up.weight", &[8, 96], wanted), Q4_0);
        }
        assert_eq!(of("blk.0.ffn_up.weight", &[8, 172], Q4_0), F16);
        assert_eq!(of("blk.0.attn_norm.weight", &[512], F16), F32);
        assert_eq!(of("blk.0.attn_q_norm.weight", &[4, 512], Q8_0), F32);
        assert_eq!(of("blk.0.ffn_gate_inp.weight", &[4, 512], Q8_0), F32);
        assert_eq!(of("blk.0.ffn_up_exps.bias", &[4, 512], Q8_0), F32);
        assert_eq!(of("blk.0.ssm_a", &[512, 16], F16), F32);
        let shares = "blk.0.time_mix_lerp_fused.weight";
        assert_eq!(of(shares, &[6, 1, 1, 512], Q8_0), F32);
    }

    #[test]
    fn the_output_matrix_takes_more_bits() {
        let head = |file_type: &str, columns: usize| {
            let tensor = NamedShape {
                name: "output.weight".to_owned(),
                shape: vec![8, columns],
            };
            formats(file_type.parse().unwrap(), LAYERS, &[tensor])[0]
        };
        for (file_type, wanted) in [
            ("q4_k", Q6_K),
            ("q8_0", Q8_0),
            ("f16", F16),
            ("q2_k_s", Q6_K),
            ("iq3_m", Q6_K),
            ("iq3_xs", Q6_K),
            ("iq3_xxs", Q5_K),
            ("iq2_m", Q5_K),
            ("iq2_xxs", Q5_K),
        ] {
            assert_eq!(head(file_type, 512), wanted, "{file_type}");
        }
        assert_eq!((head("iq2_m", 96), head("q4_k", 96)), (Q8_0, Q8_0));
    }

    const LAYERS: ModelTraits = ModelTraits {
        n_layers: 32,
        n_experts: 0,
        queries_per_kv: 8,
        columns: Columns::Alike,
    };

    /// The formats of these tensors of each layer.
    fn of_layers(file_type: &str, model: ModelTraits, tensor: &str) -> Vec<BlockFormat> {
        let tensors: Vec<NamedShape> = (0..model.n_layers)
            .map(|layer| NamedShape {
                name: format!("blk.{layer}.{tensor}.weight"),
                shape: vec![256, 256],
            })
            .collect();
        formats(file_type.parse().unwrap(), model, &tensors)
    }

    /// The same as letters.
    fn mixed(file_type: &str, model: ModelTraits, tensor: &str) -> String {
        let formats = of_layers(file_type, model, tensor);
        let digit = |format: &BlockFormat| format.name().chars().nth(1).unwrap();
        formats.iter().map(digit).collect()
    }

    /// Of a model of 32 layers (Llama 2 7B), `llama-quantize` stores V and FFN down of layers 0 to
    /// 3, 6, 9, … 27, and 28 to 31 as Q6_K.
    #[test]
    fn mixes_are_those_of_llama_cpp() {
        let model = ModelTraits {
            n_layers: 32,
            n_experts: 0,
            queries_per_kv: 8,
            columns: Columns::Alike,
        };
        let wanted = "66664464464464464464464464466666";
        for tensor in ["attn_v", "attn_qkv", "ffn_down"] {
            assert_eq!(mixed("q4_k_m", model, tensor), wanted);
            assert_eq!(mixed("Q5_K_M", model, tensor), wanted.replace('4', "5"));
        }
        for tensor in ["attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate"] {
            assert_eq!(mixed("q4_k_m", model, tensor), "4".repeat(32), "{tensor}");
        }
        assert_eq!(mixed("q4_k", model, "attn_v"), "4".repeat(32));
        let large = ModelTraits {
            n_layers: 80,
            ..model
        };
        assert!(!mixed("q4_k_m", large, "attn_v").contains('4'));
    }

    #[test]
    fn eight_experts_take_larger_attention() {
        let model = ModelTraits {
            n_layers: 8,
            n_experts: 8,
            queries_per_kv: 8,
            columns: Columns::Alike,
        };
        for tensor in ["attn_k", "attn_v"] {
            assert_eq!(mixed("q4_k_m", model, tensor), "8".repeat(8));
        }
        assert_eq!(mixed("q4_k_m", model, "attn_output"), "5".repeat(8));
        assert_eq!(mixed("q4_k_m", model, "ffn_down_exps"), "64464466");
    }

    #[test]
    fn embeddings_of_ternary_files_take_four_bits() {
        let names = ["token_embd", "output", "blk.0.attn_q"];
        let tensors = names.map(|name| NamedShape {
            name: format!("{name}.weight"),
            shape: vec![512, 256],
        });
        let model = ModelTraits {
            n_layers: 1,
            n_experts: 0,
            queries_per_kv: 1,
            columns: Columns::Alike,
        };
        for (file_type, embedding, base) in [
            ("tq1_0", Q4_K, TQ1_0),
            ("tq2_0", Q4_K, TQ2_0),
            ("q2_0", Q4_K, Q2_0),
            ("q1_0", Q1_0, Q1_0),
        ] {
            let found = formats(file_type.parse().unwrap(), model, &tensors);
            assert_eq!(found, [embedding, Q6_K, base], "{file_type}");
        }
    }

    /// As in llama.cpp, whose `Q4_0` and `Q5_0` lose much in the first FFN down matrices.
    #[test]
    fn the_first_down_matrices_take_minima_with_an_importance_matrix() {
        let alike = ModelTraits {
            n_layers: 17,
            n_experts: 0,
            queries_per_kv: 1,
            columns: Columns::Alike,
        };
        let weighted = ModelTraits {
            columns: Columns::Weighted,
            ..alike
        };
        let experts = ModelTraits {
            n_experts: 4,
            ..weighted
        };
        for (file_type, base, first) in [("q4_0", Q4_0, Q4_1), ("q5_0", Q5_0, Q5_1)] {
            let wanted = [&[first; 2][..], &[base; 15]].concat();
            assert_eq!(of_layers(file_type, weighted, "ffn_down"), wanted);
            assert_eq!(of_layers(file_type, experts, "ffn_down_exps"), wanted);
            assert_eq!(of_layers(file_type, weighted, "ffn_up"), [base; 17]);
            assert_eq!(of_layers(file_type, alike, "ffn_down"), [base; 17]);
        }
        for (file_type, base) in [("q4_1", Q4_1), ("q8_0", Q8_0), ("q4_k", Q4_K)] {
            assert_eq!(of_layers(file_type, weighted, "ffn_down"), [base; 17]);
        }
    }

    /// Every matrix has the type that it has in files made with `llama-quantize`:
    /// `tests/fixtures/gguf/types`.
    #[test]
    fn types_are_those_of_files_made_with_llama_quantize() {
        let folder = model_tests::fixture("gguf/types");
        let mut n_files = 0;
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let (mut values, mut tensors, mut wanted) = (HashMap::new(), Vec::new(), Vec::new());
            for line in text.lines().filter(|line| !line.starts_with('#')) {
                let words: Vec<&str> = line.split('\t').collect();
                if let [name, shape, format] = words[..]
                    && shape.contains('x')
                {
                    let shape = shape.split('x').map(|n| n.parse().unwrap()).collect();
                    let name = name.to_owned();
                    tensors.push(NamedShape { name, shape });
                    wanted.push(format.to_owned());
                } else {
                    let numbers = words[1..].iter().map(|n| n.parse().unwrap());
                    values.insert(words[0], numbers.collect::<Vec<usize>>());
                }
            }
            let number = values["type"][0];
            let file_type = FILE_TYPES.iter().find(|t| t.number as usize == number);
            let model = ModelTraits {
                n_layers: values["layers"][0],
                n_experts: values["experts"][0],
                queries_per_kv: values["heads"][0] / values["heads"][1],
                columns: if values.contains_key("imatrix") {
                    Columns::Weighted
                } else {
                    Columns::Alike
                },
            };
            let found = formats(*file_type.unwrap(), model, &tensors);
            for ((tensor, found), wanted) in tensors.iter().zip(found).zip(wanted) {
                let name = &tensor.name;
                assert_eq!(found.name(), wanted, "{}: {name}", path.display());
            }
            n_files += 1;
        }
        assert!(n_files >= 29, "{n_files} files");
    }

    /// Biases have no place among the matrices of a model.
    #[test]
    fn biases_are_not_counted() {
        let tensors = |names: &[&str]| -> Vec<NamedShape> {
            let each = (0..32).flat_map(|layer| names.iter().map(move |name| (layer, name)));
            let each = each.map(|(layer, name)| NamedShape {
                name: format!("blk.{layer}.ffn_down.{name}"),
                shape: vec![256; if *name == "bias" { 1 } else { 2 }],
            });
            each.collect()
        };
        for file_type in ["q4_k_m", "iq3_m", "q2_k_s"] {
            let file_type = file_type.parse().unwrap();
            let alone = formats(file_type, LAYERS, &tensors(&["weight"]));
            let mut both = formats(file_type, LAYERS, &tensors(&["bias", "weight"]));
            both.retain(|format| *format != F32);
            assert_eq!(both, alone);
        }
    }

    #[test]
    fn layers_are_read_from_names() {
        assert_eq!(layer_of("blk.12.attn_v.weight"), Some(12));
        assert_eq!(layer_of("output.weight"), None);
    }
}
