#!/usr/bin/env python3
"""Checks the reader of tool calls against chat templates: renders an answer with calls through each
template of a folder (jinja2, set up as transformers does), reads back what the template wrote, and
compares names, arguments and reasoning with what was put in.

    scripts/corpus/calls.py PROGRAM FOLDER [NAME]

PROGRAM is the example read_answers of cellar-chat; jinja2 is needed. NAME is a part of the names of templates.
"""

import glob
import json
import os
import re
import subprocess
import sys

import jinja2
import jinja2.sandbox

import results
import templates

TOOLS = [
    {"name": "get_weather", "description": "Tells the weather", "parameters": {
        "type": "object", "required": ["city"], "additionalProperties": False, "properties": {
            "city": {"type": "string", "description": "The city"},
            "days": {"type": "integer", "description": "How many"},
            "deep": {"type": "object", "description": "More", "properties": {
                "a": {"type": "array", "items": {"type": "integer"}}}, "additionalProperties": {"type": "integer"}},
            "on": {"type": "boolean", "description": "Whether"},
            "note": {"type": "string", "description": "A note"}}}},
    {"name": "stop", "description": "Stops", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
CALLS = [
    ("get_weather", {"city": "Paris \"x\" it's <b>", "days": 3, "deep": {"a": [1, 2]}, "on": True, "note": "12"}),
    ("stop", {}),
]
MULTILINE = [("get_weather", {"city": "a\n  b\\d\tü", "note": ""})]
IDS = ["abcdefgh0", "abcdefgh1"]


def environment(sandbox):
    """As templates are compared, but with lists for the iterators that some templates write as JSON."""
    made = templates.environment(sandbox)
    tojson = made.filters["tojson"]
    made.filters["tojson"] = lambda value, **options: tojson(
        list(value) if hasattr(value, "__next__") else value, **options)
    return made


def attempts(calls):
    """Messages of an assistant that calls, as one template or another wants them."""
    for n in range(len(calls), 0, -1):
        for content in ("", None):
            for as_text in (False, True):
                tool_calls = [
                    {"id": id, "type": "function", "function": {
                        "name": name, "arguments": json.dumps(values) if as_text else values}}
                    for id, (name, values) in zip(IDS, calls[:n])]
                yield {"role": "assistant", "content": content, "tool_calls": tool_calls,
                          "reasoning_content": "I think.", "reasoning": "I think."}


def written(source, calls):
    """The prompt, and what the template writes for an answer with calls."""
    for sandbox in (jinja2.sandbox.ImmutableSandboxedEnvironment, jinja2.sandbox.SandboxedEnvironment):
        template = environment(sandbox).from_string(source)
        tools = [{"type": "function", "function": tool} for tool in TOOLS]
        variables = {"tools": tools, "bos_token": "<BOS>", "eos_token": "<EOS>",
                     "functions": json.dumps(TOOLS), "datetime": "today"}
        user = [{"role": "user", "content": "Hi"}]
        for answer in attempts(calls):
            try:
                before = template.render(messages=user, **variables)
                prompt = template.render(messages=user, add_generation_prompt=True, **variables)
                whole = template.render(messages=[*user, answer], **variables)
            except (jinja2.TemplateError, TypeError, ValueError, AttributeError):
                continue
            # The answer begins behind what both have; a mark belongs to it as a whole.
            common = re.sub(r"<[\w|]*$", "", os.path.commonprefix([prompt, whole]))
            if calls[0][0] in whole[len(os.path.commonprefix([before, whole])):]:
                # A beginning that is no mark is left out of earlier answers.
                begun = "<" not in prompt[len(common):]
                return prompt if begun else common, whole[len(common):]
    return None


def check(name, source, calls):
    found = written(source, calls)
    if found is None:
        return {"name": name, "template": source, "tools": TOOLS, "prompt": "", "text": "", "expected": None}
    prompt, text = found
    # Some templates write the first call alone.
    calls = [call for call in calls if call[0] in text]
    return {"name": name, "template": source, "tools": TOOLS, "prompt": prompt, "text": text,
            "expected": [{"name": name, "arguments": values} for name, values in calls]}


def main():
    program, folder, only = sys.argv[1], sys.argv[2], "".join(sys.argv[3:4])
    cases = []
    for path in sorted(glob.glob(os.path.join(folder, "*.jinja"))):
        if only not in path:
            continue
        with open(path, encoding="utf-8") as file:
            source = file.read()
        name = os.path.basename(path)
        cases += [check(name, source, CALLS), check(name, source, MULTILINE)]
    lines = "\n".join(json.dumps(case) for case in cases)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    n_wrong, compared = 0, {}
    for case, line in zip(cases, done.stdout.splitlines()):
        read = json.loads(line)
        calls = []
        for call in read["answer"]["calls"]:
            try:
                arguments = json.loads(call["arguments"])
            except ValueError:
                arguments = call["arguments"]
            calls.append({"name": call["name"], "arguments": arguments})
        thought = "I think." if "I think." in case["text"] else ""
        is_right = calls == case["expected"] and read["answer"]["reasoning"] == thought
        verdict = "right" if is_right else "WRONG"
        if case["expected"] is None:
            verdict = "writes no calls"
        n_wrong += verdict == "WRONG"
        if case["expected"] is not None:
            counts = compared.setdefault(case["name"].removesuffix(".jinja"), [0, 0])
            counts[0] += 1
            counts[1] += verdict == "WRONG"
        if verdict == "WRONG" or only:
            print(f"{case['name']:58} {read['family'] or '-':40} {len(calls)} {verdict}")
            print("   prompt", repr(case["prompt"][-80:]), "\n   text", repr(case["text"]), "\n   read", json.dumps(read["answer"], ensure_ascii=False))
    for name, (n_compared, n_different) in compared.items():
        results.add("calls", name, n_compared, n_different)
    print(f"{n_wrong} wrong of {len(cases)}")
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main()
