//! Flags of llama.cpp with one dash and several letters, which stand for flags of this program, and
//! those that there is nothing to choose for.
//!
//! Invariant: only arguments that are exactly such a flag are translated, and none after `--`.
//! Knows nothing of what flags mean.

use std::ffi::OsString;

use crate::failure::warn;

/// Flags of llama.cpp, and the same in this program.
const FLAGS: [(&str, &str); 7] = [
    ("-sys", "--system"),
    ("-ngl", "--gpu-layers"),
    ("-ub", "--ubatch"),
    ("-ctk", "--kv-type-k"),
    ("-ctv", "--kv-type-v"),
    ("-hf", "--model"),
    ("--hf-repo", "--model"),
];

/// The arguments with this program's flags. Warns of those without effect.
pub(crate) fn translate(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut are_flags = true;
    let translated = args.into_iter().filter_map(|arg| {
        are_flags &= arg != "--";
        if are_flags && arg == "--no-mmap" {
            warn(
                "--no-mmap has no effect: model files are always mapped, and the pages of weights that \
                 --repack copies are given back",
            );
            return None;
        }
        let known = FLAGS.iter().find(|(theirs, _)| are_flags && arg == *theirs);
        Some(known.map_or(arg, |(_, ours)| OsString::from(ours)))
    });
    translated.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_flags_before_the_dashes_are_translated() {
        let args = [
            "cellar", "run", "-sys", "Hi", "-ngl", "0", "-ngl=1", "--", "-sys",
        ];
        let wanted = [
            "cellar",
            "run",
            "--system",
            "Hi",
            "--gpu-layers",
            "0",
            "-ngl=1",
            "--",
            "-sys",
        ];
        assert_eq!(
            translate(args.map(OsString::from)),
            wanted.map(OsString::from)
        );
    }
}
