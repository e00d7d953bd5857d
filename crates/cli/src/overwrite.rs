//! What an output may not overwrite: a file that the same run reads, the file of another output, and a model.
//!
//! Invariant: the check covers every argument of every command, before anything is read or written. An argument
//! that is not in [`OUTPUTS`] counts as an input. Files are compared by what they are, not by their names: links
//! lead to the same file.

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

/// Where files of names of their own are written, in any command: they replace nobody's.
const PLACES: [&str; 4] = ["swap_dir", "save_cache", "socket", "directory"];

/// The input that an output may replace: a text that goes on is saved under the name of its state.
const REPLACED_INPUTS: [(&str, &str); 1] = [("save_state", "load_state")];

/// Which file it is.
#[derive(Debug, PartialEq, Eq)]
struct FileId {
    #[cfg(unix)]
    device_and_inode: (u64, u64),
    #[cfg(not(unix))]
    path: PathBuf,
}

/// A file with the argument that names it.
struct Named {
    id: String,
    flag: String,
    file: FileId,
}

/// Checks that no output is a file that is read, or that another output writes, and that no model is lost.
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
    let outputs = OUTPUTS.iter().find(|(command, _)| *command == name);
    let Some((_, outputs)) = outputs else {
        return Ok(());
    };
    let is_output = |arg: &Arg| outputs.contains(&arg.get_id().as_str());
    // Standard input can be a file, which is read with `-` or without.
    let stdin = files(Path::new("/dev/stdin"))
        .into_iter()
        .map(|file| Named {
            id: "stdin".to_owned(),
            flag: "stdin".to_owned(),
            file,
        });
    let default = default_model().map(|path| files(&path));
    let default = default.into_iter().flatten().map(|file| Named {
        id: "model".to_owned(),
        flag: "CELLAR_MODEL".to_owned(),
        file,
    });
    let mut inputs: Vec<Named> = stdin.chain(default).collect();
    let is_place = |arg: &Arg| PLACES.contains(&arg.get_id().as_str());
    for arg in (command.get_arguments()).filter(|arg| !is_output(arg) && !is_place(arg)) {
        for path in paths(arg, matches) {
            let path = locate(&path).map_or_else(|_| path.clone(), |found| found.into_owned());
            let found = files(&path).into_iter().map(|file| Named {
                id: arg.get_id().to_string(),
                flag: flag(arg),
                file,
            });
            inputs.extend(found);
        }
    }
    let mut written: Vec<Named> = Vec::new();
    for arg in command.get_arguments().filter(|arg| is_output(arg)) {
        for path in paths(arg, matches) {
            let Some((target, existing)) = output_file::regular_target(&path) else {
                continue;
            };
            let refuse = |what: &str| {
                usage(format!(
                    "{} '{}' {what}: choose another file",
                    flag(arg),
                    path.display()
                ))
            };
            let file = match &existing {
                Some(metadata) => FileId::of(&target, metadata),
                // Two names of a file that is not there yet differ no more than in their directories' links.
                None => {
                    if written_twice(&target, arg, command, matches, outputs) {
                        return refuse("is the file of another output, too");
                    }
                    continue;
                }
            };
            let id = arg.get_id().as_str();
            let may_replace = |input: &Named| REPLACED_INPUTS.contains(&(id, input.id.as_str()));
            if let Some(input) =
                (inputs.iter()).find(|input| input.file == file && !may_replace(input))
            {
                return refuse(&format!("is read as {}", input.flag));
            }
            if let Some(other) = written.iter().find(|other| other.file == file) {
                return refuse(&format!("is the file of {}, too", other.flag));
            }
            if is_model_file(&target) {
                let is_convert = command.get_name() == "convert";
                if !is_convert {
                    return refuse("is a model, which would be lost");
                }
                if !matches.get_flag("force") {
                    return usage(format!(
                        "'{}' is a model, which would be lost: choose another file, or replace it with --force",
                        path.display()
                    ));
                }
            }
            written.push(Named {
                id: id.to_owned(),
                flag: flag(arg),
                file,
            });
        }
    }
    Ok(())
}

/// Whether another output that was given is the same file, which does not exist yet.
fn written_twice(
    target: &Path,
    arg: &Arg,
    command: &Command,
    matches: &ArgMatches,
    outputs: &[&str],
) -> bool {
    let others = command.get_arguments().filter(|other| {
        outputs.contains(&other.get_id().as_str()) && other.get_id() != arg.get_id()
    });
    let others = others.flat_map(|other| paths(other, matches));
    let mut targets = others.filter_map(|path| output_file::regular_target(&path));
    targets.any(|(other, _)| in_real_directory(&other) == in_real_directory(target))
}

/// The path without links in its directory.
fn in_real_directory(path: &Path) -> PathBuf {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let parent = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
    parent.join(path.file_name().unwrap_or_default())
}

/// The values of an argument as paths. Numbers and texts are among them: few are names of files that exist.
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
    values.map(PathBuf::from).collect()
}

/// What the names of files of a model directory end with.
const MODEL_ENDINGS: [&str; 6] = ["json", "safetensors", "gguf", "txt", "model", "jinja"];

/// A file, or the files of a model in a directory.
fn files(path: &Path) -> Vec<FileId> {
    let Ok(metadata) = fs::metadata(path) else {
        return Vec::new();
    };
    if metadata.is_file() {
        return vec![FileId::of(path, &metadata)];
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let is_of_model = |path: &Path| {
        let ending = path.extension().and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| MODEL_ENDINGS.contains(&ending))
    };
    let entries = entries.filter(|entry| is_of_model(&entry.path()));
    let files = entries.filter_map(|entry| {
        let metadata = fs::metadata(entry.path()).ok()?;
        let is_file = metadata.is_file();
        is_file.then(|| FileId::of(&entry.path(), &metadata))
    });
    files.collect()
}

/// How the argument is written.
fn flag(arg: &Arg) -> String {
    match (arg.get_long(), arg.get_value_names()) {
        (Some(long), _) => format!("--{long}"),
        (None, Some([name, ..])) => name.to_string(),
        (None, _) => arg.get_id().to_string(),
    }
}

impl FileId {
    #[cfg(unix)]
    fn of(_: &Path, metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;

        Self {
            device_and_inode: (metadata.dev(), metadata.ino()),
        }
    }

    #[cfg(not(unix))]
    fn of(path: &Path, _: &Metadata) -> Self {
        Self {
            path: path.canonicalize().unwrap_or_else(|_| path.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    /// Arguments that name files or directories: whoever adds one decides here whether it is an output.
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
            "draft_model",
            "tokens_file",
            "imatrix",
            "schema",
            "grammar",
        ];
        for command in Cli::command().get_subcommands() {
            let nested = command.get_subcommands();
            for command in nested.chain([command]) {
                let outputs = OUTPUTS.iter().find(|(name, _)| *name == command.get_name());
                for arg in command.get_arguments() {
                    if arg.get_value_parser().type_id() != path {
                        continue;
                    }
                    let id = arg.get_id().as_str();
                    let is_output = outputs.is_some_and(|(_, ids)| ids.contains(&id));
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
