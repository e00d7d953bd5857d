//! Names what is built: commit, target and features, which `cellar --version` prints.
//!
//! Invariant: a build without a checkout, or with `CELLAR_COMMIT`, depends on nothing else, so it
//! can be reproduced. Debug builds name no commit, so a commit does not make them compile again.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CELLAR_COMMIT");
    let given = env::var("CELLAR_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty());
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = match given {
        Some(commit) => format!("commit {commit}"),
        None if is_release => {
            checkout().map_or("commit unknown".to_owned(), |c| format!("commit {c}"))
        }
        None => "debug build".to_owned(),
    };
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let target = env::var("TARGET").unwrap_or_default();
    let features = features();
    println!(
        "cargo::rustc-env=CELLAR_VERSION={version} ({commit}, {target}, features: {features})"
    );
}

/// The commit of the checkout that this package is in, where it is in one.
fn checkout() -> Option<String> {
    // The package's sources can also lie within an unrelated repository.
    if !Path::new("../../.git").exists() {
        return None;
    }
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let text = text.trim();
    (output.status.success() && !text.is_empty()).then(|| text.to_owned())
}

/// The features that are switched on, by name.
fn features() -> String {
    let names = env::vars().filter_map(|(name, _)| {
        let feature = name.strip_prefix("CARGO_FEATURE_")?;
        (feature != "DEFAULT").then(|| feature.to_ascii_lowercase().replace('_', "-"))
    });
    let mut names: Vec<String> = names.collect();
    names.sort();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}
