//! SentencePiece BPE: neighbours join in the order of the scores of the tokens they form.
//!
//! Invariant: every character of the text is in exactly one token, or in one token a byte. Of equal
//! scores the leftmost joins first. Source: SentencePiece's BPE segmentation (Kudo and Richardson,
//! 2018) with byte fallback.

use kv_core::TokenId;

use super::TokenizerError;
use super::merge::{Join, Merger};
use super::vocab::{SPM_SPACE, Vocab, check_len};

/// The space before a text that is not in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpacePrefix {
    Add,
    None,
}

#[derive(Clone, Debug)]
pub(super) struct Spm {
    /// The place of each token in the order of falling scores; equal scores share a place.
    ranks: Vec<u32>,
    /// The token of each byte.
    bytes: Vec<TokenId>,
}

impl Spm {
    pub(super) fn new(
        vocab: &Vocab,
        scores: &[f32],
        unk: Option<TokenId>,
    ) -> Result<Self, TokenizerError> {
        check_len("tokenizer.ggml.scores", scores.len(), vocab.n_tokens())?;
        if let Some(id) = scores.iter().position(|score| score.is_nan()) {
            return Err(TokenizerError::ScoreNotANumber { id });
        }
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_unstable_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let mut ranks = vec![0; scores.len()];
        let mut rank = 0;
        for pair in order.windows(2) {
            // Compared as numbers: 0 and -0 are equal.
            if scores[pair[0]] != scores[pair[1]] {
                rank += 1;
            }
            ranks[pair[1]] = rank;
        }
        let bytes = (0..=255)
            .map(|byte| {
                vocab
                    .byte_token(byte)
                    .or(unk)
                    .ok_or(TokenizerError::MissingByte { byte })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { ranks, bytes })
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(
        &self,
        vocab: &Vocab,
        text: &str,
        prefix: SpacePrefix,
        out: &mut Vec<TokenId>,
    ) {
        let mut escaped = String::with_capacity(text.len() + text.len() / 2);
        if prefix == SpacePrefix::Add {
            escaped.push(SPM_SPACE);
        }
        escaped.extend(text.chars().map(|c| if c == ' ' { SPM_SPACE } else { c }));
        let pieces = escaped.chars().map(|c| {
            let mut utf8 = [0; 4];
            let text: &str = c.encode_utf8(&mut utf8);
            (text.len(), vocab.id(text).map(|id| id.0))
        });
        Merger::default().run(
            pieces,
            |left, right| {
                if left.len + right.len > vocab.max_len() {
                    return None;
                }
                let id = vocab.id(escaped.get(left.start..right.end())?)?;
                Some(Join {
                    rank: *self.ranks.get(id.as_usize())?,
                    id: id.0,
                })
            },
            |symbol| match symbol.id {
                Some(id) => out.push(TokenId(id)),
                None => {
                    let bytes = &escaped.as_bytes()[symbol.start..symbol.end()];
                    out.extend(bytes.iter().map(|&byte| self.bytes[usize::from(byte)]));
                }
            },
        );
    }
}
