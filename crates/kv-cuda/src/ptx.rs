//! PTX as text: which kernels it has, the size of their thread blocks, and their parameters.
//!
//! A text may be several files, one after the other. Invariant: [`Ptx::module`] has one kernel and
//! what is outside of all kernels in its file, without tables that it does not name, so that the
//! driver compiles only what is used.
//! Understands as much of PTX as nvcc writes for the kernels of kv-gpu.

use std::collections::BTreeMap;

/// The kernels of a text.
#[derive(Debug, Default)]
pub(crate) struct Ptx {
    /// Of each file, what is outside of its kernels.
    files: Vec<String>,
    kernels: BTreeMap<String, Entry>,
}

/// A kernel.
#[derive(Debug)]
struct Entry {
    file: usize,
    text: String,
    signature: Signature,
}

/// The way a kernel is launched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Signature {
    /// The size of its thread blocks.
    pub(crate) n_threads: u32,
    /// Its parameters.
    pub(crate) parameters: Vec<Parameter>,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parameter {
    /// An address.
    Buffer,
    /// So many bytes by value.
    Settings(usize),
}

impl Ptx {
    /// Adds the kernels of a text; those that are there already are replaced.
    ///
    /// # Errors
    /// With the line that is not understood.
    pub(crate) fn add(&mut self, text: &str) -> Result<(), String> {
        let mut open: Option<(String, Entry)> = None;
        for line in text.lines() {
            if let Some((name, mut entry)) = open.take() {
                entry.text.push_str(line);
                entry.text.push('\n');
                entry.signature.read(line)?;
                match line {
                    "}" => drop(self.kernels.insert(name, entry)),
                    _ => open = Some((name, entry)),
                }
                continue;
            }
            if line.starts_with(".version") {
                self.files.push(String::new());
            }
            if let Some((_, rest)) = line.split_once(".entry ") {
                let name = rest.split('(').next().unwrap_or(rest).trim().to_owned();
                let entry = Entry {
                    file: self.files.len().saturating_sub(1),
                    text: format!("{line}\n"),
                    signature: Signature::default(),
                };
                open = Some((name, entry));
            } else if let Some(file) = self.files.last_mut() {
                file.push_str(line);
                file.push('\n');
            }
        }
        match open {
            Some((name, _)) => Err(format!("kernel '{name}' has no end")),
            None => Ok(()),
        }
    }

    /// The names of all kernels.
    #[cfg(test)]
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// A kernel as a module of its own, and how it is launched.
    pub(crate) fn module(&self, name: &str) -> Option<(String, Signature)> {
        let entry = self.kernels.get(name)?;
        let file = self.files.get(entry.file)?;
        // A table that nothing else names would take memory of the device for nothing.
        let is_used = |line: &&str| {
            table_name(line).is_none_or(|table| {
                entry.text.contains(table) || file.matches(table).nth(1).is_some()
            })
        };
        let mut text: String = file
            .lines()
            .filter(is_used)
            .flat_map(|line| [line, "\n"])
            .collect();
        text.push_str(&entry.text);
        Some((text, entry.signature.clone()))
    }

    /// A module with no kernel, to see whether the driver takes the version and target.
    pub(crate) fn header(&self) -> String {
        let first = self.files.first().map_or("", String::as_str);
        let directives = [".version", ".target", ".address_size"];
        let lines = first.lines();
        let lines = lines.filter(|line| directives.iter().any(|d| line.starts_with(d)));
        lines.flat_map(|line| [line, "\n"]).collect()
    }
}

/// The name of the table of constants that a line declares, where it declares one.
fn table_name(line: &str) -> Option<&str> {
    let (declared, _) = line.strip_prefix(".global ")?.split_once('[')?;
    declared.split(' ').next_back()
}

impl Signature {
    /// Takes what a line of a kernel says of it.
    fn read(&mut self, line: &str) -> Result<(), String> {
        let not_understood = || format!("'{}' is not understood", line.trim());
        let words = line.trim().trim_end_matches(',');
        if let Some(parameter) = words.strip_prefix(".param ") {
            let is_address = parameter.split(' ').any(|word| word == ".u64");
            let bytes = parameter.rsplit_once('[').map(|(_, n)| n);
            self.parameters.push(match (is_address, bytes) {
                (true, None) => Parameter::Buffer,
                (false, Some(n)) if parameter.contains(".b8 ") => {
                    let n = n.trim_end_matches(']').parse();
                    Parameter::Settings(n.map_err(|_| not_understood())?)
                }
                _ => return Err(not_understood()),
            });
        } else if let Some(n) = words.strip_prefix(".maxntid ") {
            let n = n.split(',').next().unwrap_or(n).trim();
            self.n_threads = n.parse().map_err(|_| not_understood())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "// hash
.version 7.0
.target sm_80
.address_size 64
.global .align 4 .b8 table[4] = {1, 2, 3, 4};
.visible .entry first(
\t.param .u64 .ptr .align 1 first_param_0,
\t.param .align 4 .b8 first_param_1[12]
)
.maxntid 128, 1, 1
{
\tmov.u64 \t%rd1, table;
\tret;
}
.visible .entry second(
\t.param .u64 second_param_0
)
.maxntid 32
{
\t{
\t}
\tret;
}
.version 7.8
.target sm_90a
.visible .entry third()
.maxntid 64
{
\tret;
}
";

    #[test]
    fn a_module_has_one_kernel_and_what_is_outside_of_kernels() {
        let mut ptx = Ptx::default();
        ptx.add(TEXT).unwrap();
        assert_eq!(
            ptx.names().collect::<Vec<_>>(),
            ["first", "second", "third"]
        );
        let (text, first) = ptx.module("first").unwrap();
        assert!(text.starts_with(".version 7.0\n") && text.ends_with("\tret;\n}\n"));
        assert!(text.contains("table") && !text.contains("second") && !text.contains("7.8"));
        let wanted = Signature {
            n_threads: 128,
            parameters: vec![Parameter::Buffer, Parameter::Settings(12)],
        };
        assert_eq!(first, wanted);
        let (text, second) = ptx.module("second").unwrap();
        assert!(text.ends_with("\t{\n\t}\n\tret;\n}\n") && !text.contains("table"));
        assert_eq!(
            (second.n_threads, second.parameters),
            (32, vec![Parameter::Buffer])
        );
        let (text, third) = ptx.module("third").unwrap();
        assert_eq!((third.n_threads, third.parameters.len()), (64, 0));
        assert!(text.starts_with(".version 7.8\n.target sm_90a\n"));
        assert_eq!(
            ptx.header(),
            ".version 7.0\n.target sm_80\n.address_size 64\n"
        );
        assert!(ptx.module("fourth").is_none());
    }

    #[test]
    fn a_later_text_replaces_kernels_and_a_broken_one_is_refused() {
        let mut ptx = Ptx::default();
        ptx.add(TEXT).unwrap();
        ptx.add(&TEXT.replace(".maxntid 64", ".maxntid 256"))
            .unwrap();
        assert_eq!(ptx.module("third").unwrap().1.n_threads, 256);
        let cut = &TEXT[..TEXT.len() - 3];
        let error = Ptx::default().add(cut).unwrap_err();
        assert_eq!(error, "kernel 'third' has no end");
        let odd = TEXT.replace(".param .u64 second", ".param .f32 second");
        let error = Ptx::default().add(&odd).unwrap_err();
        assert_eq!(error, "'.param .f32 second_param_0' is not understood");
    }
}
