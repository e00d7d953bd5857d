//! The kernels as data: their table is what the simulator has compiled, their sources are the
//! files.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use kv_block::{BlockFormat, quantize};
use kv_gpu::sim::{Dialect, Sim};
use kv_gpu::{KernelSource, has_kernels, kernel_infos, metal_source, opencl_source};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// The files of a folder, in the order in which compilers take them.
fn files_of(folder: &Path, extension: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let files: BTreeSet<String> = names.filter(|name| name.ends_with(extension)).collect();
    files.into_iter().collect()
}

#[test]
fn the_table_is_that_of_the_kernels() {
    let compiled = Sim::kernel_table(Dialect::Cpp).unwrap().join("\n") + "\n";
    let path = folder().join("TABLE");
    if std::env::var_os("UPDATE_TABLE").is_some() {
        // What is compiled in is the table before.
        return fs::write(&path, &compiled).unwrap();
    }
    let written = fs::read_to_string(path).unwrap();
    assert!(
        written == compiled,
        "UPDATE_TABLE=1 writes kernels/TABLE again:\n{compiled}"
    );
    // Numbers and kinds of Metal's arguments are those that C++ has compiled.
    let metal = Sim::kernel_table(Dialect::Metal).unwrap().join("\n") + "\n";
    assert_eq!(metal, compiled);
    assert_eq!(kernel_infos().len(), compiled.lines().count());
    for info in kernel_infos() {
        assert!(info.n_threads.is_multiple_of(32), "{info:?}");
        // What Metal takes: 31 buffers, of which the settings are one, of up to 4 KiB.
        assert!(
            info.n_buffers < 31 && info.settings_bytes <= 4096,
            "{info:?}"
        );
        assert!(metal_source(info.file).is_some(), "{info:?}");
    }
}

/// The grids as a table that kernels share.
fn table_of_grids(packed: &[u8]) -> String {
    let (entries, _) = packed.as_chunks();
    let mut text = format!(
        "// The entries of all grids, as grids.bin of kv-block has them: two or three bits a value. Written by a test, with\n\
         // UPDATE_TABLE=1.\n\
         #ifndef CELLAR_GRID_TABLE\n\
         #define CELLAR_GRID_TABLE\n\
         TABLE(uint16_t, grid_table, {}) = {{\n",
        entries.len()
    );
    for line in entries.chunks(20) {
        let numbers = line.iter().map(|&bytes| u16::from_le_bytes(bytes));
        let numbers: Vec<String> = numbers.map(|number| format!("{number},")).collect();
        writeln!(text, "  {}", numbers.join(" ")).unwrap();
    }
    text + "};\n#endif\n"
}

#[test]
fn kernels_have_the_grids_of_the_formats() {
    let packed = fs::read(folder().join("../../kv-block/src/grids.bin")).unwrap();
    let (path, expected) = (
        folder().join("blocks/grid_table.h"),
        table_of_grids(&packed),
    );
    if std::env::var_os("UPDATE_TABLE").is_some() {
        return fs::write(path, expected).unwrap();
    }
    let written = fs::read_to_string(path).unwrap();
    assert!(
        written == expected,
        "UPDATE_TABLE=1 writes kernels/blocks/grid_table.h again"
    );
}

#[test]
fn the_sources_are_the_files() {
    let blocks = files_of(&folder().join("blocks"), ".h");
    let kernels = files_of(&folder(), ".k");
    assert!(!blocks.is_empty() && !kernels.is_empty());
    for kernel in kernels {
        let source = metal_source(kernel.strip_suffix(".k").unwrap()).unwrap();
        let mut files = vec!["dialect/metal.h".to_owned()];
        files.extend(blocks.iter().cloned());
        files.push(kernel.clone());
        assert_eq!(source.files(), files);
        let text = fs::read_to_string(folder().join(&kernel)).unwrap();
        assert!(source.text.ends_with(&text), "{kernel}");
    }
    assert_eq!(metal_source("none"), None);
}

/// Drivers take seconds for some kernels: one is compiled without the others of its file.
#[test]
fn a_source_for_opencl_has_one_kernel() {
    for info in kernel_infos() {
        let source = opencl_source(*info).unwrap();
        let file = format!("{}.k", info.file);
        let is_of_file = |line: usize| source.place(line).unwrap().0 == file;
        let lines = (1..)
            .zip(source.text.lines())
            .filter(|&(i, _)| is_of_file(i));
        let begins = |line: &str| {
            let word = line.split('(').next().unwrap();
            let is_word = |b: u8| b.is_ascii_uppercase() || b == b'_';
            line.contains('(') && !word.is_empty() && word.bytes().all(is_word)
        };
        let kernels: Vec<&str> = lines
            .map(|(_, line)| line)
            .filter(|line| begins(line))
            .collect();
        let is_it = |word: &str| word == info.name;
        assert!(
            kernels.len() == 1 && kernels[0].split(['(', ',', ' ', ')']).any(is_it),
            "{}: {kernels:?}",
            info.name
        );
    }
}

/// The place of every line of a file in a source.
fn check_places(source: &KernelSource, file: &str, text: &str) {
    let n = source.text.lines().count();
    let places: Vec<usize> = (1..=n)
        .filter(|&line| source.place(line).unwrap().0 == file)
        .collect();
    assert_eq!(places.len(), text.lines().count(), "{file}");
    for (i, (at, line)) in places.into_iter().zip(text.lines()).enumerate() {
        assert_eq!(source.text.lines().nth(at - 1), Some(line));
        assert_eq!(source.place(at).unwrap().1, i + 1);
    }
}

#[test]
fn messages_have_the_places_of_the_files() {
    let source = metal_source("rope").unwrap();
    let text = fs::read_to_string(folder().join("rope.k")).unwrap();
    check_places(&source, "rope.k", &text);
    let seen = fs::read_to_string(folder().join("blocks/seen.h")).unwrap();
    check_places(&source, "seen.h", &seen);
    let n = source.text.lines().count();
    assert_eq!(source.place(n + 1), None);
    assert_eq!(source.place(0), None);
    let said = format!("program_source:{n}:7: error: no\n  y = x;\nprogram_source:x");
    let explained = format!(
        "rope.k:{}:7: error: no\n  y = x;\nprogram_source:x\n",
        text.lines().count()
    );
    assert_eq!(source.explain("program_source", &said), explained);
}

/// The formats of weights: bits of a value, whether GPUs have kernels, and whether values can be
/// encoded.
fn table_of_formats() -> String {
    let mut text = "| format | bits per value | on a GPU | can be written |\n".to_owned();
    text += "| --- | --- | --- | --- |\n";
    let word = |is_so: bool| if is_so { "yes" } else { "no" };
    for format in BlockFormat::ALL {
        let bits = format.block_bytes() as f64 * 8.0 / format.block_len() as f64;
        let gpu = word(has_kernels(format));
        let written = word(quantize(format, &vec![0.0; format.block_len()]).is_ok());
        writeln!(text, "| {format} | {bits} | {gpu} | {written} |").unwrap();
    }
    text
}

#[test]
fn the_documentation_has_the_table_of_formats() {
    const BEGIN: &str = "<!-- formats: made by a test, with UPDATE_DOCS=1 -->\n";
    const END: &str = "<!-- end of formats -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/backends.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let expected = format!("{before}{BEGIN}{}{END}{after}", table_of_formats());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, expected).unwrap();
    } else {
        assert_eq!(page, expected, "run this test with UPDATE_DOCS=1");
    }
}
