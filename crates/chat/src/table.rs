//! The families of models whose calls are read, each a row.
//!
//! Invariant: the first row that a template shows is its family, so a row stands before those whose
//! marks its templates also have.

use crate::family::{Body, CallSyntax, Family, Keys, Piece, Separator, Start, Wrap};
use crate::header;
use crate::tagged::{KeyType, Lines, Tags};
use crate::value::Dialect;

/// A row without marks, for others to differ from.
const PLAIN: Family = Family {
    name: "",
    shown: &[],
    before: &[],
    open: &[],
    after: &[],
    body: Body::Json,
    listed: Some(Body::Json),
    start: Start::Marked,
    written: CallSyntax::Not,
    wrap: Wrap::Nothing,
};

const fn listed(keys: Keys, close: Option<&'static str>) -> CallSyntax {
    let between = Separator::Commas;
    CallSyntax::List {
        keys,
        between,
        close,
    }
}

const fn object(keys: Keys, close: Option<&'static str>) -> CallSyntax {
    CallSyntax::Object { keys, close }
}

/// An answer that is nothing but calls, as a grammar demands.
pub(crate) static FORCED: Family = Family {
    name: "forced",
    ..PLAIN
};

const fn named(header: header::ReadHeader, dialect: Dialect) -> Body {
    Body::Named { header, dialect }
}

const MISTRAL: Family = Family {
    open: &["[TOOL_CALLS]"],
    body: named(header::mistral, Dialect::Json),
    ..PLAIN
};

const DEEPSEEK_V4: Family = Family {
    name: "DeepSeek-V4",
    before: &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"],
    open: &["<｜DSML｜invoke name=\""],
    after: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
    body: Body::Tagged(&DSML),
    listed: None,
    written: CallSyntax::Tagged,
    wrap: Wrap::All {
        before: &[Piece::Mark("<｜DSML｜tool_calls>"), Piece::Mark("\n")],
        behind: &[Piece::Mark("\n"), Piece::Mark("</｜DSML｜tool_calls>")],
    },
    ..PLAIN
};

const APRIEL: Family = Family {
    name: "Apriel",
    open: &["<tool_calls>"],
    after: &["</tool_calls>"],
    written: listed(Keys::USUAL, Some("</tool_calls>")),
    ..PLAIN
};

const GIGACHAT: Family = Family {
    before: &["<|message_sep|>"],
    open: &["<|function_call|>", "function call<|role_sep|>"],
    after: &["<|message_sep|>"],
    written: object(Keys::USUAL, Some("<|message_sep|>")),
    ..PLAIN
};

const GRANITE: Family = Family {
    open: &["<|tool_call|>"],
    after: &["<|/tool_call|>"],
    written: listed(Keys::USUAL, None),
    ..PLAIN
};

/// The text before each mark of MiniMax-M3.
const M3: &str = "]<]minimax[>[";

pub(crate) static FAMILIES: [Family; 34] = [
    Family {
        name: "Kimi-K3",
        shown: &[&["<|open|>", "<|end_of_msg|>"]],
        before: &["<|open|>tools<|sep|>"],
        open: &["<|open|>call tool=\""],
        after: &["<|close|>tools<|sep|>"],
        body: Body::Tagged(&KIMI_K3),
        listed: None,
        written: CallSyntax::Tagged,
        wrap: Wrap::All {
            before: &[Piece::Mark("<|open|>tools<|sep|>")],
            behind: &[Piece::Mark("<|close|>tools<|sep|>")],
        },
        ..PLAIN
    },
    Family {
        name: "MiniMax-M3",
        shown: &[&[M3]],
        before: &["]<]minimax[>[<tool_call>"],
        open: &["]<]minimax[>[<invoke name=\""],
        after: &["]<]minimax[>[</tool_call>"],
        body: Body::Elements(M3),
        listed: None,
        written: CallSyntax::Tagged,
        wrap: Wrap::All {
            before: &[Piece::Mark("]<]minimax[>[<tool_call>"), Piece::Mark("\n")],
            behind: &[Piece::Mark("\n"), Piece::Mark("]<]minimax[>[</tool_call>")],
        },
        ..PLAIN
    },
    Family {
        name: "MiniMax-M2",
        shown: &[&["<minimax:tool_call>"]],
        before: &["<minimax:tool_call>"],
        open: &["<invoke name=\""],
        after: &["</minimax:tool_call>"],
        body: Body::Tagged(&INVOKE),
        listed: None,
        written: CallSyntax::Tagged,
        wrap: Wrap::All {
            before: &[Piece::Mark("<minimax:tool_call>"), Piece::Mark("\n")],
            behind: &[Piece::Mark("\n"), Piece::Mark("</minimax:tool_call>")],
        },
        ..PLAIN
    },
    Family {
        name: "DeepSeek-V3.2",
        shown: &[&["DSML", "invoke", "function_calls"]],
        wrap: Wrap::All {
            before: &[Piece::Mark("<｜DSML｜function_calls>"), Piece::Mark("\n")],
            behind: &[Piece::Mark("\n"), Piece::Mark("</｜DSML｜function_calls>")],
        },
        ..DEEPSEEK_V4
    },
    Family {
        shown: &[&["DSML", "invoke"]],
        ..DEEPSEEK_V4
    },
    Family {
        name: "muse-glimmer",
        shown: &[&["<atem:invoke name="]],
        before: &["<atem:function_calls>"],
        open: &["<atem:invoke name=\""],
        after: &["</atem:function_calls>"],
        body: Body::Tagged(&ATEM),
        listed: None,
        written: CallSyntax::Tagged,
        wrap: Wrap::Each {
            before: &[
                Piece::Mark(" to="),
                Piece::Tool,
                Piece::Mark("<|message|><atem:function_calls>"),
                Piece::Mark("\n"),
            ],
            behind: &[Piece::Mark("\n"), Piece::Mark("</atem:function_calls>")],
        },
        ..PLAIN
    },
    Family {
        name: "DeepSeek-V3, R1, V3.1",
        shown: &[&["<｜tool▁call▁begin｜>"]],
        before: &["<｜tool▁calls▁begin｜>"],
        open: &["<｜tool▁call▁begin｜>"],
        after: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        body: named(header::deepseek, Dialect::Json),
        listed: None,
        written: CallSyntax::Named {
            before: &[],
            behind: &[Piece::Mark("<｜tool▁sep｜>")],
            close: &[Piece::Mark("<｜tool▁call▁end｜>")],
        },
        wrap: Wrap::All {
            before: &[Piece::Mark("<｜tool▁calls▁begin｜>")],
            behind: &[Piece::Mark("<｜tool▁calls▁end｜>")],
        },
        ..PLAIN
    },
    Family {
        name: "Mistral Small 3.2",
        shown: &[&["[TOOL_CALLS]", "[CALL_ID]"]],
        written: CallSyntax::Named {
            before: &[],
            behind: &[Piece::Mark("[CALL_ID]"), Piece::Id, Piece::Mark("[ARGS]")],
            close: &[],
        },
        ..MISTRAL
    },
    Family {
        name: "Ministral 3, Devstral",
        shown: &[&["[TOOL_CALLS]", "[ARGS]"]],
        written: CallSyntax::Named {
            before: &[],
            behind: &[Piece::Mark("[ARGS]")],
            close: &[],
        },
        ..MISTRAL
    },
    Family {
        name: "Mistral 7B, Nemo",
        shown: &[&["[TOOL_CALLS]"]],
        written: listed(Keys::USUAL, None),
        ..MISTRAL
    },
    Family {
        name: "Kimi-K2",
        shown: &[&["<|tool_call_begin|>"]],
        before: &["<|tool_calls_section_begin|>"],
        open: &["<|tool_call_begin|>"],
        after: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        body: named(header::kimi, Dialect::Json),
        listed: None,
        written: CallSyntax::Named {
            before: &[Piece::Mark("functions.")],
            behind: &[
                Piece::Mark(":"),
                Piece::Digits,
                Piece::Mark("<|tool_call_argument_begin|>"),
            ],
            close: &[Piece::Mark("<|tool_call_end|>")],
        },
        wrap: Wrap::All {
            before: &[Piece::Mark("<|tool_calls_section_begin|>")],
            behind: &[Piece::Mark("<|tool_calls_section_end|>")],
        },
        ..PLAIN
    },
    Family {
        name: "Solar-Open",
        shown: &[&["<|tool_call:begin|>"]],
        before: &["<|begin|>assistant", "<|tool_calls|>"],
        open: &["<|tool_call:begin|>"],
        after: &["<|tool_call:end|>", "<|calls|>"],
        body: named(header::solar, Dialect::Json),
        listed: None,
        written: CallSyntax::Named {
            before: &[Piece::Id, Piece::Mark("<|tool_call:name|>")],
            behind: &[Piece::Mark("<|tool_call:args|>")],
            close: &[Piece::Mark("<|tool_call:end|>")],
        },
        wrap: Wrap::All {
            before: &[Piece::Mark("<|tool_calls|>")],
            behind: &[],
        },
        ..PLAIN
    },
    Family {
        name: "Gemma 4",
        shown: &[&["<|tool_call>call:"]],
        open: &["<|tool_call>"],
        after: &["<tool_call|>"],
        body: named(header::gemma, Dialect::Gemma),
        listed: None,
        written: CallSyntax::Named {
            before: &[Piece::Mark("call:")],
            behind: &[],
            close: &[Piece::Mark("<tool_call|>")],
        },
        ..PLAIN
    },
    Family {
        name: "LFM2",
        shown: &[
            &["<|tool_call_start|>"],
            &["<|tool_list_start|>"],
            &["List of tools: ["],
        ],
        open: &["<|tool_call_start|>"],
        after: &["<|tool_call_end|>"],
        body: named(header::python, Dialect::Python),
        listed: Some(named(header::python, Dialect::Python)),
        start: Start::With('['),
        written: CallSyntax::Python {
            close: "<|tool_call_end|>",
        },
        ..PLAIN
    },
    Family {
        name: "Command R7B, Command A",
        shown: &[&["<|START_ACTION|>"]],
        open: &["<|START_ACTION|>"],
        after: &["<|END_ACTION|>"],
        written: listed(
            Keys::Named {
                id: Some("tool_call_id"),
                name: "tool_name",
                arguments: "parameters",
            },
            Some("<|END_ACTION|>"),
        ),
        ..PLAIN
    },
    Family {
        name: "Command R",
        shown: &[&["\"tool_name\"", "Action:"]],
        open: &["Action:\n```json", "Action: ```json"],
        after: &["```"],
        written: listed(Keys::of("tool_name", "parameters"), Some("```")),
        ..PLAIN
    },
    Family {
        name: "Apertus",
        shown: &[&["<|tools_prefix|>"]],
        open: &["<|tools_prefix|>"],
        after: &["}", "<|tools_suffix|>"],
        body: named(header::keyed, Dialect::Json),
        listed: Some(named(header::keyed, Dialect::Json)),
        written: listed(Keys::Tool, Some("<|tools_suffix|>")),
        ..PLAIN
    },
    Family {
        shown: &[&["<tool_calls>["]],
        ..APRIEL
    },
    Family {
        name: "MiniMax-M1",
        shown: &[&["<tool_calls>"]],
        written: CallSyntax::List {
            keys: Keys::USUAL,
            between: Separator::Lines,
            close: Some("</tool_calls>"),
        },
        ..APRIEL
    },
    Family {
        name: "Nemotron Nano 2",
        shown: &[&["<TOOLCALL>"]],
        open: &["<TOOLCALL>"],
        after: &["</TOOLCALL>"],
        written: listed(Keys::USUAL, Some("</TOOLCALL>")),
        ..PLAIN
    },
    Family {
        name: "GigaChat 3.1",
        shown: &[&["<|function_call|>", "<|message_sep|>"]],
        ..GIGACHAT
    },
    Family {
        name: "GigaChat 3",
        shown: &[&["<|role_sep|>", "<|message_sep|>"]],
        open: &["function call<|role_sep|>", "<|function_call|>"],
        wrap: Wrap::Each {
            before: &[Piece::Mark("<|message_sep|>"), Piece::Mark("\n\n")],
            behind: &[],
        },
        ..GIGACHAT
    },
    Family {
        name: "Functionary 3.2",
        shown: &[&[">>>all"]],
        open: &[">>>"],
        body: named(header::on_line, Dialect::Json),
        listed: None,
        start: Start::Recipient { user: "all\n" },
        written: CallSyntax::Named {
            before: &[],
            behind: &[Piece::Mark("\n")],
            close: &[],
        },
        ..PLAIN
    },
    Family {
        name: "MiniCPM5",
        shown: &[&["<function name=\"", "<param name=\""]],
        open: &["<function name=\""],
        body: Body::Tagged(&MINICPM),
        listed: None,
        written: CallSyntax::Tagged,
        ..PLAIN
    },
    Family {
        name: "Hy3",
        shown: &[&["<tool_sep"]],
        before: &["<tool_calls:opensource>"],
        open: &["<tool_call:opensource>"],
        after: &["</tool_calls:opensource>"],
        body: Body::Tagged(&HY3),
        listed: None,
        written: CallSyntax::Tagged,
        wrap: Wrap::All {
            before: &[Piece::Mark("<tool_calls:opensource>"), Piece::Mark("\n")],
            behind: &[Piece::Mark("\n"), Piece::Mark("</tool_calls:opensource>")],
        },
        ..PLAIN
    },
    Family {
        name: "GLM-4.5, 4.6, 4.7, 5, Laguna, Ling 3",
        shown: &[&["<arg_key>"]],
        open: &["<tool_call>"],
        body: Body::Tagged(&GLM),
        listed: None,
        written: CallSyntax::Tagged,
        ..PLAIN
    },
    Family {
        name: "Seed-OSS",
        shown: &[&["<seed:tool_call>"]],
        before: &["<seed:tool_call>"],
        open: &["<function="],
        after: &["</seed:tool_call>"],
        body: Body::Tagged(&SEED),
        listed: None,
        written: CallSyntax::Tagged,
        wrap: Wrap::Each {
            before: &[Piece::Mark("<seed:tool_call>"), Piece::Mark("\n")],
            behind: &[Piece::Mark("\n"), Piece::Mark("</seed:tool_call>")],
        },
        ..PLAIN
    },
    Family {
        name: "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5",
        shown: &[&["<function=", "<parameter="]],
        before: &["<tool_call>"],
        open: &["<function="],
        after: &["</tool_call>"],
        body: Body::Tagged(&QWEN),
        listed: None,
        written: CallSyntax::Tagged,
        wrap: Wrap::Each {
            before: &[Piece::Mark("<tool_call>"), Piece::Mark("\n")],
            behind: &[Piece::Mark("\n"), Piece::Mark("</tool_call>")],
        },
        ..PLAIN
    },
    Family {
        name: "Functionary 3.1",
        shown: &[&["<function="]],
        open: &["<function="],
        after: &["</function>"],
        body: named(header::in_tag, Dialect::Json),
        listed: None,
        written: CallSyntax::Named {
            before: &[],
            behind: &[Piece::Mark(">")],
            close: &[Piece::Mark("</function>")],
        },
        ..PLAIN
    },
    Family {
        name: "Phi-4-mini",
        shown: &[&["<|tool|>", "<|/tool|>"]],
        written: listed(Keys::USUAL, Some("<|/tool_call|>")),
        ..GRANITE
    },
    Family {
        name: "Granite 3",
        shown: &[&["<|tool_call|>"]],
        ..GRANITE
    },
    Family {
        name: "Firefunction",
        shown: &[&["functools["]],
        open: &["functools"],
        written: listed(Keys::USUAL, None),
        ..PLAIN
    },
    Family {
        // SmolLM3 writes calls so; the copy of its template that says '/no_think' shows none.
        name: "Hermes, Qwen, MiMo, Granite 4, Bielik, Reka, SmolLM3",
        shown: &[&["<tool_call>"], &["/no_think", "reasoning_mode"]],
        open: &["<tool_call>"],
        after: &["</tool_call>"],
        written: object(Keys::USUAL, Some("</tool_call>")),
        ..PLAIN
    },
    Family {
        name: "Llama 3",
        shown: &[
            &["<|python_tag|>"],
            &["\"parameters\": dictionary of argument name"],
            &["'\"parameters\": '"],
        ],
        open: &["<|python_tag|>"],
        after: &[";"],
        listed: None,
        start: Start::With('{'),
        written: object(Keys::of("name", "parameters"), None),
        ..PLAIN
    },
];

const QWEN: Tags = Tags {
    name_ends: &[">"],
    attributes_end: None,
    name_attributes: &[],
    key: "<parameter=",
    key_end: ">",
    key_type: KeyType::Unwritten,
    value: "",
    value_end: "</parameter>",
    end: "</function>",
    lines: Lines::Around,
    has_cdata: false,
};

const SEED: Tags = Tags {
    lines: Lines::Inside,
    ..QWEN
};

const GLM: Tags = Tags {
    name_ends: &["\n", "<arg_key>", "</tool_call>"],
    attributes_end: None,
    name_attributes: &[],
    key: "<arg_key>",
    key_end: "</arg_key>",
    key_type: KeyType::Unwritten,
    value: "<arg_value>",
    value_end: "</arg_value>",
    end: "</tool_call>",
    lines: Lines::Inside,
    has_cdata: false,
};

const HY3: Tags = Tags {
    name_ends: &["<tool_sep:opensource>", "\n", "</tool_call:opensource>"],
    key: "<arg_key:opensource>",
    key_end: "</arg_key:opensource>",
    value: "<arg_value:opensource>",
    value_end: "</arg_value:opensource>",
    end: "</tool_call:opensource>",
    ..GLM
};

const INVOKE: Tags = Tags {
    name_ends: &["\""],
    attributes_end: Some(">"),
    name_attributes: &[],
    key: "<parameter name=\"",
    key_end: "\"",
    key_type: KeyType::Unwritten,
    value: "",
    value_end: "</parameter>",
    end: "</invoke>",
    lines: Lines::Inside,
    has_cdata: false,
};

const DSML: Tags = Tags {
    key: "<｜DSML｜parameter name=\"",
    key_type: KeyType::IsText,
    value_end: "</｜DSML｜parameter>",
    end: "</｜DSML｜invoke>",
    ..INVOKE
};

const ATEM: Tags = Tags {
    key: "<atem:parameter name=\"",
    value_end: "</atem:parameter>",
    end: "</atem:invoke>",
    ..INVOKE
};

const MINICPM: Tags = Tags {
    key: "<param name=\"",
    value_end: "</param>",
    end: "</function>",
    has_cdata: true,
    ..INVOKE
};

const KIMI_K3: Tags = Tags {
    attributes_end: Some("<|sep|>"),
    name_attributes: &[Piece::Mark(" index=\""), Piece::Digits, Piece::Mark("\"")],
    key: "<|open|>argument key=\"",
    key_type: KeyType::Name,
    value_end: "<|close|>argument<|sep|>",
    end: "<|close|>call<|sep|>",
    ..INVOKE
};
