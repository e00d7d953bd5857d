//! `ptx/kernels.ptx.lzma` was made from the kernels as they are, and holds what a GPU may not run
//! otherwise than the simulator does. `ptx/make` makes it again.

#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, HashSet};
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

/// The PTX of this crate.
fn shipped() -> String {
    let packed = include_bytes!("../ptx/kernels.ptx.lzma");
    let mut ptx = String::new();
    let mut reader = LzmaReader::new_mem_limit(&packed[..], u32::MAX, None).unwrap();
    reader.read_to_string(&mut ptx).unwrap();
    ptx
}

#[test]
fn the_ptx_is_that_of_the_kernels() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kv-gpu/kernels");
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
    let ptx = shipped();
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

/// Kernels that keep some registers in memory, 8 to 128 bytes of them, for one compute
/// capability or more.
const SPILLS: [&str; 11] = [
    "attend_tiles_256",
    "delta_f32",
    "gemv_floats_8",
    "gemv_iq2_s_8",
    "gemv_nvfp4_8",
    "gemv_q2_0_8",
    "gemv_q6_k_1",
    "scan_bf16",
    "scan_f16",
    "scan_f32",
    "scan_heads_bf16",
];

/// The rows of the counts of machine code.
fn counts() -> impl Iterator<Item = Vec<&'static str>> {
    let lines = include_str!("../ptx/counts.tsv").lines();
    let rows = lines.filter(|line| !line.starts_with('#'));
    rows.map(|line| line.split('\t').collect())
}

/// `scripts/gpu-counts.py` refuses a table in which something has grown by more than 5 %.
#[test]
fn the_counts_are_those_of_the_ptx() {
    let ptx = shipped();
    let hash = ptx.split("sources ").nth(1).unwrap();
    let hash = hash.split(',').next().unwrap();
    let table = include_str!("../ptx/counts.tsv");
    assert!(
        table.lines().next().unwrap().contains(hash),
        "run scripts/gpu-counts.py: the PTX has changed"
    );
    let kernels: HashSet<&str> = counts()
        .filter(|row| row.len() == 5)
        .map(|row| row[0])
        .collect();
    let entries = ptx.lines().filter_map(|line| line.split_once(".entry "));
    let compiled: HashSet<&str> = entries
        .map(|(_, rest)| rest.split('(').next().unwrap())
        .collect();
    assert_eq!(kernels, compiled);
}

/// Machine code is bound by memory on a GPU with 4.3 bytes of bandwidth for each warp instruction
/// that it can issue.
#[test]
fn machine_code_reads_enough_bytes_an_instruction() {
    for (kernel, of, least) in [
        ("gemv_q4_k_1", "loop", 6.0),
        ("gemv_q8_0_1", "loop", 6.0),
        ("gemv_f16_1", "loop", 6.0),
        ("attend_group_128", "f16", 4.3),
        ("attend_group_128", "q8_0", 4.3),
        ("attend_group_128", "q4_0", 2.0),
    ] {
        let row = counts().find(|row| row.len() == 6 && row[..2] == [kernel, of]);
        let bytes: f64 = row.unwrap()[4].parse().unwrap();
        assert!(bytes >= least, "{kernel}, {of}: {bytes}, not {least}");
    }
    // Of a GEMM, matrix instructions are what bounds it.
    let row = counts()
        .find(|row| row.len() == 6 && row[0] == "gemm_f16")
        .unwrap();
    let [all, matrix] = [2, 5].map(|at| row[at].parse::<u32>().unwrap());
    assert!(4 * matrix >= all, "{matrix} of {all}");
    let spills = counts().filter(|row| row.len() == 5 && row[3].split(' ').any(|n| n != "0"));
    let spills: Vec<&str> = spills.map(|row| row[0]).collect();
    assert_eq!(spills, SPILLS);
}

/// A line of PTX without its predicate: the operation, and its registers and names.
fn words(line: &str) -> Vec<&str> {
    let words = line.split([' ', '\t', ',', ';', '[', ']', '+', '{', '}']);
    let words = words.filter(|word| !word.is_empty() && !word.starts_with('@'));
    words.collect()
}

/// The names of the tables of constants, which each file has for itself.
fn tables(ptx: &str) -> HashSet<&str> {
    let lines = ptx.lines().filter(|line| line.starts_with(".global "));
    let names = lines.filter_map(|line| line.split_once('[')?.0.split(' ').next_back());
    names.collect()
}

/// The parameters and tables that the address in each register may come from.
fn origins<'a>(kernel: &'a str, tables: &HashSet<&'a str>) -> HashMap<&'a str, HashSet<&'a str>> {
    let of_tables = tables.iter().map(|&table| (table, HashSet::from([table])));
    let mut origins: HashMap<&str, HashSet<&str>> = of_tables.collect();
    loop {
        let mut n_new = 0;
        for line in kernel.lines() {
            let words = words(line);
            let [operation, to, operands @ ..] = &words[..] else {
                continue;
            };
            let from: HashSet<&str> = match operation.split_once('.') {
                Some(("ld", "param.u64")) => operands.iter().copied().collect(),
                Some(("ld" | "st", _)) | None => continue,
                Some(_) => {
                    let known = operands.iter().filter_map(|operand| origins.get(operand));
                    known.flatten().copied().collect()
                }
            };
            let of_register = origins.entry(to).or_default();
            n_new += from
                .into_iter()
                .filter(|&from| of_register.insert(from))
                .count();
        }
        if n_new == 0 {
            return origins;
        }
    }
}

/// `ld.global.nc` may read stale bytes of memory that its kernel writes; the compiler uses it where
/// it believes that a parameter is only read, even when it has merged its load with one of another
/// parameter.
#[test]
fn no_kernel_reads_what_it_writes_as_if_nothing_wrote_it() {
    let ptx = shipped();
    let (tables, mut n_loads) = (tables(&ptx), 0);
    for kernel in ptx.split(".visible .entry ").skip(1) {
        let name = kernel.split('(').next().unwrap();
        let origins = origins(kernel, &tables);
        let accesses = |which: &'static str| {
            let lines = kernel.lines().map(str::trim_start);
            let lines = lines
                .filter(move |line| words(line).first().is_some_and(|op| op.starts_with(which)));
            lines.map(|line| {
                let address = line.split_once('[').unwrap().1;
                let register = address.split([']', '+']).next().unwrap();
                let parameters = &origins[register];
                assert!(!parameters.is_empty(), "{name}: {line}");
                (line, parameters)
            })
        };
        let written: HashSet<&str> = accesses("st.global")
            .flat_map(|(_, parameters)| parameters.iter().copied())
            .collect();
        assert!(!written.is_empty(), "{name} writes nothing");
        for (line, parameters) in accesses("ld.global.nc") {
            assert!(parameters.is_disjoint(&written), "{name}: {line}");
            n_loads += 1;
        }
    }
    assert!(n_loads > 1000, "{n_loads} loads of what is only read");
}
