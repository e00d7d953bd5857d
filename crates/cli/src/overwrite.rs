//! [`check`]: refuses an output that would overwrite a file that the same run reads, the file of
//! another output, or a model.
//!
//! Invariant: the check covers every argument of every command, before anything is read or written.
//! An argument that is not in [`OUTPUTS`] counts as an input. Files are compared by their data, so
//! links and hard links lead to the same file.

use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use crate::by_name::locate;
use crate::failure::usage;
use crate::models::{default_model, is_model_file};
use crate::output_file;

/// The arguments that name files to write, by command.
const OUTPUTS: [(&str, &[&str]); 8] = [
    ("run", &["save_state"]),
    ("batch", &["output", "trace"]),
    ("serve", &["trace"]),
    ("bench", &["trace"]),
    ("graph", &["out"]),
    ("logits", &["out"]),
    ("imatrix", &["out"]),
    ("convert", &["out"]),
];

/// The arguments that name files to write, in any command that has them.
const OUTPUTS_EVERYWHERE: [&str; 1] = ["expert_trace"];

/// Directories and sockets, in any command: the files in them have names of their own, and replace
/// no other.
const PLACES: [&str; 6] = [
    "swap_dir",
    "files_dir",
    "cache_dir",
    "slot_save_path",
    "socket",
    "directory",
];

/// The input that an output may replace: a text that goes on is saved under the name of its state.
const REPLACED_INPUTS: [(&str, &str); 1] = [("save_state", "load_state")];

/// The identity of a file: that of its data, or its place where it is not there yet.
#[derive(Debug, PartialEq, Eq)]
enum FileId {
    #[cfg(unix)]
    Data {
        device: u64,
        inode: u64,
    },
    Place(PathBuf),
}

/// A file with the argument that names it.
struct NamedFile {
    id: String,
    flag: String,
    file: FileId,
}

/// Checks that no output is a file that is read, or that another output writes, and that no model
/// is lost.
///
/// # Errors
/// A usage error with the output and what it would overwrite.
pub(crate) fn check(cli: &Command, matches: &ArgMatches) -> anyhow::Result<()> {
    let Some((name, matches)) = matches.subcommand() else {
        return Ok(());
    };
    let Some(command) = cli.find_subcommand(name) else {
        return Ok(());
    };
    let is_output = |arg: &&Arg| is_output(name, arg.get_id().as_str());
    let is_place = |arg: &&Arg| PLACES.contains(&arg.get_id().as_str());
    let args = || command.get_arguments();
    let inputs = inputs(
        args().filter(|arg| !is_output(arg) && !is_place(arg)),
        matches,
    );
    let mut written: Vec<NamedFile> = Vec::new();
    for arg in args().filter(is_output) {
        for path in paths(arg, matches) {
            let Some((target, existing)) = output_file::regular_target(&path) else {
                continue;
            };
            let output = NamedFile::new(arg, FileId::of(&target, existing.as_ref()));
            let refuse = |why: &str| usage(format!("{} '{}' {why}", output.flag, path.display()));
            let may_replace = |input: &NamedFile| {
                REPLACED_INPUTS.contains(&(output.id.as_str(), input.id.as_str()))
            };
            let mut read = inputs.iter().filter(|input| !may_replace(input));
            if let Some(input) = read.find(|input| input.file == output.file) {
                return refuse(&format!("is read as {}: choose another file", input.flag));
            }
            if let Some(other) = written.iter().find(|other| other.file == output.file) {
                return refuse(&format!(
                    "is the file of {}, too: choose another file",
                    other.flag
                ));
            }
            if is_model_file(&target) {
                let instead = match name {
                    "convert" if matches.get_flag("force") => None,
                    "convert" => Some(", or replace it with --force"),
                    _ => Some(""),
                };
                if let Some(instead) = instead {
                    let lost = "is a model, which would be lost: choose another file";
                    return refuse(&format!("{lost}{instead}"));
                }
            }
            written.push(output);
        }
    }
    Ok(())
}

/// True if an argument of a command names a file to write.
fn is_output(command: &str, arg: &str) -> bool {
    let mut of_commands = OUTPUTS.iter();
    let outputs = of_commands.find(|(name, _)| *name == command);
    OUTPUTS_EVERYWHERE.contains(&arg) || outputs.is_some_and(|(_, ids)| ids.contains(&arg))
}

/// The files that these arguments name, those of directories of models, and those that are read
/// without an argument: standard input and the default model.
fn inputs<'a>(args: impl Iterator<Item = &'a Arg>, matches: &ArgMatches) -> Vec<NamedFile> {
    let stdin = Some(PathBuf::from("/dev/stdin"));
    let unnamed = [("stdin", stdin), ("CELLAR_MODEL", default_model())];
    let unnamed = unnamed.into_iter().flat_map(|(flag, path)| {
        let files = path.map(|path| files(&path)).unwrap_or_default();
        files.into_iter().map(move |file| NamedFile {
            id: flag.to_owned(),
            flag: flag.to_owned(),
            file,
        })
    });
    let named = args.flat_map(|arg| {
        let located =
            |path: PathBuf| locate(&path).map_or(path.clone(), |found| found.into_owned());
        let paths = paths(arg, matches).into_iter().map(located);
        let files: Vec<FileId> = paths.flat_map(|path| files(&path)).collect();
        files.into_iter().map(|file| NamedFile::new(arg, file))
    });
    unnamed.chain(named).collect()
}

/// The values of an argument as paths. Numbers and texts are among them: few are names of files
/// that exist.
fn paths(arg: &Arg, matches: &ArgMatches) -> Vec<PathBuf> {
    let id = arg.get_id().as_str();
    let source = matches
        .try_contains_id(id)
        .ok()
        .and_then(|_| matches.value_source(id));
    let is_given = matches!(
        source,
        Some(ValueSource::CommandLine | ValueSource::EnvVariable)
    );
    if !is_given || !arg.get_action().takes_values() {
        return Vec::new();
    }
    let values = matches.get_raw(id).into_iter().flatten();
    let named = values.flat_map(|value| {
        // `FILE=SCALE` and `FILE:SCALE` name a file, too.
        let text = value.to_str().unwrap_or_default();
        let scaled = ['=', ':']
            .into_iter()
            .filter_map(|sign| text.rsplit_once(sign));
        let files: Vec<PathBuf> = scaled.map(|(file, _)| PathBuf::from(file)).collect();
        std::iter::once(PathBuf::from(value)).chain(files)
    });
    named.collect()
}

/// The endings of the files of a model directory.
const MODEL_ENDINGS: [&str; 6] = ["json", "safetensors", "gguf", "txt", "model", "jinja"];

/// A file, or the files of a model in a directory.
fn files(path: &Path) -> Vec<FileId> {
    let id = |path: &Path| {
        let metadata = fs::metadata(path).ok().filter(Metadata::is_file)?;
        Some(FileId::of(path, Some(&metadata)))
    };
    if !path.is_dir() {
        return id(path).into_iter().collect();
    }
    let is_of_model = |path: &PathBuf| {
        let ending = path.extension().and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| MODEL_ENDINGS.contains(&ending))
    };
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path()).filter(is_of_model);
    paths.filter_map(|path| id(&path)).collect()
}

impl NamedFile {
    fn new(arg: &Arg, file: FileId) -> Self {
        let id = arg.get_id().to_string();
        let flag = match (arg.get_long(), arg.get_value_names()) {
            (Some(long), _) => format!("--{long}"),
            (None, Some([name, ..])) => name.to_string(),
            (None, _) => id.clone(),
        };
        Self { id, flag, file }
    }
}

impl FileId {
    #[cfg(unix)]
    fn of(path: &Path, metadata: Option<&Metadata>) -> Self {
        use std::os::unix::fs::MetadataExt;

        metadata.map_or_else(
            || Self::place(path),
            |metadata| Self::Data {
                device: metadata.dev(),
                inode: metadata.ino(),
            },
        )
    }

    #[cfg(not(unix))]
    fn of(path: &Path, _: Option<&Metadata>) -> Self {
        Self::place(path)
    }

    /// The path without links in its directory.
    fn place(path: &Path) -> Self {
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let parent = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
        Self::Place(parent.join(path.file_name().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    /// A new argument that names a file or directory has to be added here, or to the outputs.
    #[test]
    fn every_argument_with_a_path_is_an_input_or_an_output() {
        let path = clap::value_parser!(PathBuf).type_id();
        let inputs = [
            "model",
            "named",
            "files",
            "models",
            "file",
            "load_state",
            "chat_template",
            "api_key_file",
            "config",
            "tls_cert",
            "tls_key",
            "draft_model",
            "tokens_file",
            "imatrix",
            "image",
            "audio",
            "mmproj",
            "control_vector",
            "schema",
            "grammar",
        ];
        for command in Cli::command().get_subcommands() {
            let nested = command.get_subcommands();
            for command in nested.chain([command]) {
                for arg in command.get_arguments() {
                    if arg.get_value_parser().type_id() != path {
                        continue;
                    }
                    let id = arg.get_id().as_str();
                    let is_output = is_output(command.get_name(), id);
                    let is_replay = (command.get_name(), id) == ("replay", "trace");
                    assert!(
                        is_output || is_replay || inputs.contains(&id) || PLACES.contains(&id),
                        "{}: is '{id}' an output?",
                        command.get_name()
                    );
                }
            }
        }
    }

    /// An output that was renamed would not be checked.
    #[test]
    fn every_output_is_an_argument() {
        let cli = Cli::command();
        for (name, ids) in OUTPUTS {
            let Some(command) = cli.find_subcommand(name) else {
                assert!(name == "serve" && !cfg!(feature = "serve"), "{name}");
                continue;
            };
            for id in ids {
                assert!(
                    command.get_arguments().any(|arg| arg.get_id() == *id),
                    "{name}: {id}"
                );
            }
        }
    }
}
