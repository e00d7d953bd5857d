//! Lists the kernels' files for `src/kernels.rs`, and compiles them for the simulator with the
//! feature `sim`.
//!
//! Each kernel file becomes two objects: as C++ in the dialect `cpu.h`, and as Metal, which
//! `sim/metal.h` lets a C++ compiler read.

#![allow(clippy::expect_used)] // a panic is how a build script fails

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=kernels");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let kernels = env::current_dir().expect("a folder").join("kernels");
    let blocks = files(&kernels.join("blocks"), "h");
    let sources = constant("BLOCKS", &blocks) + &constant("KERNELS", &files(&kernels, "k"));
    fs::write(out.join("sources.rs"), sources).expect("OUT_DIR can be written");
    #[cfg(feature = "sim")]
    sim::compile(&out, &kernels);
}

/// The files of a folder with this extension, in the order in which compilers take them.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of kernels");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut files: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    files
}

/// A constant with the names and texts of files.
fn constant(name: &str, files: &[PathBuf]) -> String {
    let mut text = format!("const {name}: &[(&str, &str)] = &[\n");
    for path in files {
        let file = path.file_name().expect("a file").to_string_lossy();
        text += &format!("    (\"{file}\", include_str!({path:?})),\n");
    }
    text + "];\n"
}

#[cfg(feature = "sim")]
mod sim {
    use super::files;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// The kernels of `sim/checks.k`, as lines of the table.
    const CHECKS: &str = "check_copies checks 64\ncheck_fragments checks 64\ncheck_barrier checks 64\ncheck_warp checks 64\n";

    pub(crate) fn compile(out: &Path, kernels: &Path) {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            // For Metal's library, which sim/metal.h stands in for.
            .include(metal_library(out))
            .std("c++17")
            .opt_level(1)
            .debug(false)
            .warnings(false)
            // Products are fused with sums where a kernel says so, as on the device.
            .flag("-ffp-contract=off")
            .flag("-fno-strict-aliasing")
            .link_lib_modifier("+whole-archive")
            .file(kernels.join("sim/fibers.cpp"));
        let table = fs::read_to_string(kernels.join("TABLE")).expect("the table of kernels");
        let checks = kernels.join("sim/checks.k");
        for kernel in files(kernels, "k").into_iter().chain([checks]) {
            build.file(wrapper(out, kernels, &kernel, "dialect/cpu.h"));
            let metal = wrapper(out, kernels, &kernel, "sim/metal.h");
            register(&metal, &kernel, &format!("{table}{CHECKS}"));
            build.file(metal);
        }
        build.compile("cellar_kernels");
    }

    /// A folder with an empty file in place of Metal's library.
    fn metal_library(out: &Path) -> PathBuf {
        let folder = out.join("metal");
        fs::create_dir_all(&folder).expect("OUT_DIR can be written");
        fs::write(folder.join("metal_stdlib"), "").expect("OUT_DIR can be written");
        folder
    }

    /// A C++ file that includes what a kernel file uses, and the kernel file.
    fn wrapper(out: &Path, kernels: &Path, kernel: &Path, dialect: &str) -> PathBuf {
        let blocks = files(&kernels.join("blocks"), "h");
        let mut text = format!("#include \"{}\"\n", kernels.join(dialect).display());
        for path in blocks.iter().map(PathBuf::as_path).chain([kernel]) {
            text += &format!("#include \"{}\"\n", path.display());
        }
        let name = kernel.file_stem().expect("a file").to_string_lossy();
        let dialect = Path::new(dialect).file_stem().expect("a file");
        let path = out.join(format!("{name}.{}.cpp", dialect.to_string_lossy()));
        fs::write(&path, text).expect("OUT_DIR can be written");
        path
    }

    /// Adds what registers a file's kernels to it: Metal's words have no place for that.
    fn register(path: &Path, kernel: &Path, table: &str) {
        let file = kernel.file_stem().expect("a file").to_string_lossy();
        let mut text = fs::read_to_string(path).expect("a file that was written");
        for line in table.lines() {
            let mut fields = line.split(' ');
            let (name, of, threads) = (fields.next(), fields.next(), fields.next());
            if let (Some(name), Some(of), Some(threads)) = (name, of, threads)
                && of == file
            {
                text += &format!(
                    "static const sim::RegisteredMetal {name}_registered(\"{name}\", \"{path}\", \
                     {threads}, {name});\n",
                    path = kernel.display()
                );
            }
        }
        fs::write(path, text).expect("OUT_DIR can be written");
    }
}
