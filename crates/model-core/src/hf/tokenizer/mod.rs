//! The tokenizer of a directory, in the keys of GGUF: `tokenizer.json`, or `vocab.txt` of BERT, or
//! RWKV's vocabulary, with `tokenizer_config.json`, `generation_config.json` and
//! `chat_template.jinja` where they are.
//!
//! Invariant: what is written makes the tokenizer that the files describe, or there is an error
//! that names the part that cannot be kept. One thing is left out on purpose: white space at the
//! end of a text is no token of Unigram vocabularies, as in SentencePiece.

mod around;
mod pre;
mod rwkv_vocab;
mod tokens;
mod unigram;
mod vocab_txt;

use std::path::Path;

use super::class::as_u32;
use super::{HfConfig, Keys, ModelFileError};
use crate::gguf::{Array, Metadata};
use around::{AddedTokens, PostProcessor};
use pre::{Kind, WordCuts};
use tokens::Tokens;

/// The tokenizer of a directory alone, in the keys of GGUF; nothing where there is none.
///
/// # Errors
/// [`ModelFileError`] naming the file and key that cannot be kept.
pub fn tokenizer_keys(directory: impl AsRef<Path>) -> Result<Metadata, ModelFileError> {
    let directory = directory.as_ref();
    let path = directory.join("config.json");
    let nothing = || HfConfig::new(format!("'{}'", path.display()), serde_json::Map::new());
    let config = HfConfig::open_optional(&path)?.unwrap_or_else(nothing);
    let mut keys = Keys::new("");
    let generation = HfConfig::open_optional(&directory.join("generation_config.json"))?;
    translate(directory, &config, generation.as_ref(), &mut keys)?;
    Ok(keys.into_parts().0)
}

/// Translates the tokenizer, where there is one; `generation` is `generation_config.json`.
pub(super) fn translate(
    directory: &Path,
    config: &HfConfig,
    generation: Option<&HfConfig>,
    keys: &mut Keys,
) -> Result<(), ModelFileError> {
    let settings = HfConfig::open_optional(&directory.join("tokenizer_config.json"))?;
    let path = directory.join("tokenizer.json");
    if !path.exists() && directory.join(rwkv_vocab::FILE).exists() {
        let n_tokens = config.optional_count("vocab_size")?.unwrap_or(0);
        rwkv_vocab::translate(directory, n_tokens, keys)?;
        if let Some(template) = chat_template(directory, settings.as_ref())? {
            keys.set_whole("tokenizer.chat_template", template.as_str());
        }
        return Ok(());
    }
    let json = if path.exists() {
        HfConfig::open(&path)?
    } else {
        match vocab_txt::as_json(directory, config, settings.as_ref())? {
            Some(json) => json,
            None => return Ok(()),
        }
    };
    let kind = Kind::read(&json)?;
    let mut tokens = Tokens::read(&json, kind, config.most_rows())?;
    tokens.pad(config.optional_count("vocab_size")?.unwrap_or(0));
    keys.set_whole("tokenizer.ggml.model", kind.gguf_model());
    match kind.gguf_pre() {
        Some(name) => keys.set_whole("tokenizer.ggml.pre", name),
        None => WordCuts::read(&json)?.write(keys),
    }
    if matches!(kind, Kind::Spm | Kind::Unigram) {
        let scores = tokens.scores();
        keys.set_whole("tokenizer.ggml.scores", Array::F32(scores));
    } else if !tokens.merges.is_empty() {
        let merges = std::mem::take(&mut tokens.merges);
        keys.set_whole("tokenizer.ggml.merges", Array::String(merges));
    }
    let around = PostProcessor::read(&json, &tokens)?;
    let roles = RoleFiles {
        config,
        settings: settings.as_ref(),
        generation,
        around,
    };
    special_ids(&tokens, kind, &roles, keys)?;
    if kind == Kind::Unigram {
        unigram::text_form(&json, keys)?;
    }
    if let Some(space) = pre::space_prefix(&json, kind) {
        keys.set_whole("tokenizer.ggml.add_space_prefix", space);
    }
    for (name, found, other) in [
        ("bos", around.first, "add_bos_token"),
        ("eos", around.last, "add_eos_token"),
    ] {
        let said = match &settings {
            Some(settings) => settings.optional_flag(other)?,
            None => None,
        };
        if let Some(add) = found.map(AddedTokens::is_something).or(said) {
            keys.set_whole(&format!("tokenizer.ggml.add_{name}_token"), add);
        }
    }
    if let Some(n_between) = around.n_between
        && keys
            .metadata()
            .contains("tokenizer.ggml.seperator_token_id")
    {
        // Between the texts of a pair: the end of the first, and perhaps a separator.
        keys.set_whole("tokenizer.ggml.add_sep_token", n_between > 1);
    }
    if kind == Kind::WordPiece {
        if !pre::lowercase(&json)? {
            keys.set_whole("tokenizer.ggml.normalizer.lowercase", false);
        }
        let key = "type_vocab_size";
        let n_types = match config.optional_number(key)? {
            // DeBERTa tells texts apart by none.
            Some(0.0) => 0,
            _ => config.optional_count(key)?.unwrap_or(2),
        };
        keys.set_whole("tokenizer.ggml.token_type_count", as_u32(n_types));
    }
    if let Some(template) = chat_template(directory, settings.as_ref())? {
        keys.set_whole("tokenizer.chat_template", template.as_str());
    }
    let (texts, types) = tokens.into_lists(kind);
    keys.set_whole("tokenizer.ggml.tokens", Array::String(texts));
    keys.set_whole("tokenizer.ggml.token_type", Array::I32(types));
    Ok(())
}

/// The files that give tokens their roles.
struct RoleFiles<'a> {
    config: &'a HfConfig,
    /// `tokenizer_config.json`
    settings: Option<&'a HfConfig>,
    /// `generation_config.json`
    generation: Option<&'a HfConfig>,
    around: PostProcessor,
}

/// The tokens with a role, by `tokenizer_config.json`, or else by `config.json`, or else by the
/// names that BERT's always have. Generation may end with up to three tokens; those after the
/// first become end of turn and end of message. What is added after a text comes first of all: it
/// is not always what ends a generation (Qwen3-Embedding).
fn special_ids(
    tokens: &Tokens,
    kind: Kind,
    roles: &RoleFiles<'_>,
    keys: &mut Keys,
) -> Result<(), ModelFileError> {
    let RoleFiles {
        config, settings, ..
    } = *roles;
    let by_text = |role: &str| -> Result<Option<u32>, ModelFileError> {
        let Some(settings) = settings else {
            return Ok(None);
        };
        let key = format!("{role}_token");
        let inner = format!("{key}.content");
        let text = match settings.value(&inner) {
            Some(_) => settings.optional_text(&inner)?,
            None => settings.optional_text(&key)?,
        };
        match text.map(|text| (text, tokens.id(text))) {
            Some((_, Some(id))) => Ok(Some(id)),
            // A mark that no text of this vocabulary has plays no role.
            Some((_, None)) | None => Ok(None),
        }
    };
    for (role, name) in [
        ("bos", "bos"),
        ("unk", "unknown"),
        ("pad", "padding"),
        ("cls", "cls"),
        ("sep", "seperator"),
        ("mask", "mask"),
    ] {
        let id = match by_text(role)? {
            Some(id) => Some(id),
            None => token_ids(config, &format!("{role}_token_id"))?
                .first()
                .copied(),
        };
        let id = id.or(tokens.unknown.filter(|_| role == "unk"));
        let usual = || tokens.id(&format!("[{}]", role.to_uppercase()));
        let id = id.or_else(|| (kind == Kind::WordPiece).then(usual).flatten());
        if let Some(id) = id {
            keys.set_whole(&format!("tokenizer.ggml.{name}_token_id"), id);
        }
    }
    let mut ends: Vec<u32> = by_text("eos")?.into_iter().collect();
    for config in [roles.generation, Some(config)].into_iter().flatten() {
        for id in token_ids(config, "eos_token_id")? {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
    }
    // BERT has no end but its separator, which is found above.
    let has = |name: &str| {
        let key = format!("tokenizer.ggml.{name}_token_id");
        keys.metadata().contains(&key)
    };
    let (has_first, has_separator) = (has("bos") || has("cls"), has("seperator"));
    if let Some(AddedTokens::Token(last)) = roles.around.last
        && ends.first() != Some(&last)
        && !(ends.is_empty() && has_separator)
    {
        ends.retain(|&id| id != last);
        ends.insert(0, last);
    }
    // A tokenizer.json alone names no roles but those that its post-processor has.
    if let Some(AddedTokens::Token(first)) = roles.around.first
        && !has_first
    {
        keys.set_whole("tokenizer.ggml.bos_token_id", first);
    }
    for (name, id) in ["eos", "eot", "eom"].into_iter().zip(ends) {
        keys.set_whole(&format!("tokenizer.ggml.{name}_token_id"), id);
    }
    Ok(())
}

/// One id or a list of them.
fn token_ids(config: &HfConfig, key: &str) -> Result<Vec<u32>, ModelFileError> {
    let id = |number: f64| (number.fract() == 0.0 && number >= 0.0).then_some(number as u32);
    let wrong = || config.wrong(key, "a token id or a list of them");
    match config.value(key) {
        None => Ok(Vec::new()),
        Some(value) if value.is_array() => {
            let numbers = config.optional_numbers(key)?.unwrap_or_default();
            let ids: Option<Vec<u32>> = numbers.into_iter().map(id).collect();
            ids.ok_or_else(wrong)
        }
        Some(_) => match config.optional_number(key)? {
            // Some files write -1 for a token that is not there.
            Some(-1.0) | None => Ok(Vec::new()),
            Some(number) => id(number).map(|id| vec![id]).ok_or_else(wrong),
        },
    }
}

/// The template of chats: a file of its own, a text, or the one called "default" of a list.
fn chat_template(
    directory: &Path,
    settings: Option<&HfConfig>,
) -> Result<Option<String>, ModelFileError> {
    let path = directory.join("chat_template.jinja");
    if path.exists() {
        let read = std::fs::read_to_string(&path);
        return read.map(Some).map_err(|source| ModelFileError::Io {
            attempt: "read",
            path,
            source,
        });
    }
    let Some(settings) = settings else {
        return Ok(None);
    };
    let key = "chat_template";
    match settings.value(key).and_then(|v| v.as_array()) {
        None => Ok(settings.optional_text(key)?.map(str::to_owned)),
        Some(list) => {
            let is_default = |i: &usize| {
                let name = settings.optional_text(&format!("{key}.{i}.name"));
                name.ok().flatten() == Some("default")
            };
            let default = (0..list.len()).find(is_default);
            let text = default.map(|i| settings.optional_text(&format!("{key}.{i}.template")));
            Ok(text.transpose()?.flatten().map(str::to_owned))
        }
    }
}
