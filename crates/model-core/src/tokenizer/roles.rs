//! Which tokens have a role: those that start or end a text, and those that end generation.
//!
//! Invariant: every id here is in the vocabulary. Files often leave the roles out or give marks the
//! kind of plain text, so well-known texts decide, by the rules of llama.cpp (facts about published
//! vocabularies, as of build 11434).

use std::collections::BTreeSet;

use kv_core::TokenId;

use super::vocab::Vocab;
use super::{SpecialIds, TokenKind, TokenizerError, TokenizerModel};

const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

const END_OF_MESSAGE: &[&str] = &["<|eom_id|>"];

const FIM_PRE: &[&str] = &[
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
];

const FIM_SUF: &[&str] = &[
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
];

const FIM_MID: &[&str] = &[
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];

const FIM_PAD: &[&str] = &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];

const FIM_REP: &[&str] = &[
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
];

const FIM_SEP: &[&str] = &["<|file_sep|>"];

/// Texts that end generation wherever they are in the vocabulary.
const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Marks of the harmony format that are part of the text a user sees.
const ALWAYS_RENDERED: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The tokens with a role.
#[derive(Clone, Debug)]
pub(super) struct Roles {
    pub(super) ids: SpecialIds,
    pub(super) end_of_generation: BTreeSet<TokenId>,
}

impl Roles {
    /// Completes the roles that the file gives, and corrects the kinds of the tokens that have one.
    pub(super) fn resolve(
        vocab: &mut Vocab,
        model: TokenizerModel,
        mut ids: SpecialIds,
    ) -> Result<Self, TokenizerError> {
        if model == TokenizerModel::Spm {
            for (slot, id) in [(&mut ids.unk, 0), (&mut ids.bos, 1), (&mut ids.eos, 2)] {
                *slot = slot.or_else(|| vocab.kind(TokenId(id)).map(|_| TokenId(id)));
            }
        }
        check_range(vocab, &ids)?;
        for (slot, texts) in [
            (&mut ids.eot, END_OF_TURN),
            (&mut ids.eom, END_OF_MESSAGE),
            (&mut ids.fim_pre, FIM_PRE),
            (&mut ids.fim_suf, FIM_SUF),
            (&mut ids.fim_mid, FIM_MID),
            (&mut ids.fim_pad, FIM_PAD),
            (&mut ids.fim_rep, FIM_REP),
            (&mut ids.fim_sep, FIM_SEP),
        ] {
            if slot.is_none()
                && let Some(id) = texts.iter().find_map(|text| vocab.id(text))
            {
                vocab.set_kind(id, TokenKind::Control);
                *slot = Some(id);
            }
        }
        let mut ends: BTreeSet<TokenId> = [ids.fim_pad, ids.fim_rep, ids.fim_sep]
            .into_iter()
            .flatten()
            .collect();
        for text in END_OF_GENERATION {
            if let Some(id) = vocab.id(text) {
                vocab.set_kind(id, TokenKind::Control);
                ends.insert(id);
            }
        }
        for text in ALWAYS_RENDERED {
            if let Some(id) = vocab.id(text) {
                vocab.set_kind(id, TokenKind::UserDefined);
            }
        }
        ends.extend([ids.eos, ids.eot, ids.eom].into_iter().flatten());
        take_back(vocab, &mut ends);
        Ok(Self {
            ids,
            end_of_generation: ends,
        })
    }
}

/// In some vocabularies a mark that elsewhere ends generation is an ordinary one.
fn take_back(vocab: &mut Vocab, ends: &mut BTreeSet<TokenId>) {
    let ending = |text: &str| vocab.id(text).filter(|id| ends.contains(id));
    let call = ending("<|call|>").or_else(|| ending("<|calls|>"));
    let last = ending("<|return|>").or_else(|| ending("<|flush|>"));
    // Harmony: <|end|> ends a message, and others may follow.
    let end = ending("<|end|>").filter(|_| call.is_some() && last.is_some());
    let marker = ending("<|tool_response>").or_else(|| ending("<|plamo:eos|>"));
    let html = ending("</s>").filter(|_| marker.is_some());
    for (id, kind) in [(end, TokenKind::UserDefined), (html, TokenKind::Normal)] {
        if let Some(id) = id {
            ends.remove(&id);
            vocab.set_kind(id, kind);
        }
    }
}

fn check_range(vocab: &Vocab, ids: &SpecialIds) -> Result<(), TokenizerError> {
    let named = [
        ("bos", ids.bos),
        ("eos", ids.eos),
        ("eot", ids.eot),
        ("eom", ids.eom),
        ("unknown", ids.unk),
        ("seperator", ids.sep),
        ("padding", ids.pad),
        ("mask", ids.mask),
        ("fim_pre", ids.fim_pre),
        ("fim_suf", ids.fim_suf),
        ("fim_mid", ids.fim_mid),
        ("fim_pad", ids.fim_pad),
        ("fim_rep", ids.fim_rep),
        ("fim_sep", ids.fim_sep),
    ];
    let n_tokens = vocab.n_tokens();
    match named.into_iter().find_map(|(name, id)| {
        let id = id.filter(|id| id.as_usize() >= n_tokens)?;
        Some((name, id.0))
    }) {
        Some((name, id)) => Err(TokenizerError::SpecialOutOfRange { name, id, n_tokens }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(texts: &[&str], ids: SpecialIds) -> (Vocab, Roles) {
        let texts = texts.iter().map(|t| (*t).to_owned()).collect();
        let mut vocab = Vocab::new(TokenizerModel::Bpe, texts, Vec::new()).unwrap();
        let roles = Roles::resolve(&mut vocab, TokenizerModel::Bpe, ids).unwrap();
        (vocab, roles)
    }

    fn ends(roles: &Roles) -> Vec<u32> {
        roles.end_of_generation.iter().map(|id| id.0).collect()
    }

    #[test]
    fn well_known_texts_end_generation_and_become_control() {
        let texts = ["a", "<|im_end|>", "<|endoftext|>", "<|repo_name|>", "b"];
        let given = SpecialIds {
            eos: Some(TokenId(4)),
            ..SpecialIds::default()
        };
        let (vocab, roles) = resolve(&texts, given);
        assert_eq!(ends(&roles), [1, 2, 3, 4]);
        assert_eq!(roles.ids.eot, Some(TokenId(1)));
        assert_eq!(vocab.kind(TokenId(1)), Some(TokenKind::Control));
        assert_eq!(vocab.kind(TokenId(4)), Some(TokenKind::Normal));
    }

    #[test]
    fn harmony_messages_do_not_end_generation() {
        let texts = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"];
        let (vocab, roles) = resolve(&texts, SpecialIds::default());
        assert_eq!(ends(&roles), [1, 2]);
        assert_eq!(vocab.kind(TokenId(0)), Some(TokenKind::UserDefined));
        assert_eq!(vocab.kind(TokenId(3)), Some(TokenKind::UserDefined));
        let (_, roles) = resolve(&["<|end|>", "<|return|>"], SpecialIds::default());
        assert_eq!(ends(&roles), [0, 1]);
    }

    #[test]
    fn a_plain_strike_through_does_not_end_generation() {
        let (vocab, roles) = resolve(&["</s>", "<|tool_response>"], SpecialIds::default());
        assert_eq!(ends(&roles), [1]);
        assert_eq!(vocab.kind(TokenId(0)), Some(TokenKind::Normal));
    }

    #[test]
    fn an_id_outside_of_the_vocabulary_is_an_error() {
        let texts = vec!["a".to_owned()];
        let mut vocab = Vocab::new(TokenizerModel::Bpe, texts, Vec::new()).unwrap();
        let ids = SpecialIds {
            eom: Some(TokenId(1)),
            ..SpecialIds::default()
        };
        let error = Roles::resolve(&mut vocab, TokenizerModel::Bpe, ids).unwrap_err();
        let expected = TokenizerError::SpecialOutOfRange {
            name: "eom",
            id: 1,
            n_tokens: 1,
        };
        assert_eq!(error, expected);
    }
}
