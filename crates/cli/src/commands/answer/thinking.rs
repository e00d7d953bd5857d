//! Splits the text of a reasoning model into its thinking and its answer.
//!
//! Invariant: the parts in their order are the whole text without the marks. Which marks a model
//! uses follows from its chat template. Knows nothing of how parts are shown.

/// Marks around thinking, as well-known templates write them. The first pair is always looked for.
const PAIRS: [Marks; 5] = [
    Marks::new("<think>", "</think>"),
    Marks::new("[THINK]", "[/THINK]"),
    Marks::new("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks::new("<seed:think>", "</seed:think>"),
    Marks::new("\u{25c1}think\u{25b7}", "\u{25c1}/think\u{25b7}"),
];

/// The marks of Harmony (gpt-oss), whose messages go to named channels.
mod harmony {
    pub(super) const START: &str = "<|start|>";
    pub(super) const CHANNEL: &str = "<|channel|>";
    pub(super) const MESSAGE: &str = "<|message|>";
    pub(super) const FINAL: &str = "final";
}

/// What begins and ends thinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    open: &'static str,
    close: &'static str,
}

impl Marks {
    const fn new(open: &'static str, close: &'static str) -> Self {
        Self { open, close }
    }
}

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
    pairs: Vec<Marks>,
    is_harmony: bool,
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

/// Where a text is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Only spaces have come: thinking may begin.
    Start,
    /// Thinking, until this mark.
    Thinking(&'static str),
    /// The answer has begun.
    Answer,
    /// Before a message of Harmony: its role and channel.
    Header(String),
    /// In a message of Harmony.
    Message(Section),
}

/// Splits one text.
#[derive(Debug)]
pub(crate) struct Splitter {
    format: ThinkingFormat,
    state: State,
    /// Text that may be the beginning of a mark.
    held: String,
}

impl ThinkingFormat {
    /// The format of models with this chat template.
    pub(crate) fn of_template(template: &str) -> Self {
        let in_template = PAIRS.into_iter().find(|pair| template.contains(pair.close));
        let mut pairs = vec![PAIRS[0]];
        pairs.extend(in_template.filter(|pair| *pair != PAIRS[0]));
        let is_harmony = template.contains(harmony::CHANNEL) && template.contains(harmony::MESSAGE);
        Self {
            pairs,
            is_harmony,
            in_template,
        }
    }

    /// A splitter of the text that follows this prompt.
    pub(crate) fn splitter(&self, prompt: &str) -> Splitter {
        let end = prompt.trim_end();
        let open = self.pairs.iter().find(|pair| end.ends_with(pair.open));
        let state = match open {
            Some(pair) => State::Thinking(pair.close),
            None if self.is_harmony => State::Header(String::new()),
            None => State::Start,
        };
        Splitter {
            format: self.clone(),
            state,
            held: String::new(),
        }
    }

    /// What the template is given for an earlier answer. Thinking is in it only where the template
    /// knows its marks, and so decides whether the model sees it again.
    pub(crate) fn for_template(&self, answer: &Answer) -> String {
        let text = answer.text.as_str();
        match (&answer.thinking, self.in_template) {
            (Some(thinking), Some(Marks { open, close })) => {
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
        let mut parts = Vec::new();
        self.held.push_str(piece);
        self.split(&mut parts);
        if let Some(mark) = control {
            self.pass_mark(mark, &mut parts);
        }
        parts
    }

    /// What was held back.
    pub(crate) fn finish(mut self) -> Option<(Section, String)> {
        let section = self.section()?;
        let rest = std::mem::take(&mut self.held);
        (!rest.is_empty()).then_some((section, rest))
    }

    fn section(&self) -> Option<Section> {
        match self.state {
            State::Start | State::Answer => Some(Section::Answer),
            State::Thinking(_) => Some(Section::Thinking),
            State::Message(section) => Some(section),
            State::Header(_) => None,
        }
    }

    /// A mark that is a control token.
    fn pass_mark(&mut self, mark: &str, parts: &mut Vec<(Section, String)>) {
        let pairs = &self.format.pairs;
        let opened = pairs.iter().find(|pair| pair.open == mark).copied();
        let next = match (&self.state, opened) {
            (_, Some(pair)) => State::Thinking(pair.close),
            (State::Thinking(close), _) if *close == mark => State::Start,
            (State::Header(header), _) if mark == harmony::MESSAGE => {
                let is_final = header.contains(harmony::FINAL);
                State::Message(match is_final {
                    true => Section::Answer,
                    false => Section::Thinking,
                })
            }
            // The channel belongs to the header that the start began.
            (State::Header(_), _) if mark == harmony::CHANNEL => return,
            _ if self.format.is_harmony && [harmony::START, harmony::CHANNEL].contains(&mark) => {
                State::Header(String::new())
            }
            _ => return,
        };
        if let Some(section) = self.section()
            && !self.held.is_empty()
        {
            parts.push((section, std::mem::take(&mut self.held)));
        }
        self.state = next;
    }

    /// Moves text that can be no part of a mark from what is held to the parts.
    fn split(&mut self, parts: &mut Vec<(Section, String)>) {
        while !self.held.is_empty() {
            match &mut self.state {
                State::Header(header) => header.push_str(&std::mem::take(&mut self.held)),
                State::Answer | State::Message(_) => {
                    let section = self.section().unwrap_or(Section::Answer);
                    parts.push((section, std::mem::take(&mut self.held)));
                }
                State::Start => {
                    let begun = self.held.trim_start();
                    let pairs = &self.format.pairs;
                    if let Some(pair) = pairs.iter().find(|pair| begun.starts_with(pair.open)) {
                        self.state = State::Thinking(pair.close);
                        self.held = begun[pair.open.len()..].to_owned();
                    } else if pairs.iter().any(|pair| pair.open.starts_with(begun)) {
                        return;
                    } else {
                        self.state = State::Answer;
                    }
                }
                State::Thinking(close) => {
                    if let Some(at) = self.held.find(*close) {
                        let rest = self.held[at + close.len()..].to_owned();
                        self.held.truncate(at);
                        let thinking = std::mem::replace(&mut self.held, rest);
                        parts.push((Section::Thinking, thinking));
                        self.state = State::Start;
                    } else {
                        let keep = longest_start_at_end(&self.held, close);
                        let rest = self.held.split_off(self.held.len() - keep);
                        let thinking = std::mem::replace(&mut self.held, rest);
                        if !thinking.is_empty() {
                            parts.push((Section::Thinking, thinking));
                        }
                        return;
                    }
                }
            }
        }
    }
}

/// How many bytes at the end of `text` could be the beginning of `mark`.
fn longest_start_at_end(text: &str, mark: &str) -> usize {
    let ends = mark.char_indices().map(|(at, _)| at).rev();
    ends.filter(|&at| at > 0)
        .find(|&at| text.ends_with(&mark[..at]))
        .unwrap_or(0)
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
        if let Some((section, part)) = splitter.finish() {
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
