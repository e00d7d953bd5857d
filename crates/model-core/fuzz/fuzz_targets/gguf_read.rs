//! Any bytes as a GGUF file: an error or a model all of whose weights can be taken, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model_core::gguf::GgufFile;

/// Weights beyond this many values are taken but not decoded, to keep runs short.
const DECODED: usize = 1 << 16;

fuzz_target!(|data: &[u8]| {
    let Ok(file) = GgufFile::from_bytes(data.to_vec().into()) else {
        return;
    };
    for (key, value) in file.metadata().iter() {
        let _ = file.metadata().per_layer::<u32>(key, 4);
        let _ = file.metadata().get::<f32>(key);
        let _ = file.metadata().get::<&str>(key);
        let _ = value.to_string();
    }
    for tensor in file.tensors() {
        match file.weight(tensor.name()) {
            Ok(weight) => {
                assert_eq!(Some(weight.bytes().len() as u64), tensor.n_bytes());
                if tensor.n_values() <= DECODED as u64 {
                    assert_eq!(weight.to_f32().len() as u64, tensor.n_values());
                }
            }
            Err(error) => assert!(tensor.stored().format().is_none(), "{error}"),
        }
    }
});
