//! A tokenizer as plain data, as a model file describes it.
//!
//! Invariant: nothing here is checked; [`Tokenizer::new`](super::Tokenizer::new) checks it whole.
//! Knows nothing of GGUF: the names of the keys are in the docs so that a reader can fill it in.

use kv_core::TokenId;

use super::{Normalizer, TokenizerError};

/// The algorithm (`tokenizer.ggml.model`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenizerModel {
    /// `"llama"`: SentencePiece BPE. Neighbours join in the order of the scores of the tokens they
    /// form; characters that are no token fall back to bytes.
    Spm,
    /// `"gpt2"`: byte-level BPE. A pre-tokenizer cuts the text into words, whose bytes join in the
    /// order of a list of merges.
    Bpe,
    /// `"gemma4"`: BPE over characters. A space is written as in SentencePiece, lines are joined in
    /// the order of a list of merges, and characters that are no token fall back to bytes.
    CharacterBpe,
    /// `"bert"`: WordPiece. Words are cut from the left into the longest tokens.
    WordPiece,
    /// `"t5"`: SentencePiece Unigram. A word is cut into the tokens whose scores add up to the
    /// most.
    Unigram,
    /// `"rwkv"`: at every byte the longest token that begins there (RWKV's "world" models).
    Rwkv,
}

impl TokenizerModel {
    /// The algorithm with this name in a GGUF file.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownModel`] for any other name.
    pub fn from_name(name: &str) -> Result<Self, TokenizerError> {
        match name {
            "llama" => Ok(Self::Spm),
            // The second name is of vocabularies whose pre-tokenizer has it, too.
            "gpt2" | "whitespace" => Ok(Self::Bpe),
            "gemma4" => Ok(Self::CharacterBpe),
            "bert" => Ok(Self::WordPiece),
            "t5" => Ok(Self::Unigram),
            "rwkv" => Ok(Self::Rwkv),
            _ => Err(TokenizerError::UnknownModel {
                name: name.to_owned(),
            }),
        }
    }
}

/// The use of a token (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenKind {
    /// 0: not specified; such a token has no text.
    Undefined,
    /// 1: a piece of text.
    #[default]
    Normal,
    /// 2: replaces text that is in no other token.
    Unknown,
    /// 3: a mark such as BOS, which plain text cannot produce.
    Control,
    /// 4: an added piece of text, found in any text before all else.
    UserDefined,
    /// 5: a place holder; such a token has no text.
    Unused,
    /// 6: one byte.
    Byte,
}

impl TokenKind {
    /// The kind of token `id` from its number in a GGUF file.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownKind`] for a number outside of 0 to 6.
    pub fn from_code(id: usize, code: i64) -> Result<Self, TokenizerError> {
        match code {
            0 => Ok(Self::Undefined),
            1 => Ok(Self::Normal),
            2 => Ok(Self::Unknown),
            3 => Ok(Self::Control),
            4 => Ok(Self::UserDefined),
            5 => Ok(Self::Unused),
            6 => Ok(Self::Byte),
            _ => Err(TokenizerError::UnknownKind { id, code }),
        }
    }
}

/// The tokens with a role, where the file names them (`tokenizer.ggml.<field>_token_id`).
///
/// If it does not, the roles of end of turn, end of message and of the fill-in-the-middle marks are
/// given to tokens with well-known texts, and an SPM vocabulary has the unknown, BOS and EOS tokens
/// 0, 1 and 2 (as llama.cpp does in both).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begin of sequence.
    pub bos: Option<TokenId>,
    /// End of sequence.
    pub eos: Option<TokenId>,
    /// End of turn.
    pub eot: Option<TokenId>,
    /// End of message.
    pub eom: Option<TokenId>,
    /// Stands for text without a token (`unknown_token_id`).
    pub unk: Option<TokenId>,
    /// Stands between the texts of a pair (`seperator_token_id`; the misspelling is GGUF's).
    pub sep: Option<TokenId>,
    /// Fills the end of shorter rows (`padding_token_id`).
    pub pad: Option<TokenId>,
    /// Stands for a token that is to be found (`mask_token_id`).
    pub mask: Option<TokenId>,
    /// Fill in the middle: before the text that comes before the gap.
    pub fim_pre: Option<TokenId>,
    /// Fill in the middle: before the text that comes after the gap.
    pub fim_suf: Option<TokenId>,
    /// Fill in the middle: before what fills the gap.
    pub fim_mid: Option<TokenId>,
    /// Fill in the middle: padding.
    pub fim_pad: Option<TokenId>,
    /// Fill in the middle: before the name of a repository.
    pub fim_rep: Option<TokenId>,
    /// Fill in the middle: before the name of a file.
    pub fim_sep: Option<TokenId>,
}

/// The outcome for white space after a special token in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialSpacing {
    /// It belongs to the text that follows.
    #[default]
    Keep,
    /// It is dropped, except after `<unk>`, `<s>` and `<|endoftext|>`. Phi-3 was trained so; no
    /// GGUF key says it (llama.cpp looks for "phi-3" or "phi3" in `general.name`, in any case).
    Strip,
}

/// Everything in a model file about its tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizerSpec {
    /// The algorithm (`tokenizer.ggml.model`).
    pub model: TokenizerModel,
    /// The name of the pre-tokenizer (`tokenizer.ggml.pre`). Only BPE reads it; without it, that is
    /// `"default"`.
    pub pre: Option<String>,
    /// The expressions that cut words, one after another, where `pre` is `"expressions"`. The key,
    /// `tokenizer.ggml.pre_expressions`, is our own, as GGUF has none: a `tokenizer.json` may have
    /// any.
    pub expressions: Vec<String>,
    /// True if a word that is a token stays whole, whatever the merges. The key,
    /// `tokenizer.ggml.ignore_merges`, is our own. Without it, the pre-tokenizer's name decides.
    pub whole_words: Option<bool>,
    /// The steps that prepare a text of BPE or Unigram before it is cut, in order. The key,
    /// `tokenizer.ggml.normalizers`, is our own.
    pub normalizers: Vec<Normalizer>,
    /// The texts of the tokens, by id (`tokenizer.ggml.tokens`).
    pub tokens: Vec<String>,
    /// One score a token (`tokenizer.ggml.scores`). SPM and Unigram need them; BPE may leave them
    /// empty.
    pub scores: Vec<f32>,
    /// One kind a token (`tokenizer.ggml.token_type`), or none where all are normal.
    pub kinds: Vec<TokenKind>,
    /// Pairs `"left right"`, those that join first come first (`tokenizer.ggml.merges`). BPE only.
    pub merges: Vec<String>,
    /// The tokens with a role.
    pub special: SpecialIds,
    /// True if a text starts with BOS (`tokenizer.ggml.add_bos_token`). Without this key: yes for
    /// SPM and for the pre-tokenizers of Llama 3, no for others.
    pub add_bos: Option<bool>,
    /// True if a text ends with EOS (`tokenizer.ggml.add_eos_token`). Without this key: yes for
    /// WordPiece and Unigram, no for others.
    pub add_eos: Option<bool>,
    /// True if a separator follows the end of the first text of a pair
    /// (`tokenizer.ggml.add_sep_token`). Without this key: yes, but in WordPiece, where the
    /// separator is the end.
    pub add_sep: Option<bool>,
    /// True if Unigram removes white space at the ends of a text and leaves one space of each run
    /// (`tokenizer.ggml.remove_extra_whitespaces`). Without this key: yes.
    pub remove_extra_whitespaces: Option<bool>,
    /// The table by which Unigram normalises a text (`tokenizer.ggml.precompiled_charsmap`); empty
    /// where there is none.
    pub char_map: Vec<u8>,
    /// True if SPM and Unigram put a space before a text (`tokenizer.ggml.add_space_prefix`). Where
    /// the key is absent: yes. BPE does not read it.
    pub add_space_prefix: Option<bool>,
    /// True if WordPiece puts a text into small letters without accents
    /// (`tokenizer.ggml.normalizer.lowercase`). Without this key: yes.
    pub lowercase: Option<bool>,
    /// The outcome for white space after special tokens.
    pub special_spacing: SpecialSpacing,
}

impl TokenizerSpec {
    /// A spec with these tokens and nothing else.
    pub fn new(model: TokenizerModel, tokens: Vec<String>) -> Self {
        Self {
            model,
            pre: None,
            expressions: Vec::new(),
            whole_words: None,
            normalizers: Vec::new(),
            tokens,
            scores: Vec::new(),
            kinds: Vec::new(),
            merges: Vec::new(),
            special: SpecialIds::default(),
            add_bos: None,
            add_eos: None,
            add_sep: None,
            remove_extra_whitespaces: None,
            char_map: Vec::new(),
            add_space_prefix: None,
            lowercase: None,
            special_spacing: SpecialSpacing::default(),
        }
    }
}
