//! The calls that grammars demand have the form in which the models of each family write them.

use cellar_chat::grammar::{AnswerContext, CallGrammar, of_format, of_free, of_required};
use cellar_chat::{Arguments, CallNumber, Tool};
use cellar_engine::sampler::{Sampler, SamplerConfig, TokenOrigin};
use cellar_grammar::GrammarCompiler;
use kv_core::TokenId;
use model_core::tokenizer::{
    AddSpecial, EncodeOptions, SpecialIds, SpecialText, TokenKind, Tokenizer, TokenizerModel,
    TokenizerSpec,
};
use serde_json::json;

use super::goldens::{ALL, GoldenAnswer};
use super::support::tool;

const UNK: TokenId = TokenId(0);
const EOS: TokenId = TokenId(1);

/// Marks that are control tokens of models, some of them parts of longer marks.
const CONTROLS: [&str; 30] = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "｜DSML｜",
    "]<]minimax[>[",
    "<|\"|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|message|>",
    "<|role_sep|>",
    "<|message_sep|>",
    "<|function_call|>",
    "<tool_calls:opensource>",
    "</tool_calls:opensource>",
    "<tool_call:opensource>",
    "</tool_call:opensource>",
    "<tool_sep:opensource>",
    "<arg_key:opensource>",
    "</arg_key:opensource>",
    "<arg_value:opensource>",
    "</arg_value:opensource>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "[TOOL_CALLS]",
];

const DEEPSEEK: [&str; 5] = [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
];

fn tokenizer(controls: &[&str]) -> Tokenizer {
    Tokenizer::new(spec(controls)).unwrap()
}

/// A vocabulary of bytes, and of these control tokens.
fn spec(controls: &[&str]) -> TokenizerSpec {
    let mut texts: Vec<String> = ["<unk>", "</s>", "\u{2581}"].map(str::to_owned).to_vec();
    let mut kinds = vec![TokenKind::Unknown, TokenKind::Control, TokenKind::Normal];
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    kinds.extend([TokenKind::Byte; 256]);
    // Texts with this space in them are no texts of this vocabulary.
    let spaced = DEEPSEEK.iter().chain(controls);
    for control in spaced {
        if !texts.iter().any(|text| text == control) {
            texts.push((*control).to_owned());
            kinds.push(TokenKind::Control);
        }
    }
    let mut spec = TokenizerSpec::new(TokenizerModel::Spm, texts);
    spec.scores = vec![0.0; spec.tokens.len()];
    spec.kinds = kinds;
    spec.special = SpecialIds {
        eos: Some(EOS),
        unk: Some(UNK),
        ..SpecialIds::default()
    };
    spec.add_space_prefix = Some(false);
    spec
}

fn tools() -> Vec<Tool> {
    let schema = json!({
        "type": "object", "required": ["city", "days"], "additionalProperties": false,
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    });
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let strict = |name: &str, schema| Tool {
        arguments: Arguments::Strict,
        ..tool(name, schema)
    };
    vec![strict("f", schema), strict("g", none)]
}

/// The beginning of a text that a grammar allows, and whether the text may end behind it.
fn allowed(tokenizer: &Tokenizer, grammar: &CallGrammar, text: &str) -> (String, bool) {
    let compiler = GrammarCompiler::new(tokenizer).unwrap();
    let compiled = compiler.lark_in_text(&grammar.lark, &grammar.named);
    let compiled = compiled.unwrap_or_else(|error| panic!("{error}: {}", grammar.lark));
    let config = SamplerConfig {
        temperature: 0.0,
        ..SamplerConfig::default()
    };
    let mut sampler = Sampler::new(config).unwrap();
    sampler.push_front(Box::new(compiled.step()));
    let options = EncodeOptions {
        add: AddSpecial::Never,
        special: SpecialText::Parse,
    };
    let mut bytes = Vec::new();
    let takes = |wanted: TokenId, sampler: &mut Sampler| {
        let mut logits = vec![0.0; tokenizer.n_tokens()];
        logits[wanted.as_usize()] = 9.0;
        let chosen = sampler.sample(&logits);
        chosen.is_ok_and(|chosen| chosen == wanted)
    };
    for id in tokenizer.encode(text, options) {
        if !takes(id, &mut sampler) {
            return (String::from_utf8_lossy(&bytes).into_owned(), false);
        }
        sampler.accept(id, TokenOrigin::Generated);
        let piece = tokenizer.piece(id, model_core::tokenizer::SpecialPieces::Render);
        bytes.extend(piece.unwrap());
    }
    let may_end = takes(EOS, &mut sampler);
    (String::from_utf8(bytes).unwrap(), may_end)
}

/// The same call without what the grammar does not write: an id of Mistral's or Apriel's, a type,
/// a space before the first mark; with what stands before a message's text.
fn written(golden: &GoldenAnswer, text: &str) -> String {
    match golden.name {
        "Mistral Nemo" => text
            .replace(", \"id\": \"abcdefgh0\"", "")
            .replace(", \"id\": \"abcdefgh1\"", ""),
        "Apriel" => text
            .replace(", \"id\": \"a\"", "")
            .replace(", \"id\": \"b\"", ""),
        "Firefunction" => text.trim_start().to_owned(),
        "Solar-Open" => text
            .replace("abcdefgh0", "abcdefghi")
            .replace("<|calls|>", ""),
        _ => text.to_owned(),
    }
}

/// Families whose models write calls in several ways, of which the grammar has another.
const OTHERS: [&str; 3] = ["DeepSeek-R1", "Llama 3", "Muse"];
/// Families whose two calls are in another way than one: other quotes, CDATA, marks of a newer
/// model.
const TWO_OTHERWISE: [&str; 3] = ["LFM2", "MiniCPM5", "GigaChat 3"];

#[test]
fn required_calls_are_written_as_the_models_write_them() {
    for controls in [&[][..], &CONTROLS] {
        let tokenizer = tokenizer(controls);
        for golden in ALL.iter().filter(|golden| !OTHERS.contains(&golden.name)) {
            let context = AnswerContext {
                template: golden.template,
                prompt: "",
                tokenizer: &tokenizer,
            };
            for (number, text) in [
                (CallNumber::One, golden.one),
                (CallNumber::Several, golden.two),
            ] {
                if number == CallNumber::Several && TWO_OTHERWISE.contains(&golden.name) {
                    continue;
                }
                let grammar = of_required(context, &tools(), number);
                let grammar = grammar.unwrap_or_else(|| panic!("{} has no grammar", golden.name));
                let text = written(golden, text);
                assert_eq!(
                    allowed(&tokenizer, &grammar, &text),
                    (text, true),
                    "{} with {} control tokens: {}",
                    golden.name,
                    controls.len(),
                    grammar.lark
                );
            }
        }
    }
}

/// Kimi-K3 writes calls behind its answer, whose mark is in the prompt where it does not think.
#[test]
fn an_answer_that_the_prompt_opens_is_closed_before_calls() {
    let golden = ALL.iter().find(|golden| golden.name == "Kimi-K3").unwrap();
    let [open, close] = ["<|open|>response<|sep|>", "<|close|>response<|sep|>"];
    let thought = "<|close|>think<|sep|>";
    for controls in [&[][..], &CONTROLS] {
        let tokenizer = tokenizer(controls);
        for (prompt, before, is_right) in [
            (open, close, true),
            (open, "", false),
            (
                "<|open|>think<|sep|>",
                &format!("{thought}{open}{close}"),
                true,
            ),
            ("<|open|>think<|sep|>", thought, true),
            ("<|open|>think<|sep|>", &format!("{thought}{open}"), false),
        ] {
            let context = AnswerContext {
                template: golden.template,
                prompt,
                tokenizer: &tokenizer,
            };
            let grammar = of_required(context, &tools(), CallNumber::One).unwrap();
            let text = format!("{before}{}", golden.one);
            let (begun, may_end) = allowed(&tokenizer, &grammar, &text);
            assert_eq!(
                (begun == text, may_end),
                (is_right, is_right),
                "{prompt}{text}"
            );
        }
    }
}

/// Marks that end the answer are not demanded, and none stands before a call.
#[test]
fn marks_that_end_the_answer_are_left_to_it() {
    let end = tokenizer(&["<|message_sep|>"]);
    let id = end.token_id("<|message_sep|>").unwrap();
    let mut spec = spec(&["<|message_sep|>"]);
    spec.special.eot = Some(id);
    let tokenizer = Tokenizer::new(spec).unwrap();
    assert!(tokenizer.is_end_of_generation(id));
    let context = |template| AnswerContext {
        template,
        prompt: "",
        tokenizer: &tokenizer,
    };
    let new = context("<|function_call|><|message_sep|>");
    let grammar = of_required(new, &tools(), CallNumber::One).unwrap();
    let text = "<|function_call|>{\"name\": \"g\", \"arguments\": {}}";
    assert_eq!(
        allowed(&tokenizer, &grammar, text),
        (text.to_owned(), true),
        "{}",
        grammar.lark
    );
    let old = context("<|role_sep|><|message_sep|>");
    assert!(of_required(old, &tools(), CallNumber::One).is_none());
}

#[test]
fn strict_calls_follow_text_and_are_held_to_their_schema() {
    // Their calls are whole answers, or begin them.
    let apart = ["Functionary 3.2"];
    for controls in [&[][..], &CONTROLS] {
        let tokenizer = tokenizer(controls);
        for golden in ALL.iter().filter(|golden| !OTHERS.contains(&golden.name)) {
            if apart.contains(&golden.name) {
                continue;
            }
            let grammar = of_free(golden.template, &tokenizer, &tools());
            let grammar = grammar.unwrap_or_else(|| panic!("{} has no grammar", golden.name));
            let text = format!("I look.\n{}", written(golden, golden.one));
            assert_eq!(
                allowed(&tokenizer, &grammar, &text),
                (text.clone(), true),
                "{} with {} control tokens: {}",
                golden.name,
                controls.len(),
                grammar.lark
            );
            let wrong = text.replace('3', "x");
            let (begun, may_end) = allowed(&tokenizer, &grammar, &wrong);
            assert!(
                !may_end && begun.len() < wrong.len() && begun.contains("days"),
                "{}: {begun:?}",
                golden.name
            );
        }
    }
}

/// Arguments of every type, each with a wrong one.
#[test]
fn values_are_held_in_each_notation() {
    let schema = json!({
        "type": "object", "required": ["mood", "deep"], "additionalProperties": false,
        "properties": {
            "note": {"type": "string", "description": "a text"},
            "mood": {"enum": ["glad", "it's"]},
            "some": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]},
            "is": {"type": "boolean"},
            "list": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
            "deep": {"$ref": "#/$defs/deep"},
        },
        "$defs": {"deep": {
            "type": "object", "required": ["x"], "additionalProperties": false,
            "properties": {"x": {"type": "number"}, "all": {"type": "array", "items": {"type": "number"}}},
        }},
    });
    let tools = [Tool {
        arguments: Arguments::Strict,
        ..tool("f", schema)
    }];
    let tokenizer = tokenizer(&CONTROLS);
    let check = |template: &str, right: &[&str], wrong: &[&str]| {
        let context = AnswerContext {
            template,
            prompt: "",
            tokenizer: &tokenizer,
        };
        let grammar = of_required(context, &tools, CallNumber::One).unwrap();
        for text in right {
            assert_eq!(
                allowed(&tokenizer, &grammar, text),
                ((*text).to_owned(), true),
                "{}",
                grammar.lark
            );
        }
        for text in wrong {
            let (begun, may_end) = allowed(&tokenizer, &grammar, text);
            assert!(
                !may_end && begun.len() < text.len(),
                "{text}: {}",
                grammar.lark
            );
        }
    };
    check(
        "<|tool_call>call:",
        &[
            "<|tool_call>call:f{note:<|\"|>a \"b\", c}<|\"|>,mood:<|\"|>it's<|\"|>,some:7,is:true,list:[<|\"|>a<|\"|>,<|\"|><|\"|>],deep:{x:1.5,all:[1,2]}}<tool_call|>",
            "<|tool_call>call:f{mood:<|\"|>glad<|\"|>,some:null,deep:{x:1,all:[]}}<tool_call|>",
            "<|tool_call>call:f{mood:<|\"|>glad<|\"|>,deep:{x:1}}<tool_call|>",
        ],
        &[
            "<|tool_call>call:f{deep:{x:1}}<tool_call|>",
            "<|tool_call>call:f{mood:<|\"|>sad<|\"|>,deep:{x:1}}<tool_call|>",
            "<|tool_call>call:f{mood:<|\"|>glad<|\"|>,some:70,deep:{x:1}}<tool_call|>",
            "<|tool_call>call:f{mood:<|\"|>glad<|\"|>,list:[],deep:{x:1}}<tool_call|>",
            "<|tool_call>call:f{mood:<|\"|>glad<|\"|>,deep:{}}<tool_call|>",
        ],
    );
    check(
        "<|tool_call_start|>",
        &[
            "<|tool_call_start|>[f(note='a \"b\", c)', mood='it\\'s', some=7, is=True, list=['a', ''], deep={\"x\": 1.5, \"all\": [1, 2]})]<|tool_call_end|>",
            "<|tool_call_start|>[f(mood='glad', some=None, deep={\"x\": 1})]<|tool_call_end|>",
        ],
        &[
            "<|tool_call_start|>[f(mood='sad', deep={\"x\": 1})]<|tool_call_end|>",
            "<|tool_call_start|>[f(mood='glad', is=true, deep={\"x\": 1})]<|tool_call_end|>",
            "<|tool_call_start|>[f(mood='glad', list=['a', 'b', 'c'], deep={\"x\": 1})]<|tool_call_end|>",
            "<|tool_call_start|>[f(mood='glad', deep={})]<|tool_call_end|>",
        ],
    );
    let m3 = |arguments: &str| {
        let elements = arguments.replace('<', "]<]minimax[>[<");
        format!(
            "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"f\">{elements}]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
        )
    };
    let right = [
        "<note>a > b</note><mood>it's</mood><some>7</some><is>true</is><deep><x>1.5</x><all><item>1</item><item>2</item></all></deep>",
        "<mood>glad</mood><deep><x>1</x></deep>",
    ]
    .map(m3);
    let wrong = [
        "<mood>sad</mood><deep><x>1</x></deep>",
        "<mood>glad</mood><deep>1</deep>",
        "<mood>glad</mood><some>70</some><deep><x>1</x></deep>",
        "<deep><x>1</x></deep>",
    ]
    .map(m3);
    check(
        "]<]minimax[>[",
        &right.each_ref().map(String::as_str),
        &wrong.each_ref().map(String::as_str),
    );
}

#[test]
fn messages_have_a_recipient() {
    let tokenizer = tokenizer(&CONTROLS);
    let muse = "<atem:invoke name= to=self <|message|>";
    let context = AnswerContext {
        template: muse,
        prompt: "",
        tokenizer: &tokenizer,
    };
    let call = "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"city\">Rome</atem:parameter>\n\
                <atem:parameter name=\"days\">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>";
    let written = format!(" to=f<|message|>{call}");
    let grammar = of_required(context, &tools(), CallNumber::One).unwrap();
    assert_eq!(allowed(&tokenizer, &grammar, &written), (written, true));
    // Functionary's prompts end with the mark of the first.
    let grammar = of_free(">>>all", &tokenizer, &tools()).unwrap();
    let call = "f\n{\"city\": \"Rome\", \"days\": 3}";
    for text in [
        call.to_owned(),
        "all\nHello >> you".to_owned(),
        format!("all\nI look.\n>>>{call}>>>g\n{{}}"),
        format!("{call}>>>all\nDone."),
    ] {
        assert_eq!(allowed(&tokenizer, &grammar, &text), (text, true));
    }
    let (begun, may_end) = allowed(&tokenizer, &grammar, "f\n{\"city\": 3");
    assert_eq!((begun.as_str(), may_end), ("f\n{\"city\": ", false));
}

#[test]
fn messages_to_functions_follow_others() {
    let marks = [
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ];
    for controls in [&[][..], &marks] {
        let tokenizer = tokenizer(controls);
        let grammar = of_free("<|channel|><|message|>", &tokenizer, &tools()).unwrap();
        let thought = "<|channel|>analysis<|message|>Hm < <|.<|end|><|start|>assistant";
        let arguments = "{\"city\": \"Rome\", \"days\": 3}";
        for text in [
            "<|channel|>final<|message|>Hello".to_owned(),
            format!("{thought}<|channel|>final<|message|>to=functions.f"),
            format!(
                "{thought}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}"
            ),
            format!("{thought} to=functions.f<|channel|>commentary json<|message|>{arguments}"),
        ] {
            assert_eq!(
                allowed(&tokenizer, &grammar, &text),
                (text, true),
                "{}",
                grammar.lark
            );
        }
        let wrong = " to=functions.f<|channel|>commentary json<|message|>{\"city\": 3}";
        let (begun, may_end) = allowed(&tokenizer, &grammar, wrong);
        assert!(!may_end && begun.ends_with("{\"city\": "), "{begun}");
    }
}

#[test]
fn what_a_notation_cannot_hold_has_no_grammar() {
    let tokenizer = tokenizer(&[]);
    for property in [
        json!({"type": "string", "pattern": "^a+$"}),
        json!({"type": "array", "uniqueItems": true}),
        json!({"type": "object", "properties": {"a b": {"type": "string"}}}),
        json!({"enum": [["a"]]}),
    ] {
        let schema = json!({"type": "object", "properties": {"x": property}});
        let tools = [Tool {
            arguments: Arguments::Strict,
            ..tool("f", schema)
        }];
        let grammar = of_free("<|tool_call>call:", &tokenizer, &tools);
        assert!(grammar.is_none(), "{property}: {grammar:?}");
    }
    // A schema that refers to itself is too deep.
    let schema = json!({
        "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/$defs/x"}}}},
    });
    let tools = [Tool {
        arguments: Arguments::Strict,
        ..tool("f", schema)
    }];
    for template in ["<|tool_call>call:", "]<]minimax[>["] {
        let grammar = of_free(template, &tokenizer, &tools);
        assert!(grammar.is_none(), "{template}: {grammar:?}");
    }
}

/// A text of one form.
const FORM: &str = "%json {\"type\": \"object\", \"properties\": {\"mood\": {\"enum\": [\"glad\", \"sad\"]}}, \
                    \"required\": [\"mood\"], \"additionalProperties\": false}";

/// An answer whose text has a form is that text or calls; free text is impossible.
#[test]
fn an_answer_of_a_form_is_the_text_or_calls() {
    for controls in [&[][..], &CONTROLS] {
        let tokenizer = tokenizer(controls);
        for golden in ALL.iter().filter(|golden| !OTHERS.contains(&golden.name)) {
            let template = format!("{}</think>", golden.template);
            let context = AnswerContext {
                template: &template,
                prompt: "",
                tokenizer: &tokenizer,
            };
            let grammar = of_format(context, &tools(), CallNumber::Several, FORM);
            let grammar = grammar.unwrap_or_else(|| panic!("{} has no grammar", golden.name));
            let text = match golden.name {
                "Functionary 3.2" => ">>>all\n{\"mood\": \"sad\"}",
                _ => "{\"mood\": \"sad\"}",
            };
            let call = written(golden, golden.one);
            let thought = "<think>\nHm < x.\n</think>\n\n";
            for right in [
                text.to_owned(),
                call.clone(),
                format!("{thought}{text}"),
                format!("{thought}{call}"),
            ] {
                assert_eq!(
                    allowed(&tokenizer, &grammar, &right),
                    (right, true),
                    "{} with {} control tokens: {}",
                    golden.name,
                    controls.len(),
                    grammar.lark
                );
            }
            for wrong in [
                "Hello".to_owned(),
                format!("{thought}Hello"),
                format!("I look.\n{call}"),
                format!("{text} Hello"),
                text.replace("sad", "x"),
            ] {
                let (begun, may_end) = allowed(&tokenizer, &grammar, &wrong);
                assert!(
                    !may_end && begun.len() < wrong.len(),
                    "{}: {wrong:?} begins {begun:?}",
                    golden.name
                );
            }
        }
    }
}

#[test]
fn a_form_follows_the_thought_that_a_prompt_has_begun() {
    let tokenizer = tokenizer(&CONTROLS);
    let of = |template: &'static str, prompt: &'static str, tools: &[Tool]| {
        let context = AnswerContext {
            template,
            prompt,
            tokenizer: &tokenizer,
        };
        of_format(context, tools, CallNumber::One, FORM)
    };
    let (thinks, text) = ("<think></think>", "{\"mood\": \"sad\"}");
    let begun = of(thinks, "Hello<think>\n", &[]).unwrap();
    let whole = format!("Hm.\n</think>\n{text}");
    assert_eq!(allowed(&tokenizer, &begun, &whole), (whole, true));
    // What is in the thought ends nothing.
    assert!(!allowed(&tokenizer, &begun, text).1);
    // Nothing stands before the text of a model that does not think, or has thought.
    assert!(of("", "Hello", &[]).is_none());
    assert!(of(thinks, "<think>\n\n</think>\n\n", &[]).is_none());
    let call = "{\"name\": \"g\", \"arguments\": {}}";
    let bare = of("", "Hello", &tools()).unwrap();
    for right in [text, call] {
        assert_eq!(allowed(&tokenizer, &bare, right), (right.to_owned(), true));
    }
}

#[test]
fn a_form_is_that_of_the_final_message() {
    let marks = [
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
    ];
    for controls in [&[][..], &marks] {
        let tokenizer = tokenizer(controls);
        let context = |template| AnswerContext {
            template,
            prompt: "<|start|>assistant",
            tokenizer: &tokenizer,
        };
        let channels = context("<|channel|><|message|>");
        let grammar = of_format(channels, &tools(), CallNumber::Several, FORM).unwrap();
        let thought = "<|channel|>analysis<|message|>Hm < <|.<|end|><|start|>assistant";
        let text = "{\"mood\": \"sad\"}";
        for right in [
            format!("<|channel|>final<|message|>{text}"),
            format!("{thought}<|channel|>final <|constrain|>json<|message|>{text}"),
            format!(
                "{thought}<|channel|>commentary to=functions.g <|constrain|>json<|message|>{{}}"
            ),
        ] {
            assert_eq!(
                allowed(&tokenizer, &grammar, &right),
                (right, true),
                "{}",
                grammar.lark
            );
        }
        for wrong in [
            text.to_owned(),
            "<|channel|>final<|message|>Hello".to_owned(),
            "<|channel|>commentary<|message|>Hello".to_owned(),
        ] {
            assert!(!allowed(&tokenizer, &grammar, &wrong).1, "{wrong}");
        }
        let recipients = context("<atem:invoke name= to=self <|message|>");
        let grammar = of_format(recipients, &tools(), CallNumber::Several, FORM).unwrap();
        for right in [
            format!(" to=user<|message|>{text}"),
            format!(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>{text}"),
        ] {
            assert_eq!(
                allowed(&tokenizer, &grammar, &right),
                (right, true),
                "{}",
                grammar.lark
            );
        }
    }
}
