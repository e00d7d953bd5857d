//! Which files of a repository make one model, and which model is meant.
//!
//! A repository of GGUF files usually holds one model in several quantizations, each of one file or
//! of several parts. Invariant: the files of a variant are in the order of its parts. Knows file
//! names only.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{HubError, Size};
use crate::name::RepoId;

/// The label of a model of safetensors files.
const SAFETENSORS: &str = "safetensors";

/// The choice without a quantization: the first of these that there is. A common compromise of size
/// and accuracy comes first, then its neighbours.
const PREFERRED: [&str; 30] = [
    "Q4_K_M",
    "UD-Q4_K_XL",
    "Q4_K_XL",
    "Q4_K_L",
    "Q4_K_S",
    "MXFP4",
    "MXFP4_MOE",
    "IQ4_NL",
    "IQ4_XS",
    "Q4_1",
    "Q4_0",
    "Q5_K_M",
    "Q5_K_S",
    "Q5_0",
    "Q6_K",
    "Q8_0",
    "Q3_K_L",
    "Q3_K_M",
    "Q3_K_S",
    "BF16",
    "F16",
    "FP16",
    "F32",
    "Q2_K",
    "IQ3_M",
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_M",
    "IQ2_S",
    "TQ2_0",
];

/// Files of a model directory besides weights and `config.json`.
const SETTINGS: [&str; 15] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "rwkv_vocab_v20230424.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
];

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoFile {
    /// Its path in the repository, with `/`.
    pub path: String,
    /// Its size, where it is known.
    pub n_bytes: Option<u64>,
}

/// The format of a model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One GGUF file, or all parts of a split one.
    Gguf,
    /// Safetensors files, `config.json` and the tokenizer's files.
    Safetensors,
}

/// The files of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The quantization, or else the file's name without extension; `safetensors` for a directory.
    pub label: String,
    /// The format of the files.
    pub format: Format,
    /// Its files. A split model begins with its first part, a directory ends with `config.json`.
    pub files: Vec<RepoFile>,
    /// Parts of the weights, as their names promise.
    n_parts: usize,
    /// Parts of the weights among the files.
    n_found: usize,
}

impl Variant {
    /// Bytes of all files, where all sizes are known.
    pub fn n_bytes(&self) -> Option<u64> {
        self.files.iter().map(|file| file.n_bytes).sum()
    }

    /// Its label and size.
    pub fn size(&self) -> VariantSize {
        VariantSize {
            label: self.label.clone(),
            n_bytes: self.n_bytes(),
        }
    }

    /// Checks that all parts are there.
    pub(crate) fn check(&self, repo: &RepoId) -> Result<(), HubError> {
        if self.is_complete() {
            return Ok(());
        }
        let first = self.files.first().map(|file| file.path.clone());
        Err(HubError::MissingParts {
            repo: repo.clone(),
            file: first.unwrap_or_default(),
            n_found: self.n_found,
            n_parts: self.n_parts,
        })
    }

    /// True if all parts are there.
    pub(crate) fn is_complete(&self) -> bool {
        self.n_found == self.n_parts
    }

    /// The name of the first file, without part number and extension.
    pub(crate) fn stem(&self) -> String {
        let first = self.files.first();
        first.map_or(String::new(), |file| Part::of(&file.path).stem.to_owned())
    }

    /// The match of `quant` with its label or the name of its file.
    fn is_called(&self, quant: &str) -> VariantMatch {
        let label = &self.label;
        if label.eq_ignore_ascii_case(quant) {
            VariantMatch::Label
        } else if let Some(plain) = label.strip_prefix("UD-")
            && plain.eq_ignore_ascii_case(quant)
        {
            VariantMatch::PlainLabel
        } else if self.format == Format::Gguf {
            let stem = self.stem();
            let file = quant.strip_suffix(".gguf").unwrap_or(quant);
            if stem.eq_ignore_ascii_case(file) {
                VariantMatch::File
            } else {
                VariantMatch::Otherwise
            }
        } else {
            VariantMatch::Otherwise
        }
    }
}

/// The way a variant and a quantization that was asked for match.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VariantMatch {
    Label,
    PlainLabel,
    File,
    Otherwise,
}

/// The label of a variant, and its size where it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariantSize {
    /// The label.
    pub label: String,
    /// Bytes of all its files.
    pub n_bytes: Option<u64>,
}

impl fmt::Display for VariantSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.n_bytes {
            Some(n) => write!(f, "{} ({})", self.label, Size(n)),
            None => f.write_str(&self.label),
        }
    }
}

/// All models that these files make.
pub(crate) fn variants(files: &[RepoFile]) -> Vec<Variant> {
    let mut split: BTreeMap<_, Vec<&RepoFile>> = BTreeMap::new();
    for file in files.iter().filter(|file| is_model_gguf(&file.path)) {
        let Part {
            folder,
            stem,
            n_parts,
            ..
        } = Part::of(&file.path);
        split.entry((folder, stem, n_parts)).or_default().push(file);
    }
    let gguf = split
        .into_iter()
        .map(|((folder, stem, n_parts), mut parts)| {
            parts.sort_by_key(|file| Part::of(&file.path).number);
            Variant {
                label: label(folder, stem),
                format: Format::Gguf,
                n_found: parts.len(),
                n_parts,
                files: parts.into_iter().cloned().collect(),
            }
        });
    gguf.chain(directory(files)).collect()
}

/// The variant that is meant.
///
/// # Errors
/// If there is none, or more than one.
pub(crate) fn choose<'a>(
    repo: &RepoId,
    variants: &'a [Variant],
    quant: Option<&str>,
) -> Result<&'a Variant, HubError> {
    let missing = |quant: &str| HubError::NoVariant {
        repo: repo.clone(),
        quant: quant.to_owned(),
        variants: variants.iter().map(Variant::size).collect(),
    };
    let one_of = |found: Vec<&'a Variant>, quant: &str| match found[..] {
        [one] => Ok(one),
        [] => Err(missing(quant)),
        _ => Err(HubError::Ambiguous {
            repo: repo.clone(),
            quant: quant.to_owned(),
            files: found.iter().map(|variant| variant.stem()).collect(),
        }),
    };
    if let Some(quant) = quant {
        let called = |how| {
            let is_called = |v: &&Variant| v.is_called(quant) == how;
            variants.iter().filter(is_called).collect::<Vec<_>>()
        };
        let ways = [
            VariantMatch::Label,
            VariantMatch::PlainLabel,
            VariantMatch::File,
        ];
        let found = ways.map(called).into_iter().find(|found| !found.is_empty());
        return one_of(found.unwrap_or_default(), quant);
    }
    for label in PREFERRED {
        let found: Vec<&Variant> = variants.iter().filter(|v| v.label == label).collect();
        if !found.is_empty() {
            return one_of(found, label);
        }
    }
    let others = variants.iter().filter(|v| v.format == Format::Gguf);
    let smallest = others.min_by_key(|v| v.n_bytes().unwrap_or(u64::MAX));
    let chosen = smallest.or_else(|| variants.iter().find(|v| v.format == Format::Safetensors));
    chosen.ok_or_else(|| missing("default"))
}

/// A model directory: weights, settings, and `config.json` last.
fn directory(files: &[RepoFile]) -> Option<Variant> {
    let named = |name: &str| files.iter().find(|file| file.path == name);
    let config = named("config.json")?;
    let is_shard = |file: &&RepoFile| {
        let part = Part::of(&file.path);
        let is_weights = file.path.ends_with(".safetensors") && part.folder.is_empty();
        is_weights && part.stem == "model" && part.number > 0
    };
    let mut weights: Vec<&RepoFile> = files.iter().filter(is_shard).collect();
    let index = if weights.is_empty() {
        None
    } else {
        named("model.safetensors.index.json")
    };
    if weights.is_empty() {
        weights.extend(named("model.safetensors"));
    }
    let n_parts = Part::of(&weights.first()?.path).n_parts;
    let is_setting =
        |file: &&RepoFile| SETTINGS.contains(&file.path.as_str()) || is_module_config(&file.path);
    let settings = files.iter().filter(is_setting);
    Some(Variant {
        label: SAFETENSORS.to_owned(),
        format: Format::Safetensors,
        n_found: weights.len(),
        n_parts,
        files: weights
            .into_iter()
            .chain(index)
            .chain(settings)
            .chain([config])
            .cloned()
            .collect(),
    })
}

/// True if this is `1_Pooling/config.json` or another module of sentence-transformers.
fn is_module_config(path: &str) -> bool {
    let folder = path.strip_suffix("/config.json").unwrap_or_default();
    folder.starts_with(|c: char| c.is_ascii_digit()) && !folder.contains('/')
}

/// True if a file is a language model: neither a vision projector nor an importance matrix.
fn is_model_gguf(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    name.ends_with(".gguf") && !name.starts_with("mmproj") && !name.contains("imatrix")
}

/// The pieces of a file's path.
struct Part<'a> {
    folder: &'a str,
    /// The name without part number and extension.
    stem: &'a str,
    /// From 1; 0 for a file that is whole.
    number: usize,
    n_parts: usize,
}

impl<'a> Part<'a> {
    fn of(path: &'a str) -> Self {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        let whole = Self {
            folder,
            stem,
            number: 0,
            n_parts: 1,
        };
        // NAME-00001-of-00003
        let numbered = || {
            let (rest, n_parts) = stem.rsplit_once("-of-")?;
            let (stem, number) = rest.rsplit_once('-')?;
            let parse = |digits: &str| match digits.len() {
                5 => digits.parse::<usize>().ok().filter(|&n| n > 0),
                _ => None,
            };
            Some(Self {
                folder,
                stem,
                number: parse(number)?,
                n_parts: parse(n_parts)?,
            })
        };
        numbered().unwrap_or(whole)
    }
}

/// The quantization in a file's name, or else in its folder's, or else the name.
fn label(folder: &str, stem: &str) -> String {
    let found = quantization(stem).or_else(|| quantization(folder.rsplit('/').next()?));
    found.unwrap_or_else(|| stem.to_owned())
}

/// The last piece of a name that looks like a quantization, in upper case.
fn quantization(name: &str) -> Option<String> {
    let upper = name.to_ascii_uppercase();
    let pieces: Vec<&str> = upper.split(['-', '.']).collect();
    let at = pieces.iter().rposition(|piece| is_quantization(piece))?;
    let piece = pieces[at];
    let before = at.checked_sub(1).map(|i| pieces[i]);
    Some(match before {
        Some("UD") => format!("UD-{piece}"),
        _ => piece.to_owned(),
    })
}

fn is_quantization(piece: &str) -> bool {
    let floats = ["F16", "BF16", "F32", "FP16", "FP32"];
    let has_fp4 = ["MXFP4", "NVFP4"]
        .iter()
        .any(|name| piece.starts_with(name));
    if floats.contains(&piece) || has_fp4 {
        return true;
    }
    let rest = piece.strip_prefix(['I', 'T']).unwrap_or(piece);
    let rest = rest.strip_prefix('Q').unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    rest.starts_with(|c: char| c.is_ascii_digit()) && rest.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<RepoFile> {
        let file = |(i, path): (usize, &&str)| RepoFile {
            path: (*path).to_owned(),
            n_bytes: Some(100 - i as u64),
        };
        paths.iter().enumerate().map(file).collect()
    }

    fn repo() -> RepoId {
        "a/b".parse().unwrap()
    }

    /// Paths of the files that are chosen.
    fn chosen(paths: &[&str], quant: Option<&str>) -> Result<Vec<String>, String> {
        let all = variants(&files(paths));
        let one = choose(&repo(), &all, quant).map_err(|error| error.to_string())?;
        one.check(&repo()).map_err(|error| error.to_string())?;
        Ok(one.files.iter().map(|file| file.path.clone()).collect())
    }

    #[test]
    fn labels_are_the_quantization_in_the_name() {
        let cases = [
            ("m-Q4_K_M.gguf", "Q4_K_M"),
            ("qwen2-0_5b-instruct-q5_0.gguf", "Q5_0"),
            ("m.Q8_0.gguf", "Q8_0"),
            ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
            ("IQ4_XS/m-00001-of-00001.gguf", "IQ4_XS"),
            ("m-BF16-00001-of-00001.gguf", "BF16"),
            ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
            ("Qwen3-8B-NVFP4.gguf", "NVFP4"),
            ("tiny-llama.gguf", "tiny-llama"),
            ("Qwen3-4B.gguf", "Qwen3-4B"),
        ];
        for (path, wanted) in cases {
            assert_eq!(variants(&files(&[path]))[0].label, wanted, "{path}");
        }
    }

    #[test]
    fn a_quantization_is_found_in_any_case_and_with_all_parts_in_order() {
        let paths = [
            "m-Q8_0.gguf",
            "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf",
            "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf",
            "m-UD-Q2_K_XL.gguf",
            "mmproj-F16.gguf",
            "m.imatrix.gguf",
            "README.md",
        ];
        let both = [
            "Q4_K_M/m-Q4_K_M-00001-of-00002.gguf",
            "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf",
        ];
        assert_eq!(chosen(&paths, None).unwrap(), both);
        assert_eq!(chosen(&paths, Some("q4_k_m")).unwrap(), both);
        assert_eq!(chosen(&paths, Some("M-q8_0")).unwrap(), ["m-Q8_0.gguf"]);
        assert_eq!(
            chosen(&paths, Some("m-Q8_0.gguf")).unwrap(),
            ["m-Q8_0.gguf"]
        );
        assert_eq!(
            chosen(&paths, Some("q2_k_xl")).unwrap(),
            ["m-UD-Q2_K_XL.gguf"]
        );
        assert_eq!(
            chosen(&paths, Some("f16")).unwrap_err(),
            "'a/b' has no model 'f16'; it has Q8_0 (100 bytes), UD-Q2_K_XL (97 bytes), Q4_K_M (197 \
             bytes)"
        );
        assert_eq!(
            chosen(&["m-00002-of-00003.gguf", "m-00001-of-00003.gguf"], None).unwrap_err(),
            "'a/b': m-00001-of-00003.gguf has 2 of 3 parts"
        );
        assert_eq!(
            chosen(&["x-Q4_K_M.gguf", "y-Q4_K_M.gguf"], None).unwrap_err(),
            "'a/b' has several models 'Q4_K_M'; name one of the files: x-Q4_K_M, y-Q4_K_M"
        );
        assert_eq!(
            chosen(&["x-IQ1_S.gguf", "y-IQ2_M.gguf"], None).unwrap(),
            ["y-IQ2_M.gguf"]
        );
    }

    #[test]
    fn a_directory_is_weights_settings_and_config_last() {
        let paths = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "original/model.safetensors",
            "tokenizer.json",
            "1_Pooling/config.json",
            "onnx/config.json",
            "pytorch_model.bin",
        ];
        let wanted = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "1_Pooling/config.json",
            "config.json",
        ];
        assert_eq!(chosen(&paths, None).unwrap(), wanted);
        assert_eq!(chosen(&paths, Some("safetensors")).unwrap(), wanted);
        let lacking = ["config.json", "model-00001-of-00002.safetensors"];
        assert!(
            chosen(&lacking, None)
                .unwrap_err()
                .ends_with("has 1 of 2 parts")
        );
        // GGUF first, where a repository has both.
        let both = ["config.json", "model.safetensors", "m-F16.gguf"];
        assert_eq!(chosen(&both, None).unwrap(), ["m-F16.gguf"]);
        assert_eq!(
            chosen(&both, Some("safetensors")).unwrap(),
            ["model.safetensors", "config.json"]
        );
        assert!(variants(&files(&["pytorch_model.bin", "config.json"])).is_empty());
    }
}
