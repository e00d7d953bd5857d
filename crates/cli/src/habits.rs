//! Flags of llama.cpp with one dash and several letters, which stand for flags of this program.
//!
//! Invariant: only arguments that are exactly such a flag are translated, and none after `--`.
//! Knows nothing of what flags mean.

use std::ffi::OsString;

/// Flags of llama.cpp, and the same in this program.
const FLAGS: [(&str, &str); 5] = [
    ("-sys", "--system"),
    ("-ngl", "--gpu-layers"),
    ("-ub", "--ubatch"),
    ("-ctk", "--kv-type-k"),
    ("-ctv", "--kv-type-v"),
];

/// The arguments with this program's flags.
pub(crate) fn translate(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut are_flags = true;
    let translated = args.into_iter().map(|arg| {
        are_flags &= arg != "--";
        let known = FLAGS.iter().find(|(theirs, _)| are_flags && arg == *theirs);
        known.map_or(arg, |(_, ours)| OsString::from(ours))
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
