//! [`Style`]: how a model marks what it thinks and what it says.
//!
//! Plain data, found by the template. Knows no calls.

use crate::harmony;

/// The marks around reasoning, or around an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// The mark before it.
    pub open: &'static str,
    /// The mark behind it.
    pub close: &'static str,
    /// The header of the answer behind that mark, where the answer is a message of its own.
    pub answer: &'static str,
}

impl Marks {
    const fn new(open: &'static str, close: &'static str) -> Self {
        Self {
            open,
            close,
            answer: "",
        }
    }
}

struct Row {
    /// Templates hold all of these texts.
    shown: &'static [&'static str],
    marks: Marks,
    /// Marks around the answer, which say nothing.
    silent: &'static [&'static str],
    /// The marks of them that stand around every answer, also an empty one before calls.
    answer: Option<Marks>,
}

const fn row(shown: &'static [&'static str], open: &'static str, close: &'static str) -> Row {
    Row {
        shown,
        marks: Marks::new(open, close),
        silent: &[],
        answer: None,
    }
}

/// These marks are always looked for.
const USUAL: Marks = Marks::new("<think>", "</think>");

/// Messages on a channel, the first one and later ones.
const CHANNELS: [Marks; 2] = {
    let first = Marks {
        open: "<|channel|>analysis<|message|>",
        close: "<|end|>",
        answer: "<|start|>assistant<|channel|>final<|message|>",
    };
    let open = "<|start|>assistant<|channel|>analysis<|message|>";
    [first, Marks { open, ..first }]
};

/// Messages to the model itself.
const RECIPIENTS: [Marks; 2] = {
    let first = Marks {
        open: " to=self<|message|>",
        close: "<|eom|>",
        answer: "<|start|>assistant to=user<|message|>",
    };
    let open = "<|start|>assistant to=self<|message|>";
    [first, Marks { open, ..first }]
};

const ROWS: [Row; 12] = [
    row(&["[/THINK]"], "[THINK]", "[/THINK]"),
    row(&["</seed:think>"], "<seed:think>", "</seed:think>"),
    row(&["</mm:think>"], "<mm:think>", "</mm:think>"),
    row(&["</think{}>"], "<think:opensource>", "</think:opensource>"),
    row(
        &["\u{25c1}/think\u{25b7}"],
        "\u{25c1}think\u{25b7}",
        "\u{25c1}/think\u{25b7}",
    ),
    row(
        &["<|inner_suffix|>"],
        "<|inner_prefix|>",
        "<|inner_suffix|>",
    ),
    row(&["<|channel>thought"], "<|channel>thought", "<channel|>"),
    Row {
        silent: &[
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_TEXT|>",
            "<|END_TEXT|>",
        ],
        ..row(
            &["<|END_THINKING|>"],
            "<|START_THINKING|>",
            "<|END_THINKING|>",
        )
    },
    Row {
        silent: &["<response>", "</response>"],
        ..row(&["</think>", "<response>"], "<think>", "</think>")
    },
    Row {
        silent: &["[END FINAL RESPONSE]"],
        ..row(
            &["[BEGIN FINAL RESPONSE]"],
            "Here are my reasoning steps:",
            "[BEGIN FINAL RESPONSE]",
        )
    },
    Row {
        silent: &["<|begin|>assistant", "<|content|>", "<|end|>"],
        ..row(&["<|think|>", "<|content|>"], "<|think|>", "<|end|>")
    },
    Row {
        silent: &[
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ],
        answer: Some(Marks::new(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
        )),
        ..row(
            &["<|open|>", "<|end_of_msg|>"],
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
        )
    },
];

/// The marks of a model's thoughts and of its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Style {
    /// The marks that it may write around reasoning.
    pub(crate) pairs: Vec<Marks>,
    /// Marks that say nothing.
    pub(crate) silent: Vec<&'static str>,
    /// The marks that stand around every answer.
    pub(crate) answer: Option<Marks>,
    /// Texts that the answer may begin with, and that say nothing.
    pub(crate) beginning: Option<&'static str>,
}

impl Style {
    /// The style of models with this template.
    pub(crate) fn of_template(template: &str) -> Self {
        let rows = ROWS.iter();
        let rows: Vec<&Row> = rows
            .filter(|row| row.shown.iter().all(|text| template.contains(text)))
            .collect();
        let mut pairs = vec![USUAL];
        pairs.extend(
            rows.iter()
                .map(|row| row.marks)
                .filter(|marks| *marks != USUAL),
        );
        Self {
            pairs,
            silent: rows.iter().flat_map(|row| row.silent).copied().collect(),
            answer: rows.iter().find_map(|row| row.answer),
            // The prompt of Functionary 3.2 ends with '>>>'.
            beginning: template.contains(">>>all").then_some("all\n"),
        }
    }
}

/// The marks that a model with this template may write around reasoning.
pub fn reasoning_marks(template: &str) -> Vec<Marks> {
    let mut marks = Style::of_template(template).pairs;
    if harmony::calls_by(template) {
        marks.extend(CHANNELS);
    } else if harmony::has_recipients(template) {
        marks.extend(RECIPIENTS);
    }
    marks
}

/// True if models with this template write thoughts between these marks of its style.
#[cfg(feature = "grammar")]
pub(crate) fn shows(template: &str, marks: &Marks) -> bool {
    *marks != USUAL || template.contains(USUAL.close)
}

/// The marks that a template itself handles in earlier answers.
pub fn marks_in(template: &str) -> Option<Marks> {
    let mut pairs = Style::of_template(template).pairs.into_iter();
    pairs.rfind(|marks| template.contains(marks.close))
}
