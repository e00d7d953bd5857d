//! Which tokens have a role: those that start or end a text, and those that end generation.
//!
//! Invariant: every id here is in the vocabulary. Files often leave the roles out or give marks the
//! kind of plain text, so well-known texts decide, by the rules of llama.cpp (facts about published
//! vocabularies, as of build 11434).

use std::collections::BTreeSet;

use kv_core::TokenId;

use super::vocab::Vocab;
use super::{SpecialIds, TokenKind, TokenizerModel};

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

/// Texts that end generation wherever they are in the vocabulary: no ordinary text has them.
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
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Texts that end generation where the file says that they are marks. Elsewhere they are text:
/// `</s>` closes an HTML tag in the vocabularies of Gemma and Qwen.
const END_OF_GENERATION_IF_CONTROL: &[&str] =
    &["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"];

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
    /// An id that the vocabulary does not have plays no role, with a warning: many files carry one.
    pub(super) fn resolve(vocab: &mut Vocab, model: TokenizerModel, mut ids: SpecialIds) -> Self {
        drop_unknown(vocab, &mut ids);
        if model == TokenizerModel::Spm {
            for (slot, id) in [(&mut ids.unk, 0), (&mut ids.bos, 1), (&mut ids.eos, 2)] {
                *slot = slot.or_else(|| vocab.kind(TokenId(id)).map(|_| TokenId(id)));
            }
        }
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
        let named = [ids.eos, ids.eot, ids.eom];
        for text in END_OF_GENERATION_IF_CONTROL {
            if let Some(id) = vocab.id(text)
                && (vocab.kind(id) == Some(TokenKind::Control) || named.contains(&Some(id)))
            {
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
        Self {
            ids,
            end_of_generation: ends,
        }
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

/// Takes the role from ids that the vocabulary does not have.
fn drop_unknown(vocab: &Vocab, ids: &mut SpecialIds) {
    let n_tokens = vocab.n_tokens();
    for (name, slot) in [
        ("bos", &mut ids.bos),
        ("eos", &mut ids.eos),
        ("eot", &mut ids.eot),
        ("eom", &mut ids.eom),
        ("unknown", &mut ids.unk),
        ("seperator", &mut ids.sep),
        ("padding", &mut ids.pad),
        ("mask", &mut ids.mask),
        ("fim_pre", &mut ids.fim_pre),
        ("fim_suf", &mut ids.fim_suf),
        ("fim_mid", &mut ids.fim_mid),
        ("fim_pad", &mut ids.fim_pad),
        ("fim_rep", &mut ids.fim_rep),
        ("fim_sep", &mut ids.fim_sep),
    ] {
        if let Some(id) = slot.filter(|id| id.as_usize() >= n_tokens) {
            let id = id.0.cast_signed();
            tracing::warn!(
                "the file says that the {name} token is {id}, but the vocabulary has {n_tokens} \
                 tokens: it is ignored (tokenizer.ggml.{name}_token_id)"
            );
            *slot = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(texts: &[&str], ids: SpecialIds) -> (Vocab, Roles) {
        let texts = texts.iter().map(|t| (*t).to_owned()).collect();
        let mut vocab = Vocab::new(TokenizerModel::Bpe, texts, Vec::new()).unwrap();
        let roles = Roles::resolve(&mut vocab, TokenizerModel::Bpe, ids);
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
    fn a_closing_tag_ends_generation_only_where_the_file_says_so() {
        let texts = vec!["a".to_owned(), "</s>".to_owned()];
        let with = |kind, ids| {
            let kinds = vec![TokenKind::Normal, kind];
            let mut vocab = Vocab::new(TokenizerModel::Bpe, texts.clone(), kinds).unwrap();
            let roles = Roles::resolve(&mut vocab, TokenizerModel::Bpe, ids);
            (ends(&roles), vocab.kind(TokenId(1)))
        };
        for kind in [TokenKind::Normal, TokenKind::UserDefined] {
            assert_eq!(with(kind, SpecialIds::default()), (vec![], Some(kind)));
            let eos = SpecialIds {
                eos: Some(TokenId(1)),
                ..SpecialIds::default()
            };
            assert_eq!(with(kind, eos), (vec![1], Some(TokenKind::Control)));
        }
        let (ends, kind) = with(TokenKind::Control, SpecialIds::default());
        assert_eq!((ends, kind), (vec![1], Some(TokenKind::Control)));
    }

    #[test]
    fn an_id_outside_of_the_vocabulary_plays_no_role() {
        let given = SpecialIds {
            eom: Some(TokenId(1)),
            pad: Some(TokenId(u32::MAX)),
            ..SpecialIds::default()
        };
        let (_, roles) = resolve(&["a"], given);
        assert_eq!(roles.ids, SpecialIds::default());
        assert_eq!(ends(&roles), Vec::<u32>::new());
    }
}
