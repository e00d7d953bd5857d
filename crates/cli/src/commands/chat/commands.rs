//! What a line of a conversation is: a message, or a command that begins with a slash.
//!
//! Invariant: a message is never empty, and a mistyped command is never sent to the model. Knows
//! nothing of what commands do.

use std::path::PathBuf;

use crate::advice::most_similar;
use crate::failure::usage;

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Something to answer.
    Message(String),
    /// Something to do.
    Command(Command),
}

/// A line that is no message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Print the commands.
    Help,
    /// End the program.
    Exit,
    /// Begin a new conversation.
    Clear,
    /// Write the conversation to a file.
    Save(PathBuf),
    /// Continue the conversation of a file.
    Load(PathBuf),
    /// Change the system message.
    System(SystemChange),
    /// Show the model a picture, with the next message.
    Image(PathBuf),
    /// Play the model a sound, with the next message.
    Audio(PathBuf),
    /// Answer the last message again.
    Regenerate,
    /// Forget the last message and its answer.
    Undo,
    /// Print numbers of the last answer.
    Statistics,
    /// Change a setting: its name and its value.
    Set(String, String),
    /// Print something.
    Show(Topic),
}

/// What happens to the system message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SystemChange {
    /// It is printed.
    Show,
    /// It becomes this text.
    Set(String),
    /// There is none any more.
    Remove,
}

/// What `/show` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topic {
    /// The settings that `/set` changes.
    Settings,
    /// The conversation.
    Messages,
    /// The text that the model sees.
    Prompt,
    /// The chat template.
    Template,
}

/// The commands, for `/help` and for error messages.
pub(super) const HELP: &str = "\
  /clear              begin again with the system message alone
  /undo               forget the last message and its answer
  /regen              answer the last message again
  /system [TEXT]      show or change the system message; \"\" removes it
  /image FILE         show the model a picture, with the next message
  /audio FILE         play the model a sound, with the next message
  /save FILE          save the conversation as JSON
  /load FILE          continue a saved conversation
  /set [NAME VALUE]   show or change settings: temp, top-k, top-p, min-p, repeat-penalty,
                      presence-penalty, frequency-penalty, typical, xtc-probability,
                      xtc-threshold, dry-multiplier, min-tokens, seed, predict, show-thinking,
                      reasoning-budget
  /show [WHAT]        show settings, messages, prompt or template
  /stats              show the size of the conversation and the speed of the last answer
  /help               show these commands
  /exit               end the program, as Ctrl-D does
A line that ends with \\ continues on the next one; // at its beginning sends a slash.
Ctrl-C ends an answer or clears a line; twice on an empty line it ends the program.";

/// The names that a mistyped one is compared with.
const NAMES: [&str; 14] = [
    "help", "exit", "quit", "clear", "regen", "undo", "stats", "save", "load", "system", "image",
    "audio", "set", "show",
];

/// What a line is; `None` for an empty one.
///
/// # Errors
/// A usage error where a command is unknown, or has too many or too few words after it.
pub(super) fn parse(text: &str) -> anyhow::Result<Option<Line>> {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Ok(None);
    }
    if let Some(rest) = text.trim_start().strip_prefix("//") {
        return Ok(Some(Line::Message(format!("/{rest}"))));
    }
    let (word, rest) = trimmed
        .split_once(char::is_whitespace)
        .unwrap_or((trimmed, ""));
    let Some(name) = word.strip_prefix('/').filter(|name| is_name(name)) else {
        return Ok(Some(Line::Message(text.to_owned())));
    };
    command(name, rest.trim()).map(|command| Some(Line::Command(command)))
}

/// Whether this can be the name of a command: `/usr/bin` and `/1` begin messages.
fn is_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_alphabetic() || matches!(c, '-' | '_' | '?');
    !name.is_empty() && name.chars().all(is_letter)
}

fn command(name: &str, rest: &str) -> anyhow::Result<Command> {
    let alone = |command: Command| match rest {
        "" => Ok(command),
        _ => usage(format!(
            "/{name} takes nothing after it, but '{rest}' is there"
        )),
    };
    let file = |make: fn(PathBuf) -> Command, example: &str| match unquoted(rest) {
        "" => usage(format!(
            "/{name} needs the name of a file: /{name} {example}"
        )),
        path => Ok(make(in_home(path, std::env::home_dir()))),
    };
    match name {
        "help" | "?" => alone(Command::Help),
        "exit" | "quit" | "bye" => alone(Command::Exit),
        "clear" => alone(Command::Clear),
        "regen" => alone(Command::Regenerate),
        "undo" => alone(Command::Undo),
        "stats" => alone(Command::Statistics),
        "save" => file(Command::Save, "chat.json"),
        "load" => file(Command::Load, "chat.json"),
        "image" => file(Command::Image, "cat.jpg"),
        "audio" => file(Command::Audio, "talk.wav"),
        "system" => Ok(Command::System(match (rest, unquoted(rest)) {
            ("", _) => SystemChange::Show,
            (_, "") => SystemChange::Remove,
            (_, text) => SystemChange::Set(text.to_owned()),
        })),
        "set" => set(rest),
        "show" => show(rest),
        _ => {
            let similar = most_similar(name, &NAMES);
            let similar = similar.map_or_else(String::new, |name| format!("similar: /{name}; "));
            usage(format!(
                "unknown command '/{name}': {similar}/help lists the commands, and '//{name}' sends it \
                 as a message"
            ))
        }
    }
}

fn set(rest: &str) -> anyhow::Result<Command> {
    let words: Vec<&str> = rest.split_whitespace().collect();
    match words[..] {
        [] => Ok(Command::Show(Topic::Settings)),
        [name, value] => Ok(Command::Set(name.to_owned(), value.to_owned())),
        _ => usage("/set needs a name and a value: /set temp 0.5"),
    }
}

fn show(rest: &str) -> anyhow::Result<Command> {
    let topic = match rest {
        "" | "settings" => Topic::Settings,
        "messages" => Topic::Messages,
        "prompt" => Topic::Prompt,
        "template" => Topic::Template,
        _ => {
            return usage(format!(
                "/show does not know '{rest}': it shows settings, messages, prompt or template"
            ));
        }
    };
    Ok(Command::Show(topic))
}

/// The path, in which `~/` at the beginning is the home directory, as in a shell.
fn in_home(path: &str, home: Option<PathBuf>) -> PathBuf {
    match (path.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => PathBuf::from(path),
    }
}

/// The text between quotation marks, where they are around it.
fn unquoted(text: &str) -> &str {
    let inner = text.strip_prefix('"').and_then(|t| t.strip_suffix('"'));
    inner.unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Line {
        parse(text).unwrap().unwrap()
    }

    fn message(text: &str) -> Line {
        Line::Message(text.to_owned())
    }

    #[test]
    fn commands_have_names_of_letters() {
        assert_eq!(parsed(" /clear "), Line::Command(Command::Clear));
        assert_eq!(parsed("/quit"), Line::Command(Command::Exit));
        for text in ["/usr/bin?", "/", "/1 is a number", "  Hello ", "a /clear"] {
            assert_eq!(parsed(text), message(text));
        }
        assert_eq!(parsed("//clear now"), message("/clear now"));
        assert_eq!(parse(" \n").unwrap(), None);
    }

    #[test]
    fn what_follows_a_command() {
        let save = Command::Save(PathBuf::from("a b.json"));
        assert_eq!(parsed("/save \"a b.json\""), Line::Command(save.clone()));
        assert_eq!(parsed("/save  a b.json"), Line::Command(save));
        let image = Command::Image(PathBuf::from("a b.png"));
        assert_eq!(parsed("/image a b.png"), Line::Command(image));
        let audio = Command::Audio(PathBuf::from("a b.wav"));
        assert_eq!(parsed("/audio a b.wav"), Line::Command(audio));
        let home = || Some(PathBuf::from("/home/me"));
        assert_eq!(
            in_home("~/a.json", home()),
            PathBuf::from("/home/me/a.json")
        );
        assert_eq!(in_home("~a", home()), PathBuf::from("~a"));
        assert_eq!(in_home("~/a", None), PathBuf::from("~/a"));
        let system = |change| Line::Command(Command::System(change));
        assert_eq!(parsed("/system"), system(SystemChange::Show));
        assert_eq!(parsed("/system \"\""), system(SystemChange::Remove));
        let kind = SystemChange::Set("Be kind.".to_owned());
        assert_eq!(parsed("/system Be kind."), system(kind));
        let set = Command::Set("temp".to_owned(), "0".to_owned());
        assert_eq!(parsed("/set temp 0"), Line::Command(set));
        let shown = Line::Command(Command::Show(Topic::Settings));
        assert_eq!(parsed("/set"), shown);
        assert_eq!(parsed("/show"), shown);
    }

    #[test]
    fn mistakes_are_refused_with_advice() {
        for (text, wanted) in [
            ("/frobnicate", "unknown command '/frobnicate': /help lists"),
            (
                "/helpp",
                "unknown command '/helpp': similar: /help; /help lists",
            ),
            ("/exit now", "/exit takes nothing after it, but 'now'"),
            ("/save", "/save needs the name of a file"),
            ("/load \"\"", "/load needs the name of a file"),
            ("/image", "/image needs the name of a file: /image cat.jpg"),
            ("/audio", "/audio needs the name of a file: /audio talk.wav"),
            ("/set temp", "/set needs a name and a value"),
            ("/show me", "/show does not know 'me'"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.contains(wanted), "{text}: {message}");
        }
    }

    #[test]
    fn the_help_names_every_command() {
        for name in HELP.split_whitespace().filter(|word| word.starts_with('/')) {
            let Some(name) = name.strip_prefix('/').filter(|name| is_name(name)) else {
                continue;
            };
            let error = command(name, "x y z").err().map(|error| error.to_string());
            let is_unknown = error.is_some_and(|error| error.contains("unknown command"));
            assert!(!is_unknown, "/{name}");
        }
    }
}
