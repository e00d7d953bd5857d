//! Pre-tokenizers by the names that GGUF files give them.
//!
//! A name stands for the expressions that cut a text into words and for what the vocabulary needs
//! besides. The names, and which of them share expressions, are llama.cpp's (build 11434); the
//! expressions are those of the published `tokenizer.json` or of the code that came with the model.

use super::words::{
    BEFORE_THREES, DIGIT, GPT2, GPT4O, JAIS2, LLAMA3, MINICPM5, PUNCTUATION, QWEN2, QWEN35, TEKKEN,
    THREE_NUMBERS, THREES, TRIPLE, WordSplitter,
};
use super::{TokenizerError, TokenizerModel, TokenizerSpec};

/// The name that means "the expressions that the file spells out"
/// (`tokenizer.ggml.pre_expressions`). It is our own.
pub(crate) const SPELLED_OUT: &str = "expressions";

/// The expressions and traits of a vocabulary of merges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    expressions: Vec<String>,
    pub(super) traits: PreTraits,
}

/// Traits that a pre-tokenizer's name implies besides its expressions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PreTraits {
    /// True if a word that is a token stays whole, whatever the merges.
    pub(super) whole_words: bool,
    /// True if a text starts with BOS unless the file specifies otherwise.
    pub(super) add_bos: bool,
    pub(super) alphabet: Alphabet,
}

/// The symbols that merges join.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// The bytes of a word, each written as a character.
    #[default]
    Bytes,
    /// The characters of a word.
    Characters,
    /// The characters of a line, in which a space is written as in SentencePiece.
    SpacedLines,
    /// The characters of a word, which begins with such a space; so does a text.
    SpacedWords,
}

const BYTES: PreTraits = PreTraits {
    whole_words: false,
    add_bos: false,
    alphabet: Alphabet::Bytes,
};
const WHOLE: PreTraits = PreTraits {
    whole_words: true,
    ..BYTES
};
const WITH_BOS: PreTraits = PreTraits {
    add_bos: true,
    ..BYTES
};
const WHOLE_WITH_BOS: PreTraits = PreTraits {
    add_bos: true,
    ..WHOLE
};
const CHARACTERS: PreTraits = PreTraits {
    alphabet: Alphabet::Characters,
    ..BYTES
};
const SPACED_LINES: PreTraits = PreTraits {
    alphabet: Alphabet::SpacedLines,
    ..BYTES
};
const SPACED_LINES_WITH_BOS: PreTraits = PreTraits {
    add_bos: true,
    ..SPACED_LINES
};
const SPACED_WORDS: PreTraits = PreTraits {
    alphabet: Alphabet::SpacedWords,
    ..BYTES
};

/// The letters of scripts with two cases, as DeepSeek's first vocabulary lists them.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_SYMBOLS: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";
/// Han, Kana and Hangul.
const CJK: &str = r"[一-龥ࠀ-一가-퟿]+";
const HAN_AND_KANA: &str = r"[一-龥぀-ゟ゠-ヿ]+";
const UP_TO_THREE_DIGITS: &str = r"\p{N}{1,3}";
/// The words of DeepSeek V3.
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const YOUTU_SCRIPTS: &str = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of BLOOM: up to white space or punctuation.
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// Those of Kimi K2: GPT-4o's, with Han characters apart.
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Those of Bailing; its file gives nothing back (`?+`, `++`), which changes no match.
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's without English contractions.
const UFAKZEKA: &str =
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const ASIAN_SCRIPTS: &str = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// Runs of punctuation, but for grave accents.
const PUNCTUATION_OF_DEFAULT: &str = r"[\p{P}\$\+<=>\^~\|]+";
const LINES: &str = r"[^\n]+|[\n]+";

/// Names of the same pre-tokenizer, its expressions in order, and its traits.
struct PreTokenizerEntry {
    names: &'static [&'static str],
    expressions: &'static [&'static str],
    traits: PreTraits,
}

const KNOWN: &[PreTokenizerEntry] = &[
    PreTokenizerEntry {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        expressions: &[LLAMA3],
        traits: WHOLE_WITH_BOS,
    },
    PreTokenizerEntry {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        expressions: &[LLAMA3],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["glm4", "glm5"],
        expressions: &[LLAMA3],
        traits: WHOLE,
    },
    PreTokenizerEntry {
        names: &["jais-2"],
        expressions: &[JAIS2],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
            "openpangu",
        ],
        expressions: &[QWEN2],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["qwen35"],
        expressions: &[QWEN35],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["laguna"],
        expressions: &[LINES, QWEN2],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["ufakzeka"],
        expressions: &[UFAKZEKA],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["minicpm5"],
        expressions: &[UP_TO_THREE_DIGITS, MINICPM5],
        traits: WHOLE,
    },
    PreTokenizerEntry {
        names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        expressions: &[GPT4O],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["granite-embed-multi-97m"],
        expressions: &[GPT4O],
        traits: WHOLE,
    },
    PreTokenizerEntry {
        names: &["tiny_aya", "cohere2moe"],
        expressions: &[THREES, GPT4O],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["tekken"],
        expressions: &[TEKKEN],
        traits: WHOLE_WITH_BOS,
    },
    PreTokenizerEntry {
        names: &["kimi-k2"],
        expressions: &[KIMI],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["youtu"],
        expressions: &[YOUTU_SCRIPTS, YOUTU],
        traits: WHOLE,
    },
    PreTokenizerEntry {
        names: &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "modern-bert",
            "roberta-bpe",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        expressions: &[GPT2],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        expressions: &[DIGIT, GPT2],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["falcon"],
        expressions: &[PUNCTUATION, GPT2, TRIPLE],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["default"],
        expressions: &[PUNCTUATION_OF_DEFAULT, GPT2, r"\p{N}+", TRIPLE],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["deepseek-llm"],
        expressions: &[
            "[\r\n]",
            DEEPSEEK_LETTERS,
            DEEPSEEK_SYMBOLS,
            r"\s+$",
            CJK,
            r"\p{N}+",
        ],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["deepseek-coder"],
        expressions: &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        expressions: &[UP_TO_THREE_DIGITS, HAN_AND_KANA, DEEPSEEK3],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["spark2_5"],
        expressions: &[UP_TO_THREE_DIGITS, HAN_AND_KANA, SPARK, DIGIT],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["afmoe"],
        expressions: &[THREE_NUMBERS, ASIAN_SCRIPTS, DEEPSEEK3],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["poro-chat", "bloom", "gpt3-finnish"],
        expressions: &[BLOOM],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["viking"],
        expressions: &[BLOOM, DIGIT],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["chameleon"],
        expressions: &[
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ],
        traits: WITH_BOS,
    },
    PreTokenizerEntry {
        names: &["superbpe"],
        expressions: &[r"\p{N}+", BEFORE_THREES],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        expressions: &[BAILING],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["seed-coder"],
        expressions: &[SEED],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["exaone-moe"],
        expressions: &[EXAONE_MOE],
        traits: BYTES,
    },
    PreTokenizerEntry {
        names: &["gemma4", "granite-embed-multi-311m"],
        expressions: &[LINES],
        traits: SPACED_LINES_WITH_BOS,
    },
    PreTokenizerEntry {
        names: &["sarvam-moe"],
        expressions: &[LINES],
        traits: SPACED_LINES,
    },
    PreTokenizerEntry {
        names: &["mmbert"],
        expressions: &[LINES],
        traits: SPACED_WORDS,
    },
    PreTokenizerEntry {
        names: &["whitespace"],
        expressions: &[r"\S+"],
        traits: CHARACTERS,
    },
];

impl PreTokenizer {
    /// The pre-tokenizer of a vocabulary of merges. Old files name none: those are cut as
    /// llama.cpp cuts them, with a warning, as another one may be right.
    pub(super) fn of(spec: &TokenizerSpec) -> Result<Self, TokenizerError> {
        let mut found = match spec.pre.as_deref() {
            _ if spec.model == TokenizerModel::CharacterBpe => Self::named("gemma4")?,
            Some(SPELLED_OUT) => Self {
                expressions: spec.expressions.clone(),
                traits: BYTES,
            },
            Some(name) => Self::named(name)?,
            None => {
                tracing::warn!(
                    "the file names no pre-tokenizer (tokenizer.ggml.pre): \"default\" is used, \
                     and texts may be cut wrongly; convert the model again if its answers are poor"
                );
                Self::named("default")?
            }
        };
        if let Some(whole_words) = spec.whole_words {
            found.traits.whole_words = whole_words;
        }
        Ok(found)
    }

    /// The pre-tokenizer with this name.
    ///
    /// # Errors
    /// [`TokenizerError::UnknownPre`] where there is none.
    pub(super) fn named(name: &str) -> Result<Self, TokenizerError> {
        let known = KNOWN.iter().find(|known| known.names.contains(&name));
        let known = known.ok_or_else(|| TokenizerError::UnknownPre {
            name: name.to_owned(),
        })?;
        Ok(Self {
            expressions: known.expressions.iter().map(|&e| e.to_owned()).collect(),
            traits: known.traits,
        })
    }

    /// Its expressions, ready to cut.
    pub(super) fn splitter(&self) -> Result<WordSplitter, TokenizerError> {
        WordSplitter::new(self.expressions.iter().map(String::as_str))
    }
}

/// A pre-tokenizer as files name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KnownName {
    pub(crate) name: &'static str,
    /// True if a word that is a token stays whole.
    pub(crate) whole_words: bool,
}

/// The byte-level pre-tokenizers with these expressions.
pub(crate) fn named(expressions: &[String]) -> impl Iterator<Item = KnownName> {
    let is_cut_so = move |known: &&PreTokenizerEntry| {
        known.traits.alphabet == Alphabet::Bytes && known.expressions.iter().eq(expressions)
    };
    KNOWN.iter().filter(is_cut_so).map(|known| KnownName {
        name: known.names[0],
        whole_words: known.traits.whole_words,
    })
}
