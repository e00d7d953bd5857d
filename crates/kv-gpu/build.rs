//! Compiles the kernels for the simulator, with the feature `sim`; otherwise does nothing.
//!
//! Each kernel file becomes an object of its own, as C++ in the dialect `cpu.h`.

#![allow(clippy::expect_used)] // a panic is how a build script fails

fn main() {
    println!("cargo:rerun-if-changed=kernels");
    #[cfg(feature = "sim")]
    sim::compile();
}

#[cfg(feature = "sim")]
mod sim {
    use std::path::{Path, PathBuf};
    use std::{env, fs};

    pub(crate) fn compile() {
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let kernels = env::current_dir().expect("a folder").join("kernels");
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .std("c++17")
            .opt_level(1)
            .debug(false)
            .warnings(false)
            // Products are fused with sums where a kernel says so, as on the device.
            .flag("-ffp-contract=off")
            .flag("-fno-strict-aliasing")
            // Its longjmp refuses to change stacks.
            .flag("-U_FORTIFY_SOURCE")
            .link_lib_modifier("+whole-archive")
            .file(kernels.join("sim/fibers.cpp"));
        let checks = kernels.join("sim/checks.k");
        for kernel in kernel_files(&kernels).into_iter().chain([checks]) {
            build.file(wrapper(&out, &kernels, &kernel));
        }
        build.compile("cellar_kernels");
    }

    fn kernel_files(kernels: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(kernels).expect("the folder of kernels");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        let mut files: Vec<PathBuf> = paths
            .filter(|path| path.extension().is_some_and(|e| e == "k"))
            .collect();
        files.sort();
        files
    }

    /// A C++ file that includes what a kernel file uses, and the kernel file.
    fn wrapper(out: &Path, kernels: &Path, kernel: &Path) -> PathBuf {
        let mut blocks: Vec<PathBuf> = fs::read_dir(kernels.join("blocks"))
            .expect("the folder of block formats")
            .map(|entry| entry.expect("an entry").path())
            .filter(|path| path.extension().is_some_and(|e| e == "h"))
            .collect();
        blocks.sort();
        let mut text = format!("#include \"{}\"\n", kernels.join("dialect/cpu.h").display());
        for path in blocks.iter().map(PathBuf::as_path).chain([kernel]) {
            text += &format!("#include \"{}\"\n", path.display());
        }
        let name = kernel.file_stem().expect("a file").to_string_lossy();
        let path = out.join(format!("{name}.cpp"));
        fs::write(&path, text).expect("OUT_DIR can be written");
        path
    }
}
