#!/usr/bin/env python3
"""Compares Cellar's chat templates with Jinja2's, set up as `transformers` does.

    cargo build -p cellar-model-core --example render_template
    scripts/corpus/templates.py FOLDER target/debug/examples/render_template

FOLDER holds `*.jinja` files, such as those of llama.cpp's `models/templates`. Every template renders every chat
of CHATS with both. Where one fails, the other must fail, too; what it says may differ. Needs `jinja2` 3.1.6.
Exit code 1: a text differs for a reason that KNOWN does not name.

    scripts/corpus/templates.py --fill tests/fixtures/chat_templates/expressions.json

writes what Jinja2 renders from the templates of a file into it; null where it refuses one.
"""

import argparse
import collections
import datetime
import html
import json
import pathlib
import subprocess
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

import results

NOW = datetime.datetime(2024, 2, 29, 13, 7, 9)

# Why texts differ, and how that shows in what Jinja2 gives and what Cellar gives. At most five.
KNOWN = {
    "What is iterated is None: Jinja2 refuses that, Cellar takes it for an empty list (as if there were no tools)":
        lambda want, answer: want.get("error") == "TypeError: 'NoneType' object is not iterable",
    "What 'map' gives is a generator for Jinja2, which 'tojson' refuses, and a list for Cellar":
        lambda want, answer: want.get("error") == "TypeError: Object of type generator is not JSON serializable",
    "What is added to a text from 'safe' is escaped as HTML by Jinja2, not by Cellar":
        lambda want, answer: html.unescape(want.get("text", "")) == answer.get("text"),
}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, id="call00001"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, id="call00001", name="weather"):
    return message("tool", content, tool_call_id=id, name=name)


def tool(name, parameters, **more):
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": function}


def chat(*messages, tools=None, generate=True, **variables):
    return {"messages": list(messages), "variables": {**({"tools": tools} if tools else {}), **variables},
            "add_generation_prompt": generate}


SYSTEM = message("system", "You are terse.")
HELLO = message("user", "Hello")
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}, "required": ["city"]}
WEATHER = tool("weather", CITY)
NESTED = tool("plan", {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 9007199254740993, "default": 3},
        "step": {"type": ["number", "null"], "minimum": 1e-05, "maximum": 1e20, "multipleOf": 0.1},
        "share": {"type": "number", "enum": [1e16, 1e15, 0.0001, -0.0, 5e-324, 1.5, 100.0, 18446744073709551615]},
        "mode": {"type": "string", "enum": ["a<b", "c&d", "é's \"q\""]},
        "stops": {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "string"}}}},
        "any": {"anyOf": [{"type": "string"}, {"type": "boolean"}], "nullable": True},
        "empty": {},
    },
    "required": ["days", "mode"],
    "additionalProperties": False,
    "$defs": {"x": {"const": None}},
}, strict=True, returns={"type": "object", "properties": {}}, response={"type": "string"})
ODD = "Tab\there, line\nhere, \x01 and \x7f, \u2028, é, \U0001f600, 'single' \"double\" \\ <|im_end|> {{ x }} </tag> &"
CALL = message("assistant", "", tool_calls=[call("weather", {"city": "Paris"})])
CHATS = {
    "user": chat(HELLO),
    "system": chat(SYSTEM, HELLO),
    "two systems": chat(SYSTEM, message("system", "And kind."), HELLO),
    "turns": chat(SYSTEM, HELLO, message("assistant", "Hi."), message("user", " How are you?\n")),
    "no prompt": chat(SYSTEM, HELLO, message("assistant", "Hi."), generate=False),
    "developer": chat(message("developer", "You are terse."), HELLO),
    "tools": chat(SYSTEM, HELLO, tools=[WEATHER]),
    "nested tools": chat(HELLO, tools=[NESTED, WEATHER]),
    "call": chat(HELLO, CALL, result("12 °C"), tools=[WEATHER]),
    "call, no tools": chat(HELLO, CALL, result("12 °C"), message("assistant", "12 °C."), message("user", "Thanks")),
    "call as text": chat(HELLO, message("assistant", "", tool_calls=[call("weather", '{"city": "Paris"}')]),
                         result('{"t": 12.50}'), tools=[WEATHER]),
    "null content": chat(HELLO, message("assistant", None, tool_calls=[call("weather", {"city": "Paris"})]),
                         result("12"), tools=[WEATHER]),
    "parallel calls": chat(
        SYSTEM, HELLO,
        message("assistant", "Two.", tool_calls=[call("weather", {"city": "Paris"}), call("plan", {
            "days": 3, "step": 1e-05, "share": 1e20, "stops": [{"at": "é"}, {}], "any": None, "mode": True,
        }, "call00002")]),
        result("12"), result('{"ok": true}', "call00002", "plan"), message("assistant", "Done."),
        message("user", "More"), tools=[WEATHER, NESTED]),
    "reasoning": chat(SYSTEM, HELLO, message("assistant", "Hi.", reasoning_content="They greet.\nSo do I."),
                      message("user", "And?"), message("assistant", "So.", reasoning_content="x", thinking="x"),
                      message("user", "End"), enable_thinking=True),
    "reasoning, call": chat(HELLO, message("assistant", "", reasoning_content="Ask it.", thinking="Ask it.",
                                           tool_calls=[call("weather", {})]), result(""), tools=[WEATHER]),
    "think in content": chat(HELLO, message("assistant", "<think>\nHm.\n</think>\n\nHi."), message("user", "And?")),
    "no thinking": chat(SYSTEM, HELLO, enable_thinking=False, thinking=False, reasoning_effort="low"),
    "odd texts": chat(message("system", ODD), message("user", ODD), message("assistant", ODD,
                      tool_calls=[call("weather", {"city": ODD})]), result(ODD), tools=[WEATHER]),
    "empty texts": chat(message("system", ""), message("user", ""), message("assistant", ""), message("user", "")),
    "parts": chat(message("user", [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]),
                  message("assistant", [{"type": "text", "text": "Three"}]), HELLO),
    "parts of a system": chat(message("system", [{"type": "text", "text": "Terse."}]), HELLO, tools=[WEATHER]),
    "object results": chat(HELLO, CALL, result({"t": 1e-07, "ok": [True, None, 1.0]}), tools=[WEATHER]),
    "no messages": chat(),
}


def environment(sandbox=jinja2.sandbox.ImmutableSandboxedEnvironment):
    """As `transformers.utils.chat_template_utils` has it."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

        def write(self, caller):
            return caller()

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(text):
        raise jinja2.TemplateError(text)

    made = sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = NOW.strftime
    return made


def expected(template, line):
    if isinstance(template, Exception):
        return {"error": str(template)}
    try:
        variables = {"tools": None, "documents": None, **line["variables"]}
        text = template.render(messages=line["messages"], add_generation_prompt=line["add_generation_prompt"],
                               bos_token=line["bos"], eos_token=line["eos"], **variables)
        return {"text": text}
    except Exception as error:  # a template may raise any
        return {"error": f"{type(error).__name__}: {error}"}


def compiled(source, to=environment()):
    try:
        return to.from_string(source)
    except Exception as error:
        return error


def first_difference(wanted, text):
    at = next((i for i, (a, b) in enumerate(zip(wanted, text)) if a != b), min(len(wanted), len(text)))
    return f"at {at}: wanted {wanted[max(0, at - 30):at + 50]!r}\n      got {text[max(0, at - 30):at + 50]!r}"


def fill(path):
    """Writes what Jinja2 renders into a file of templates."""
    table = json.loads(path.read_text(encoding="utf-8"))
    line = {**chat(message("user", "Hi")), "bos": "<b>", "eos": "<e>", "variables": table["variables"]}
    groups = []
    for group, cases in table["groups"].items():
        cases = [[template, expected(compiled(template), line).get("text")] for template, _ in cases]
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        groups.append(f"{json.dumps(group)}: [\n{lines}\n]")
    variables = json.dumps(table["variables"], ensure_ascii=False)
    text = '{"variables": %s,\n"groups": {\n%s\n}}\n' % (variables, ",\n".join(groups))
    path.write_text(text, encoding="utf-8")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("templates", type=pathlib.Path, help="folder of *.jinja files, or with --fill the file")
    options.add_argument("program", nargs="?", help="the example render_template of cellar-model-core")
    options.add_argument("--fill", action="store_true", help="write what Jinja2 renders into the file")
    options.add_argument("--show", action="store_true", help="print where texts begin to differ")
    options = options.parse_args()
    if options.fill:
        return fill(options.templates)
    if not options.program:
        sys.exit("the program is missing: the example render_template of cellar-model-core")

    lines, wanted, names = [], [], []
    for path in sorted(options.templates.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = compiled(source)
        for name, of_chat in CHATS.items():
            line = {**of_chat, "bos": "<bos>", "eos": "<eos>", "template": source}
            wanted.append(expected(template, line))
            names.append((path.stem, name))
            if name != next(iter(CHATS)):
                del line["template"]
            lines.append(json.dumps(line))
    run = subprocess.run([options.program], input="\n".join(lines) + "\n", encoding="utf-8", check=True,
                         stdout=subprocess.PIPE)
    # Texts may hold other ends of lines.
    answers = [json.loads(line) for line in run.stdout.split("\n") if line]
    if not names or len(answers) != len(names):
        sys.exit(f"{len(answers)} answers for {len(names)} chats")

    known = collections.defaultdict(list)
    new = collections.defaultdict(list)
    different = collections.Counter()
    n_refused = 0
    for (template, name), want, answer in zip(names, wanted, answers):
        n_refused += "error" in want
        if "error" in want and "error" in answer or want == answer:
            continue
        different[template] += 1
        reason = next((reason for reason, is_it in KNOWN.items() if is_it(want, answer)), None)
        if reason:
            known[reason].append(f"{template} ({name})")
            continue
        new[template].append(name)
        if options.show:
            print(f"{template}, {name}:")
            if "text" in want and "text" in answer:
                print("  ", first_difference(want["text"], answer["text"]))
            else:
                print(f"   wanted {str(want)[:300]}\n      got {str(answer)[:300]}")
    for template in dict(names):
        results.add("template", template, len(CHATS), different[template])
    for reason, chats in known.items():
        print(f"{reason}: {', '.join(chats)}")
    for template, chats in new.items():
        print(f"{template:50} {len(chats):3}  {', '.join(chats)}")
    print(f"{len(names)} texts of {len(names) // len(CHATS)} templates, {n_refused} of them refused by Jinja2: "
          f"{sum(map(len, known.values()))} differ for a known reason, {sum(map(len, new.values()))} for none")
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main())
