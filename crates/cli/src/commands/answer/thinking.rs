//! Splits the text of a reasoning model into its thinking and its answer.
//!
//! Invariant: the parts in their order are the whole text without the marks. What marks there are,
//! the crate `cellar_chat` says. Knows nothing of how parts are shown.

use std::sync::Arc;

use cellar_chat::{Calls, ChatSplitter, Marks, Part, marks_in, reasoning_marks};
use cellar_engine::sampler::{ReasoningBudget, ReasoningMarks};
use model_core::tokenizer::Tokenizer;

/// What a part of the text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Section {
    /// What the model thinks before it answers.
    Thinking,
    /// The answer.
    Answer,
}

/// How a model's texts are marked.
#[derive(Clone, Debug)]
pub(crate) struct ThinkingFormat {
    template: String,
    /// The marks that the template itself handles in earlier answers.
    in_template: Option<Marks>,
}

/// An answer as it is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// What the model thought, where it did.
    pub(crate) thinking: Option<String>,
    /// The answer.
    pub(crate) text: String,
}

/// Splits one text.
#[derive(Debug)]
pub(crate) struct Splitter {
    splitter: ChatSplitter,
}

impl ThinkingFormat {
    /// The format of models with this chat template.
    pub(crate) fn of_template(template: &str) -> Self {
        Self {
            template: template.to_owned(),
            in_template: marks_in(template),
        }
    }

    /// A splitter of the text that follows this prompt.
    pub(crate) fn splitter(&self, prompt: &str) -> Splitter {
        let splitter = ChatSplitter::new(&self.template, prompt, Calls::None).with_spaces();
        Splitter { splitter }
    }

    /// The step that ends the thinking behind this prompt after so many tokens.
    pub(crate) fn budget(
        &self,
        n_tokens: usize,
        prompt: &str,
        tokenizer: &Arc<Tokenizer>,
    ) -> ReasoningBudget {
        let marks = reasoning_marks(&self.template);
        let marks = marks.iter().map(|marks| ReasoningMarks {
            open: marks.open.to_owned(),
            close: marks.close.to_owned(),
            answer: marks.answer.to_owned(),
        });
        ReasoningBudget::new(n_tokens, marks.collect(), prompt, tokenizer)
    }

    /// What the template is given for an earlier answer. Thinking is in it only where the template
    /// knows its marks, and so decides whether the model sees it again.
    pub(crate) fn for_template(&self, answer: &Answer) -> String {
        let text = answer.text.as_str();
        match (&answer.thinking, self.in_template) {
            (Some(thinking), Some(Marks { open, close, .. })) => {
                format!("{open}{thinking}{close}{text}")
            }
            (Some(_), None) => text.trim_start().to_owned(),
            (None, _) => text.to_owned(),
        }
    }
}

impl Splitter {
    /// The parts that a piece of text completes. `control` is the text of the control token that
    /// came last, which is in no text.
    pub(crate) fn push(&mut self, piece: &str, control: Option<&str>) -> Vec<(Section, String)> {
        let mut parts = self.splitter.push(piece);
        if let Some(mark) = control.filter(|control| self.splitter.knows(control)) {
            parts.extend(self.splitter.push(mark));
        }
        sections(parts)
    }

    /// What was held back.
    pub(crate) fn finish(mut self) -> Vec<(Section, String)> {
        sections(self.splitter.finish())
    }
}

fn sections(parts: Vec<Part>) -> Vec<(Section, String)> {
    let parts = parts.into_iter();
    let section = |part| match part {
        Part::Text(text) => Some((Section::Answer, text)),
        Part::Reasoning(text) => Some((Section::Thinking, text)),
        // None is read.
        Part::ToolStart { .. } | Part::ToolArguments { .. } => None,
    };
    parts.filter_map(section).collect()
}

impl Answer {
    /// Adds a part.
    pub(crate) fn push(&mut self, section: Section, part: &str) {
        match section {
            Section::Answer => self.text.push_str(part),
            Section::Thinking => self.thinking.get_or_insert_default().push_str(part),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(format: &ThinkingFormat, prompt: &str, pieces: &[(&str, Option<&str>)]) -> Answer {
        let mut splitter = format.splitter(prompt);
        let mut answer = Answer::default();
        for (piece, control) in pieces {
            for (section, part) in splitter.push(piece, *control) {
                answer.push(section, &part);
            }
        }
        for (section, part) in splitter.finish() {
            answer.push(section, &part);
        }
        answer
    }

    fn thought(thinking: &str, text: &str) -> Answer {
        Answer {
            thinking: Some(thinking.to_owned()),
            text: text.to_owned(),
        }
    }

    fn spoken(text: &str) -> Answer {
        Answer {
            thinking: None,
            text: text.to_owned(),
        }
    }

    /// The text in pieces of one character.
    fn split(format: &ThinkingFormat, prompt: &str, text: &str) -> Answer {
        let pieces: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<_> = pieces.iter().map(|p| (p.as_str(), None)).collect();
        let whole = answer(format, prompt, &[(text, None)]);
        assert_eq!(
            answer(format, prompt, &pieces),
            whole,
            "pieces change nothing"
        );
        whole
    }

    #[test]
    fn marks_in_the_text() {
        let format = ThinkingFormat::of_template("no marks");
        let text = "\n<think>\n1 < 2 </thin\n</think>\n\nHello";
        assert_eq!(
            split(&format, "user: Hi", text),
            thought("\n1 < 2 </thin\n", "\n\nHello")
        );
        for text in [
            "Hello",
            "  Hello",
            "<thin",
            "A <think> tag </think>",
            "",
            " \n",
        ] {
            assert_eq!(split(&format, "", text), spoken(text), "{text}");
        }
        // It was ended while it thought.
        assert_eq!(split(&format, "", "<think>Hm</t"), thought("Hm</t", ""));
    }

    #[test]
    fn the_prompt_may_open_or_close_thinking() {
        let format = ThinkingFormat::of_template("{{ '</think>' }}");
        let open = "assistant<think>\n";
        assert_eq!(split(&format, open, "Hm</think>Yes"), thought("Hm", "Yes"));
        let closed = "assistant<think>\n\n</think>\n\n";
        assert_eq!(split(&format, closed, "Yes"), spoken("Yes"));
    }

    #[test]
    fn marks_that_are_control_tokens() {
        let format = ThinkingFormat::of_template("[THINK] [/THINK]");
        let pieces = [
            ("", Some("[THINK]")),
            ("Hm", None),
            ("", Some("[/THINK]")),
            ("Yes", None),
        ];
        assert_eq!(answer(&format, "", &pieces), thought("Hm", "Yes"));
    }

    #[test]
    fn channels_of_harmony() {
        let format = ThinkingFormat::of_template("<|channel|>analysis<|message|>");
        let pieces = [
            ("", Some("<|channel|>")),
            ("analysis", None),
            ("", Some("<|message|>")),
            ("Hm", None),
            ("", Some("<|end|>")),
            ("", Some("<|start|>")),
            ("assistant", None),
            ("", Some("<|channel|>")),
            ("final", None),
            ("", Some("<|message|>")),
            ("Yes", None),
        ];
        let got = answer(&format, "<|start|>assistant", &pieces);
        assert_eq!(got, thought("Hm", "Yes"));
        assert_eq!(format.for_template(&got), "Yes");
    }

    #[test]
    fn templates_that_know_the_marks_decide_what_is_seen_again() {
        let answer = thought("Hm", "\n\nYes");
        let knows = ThinkingFormat::of_template("{{ content.split('</think>')[-1] }}");
        assert_eq!(knows.for_template(&answer), "<think>Hm</think>\n\nYes");
        let plain = ThinkingFormat::of_template("{{ content }}");
        assert_eq!(plain.for_template(&answer), "Yes");
        assert_eq!(plain.for_template(&spoken(" Yes")), " Yes");
    }
}
