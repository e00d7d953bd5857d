//! The kernels as data, for devices that compile them at run time: their table and their sources.
//!
//! Invariant: `kernels/TABLE` is what the simulator has compiled; a test compares them. `build.rs`
//! lists the files of `kernels/`. Knows no device.

use std::fmt::Write;
use std::sync::OnceLock;

use kv_backend::BackendError;

/// The facts of a kernel for its launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// Its name.
    pub name: &'static str,
    /// The file of `kernels/` that it is in, without `.k`.
    pub file: &'static str,
    /// Threads of a thread block.
    pub n_threads: u32,
    /// Buffers, which are its first arguments.
    pub n_buffers: usize,
    /// Bytes of its settings, which are its last argument.
    pub settings_bytes: usize,
}

const TABLE: &str = include_str!("../kernels/TABLE");

/// The kernel of this name.
pub fn kernel_info(name: &str) -> Option<KernelInfo> {
    kernel_infos()
        .iter()
        .find(|info| info.name == name)
        .copied()
}

/// All kernels.
pub fn kernel_infos() -> &'static [KernelInfo] {
    static PARSED: OnceLock<Vec<KernelInfo>> = OnceLock::new();
    PARSED.get_or_init(|| TABLE.lines().filter_map(parse).collect())
}

/// A number of values or rows as kernels take it.
///
/// # Errors
/// [`BackendError::Input`] where it has more than 32 bits.
pub(crate) fn word(n: usize) -> Result<u32, BackendError> {
    u32::try_from(n).map_err(|_| BackendError::Input {
        input: "graph",
        reason: format!("{n} values are more than a kernel can count"),
    })
}

/// Checks that kernels can number a value's elements, in whole thread blocks, by 32 bits.
///
/// # Errors
/// [`BackendError::Input`] where there are more.
pub(crate) fn check_len(n_values: usize, node: &str) -> Result<(), BackendError> {
    const MOST: usize = u32::MAX as usize - 1024;
    if n_values <= MOST {
        return Ok(());
    }
    Err(BackendError::Input {
        input: "graph",
        reason: format!(
            "node '{node}' has {n_values} values, and a kernel counts up to {MOST}; fewer tokens at a \
             time have fewer"
        ),
    })
}

fn parse(line: &'static str) -> Option<KernelInfo> {
    let mut fields = line.split(' ');
    Some(KernelInfo {
        name: fields.next()?,
        file: fields.next()?,
        n_threads: fields.next()?.parse().ok()?,
        n_buffers: fields.next()?.parse().ok()?,
        settings_bytes: fields.next()?.parse().ok()?,
    })
}

/// Files put together, which one compilation takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelSource {
    /// The text.
    pub text: String,
    /// The files in it, each with its first line in the text, counted from 1.
    files: Vec<(&'static str, usize)>,
    n_lines: usize,
}

impl KernelSource {
    fn push(&mut self, (name, text): (&'static str, &str)) {
        self.files.push((name, self.n_lines + 1));
        self.n_lines += text.lines().count();
        self.text += text;
        if !self.text.ends_with('\n') {
            self.text.push('\n');
        }
    }

    /// The files in it, in order.
    pub fn files(&self) -> Vec<&'static str> {
        self.files.iter().map(|&(name, _)| name).collect()
    }

    /// The origin of a line of the text: its file, and its number there, counted from 1.
    pub fn place(&self, line: usize) -> Option<(&'static str, usize)> {
        let mut files = self.files.iter().rev();
        let &(file, first) = files.find(|&&(_, first)| first <= line)?;
        (line <= self.n_lines).then(|| (file, line + 1 - first))
    }

    /// A compiler's messages with the places of the files: `prefix` is what the compiler calls the
    /// text, as in `program_source:12:3: error: …`.
    pub fn explain(&self, prefix: &str, messages: &str) -> String {
        let mut explained = String::new();
        for line in messages.lines() {
            let place = line.strip_prefix(prefix).and_then(|rest| {
                let (number, rest) = rest.strip_prefix(':')?.split_once(':')?;
                Some((self.place(number.parse().ok()?)?, rest))
            });
            // Writing to a string cannot fail.
            let _ = match place {
                Some(((file, line), rest)) => writeln!(explained, "{file}:{line}:{rest}"),
                None => writeln!(explained, "{line}"),
            };
        }
        explained
    }
}

/// The kernels of a file, by its name without `.k`, as Metal: what they need comes first.
pub fn metal_source(file: &str) -> Option<KernelSource> {
    let dialect = (
        "dialect/metal.h",
        include_str!("../kernels/dialect/metal.h"),
    );
    source(dialect, file, str::to_owned)
}

/// A kernel as C++ for OpenCL: what it needs comes first. The other kernels of its file are left
/// out, since a driver takes seconds for some of them.
pub fn opencl_source(info: KernelInfo) -> Option<KernelSource> {
    let dialect = (
        "dialect/opencl.h",
        include_str!("../kernels/dialect/opencl.h"),
    );
    source(dialect, info.file, |text| only_kernel(info.name, text))
}

fn source(
    dialect: (&'static str, &str),
    file: &str,
    edit: impl Fn(&str) -> String,
) -> Option<KernelSource> {
    let is_it = |(name, _): &&(&str, &str)| name.strip_suffix(".k") == Some(file);
    let &(name, text) = KERNELS.iter().find(is_it)?;
    let mut source = KernelSource::default();
    source.push(dialect);
    for &part in BLOCKS {
        source.push(part);
    }
    source.push((name, &edit(text)));
    Some(source)
}

/// A file's text with empty lines in place of all kernels but one.
fn only_kernel(wanted: &str, text: &str) -> String {
    let (mut only, mut is_left_out) = (String::new(), false);
    for line in text.lines() {
        // A kernel begins a line with `KERNEL(name, ` and ends with a brace there, or is a line
        // that names it in another macro's parentheses.
        if let Some((word, rest)) = line.split_once('(')
            && !word.is_empty()
            && word.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
        {
            let mut names = rest.split([',', '(', ')', ' ']);
            is_left_out = !names.any(|name| name == wanted);
            if is_left_out && word != "KERNEL" {
                is_left_out = false;
                only.push('\n');
                continue;
            }
        }
        if !is_left_out {
            only += line;
        }
        only.push('\n');
        is_left_out &= line != "}";
    }
    only
}

// The files of `kernels/blocks`, which all kernels share, and those of the kernels: `BLOCKS` and
// `KERNELS`, each by name.
include!(concat!(env!("OUT_DIR"), "/sources.rs"));
