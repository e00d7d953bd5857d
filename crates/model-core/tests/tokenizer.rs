//! The tokenizer against ids that llama.cpp gave, and against itself.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may fail the test

use std::sync::LazyLock;

use crate::tokenizer_data::{data, golden, spec, tokenizer};
use kv_core::TokenId;
use model_core::gguf::{Array, GgufWriter, Value};
use model_core::model_file::tokenizer_from_bytes;
use model_core::tokenizer::{
    AddSpecial, DecodeFrom, DecodeStream, EncodeOptions, SpecialPieces, SpecialText, TokenKind,
    Tokenizer, TokenizerError, TokenizerModel, TokenizerSpec,
};
use proptest::prelude::*;

static QWEN: LazyLock<Tokenizer> = LazyLock::new(|| tokenizer(&data("qwen2.vocab.lzma")));
static STORIES: LazyLock<Tokenizer> = LazyLock::new(|| tokenizer(&data("stories.vocab")));

fn raw(ids: &[TokenId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

fn ids(raw: &[u32]) -> Vec<TokenId> {
    raw.iter().copied().map(TokenId).collect()
}

fn stream(tokenizer: &Tokenizer, ids: &[TokenId], special: SpecialPieces) -> String {
    let mut stream = DecodeStream::new(DecodeFrom::TextStart, special);
    let mut text = String::new();
    for &id in ids {
        text.push_str(&stream.push(tokenizer, id).unwrap());
    }
    text + &stream.finish()
}

fn equals_golden(tokenizer: &Tokenizer, file: &str) {
    let cases = golden(&data(file));
    assert!(cases.len() >= 200, "{} cases", cases.len());
    for case in cases {
        let text = &case.text;
        let prompt = tokenizer.encode(text, EncodeOptions::PROMPT);
        // llama.cpp takes the HTML tag "</s>" for a mark of Qwen's, which it is not.
        let is_text = case.prompt.contains(&128_247);
        let expected = if is_text { &case.plain } else { &case.prompt };
        assert_eq!(&raw(&prompt), expected, "{text:?} as a prompt");
        let plain = tokenizer.encode(text, EncodeOptions::TEXT);
        assert_eq!(raw(&plain), case.plain, "{text:?} as text");
        // SPM writes a space as U+2581, so that character does not come back.
        let same = if file == "stories.golden.lzma" {
            text.replace('▁', " ")
        } else {
            text.clone()
        };
        assert_eq!(
            tokenizer.decode(&plain, SpecialPieces::Render).unwrap(),
            same
        );
    }
}

#[test]
fn qwen2_equals_llama_cpp() {
    equals_golden(&QWEN, "qwen2.golden.lzma");
}

#[test]
fn spm_equals_llama_cpp() {
    equals_golden(&STORIES, "stories.golden.lzma");
}

#[test]
fn qwen2_ends_generation_with_its_marks_and_not_with_an_html_tag() {
    let ends: Vec<u32> = QWEN.end_of_generation().map(|id| id.0).collect();
    // llama.cpp adds 128247, "</s>", a token that no merge makes.
    assert_eq!(ends, [151_643, 151_645, 151_662, 151_663, 151_664]);
    assert!(QWEN.is_end_of_generation(TokenId(151_645)));
    assert!(!QWEN.is_end_of_generation(TokenId(151_644)));
    assert_eq!(QWEN.n_tokens(), 151_936);
    assert_eq!(QWEN.adds_first(), None);
    assert_eq!(QWEN.token_text(TokenId(279)), Some("Ġthe"));
    assert_eq!(QWEN.token_id("Ġthe"), Some(TokenId(279)));
    assert_eq!(QWEN.token_kind(TokenId(151_935)), Some(TokenKind::Unused));
}

#[test]
fn the_stories_tokenizer_starts_texts_with_bos_and_stops_at_it() {
    assert_eq!(STORIES.adds_first(), Some(TokenId(1)));
    assert_eq!(STORIES.adds_last(), None);
    let ends: Vec<u32> = STORIES.end_of_generation().map(|id| id.0).collect();
    assert_eq!(ends, [1, 2]);
}

#[test]
fn a_text_that_goes_on_gets_no_space_before_it() {
    let continued = |text: &str| {
        let options = EncodeOptions {
            add: AddSpecial::Continuation,
            ..EncodeOptions::PROMPT
        };
        let ids = STORIES.encode(text, options);
        let pieces = ids
            .iter()
            .map(|&id| STORIES.piece(id, SpecialPieces::Skip).unwrap());
        String::from_utf8(pieces.flatten().collect()).unwrap()
    };
    for text in ["ly", ".", " was", "  two"] {
        assert_eq!(continued(text), text);
    }
}

#[test]
fn a_file_that_is_a_vocabulary_alone_will_do() {
    let mut writer = GgufWriter::new();
    let texts = |texts: &[&str]| Array::String(texts.iter().map(|t| (*t).to_owned()).collect());
    writer.set("general.architecture", "falcon");
    writer.set("tokenizer.ggml.model", "gpt2");
    writer.set("tokenizer.ggml.pre", "falcon");
    writer.set("tokenizer.ggml.tokens", texts(&["a", "b", "ab", "\u{120}"]));
    writer.set("tokenizer.ggml.merges", texts(&["a b"]));
    // Neither is there: both are ignored, with a warning.
    writer.set("tokenizer.ggml.padding_token_id", Value::I32(-1));
    writer.set("tokenizer.ggml.eos_token_id", 4_u32);
    let tokenizer = tokenizer_from_bytes(writer.to_bytes().unwrap().into()).unwrap();
    assert_eq!(tokenizer.special_ids().eos, None);
    // No token stands for the byte 0x03: it is left out, as the library does it.
    let found = tokenizer.encode("ab\u{3} ba", EncodeOptions::PROMPT);
    assert_eq!(raw(&found), [2, 3, 1, 0]);
}

#[test]
fn bos_is_not_doubled_where_the_text_has_it() {
    let once = EncodeOptions::CHAT;
    let twice = EncodeOptions::PROMPT;
    assert_eq!(raw(&STORIES.encode("<s>", once)), [1]);
    assert_eq!(raw(&STORIES.encode("<s>", twice)), [1, 1]);
    assert_eq!(raw(&STORIES.encode("", once)), [1]);
    let never = EncodeOptions {
        add: AddSpecial::Never,
        special: SpecialText::Parse,
    };
    assert_eq!(raw(&STORIES.encode("<s>", never)), [1]);
}

#[test]
fn special_tokens_are_shown_or_not() {
    let chat = "<|im_start|>user\nHi<|im_end|>\n";
    let found = QWEN.encode(chat, EncodeOptions::CHAT);
    assert_eq!(QWEN.decode(&found, SpecialPieces::Render).unwrap(), chat);
    assert_eq!(
        QWEN.decode(&found, SpecialPieces::Skip).unwrap(),
        "user\nHi\n"
    );
    // User-defined tokens are text.
    let call = QWEN.encode("<tool_call>x", EncodeOptions::TEXT);
    assert_eq!(raw(&call), [151_657, 87]);
    assert_eq!(
        QWEN.decode(&call, SpecialPieces::Skip).unwrap(),
        "<tool_call>x"
    );
}

#[test]
fn a_stream_gives_whole_characters_only() {
    let family = "👨‍👩‍👧‍👦é漢";
    let found = QWEN.encode(family, EncodeOptions::TEXT);
    let mut stream = DecodeStream::new(DecodeFrom::TextStart, SpecialPieces::Skip);
    let parts: Vec<String> = found
        .iter()
        .map(|&id| stream.push(&QWEN, id).unwrap())
        .collect();
    assert_eq!(parts.concat(), family);
    assert!(
        parts
            .iter()
            .all(|part| !part.contains(char::REPLACEMENT_CHARACTER))
    );
    assert!(parts.iter().any(String::is_empty));
    assert_eq!(stream.finish(), "");

    let mut cut = DecodeStream::new(DecodeFrom::TextStart, SpecialPieces::Skip);
    let bytes = STORIES.encode("漢", EncodeOptions::TEXT);
    // A space, then three bytes.
    assert_eq!(bytes.len(), 4);
    for &id in &bytes[..3] {
        assert_eq!(cut.push(&STORIES, id).unwrap(), "");
    }
    assert_eq!(cut.finish(), "\u{FFFD}");
}

#[test]
fn the_first_space_of_spm_belongs_to_a_continuation() {
    let found = STORIES.encode("Once upon", EncodeOptions::PROMPT);
    assert_eq!(
        STORIES.decode(&found, SpecialPieces::Skip).unwrap(),
        "Once upon"
    );
    assert_eq!(stream(&STORIES, &found, SpecialPieces::Skip), "Once upon");
    let mut more = DecodeStream::new(DecodeFrom::Continuation, SpecialPieces::Skip);
    assert_eq!(more.push(&STORIES, found[1]).unwrap(), " Once");
}

#[test]
fn a_token_outside_of_the_vocabulary_is_an_error() {
    let error = TokenizerError::UnknownToken {
        id: 1024,
        n_tokens: 1024,
    };
    assert_eq!(
        STORIES.decode(&[TokenId(1024)], SpecialPieces::Skip),
        Err(error.clone())
    );
    let mut stream = DecodeStream::new(DecodeFrom::TextStart, SpecialPieces::Skip);
    assert_eq!(stream.push(&STORIES, TokenId(1024)), Err(error));
}

#[test]
fn merges_are_those_of_an_independent_implementation() {
    use tokenizers::models::bpe::BPE;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::sequence::Sequence;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

    let spec = spec(&data("qwen2.vocab.lzma"));
    let vocab = spec.tokens.iter().cloned().zip(0u32..);
    let merges = spec
        .merges
        .iter()
        .map(|merge| merge.split_once(' ').unwrap())
        .map(|(left, right)| (left.to_owned(), right.to_owned()))
        .collect::<Vec<_>>();
    let vocab = vocab.collect::<tokenizers::models::bpe::Vocab>();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .build()
        .unwrap();
    let mut other = tokenizers::Tokenizer::new(bpe);
    let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = Split::new(
        SplitPattern::Regex(pattern.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    );
    other.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Split(split.unwrap()),
        PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)),
    ])));
    for case in golden(&data("qwen2.golden.lzma")) {
        // Neither special tokens nor the long s, which (?i:'s) matches and llama.cpp does not.
        if case.text.contains("tool_call") || case.text.contains("'ſ") {
            continue;
        }
        let theirs = other.encode(case.text.as_str(), false).unwrap();
        let ours = QWEN.encode(&case.text, EncodeOptions::TEXT);
        assert_eq!(raw(&ours), theirs.get_ids(), "{:?}", case.text);
    }
}

fn error_of(change: impl FnOnce(&mut TokenizerSpec)) -> TokenizerError {
    let mut spec = spec(&data("stories.vocab"));
    change(&mut spec);
    Tokenizer::new(spec).unwrap_err()
}

#[test]
fn bad_data_is_an_error_with_numbers() {
    use TokenizerError as E;
    let n_tokens = 1024;
    let list = "tokenizer.ggml.scores";
    let error = E::LengthMismatch {
        list,
        n_entries: 3,
        n_tokens,
    };
    assert_eq!(error_of(|s| s.scores.truncate(3)), error);
    assert_eq!(
        error_of(|s| s.scores.clear()),
        E::LengthMismatch {
            list,
            n_entries: 0,
            n_tokens
        }
    );
    let list = "tokenizer.ggml.token_type";
    let error = E::LengthMismatch {
        list,
        n_entries: 1025,
        n_tokens,
    };
    assert_eq!(error_of(|s| s.kinds.push(TokenKind::Normal)), error);
    assert_eq!(error_of(|s| s.tokens.clear()), E::EmptyVocab);
    assert_eq!(
        error_of(|s| s.scores[7] = f32::NAN),
        E::ScoreNotANumber { id: 7 }
    );
    let error = E::DuplicateToken {
        text: "▁t".to_owned(),
        first: 259,
        second: 900,
    };
    assert_eq!(error_of(|s| s.tokens[900] = "▁t".to_owned()), error);
    let error = E::BadByteToken {
        id: 3,
        text: "<0x0G>".to_owned(),
    };
    assert_eq!(error_of(|s| s.tokens[3] = "<0x0G>".to_owned()), error);
    let to_bpe = |s: &mut TokenizerSpec| {
        s.model = TokenizerModel::Bpe;
        s.kinds.clear();
    };
    assert_eq!(error_of(to_bpe), E::MissingMerges);
    let name = "tekken7".to_owned();
    let error = E::UnknownPre { name: name.clone() };
    assert_eq!(error_of(|s| (to_bpe(s), s.pre = Some(name)).0), error);

    let mut qwen = spec(&data("qwen2.vocab.lzma"));
    qwen.merges[5] = "nospace".to_owned();
    let error = E::BadMerge {
        index: 5,
        text: "nospace".to_owned(),
    };
    assert_eq!(Tokenizer::new(qwen.clone()).unwrap_err(), error);
    qwen.merges.clear();
    assert_eq!(Tokenizer::new(qwen.clone()).unwrap_err(), E::MissingMerges);
    qwen.merges.push("a b".to_owned());
    qwen.special.bos = None;
    qwen.special.unk = Some(TokenId(0));
    qwen.add_bos = Some(true);
    assert_eq!(
        Tokenizer::new(qwen).unwrap_err(),
        E::MissingSpecial { name: "bos" }
    );
}

#[test]
fn a_merge_whose_result_is_no_token_loses_no_text() {
    let mut qwen = spec(&data("qwen2.vocab.lzma"));
    let the = QWEN.token_id("Ġthe").unwrap();
    qwen.tokens[the.as_usize()] = "[gone]".to_owned();
    let tokenizer = Tokenizer::new(qwen).unwrap();
    let found = tokenizer.encode(" the", EncodeOptions::TEXT);
    let bytes = [" ", "t", "h", "e"].map(|text| QWEN.encode(text, EncodeOptions::TEXT)[0]);
    assert_eq!(found, bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_text_comes_back(text in any::<String>()) {
        for tokenizer in [&*QWEN, &*STORIES] {
            let found = tokenizer.encode(&text, EncodeOptions::TEXT);
            prop_assert_eq!(&tokenizer.decode(&found, SpecialPieces::Render).unwrap(), &text);
            prop_assert_eq!(&stream(tokenizer, &found, SpecialPieces::Render), &text);
        }
    }

    #[test]
    fn text_like_code_comes_back(text in "[a-z' \t\r\n0-9{}<|>éß漢😀\u{301}]{0,80}") {
        for tokenizer in [&*QWEN, &*STORIES] {
            let found = tokenizer.encode(&text, EncodeOptions::TEXT);
            prop_assert_eq!(&tokenizer.decode(&found, SpecialPieces::Render).unwrap(), &text);
        }
    }

    #[test]
    fn streaming_any_tokens_equals_decoding_them(
        qwen in prop::collection::vec(0..151_936u32, 0..24),
        stories in prop::collection::vec(prop_oneof![3..259u32, 0..1024u32], 0..24),
    ) {
        for (tokenizer, raw) in [(&*QWEN, &qwen), (&*STORIES, &stories)] {
            let ids = ids(raw);
            for special in [SpecialPieces::Skip, SpecialPieces::Render] {
                let whole = tokenizer.decode(&ids, special).unwrap();
                prop_assert_eq!(stream(tokenizer, &ids, special), whole);
            }
        }
    }

    #[test]
    fn any_spec_is_built_or_refused(
        model in prop::sample::select(vec![TokenizerModel::Spm, TokenizerModel::Bpe]),
        tokens in prop::collection::vec("[ab▁Ġ<>0x]{0,3}", 0..12),
        scores in prop::collection::vec(any::<f32>(), 0..12),
        codes in prop::collection::vec(0..7i64, 0..12),
        merges in prop::collection::vec("[ab ]{0,4}", 0..6),
        unk in prop::option::of(0..12u32),
        text in "[ab <>é]{0,12}",
    ) {
        let mut spec = TokenizerSpec::new(model, tokens);
        spec.pre = Some("gpt-2".to_owned());
        spec.scores = scores;
        spec.kinds = codes.iter().map(|&code| TokenKind::from_code(0, code).unwrap()).collect();
        spec.merges = merges;
        spec.special.unk = unk.map(TokenId);
        if let Ok(tokenizer) = Tokenizer::new(spec) {
            let found = tokenizer.encode(&text, EncodeOptions::PROMPT);
            prop_assert!(found.iter().all(|id| id.as_usize() < tokenizer.n_tokens()));
            prop_assert!(tokenizer.decode(&found, SpecialPieces::Render).is_ok());
        }
    }
}
