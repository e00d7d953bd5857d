//! Vocabularies, metadata and chat templates.

use std::ffi::{CStr, c_char};

use super::scene::{LoadedModel, N_VOCAB, Text};
use crate::abi::{KvOverride, Message, OverrideValue};
use crate::chat::llama_chat_apply_template;
use crate::defaults::{llama_model_default_params, llama_split_path, llama_split_prefix};
use crate::ffi::{CText, Handle, In, Out};
use crate::meta::{
    llama_model_meta_val_str, llama_model_n_ctx_train, llama_model_n_layer, llama_model_n_params,
    llama_model_rope_type,
};
use crate::model::{Model, llama_model_free, llama_model_load_from_file};
use crate::vocab::{
    llama_detokenize, llama_token_to_piece, llama_tokenize, llama_vocab_bos, llama_vocab_eos,
    llama_vocab_get_text, llama_vocab_is_eog, llama_vocab_n_tokens,
};

fn tokens_of(model: Handle<Model>, text: &str) -> Vec<i32> {
    let n_bytes = i32::try_from(text.len()).unwrap();
    let input = In::of(text.as_ptr());
    let none = Out::of(std::ptr::null_mut());
    let needed = llama_tokenize(model, input, n_bytes, none, 0, true, true);
    let n = usize::try_from(-needed).unwrap();
    let mut tokens = vec![0; n];
    let out = Out::of(tokens.as_mut_ptr());
    assert_eq!(
        llama_tokenize(model, input, n_bytes, out, -needed, true, true),
        -needed
    );
    tokens
}

#[test]
fn a_text_and_its_tokens_are_the_same() {
    let model = LoadedModel::new();
    let text = "Once upon a time, there was a dog.";
    let tokens = tokens_of(model.0, text);
    assert_eq!(tokens[0], llama_vocab_bos(model.0));
    let mut buffer = [0; 64];
    let n = i32::try_from(tokens.len()).unwrap();
    let out = Out::of(buffer.as_mut_ptr());
    let n_bytes = llama_detokenize(model.0, In::of(tokens.as_ptr()), n, out, 64, true, false);
    // As in llama.cpp, the space before the text stays where BOS was removed.
    let got = &buffer[..usize::try_from(n_bytes).unwrap()];
    assert_eq!(got, format!(" {text}").as_bytes());
    let after = In::of(tokens[1..].as_ptr());
    let n_after = llama_detokenize(model.0, after, n - 1, out, 64, true, false);
    assert_eq!(n_after, n_bytes - 1, "without BOS it goes");
    let short = llama_detokenize(model.0, In::of(tokens.as_ptr()), n, out, 3, true, false);
    assert_eq!(short, -n_bytes, "what it takes");
    // Pieces have their spaces, of which a program may skip some.
    let piece = |lstrip| {
        let mut piece = [0; 16];
        let out = Out::of(piece.as_mut_ptr());
        let n = llama_token_to_piece(model.0, tokens[2], out, 16, lstrip, false);
        String::from_utf8(piece[..usize::try_from(n).unwrap()].to_vec()).unwrap()
    };
    assert_eq!(piece(0).trim_start(), piece(1));
    assert_eq!(llama_vocab_n_tokens(model.0), N_VOCAB as i32);
    assert!(llama_vocab_is_eog(model.0, llama_vocab_eos(model.0)));
    assert!(llama_vocab_get_text(model.0, -1).is_null());
    assert!(llama_vocab_get_text(model.0, N_VOCAB as i32).is_null());
}

#[test]
fn metadata_is_text_and_can_be_overridden() {
    let path = Text::new(super::scene::STORIES);
    let mut key = [0; 128];
    for (to, from) in key.iter_mut().zip(b"llama.context_length") {
        *to = *from as c_char;
    }
    let mut value = [0; 128];
    value[..8].copy_from_slice(&77_i64.to_ne_bytes());
    let end = KvOverride {
        tag: 0,
        key: [0; 128],
        value: OverrideValue([0; 128]),
    };
    let overrides = [
        KvOverride {
            tag: 0,
            key,
            value: OverrideValue(value),
        },
        end,
    ];
    let mut params = llama_model_default_params();
    params.kv_overrides = overrides.as_ptr();
    let model = llama_model_load_from_file(path.get(), params);
    assert_eq!(llama_model_n_ctx_train(model), 77);
    let mut buffer = [1 as c_char; 8];
    let (name, missing) = (Text::new("general.architecture"), Text::new("no.such.key"));
    let out = Out::of(buffer.as_mut_ptr());
    assert_eq!(
        llama_model_meta_val_str(model, name.get(), out, 4),
        5,
        "of the whole text"
    );
    // SAFETY: the text was cut and ends with a NUL.
    assert_eq!(unsafe { CStr::from_ptr(buffer.as_ptr()) }, c"lla");
    assert_eq!(llama_model_meta_val_str(model, missing.get(), out, 8), -1);
    assert_eq!(buffer[0], 0);
    assert!(llama_model_n_layer(model) > 0 && llama_model_n_params(model) > 1_000_000);
    assert_eq!(llama_model_rope_type(model), 0);
    llama_model_free(model);
}

#[test]
fn the_vocabulary_alone_computes_nothing() {
    let path = Text::new(super::scene::STORIES);
    let mut params = llama_model_default_params();
    params.vocab_only = true;
    let model = llama_model_load_from_file(path.get(), params);
    assert!(!tokens_of(model, "Hi").is_empty());
    let context = crate::context::llama_init_from_model(
        model,
        crate::defaults::llama_context_default_params(),
    );
    assert_eq!(crate::context::llama_n_ctx(context), 512);
    assert!(crate::context::llama_get_model(context) == model);
    assert!(crate::context::llama_get_memory(context).is_null());
    let mut tokens = [5, 6];
    let batch = super::scene::tokens_only(&mut tokens);
    assert_eq!(crate::decode::llama_decode(context, batch), -1);
    crate::context::llama_free(context);
    assert_eq!(crate::context::llama_n_ctx(context), 0);
    llama_model_free(model);
}

#[test]
fn templates_are_rendered_by_name_and_by_text() {
    let [user, hi] = ["user", "Hi"].map(Text::new);
    let messages = [Message {
        role: user.as_ptr(),
        content: hi.as_ptr(),
    }];
    let mut buffer = [0; 64];
    let mut render = |template: &str, room: i32| {
        let template = Text::new(template);
        let out = Out::of(buffer.as_mut_ptr());
        let input = In::of(messages.as_ptr());
        let n = llama_chat_apply_template(template.get(), input, 1, false, out, room);
        let n = usize::try_from(n).unwrap_or(0).min(room as usize);
        (n, String::from_utf8(buffer[..n].to_vec()).unwrap())
    };
    assert_eq!(
        render("llama3", 64).1,
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    );
    assert_eq!(
        render("{% for m in messages %}[{{ m.content }}]{% endfor %}", 64).1,
        "[Hi]"
    );
    assert_eq!(render("gemma", 5).0, 5);
    assert_eq!(render("no-such-name", 64).0, 0);
    let none = CText::of(std::ptr::null());
    let out = Out::of(std::ptr::null_mut());
    let n = llama_chat_apply_template(none, In::of(messages.as_ptr()), 1, true, out, 0);
    assert_eq!(n, 52, "ChatML, counted without a buffer");
}

#[test]
fn paths_of_parts_are_made_and_read() {
    let mut buffer = [0 as c_char; 64];
    let out = Out::of(buffer.as_mut_ptr());
    let prefix = Text::new("/models/m");
    assert_eq!(llama_split_path(out, 64, prefix.get(), 1, 4), 29);
    // SAFETY: the text ends with a NUL.
    let path = unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_owned();
    assert_eq!(path.as_c_str(), c"/models/m-00002-of-00004.gguf");
    let text = CText::of(path.as_ptr());
    assert_eq!(llama_split_prefix(out, 64, text, 1, 4), 9);
    assert_eq!(llama_split_prefix(out, 64, text, 2, 4), 0);
    assert_eq!(llama_split_path(out, 8, prefix.get(), 1, 4), 0);
}
