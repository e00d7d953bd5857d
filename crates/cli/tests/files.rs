//! Files that the program reads and writes: links, modes, devices, pipes, full disks, and `-`.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::{cellar, edited, failure, model, output};
use kv_block::BlockFormat;
use kv_graph::weights::Weight;
use model_tests::fixture;

const MODE: u32 = 0o640;

/// The commands that write a file, with this one as their output.
fn writers(out: &str) -> Vec<Vec<String>> {
    let model = model().display().to_string();
    let requests = fixture("batch/requests.jsonl").display().to_string();
    let commands: [&[&str]; 4] = [
        &["run", "Once upon", "-n", "0", "--save-state", out],
        &["logits", "--tokens", "1,2,3", "--out", out],
        &["convert", &model, out, "--type", "q4_0"],
        &["batch", "-f", &requests, "--temp", "0", "-o", out],
    ];
    let owned = |args: &[&str]| args.iter().map(|&arg| arg.to_owned()).collect();
    commands.into_iter().map(owned).collect()
}

/// What each of [`writers`] writes.
fn wanted() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let run = |args: Vec<String>| {
        cellar().args(args).assert().success();
        let written = fs::read(&out).unwrap();
        // A model is not replaced by what the next command writes.
        fs::remove_file(&out).unwrap();
        written
    };
    let wanted = writers(out.to_str().unwrap()).into_iter().map(run);
    wanted.collect()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn links_are_followed_and_modes_stay() {
    let dir = tempfile::tempdir().unwrap();
    let [file, link] = ["file", "link"].map(|name| dir.path().join(name));
    symlink("file", &link).unwrap();
    for (args, wanted) in writers(link.to_str().unwrap()).into_iter().zip(wanted()) {
        // The link may lead to a file, or to a place for one.
        let _ = fs::remove_file(&file);
        cellar().args(&args).assert().success();
        assert!(fs::read(&file).unwrap() == wanted, "{args:?}");
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(MODE)).unwrap();
        cellar().args(&args).assert().success();
        assert!(fs::read(&file).unwrap() == wanted, "{args:?}");
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, MODE, "{args:?}: {mode:o}");
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("file"));
        assert_eq!(names(dir.path()), ["file", "link"], "{args:?}");
    }
}

#[test]
fn devices_stay_devices() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("null");
    symlink("/dev/null", &link).unwrap();
    for args in writers(link.to_str().unwrap()) {
        cellar().args(&args).assert().success();
        let target = fs::metadata(&link).unwrap().file_type();
        assert!(target.is_char_device(), "{args:?}");
        assert_eq!(names(dir.path()), ["null"], "{args:?}");
    }
}

#[test]
fn pipes_are_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    for (args, wanted) in writers(pipe.to_str().unwrap()).into_iter().zip(wanted()) {
        let from = pipe.clone();
        let reader = std::thread::spawn(move || fs::read(from).unwrap());
        cellar().args(&args).assert().success();
        assert!(reader.join().unwrap() == wanted, "{args:?}");
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    }
}

#[test]
fn a_full_disk_is_an_error_that_says_so() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        return;
    }
    let advice = "No space left on device (os error 28); free some space, or choose another place";
    for args in writers("/dev/full") {
        let done = cellar().args(&args).assert().failure().code(1);
        let stderr = String::from_utf8(done.get_output().stderr.clone()).unwrap();
        let start = "error: cannot write '/dev/full': ";
        let last = stderr.lines().last().unwrap();
        assert!(last.starts_with(start) && last.ends_with(advice), "{last}");
        assert!(fs::metadata(full).unwrap().file_type().is_char_device());
    }
    for args in [&["run", "-n", "2"][..], &["graph"], &["tokenize", "Hi"]] {
        let done = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
            .args(args)
            .stdin(Stdio::null())
            .stdout(fs::File::create(full).unwrap())
            .output()
            .unwrap();
        let stderr = String::from_utf8(done.stderr).unwrap();
        let wanted = format!("error: cannot write to stdout: {advice}\n");
        assert_eq!((done.status.code(), stderr), (Some(1), wanted), "{args:?}");
    }
}

/// Under each of its names, stdout gets the file and nothing else.
#[test]
fn a_dash_is_standard_output() {
    for name in ["-", "/dev/stdout", "/proc/self/fd/1"] {
        for (args, wanted) in writers(name).into_iter().zip(wanted()) {
            let done = cellar().args(&args).assert().success();
            assert!(done.get_output().stdout == wanted, "{args:?}");
        }
    }
    assert!(!Path::new("-").exists());
    let args = ["run", "-p", "Hi", "--json", "--save-state", "-"];
    let (code, message) = failure(&args);
    assert_eq!(code, 2);
    assert!(message.contains("both write to stdout"), "{message}");
}

/// A shell's `>>` keeps what is in the file.
#[test]
fn what_stdout_appends_to_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    for (args, wanted) in writers("/dev/stdout").into_iter().zip(wanted()) {
        fs::write(&file, "before").unwrap();
        let done = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
            .args(&args)
            .stdin(Stdio::null())
            .stdout(fs::OpenOptions::new().append(true).open(&file).unwrap())
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        let got = fs::read(&file).unwrap();
        assert!(got == [&b"before"[..], &wanted].concat(), "{args:?}");
    }
}

#[test]
fn a_dash_is_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state").display().to_string();
    let begin = ["run", "Once upon", "-n", "0", "--save-state", &state];
    cellar().args(begin).assert().success();
    let (graph, _) = output(&["graph", "--arch", "llama", "--format", "json"]);
    let model = model().display().to_string();
    let read = |path: &str| fs::read(path).unwrap();
    let out = dir.path().join("out").display().to_string();
    let go_on = ["-n", "4", "--temp", "0"];
    let cases: [(Vec<&str>, usize, Vec<u8>); 8] = [
        (vec!["tokenize", "-f", "NOTES"], 2, b"Hi there".to_vec()),
        (
            vec!["run", "-f", "NOTES", "--temp", "0", "-n", "3"],
            2,
            b"One day".to_vec(),
        ),
        (
            vec!["logits", "--out", &out, "--tokens-file", "IDS"],
            4,
            b"1,2,3".to_vec(),
        ),
        (vec!["state", "inspect", &state, "--json"], 2, read(&state)),
        (
            [&["run", "--load-state", &state][..], &go_on].concat(),
            2,
            read(&state),
        ),
        (
            [&["run", "-p", "Hi", "-m", &model][..], &go_on].concat(),
            4,
            read(&model),
        ),
        (
            vec!["convert", &model, &out, "--type", "f16"],
            1,
            read(&model),
        ),
        (
            vec!["graph", "diff", "GRAPH", "llama"],
            2,
            graph.into_bytes(),
        ),
    ];
    for (mut args, at, stdin) in cases {
        let file = dir.path().join("stdin");
        fs::write(&file, &stdin).unwrap();
        let run = |args: &[&str], stdin: Vec<u8>| {
            let _ = fs::remove_file(&out);
            let done = cellar().args(args).write_stdin(stdin).assert().success();
            let stdout = String::from_utf8(done.get_output().stdout.clone()).unwrap();
            (stdout, fs::read(&out).ok())
        };
        let file = file.to_str().unwrap();
        args[at] = file;
        let (wanted, wrote) = run(&args, Vec::new());
        args[at] = "-";
        let (got, got_file) = run(&args, stdin);
        assert_eq!(
            got.replace("\"-\"", &format!("{file:?}")),
            wanted,
            "{args:?}"
        );
        assert!(got_file == wrote, "{args:?}");
    }
    // A trace has the times of its requests.
    let trace = dir.path().join("trace").display().to_string();
    let requests = fixture("batch/requests.jsonl").display().to_string();
    output(&["batch", "-f", &requests, "--trace", &trace]);
    let replay = |path: &str| {
        let mut replay = cellar();
        replay
            .args(["replay", path, "--json"])
            .write_stdin(read(&trace));
        let done = replay.assert().success();
        String::from_utf8(done.get_output().stdout.clone()).unwrap()
    };
    assert_eq!(
        replay("-").replace("\"-\"", &format!("{trace:?}")),
        replay(&trace)
    );
    let (code, message) = failure(&["run", "-f", "-", "--load-state", "-"]);
    assert_eq!(code, 2, "{message}");
    assert!(message.contains("stdin is given twice"), "{message}");
    let mut twice = cellar();
    twice
        .args(["run", "-m", "-", "-f", "-"])
        .write_stdin(read(&model));
    let done = twice.assert().failure().code(2);
    let stderr = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("stdin is given twice"), "{stderr}");
    let mut no_model = cellar();
    no_model.args(["inspect", "-"]).write_stdin("no model");
    let done = no_model.assert().failure().code(1);
    let stderr = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("not a GGUF file"), "{stderr}");
}

/// A user who may write a file, but create none next to it.
#[test]
fn a_file_in_a_closed_directory_is_written_in_place() {
    // The program is copied to where any user may run it.
    let dir = tempfile::tempdir().unwrap();
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    let out = closed.join("out");
    fs::write(&out, "old").unwrap();
    let program = dir.path().join("cellar");
    fs::copy(assert_cmd::cargo::cargo_bin!("cellar"), &program).unwrap();
    let mode = |path: &Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode));
    mode(dir.path(), 0o755).unwrap();
    mode(&out, 0o666).unwrap();
    mode(&closed, 0o555).unwrap();
    let is_root = fs::metadata(dir.path()).unwrap().uid() == 0;
    let logits = |out: &Path| {
        let mut command = Command::new(&program);
        command
            .args(["logits", "--tokens", "1,2,3", "--out"])
            .arg(out);
        if is_root {
            // Who may write anywhere is somebody else.
            command.uid(65534).gid(65534).current_dir("/");
        }
        // Another test that starts a process at the same time holds the copied program open for a
        // moment.
        loop {
            match command.stdin(Stdio::null()).output() {
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => continue,
                done => return done.unwrap(),
            }
        }
    };
    let done = logits(&out);
    assert!(done.status.success(), "{done:?}");
    assert!(fs::read(&out).unwrap() == wanted()[1]);
    let done = logits(&closed.join("new"));
    let stderr = String::from_utf8(done.stderr).unwrap();
    assert!(stderr.contains("no file may be created in"), "{stderr}");
    mode(&closed, 0o755).unwrap();
}

/// The small model with a matrix that takes about a second to quantize.
fn slow_model(path: &Path) {
    let bytes = vec![0; 2048 * 4096 * 4];
    let weight = Weight::new("z.weight", vec![2048, 4096], BlockFormat::F32, bytes.into());
    let bytes = edited(|writer| {
        writer.add(weight.unwrap()).unwrap();
    });
    fs::write(path, bytes).unwrap();
}

#[test]
fn an_interrupt_removes_the_partial_file() {
    let dir = tempfile::tempdir().unwrap();
    let [from, out] = ["from.gguf", "out.gguf"].map(|name| dir.path().join(name));
    slow_model(&from);
    fs::write(&out, "old").unwrap();
    let interrupted = || {
        let mut child = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
            .args(["convert".as_ref(), from.as_os_str(), out.as_os_str()])
            .args(["--type", "q4_k"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while names(dir.path()).len() < 3 && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let id = child.id().to_string();
        Command::new("kill").args(["-INT", &id]).status().unwrap();
        let code = child.wait().unwrap().code();
        assert_eq!(names(dir.path()), ["from.gguf", "out.gguf"]);
        code == Some(130)
    };
    // A machine that is busy may deliver the signal too late.
    assert!((0..5).any(|_| interrupted()));
    assert_eq!(fs::read_to_string(&out).unwrap(), "old");
}
