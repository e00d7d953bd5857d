//! WordPiece: words cut from the left into the longest tokens there are (BERT; Devlin et al., arXiv
//! 1810.04805), with BERT's normalisation.
//!
//! Invariant: a word is cut whole or it is one unknown token. Tokens are as GGUF has them: `▁word`
//! begins a word, `piece` goes on.

use kv_core::TokenId;
use unicode_normalization::UnicodeNormalization;

use super::TokenizerError;
use super::char_class::CharClasses;
use super::vocab::{SPM_SPACE, Vocab};

/// Longest word that is cut; a longer one is unknown.
const MAX_CHARS: usize = 100;

/// The letters of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letters {
    /// Small ones without accents.
    Small,
    /// Those of the text.
    AsWritten,
}

#[derive(Clone, Debug)]
pub(super) struct WordPiece {
    classes: CharClasses,
    letters: Letters,
    unk: TokenId,
}

impl WordPiece {
    pub(super) fn new(unk: Option<TokenId>, letters: Letters) -> Result<Self, TokenizerError> {
        let unk = unk.ok_or(TokenizerError::MissingSpecial { name: "unknown" })?;
        Ok(Self {
            classes: CharClasses::new()?,
            letters,
            unk,
        })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<TokenId>) {
        let mut word = String::new();
        for c in self.normalised(text).chars() {
            let apart = self.is_apart(c);
            if apart || c == ' ' {
                self.cut(vocab, &word, out);
                word.clear();
            }
            if apart {
                self.cut(vocab, c.encode_utf8(&mut [0; 4]), out);
            } else if c != ' ' {
                word.push(c);
            }
        }
        self.cut(vocab, &word, out);
    }

    /// Without control characters, in the letters of the vocabulary, every white space a blank.
    fn normalised(&self, text: &str) -> String {
        let kept = text.chars().filter_map(|c| match c {
            '\t' | '\n' | '\r' => Some(' '),
            '\0' | '\u{FFFD}' => None,
            c if c.is_whitespace() => Some(' '),
            c if self.classes.is_control(c) => None,
            c => Some(c),
        });
        match self.letters {
            Letters::AsWritten => kept.collect(),
            Letters::Small => {
                let bare = kept.nfd().filter(|&c| !self.classes.is_accent(c));
                bare.flat_map(char::to_lowercase).collect()
            }
        }
    }

    /// True if a character is a word by itself.
    fn is_apart(&self, c: char) -> bool {
        c.is_ascii_punctuation() || is_chinese(c) || self.classes.is_punctuation(c)
    }

    fn cut(&self, vocab: &Vocab, word: &str, out: &mut Vec<TokenId>) {
        if word.is_empty() {
            return;
        }
        let n_before = out.len();
        let (mut rest, mut piece) = (word, String::with_capacity(word.len() + 3));
        while !rest.is_empty() {
            let mut ends = rest.char_indices().map(|(at, c)| at + c.len_utf8()).rev();
            let found = ends.find_map(|end| {
                piece.clear();
                if rest.len() == word.len() {
                    piece.push(SPM_SPACE);
                }
                piece.push_str(&rest[..end]);
                vocab.id(&piece).map(|id| (id, end))
            });
            match found {
                Some((id, end)) if word.chars().count() <= MAX_CHARS => {
                    out.push(id);
                    rest = &rest[end..];
                }
                _ => {
                    out.truncate(n_before);
                    out.push(self.unk);
                    return;
                }
            }
        }
    }
}

/// The ideographs of Chinese, each a word by itself in BERT's vocabularies.
fn is_chinese(c: char) -> bool {
    matches!(c,
        '\u{4E00}'..='\u{9FFF}' | '\u{3400}'..='\u{4DBF}' | '\u{20000}'..='\u{2A6DF}'
        | '\u{2A700}'..='\u{2B73F}' | '\u{2B740}'..='\u{2B81F}' | '\u{2B820}'..='\u{2CEAF}'
        | '\u{F900}'..='\u{FAFF}' | '\u{2F800}'..='\u{2FA1F}')
}
