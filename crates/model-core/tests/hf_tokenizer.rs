//! Tokenizers of model directories against the library that wrote them, on the same
//! `tokenizer.json`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::path::Path;

use crate::tokenizer_data::byte_char;
use model_core::hf::tokenizer_keys;
use model_core::model_file::tokenizer_spec;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialText, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

const TEXTS: [&str; 22] = [
    "",
    "Hello world",
    " leading and  double   spaces ",
    "WE'LL pay $12345.6, don't you'd?\r\n\r\n  (now)\n  \t end  ",
    "camelCase XMLHttpRequest iPhone ABCdef HELLOworld",
    "naïve café ÉCOLE straße ǅungla e\u{301}t\u{301}",
    "漢字かな交じり文 and text",
    "a/b//c\n/ x/\n\n",
    "1 12 123 1234 12345 ٣٤٥ ½",
    "tabs\t\tand\n\n\nnewlines \n x",
    "emoji 😀👍🏽 and ZWJ 👩‍💻",
    "I'M 'quoted' it's IT'S 'S'",
    "ʰmodifier ªordinal Ⅷ",
    "foo_bar-baz+qux=1",
    "...!!!???",
    "\u{a0}nbsp\u{2003}em",
    "mixedСмешанный текст",
    "x'",
    "'",
    "A",
    "Aa aA AA aa",
    "\u{301}mark first \u{301}\u{301}",
];

/// Our tokenizer and the library's, of the same files.
struct TokenizerPair {
    ours: Tokenizer,
    theirs: tokenizers::Tokenizer,
}

impl TokenizerPair {
    fn of_json(json: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        Self::of_directory(dir.path())
    }

    fn of_directory(dir: &Path) -> Self {
        let metadata = tokenizer_keys(dir).unwrap();
        let ours = Tokenizer::new(tokenizer_spec(&metadata).unwrap()).unwrap();
        let theirs = tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).unwrap();
        Self { ours, theirs }
    }

    fn assert_equal(&self, text: &str) {
        let options = EncodeOptions {
            add: AddSpecial::AsModel,
            special: SpecialText::Parse,
        };
        let ours: Vec<u32> = self
            .ours
            .encode(text, options)
            .iter()
            .map(|id| id.0)
            .collect();
        let theirs = self.theirs.encode(text, true).unwrap();
        assert_eq!(
            ours,
            theirs.get_ids(),
            "{text:?}: {:?}",
            theirs.get_tokens()
        );
    }
}

/// The reading of a word that is a token: merged, or whole.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Words {
    Merged,
    Whole,
}

/// A byte-level BPE that joins every pair of two characters that texts here have, so that a cut
/// anywhere else shows.
fn byte_level(pre_tokenizer: Value, words: Words) -> Value {
    let ignore_merges = words == Words::Whole;
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255u8 {
        vocab.insert(byte_char(byte).to_string(), json!(vocab.len()));
    }
    let common: Vec<char> = (0..=255u8)
        .filter(|b| {
            b.is_ascii_graphic()
                || matches!(b, b' ' | b'\n' | b'\t' | b'\r' | 0xC3 | 0xCC | 0x81 | 0xA9)
        })
        .map(byte_char)
        .collect();
    let mut merges = Vec::new();
    for left in &common {
        for right in &common {
            let joined = format!("{left}{right}");
            merges.push(format!("{left} {right}"));
            let id = vocab.len();
            vocab.entry(joined).or_insert(json!(id));
        }
    }
    json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "decoder": null,
        "post_processor": null, "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges,
            "unk_token": null, "byte_fallback": false, "fuse_unk": false, "dropout": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null},
    })
}

fn split(expression: &str) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]})
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Falcon's steps. The runs of digits that one of them cuts out say nothing that merges do not say:
/// none that was trained behind it joins a digit and something else.
fn falcon(byte_level_alone: &Value) -> Value {
    let mut json = byte_level(
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Punctuation", "behavior": "Contiguous"}, byte_level_alone,
            {"type": "Digits", "individual_digits": false},
            {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": false},
        ]}),
        Words::Merged,
    );
    let merges = json["model"]["merges"].as_array_mut().unwrap();
    merges.retain(|merge| {
        let digits = merge.as_str().unwrap().split(' ');
        let digits: Vec<bool> = digits.map(|c| c.contains(char::is_numeric)).collect();
        digits[0] == digits[1]
    });
    json
}

/// One of every pre-tokenizer, with the name that GGUF has for it.
fn byte_levels() -> Vec<(&'static str, Value)> {
    let byte_level_alone = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let digits = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true}, byte_level_alone]});
    vec![
        ("dbrx", byte_level(split(LLAMA3), Words::Merged)),
        ("llama-bpe", byte_level(split(LLAMA3), Words::Whole)),
        (
            "qwen2",
            byte_level(split(&LLAMA3.replace("{1,3}", "")), Words::Merged),
        ),
        ("gpt-4o", byte_level(split(GPT4O), Words::Merged)),
        ("tekken", byte_level(split(TEKKEN), Words::Whole)),
        ("gpt-2", byte_level(byte_level_alone.clone(), Words::Merged)),
        ("starcoder", byte_level(digits, Words::Merged)),
        ("falcon", falcon(&byte_level_alone)),
    ]
}

#[test]
fn words_are_cut_where_the_library_cuts_them() {
    for (name, json) in byte_levels() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let metadata = tokenizer_keys(dir.path()).unwrap();
        assert_eq!(metadata.get::<&str>("tokenizer.ggml.pre"), Ok(name));
        let both = TokenizerPair::of_directory(dir.path());
        for text in TEXTS {
            both.assert_equal(text);
        }
    }
}

#[test]
fn words_of_any_text_are_cut_where_the_library_cuts_them() {
    let all: Vec<TokenizerPair> = byte_levels()
        .iter()
        .map(|(_, json)| TokenizerPair::of_json(json))
        .collect();
    let character = prop_oneof![
        4 => prop::sample::select("abzABZ019 '\"/.,!?\t\n\r-_sStTlLdDmM".chars().collect::<Vec<_>>()),
        1 => prop::sample::select("éÉßǅʰª漢あ½٣\u{301}\u{a0}\u{200d}😀жЖ".chars().collect::<Vec<_>>()),
    ];
    let texts = prop::collection::vec(character, 0..24);
    proptest!(ProptestConfig::with_cases(300), |(chars in texts)| {
        let text: String = chars.into_iter().collect();
        for both in &all {
            both.assert_equal(&text);
        }
    });
}

#[test]
fn pieces_that_fall_back_to_bytes() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers/spm512");
    let both = TokenizerPair::of_directory(&dir);
    for text in TEXTS {
        both.assert_equal(text);
    }
}

/// An uncased WordPiece vocabulary of a few words.
fn word_piece() -> Value {
    let tokens = "[PAD] [UNK] [CLS] [SEP] [MASK] hello world the un ##aff ##able ##s ##ly caf ##e cafe ! ' , . - $ a b c \
        ##a ##b ##c 漢 字 1 ##2 ##3 ##4 naive straße don t ll we ##ed + =";
    let vocab: serde_json::Map<String, Value> = tokens
        .split_whitespace()
        .enumerate()
        .map(|(id, token)| (token.to_owned(), json!(id)))
        .collect();
    let special = |text: &str| {
        json!({"id": vocab[text], "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let added: Vec<Value> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        .map(special)
        .into();
    json!({
        "version": "1.0", "added_tokens": added,
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]},
                "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    })
}

fn word_piece_directory() -> tempfile::TempDir {
    word_piece_directory_of(&word_piece())
}

fn word_piece_directory_of(json: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let settings = json!({"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"});
    fs::write(
        dir.path().join("tokenizer_config.json"),
        settings.to_string(),
    )
    .unwrap();
    dir
}

#[test]
fn word_pieces() {
    let both = TokenizerPair::of_directory(word_piece_directory().path());
    for text in TEXTS {
        both.assert_equal(text);
    }
    for text in [
        "Hello, WORLD!",
        "unaffable unaffables unaffablez",
        "Café cafés CAFÉ",
        "the 漢字 a-b don't we'll",
        "1234 1 12x",
        "a\u{0}b\u{200B}c \u{FFFD}",
        "[MASK] the [SEP]",
        // No character yet, private use, and marks, signs and formats that are younger than others.
        "a\u{378} the\u{E000} b\u{E001} c\u{F8FF} a\u{8E2}b a\u{1734}b a\u{8D4}b a\u{2E45}b a\u{61C}b",
        &"a".repeat(101),
        &"a".repeat(100),
    ] {
        both.assert_equal(text);
    }
    let decoded = both.ours.encode("Hello unaffable!", EncodeOptions::TEXT);
    use model_core::tokenizer::SpecialPieces;
    let text = both.ours.decode(&decoded, SpecialPieces::Skip).unwrap();
    assert_eq!(text, "hello unaffable !");
}

#[test]
fn word_pieces_of_any_text() {
    let both = TokenizerPair::of_directory(word_piece_directory().path());
    let character = prop::sample::select(
        "abcABC uny '!,.-$1234éßafflesd漢字\t\n\u{301}\u{200b}+="
            .chars()
            .collect::<Vec<_>>(),
    );
    proptest!(ProptestConfig::with_cases(500), |(chars in prop::collection::vec(character, 0..30))| {
        both.assert_equal(&chars.into_iter().collect::<String>());
    });
}

#[test]
fn what_cannot_be_kept_is_named() {
    let said = |json: Value| {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        let error = tokenizer_keys(dir.path()).unwrap_err().to_string();
        error
            .replace(&dir.path().display().to_string(), "DIR")
            .replace("DIR\\", "DIR/")
    };
    let mut merged = byte_level(split(r"\w+|\s+"), Words::Merged);
    merged["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("MergedWithNext");
    assert_eq!(
        said(merged),
        "'DIR/tokenizer.json': 'pre_tokenizer.pretokenizers.0.behavior' is \"MergedWithNext\", not \
         Isolated, Contiguous, or Removed with 'invert'"
    );
    let mut unigram = word_piece();
    unigram["model"]["type"] = json!("Unigram");
    let error = said(unigram);
    assert_eq!(
        error,
        "'DIR/tokenizer.json': 'normalizer.type' is \"BertNormalizer\", not one of: Precompiled, NFKC, \
         Replace, Strip"
    );
    let mut words = word_piece();
    words["model"]["type"] = json!("WordLevel");
    let error = said(words);
    assert_eq!(
        error,
        "'DIR/tokenizer.json': 'model.type' is \"WordLevel\", not one of: BPE, WordPiece, Unigram"
    );
    let mut bytes = unigram_json();
    bytes["model"]["byte_fallback"] = json!(true);
    let error = said(bytes);
    assert_eq!(
        error,
        "'DIR/tokenizer.json': 'model.byte_fallback' is true, not false"
    );
    let mut pieces = unigram_json();
    pieces["model"]["vocab"][4] = json!(["a"]);
    let error = said(pieces);
    assert!(error.contains("'model.vocab.4' is "), "{error}");
    assert!(error.ends_with("not a text and a score"), "{error}");
    let mut table = unigram_json();
    table["normalizer"]["precompiled_charsmap"] = json!("no base64!");
    let error = said(table);
    assert!(error.ends_with("not base64"), "{error}");
}

/// XLM-RoBERTa's way: pieces behind a table.
fn unigram_json() -> Value {
    let path = "../../tests/fixtures/encoders/xlm_roberta_rerank_tiny/tokenizer.json";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn unigram(json: &Value) -> TokenizerPair {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let roles = json!({"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"});
    fs::write(dir.path().join("tokenizer_config.json"), roles.to_string()).unwrap();
    TokenizerPair::of_directory(dir.path())
}

fn unigram_text() -> impl Strategy<Value = String> {
    let characters = "aacdehiimnorstt  \t\u{3000}ﬁＡＢ…☃ég.!IRDWS";
    let character = prop::sample::select(characters.chars().collect::<Vec<_>>());
    let text = prop::collection::vec(character, 0..30);
    text.prop_map(|text| text.into_iter().collect())
}

#[test]
fn unigram_pieces_of_any_text() {
    let with_table = unigram(&unigram_json());
    let mut json = unigram_json();
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "NFKC"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]});
    json["pre_tokenizer"] = json["pre_tokenizer"]["pretokenizers"][1].clone();
    let with_nfkc = unigram(&json);
    proptest!(ProptestConfig::with_cases(500), |(text in unigram_text())| {
        with_table.assert_equal(&text);
        // White space at the end is left out on purpose.
        with_nfkc.assert_equal(text.trim_end());
    });
}

#[test]
fn pairs_of_texts() {
    let bert = "../../tests/fixtures/encoders/bert_rerank_tiny";
    let bert = TokenizerPair::of_directory(&Path::new(env!("CARGO_MANIFEST_DIR")).join(bert));
    for (both, texts) in [
        (unigram(&unigram_json()), ["the cat", "a bird sat"]),
        (bert, ["the cat sat", "Unhappiest dogs!"]),
    ] {
        for [first, second] in [texts, [texts[0], ""], ["", texts[1]], ["", ""]] {
            let ours = both.ours.encode_pair(first, second, SpecialText::Parse);
            let theirs = both.theirs.encode((first, second), true).unwrap();
            let ids: Vec<u32> = ours.tokens.iter().map(|id| id.0).collect();
            assert_eq!(ids, theirs.get_ids(), "{first:?} {second:?}");
            let sequences = theirs.get_sequence_ids();
            if let Some(start) = sequences.iter().position(|&of| of == Some(1)) {
                assert_eq!(ours.second, start, "{first:?} {second:?}");
            }
        }
    }
}

/// Capitals and accents stay as they are written, composed or not.
#[test]
fn cased_word_pieces_are_those_of_the_library() {
    let mut json = word_piece();
    json["normalizer"]["lowercase"] = json!(false);
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    for token in [
        "A",
        "##A",
        "##B",
        "É",
        "##É",
        "##COLE",
        "e",
        "##\u{301}",
        "##t",
        "ß",
        "We",
        "I",
    ] {
        let id = vocab.len();
        vocab.insert(token.to_owned(), json!(id));
    }
    let dir = word_piece_directory_of(&json);
    let both = TokenizerPair::of_directory(dir.path());
    for text in TEXTS {
        both.assert_equal(text);
    }
    for text in [
        "Hello hello",
        "ÉCOLE E\u{301}COLE",
        "AB aB Ab",
        "We wE",
        "the\tTHE\u{7}",
    ] {
        both.assert_equal(text);
    }
    let of_small = TokenizerPair::of_directory(word_piece_directory().path());
    let encode = |both: &TokenizerPair| both.ours.encode("We", EncodeOptions::PROMPT);
    assert_ne!(encode(&both), encode(&of_small));
}

#[test]
fn a_list_of_word_pieces_is_the_same_tokenizer() {
    let whole = word_piece_directory();
    let json = word_piece();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut lines = vec![""; vocab.len()];
    for (token, id) in vocab {
        lines[id.as_u64().unwrap() as usize] = token;
    }
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("vocab.txt", &lines.join("\n"));
    // Other models' directories have such files too.
    write("config.json", r#"{"model_type": "gpt2"}"#);
    assert!(
        !tokenizer_keys(dir.path())
            .unwrap()
            .contains("tokenizer.ggml.tokens")
    );
    write("config.json", r#"{"model_type": "bert"}"#);
    let (of_list, of_json) = (dir.path(), whole.path());
    let keys = [of_list, of_json].map(|dir| tokenizer_keys(dir).unwrap());
    let [of_list, of_json] = keys.map(|keys| {
        let spec = model_core::model_file::tokenizer_spec(&keys).unwrap();
        Tokenizer::new(spec).unwrap()
    });
    for text in TEXTS {
        let encode = |tokenizer: &Tokenizer| tokenizer.encode(text, EncodeOptions::PROMPT);
        assert_eq!(encode(&of_list), encode(&of_json), "{text}");
    }
    let said = || {
        let error = tokenizer_keys(dir.path()).unwrap_err().to_string();
        error
            .replace(&dir.path().display().to_string(), "DIR")
            .replace("DIR\\", "DIR/")
    };
    write("tokenizer_config.json", r#"{"do_lower_case": false}"#);
    assert_eq!(
        tokenizer_keys(dir.path())
            .unwrap()
            .get::<bool>("tokenizer.ggml.normalizer.lowercase"),
        Ok(false)
    );
    for (settings, wanted) in [
        (
            r#"{"strip_accents": false}"#,
            "'normalizer.strip_accents' is false, not true",
        ),
        (
            r#"{"do_lower_case": false, "strip_accents": true}"#,
            "'normalizer.strip_accents' is true, not false",
        ),
        (
            r#"{"tokenize_chinese_chars": false}"#,
            "'normalizer.handle_chinese_chars' is false, not true",
        ),
    ] {
        write("tokenizer_config.json", settings);
        assert_eq!(said(), format!("'DIR/vocab.txt': {wanted}"));
    }
    write("tokenizer_config.json", "{}");
    write("vocab.txt", "[UNK]\nthe\n##s\nthe\n");
    assert_eq!(
        said(),
        "'DIR/vocab.txt': line 4: token \"the\" is there twice"
    );
}
