//! Chat templates: messages to the text that a model was trained on.
//!
//! Invariant: any template that Cellar renders is one here, not only those of a list; what
//! llama.cpp calls by a short name is found by that name. Knows no model: marks before and after a
//! text are the tokenizer's to add.

use std::ffi::c_char;

use model_core::chat_template::{ChatMessage, ChatTemplate, GenerationPrompt, TemplateTokens};

use crate::abi::Message;
use crate::ffi::{CText, In, Out, c_api, count};
use crate::log;

/// Templates with names, in order of these.
const NAMED: [(&std::ffi::CStr, &str); 8] = [
    (
        c"chatml",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\
         {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    ),
    (
        c"gemma",
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}\
         {% set ns.system = m.content | trim %}{% else %}{% set role = 'model' if m.role == \
         'assistant' else m.role %}{{ '<start_of_turn>' + role + '\\n' }}{% if ns.system and role \
         != 'model' %}{{ ns.system + '\\n\\n' }}{% set ns.system = '' %}{% endif %}\
         {{ m.content | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}\
         {% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    (
        c"llama3",
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + \
         m.content | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
         {{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    (
        c"phi3",
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}\
         {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    (
        c"phi4",
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + \
         '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}\
         {{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    ),
    (
        c"falcon3",
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    (
        c"zephyr",
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|endoftext|>\\n' }}\
         {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    (
        c"granite",
        "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + \
         '<|end_of_text|>\\n' }}{% endfor %}{% if add_generation_prompt %}\
         {{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    ),
];

fn named(name: &str) -> Option<&'static str> {
    let mut all = NAMED.iter();
    let found = all.find(|(known, _)| known.to_bytes() == name.as_bytes());
    found.map(|(_, template)| *template)
}

/// The text of messages.
///
/// # Errors
/// The fault of a template or a message, for people.
fn render(
    template: &str,
    messages: &[Message],
    prompt: GenerationPrompt,
) -> Result<String, String> {
    let text = |pointer, what: &str| {
        let text = CText::of(pointer).get();
        text.ok_or_else(|| format!("the {what} of a message is null or not UTF-8"))
    };
    let message = |message: &Message| {
        let (role, content) = (
            text(message.role, "role")?,
            text(message.content, "content")?,
        );
        Ok::<_, String>(ChatMessage::new(role, content))
    };
    let messages = messages
        .iter()
        .map(message)
        .collect::<Result<Vec<_>, _>>()?;
    let source = named(template).unwrap_or(template);
    if !source.contains("{{") && !source.contains("{%") {
        return Err(format!(
            "'{source}' is neither a template nor the name of one"
        ));
    }
    let template = ChatTemplate::new(source).map_err(|error| error.to_string())?;
    let rendered = template.render(&messages, prompt, TemplateTokens::default());
    rendered.map_err(|error| error.to_string())
}

c_api! {
    fn llama_chat_apply_template(
        template: CText,
        messages: In<Message>,
        n_messages: usize,
        add_assistant: bool,
        buffer: Out<u8>,
        room: i32,
    ) -> i32 = -1; {
        let prompt = if add_assistant { GenerationPrompt::Add } else { GenerationPrompt::Omit };
        let template = template.get().unwrap_or("chatml");
        let rendered = render(template, messages.slice(n_messages), prompt);
        let Some(text) = log::or_line("llama_chat_apply_template", rendered) else {
            return -1;
        };
        // As `strncpy`: the NUL only where there is room for it.
        let room = usize::try_from(room).unwrap_or(0);
        let bytes: Vec<u8> = text.bytes().chain([0]).collect();
        buffer.write(room, &bytes);
        count(text.len())
    }

    fn llama_chat_builtin_templates(out: Out<*const c_char>, n: usize) -> i32 = 0; {
        let names = NAMED.map(|(name, _)| name.as_ptr());
        out.write(n, &names);
        count(names.len())
    }
}
