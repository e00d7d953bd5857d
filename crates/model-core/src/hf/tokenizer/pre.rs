//! The algorithm that a `tokenizer.json` describes, and its steps of preparing and cutting texts.
//!
//! GGUF names expressions, `tokenizer.json` spells them out: those that have a name get it, so that
//! other programs can read the file, all others are kept as they are. Invariant: a step that cannot
//! be kept is an error that names it.

use super::super::{HfConfig, Keys, ModelFileError};
use crate::gguf::Array;
use crate::tokenizer::Normalizer;
use crate::tokenizer::pre_tokenizers::{KnownName, SPELLED_OUT, named};
use crate::tokenizer::words::{DIGIT, GPT2, PUNCTUATION, TRIPLE};

/// The steps of Falcon.
const FALCON: [&str; 4] = [PUNCTUATION, GPT2, r"\p{N}+", TRIPLE];

/// An algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Pieces of text that fall back to bytes.
    Spm,
    /// Pieces of bytes.
    Bpe,
    /// Words, cut from the left.
    WordPiece,
    /// Words, cut where scores add up to the most.
    Unigram,
}

impl Kind {
    pub(super) fn read(json: &HfConfig) -> Result<Self, ModelFileError> {
        let key = "model.type";
        // Old files leave the type of a BPE out.
        match json.optional_text(key)? {
            Some("BPE") | None if json.optional_flag("model.byte_fallback")? == Some(true) => {
                check_normalizer(json, &["Prepend", "Replace"])?;
                Ok(Self::Spm)
            }
            Some("BPE") | None => Ok(Self::Bpe),
            Some("WordPiece") => {
                check_normalizer(json, &["BertNormalizer"])?;
                word_piece_letters(json)?;
                match json.optional_text("pre_tokenizer.type")? {
                    Some("BertPreTokenizer") => Ok(Self::WordPiece),
                    _ => Err(json.wrong("pre_tokenizer.type", "BertPreTokenizer")),
                }
            }
            Some("Unigram") => {
                super::unigram::check(json)?;
                Ok(Self::Unigram)
            }
            Some(_) => Err(json.wrong(key, "one of: BPE, WordPiece, Unigram")),
        }
    }

    /// `tokenizer.ggml.model`
    pub(super) fn gguf_model(self) -> &'static str {
        match self {
            Self::Spm => "llama",
            Self::Bpe => "gpt2",
            Self::WordPiece => "bert",
            Self::Unigram => "t5",
        }
    }

    /// `tokenizer.ggml.pre`, but for BPE, whose [`WordCuts`] says it.
    pub(super) fn gguf_pre(self) -> Option<&'static str> {
        match self {
            Self::Spm | Self::Unigram => Some("default"),
            Self::Bpe => None,
            Self::WordPiece => Some("bert-bge"),
        }
    }
}

/// True if WordPiece puts a text into small letters.
pub(super) fn lowercase(json: &HfConfig) -> Result<bool, ModelFileError> {
    let key = "normalizer.lowercase";
    let lowercase = json.optional_flag(key)?;
    lowercase.ok_or_else(|| json.missing(key, "true or false"))
}

/// Settings without keys in GGUF: accents go where capitals do.
fn word_piece_letters(json: &HfConfig) -> Result<(), ModelFileError> {
    let lowercase = lowercase(json)?;
    let wanted = [
        ("normalizer.handle_chinese_chars", true),
        ("normalizer.strip_accents", lowercase),
    ];
    for (key, wanted) in wanted {
        match json.optional_flag(key)? {
            Some(found) if found == wanted => {}
            None if key == "normalizer.strip_accents" => {}
            _ => return Err(json.wrong(key, wanted.to_string())),
        }
    }
    match json.optional_flag("normalizer.clean_text")? {
        Some(false) => Err(json.wrong("normalizer.clean_text", "true")),
        _ => Ok(()),
    }
}

/// Keys of an object and, where it is a sequence, of its parts.
pub(super) fn parts(json: &HfConfig, at: &str, list: &str) -> Vec<String> {
    if json.value(at).is_none() {
        return Vec::new();
    }
    match json
        .value(&format!("{at}.{list}"))
        .and_then(|v| v.as_array())
    {
        Some(parts) => (0..parts.len())
            .map(|i| format!("{at}.{list}.{i}"))
            .collect(),
        None => vec![at.to_owned()],
    }
}

fn check_normalizer(json: &HfConfig, known: &[&str]) -> Result<(), ModelFileError> {
    for part in parts(json, "normalizer", "normalizers") {
        let key = format!("{part}.type");
        match json.optional_text(&key)? {
            Some(kind) if known.contains(&kind) => {}
            _ => return Err(json.wrong(&key, format!("one of: {}", known.join(", ")))),
        }
    }
    Ok(())
}

/// The steps in which byte-level BPE prepares a text and cuts it into words.
#[derive(Debug, Default)]
pub(super) struct WordCuts {
    /// Each as `tokenizer.json` writes it.
    normalizers: Vec<String>,
    /// One after another.
    expressions: Vec<String>,
    whole_words: bool,
}

impl WordCuts {
    pub(super) fn read(json: &HfConfig) -> Result<Self, ModelFileError> {
        let mut cutting = Self {
            whole_words: json.optional_flag("model.ignore_merges")? == Some(true),
            ..Self::default()
        };
        for part in parts(json, "normalizer", "normalizers") {
            let step = json
                .value(&part)
                .map(ToString::to_string)
                .unwrap_or_default();
            Normalizer::from_json(&step)
                .map_err(|_| json.wrong(&format!("{part}.type"), "a normalizer that is known"))?;
            cutting.normalizers.push(step);
        }
        let mut is_byte_level = false;
        for part in parts(json, "pre_tokenizer", "pretokenizers") {
            let key = format!("{part}.type");
            match json.optional_text(&key)? {
                Some("ByteLevel") => {
                    is_byte_level = true;
                    cutting.take_byte_level(json, &part)?;
                }
                Some("Digits") => {
                    let each = json.optional_flag(&format!("{part}.individual_digits"))?;
                    let digits = if each == Some(true) { DIGIT } else { r"\p{N}+" };
                    cutting.expressions.push(digits.to_owned());
                }
                Some("Punctuation") => {
                    let runs = PUNCTUATION.trim_end_matches('+');
                    let expression = match json.optional_text(&format!("{part}.behavior"))? {
                        Some("Contiguous") => PUNCTUATION,
                        Some("Isolated") | None => runs,
                        Some(_) => {
                            let key = format!("{part}.behavior");
                            return Err(json.wrong(&key, "Isolated or Contiguous"));
                        }
                    };
                    cutting.expressions.push(expression.to_owned());
                }
                Some("Split") => cutting.expressions.push(split(json, &part)?),
                _ => {
                    let known = "one of: Split, Digits, Punctuation, ByteLevel";
                    return Err(json.wrong(&key, known));
                }
            }
        }
        if !is_byte_level {
            return Err(json.missing("pre_tokenizer", "ByteLevel in it, or 'model.byte_fallback'"));
        }
        if cutting.expressions == FALCON {
            // Falcon's merges join no space and digit, so that the name in GGUF does without this.
            cutting.expressions.remove(2);
        }
        Ok(cutting)
    }

    fn take_byte_level(&mut self, json: &HfConfig, part: &str) -> Result<(), ModelFileError> {
        let key = format!("{part}.add_prefix_space");
        if json.optional_flag(&key)? == Some(true) {
            if !self.expressions.is_empty() {
                return Err(json.wrong(&key, "false where another step has cut the text"));
            }
            self.normalizers
                .push(r#"{"type":"PrefixSpace"}"#.to_owned());
        }
        if json.optional_flag(&format!("{part}.use_regex"))? != Some(false) {
            self.expressions.push(GPT2.to_owned());
        }
        Ok(())
    }

    /// Writes it in the keys of GGUF, and in our own where GGUF has none.
    pub(super) fn write(self, keys: &mut Keys) {
        // Of the names, one that treats whole words so; or else any, which our own key corrects.
        let all: Vec<KnownName> = named(&self.expressions).collect();
        let exact = all
            .iter()
            .find(|named| named.whole_words == self.whole_words);
        let name = exact
            .or(all.first())
            .map_or(SPELLED_OUT, |named| named.name);
        keys.set_whole("tokenizer.ggml.pre", name);
        if all.is_empty() {
            let expressions = Array::String(self.expressions);
            keys.set_whole("tokenizer.ggml.pre_expressions", expressions);
        }
        if exact.is_none() {
            keys.set_whole("tokenizer.ggml.ignore_merges", self.whole_words);
        }
        if !self.normalizers.is_empty() {
            let normalizers = Array::String(self.normalizers);
            keys.set_whole("tokenizer.ggml.normalizers", normalizers);
        }
    }
}

/// The expression of a `Split`, whose matches and what lies between them are words.
fn split(json: &HfConfig, part: &str) -> Result<String, ModelFileError> {
    let key = format!("{part}.pattern.Regex");
    let expression = match json.optional_text(&key)? {
        Some(expression) => expression.to_owned(),
        None => {
            let text = json.optional_text(&format!("{part}.pattern.String"))?;
            let text = text.ok_or_else(|| json.missing(&key, "an expression"))?;
            regex_syntax::escape(text)
        }
    };
    let behavior = format!("{part}.behavior");
    let inverts = json.optional_flag(&format!("{part}.invert"))? == Some(true);
    match (json.optional_text(&behavior)?, inverts) {
        // What the expression does not match would be dropped: published ones match everything.
        (Some("Isolated") | None, _) | (Some("Removed"), true) => Ok(expression),
        (Some("Contiguous"), false) => Ok(format!("(?:{expression})+")),
        _ => Err(json.wrong(&behavior, "Isolated, Contiguous, or Removed with 'invert'")),
    }
}

/// True if a text gets a space before it.
pub(super) fn space_prefix(json: &HfConfig, kind: Kind) -> Option<bool> {
    let is = |part: &String, wanted: &str| {
        json.optional_text(&format!("{part}.type")).ok().flatten() == Some(wanted)
    };
    let never = |part: &String| {
        let scheme = json.optional_text(&format!("{part}.prepend_scheme"));
        let old = json.optional_flag(&format!("{part}.add_prefix_space"));
        scheme.ok().flatten() == Some("never") || old.ok().flatten() == Some(false)
    };
    match kind {
        Kind::Spm | Kind::Unigram => {
            let prepends = parts(json, "normalizer", "normalizers")
                .iter()
                .any(|part| is(part, "Prepend"));
            let metaspace = parts(json, "pre_tokenizer", "pretokenizers")
                .iter()
                .any(|part| is(part, "Metaspace") && !never(part));
            Some(prepends || metaspace)
        }
        Kind::Bpe | Kind::WordPiece => None,
    }
}
