//! Fill in the middle: the prompt of a gap between two texts, for models whose vocabulary has the
//! marks.
//!
//! Invariant: the tokens next to the gap stay; what does not fit is cut off far from it, the other
//! files first, as llama-server does. Texts are never read as marks.

use kv_core::TokenId;
use model_core::tokenizer::{EncodeOptions, Tokenizer};

/// How many quarters of the room the text before the gap may take where both sides are long.
const PREFIX_QUARTERS: usize = 3;

/// The name of a repository, or of a file that has none.
const REPOSITORY: &str = "repository\n";
const THIS_FILE: &str = "file\n";

/// A gap in a text, and what is known around it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    /// The text before it.
    pub prefix: String,
    /// The text after it.
    pub suffix: String,
    /// Other texts of the project, the least important first.
    pub files: Vec<GapFile>,
}

/// Another text of the project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GapFile {
    /// Its name.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// The marks of a vocabulary.
#[derive(Clone, Copy, Debug)]
struct Marks {
    prefix: TokenId,
    suffix: TokenId,
    middle: TokenId,
    repository: Option<TokenId>,
    file: Option<TokenId>,
}

impl Marks {
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ids = tokenizer.special_ids();
        Some(Self {
            prefix: ids.fim_pre?,
            suffix: ids.fim_suf?,
            middle: ids.fim_mid?,
            repository: ids.fim_rep,
            file: ids.fim_sep,
        })
    }
}

/// Whether a vocabulary has the marks.
pub(crate) fn is_known(tokenizer: &Tokenizer) -> bool {
    Marks::of(tokenizer).is_some()
}

/// The tokens of a text whose marks are only text.
fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    tokenizer.encode(text, EncodeOptions::TEXT)
}

/// The prompt of a gap, of so many tokens at most; `None` where the vocabulary lacks the marks.
///
/// `[first] [repository NAME file NAME text …] prefix BEFORE suffix AFTER middle`
pub(crate) fn prompt(tokenizer: &Tokenizer, gap: &Gap, limit: usize) -> Option<Vec<TokenId>> {
    let marks = Marks::of(tokenizer)?;
    let first = tokenizer.adds_first();
    let prefix = tokens(tokenizer, &gap.prefix);
    let suffix = tokens(tokenizer, &gap.suffix);
    let room = limit.saturating_sub(3 + usize::from(first.is_some()));
    // What one side does not need is the other's.
    let n_prefix = room / 4 * PREFIX_QUARTERS;
    let n_prefix = n_prefix.max(room.saturating_sub(suffix.len()));
    let before = last(&prefix, n_prefix);
    let after = suffix.get(..room - before.len()).unwrap_or(&suffix);
    let room = room - before.len() - after.len();
    let files = if gap.files.is_empty() {
        Vec::new()
    } else {
        files(tokenizer, marks, &gap.files)
    };
    let mut prompt: Vec<TokenId> = first.into_iter().collect();
    prompt.extend(last(&files, room));
    prompt.push(marks.prefix);
    prompt.extend(before);
    prompt.push(marks.suffix);
    prompt.extend(after);
    prompt.push(marks.middle);
    Some(prompt)
}

/// The last tokens, so many at most.
fn last(tokens: &[TokenId], n: usize) -> &[TokenId] {
    let at = tokens.len().saturating_sub(n);
    tokens.get(at..).unwrap_or_default()
}

/// Other texts of a project, and the beginning of this one.
fn files(tokenizer: &Tokenizer, marks: Marks, files: &[GapFile]) -> Vec<TokenId> {
    let mut out = Vec::new();
    if let Some(mark) = marks.repository {
        out.push(mark);
        out.extend(tokens(tokenizer, REPOSITORY));
    }
    for GapFile { name, text } in files {
        match marks.file {
            Some(mark) => {
                out.push(mark);
                out.extend(tokens(tokenizer, &format!("{name}\n")));
            }
            None => out.extend(tokens(tokenizer, &format!("\n\n--- {name} ---\n\n"))),
        }
        out.extend(tokens(tokenizer, text));
    }
    if let Some(mark) = marks.file {
        out.push(mark);
        out.extend(tokens(tokenizer, THIS_FILE));
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use model_core::tokenizer::{TokenizerModel, TokenizerSpec};

    use super::*;

    /// Bytes as BPE vocabularies write them, and the marks of Qwen.
    fn tokenizer(marks: &[&str]) -> Tokenizer {
        let is_shown = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let bytes = (0..=255).filter(is_shown).map(char::from);
        let others = char::from_u32(256).unwrap()..=char::from_u32(323).unwrap();
        let texts = bytes.chain(others).map(String::from);
        let texts = texts.chain(marks.iter().map(|&mark| mark.to_owned()));
        let spec = TokenizerSpec {
            pre: Some("qwen2".to_owned()),
            merges: vec!["Ġ Ġ".to_owned()],
            ..TokenizerSpec::new(TokenizerModel::Bpe, texts.collect())
        };
        Tokenizer::new(spec).unwrap()
    }

    fn written(tokenizer: &Tokenizer, gap: &Gap, limit: usize) -> String {
        let tokens = prompt(tokenizer, gap, limit).unwrap();
        assert!(tokens.len() <= limit);
        let text = tokens.iter().map(|&id| tokenizer.token_text(id).unwrap());
        text.collect::<String>().replace('Ċ', "\n")
    }

    const MARKS: [&str; 3] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];

    fn gap(prefix: &str, suffix: &str) -> Gap {
        Gap {
            prefix: prefix.to_owned(),
            suffix: suffix.to_owned(),
            files: Vec::new(),
        }
    }

    #[test]
    fn a_gap_stands_between_marks() {
        let plain = tokenizer(&[]);
        assert!(!is_known(&plain));
        assert_eq!(prompt(&plain, &Gap::default(), 100), None);
        let qwen = tokenizer(&MARKS);
        let text = written(&qwen, &gap("ab", "cd"), 100);
        assert_eq!(text, "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>");
    }

    #[test]
    fn what_is_far_from_the_gap_is_cut_off() {
        let qwen = tokenizer(&MARKS);
        let long = gap("abcdefghijklmnop", "abcdefghijklmnop");
        let text = written(&qwen, &long, 11);
        assert_eq!(text, "<|fim_prefix|>klmnop<|fim_suffix|>ab<|fim_middle|>");
        // What one side does not need is the other's.
        let text = written(&qwen, &gap("abcdefgh", "x"), 11);
        assert_eq!(text, "<|fim_prefix|>bcdefgh<|fim_suffix|>x<|fim_middle|>");
        let text = written(&qwen, &gap("x", "abcdefgh"), 11);
        assert_eq!(text, "<|fim_prefix|>x<|fim_suffix|>abcdefg<|fim_middle|>");
        assert_eq!(prompt(&qwen, &long, 0).unwrap().len(), 3);
    }

    #[test]
    fn other_files_come_first_and_go_first() {
        let all = [&MARKS[..], &["<|repo_name|>", "<|file_sep|>"]].concat();
        let qwen = tokenizer(&all);
        let file = |name: &str, text: &str| GapFile {
            name: name.to_owned(),
            text: text.to_owned(),
        };
        let gap = Gap {
            files: vec![file("a", "bc"), file("d", "ef")],
            ..gap("x", "y")
        };
        let text = written(&qwen, &gap, 100);
        let end = "<|file_sep|>file\n<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>";
        let expected = "<|repo_name|>repository\n<|file_sep|>a\nbc<|file_sep|>d\nef";
        assert_eq!(text, format!("{expected}{end}"));
        assert_eq!(written(&qwen, &gap, 13), format!("ef{end}"));
    }
}
