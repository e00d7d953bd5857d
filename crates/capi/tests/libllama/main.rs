//! The shared library as a linker sees it: its name and the functions that it exports.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::PathBuf;
use std::process::Command;

/// The library that was built with this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let name = format!(
        "{}llama{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    );
    test.parent().unwrap().join(name)
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(arguments)
        .arg(library())
        .output();
    let Ok(output) = output else {
        println!("SKIPPED: there is no '{program}' on this machine");
        return None;
    };
    assert!(output.status.success(), "{program}: {output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn every_function_of_the_header_is_exported() {
    let Some(symbols) = output("nm", &["-D", "--defined-only"]) else {
        return;
    };
    let exported: Vec<&str> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    let names: Vec<&str> = include_str!("../names.txt").lines().collect();
    assert_eq!(names.len(), 255);
    let missing: Vec<_> = names
        .iter()
        .filter(|name| !exported.contains(name))
        .collect();
    assert!(missing.is_empty(), "not exported: {missing:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn programs_find_it_by_the_name_that_they_were_linked_with() {
    let Some(dynamic) = output("readelf", &["-d"]) else {
        return;
    };
    let name = dynamic.lines().find(|line| line.contains("SONAME"));
    assert!(name.unwrap().contains("[libllama.so.0]"), "{name:?}");
}
