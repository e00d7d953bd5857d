//! The kernels as data, for devices that compile them at run time: their table and their sources.
//!
//! Invariant: `kernels/TABLE` is what the simulator has compiled; a test compares them. `build.rs`
//! lists the files of `kernels/`. Knows no device.

use std::fmt::Write;
use std::sync::OnceLock;

use kv_core::backend::BackendError;

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
}

impl KernelSource {
    fn push(&mut self, (name, text): (&'static str, &str)) {
        self.files.push((name, self.text.lines().count() + 1));
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
        (line <= self.text.lines().count()).then(|| (file, line + 1 - first))
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
    let is_it = |(name, _): &&(&str, &str)| name.strip_suffix(".k") == Some(file);
    let kernels = KERNELS.iter().find(is_it)?;
    let dialect = (
        "dialect/metal.h",
        include_str!("../kernels/dialect/metal.h"),
    );
    let mut source = KernelSource::default();
    for &part in [dialect].iter().chain(BLOCKS).chain([kernels]) {
        source.push(part);
    }
    Some(source)
}

// The files of `kernels/blocks`, which all kernels share, and those of the kernels: `BLOCKS` and
// `KERNELS`, each by name.
include!(concat!(env!("OUT_DIR"), "/sources.rs"));
