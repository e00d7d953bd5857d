"""Model files from strangers: hostile chat templates and absurd sizes are errors of that model, soon and in little memory."""

import json
import math
import shutil
import struct

from place import ROOT, Place

# Templates that ended the process, at load.
AT_LOAD = {
    "shadowed guard": "{% set __kept = dict %}{% set x = namespace() %}{% set x.a = x %}{{ x|tojson }}",
    "deep not": "{{ " + "not " * 50_000 + "1 }}",
    "deep attributes": "{{ a" + ".b" * 50_000 + " }}",
    "deep minus": "{{ " + "-" * 50_000 + "1 }}",
    "deep filters": "{{ a" + "|trim" * 50_000 + " }}",
    "deep items": "{{ a" + "[0]" * 50_000 + " }}",
    "deep calls": "{{ a" + "()" * 50_000 + " }}",
    "deep parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep lists": "{{ " + "[" * 50_000 + "1" + "]" * 50_000 + " }}",
    "deep ifs": "{% if 1 %}" * 50_000 + "{% endif %}" * 50_000,
}

# Templates that ended it when a chat was rendered, or took gigabytes.
AT_RENDER = {
    "cycle": "{% set x = namespace() %}{% set x.a = x %}{{ x|tojson }}",
    "cycle through a filter": "{% set x = namespace() %}{% set x.a|default(x, true) %}{% endset %}{{ x|tojson }}",
    "printed cycle": "{% set x = namespace() %}{% set x.a = x %}{{ x }}",
    "deep value": "{% set x = namespace(a=1) %}{% for i in range(99999) %}{% set x.a = [x.a] %}{% endfor %}{{ x.a|tojson }}",
    "dropped deep value": "{% set x = namespace(a=1) %}{% for i in range(99999) %}{% set x.a = [x.a] %}{% endfor %}",
    "large output": "{% for i in range(99999) %}{% for j in range(99) %}" + "a" * 1000 + "{% endfor %}{% endfor %}",
    "join": "{{ range(99999)|join('" + "a" * 10_000 + "') }}",
    "format": "{{ '%1000000000d'|format(1) }}",
    "doubled text": "{% set x = namespace(a='a') %}{% for i in range(40) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
    "doubled list": "{% set x = namespace(a=[1]) %}{% for i in range(40) %}{% set x.a = x.a + x.a %}{% endfor %}",
    "repeated text": "{{ 'a' * 4000000000 }}",
    "replaced": "{% set a = 'a' * 100000 %}{{ a.replace('a', a) }}",
    "no end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}

# Memory that one hostile template may take.
MEMORY = 300 << 20


def run(program, report):
    with Place(program) as place:
        for name, template in AT_LOAD.items():
            place.model_with("bad.gguf", "tokenizer.chat_template", template)
            done = place.shell("cellar run -m bad.gguf -n 2 --temp 0 hi")
            report.check(f"template at load, run: {name}", done.code in (0, 1, 2) and "panicked" not in done.err, done)
    with Place(program) as place:
        served(place, report)
    with Place(program) as place:
        for name, template in AT_RENDER.items():
            (place.dir / "t.jinja").write_text(template)
            with place.serve("-m model.gguf --chat-template t.jinja") as server:
                before = server.memory()
                chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                status, answer = server.ask("POST", "/v1/chat/completions", chat)
                grown = server.memory() - before
                found = (status, str(answer)[:300], grown)
                report.check(f"template at render: {name}", status in (200, 400, 422, 500), found)
                report.check(f"memory of the template: {name}", grown < MEMORY, found)
                report.check(f"the server lives after: {name}", server.is_alive())
    sizes(program, report)


def served(place, report):
    """A model that cannot be loaded is an error of its requests; the others are served."""
    models = place.dir / "models"
    models.mkdir()
    shutil.copy(place.dir / "other.gguf", models / "good.gguf")
    for name, template in AT_LOAD.items():
        place.model_with("models/bad.gguf", "tokenizer.chat_template", template)
        with place.serve("--models models") as server:
            body = {"model": "bad", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            status, answer = server.ask("POST", "/v1/chat/completions", body)
            report.check(f"template at load, served: {name}", status >= 400, (status, answer))
            body["model"] = "good"
            status, answer = server.ask("POST", "/v1/completions", {"model": "good", "prompt": "Once", "max_tokens": 2})
            report.check(f"the other model is served: {name}", status == 200, (status, answer))


def sizes(program, report):
    """A size in `config.json` that the tensors do not have is refused before anything is made of that size."""
    for recipe in ["qwen3", "qwen3_next", "recurrent_gemma", "mamba2", "deepseek_v2"]:
        with Place(program) as place:
            expand(recipe, place.dir / "model")
            usual = place.shell("cellar inspect model --json")
            report.check(f"{recipe}", usual.code == 0, usual)
            path = place.dir / "model" / "config.json"
            config = json.loads(path.read_text())
            numbers = [key for key, value in config.items() if type(value) is int]
            for key in numbers:
                for absurd in (2**32 - 1, 2**40):
                    path.write_text(json.dumps(dict(config, **{key: absurd})))
                    # 2 GiB of addresses hold the program and a mapped model, and none of these sizes.
                    done = place.shell("cellar inspect model --json > /dev/null", address_space=2 << 30)
                    is_good = done.code in (0, 1) and "memory allocation" not in done.err and done.seconds < 3
                    report.check(f"{recipe}, {key} {absurd}", is_good, done)


def expand(recipe, target):
    """Makes a model directory of a recipe, all of whose weights are 0."""
    source = ROOT / "tests" / "fixtures" / "recipes" / recipe
    target.mkdir()
    shutil.copy(source / "config.json", target)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(ROOT / "tests" / "fixtures" / "tokenizers" / "spm512" / name, target)
    header, end = {}, 0
    for tensor in json.loads((source / "recipe.json").read_text())["tensors"]:
        size = 4 * math.prod(tensor["shape"])
        header[tensor["name"]] = {"dtype": "F32", "shape": tensor["shape"], "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(end))
