//! The flags of `cellar embed`.
//!
//! Invariant: the output is JSON. Knows neither models nor how embeddings are computed.

use std::str::FromStr;

use clap::{ArgAction, Args, ValueEnum};
use kv_core::TokenId;
use model_core::sentence::{Normalization, Pooling};

use super::model_words::ModelTextsArgs;
use super::texts::TextArgs;

/// `cellar embed`
#[derive(Debug, Args)]
#[command(after_help = "\
Prints a JSON list with one vector per text, in order, one vector per line. Texts are the arguments,
or the lines of -f or of standard input, including empty ones. Several texts are computed at once;
the vector of a text does not depend on the others.

The model is an encoder, or a decoder, whose tokens see no later ones. Pooling (how the rows of
all tokens become one vector) is read from the model: 1_Pooling/config.json of a
sentence-transformers directory, or pooling_type of a GGUF file; a model without it needs
--pooling. Vectors have length 1, unless modules.json of the directory has no Normalize: the dot
product of two is then their cosine similarity, near 1 for texts of the same meaning.

A text with more tokens than the model takes is an error that reports both numbers; --truncate cuts
off its end, as sentence-transformers does. Prefixes that some models expect (\"query: \") are part of
the text.

--pooling none prints a list of rows for each text, one for every token, as the model gives them;
with --normalize unit each has length 1. --tokens takes the ids of a text's tokens in place of the
text. A model without a tokenizer takes nothing else: the decoder of WavTokenizer turns every audio
code into a row of magnitudes and phases, for an inverse short-time Fourier transform.

Examples:
  cellar embed -m all-MiniLM-L6-v2/ \"How is the weather today?\" \"Is it raining?\"
  cellar embed -m MODEL.gguf -f lines.txt > vectors.json
  cellar embed -m Qwen3-Embedding-0.6B/ --pooling last \"What is the capital of France?\"
  cellar embed -m MODEL.gguf -f lines.txt --truncate | jq '.[0] | length'
  cellar embed -m WavTokenizer.gguf --pooling none --tokens 151,27,3942")]
pub(crate) struct EmbedArgs {
    #[command(flatten)]
    pub(crate) input: ModelTextsArgs,
    /// Ids of the tokens of one text, in place of texts; may be given several times
    #[arg(long, value_name = "ID,ID", conflicts_with_all = ["file", "truncate"])]
    pub(crate) tokens: Vec<TokenIds>,
    /// How the rows of a text become one vector [default: as in the model's files]
    #[arg(long, value_enum)]
    pub(crate) pooling: Option<PoolingName>,
    /// Length of vectors [default: as in the model's files, and where they do not say it, unit]
    #[arg(long, value_enum)]
    pub(crate) normalize: Option<NormalizeName>,
    /// The same as --normalize none
    #[arg(long, action = ArgAction::SetTrue, conflicts_with = "normalize")]
    pub(crate) no_normalize: bool,
    #[command(flatten)]
    pub(crate) compute: TextArgs,
}

/// [`Normalization`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NormalizeName {
    /// 1
    Unit,
    /// As pooled
    None,
}

impl From<NormalizeName> for Normalization {
    fn from(name: NormalizeName) -> Self {
        match name {
            NormalizeName::Unit => Self::Unit,
            NormalizeName::None => Self::None,
        }
    }
}

/// The tokens of one text on the command line: `1,2,3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenIds(pub(crate) Vec<TokenId>);

impl FromStr for TokenIds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let id = |id: &str| {
            let id = id.trim();
            let known = id.parse().map(TokenId);
            known.map_err(|_| format!("'{id}' is no token id; ids are numbers: 151,27,3942"))
        };
        text.split(',').map(id).collect::<Result<_, _>>().map(Self)
    }
}

/// [`Pooling`] on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolingName {
    /// Not at all: a list of rows, one for each token
    None,
    /// The mean of all rows
    Mean,
    /// The row of the first token (CLS)
    Cls,
    /// The row of the last token
    Last,
}

impl From<PoolingName> for Pooling {
    fn from(name: PoolingName) -> Self {
        match name {
            PoolingName::None => Self::None,
            PoolingName::Mean => Self::Mean,
            PoolingName::Cls => Self::Cls,
            PoolingName::Last => Self::Last,
        }
    }
}
