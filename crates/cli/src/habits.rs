//! Flags of llama.cpp: those that stand for a flag of this program, those that there is nothing to
//! choose for, and those of what this program does not do.
//!
//! Invariant: a flag that a command has itself is never replaced, nor is a value of a flag, nor
//! what follows `--`. Knows nothing of what flags mean.

use std::ffi::OsString;

use clap::{Command, CommandFactory};

use crate::args::Cli;
use crate::failure::{usage, warn};

/// The treatment of a flag.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// It is this flag.
    Is(&'static str),
    /// It has no effect, for this reason.
    Idle(&'static str),
    /// The same, with a value, which may be missing: on, off or auto.
    IdleSwitch(&'static str),
    /// The same, with a value.
    IdleValue(&'static str),
    /// It is refused with what there is instead.
    Refused(&'static str),
}

use Fate::{Idle, IdleSwitch, IdleValue, Is, Refused};

const TEMPLATE: &str = "a chat template is always a Jinja template of the model";
const MAPPED: &str = "model files are always mapped, and the pages of weights that --repack copies are \
                      given back";
const LOG: &str = "CELLAR_LOG=debug writes a log";
const THREADS: &str = "-t is for prompts and generation";
const ADAPTERS: &str = "adapters (LoRA, control vectors) are not supported: merge them into the model, and \
                        'cellar convert' the merged directory";
const IMAGES: &str = "images and audio are not supported: models take text";
const PARTS: &str = "one GPU is used whole, or with the CPU: --gpu-layers says how many layers it \
                     computes, --backend which one";
const ROPE: &str = "positions are scaled as the model's file says; --group-attention-factor lengthens a \
                    context";
const PROMPT_CACHE: &str = "'--save-state FILE' and '--load-state FILE' keep what was read";
const SERVED: &str = "'cellar serve' always has it";
const DOWNLOADS: &str = "only 'cellar pull OWNER/NAME:QUANT' downloads, and -m takes the same name";
const ONE_MODEL: &str = "a chat is 'cellar chat', one answer is 'cellar run'";

/// Flags of llama.cpp by name, several of them for the same.
const FLAGS: &[(&[&str], Fate)] = &[
    (&["-sys", "--system-prompt"], Is("--system")),
    (&["-ngl"], Is("--gpu-layers")),
    (&["-ub"], Is("--ubatch")),
    (&["-ctk", "--cache-type-k"], Is("--kv-type-k")),
    (&["-ctv", "--cache-type-v"], Is("--kv-type-v")),
    (&["-hf", "-hfr", "--hf-repo"], Is("--model")),
    (&["-s"], Is("--seed")),
    (&["-np"], Is("--parallel")),
    (
        &["-md", "--model-draft", "--spec-draft-model"],
        Is("--draft-model"),
    ),
    (&["--draft", "--draft-n"], Is("--draft-max")),
    (&["-j", "-jf"], Is("--schema")),
    (&["--grammar-file"], Is("--grammar")),
    (&["-r", "--reverse-prompt"], Is("--stop")),
    (&["-cnv", "--conversation"], Is("--chat")),
    (&["-no-cnv", "--no-conversation"], Is("--raw")),
    (&["--no-display-prompt"], Is("--no-echo")),
    (&["-a"], Is("--alias")),
    (&["--no-perf"], Is("--quiet")),
    (
        &["-fa", "--flash-attn"],
        IdleSwitch("attention is always computed in one step, unless --attention is plain"),
    ),
    (&["--jinja", "--no-jinja"], Idle(TEMPLATE)),
    (&["--mmap", "--no-mmap"], Idle(MAPPED)),
    (
        &["--mlock", "--direct-io", "-dio", "--check-tensors"],
        Idle(MAPPED),
    ),
    (
        &[
            "-v",
            "--verbose",
            "--log-verbose",
            "--log-prefix",
            "--log-timestamps",
        ],
        Idle(LOG),
    ),
    (
        &[
            "-lv",
            "--verbosity",
            "--log-verbosity",
            "--log-file",
            "--log-colors",
        ],
        IdleValue(LOG),
    ),
    (
        &["--log-disable", "--perf", "--simple-io", "--show-timings"],
        Idle(LOG),
    ),
    (&["--color"], IdleSwitch("colours are for terminals alone")),
    (&["-tb", "--threads-batch"], IdleValue(THREADS)),
    (
        &[
            "-C",
            "-Cr",
            "-Cb",
            "-Crb",
            "--cpu-mask",
            "--cpu-range",
            "--prio",
            "--prio-batch",
            "--poll",
            "--numa",
        ],
        IdleValue("threads run where the system puts them"),
    ),
    (
        &["--cpu-strict"],
        IdleValue("threads run where the system puts them"),
    ),
    (
        &["--warmup", "--no-warmup"],
        Idle("nothing is warmed up but by 'cellar bench'"),
    ),
    (&["-st", "--single-turn"], Idle(ONE_MODEL)),
    (
        &["-e", "--escape", "--no-escape"],
        Idle("texts are taken as they are: $'a\\nb' has a line break in most shells"),
    ),
    (
        &["-cb", "--cont-batching", "-kvu", "--kv-unified"],
        Idle("requests always share the steps and the memory"),
    ),
    (
        &["-nocb", "--no-cont-batching"],
        Refused("requests always share the steps: --parallel 1 computes one at a time"),
    ),
    (
        &["--no-context-shift"],
        Idle("nothing is dropped without --context-shift"),
    ),
    (
        &["-dt", "--defrag-thold"],
        IdleValue("the memory needs no defragmentation"),
    ),
    (
        &[
            "--metrics",
            "--props",
            "--slots",
            "--no-slots",
            "--embedding",
            "--embeddings",
            "--reranking",
            "--rerank",
        ],
        Idle(SERVED),
    ),
    (
        &["--no-webui", "--no-ui"],
        Idle("GET / shows the memory, and no chat"),
    ),
    (
        &["--threads-http", "-to", "--timeout", "--cache-reuse"],
        IdleValue("the server needs no such limit"),
    ),
    (&["--offline"], Idle(DOWNLOADS)),
    (
        &[
            "-i",
            "--interactive",
            "-if",
            "--interactive-first",
            "-mli",
            "--multiline-input",
        ],
        Refused(ONE_MODEL),
    ),
    (
        &[
            "--lora",
            "--lora-scaled",
            "--control-vector",
            "--control-vector-scaled",
        ],
        Refused(ADAPTERS),
    ),
    (
        &[
            "--image",
            "--audio",
            "--video",
            "--mmproj",
            "-mm",
            "--mmproj-url",
            "-mmu",
        ],
        Refused(IMAGES),
    ),
    (
        &[
            "-sm",
            "--split-mode",
            "-ts",
            "--tensor-split",
            "-mg",
            "--main-gpu",
            "-dev",
            "--device",
            "-nkvo",
            "--no-kv-offload",
            "-ot",
            "--override-tensor",
            "-cmoe",
            "--cpu-moe",
            "-ncmoe",
            "--n-cpu-moe",
            "--rpc",
        ],
        Refused(PARTS),
    ),
    (
        &[
            "--rope-scaling",
            "--rope-scale",
            "--rope-freq-base",
            "--rope-freq-scale",
            "--yarn-orig-ctx",
            "--yarn-ext-factor",
            "--yarn-attn-factor",
            "--yarn-beta-slow",
            "--yarn-beta-fast",
        ],
        Refused(ROPE),
    ),
    (
        &["--override-kv"],
        Refused("metadata are taken as they are in the file: 'cellar inspect' shows them"),
    ),
    (&["-gan", "--grp-attn-n"], Is("--group-attention-factor")),
    (&["-gaw", "--grp-attn-w"], Is("--group-attention-width")),
    (
        &[
            "--prompt-cache",
            "--prompt-cache-all",
            "--prompt-cache-ro",
            "--slot-save-path",
        ],
        Refused(PROMPT_CACHE),
    ),
    (
        &[
            "-mu",
            "--model-url",
            "-hff",
            "--hf-file",
            "-hft",
            "--hf-token",
            "-dr",
            "--docker-repo",
        ],
        Refused(DOWNLOADS),
    ),
    (
        &["--verbose-prompt", "-sp", "--special"],
        Refused("'cellar tokenize' shows the tokens of a text"),
    ),
    (
        &["--samplers", "--sampler-seq", "--sampling-seq"],
        Refused("samplers have a fixed order: each has a flag that turns it off, see --help"),
    ),
    (
        &["--ignore-eos"],
        Refused("--min-tokens N is how long a text is at least"),
    ),
    (&["-bf", "--binary-file"], Refused("-f FILE reads a text")),
    (
        &["--api-key"],
        Refused("a key is no secret in a list of processes: '--api-key-file FILE' has one a line"),
    ),
    (
        &["--in-prefix", "--in-suffix", "--in-prefix-bos"],
        Refused("the model's chat template is around messages; --raw leaves it out"),
    ),
    (
        &[
            "--dynatemp-range",
            "--dynatemp-exp",
            "--top-nsigma",
            "--adaptive-target",
        ],
        Refused(
            "this sampler is not supported: --temp, --top-k, --top-p, --min-p, --typical, XTC, DRY and Mirostat 2 are",
        ),
    ),
];

/// The arguments with this program's flags. Warns of those without effect.
///
/// # Errors
/// A usage error for a flag of what this program does not do.
pub(crate) fn translate(args: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let cli = Cli::command();
    let name = args.get(1).and_then(|name| name.to_str());
    let Some(command) = name.and_then(|name| cli.find_subcommand(name)) else {
        return Ok(args);
    };
    let mut translated = Vec::with_capacity(args.len());
    let mut args = args.into_iter().peekable();
    let mut is_value = false;
    while let Some(arg) = args.next() {
        if arg == "--" {
            translated.push(arg);
            translated.extend(args);
            break;
        }
        let text = arg.to_str().unwrap_or_default();
        let known = FLAGS.iter().find(|(names, _)| names.contains(&text));
        let fate = known.filter(|_| !is_value && !has(command, text));
        is_value = !is_value && takes_value(command, text);
        let Some((_, fate)) = fate else {
            translated.push(arg);
            continue;
        };
        let idle = |why: &str| warn(&format!("{text} has no effect: {why}"));
        match *fate {
            // Of a conversation: the command is one, or has none.
            Is(ours @ ("--chat" | "--raw" | "--no-echo" | "--quiet")) if !has(command, ours) => {
                idle(ONE_MODEL);
            }
            Is(ours) => {
                is_value = takes_value(command, ours);
                translated.push(ours.into());
            }
            Idle(why) => idle(why),
            IdleValue(why) => {
                idle(why);
                args.next();
            }
            IdleSwitch(why) => {
                idle(why);
                let switches = ["on", "off", "auto", "0", "1"];
                let _ = args.next_if(|next| switches.iter().any(|value| next == value));
            }
            Refused(instead) => return usage(format!("there is no {text} here: {instead}")),
        }
    }
    Ok(translated)
}

/// True where a command has this flag.
fn has(command: &Command, flag: &str) -> bool {
    argument(command, flag).is_some()
}

/// True where the next argument is the value of this flag of the command.
fn takes_value(command: &Command, flag: &str) -> bool {
    argument(command, flag)
        .is_some_and(|arg| arg.get_action().takes_values() && !arg.is_require_equals_set())
}

fn argument<'c>(command: &'c Command, flag: &str) -> Option<&'c clap::Arg> {
    let long = flag.strip_prefix("--");
    let mut chars = flag.chars().skip(1);
    let short = chars
        .next()
        .filter(|_| long.is_none() && chars.next().is_none());
    command.get_arguments().find(|arg| {
        let longs = arg.get_long_and_visible_aliases().unwrap_or_default();
        let all = arg.get_all_aliases().unwrap_or_default();
        let shorts = arg.get_short_and_visible_aliases().unwrap_or_default();
        long.is_some_and(|long| longs.contains(&long) || all.contains(&long))
            || short.is_some_and(|short| shorts.contains(&short))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(args: &[&str]) -> Vec<OsString> {
        translate(args.iter().map(OsString::from).collect()).unwrap()
    }

    #[test]
    fn only_whole_flags_before_the_dashes_are_translated() {
        let args = [
            "cellar", "run", "-sys", "Hi", "-ngl", "0", "-ngl=1", "--", "-sys",
        ];
        let wanted = [
            "cellar",
            "run",
            "--system",
            "Hi",
            "--gpu-layers",
            "0",
            "-ngl=1",
            "--",
            "-sys",
        ];
        assert_eq!(translated(&args), wanted);
    }

    #[test]
    fn values_and_flags_of_the_command_stay() {
        let stays = ["cellar", "run", "--stop", "-fa", "-p", "-v"];
        assert_eq!(translated(&stays), stays);
        let repetitions = ["cellar", "bench", "-r", "2"];
        assert_eq!(translated(&repetitions), repetitions);
        assert_eq!(
            translated(&[
                "cellar", "run", "-r", "User:", "-fa", "on", "-tb", "4", "Hi"
            ]),
            ["cellar", "run", "--stop", "User:", "Hi"]
        );
        assert_eq!(
            translated(&["cellar", "chat", "-cnv", "--jinja", "-fa"]),
            ["cellar", "chat"]
        );
    }

    #[test]
    fn every_flag_stands_for_one_that_a_command_has() {
        let cli = Cli::command();
        for (names, fate) in FLAGS {
            let Is(ours) = fate else { continue };
            let is_there = cli.get_subcommands().any(|command| has(command, ours));
            assert!(is_there, "{names:?}: {ours}");
        }
    }
}
