//! Hostile chat templates: each ends with a text or an error, in bounded memory and time, on the
//! small stack of a test's thread. A program of its own, as its allocator counts.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod template_mutations;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use model_core::chat_template::{
    ChatMessage, ChatTemplate, ChatTemplateError, GenerationPrompt, TemplateTokens,
};

/// Counts what is allocated, and the most that was.
struct CountingAllocator;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands on to the system's allocator what it is given.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: it came from there, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const MAX_BYTES: usize = 200 << 20;

/// Ten times what an optimised build takes.
const MAX_TIME: Duration = Duration::from_secs(20);

/// One at a time, as all are counted.
static TURN: Mutex<()> = Mutex::new(());

fn render(name: &str, source: &str) -> Result<String, ChatTemplateError> {
    measured(name, || {
        let messages = [ChatMessage::new("user", "Hello")];
        let template = ChatTemplate::new(source)?;
        template.render(&messages, GenerationPrompt::Add, TemplateTokens::default())
    })
}

/// The result of a rendering, which must not take too much.
fn measured(
    name: &str,
    run: impl FnOnce() -> Result<String, ChatTemplateError>,
) -> Result<String, ChatTemplateError> {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (began, before) = (Instant::now(), NOW.load(Ordering::Relaxed));
    PEAK.store(before, Ordering::Relaxed);
    let rendered = run();
    let (took, peak) = (began.elapsed(), PEAK.load(Ordering::Relaxed) - before);
    let what = rendered.as_ref().map(String::len);
    println!("{name}: {took:?}, {} MB: {what:?}", peak >> 20);
    assert!(peak < MAX_BYTES, "{name}: {peak} bytes");
    assert!(took < MAX_TIME, "{name}: {took:?}");
    rendered
}

#[track_caller]
fn refused(name: &str, source: &str, wanted: &str) {
    let error = render(name, source).unwrap_err().to_string();
    assert!(error.contains(wanted), "{name}: {error}");
}

#[test]
fn long_expressions_are_refused() {
    let n = 50_000;
    let long = "expression or tag of more than 4096 tokens";
    for (name, before, between, after) in [
        ("not", "{{ ", "not ", "1 }}"),
        ("minus", "{{ ", "-", "1 }}"),
        ("attributes", "{{ a", ".b", " }}"),
        ("items", "{{ a", "[0]", " }}"),
        ("calls", "{{ a", "()", " }}"),
        ("filters", "{{ a", "|b", " }}"),
        ("tests", "{{ a", " is b", " }}"),
        ("sums", "{{ 1", "+1", " }}"),
        ("powers", "{{ 1", "**1", " }}"),
        ("texts", "{{ 1", "~1", " }}"),
        ("ors", "{{ 1", " or 1", " }}"),
        ("chain of and", "{% if 1", " and 1", " %}{% endif %}"),
        ("comparisons", "{% set x = 1", " < 1", " %}"),
        ("ifs", "{{ 1", " if 1", " }}"),
        ("elses", "{{ 1", " if 1 else 1", " }}"),
    ] {
        refused(name, &format!("{before}{}{after}", between.repeat(n)), long);
        // As long as they may be.
        let short = format!("{before}{}{after}", between.repeat(1_000));
        let _text_or_error = render(name, &short);
    }
    let elifs = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(n));
    refused("elifs", &elifs, "more than 4096 times 'elif'");
    let elifs = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(4_096));
    assert_eq!(render("elifs", &elifs).unwrap(), "");
}

#[test]
fn values_in_values_without_end_are_refused() {
    let circle = "a namespace cannot hold a namespace";
    for (name, source) in [
        (
            "itself, through a filter of a block",
            "{% set x = namespace() %}{% set x.a|default(x, true) %}{% endset %}{{ x|tojson }}",
        ),
        (
            "itself",
            "{% set x = namespace() %}{% set x.a = x %}{{ x|tojson }}",
        ),
        (
            "in a list",
            "{% set x = namespace() %}{% set x.a = [1, {'b': x}] %}{{ x }}",
        ),
        (
            "in a tuple",
            "{% set x = namespace() %}{% set x.a = 1, x %}{{ x ~ '' }}",
        ),
        (
            "made with it",
            "{% set x = namespace() %}{% set y = namespace(a=[x]) %}{% set x.b = y %}",
        ),
        (
            "made of it",
            "{% set x = namespace() %}{% set y = namespace({'a': x}) %}",
        ),
        (
            "by its name",
            "{% set x = namespace(a=1) %}{% set (x.a, y) = [x, 1] %}{{ x }}",
        ),
        (
            "a loop",
            "{% set x = namespace(a=1) %}{% for y in [1, x] %}{% set x.a = loop %}{% endfor %}{{ x|tojson }}",
        ),
    ] {
        refused(name, source, circle);
    }
    let deep = "more than 200 deep";
    for (name, value) in [
        ("lists", "[x.a]"),
        ("maps", "{'b': x.a}"),
        ("tuples", "(x.a,)"),
        ("bare tuples", "x.a,"),
        ("batches", "x.a|batch(1)|list"),
    ] {
        let source = format!(
            "{{% set x = namespace(a=[1]) %}}{{% for i in range(100000) %}}{{% set x.a = {value} %}}\
             {{% endfor %}}{{{{ x.a }}}}"
        );
        refused(name, &source, deep);
    }
    // Without a loop.
    let sets = format!(
        "{{% set x = 1 %}}{}{{{{ x }}}}",
        "{% set x = [x] %}".repeat(20_000)
    );
    refused("sets", &sets, deep);
    // What is computed only when it is read nests, too.
    let slices = "{% set x = namespace(a=[1, 2]) %}{% for i in range(20000) %}\
                  {% set x.a = x.a[0:] %}{% endfor %}{{ x.a }}";
    assert_eq!(render("slices", slices).unwrap(), "[1, 2]");
    let sums = format!(
        "{{% set y = [1] %}}{{% set x = y{} %}}{{{{ x|length }}}}",
        " + y".repeat(200)
    );
    assert_eq!(render("sums", &sums).unwrap(), "201");
    let macros = "{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}";
    refused("macros", macros, "recursion limit");
}

#[test]
fn texts_and_lists_without_end_are_refused() {
    let limit = "it takes more than 15";
    let looped = |start: &str, step: &str, end: &str| {
        format!(
            "{{% set x = namespace(a={start}) %}}{{% for i in range(100000) %}}\
             {{% set x.a = {step} %}}{{% endfor %}}{end}"
        )
    };
    let unrolled = |start: &str, step: &str, end: &str| {
        format!(
            "{{% set x = {start} %}}{}{end}",
            format!("{{% set x = {step} %}}").repeat(60)
        )
    };
    let through_macros = |step: &str| {
        format!(
            "{{% macro f(x, n) %}}{{% if n %}}{{{{ f({step}, n - 1) }}}}{{% else %}}{{{{ x ~ '' }}}}\
             {{% endif %}}{{% endmacro %}}{{{{ f([1, 2], 60) }}}}"
        )
    };
    let filtered = "{% set x|default([x, x], boolean=true) %}{% endset %}".repeat(60);
    let bombs = [
        ("filtered blocks", format!("{{% set x = [1] %}}{filtered}{{{{ x ~ '' }}}}")),
        ("filtered blocks, as JSON", format!("{{% set x = [1] %}}{filtered}{{{{ x|tojson }}}}")),
        ("split", "{{ ('a ' * 20000000).split()|length }}".to_owned()),
        ("dicts", through_macros("dict(a=x, b=x)")),
        ("chains", through_macros("x|chain(x)")),
        ("zips", through_macros("x|zip(x)")),
        ("batches", through_macros("x|batch(9, x)")),
        ("slices", through_macros("x|slice(3, x)")),
        ("maps", through_macros("x|map(attribute='a', default=x)")),
        ("maps of lists", through_macros("[x]|map('list')|list * 2")),
        ("tuples", through_macros("(x, x)")),
        ("output", "{% for a in range(99999) %}{{ 'a' * 10000 }}{% endfor %}".to_owned()),
        ("raw output", format!("{{% for a in range(99999) %}}{}{{% endfor %}}", "a".repeat(10_000))),
        ("join", "{{ range(99999)|join('a' * 10000) }}".to_owned()),
        ("format", "{{ '%1000000000d'|format(1) }}".to_owned()),
        ("old format", "{{ '%1000000000d' % 1 }}".to_owned()),
        ("times a list, in a sum", "{{ 1 ~ ([1, 2] * 50000000 + [1] * 50000000) }}".to_owned()),
        ("times a list, deep", "{% macro f(x) %}{{ x ~ '' }}{% endmacro %}{{ f(x=[1]*99999999) }}".to_owned()),
        ("added list, deep", "{% macro f(x, n) %}{% if n %}{{ f(x + x, n - 1) }}{% else %}{{ x ~ '' }}{% endif %}{% endmacro %}{{ f([1], 60) }}".to_owned()),
        ("long sum", format!("{{% set y = range(99999)|list %}}{{{{ 1 ~ (y{}) }}}}", " + y".repeat(300))),
        ("method format", "{{ '{:>1000000000}'.format(1) }}".to_owned()),
        ("times", "{{ 'a' * 1000000000 }}".to_owned()),
        ("times a list", "{{ [1, 2] * 50000000 }}".to_owned()),
        ("times a list, joined", "{{ ([1, 2] * 50000000)|join }}".to_owned()),
        ("times a list, as text", "{{ ([1, 2] * 50000000) ~ '' }}".to_owned()),
        ("doubled text", looped("'a'", "x.a ~ x.a", "{{ x.a }}")),
        ("added text", looped("'a'", "x.a + x.a", "{{ x.a }}")),
        ("doubled list", looped("[1]", "x.a + x.a", "{{ x.a|length }}")),
        ("doubled list, unrolled", unrolled("[1]", "x + x", "{{ x }}")),
        ("doubled list, as text", unrolled("[1]", "x + x", "{{ x ~ '' }}")),
        ("shared", looped("[1]", "[x.a, x.a]", "{{ x.a }}")),
        ("shared, unrolled", unrolled("[1]", "{'a': x, 'b': x}", "{{ x|tojson }}")),
        ("long texts, shared", unrolled("['a' * 1000000]", "x + x", "{{ x|string }}")),
        ("replace", looped("'a'", "x.a|replace('a', 'aa')", "{{ x.a }}")),
        ("method replace", looped("'a'", "x.a.replace('a', 'aa')", "{{ x.a }}")),
        ("replace once", "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}".to_owned()),
        ("indent", "{{ ('a\n' * 100000)|indent(100000) }}".to_owned()),
        ("tojson indent", "{{ range(99999)|list|tojson(indent=64) }}{{ '' * 1 }}".repeat(60)),
        ("center", "{{ 'a'.center(1000000000) }}{{ 'a' * 1000000000 }}".to_owned()),
        ("ljust", "{{ 'a'.ljust(1000000000, 'é') }}".to_owned()),
        ("zfill", "{{ '-1'.zfill(1000000000) }}".to_owned()),
        ("expandtabs", "{{ ('\t' * 100000).expandtabs(100000) }}".to_owned()),
        ("method join", "{{ ('a' * 10000).join(['b'] * 99999) }}".to_owned()),
        ("filter center", "{{ 'a'|center(1000000000) }}".to_owned()),
        ("indent with a text", "{{ ('a\n' * 100000)|indent('b' * 100000) }}".to_owned()),
        ("tojson, indent with a text", "{{ range(99999)|list|tojson(indent='a' * 10000) }}".to_owned()),
        ("tojson, separators", "{{ range(99999)|list|tojson(separators=('a' * 10000, ':')) }}".to_owned()),
        ("tojson of escapes", format!("{{{{ '\"'{} }}}}", "|tojson".repeat(40))),
        ("old format of a long text", "{{ ('%s' * 10000) % (('a' * 100000,) * 10000) }}".to_owned()),
        ("old format, width as a value", "{{ '%*d' % (1000000000, 1) }}".to_owned()),
        ("more arguments", "{% macro f() %}{{ f(varargs, varargs) }}{{ varargs ~ '' }}{% endmacro %}{{ f(1) }}".to_owned()),
        ("pprint", unrolled("[1]", "[x, x]", "{{ x|pprint }}")),
        ("set block", looped("1", "1", "{% set y %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}")),
        ("macro", "{% macro f() %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endmacro %}{{ f() }}".to_owned()),
        ("with", format!("{}{{{{ x }}}}{}", "{% with x = [x, x] %}".repeat(60), "{% endwith %}".repeat(60))),
        ("with, as text", format!("{}{{{{ x ~ '' }}}}{}", "{% with x = [x, x] %}".repeat(60), "{% endwith %}".repeat(60))),
        ("for, as text", format!("{}{{{{ x ~ '' }}}}{}", "{% for x in [[x, x]] %}".repeat(60), "{% endfor %}".repeat(60))),
        ("macros", "{% macro f(x, n) %}{% if n %}{{ f([x, x], n - 1) }}{% else %}{{ x ~ '' }}{% endif %}{% endmacro %}{{ f(1, 60) }}".to_owned()),
    ];
    for (name, source) in &bombs {
        match render(name, source) {
            // Of what the engine does not know, or limits itself.
            Err(error) => println!("  {error}"),
            Ok(text) => panic!("{name}: {} bytes", text.len()),
        }
    }
    refused("doubled", &looped("'a'", "x.a ~ x.a", ""), limit);
}

#[test]
fn a_filtered_block_is_what_its_filters_make_of_its_text() {
    let source = "{% set x|upper|replace('A', 'b') %}a{{ 1 }}c{% endset %}{{ x }}";
    assert_eq!(render("filters", source).unwrap(), "b1C");
    let guards =
        "{% set __kept = __settled %}{% set x = namespace() %}{% set x.a = x %}{{ x|tojson }}";
    refused("guards", guards, "the name '__kept' is taken");
}

#[test]
fn large_chats_have_the_room_they_need() {
    let source =
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m.content | trim }}\n{% endfor %}";
    let template = ChatTemplate::new(source).unwrap();
    let text = "word ".repeat(1_000);
    let messages = vec![ChatMessage::new("user", text); 2_000];
    let rendered = template.render(&messages, GenerationPrompt::Add, TemplateTokens::default());
    assert_eq!(rendered.unwrap().len(), 2_000 * 5_008);
    let messages = vec![ChatMessage::new("user", "a"); 100_000];
    let rendered = template.render(&messages, GenerationPrompt::Add, TemplateTokens::default());
    assert_eq!(rendered.unwrap().len(), 100_000 * 10);
}
