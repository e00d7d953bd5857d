//! [`Normalizer`]: what a `tokenizer.json` does to a text before it is cut.
//!
//! Invariant: a normalizer that is not known is an error that names it. GGUF has no key for them:
//! files that llama.cpp wrote have none.

use std::borrow::Cow;

use serde_json::Value;
use unicode_normalization::UnicodeNormalization;

use super::TokenizerError;

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
    Lowercase,
}

/// A step of preparing a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Normalizer(NormalizerStep);

#[derive(Clone, Debug, PartialEq, Eq)]
enum NormalizerStep {
    Form(Form),
    /// Replaces every occurrence of a text.
    Replace {
        from: String,
        to: String,
    },
    /// Puts a text before one that is not empty.
    Prepend(String),
    /// Puts a space before a text that begins with no white space.
    PrefixSpace,
}

impl Normalizer {
    /// The normalizer that `tokenizer.json` writes as this object, such as `{"type": "NFC"}`.
    ///
    /// # Errors
    /// [`TokenizerError::Normalizer`] where it is not known.
    pub fn from_json(text: &str) -> Result<Self, TokenizerError> {
        let unknown = || TokenizerError::Normalizer {
            text: text.to_owned(),
        };
        let json: Value = serde_json::from_str(text).map_err(|_| unknown())?;
        let field = |at: &str| json.pointer(at).and_then(Value::as_str).map(str::to_owned);
        let step = match json["type"].as_str() {
            Some("NFC") => NormalizerStep::Form(Form::Nfc),
            Some("NFD") => NormalizerStep::Form(Form::Nfd),
            Some("NFKC") => NormalizerStep::Form(Form::Nfkc),
            Some("NFKD") => NormalizerStep::Form(Form::Nfkd),
            Some("Lowercase") => NormalizerStep::Form(Form::Lowercase),
            Some("Replace") => NormalizerStep::Replace {
                from: field("/pattern/String")
                    .filter(|from| !from.is_empty())
                    .ok_or_else(unknown)?,
                to: field("/content").ok_or_else(unknown)?,
            },
            Some("Prepend") => NormalizerStep::Prepend(field("/prepend").ok_or_else(unknown)?),
            // Our own name for what `ByteLevel` does where `add_prefix_space` is true.
            Some("PrefixSpace") => NormalizerStep::PrefixSpace,
            _ => return Err(unknown()),
        };
        Ok(Self(step))
    }

    /// The text after this step.
    pub(super) fn apply<'t>(&self, text: Cow<'t, str>) -> Cow<'t, str> {
        match &self.0 {
            // Of ASCII these forms are the text itself.
            NormalizerStep::Form(Form::Nfc | Form::Nfd | Form::Nfkc | Form::Nfkd)
                if text.is_ascii() =>
            {
                text
            }
            NormalizerStep::Form(Form::Nfc) => Cow::Owned(text.nfc().collect()),
            NormalizerStep::Form(Form::Nfd) => Cow::Owned(text.nfd().collect()),
            NormalizerStep::Form(Form::Nfkc) => Cow::Owned(text.nfkc().collect()),
            NormalizerStep::Form(Form::Nfkd) => Cow::Owned(text.nfkd().collect()),
            NormalizerStep::Form(Form::Lowercase) => Cow::Owned(text.to_lowercase()),
            NormalizerStep::Replace { from, .. } if !text.contains(from.as_str()) => text,
            NormalizerStep::Replace { from, to } => Cow::Owned(text.replace(from.as_str(), to)),
            NormalizerStep::Prepend(before) if !text.is_empty() => {
                Cow::Owned(format!("{before}{text}"))
            }
            NormalizerStep::PrefixSpace if !text.starts_with(char::is_whitespace) => {
                Cow::Owned(format!(" {text}"))
            }
            NormalizerStep::Prepend(_) | NormalizerStep::PrefixSpace => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(json: &str, text: &str) -> String {
        let normalizer = Normalizer::from_json(json).unwrap();
        normalizer.apply(Cow::Borrowed(text)).into_owned()
    }

    #[test]
    fn each_kind() {
        assert_eq!(applied(r#"{"type": "NFC"}"#, "e\u{301}"), "é");
        assert_eq!(applied(r#"{"type": "NFD"}"#, "é"), "e\u{301}");
        assert_eq!(applied(r#"{"type": "NFKC"}"#, "ﬁ①"), "fi1");
        assert_eq!(applied(r#"{"type": "NFKD"}"#, "é"), "e\u{301}");
        assert_eq!(applied(r#"{"type": "Lowercase"}"#, "ÄB"), "äb");
        let replace = r#"{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}"#;
        assert_eq!(applied(replace, "a b"), "a\u{2581}b");
        let prepend = r#"{"type": "Prepend", "prepend": "\u2581"}"#;
        assert_eq!(applied(prepend, "a"), "\u{2581}a");
        assert_eq!(applied(prepend, ""), "");
        assert_eq!(applied(r#"{"type": "PrefixSpace"}"#, "a"), " a");
        assert_eq!(applied(r#"{"type": "PrefixSpace"}"#, "\ta"), "\ta");
    }

    #[test]
    fn an_unknown_one_is_an_error() {
        for text in [
            "NFC",
            r#"{"type": "Nmt"}"#,
            r#"{"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}"#,
            r#"{"type": "Replace", "pattern": {"String": ""}, "content": "a"}"#,
        ] {
            let text = text.to_owned();
            let error = Normalizer::from_json(&text).unwrap_err();
            assert_eq!(error, TokenizerError::Normalizer { text });
        }
    }
}
