//! The floors of the crate: which modules a module may import.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest.
const FLOORS: [&str; 4] = ["data", "parts", "decide", "scheduler"];

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| {
            if path.is_dir() {
                files(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

/// A part can be changed, and a decision read, without what is built upon it.
#[test]
fn no_module_imports_from_a_higher_floor() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (floor, folder) in FLOORS.iter().enumerate() {
        let files = files(&src.join(folder));
        assert!(files.len() > 2, "{folder}");
        for file in files {
            let code = fs::read_to_string(&file).unwrap();
            let lines = code
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            for line in lines {
                let above = FLOORS[floor + 1..].iter();
                let mut above = above.map(|above| format!("crate::{above}::"));
                let is_above = above.any(|path| line.contains(&path));
                assert!(!is_above, "{}: {line}", file.display());
            }
        }
    }
}

/// What two parts have to know of each other is data.
#[test]
fn no_part_imports_another() {
    let parts = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/parts");
    for file in files(&parts) {
        let code = fs::read_to_string(&file).unwrap();
        let code = code.split("#[cfg(test)]").next().unwrap();
        let mut lines = code.lines();
        let other = lines.find(|line| line.contains("crate::parts::"));
        assert_eq!(other, None, "{}", file.display());
    }
}
