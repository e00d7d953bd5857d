//! Text to tokens and back.
//!
//! Invariant: a tokenizer is built whole from checked data or not at all; encoding never fails, and
//! equals llama.cpp's on the same data. Knows nothing of files: a [`TokenizerSpec`] is plain data.

mod bpe;
mod byte_level;
mod cased;
pub(crate) mod char_class;
mod char_map;
mod error;
mod expression;
mod merge;
mod normalizer;
mod pair;
pub(crate) mod pre_tokenizers;
mod python_bytes;
mod roles;
mod rwkv;
mod spec;
mod special;
mod spm;
mod stream;
mod unigram;
mod vocab;
mod word_piece;
pub(crate) mod words;

use std::borrow::Cow;

use kv_core::TokenId;

pub use error::TokenizerError;
pub use normalizer::Normalizer;
pub use pair::TokenPair;
pub use spec::{SpecialIds, SpecialSpacing, TokenKind, TokenizerModel, TokenizerSpec};
pub use special::SpecialText;
pub use stream::{DecodeFrom, DecodeStream};
pub use vocab::SpecialPieces;

use bpe::Bpe;
use char_map::CharMap;
use pair::PairSeparators;
use pre_tokenizers::{Alphabet, PreTokenizer};
pub(crate) use python_bytes::escape;

use roles::Roles;
use rwkv::Rwkv;
use special::{Fragment, SpecialMatcher};
use spm::{SpacePrefix, Spm};
use unigram::{ExtraSpace, Preparation, TextStart, Unigram};
use vocab::Vocab;
use word_piece::{Letters, WordPiece};

/// The choice to add BOS before and EOS after the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddSpecial {
    /// As the model file specifies.
    AsModel,
    /// As the model file specifies, but no BOS where the text starts with it already and no EOS
    /// where the text ends with it: for chat templates, many of which write them.
    AsModelOnce,
    /// Neither.
    Never,
    /// Neither, and no space before the text, as some vocabularies want it at the start of one: for
    /// text that goes on where other text ended, perhaps within a word.
    Continuation,
}

/// The options of encoding a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// The choice to add BOS and EOS.
    pub add: AddSpecial,
    /// The choice to find special tokens in the text.
    pub special: SpecialText,
}

impl EncodeOptions {
    /// A whole prompt written by hand: BOS and EOS as the model wants them, special tokens parsed.
    pub const PROMPT: Self = Self {
        add: AddSpecial::AsModel,
        special: SpecialText::Parse,
    };
    /// The options for the rendering of a chat template.
    pub const CHAT: Self = Self {
        add: AddSpecial::AsModelOnce,
        special: SpecialText::Parse,
    };
    /// Text that is nothing but text.
    pub const TEXT: Self = Self {
        add: AddSpecial::Never,
        special: SpecialText::AsText,
    };
}

#[derive(Clone, Debug)]
enum Algorithm {
    Spm(Spm, SpacePrefix),
    Bpe(Box<Bpe>),
    WordPiece(Box<WordPiece>),
    Unigram(Box<Unigram>),
    Rwkv(Box<Rwkv>),
}

/// A tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    roles: Roles,
    specials: SpecialMatcher,
    algorithm: Algorithm,
    /// The steps that prepare a text of BPE or Unigram before it is cut.
    normalizers: Vec<Normalizer>,
    /// The token before a text.
    first: Option<TokenId>,
    /// The token after a text.
    last: Option<TokenId>,
    /// The tokens between the texts of a pair.
    between: PairSeparators,
}

impl Tokenizer {
    /// Builds a tokenizer.
    ///
    /// # Errors
    /// Any [`TokenizerError`] but [`UnknownToken`](TokenizerError::UnknownToken): the data
    /// contradicts itself, or needs something that this crate cannot do exactly.
    pub fn new(mut spec: TokenizerSpec) -> Result<Self, TokenizerError> {
        let pre = match spec.model {
            TokenizerModel::Bpe | TokenizerModel::CharacterBpe => Some(PreTokenizer::of(&spec)?),
            _ => None,
        };
        let model = match &pre {
            Some(pre) if pre.traits.alphabet == Alphabet::Bytes => TokenizerModel::Bpe,
            Some(_) => TokenizerModel::CharacterBpe,
            None => spec.model,
        };
        let names_bos = spec.special.bos.is_some();
        let names_eos = spec.special.eos.is_some();
        let mut vocab = vocab::take_vocab(&mut spec, model)?;
        if !spec.scores.is_empty() {
            vocab::check_len("tokenizer.ggml.scores", spec.scores.len(), vocab.n_tokens())?;
        }
        let roles = Roles::resolve(&mut vocab, model, spec.special);
        let mut eos_by_default = false;
        let (algorithm, bos_by_default) = match spec.model {
            TokenizerModel::Spm => {
                let spm = Spm::new(&vocab, &spec.scores, roles.ids.unk)?;
                (Algorithm::Spm(spm, space_prefix(&spec)), true)
            }
            TokenizerModel::Bpe | TokenizerModel::CharacterBpe => {
                let pre = pre.unwrap_or_default();
                let splitter = pre.splitter()?;
                let bpe = Bpe::new(&vocab, &spec.merges, roles.ids.unk, splitter, pre.traits)?;
                (Algorithm::Bpe(Box::new(bpe)), pre.traits.add_bos)
            }
            TokenizerModel::WordPiece => {
                // A text stands between two marks.
                eos_by_default = true;
                let letters = match spec.lowercase {
                    Some(false) => Letters::AsWritten,
                    Some(true) | None => Letters::Small,
                };
                let pieces = WordPiece::new(roles.ids.unk, letters)?;
                (Algorithm::WordPiece(Box::new(pieces)), true)
            }
            TokenizerModel::Unigram => {
                eos_by_default = true;
                let preparation = preparation(&spec)?;
                let unigram = Unigram::new(&vocab, &spec.scores, roles.ids.unk, preparation)?;
                (Algorithm::Unigram(Box::new(unigram)), false)
            }
            TokenizerModel::Rwkv => {
                let rwkv = Rwkv::new(&vocab, roles.ids.unk)?;
                (Algorithm::Rwkv(Box::new(rwkv)), false)
            }
        };
        // Gemma 4's answers are no text without BOS, whatever a file says (as in llama.cpp).
        if model == TokenizerModel::CharacterBpe && bos_by_default {
            spec.add_bos = None;
        }
        let first = match (spec.add_bos, roles.ids.bos) {
            (Some(true), None) if !names_bos => {
                return Err(TokenizerError::MissingSpecial { name: "bos" });
            }
            (wanted, bos) => bos.filter(|_| wanted.unwrap_or(bos_by_default)),
        };
        let last = match (spec.add_eos, roles.ids.eos) {
            (Some(true), None) if !names_eos => {
                return Err(TokenizerError::MissingSpecial { name: "eos" });
            }
            (wanted, eos) => eos.filter(|_| wanted.unwrap_or(eos_by_default)),
        };
        let between = match (spec.model, spec.add_sep) {
            (TokenizerModel::WordPiece, _) | (_, Some(false)) => PairSeparators::One,
            // What adds nothing after a text has nothing between two.
            (_, None) if last.is_none() => PairSeparators::One,
            _ => PairSeparators::Two,
        };
        let specials = SpecialMatcher::new(&vocab, spec.special_spacing);
        Ok(Self {
            vocab,
            roles,
            specials,
            algorithm,
            normalizers: spec.normalizers,
            first,
            last,
            between,
        })
    }

    /// The tokens of `text`. O(n log n) in its length.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<TokenId> {
        self.encode_parts([text], options)
    }

    /// The tokens of a text that is given in parts, none of which ends inside of a token: what
    /// spells a special token over two parts is text.
    pub fn encode_parts<'t>(
        &self,
        parts: impl IntoIterator<Item = &'t str>,
        options: EncodeOptions,
    ) -> Vec<TokenId> {
        let parts = parts.into_iter();
        let fragments = parts.flat_map(|part| self.specials.split(part, options.special));
        let mut out = Vec::new();
        // SPM puts its space before a text and after every special token.
        let mut after_special = options.add != AddSpecial::Continuation;
        for fragment in fragments {
            match (fragment, &self.algorithm) {
                (Fragment::Token(id), _) => out.push(id),
                (Fragment::Text(text), Algorithm::Bpe(bpe)) => {
                    let text = self.normalized(text);
                    bpe.encode(&self.vocab, &text, &mut out);
                }
                (Fragment::Text(text), Algorithm::WordPiece(pieces)) => {
                    pieces.encode(&self.vocab, text, &mut out);
                }
                (Fragment::Text(text), Algorithm::Unigram(unigram)) => {
                    let start = if after_special {
                        TextStart::Beginning
                    } else {
                        TextStart::Continuation
                    };
                    let text = self.normalized(text);
                    unigram.encode(&self.vocab, &text, start, &mut out);
                }
                (Fragment::Text(text), Algorithm::Rwkv(rwkv)) => rwkv.encode(text, &mut out),
                (Fragment::Text(text), Algorithm::Spm(spm, prefix)) => {
                    let prefix = if after_special {
                        *prefix
                    } else {
                        SpacePrefix::None
                    };
                    spm.encode(&self.vocab, text, prefix, &mut out);
                }
            }
            after_special = matches!(fragment, Fragment::Token(_));
        }
        let wanted = |id: Option<TokenId>, present: Option<&TokenId>| match options.add {
            AddSpecial::AsModel => id,
            AddSpecial::AsModelOnce => id.filter(|id| present != Some(id)),
            AddSpecial::Never | AddSpecial::Continuation => None,
        };
        let (first, last) = (
            wanted(self.first, out.first()),
            wanted(self.last, out.last()),
        );
        if let Some(first) = first {
            out.insert(0, first);
        }
        out.extend(last);
        out
    }

    /// The tokens of two texts that a model reads together, with the marks around and between them:
    /// `[CLS] first [SEP] second [SEP]` of BERT, `<s> first </s></s> second </s>` of RoBERTa.
    pub fn encode_pair(&self, first: &str, second: &str, special: SpecialText) -> TokenPair {
        let options = EncodeOptions {
            add: AddSpecial::Never,
            special,
        };
        let mut tokens: Vec<TokenId> = self.first.into_iter().collect();
        tokens.extend(self.encode(first, options));
        tokens.extend(self.last);
        if self.between == PairSeparators::Two {
            tokens.extend(self.roles.ids.sep.or(self.last));
        }
        let start = tokens.len();
        tokens.extend(self.encode(second, options));
        tokens.extend(self.last);
        TokenPair {
            tokens,
            second: start,
            n_closing: usize::from(self.last.is_some()),
        }
    }

    fn normalized<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let steps = self.normalizers.iter();
        steps.fold(Cow::Borrowed(text), |text, step| step.apply(text))
    }

    /// The text of whole `ids`, from the start of a text. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] if one of them is not in the vocabulary.
    pub fn decode(
        &self,
        ids: &[TokenId],
        special: SpecialPieces,
    ) -> Result<String, TokenizerError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut from = DecodeFrom::TextStart;
        for &id in ids {
            self.vocab.push_piece(id, special, &mut bytes)?;
            if from == DecodeFrom::TextStart && !bytes.is_empty() {
                from = DecodeFrom::Continuation;
                if self.drops_first_space() && bytes.first() == Some(&b' ') {
                    bytes.remove(0);
                }
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The bytes that token `id` writes inside of a text: part of a character, it may be.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownToken`] if it is not in the vocabulary.
    pub fn piece(&self, id: TokenId, special: SpecialPieces) -> Result<Vec<u8>, TokenizerError> {
        let mut bytes = Vec::new();
        self.vocab.push_piece(id, special, &mut bytes)?;
        Ok(bytes)
    }

    /// The text of token `id` as the vocabulary has it (`Ġthe`, `▁the`, `<0x0A>`).
    pub fn token_text(&self, id: TokenId) -> Option<&str> {
        self.vocab.text(id)
    }

    /// The token with this text in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.vocab.id(text)
    }

    /// The use of token `id`. Tokens that end generation are control tokens, whatever the file
    /// specifies.
    pub fn token_kind(&self, id: TokenId) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// True if token `id` ends generation.
    pub fn is_end_of_generation(&self, id: TokenId) -> bool {
        self.roles.end_of_generation.contains(&id)
    }

    /// The tokens that end generation, in the order of their ids.
    pub fn end_of_generation(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.roles.end_of_generation.iter().copied()
    }

    /// The number of tokens.
    pub fn n_tokens(&self) -> usize {
        self.vocab.n_tokens()
    }

    /// The tokens with a role, completed by well-known texts where the file is silent.
    pub fn special_ids(&self) -> &SpecialIds {
        &self.roles.ids
    }

    /// The token that [`AddSpecial::AsModel`] puts before a text.
    pub fn adds_first(&self) -> Option<TokenId> {
        self.first
    }

    /// The token that [`AddSpecial::AsModel`] adds after a text.
    pub fn adds_last(&self) -> Option<TokenId> {
        self.last
    }

    /// True if decoding a text from its start drops its first space, which encoding put there.
    fn drops_first_space(&self) -> bool {
        matches!(
            self.algorithm,
            Algorithm::Spm(_, SpacePrefix::Add) | Algorithm::WordPiece(_) | Algorithm::Unigram(_)
        )
    }
}

fn space_prefix(spec: &TokenizerSpec) -> SpacePrefix {
    match spec.add_space_prefix {
        Some(false) => SpacePrefix::None,
        Some(true) | None => SpacePrefix::Add,
    }
}

/// The way a text is prepared before Unigram cuts it.
fn preparation(spec: &TokenizerSpec) -> Result<Preparation, TokenizerError> {
    let table = match spec.char_map.as_slice() {
        [] => None,
        bytes => Some(CharMap::new(bytes)?),
    };
    Ok(Preparation {
        table,
        prefix: space_prefix(spec),
        extra_space: match spec.remove_extra_whitespaces {
            Some(false) => ExtraSpace::Keep,
            Some(true) | None => ExtraSpace::Remove,
        },
    })
}
