//! The flags of `cellar rerank`.
//!
//! Knows neither models nor how scores are computed.

use std::num::NonZeroUsize;

use clap::{ArgAction, Args};

use super::model_words::ModelTextsArgs;
use super::texts::TextArgs;

/// `cellar rerank`
#[derive(Debug, Args)]
#[command(after_help = "\
Reads the query and each document together and prints how well it answers: the best first, one
document per line, with its score and its number. Documents are the arguments, or the lines of -f or
of standard input. Several pairs are computed at once; a score does not depend on the others.

The model is a cross-encoder with a head of one label: BERT, RoBERTa or XLM-RoBERTa
(BertForSequenceClassification and so on). A score is the output of the head: scores compare
documents of one query, and their sigmoid is between 0 and 1.

A query and a document with more tokens than the model takes are an error that reports both numbers;
--truncate cuts off the end of the document.

Examples:
  cellar rerank -m bge-reranker-v2-m3/ --query \"What is a panda?\" \"A bear.\" \"It rains.\"
  cellar rerank -m MODEL.gguf --query \"How do I exit vim?\" -f lines.txt --top 3
  grep -rh vim notes/ | cellar rerank -m MODEL.gguf --query \"How do I exit vim?\" --json | jq '.[0]'")]
pub(crate) struct RerankArgs {
    #[command(flatten)]
    pub(crate) input: ModelTextsArgs,
    /// Query that the documents are to answer
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) query: String,
    /// Print only the best N documents
    #[arg(long, value_name = "N")]
    pub(crate) top: Option<NonZeroUsize>,
    /// Print a JSON list of index (from 0, as given), score and document, the best first
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) compute: TextArgs,
}
