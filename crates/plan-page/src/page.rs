//! [`Page`]: questions in, answers out, both as bytes: a line of JSON, and for files their first
//! bytes behind it. Knows no browser.

use model_core::file_start::FileStart;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::header::{DirectoryHeaders, HeaderError, HeaderModel};
use crate::plan::{HeaderPlan, PlanOptions};
use crate::walk::Walk;
use crate::walks::{walk, walk_names};

/// What the page asks. The bytes of `starts` follow the line, in their order.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    /// Opens a GGUF file, or all parts of a split one.
    Gguf { starts: Vec<Start> },
    /// Opens a directory.
    Directory {
        name: String,
        config: Map<String, Value>,
        generation_config: Option<Map<String, Value>>,
        starts: Vec<Start>,
    },
    /// Plans the model that was opened last.
    Plan(PlanOptions),
    /// Lists the walks.
    Walks,
    /// Walks through a memory.
    Walk { name: String },
}

/// A file whose first bytes follow.
#[derive(Debug, Deserialize)]
struct Start {
    name: String,
    /// Bytes of the file, where they are known.
    file_len: Option<u64>,
    /// Bytes that follow of it.
    n_bytes: usize,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// A model was opened; what it is called.
    Opened {
        name: String,
    },
    /// More bytes of the file are needed than so many.
    StartTooShort {
        n_bytes: u64,
    },
    Plan(Box<HeaderPlan>),
    Walks(Vec<&'static str>),
    Walk(Walk),
    Error(String),
}

/// What the page knows between questions: the model that was opened last.
#[derive(Debug, Default)]
pub struct Page {
    model: Option<HeaderModel>,
}

impl Page {
    /// The answer to a question, as JSON: an object with one key, `error` where there is none. A
    /// model that cannot be opened leaves the one before.
    pub fn answer(&mut self, question: &[u8]) -> String {
        let answer = self.answer_to(question).unwrap_or_else(Answer::Error);
        serde_json::to_string(&answer).unwrap_or_else(|error| {
            let error = Value::from(error.to_string());
            format!("{{\"error\":{error}}}")
        })
    }

    fn answer_to(&mut self, question: &[u8]) -> Result<Answer, String> {
        let end = question.iter().position(|&byte| byte == b'\n');
        let (line, bytes) = question.split_at(end.unwrap_or(question.len()));
        let question: Question = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let bytes = bytes.get(1..).unwrap_or_default();
        match question {
            Question::Gguf { starts } => {
                let starts = file_starts(starts, bytes)?;
                self.open(HeaderModel::from_gguf(starts))
            }
            Question::Directory {
                name,
                config,
                generation_config,
                starts,
            } => {
                let starts = file_starts(starts, bytes)?;
                self.open(HeaderModel::from_directory(DirectoryHeaders {
                    name,
                    config,
                    generation_config,
                    starts,
                }))
            }
            Question::Plan(options) => {
                let model = self.model.as_ref().ok_or("no model has been opened")?;
                let plan = HeaderPlan::new(model, &options).map_err(|error| error.to_string())?;
                Ok(Answer::Plan(Box::new(plan)))
            }
            Question::Walks => Ok(Answer::Walks(walk_names().collect())),
            Question::Walk { name } => walk(&name).map(Answer::Walk),
        }
    }

    fn open(&mut self, opened: Result<HeaderModel, HeaderError>) -> Result<Answer, String> {
        match opened {
            Ok(model) => {
                let name = self.model.insert(model).name().to_owned();
                Ok(Answer::Opened { name })
            }
            Err(HeaderError::StartTooShort(n_bytes)) => Ok(Answer::StartTooShort { n_bytes }),
            Err(HeaderError::File(error)) => Err(error.to_string()),
        }
    }
}

/// The files of a question with their bytes.
fn file_starts(starts: Vec<Start>, mut bytes: &[u8]) -> Result<Vec<FileStart>, String> {
    let start = |start: Start| {
        let Some((of_file, rest)) = bytes.split_at_checked(start.n_bytes) else {
            let (name, wanted, got) = (start.name, start.n_bytes, bytes.len());
            return Err(format!(
                "'{name}': {wanted} bytes announced, but {got} came"
            ));
        };
        bytes = rest;
        Ok(FileStart {
            name: start.name,
            bytes: of_file.to_vec().into(),
            file_len: start.file_len,
        })
    };
    starts.into_iter().map(start).collect()
}
