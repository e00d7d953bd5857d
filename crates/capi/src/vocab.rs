//! Vocabularies: tokens to texts and back.
//!
//! Invariant: a token that the vocabulary does not have is no text, no mark and no end. Knows
//! nothing of models that compute.

use std::ffi::c_char;

use kv_core::TokenId;
use model_core::tokenizer::{
    AddSpecial, EncodeOptions, SpecialIds, SpecialPieces, SpecialText, TokenKind, Tokenizer,
    TokenizerModel,
};

use crate::abi::{NO_TOKEN, attr, vocab_type};
use crate::ffi::{Handle, In, Out, c_api, count};
use crate::log;
use crate::model::{SharedModel, Vocab};

pub(crate) fn shared<'a>(name: &str, vocab: Handle<Vocab>) -> Option<&'a SharedModel> {
    let vocab = vocab.get();
    if vocab.is_none() {
        log::error(&format!("{name}: there is no such vocabulary"));
    }
    vocab.map(|vocab| &*vocab.shared)
}

fn tokenizer<'a>(name: &str, vocab: Handle<Vocab>) -> Option<&'a Tokenizer> {
    shared(name, vocab)?.tokenizer.as_deref()
}

fn special(name: &str, vocab: Handle<Vocab>, id: impl Fn(&SpecialIds) -> Option<TokenId>) -> i32 {
    let id = tokenizer(name, vocab).and_then(|tokenizer| id(tokenizer.special_ids()));
    id.map_or(NO_TOKEN, |id| id.0 as i32)
}

fn text(name: &str, vocab: Handle<Vocab>, token: i32) -> *const c_char {
    let texts = shared(name, vocab).map(SharedModel::token_texts);
    let index = usize::try_from(token).ok();
    let text = texts.and_then(|texts| texts.get(index?));
    text.map_or(std::ptr::null(), |text| text.as_ptr())
}

fn score(name: &str, vocab: Handle<Vocab>, token: i32) -> f32 {
    let score = shared(name, vocab).and_then(|model| {
        let scores: Vec<f32> = model.metadata.optional("tokenizer.ggml.scores").ok()??;
        scores.get(usize::try_from(token).ok()?).copied()
    });
    score.unwrap_or(0.0)
}

fn kind(name: &str, vocab: Handle<Vocab>, token: i32) -> Option<TokenKind> {
    let id = TokenId(u32::try_from(token).ok()?);
    tokenizer(name, vocab)?.token_kind(id)
}

fn attributes(name: &str, vocab: Handle<Vocab>, token: i32) -> i32 {
    match kind(name, vocab, token) {
        None | Some(TokenKind::Undefined) => attr::UNDEFINED,
        Some(TokenKind::Normal) => attr::NORMAL,
        Some(TokenKind::Unknown) => attr::UNKNOWN,
        Some(TokenKind::Control) => attr::CONTROL,
        Some(TokenKind::UserDefined) => attr::USER_DEFINED,
        Some(TokenKind::Unused) => attr::UNUSED,
        Some(TokenKind::Byte) => attr::BYTE,
    }
}

fn is_end(name: &str, vocab: Handle<Vocab>, token: i32) -> bool {
    let id = u32::try_from(token).ok().map(TokenId);
    let tokenizer = tokenizer(name, vocab);
    tokenizer
        .zip(id)
        .is_some_and(|(tokenizer, id)| tokenizer.is_end_of_generation(id))
}

fn is_control(name: &str, vocab: Handle<Vocab>, token: i32) -> bool {
    kind(name, vocab, token) == Some(TokenKind::Control)
}

fn adds_first(name: &str, vocab: Handle<Vocab>) -> bool {
    tokenizer(name, vocab).is_some_and(|tokenizer| tokenizer.adds_first().is_some())
}

fn adds_last(name: &str, vocab: Handle<Vocab>) -> bool {
    tokenizer(name, vocab).is_some_and(|tokenizer| tokenizer.adds_last().is_some())
}

/// The bytes of a token; none for one that is not in the vocabulary.
pub(crate) fn piece(tokenizer: &Tokenizer, token: i32, special: SpecialPieces) -> Vec<u8> {
    let id = u32::try_from(token).ok().map(TokenId);
    let piece = id.map(|id| tokenizer.piece(id, special));
    piece.and_then(Result::ok).unwrap_or_default()
}

/// True if the first space of a text is one that encoding put there.
fn drops_first_space(model: &SharedModel) -> bool {
    let added = model
        .metadata
        .optional::<bool>("tokenizer.ggml.add_space_prefix");
    let by_default = matches!(
        model.tokenizer_model,
        Some(TokenizerModel::Spm | TokenizerModel::Unigram | TokenizerModel::WordPiece)
    );
    added.ok().flatten().unwrap_or(by_default)
}

/// Writes all values, or nothing and returns minus their number.
fn write_or_tell<T: Copy>(out: Out<T>, room: i32, values: &[T]) -> i32 {
    let Ok(n) = i32::try_from(values.len()) else {
        return i32::MIN;
    };
    if n > room.max(0) || (n > 0 && out.is_null()) {
        return -n;
    }
    out.write(values.len(), values);
    n
}

c_api! {
    fn llama_vocab_type(vocab: Handle<Vocab>) -> i32 = vocab_type::NONE; {
        let model = shared("llama_vocab_type", vocab).and_then(|model| model.tokenizer_model);
        match model {
            None => vocab_type::NONE,
            Some(TokenizerModel::Spm) => vocab_type::SPM,
            Some(TokenizerModel::Bpe | TokenizerModel::CharacterBpe) => vocab_type::BPE,
            Some(TokenizerModel::WordPiece) => vocab_type::WPM,
            Some(TokenizerModel::Unigram) => vocab_type::UGM,
            Some(TokenizerModel::Rwkv) => vocab_type::RWKV,
            Some(_) => vocab_type::NONE,
        }
    }

    fn llama_vocab_n_tokens(vocab: Handle<Vocab>) -> i32 = 0; {
        shared("llama_vocab_n_tokens", vocab).map_or(0, |model| count(model.n_vocab()))
    }

    fn llama_n_vocab(vocab: Handle<Vocab>) -> i32 = 0; {
        shared("llama_n_vocab", vocab).map_or(0, |model| count(model.n_vocab()))
    }

    fn llama_vocab_get_text(vocab: Handle<Vocab>, token: i32) -> *const c_char = std::ptr::null(); {
        text("llama_vocab_get_text", vocab, token)
    }

    fn llama_token_get_text(vocab: Handle<Vocab>, token: i32) -> *const c_char = std::ptr::null(); {
        text("llama_token_get_text", vocab, token)
    }

    fn llama_vocab_get_score(vocab: Handle<Vocab>, token: i32) -> f32 = 0.0; {
        score("llama_vocab_get_score", vocab, token)
    }

    fn llama_token_get_score(vocab: Handle<Vocab>, token: i32) -> f32 = 0.0; {
        score("llama_token_get_score", vocab, token)
    }

    fn llama_vocab_get_attr(vocab: Handle<Vocab>, token: i32) -> i32 = attr::UNDEFINED; {
        attributes("llama_vocab_get_attr", vocab, token)
    }

    fn llama_token_get_attr(vocab: Handle<Vocab>, token: i32) -> i32 = attr::UNDEFINED; {
        attributes("llama_token_get_attr", vocab, token)
    }

    fn llama_vocab_is_eog(vocab: Handle<Vocab>, token: i32) -> bool = false; {
        is_end("llama_vocab_is_eog", vocab, token)
    }

    fn llama_token_is_eog(vocab: Handle<Vocab>, token: i32) -> bool = false; {
        is_end("llama_token_is_eog", vocab, token)
    }

    fn llama_vocab_is_control(vocab: Handle<Vocab>, token: i32) -> bool = false; {
        is_control("llama_vocab_is_control", vocab, token)
    }

    fn llama_token_is_control(vocab: Handle<Vocab>, token: i32) -> bool = false; {
        is_control("llama_token_is_control", vocab, token)
    }

    fn llama_vocab_get_add_bos(vocab: Handle<Vocab>) -> bool = false; {
        adds_first("llama_vocab_get_add_bos", vocab)
    }

    fn llama_add_bos_token(vocab: Handle<Vocab>) -> bool = false; {
        adds_first("llama_add_bos_token", vocab)
    }

    fn llama_vocab_get_add_eos(vocab: Handle<Vocab>) -> bool = false; {
        adds_last("llama_vocab_get_add_eos", vocab)
    }

    fn llama_add_eos_token(vocab: Handle<Vocab>) -> bool = false; {
        adds_last("llama_add_eos_token", vocab)
    }

    fn llama_vocab_get_add_sep(vocab: Handle<Vocab>) -> bool = false; {
        let model = shared("llama_vocab_get_add_sep", vocab);
        let key = "tokenizer.ggml.add_sep_token";
        model.and_then(|model| model.metadata.optional(key).ok()?).unwrap_or(false)
    }

    fn llama_vocab_get_suppress_tokens(vocab: Handle<Vocab>, n: Out<i32>)
        -> *const i32 = std::ptr::null(); {
        let tokens = shared("llama_vocab_get_suppress_tokens", vocab).map(SharedModel::suppressed);
        let tokens = tokens.unwrap_or_default();
        n.set(count(tokens.len()));
        if tokens.is_empty() { std::ptr::null() } else { tokens.as_ptr() }
    }

    fn llama_tokenize(
        vocab: Handle<Vocab>,
        text: In<u8>,
        n_bytes: i32,
        tokens: Out<i32>,
        room: i32,
        add_special: bool,
        parse_special: bool,
    ) -> i32 = i32::MIN; {
        let Some(tokenizer) = tokenizer("llama_tokenize", vocab) else {
            return 0;
        };
        let text = String::from_utf8_lossy(text.slice(usize::try_from(n_bytes).unwrap_or(0)));
        let options = EncodeOptions {
            add: if add_special { AddSpecial::AsModel } else { AddSpecial::Never },
            special: if parse_special { SpecialText::Parse } else { SpecialText::AsText },
        };
        let ids = tokenizer.encode(&text, options);
        let ids: Vec<i32> = ids.into_iter().map(|id| id.0 as i32).collect();
        write_or_tell(tokens, room, &ids)
    }

    fn llama_token_to_piece(
        vocab: Handle<Vocab>,
        token: i32,
        buffer: Out<u8>,
        room: i32,
        lstrip: i32,
        special: bool,
    ) -> i32 = 0; {
        let Some(tokenizer) = tokenizer("llama_token_to_piece", vocab) else {
            return 0;
        };
        let special = if special {
            SpecialPieces::Render
        } else {
            SpecialPieces::Skip
        };
        let piece = piece(tokenizer, token, special);
        let n_spaces = piece.iter().take_while(|&&byte| byte == b' ').count();
        let n_dropped = n_spaces.min(usize::try_from(lstrip).unwrap_or(0));
        write_or_tell(buffer, room, &piece[n_dropped..])
    }

    fn llama_detokenize(
        vocab: Handle<Vocab>,
        tokens: In<i32>,
        n_tokens: i32,
        text: Out<u8>,
        room: i32,
        remove_special: bool,
        unparse_special: bool,
    ) -> i32 = 0; {
        let name = "llama_detokenize";
        let (Some(model), Some(tokenizer)) = (shared(name, vocab), tokenizer(name, vocab)) else {
            return 0;
        };
        let mut tokens = tokens.slice(usize::try_from(n_tokens).unwrap_or(0));
        let mut drops_space = drops_first_space(model);
        let is = |token: Option<&i32>, id: Option<TokenId>| {
            id.is_some() && token.map(|&token| TokenId(token as u32)) == id
        };
        if remove_special && is(tokens.first(), tokenizer.adds_first()) {
            tokens = &tokens[1..];
            drops_space = false;
        }
        if remove_special && is(tokens.last(), tokenizer.adds_last()) {
            tokens = &tokens[..tokens.len() - 1];
        }
        let special = if unparse_special {
            SpecialPieces::Render
        } else {
            SpecialPieces::Skip
        };
        let mut bytes = Vec::new();
        for (index, &token) in tokens.iter().enumerate() {
            let piece = piece(tokenizer, token, special);
            let is_first_space = index == 0 && drops_space && piece.first() == Some(&b' ');
            bytes.extend_from_slice(&piece[usize::from(is_first_space)..]);
        }
        write_or_tell(text, room, &bytes)
    }
}

/// The token of a line break.
fn line_break(tokenizer: &Tokenizer) -> Option<TokenId> {
    let texts = ["<0x0A>", "\u{10a}", "\n"].into_iter();
    texts.filter_map(|text| tokenizer.token_id(text)).next()
}

c_api! {
    fn llama_vocab_nl(vocab: Handle<Vocab>) -> i32 = NO_TOKEN; {
        let id = tokenizer("llama_vocab_nl", vocab).and_then(line_break);
        id.map_or(NO_TOKEN, |id| id.0 as i32)
    }

    fn llama_token_nl(vocab: Handle<Vocab>) -> i32 = NO_TOKEN; {
        let id = tokenizer("llama_token_nl", vocab).and_then(line_break);
        id.map_or(NO_TOKEN, |id| id.0 as i32)
    }
}

/// Exports functions that return a token with a role.
macro_rules! special_tokens {
    ($($name:ident => $role:ident,)*) => {
        c_api! {$(
            fn $name(vocab: Handle<Vocab>) -> i32 = NO_TOKEN; {
                special(stringify!($name), vocab, |ids| ids.$role)
            }
        )*}
    };
}

special_tokens! {
    llama_vocab_bos => bos,
    llama_vocab_eos => eos,
    llama_vocab_eot => eot,
    llama_vocab_sep => sep,
    llama_vocab_pad => pad,
    llama_vocab_mask => mask,
    llama_vocab_cls => bos,
    llama_vocab_fim_pre => fim_pre,
    llama_vocab_fim_suf => fim_suf,
    llama_vocab_fim_mid => fim_mid,
    llama_vocab_fim_pad => fim_pad,
    llama_vocab_fim_rep => fim_rep,
    llama_vocab_fim_sep => fim_sep,
    llama_token_bos => bos,
    llama_token_eos => eos,
    llama_token_eot => eot,
    llama_token_cls => bos,
    llama_token_sep => sep,
    llama_token_pad => pad,
    llama_token_fim_pre => fim_pre,
    llama_token_fim_suf => fim_suf,
    llama_token_fim_mid => fim_mid,
    llama_token_fim_pad => fim_pad,
    llama_token_fim_rep => fim_rep,
    llama_token_fim_sep => fim_sep,
}
