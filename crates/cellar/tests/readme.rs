//! The README's program is an example of this crate, which the compiler has seen.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[test]
fn the_readme_shows_the_example() {
    let root = env!("CARGO_MANIFEST_DIR");
    let read = |path: &str| std::fs::read_to_string(format!("{root}/{path}")).unwrap();
    let (readme, example) = (read("../../README.md"), read("examples/text.rs"));
    let shown = readme.split("```rust,no_run\n").nth(1).unwrap();
    let shown = shown.split("```").next().unwrap();
    let (_purpose, program) = example.split_once("\n\n").unwrap();
    assert_eq!(shown, program);
}
