//! `ptx/kernels.ptx.lzma` was made from the kernels as they are. `ptx/make` makes it again.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use lzma_rust2::LzmaReader;
use sha2::{Digest, Sha256};

/// The files of a folder with this extension, in the order in which `ptx/make` takes them.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    paths.sort();
    paths
}

#[test]
fn the_ptx_is_that_of_the_kernels() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kernels = crate_folder.join("../kv-gpu/kernels");
    let mut sources = Sha256::new();
    sources.update(fs::read(kernels.join("dialect/cuda.h")).unwrap());
    for path in files(&kernels.join("blocks"), "h") {
        sources.update(fs::read(path).unwrap());
    }
    let kernel_files = files(&kernels, "k");
    assert!(!kernel_files.is_empty());
    for path in &kernel_files {
        sources.update(fs::read(path).unwrap());
    }
    let hash: String = sources
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let packed = fs::read(crate_folder.join("ptx/kernels.ptx.lzma")).unwrap();
    let mut ptx = String::new();
    let mut reader = LzmaReader::new_mem_limit(&packed[..], u32::MAX, None).unwrap();
    reader.read_to_string(&mut ptx).unwrap();
    let first = ptx.lines().next().unwrap();
    assert!(
        first.contains(&format!("sources {hash},")),
        "run crates/kv-cuda/ptx/make: the kernels have changed since '{first}'"
    );

    let name = |rest: &str| rest.split([',', '(']).next().unwrap().trim().to_owned();
    let mut written: Vec<String> = Vec::new();
    for path in &kernel_files {
        let text = fs::read_to_string(path).unwrap();
        let lines = text.lines();
        written.extend(lines.filter_map(|line| line.strip_prefix("KERNEL(").map(name)));
    }
    let mut compiled: Vec<String> = ptx
        .lines()
        .filter_map(|line| line.split_once(".entry ").map(|(_, rest)| name(rest)))
        .collect();
    // Of those that macros paste together, the simulator knows the names.
    written.retain(|name| !name.contains("##"));
    written.sort();
    compiled.sort();
    assert!(
        written.iter().all(|name| compiled.contains(name)),
        "{written:?}, {compiled:?}"
    );
    assert!(
        compiled.windows(2).all(|pair| pair[0] != pair[1]),
        "{compiled:?}"
    );
}
