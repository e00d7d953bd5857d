//! Prints the text of `cellar run` while it is generated: as text, or as lines of JSON.
//!
//! Invariant: with `--json` and `--jsonl`, stdout gets JSON and nothing else. Knows nothing of
//! prompts.

use std::io::Write;

use cellar_engine::session::TokenPiece;
use kv_core::TokenId;
use model_core::model_file::ModelFile;
use model_core::tokenizer::TokenKind;
use serde::Serialize;

use crate::args::RunArgs;
use crate::commands::answer::{Answer, AnswerPrinter, Section, Splitter, ThinkingFormat};
use crate::logprobs::ShownLogprobs;
use crate::terminal::{self, Reader, write_text};

/// What is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// The text.
    Text,
    /// One object at the end.
    Json,
    /// An object per piece, and one at the end.
    JsonLines,
}

/// A line of `--jsonl`.
#[derive(Debug, Serialize)]
struct Piece<'a> {
    piece: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<TokenId>,
    /// Of the token, where they are wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<ShownLogprobs>,
}

/// Prints one text.
pub(super) struct Printer<'f> {
    file: &'f ModelFile,
    format: Format,
    reader: Reader,
    /// Of an answer, and not of a text that is continued.
    answer: Option<AnswerParts>,
}

/// An answer that is split into thinking and the rest.
struct AnswerParts {
    splitter: Option<Splitter>,
    printer: AnswerPrinter,
    answer: Answer,
}

impl<'f> Printer<'f> {
    /// A printer; `answer_to` is the prompt where the text is an answer.
    ///
    /// # Errors
    /// Where the template cannot be read.
    pub(super) fn new(
        args: &RunArgs,
        file: &'f ModelFile,
        answer_to: Option<&str>,
        reader: Reader,
    ) -> anyhow::Result<Self> {
        let template = file.chat_template()?.unwrap_or_default();
        let answer = answer_to.map(|prompt| AnswerParts {
            splitter: Some(ThinkingFormat::of_template(template).splitter(prompt)),
            printer: AnswerPrinter::new(args.show_thinking, reader),
            answer: Answer::default(),
        });
        Ok(Self {
            file,
            format: match (args.json, args.jsonl) {
                (_, true) => Format::JsonLines,
                (true, false) => Format::Json,
                (false, false) => Format::Text,
            },
            reader,
            answer,
        })
    }

    /// Prints the prompt of a text.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(super) fn echo(&self, prompt: &str, out: &mut impl Write) -> anyhow::Result<()> {
        if self.format == Format::Text {
            write_text(out, self.reader, prompt)?;
        }
        Ok(())
    }

    /// Prints pieces of the text.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(super) fn print(
        &mut self,
        pieces: &[TokenPiece],
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        pieces
            .iter()
            .try_for_each(|part| self.print_part(part, out))
    }

    fn print_part(&mut self, part: &TokenPiece, out: &mut impl Write) -> anyhow::Result<()> {
        let (token, piece) = (part.token, part.text.as_str());
        if self.format == Format::JsonLines {
            let line = terminal::json(&Piece {
                piece,
                token,
                logprobs: part
                    .logprobs
                    .as_ref()
                    .map(|place| ShownLogprobs::of(self.file.tokenizer(), place)),
            })?;
            writeln!(out, "{line}")?;
            out.flush()?;
        }
        let control = token.and_then(|token| self.control(token));
        match &mut self.answer {
            Some(parts) => {
                let splitter = parts.splitter.as_mut();
                let new = splitter.map(|splitter| splitter.push(piece, control));
                parts.take(new.unwrap_or_default(), self.format, out)
            }
            None if self.format == Format::Text => Ok(write_text(out, self.reader, piece)?),
            None => Ok(()),
        }
    }

    /// Ends the text.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(super) fn finish(&mut self, out: &mut impl Write) -> anyhow::Result<()> {
        if let Some(parts) = &mut self.answer {
            let rest = parts.splitter.take().map(Splitter::finish);
            parts.take(rest.unwrap_or_default(), self.format, out)?;
        }
        match (self.format, &mut self.answer) {
            (Format::Text, Some(parts)) => Ok(parts.printer.finish(out)?),
            (Format::Text, None) => Ok(writeln!(out)?),
            _ => Ok(()),
        }
    }

    /// The answer, where the text is one.
    pub(super) fn answer(&self) -> Option<&Answer> {
        self.answer.as_ref().map(|parts| &parts.answer)
    }

    /// Whether the report is printed as JSON.
    pub(super) fn wants_report(&self) -> bool {
        self.format != Format::Text
    }

    /// The text of a control token.
    fn control(&self, id: TokenId) -> Option<&'f str> {
        let tokenizer = self.file.tokenizer();
        let is_control = tokenizer.token_kind(id) == Some(TokenKind::Control);
        is_control.then(|| tokenizer.token_text(id)).flatten()
    }
}

impl AnswerParts {
    fn take(
        &mut self,
        parts: Vec<(Section, String)>,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        for (section, part) in parts {
            self.answer.push(section, &part);
            if format == Format::Text {
                self.printer.print(section, &part, out)?;
            }
        }
        Ok(())
    }
}
