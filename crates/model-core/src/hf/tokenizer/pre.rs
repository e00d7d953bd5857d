//! Which algorithm a `tokenizer.json` describes, and the GGUF name of its pre-tokenizer.
//!
//! GGUF names expressions, `tokenizer.json` spells them out; [`EXPRESSIONS`] says which is which.
//! Invariant: an expression that is not in the table is an error that shows it.

use super::super::{HfConfig, ModelFileError};

/// An algorithm with what sets it apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Pieces of text that fall back to bytes.
    Spm,
    /// Pieces of bytes, behind the pre-tokenizer of this name.
    Bpe(&'static str),
    /// Words, cut from the left.
    WordPiece,
    /// Words, cut where scores add up to the most.
    Unigram,
}

/// Expressions that cut words, in the spelling of published files, with the name that GGUF gives
/// them: first where a word that is a token is taken whole, then where it is not.
const EXPRESSIONS: &[(&str, [Option<&str>; 2])] = &[
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        [Some("llama-bpe"), Some("dbrx")],
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        [None, Some("qwen2")],
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        [None, Some("qwen35")],
    ),
    (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        [None, Some("gpt-2")],
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        [Some("gpt-4o"), Some("gpt-4o")],
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        [Some("tekken"), Some("tekken")],
    ),
];

impl Kind {
    pub(super) fn read(json: &HfConfig) -> Result<Self, ModelFileError> {
        let key = "model.type";
        // Old files leave the type of a BPE out.
        match json.optional_text(key)? {
            Some("BPE") | None if json.optional_flag("model.byte_fallback")? == Some(true) => {
                check_normalizer(json, &["Prepend", "Replace"])?;
                Ok(Self::Spm)
            }
            Some("BPE") | None => {
                check_normalizer(json, &["NFC"])?;
                pre_tokenizer(json).map(Self::Bpe)
            }
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
            Self::Bpe(_) => "gpt2",
            Self::WordPiece => "bert",
            Self::Unigram => "t5",
        }
    }

    /// `tokenizer.ggml.pre`
    pub(super) fn gguf_pre(self) -> &'static str {
        match self {
            Self::Spm | Self::Unigram => "default",
            Self::Bpe(name) => name,
            Self::WordPiece => "bert-bge",
        }
    }
}

/// Whether WordPiece puts a text into small letters.
pub(super) fn lowercase(json: &HfConfig) -> Result<bool, ModelFileError> {
    let key = "normalizer.lowercase";
    let lowercase = json.optional_flag(key)?;
    lowercase.ok_or_else(|| json.missing(key, "true or false"))
}

/// What GGUF has no keys for: accents go where capitals do.
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

/// The GGUF name of a byte-level pre-tokenizer.
fn pre_tokenizer(json: &HfConfig) -> Result<&'static str, ModelFileError> {
    if is_falcon(json)? {
        return Ok("falcon");
    }
    let whole = json.optional_flag("model.ignore_merges")? == Some(true);
    let mut digits = false;
    let mut expression: Option<(String, &str)> = None;
    let mut byte_level = false;
    for part in parts(json, "pre_tokenizer", "pretokenizers") {
        let key = format!("{part}.type");
        match json.optional_text(&key)? {
            Some("ByteLevel") => {
                byte_level = true;
                if json.optional_flag(&format!("{part}.add_prefix_space"))? == Some(true) {
                    return Err(json.wrong(&format!("{part}.add_prefix_space"), "false"));
                }
                let own = json.optional_flag(&format!("{part}.use_regex"))? != Some(false);
                if own && expression.is_none() {
                    // What the type has built in.
                    expression = Some((key, GPT2));
                }
            }
            Some("Digits") => {
                digits = json.optional_flag(&format!("{part}.individual_digits"))? == Some(true);
                if !digits {
                    return Err(json.wrong(&format!("{part}.individual_digits"), "true"));
                }
            }
            Some("Split") => {
                let key = format!("{part}.pattern.Regex");
                let wanted = "an expression";
                let own = json.optional_text(&key)?;
                let own = own.ok_or_else(|| json.missing(&key, wanted))?;
                if expression.is_some() {
                    return Err(json.wrong(&key, "the only expression"));
                }
                expression = Some((key, own));
            }
            _ => return Err(json.wrong(&key, "one of: Split, Digits, ByteLevel")),
        }
    }
    if !byte_level {
        return Err(json.missing("pre_tokenizer", "ByteLevel in it, or 'model.byte_fallback'"));
    }
    let Some((key, expression)) = expression else {
        return Err(json.missing("pre_tokenizer.pattern.Regex", "an expression"));
    };
    let known = EXPRESSIONS.iter().find(|(text, _)| *text == expression);
    let names = known.map(|(_, [whole_word, merged])| if whole { whole_word } else { merged });
    match (names, digits) {
        (Some(Some(name)), false) => Ok(name),
        (Some(Some("gpt-2")), true) => Ok("starcoder"),
        _ => Err(ModelFileError::WrongKey {
            file: json.file().to_owned(),
            key,
            found: format!("{expression:?}"),
            expected: "an expression that a known pre-tokenizer has".to_owned(),
        }),
    }
}

/// Whether these are the steps of Falcon: runs of punctuation, what a `ByteLevel` has built in,
/// runs of digits, and every three of them.
fn is_falcon(json: &HfConfig) -> Result<bool, ModelFileError> {
    let at = |i: usize, key: &str| format!("pre_tokenizer.pretokenizers.{i}.{key}");
    let text = |i: usize, key: &str| json.optional_text(&at(i, key));
    let flag = |i: usize, key: &str| json.optional_flag(&at(i, key));
    if json.value(&at(4, "type")).is_some() || text(0, "type")? != Some("Punctuation") {
        return Ok(false);
    }
    let types = [text(1, "type")?, text(2, "type")?, text(3, "type")?];
    Ok(types == ["ByteLevel", "Digits", "Split"].map(Some)
        && text(0, "behavior")? == Some("Contiguous")
        && flag(1, "add_prefix_space")? == Some(false)
        && flag(1, "use_regex")? != Some(false)
        && flag(2, "individual_digits")? == Some(false)
        && text(3, "pattern.Regex")? == Some("[0-9][0-9][0-9]")
        && text(3, "behavior")? == Some("Isolated")
        && flag(3, "invert")? != Some(true)
        && json.optional_flag("model.ignore_merges")? != Some(true))
}

/// The expression that a `ByteLevel` pre-tokenizer has built in.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Whether a text gets a space before it.
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
        Kind::Bpe(_) | Kind::WordPiece => None,
    }
}
