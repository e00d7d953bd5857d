//! Answers of each family with the same calls: `f` with a city and days, then `g` without
//! arguments.

/// A family, and its texts.
pub(crate) struct GoldenAnswer {
    pub(crate) name: &'static str,
    /// A part of its templates that shows the form.
    pub(crate) template: &'static str,
    /// The call of `f` alone.
    pub(crate) one: &'static str,
    /// Both calls.
    pub(crate) two: &'static str,
    /// A text that begins as a call and is none.
    pub(crate) none: &'static str,
}

pub(crate) const ALL: &[GoldenAnswer] = &[
    GoldenAnswer {
        name: "Hermes",
        template: "<tool_call>",
        one: "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n</tool_call>",
        two: "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n</tool_call>\n\
              <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        none: "<tool_call>{\"city\": 1}</tool_call>",
    },
    GoldenAnswer {
        name: "Qwen3-Coder",
        template: "<tool_call><function=x><parameter=y>",
        one: "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        two: "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n\
              <tool_call>\n<function=g>\n</function>\n</tool_call>",
        none: "<tool_call>\nhello\n</tool_call>",
    },
    GoldenAnswer {
        name: "Seed-OSS",
        template: "<seed:tool_call><function=x><parameter=y>",
        one: "<seed:tool_call>\n<function=f>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        two: "<seed:tool_call>\n<function=f>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n\
              <seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        none: "<seed:tool_call> is a mark",
    },
    GoldenAnswer {
        name: "DeepSeek-R1",
        template: "<｜tool▁call▁begin｜>",
        one: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"city\": \"Paris\", \"days\": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        two: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"city\": \"Paris\", \"days\": 3}\n```<｜tool▁call▁end｜>\n\
              <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        none: "<｜tool▁calls▁begin｜>hello",
    },
    GoldenAnswer {
        name: "DeepSeek-V3.1",
        template: "<｜tool▁call▁begin｜>",
        one: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"city\": \"Paris\", \"days\": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        two: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"city\": \"Paris\", \"days\": 3}<｜tool▁call▁end｜>\
              <｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        none: "<｜tool▁call▁begin｜>f<｜tool▁sep｜>hello<｜tool▁call▁end｜>",
    },
    GoldenAnswer {
        name: "DeepSeek-V3.2",
        template: "DSML invoke function_calls",
        one: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n\
              <｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        two: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n\
              <｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        none: "<｜DSML｜function_calls> are calls",
    },
    GoldenAnswer {
        name: "DeepSeek-V4",
        template: "DSML invoke tool_calls",
        one: "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n\
              <｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        two: "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Paris</｜DSML｜parameter>\n\
              <｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        none: "<｜DSML｜invoke name=\"hello world\">",
    },
    GoldenAnswer {
        name: "Mistral Nemo",
        template: "[TOOL_CALLS]",
        one: "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}, \"id\": \"abcdefgh0\"}]",
        two: "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}, \"id\": \"abcdefgh0\"}, {\"name\": \"g\", \"arguments\": {}, \"id\": \"abcdefgh1\"}]",
        none: "[TOOL_CALLS][1, 2]",
    },
    GoldenAnswer {
        name: "Mistral Small 3.2",
        template: "[TOOL_CALLS] [CALL_ID] [ARGS]",
        one: "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{\"city\": \"Paris\", \"days\": 3}",
        two: "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{\"city\": \"Paris\", \"days\": 3}[TOOL_CALLS]g[CALL_ID]abcdefghj[ARGS]{}",
        none: "[TOOL_CALLS]f and {x}",
    },
    GoldenAnswer {
        name: "Ministral 3",
        template: "[TOOL_CALLS] [ARGS]",
        one: "[TOOL_CALLS]f[ARGS]{\"city\": \"Paris\", \"days\": 3}",
        two: "[TOOL_CALLS]f[ARGS]{\"city\": \"Paris\", \"days\": 3}[TOOL_CALLS]g[ARGS]{}",
        none: "[TOOL_CALLS]f[ARGS]hello",
    },
    GoldenAnswer {
        name: "Llama 3",
        template: "<|python_tag|>",
        one: "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"city\": \"Paris\", \"days\": 3}}",
        two: "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"city\": \"Paris\", \"days\": 3}}; {\"name\": \"g\", \"parameters\": {}}",
        none: "<|python_tag|>print(1)",
    },
    GoldenAnswer {
        name: "GLM-4.6",
        template: "<tool_call> <arg_key>",
        one: "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        two: "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        none: "<tool_call>not a name</tool_call>",
    },
    GoldenAnswer {
        name: "GLM-4.7",
        template: "<tool_call> <arg_key>",
        one: "<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        two: "<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>g</tool_call>",
        none: "<tool_call>{\"name\": 1}</tool_call>",
    },
    GoldenAnswer {
        name: "Hy3",
        template: "<tool_sep{}> <arg_key{}>",
        one: "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n\
              <arg_value:opensource>Paris</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n\
              </tool_call:opensource>\n</tool_calls:opensource>",
        two: "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n\
              <arg_value:opensource>Paris</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n\
              </tool_call:opensource>\n<tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        none: "<tool_calls:opensource>\nhello",
    },
    GoldenAnswer {
        name: "Kimi-K2",
        template: "<|tool_call_begin|>",
        one: "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"city\": \"Paris\", \"days\": 3}<|tool_call_end|><|tool_calls_section_end|>",
        two: "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"city\": \"Paris\", \"days\": 3}<|tool_call_end|>\
              <|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        none: "<|tool_calls_section_begin|> hello",
    },
    GoldenAnswer {
        name: "Kimi-K3",
        template: "<|open|> <|end_of_msg|>",
        one: "<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>Paris<|close|>argument<|sep|>\
              <|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        two: "<|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>Paris<|close|>argument<|sep|>\
              <|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool=\"g\" index=\"2\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        none: "<|open|>tools<|sep|> hello",
    },
    GoldenAnswer {
        name: "LFM2",
        template: "<|tool_call_start|>",
        one: "<|tool_call_start|>[f(city='Paris', days=3)]<|tool_call_end|>",
        two: "<|tool_call_start|>[f(city=\"Paris\", days=3), g()]<|tool_call_end|>",
        none: "<|tool_call_start|>[1, (2)]<|tool_call_end|>",
    },
    GoldenAnswer {
        name: "Gemma 4",
        template: "<|tool_call>call:",
        one: "<|tool_call>call:f{city:<|\"|>Paris<|\"|>,days:3}<tool_call|>",
        two: "<|tool_call>call:f{city:<|\"|>Paris<|\"|>,days:3}<tool_call|><|tool_call>call:g{}<tool_call|>",
        none: "<|tool_call>what is {this}<tool_call|>",
    },
    GoldenAnswer {
        name: "Command R7B",
        template: "<|START_ACTION|>",
        one: "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"city\": \"Paris\", \"days\": 3}}\n]<|END_ACTION|>",
        two: "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"city\": \"Paris\", \"days\": 3}},\n    \
              {\"tool_call_id\": \"1\", \"tool_name\": \"g\", \"parameters\": {}}\n]<|END_ACTION|>",
        none: "<|START_ACTION|>hello<|END_ACTION|>",
    },
    GoldenAnswer {
        name: "Command R",
        template: "Action: \"tool_name\"",
        one: "Action:\n```json\n[\n    {\n        \"tool_name\": \"f\",\n        \"parameters\": {\"city\": \"Paris\", \"days\": 3}\n    }\n]```",
        two: "Action:\n```json\n[\n    {\n        \"tool_name\": \"f\",\n        \"parameters\": {\"city\": \"Paris\", \"days\": 3}\n    },\n    {\"tool_name\": \"g\", \"parameters\": {}}\n]```",
        none: "Action:\n```json\n[1]```",
    },
    GoldenAnswer {
        name: "Granite 3.3",
        template: "<|tool_call|>",
        one: "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}]",
        two: "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}, {\"name\": \"g\", \"arguments\": {}}]",
        none: "<|tool_call|>hello",
    },
    GoldenAnswer {
        name: "Phi-4-mini",
        template: "<|tool|> <|/tool|>",
        one: "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}]<|/tool_call|>",
        two: "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}, {\"name\": \"g\", \"arguments\": {}}]<|/tool_call|>",
        none: "<|tool_call|>[]<|/tool_call|>",
    },
    GoldenAnswer {
        name: "Apertus",
        template: "<|tools_prefix|>",
        one: "<|tools_prefix|>[{\"f\": {\"city\": \"Paris\", \"days\": 3}}]<|tools_suffix|>",
        two: "<|tools_prefix|>[{\"f\": {\"city\": \"Paris\", \"days\": 3}}, {\"g\": {}}]<|tools_suffix|>",
        none: "<|tools_prefix|>[\"f\"]<|tools_suffix|>",
    },
    GoldenAnswer {
        name: "Apriel",
        template: "<tool_calls>[",
        one: "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}, \"id\": \"a\"}]</tool_calls>",
        two: "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}, \"id\": \"a\"}, {\"name\": \"g\", \"arguments\": {}, \"id\": \"b\"}]</tool_calls>",
        none: "<tool_calls>hello</tool_calls>",
    },
    GoldenAnswer {
        name: "MiniMax-M1",
        template: "<tool_calls>",
        one: "<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n</tool_calls>",
        two: "<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}\n{\"name\": \"g\", \"arguments\": {}}\n</tool_calls>",
        none: "<tool_calls>\n{\"a\": 1}\n</tool_calls>",
    },
    GoldenAnswer {
        name: "MiniMax-M2",
        template: "<minimax:tool_call>",
        one: "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"city\">Paris</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n</minimax:tool_call>",
        two: "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"city\">Paris</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
        none: "<minimax:tool_call>\nhello\n</minimax:tool_call>",
    },
    GoldenAnswer {
        name: "MiniMax-M3",
        template: "]<]minimax[>[",
        one: "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        two: "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n\
              ]<]minimax[>[<invoke name=\"g\">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        none: "]<]minimax[>[<tool_call>\nhello",
    },
    GoldenAnswer {
        name: "MiniCPM5",
        template: "<function name=\"x\"><param name=\"y\">",
        one: "<function name=\"f\"><param name=\"city\">Paris</param><param name=\"days\">3</param></function>",
        two: "<function name=\"f\"><param name=\"city\"><![CDATA[Paris]]></param><param name=\"days\">3</param></function>\n<function name=\"g\"></function>",
        none: "<function name=\"f\"> hello </function>",
    },
    GoldenAnswer {
        name: "Nemotron Nano 2",
        template: "<TOOLCALL>",
        one: "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}]</TOOLCALL>",
        two: "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}, {\"name\": \"g\", \"arguments\": {}}]</TOOLCALL>",
        none: "<TOOLCALL>[hello]</TOOLCALL>",
    },
    GoldenAnswer {
        name: "GigaChat 3",
        template: "<|role_sep|> <|message_sep|>",
        one: "<|message_sep|>\n\nfunction call<|role_sep|>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}<|message_sep|>",
        two: "<|function_call|>{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}<|message_sep|>\n<|function_call|>{\"name\": \"g\", \"arguments\": {}}",
        none: "<|function_call|>hello",
    },
    GoldenAnswer {
        name: "Functionary 3.1",
        template: "<function=",
        one: "<function=f>{\"city\": \"Paris\", \"days\": 3}</function>",
        two: "<function=f>{\"city\": \"Paris\", \"days\": 3}</function><function=g>{}</function>",
        none: "<function=f>hello</function>",
    },
    GoldenAnswer {
        name: "Functionary 3.2",
        template: ">>>all",
        one: ">>>f\n{\"city\": \"Paris\", \"days\": 3}",
        two: ">>>f\n{\"city\": \"Paris\", \"days\": 3}>>>g\n{}",
        none: ">>> print(1)\n2",
    },
    GoldenAnswer {
        name: "Firefunction",
        template: "functools[",
        one: " functools[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}]",
        two: " functools[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}, {\"name\": \"g\", \"arguments\": {}}]",
        none: "import functools",
    },
    GoldenAnswer {
        name: "Solar-Open",
        template: "<|tool_call:begin|>",
        one: "<|tool_calls|><|tool_call:begin|>abcdefgh0<|tool_call:name|>f<|tool_call:args|>{\"city\": \"Paris\", \"days\": 3}<|tool_call:end|><|calls|>",
        two: "<|tool_calls|><|tool_call:begin|>abcdefgh0<|tool_call:name|>f<|tool_call:args|>{\"city\": \"Paris\", \"days\": 3}<|tool_call:end|>\
              <|tool_call:begin|>abcdefgh1<|tool_call:name|>g<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        none: "<|tool_calls|> hello",
    },
    GoldenAnswer {
        name: "Muse",
        template: "<atem:invoke name=",
        one: "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"city\">Paris</atem:parameter>\n\
              <atem:parameter name=\"days\">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
        two: "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"city\">Paris</atem:parameter>\n\
              <atem:parameter name=\"days\">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>\n\
              <atem:function_calls>\n<atem:invoke name=\"g\">\n</atem:invoke>\n</atem:function_calls>",
        none: "<atem:function_calls> are calls",
    },
];
