//! Gives the shared library the name under which programs look for llama.cpp's.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let os = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    match os.as_str() {
        "linux" => println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libllama.so.0"),
        "macos" => {
            println!("cargo::rustc-cdylib-link-arg=-Wl,-install_name,@rpath/libllama.0.dylib");
        }
        _ => {}
    }
}
