//! `cellar chat` with a person at a terminal: keys, paste, width, history.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support;

use std::process::Command;

use crate::support::with_template;
use rexpect::reader::Options;
use rexpect::session::{PtySession, spawn_with_options};
use rustix::termios::{Winsize, tcsetwinsize};
use tempfile::TempDir;

const TEMPLATE: &str =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

/// An empty line, ready to be edited.
const PROMPT: &str = "\r> \r";

/// Builds in debug mode on a busy machine are slow.
const TIMEOUT: Option<u64> = Some(120_000);

/// A conversation in a pseudo-terminal of 80 columns.
struct Terminal {
    session: PtySession,
    model: String,
    dir: TempDir,
}

impl Terminal {
    fn open(flags: &[&str]) -> Self {
        Self::open_in(tempfile::tempdir().unwrap(), flags)
    }

    fn open_in(dir: TempDir, flags: &[&str]) -> Self {
        let model = with_template(&dir, TEMPLATE);
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
        command
            .args(["chat", "-m", &model, "--temp", "0"])
            .args(flags);
        command.env("TERM", "xterm").env_remove("CELLAR_LOG");
        command.env("CELLAR_HISTORY", dir.path().join("history"));
        let options = Options::new()
            .timeout_ms(TIMEOUT)
            .strip_ansi_escape_codes(true);
        let session = spawn_with_options(command, options).unwrap();
        let mut terminal = Self {
            session,
            model,
            dir,
        };
        terminal.resize(80);
        terminal.wait("/help lists the commands");
        terminal.until_prompt();
        terminal
    }

    fn resize(&self, n_columns: u16) {
        let size = Winsize {
            ws_row: 24,
            ws_col: n_columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = self.session.process().get_file_handle().unwrap();
        tcsetwinsize(pty, size).unwrap();
    }

    fn keys(&mut self, keys: &str) {
        self.session.send(keys).unwrap();
        self.session.flush().unwrap();
    }

    /// What comes before `text`, with the line ends of pipes.
    #[track_caller]
    fn wait(&mut self, text: &str) -> String {
        let before = self.session.exp_string(text);
        let before = before.unwrap_or_else(|error| panic!("no '{text}': {error}"));
        // A line that is drawn again, such as a progress bar, begins with a carriage return.
        let lines = before
            .split("\r\n")
            .map(|line| line.rsplit('\r').next().unwrap());
        lines.collect::<Vec<_>>().join("\n")
    }

    /// What is printed before the next prompt.
    fn until_prompt(&mut self) -> String {
        let text = self.wait(PROMPT);
        text.strip_suffix('\n').unwrap_or(&text).to_owned()
    }

    /// What is printed between a line that is typed and the next prompt.
    fn ask(&mut self, line: &str) -> String {
        self.keys(&format!("{line}\r"));
        self.wait("\r\n");
        self.until_prompt()
    }

    /// The answers of the same conversation through a pipe.
    fn piped(&self, flags: &[&str], input: &str) -> String {
        let mut command = support::cellar();
        command.args(["chat", "-m", &self.model, "--temp", "0"]);
        let done = command.args(flags).write_stdin(input).assert().success();
        let text = String::from_utf8(done.get_output().stdout.clone()).unwrap();
        text.trim_end().to_owned()
    }

    /// Ends the program with Ctrl-D.
    fn close(mut self) -> TempDir {
        self.keys("\x04");
        self.session.exp_eof().unwrap();
        self.dir
    }
}

#[test]
fn ctrl_c_clears_a_line_and_twice_on_an_empty_one_leaves() {
    let mut terminal = Terminal::open(&["-n", "8"]);
    terminal.keys("half a li");
    terminal.wait("half a li");
    terminal.keys("\x03");
    terminal.until_prompt();
    let answer = terminal.ask("Hello");
    assert_eq!(answer, terminal.piped(&["-n", "8"], "Hello\n"));
    // A line that was continued goes as a whole.
    terminal.keys("first\\\r");
    terminal.wait(". ");
    terminal.keys("second\x03");
    terminal.until_prompt();
    terminal.keys("\x03");
    terminal.wait("(Ctrl-C again ends the program)");
    terminal.until_prompt();
    // Something else came between the two.
    terminal.ask("Hello");
    terminal.keys("\x03");
    terminal.wait("(Ctrl-C again ends the program)");
    terminal.until_prompt();
    terminal.keys("\x03");
    terminal.session.exp_eof().unwrap();
    let status = terminal.session.process_mut().wait().unwrap();
    assert!(format!("{status:?}").contains(", 0)"), "{status:?}");
}

#[test]
fn ctrl_c_ends_an_answer_and_the_conversation_goes_on() {
    let mut terminal = Terminal::open(&["-c", "100000"]);
    let begun = terminal.piped(&["-n", "8"], "Hello\n");
    terminal.keys("Hello\r");
    terminal.wait(&begun);
    terminal.keys("\x03");
    terminal.until_prompt();
    let shown = terminal.ask("/show messages");
    assert!(shown.starts_with(&format!("> Hello\n{begun}")), "{shown}");
    assert_eq!(terminal.ask("/undo"), "(forgotten: Hello)");
    terminal.close();
}

#[test]
fn pasted_lines_are_one_message() {
    let mut terminal = Terminal::open(&["-n", "8"]);
    terminal.keys("\x1b[200~Who was\rthere?\x1b[201~");
    terminal.wait("there?");
    let answer = terminal.ask("");
    assert_eq!(answer, terminal.piped(&["-n", "8"], "Who was\\\nthere?\n"));
    terminal.close();
}

#[test]
fn words_wrap_at_the_width_of_the_terminal() {
    let mut terminal = Terminal::open(&["-n", "60"]);
    let longest = |text: &str| text.lines().map(str::len).max().unwrap();
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let plain = terminal.piped(&["-n", "60"], "Hello\n");
    for width in [20, 50] {
        terminal.resize(width);
        let answer = terminal.ask("Hello");
        let width = usize::from(width);
        assert!((width - 12..=width).contains(&longest(&answer)), "{answer}");
        assert_eq!(words(&answer), words(&plain), "only spaces change");
        terminal.ask("/undo");
    }
    terminal.close();
}

#[test]
fn a_resize_during_an_answer_changes_the_width_of_what_follows() {
    let flags = ["-n", "400"];
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let mut terminal = Terminal::open(&flags);
    let plain = words(&terminal.piped(&flags, "Hello\n"));
    for (before, after) in [(60, 25), (25, 60)] {
        terminal.resize(before);
        terminal.keys("Hello\r");
        terminal.wait("\r\n");
        // Two lines have come, and many are to come.
        let mut first = terminal.wait("\r\n");
        first = first + "\n" + &terminal.wait("\r\n");
        terminal.resize(after);
        let rest = terminal.until_prompt();
        assert_eq!(
            words(&(first.clone() + "\n" + &rest)),
            plain,
            "nothing is lost"
        );
        let width = |lines: &[&str]| lines.iter().map(|line| line.len()).max().unwrap();
        let begun: Vec<&str> = first.lines().collect();
        let (before, after) = (usize::from(before), usize::from(after));
        assert!((before - 12..=before).contains(&width(&begun)), "{first}");
        // Some lines may have been on their way.
        let rest: Vec<&str> = rest.lines().collect();
        let late = &rest[rest.len() / 2..];
        assert!(
            (after - 12..=after).contains(&width(late)),
            "{after}: {rest:#?}"
        );
        terminal.ask("/undo");
    }
    terminal.close();
}

#[test]
fn keys_during_an_answer_wait_for_the_next_prompt() {
    let flags = ["-n", "400"];
    let mut terminal = Terminal::open(&flags);
    let plain = terminal.piped(&flags, "Hello\n");
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let first = words(&plain)[..2].join(" ");
    terminal.keys("Hello\r");
    terminal.wait("\r\n");
    let mut answer = terminal.wait(&first);
    terminal.keys("typed ahead");
    answer += &first;
    answer += &terminal.until_prompt();
    assert_eq!(words(&answer), words(&plain));
    // It is there now, to be edited.
    terminal.wait("typed ahead");
    terminal.keys("\x03");
    terminal.until_prompt();
    terminal.close();
}

#[test]
fn a_full_context_is_told_once() {
    let mut terminal = Terminal::open(&["-n", "8", "-c", "64"]);
    let mut n_told = 0;
    for _ in 0..6 {
        let answer = terminal.ask("What happened then?");
        assert!(!answer.trim().is_empty());
        n_told += answer.matches("no longer sees the oldest").count();
    }
    assert_eq!(n_told, 1);
    terminal.close();
}

/// The line on the terminal has half of the answer when the model reads again: nothing is drawn
/// over it.
#[test]
fn an_answer_stays_whole_when_the_context_fills_in_its_middle() {
    let flags = ["-n", "60", "-c", "128"];
    let mut terminal = Terminal::open(&flags);
    let first = terminal.piped(&flags, "Hello\n");
    let both = terminal.piped(&flags, "Hello\nAnd then?\n");
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(words(&terminal.ask("Hello")), words(&first));
    let told = terminal.ask("And then?");
    let (answer, note) = told
        .split_once("(the context of 128 tokens is full")
        .unwrap();
    assert!(note.contains("no longer sees"), "{note}");
    assert_eq!(words(answer), words(both.strip_prefix(&first).unwrap()));
    terminal.close();
}

#[test]
fn lines_between_quotes_are_one_message() {
    let mut terminal = Terminal::open(&["-n", "8"]);
    terminal.keys("\"\"\"\r");
    terminal.wait("\r. ");
    terminal.keys("First line.\r");
    terminal.wait("\r. ");
    let answer = terminal.ask("Second one.\"\"\"");
    let shown = terminal.ask("/show messages");
    let message = "> First line.\nSecond one.\n";
    assert_eq!(shown, format!("{message}{}", answer.trim_start()));
    // What Ctrl-C interrupts is gone, and the next line begins anew.
    terminal.keys("\"\"\"Half\r");
    terminal.wait("\r. ");
    terminal.keys("\x03");
    terminal.until_prompt();
    assert_eq!(terminal.ask("/show messages"), shown);
    terminal.close();
}

#[test]
fn what_is_set_is_confirmed() {
    let mut terminal = Terminal::open(&["-n", "8"]);
    for (line, said) in [
        ("/set temp 0.5", "(temp is now 0.5)"),
        ("/system Be kind.", "(the system message is now: Be kind.)"),
        ("/system", "Be kind."),
        ("/system \"\"", "(there is no system message now)"),
        ("/system", "(there is no system message)"),
    ] {
        assert_eq!(terminal.ask(line), said, "{line}");
    }
    let refused = terminal.ask("/set temp hot");
    assert!(refused.starts_with("error: "), "{refused}");
    assert!(terminal.ask("/set").contains("0.5"));
    terminal.close();
}

#[test]
fn conversations_are_saved_and_continued() {
    let mut terminal = Terminal::open(&["-n", "8"]);
    let file = terminal.dir.path().join("chat.json");
    let first = terminal.ask("Hello");
    let saved = terminal.ask(&format!("/save {}", file.display()));
    assert!(saved.starts_with("(saved: 2 messages"), "{saved}");
    let second = terminal.ask("Who?");
    let loaded = terminal.ask(&format!("/load {}", file.display()));
    assert!(loaded.starts_with("(loaded: 2 messages"), "{loaded}");
    let shown = terminal.ask("/show messages");
    assert_eq!(shown, format!("> Hello\n{}", first.trim_start()));
    assert_eq!(terminal.ask("Who?"), second);
    terminal.close();
}

#[test]
fn an_unknown_command_is_an_error_and_not_the_end() {
    let mut terminal = Terminal::open(&["-n", "8"]);
    let error = terminal.ask("/frobnicate");
    assert!(
        error.starts_with("error: unknown command '/frobnicate'"),
        "{error}"
    );
    let help = terminal.ask("/help");
    assert!(help.contains("/regen"), "{help}");
    terminal.close();
}

#[test]
fn lines_are_remembered_across_runs() {
    let mut terminal = Terminal::open(&["-n", "8"]);
    let answer = terminal.ask("Hello");
    let dir = terminal.close();
    let mut terminal = Terminal::open_in(dir, &["-n", "8"]);
    terminal.keys("\x1b[A");
    terminal.wait("Hello");
    assert_eq!(terminal.ask(""), answer);
    let dir = terminal.close();
    // Without a history there is nothing above.
    let mut terminal = Terminal::open_in(dir, &["-n", "8", "--no-history"]);
    terminal.keys("\x1b[A");
    assert_ne!(terminal.ask("Who?"), answer);
    terminal.close();
}

#[cfg(feature = "grammar")]
#[test]
fn an_incomplete_answer_is_an_error_and_no_part_of_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let grammar = dir.path().join("answer.lark");
    std::fs::write(&grammar, r#"start: "one long answer of many words""#).unwrap();
    let flags = ["--grammar", grammar.to_str().unwrap()];
    let mut terminal = Terminal::open_in(dir, &flags);
    // As wide as it is, it is one line: a constrained text is not wrapped.
    terminal.resize(20);
    assert_eq!(terminal.ask("Hello"), "one long answer of many words");
    terminal.ask("/set predict 2");
    let cut = terminal.ask("And?");
    let (text, error) = cut.split_once('\n').unwrap();
    assert!("one long answer of many words".starts_with(text), "{cut}");
    assert!(error.starts_with("error: the text is incomplete"), "{cut}");
    assert_eq!(terminal.ask("/undo"), "(forgotten: Hello)");
    terminal.close();
}
